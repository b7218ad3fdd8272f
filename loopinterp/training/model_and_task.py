"""A model's architecture with the task that it is asked: what every run's configuration has."""

from __future__ import annotations

from dataclasses import field
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import PositiveFloat, PositiveInt

from loopinterp.errors import ConfigError, InputError, check_choice
from loopinterp.models.model_config import LoopedTransformerConfig
from loopinterp.models.model_description import need_causal
from loopinterp.settings import OnlyWith, Settings, settings
from loopinterp.tasks.data_files import digest_file, task_files
from loopinterp.tasks.token_by_token import TokenByToken

if TYPE_CHECKING:
    from typing_extensions import Self

    from loopinterp.tasks.task import Task


@settings
class ModelAndTask(Settings):
    """What the configurations of all runs share.

    Attributes:
        task: Name of a registered task.
        model: Architecture.
        task_settings: The task's own settings.
        distribution: Input distribution that examples are drawn from; the task's first if None.
        data_sha256: SHA-256 of each file that the task draws from, by the setting that names it;
            a run keeps that of the file it began with.

    Raises:
        ConfigError: If a value is unknown or out of range, or the model does not fit the task.
    """

    task: str
    model: LoopedTransformerConfig
    task_settings: dict[str, Any] = field(default_factory=dict)
    distribution: str | None = None
    data_sha256: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        task = self.make_task()
        if self.distribution is not None:
            known = task.distributions
            check_choice("distribution", self.distribution, known, error=ConfigError)
        for name in ("d_vocab", "d_features", "d_vocab_out"):
            wanted, given = getattr(task, name), getattr(self.model, name)
            if wanted != given:
                raise ConfigError(
                    f"model.{name}",
                    expected=f"{wanted}, as task {self.task!r} has it",
                    given=repr(given),
                    fix=f"Set model.{name}={'none' if wanted is None else wanted}.",
                )

        if isinstance(task, TokenByToken):
            need_causal(self.model, error=ConfigError)

    def make_task(self) -> Task:
        """The task that the model is asked."""
        from loopinterp.tasks import get_task

        return get_task(self.task, **self.task_settings)

    def with_data(self) -> Self:
        """The same with the absolute paths of the task's files, and the SHA-256 of their content.

        Raises:
            InputError: If a file is missing.
        """
        files = task_files(self.make_task())
        paths = {name: str(path) for name, path in files.items()}
        return self.replace(
            task_settings=self.task_settings | paths,
            data_sha256={name: digest_file(path) for name, path in files.items()},
        )

    @property
    def has_same_data(self) -> bool:
        """Whether the task's files are there, with the content that the run began with."""
        files = task_files(self.make_task())
        return all(
            name in files and files[name].is_file() and digest_file(files[name]) == digest
            for name, digest in self.data_sha256.items()
        )

    def need_same_data(self) -> None:
        """Raise unless the task's files are there, with the content that the run began with.

        Raises:
            InputError: If one is missing or was replaced.
        """
        files = task_files(self.make_task())
        for name, digest in self.data_sha256.items():
            if name not in files or digest_file(files[name]) != digest:
                raise InputError(
                    f"task_settings.{name}",
                    expected=f"the file that the run began with, of SHA-256 {digest[:12]}…",
                    given=f"another content of {files.get(name)}",
                    fix="Put that file back where it was, or make another run of the new one.",
                )


@settings
class GivenModelConfig(ModelAndTask):
    """A model that was put into a run's folder, and not trained there.

    Attributes:
        max_n: Greatest problem length that it was made for.
        origin: Where it comes from, in words that go on after "The model was".
        depth: Loops that it makes whatever the length, as an ordinary transformer; T(n) if None.
        loop_scale: Without a depth: it answers after ``ceil(loop_scale T(n)) + extra_loops``.
        extra_loops: Loops more than that, or fewer where negative.
        weights_sha256: Digest of its weights; None in runs of earlier versions.
    """

    max_n: PositiveInt
    origin: str
    depth: PositiveInt | None = None
    loop_scale: Annotated[PositiveFloat, OnlyWith("depth", None)] = 1.0
    extra_loops: Annotated[int, OnlyWith("depth", None)] = 0
    weights_sha256: str | None = None
