"""Configurations of runs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import field
from operator import attrgetter
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from pydantic import (
    Discriminator,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Tag,
)

from loopinterp.adapters.architectures import AdaptedModelConfig
from loopinterp.core.errors import MOST_THREADS, ConfigError, InputError, check_choice, need
from loopinterp.core.settings import OnlyWith, Seed, Settings, option, settings
from loopinterp.models.config import LoopedTransformerConfig
from loopinterp.models.protocol import need_causal
from loopinterp.tasks.sampling import check_size
from loopinterp.tasks.task import digest_file, task_files
from loopinterp.tasks.token_by_token import TokenByToken

if TYPE_CHECKING:
    from typing_extensions import Self

    from loopinterp.tasks.task import Task


class Conflict(NamedTuple):
    name: str
    expected: str
    fix: str
    given: str | None = None


class WithConflicts(Settings):
    """Settings that may conflict; the first conflict is raised."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, expected, fix, got in self._conflicts():
            value = repr(attrgetter(name)(self)) if got is None else got
            raise ConfigError(name, expected=expected, given=value, fix=fix)

    def _conflicts(self) -> Iterator[Conflict]:
        yield from ()


def _kind_of_model(value: Any) -> str:
    adapted = isinstance(value, AdaptedModelConfig) or (
        isinstance(value, Mapping) and "architecture" in value
    )
    return option(1 if adapted else 0)


# That of an adapted model has an architecture.
_AnyModelConfig = Annotated[
    Annotated[LoopedTransformerConfig, Tag(option(0))]
    | Annotated[AdaptedModelConfig, Tag(option(1))],
    Discriminator(_kind_of_model),
]


@settings
class _ModelAndTask(WithConflicts):
    """A model's architecture and task.

    Attributes:
        task: Name of a registered task, with its ``task_settings``.
        distribution: Input distribution of examples; the task's first if None.
        data_sha256: By setting, SHA-256 of each file that the task reads.
    """

    task: str
    model: _AnyModelConfig
    task_settings: dict[str, Any] = field(default_factory=dict)
    distribution: str | None = None
    data_sha256: dict[str, str] = field(default_factory=dict)

    def _conflicts(self) -> Iterator[Conflict]:
        task = self.make_task()
        if self.distribution is not None:
            known = task.distributions
            check_choice("distribution", self.distribution, known, error=ConfigError)
        # The model reads and answers in the task's tokens or features.
        for name in ("d_vocab", "d_features", "d_vocab_out"):
            size, name = getattr(task, name), f"model.{name}"
            if size != attrgetter(name)(self):
                fix = f"Set {name}={'none' if size is None else size}."
                yield Conflict(name, f"{size}, as task {self.task!r} has it", fix)
        if isinstance(task, TokenByToken):  # whose answers stand in the input
            need_causal(self.model, error=ConfigError)

    def make_task(self) -> Task:
        from loopinterp.tasks import get_task

        return get_task(self.task, **self.task_settings)

    def with_data(self) -> Self:
        """The same with absolute paths of the task's files, and their SHA-256."""
        files = task_files(self.make_task())
        paths = {name: str(path) for name, path in files.items()}
        return self.replace(
            task_settings=self.task_settings | paths,
            data_sha256={name: digest_file(path) for name, path in files.items()},
        )

    @property
    def has_same_data(self) -> bool:
        try:
            self.need_same_data()
        except InputError:
            return False
        return True

    def need_same_data(self) -> None:
        """Raise unless the task's files are those that the run began with."""
        files = task_files(self.make_task())
        for name, digest in self.data_sha256.items():
            same = name in files and digest_file(files[name]) == digest
            expected = f"the file that the run began with, of SHA-256 {digest[:12]}…"
            fix = "Put that file back, or train a new run on the new one."
            got = f"another content of {files.get(name)}"
            need(same, f"task_settings.{name}", expected, got, fix)


@settings
class GivenModelConfig(_ModelAndTask):
    """The configuration of a model that was put into a run's folder, untrained there.

    Attributes:
        max_n: Greatest problem length that it was made for.
        origin: Where it comes from; continues "The model was".
        depth: Its number of loops at any length (1 for an ordinary transformer); if None,
            ``ceil(loop_scale T(n)) + extra_loops``.
        weights_sha256: Digest of its weights; None in runs of earlier versions.
    """

    max_n: PositiveInt
    origin: str
    depth: PositiveInt | None = None
    loop_scale: Annotated[PositiveFloat, OnlyWith("depth", None)] = 1.0
    extra_loops: Annotated[int, OnlyWith("depth", None)] = 0
    weights_sha256: str | None = None


Share = Annotated[float, Field(ge=0, le=1)]
_BelowOne = Annotated[float, Field(ge=0, lt=1)]


@settings
class ObjectiveConfig(WithConflicts):
    """The loops that the loss is taken at.

    Attributes:
        kind: ``last`` (the last loop), ``step_dependent`` (each example at its T(n)),
            ``progressive`` (the last loop and a random one), ``every`` (all loops) or ``drawn`` (a
            random number each step, for unknown T(n)).
        n_loops: Loops to run, or the most that ``drawn`` draws; None: the batch's largest T(n).
        least_loops: The fewest loops that ``drawn`` draws.
        loop_scale: Factor of T(n), rounded up: ``loop_scale=2, extra_loops=3`` gives 2 T(n) + 3.
        extra_loops: Loops added to that, in training and in the run's model; at least one is left.
        hold_loops: ``step_dependent``: some examples are read again, up to this many loops after
            T(n), so that the answer has to be kept.
        hold_share: Their share.
        due_share: ``step_dependent``: share of the examples read again after a random number of
            loops in 1..T(n), for the answers due by then: an answer with k others after it is due k
            loops before T(n).
        alpha: ``progressive``: weight of the random loop.
        weights: ``every``: one weight for each of ``n_loops`` loops; all equal if None.
    """

    kind: Literal["last", "step_dependent", "progressive", "every", "drawn"] = "step_dependent"
    n_loops: Annotated[
        PositiveInt | None, OnlyWith("kind", "last", "progressive", "every", "drawn")
    ] = None
    least_loops: Annotated[PositiveInt, OnlyWith("kind", "drawn")] = 1
    loop_scale: Annotated[float, Field(gt=0, le=16), OnlyWith("n_loops", None)] = 1.0
    extra_loops: Annotated[int, Field(ge=-10, le=10), OnlyWith("n_loops", None)] = 0
    hold_loops: Annotated[NonNegativeInt, OnlyWith("kind", "step_dependent")] = 0
    hold_share: Share = 0.25
    due_share: Annotated[Share, OnlyWith("kind", "step_dependent")] = 0.0
    alpha: Annotated[Share, OnlyWith("kind", "progressive")] = 0.5
    weights: Annotated[tuple[NonNegativeFloat, ...] | None, OnlyWith("kind", "every")] = None

    def _conflicts(self) -> Iterator[Conflict]:
        if self.kind == "drawn" and self.least_loops > (self.n_loops or 0):
            expected = f"at least least_loops={self.least_loops} with kind=drawn"
            yield Conflict("n_loops", expected, "Set n_loops to the most loops that are drawn.")
        if self.hold_loops == 0 and self.hold_share != 0.25:
            fix = "Set hold_loops as well, or leave it out."
            yield Conflict("hold_share", "no hold_share with hold_loops=0", fix)
        if self.weights is not None and (
            self.n_loops != len(self.weights) or sum(self.weights) == 0
        ):
            expected = f"n_loops={self.n_loops} numbers, not all 0"
            yield Conflict("weights", expected, "Set n_loops, and give one weight for each loop.")


@settings
class CurriculumConfig(WithConflicts):
    """Problem lengths in training: n uniform in ``min_n .. M``, where M may grow.

    Attributes:
        kind: ``accuracy`` (M grows when the running accuracy passes ``threshold``), ``interval``
            (every ``interval`` steps; arXiv 2409.15647) or ``none`` (M is ``max_n`` throughout).
        max_n: Greatest length ever drawn: the training cutoff.
        start_n: M at the first step.
        min_steps: Least number of steps at each M (``accuracy``).
    """

    kind: Literal["accuracy", "interval", "none"] = "accuracy"
    max_n: PositiveInt = 12
    min_n: PositiveInt = 1
    start_n: Annotated[PositiveInt, OnlyWith("kind", "accuracy", "interval")] = 1
    threshold: Annotated[_BelowOne, OnlyWith("kind", "accuracy")] = 0.97
    min_steps: Annotated[PositiveInt, OnlyWith("kind", "accuracy")] = 30
    interval: Annotated[PositiveInt, OnlyWith("kind", "interval")] = 500

    def _conflicts(self) -> Iterator[Conflict]:
        if not self.min_n <= self.first_longest <= self.max_n:
            name, expected = "start_n", "min_n <= start_n <= max_n"
            if self.kind == "none":
                name, expected = "min_n", "min_n <= max_n"
            ends = f"min_n={self.min_n}, max_n={self.max_n}"
            yield Conflict(name, f"{expected}, with {ends}", "Order the lengths.")

    @property
    def first_longest(self) -> int:
        return self.max_n if self.kind == "none" else self.start_n


@settings
class CodeConfig(WithConflicts):
    """How the signs of a state code are hardened (:mod:`loopinterp.models.layers`).

    The share of hard signs is ``hard`` at first, grows linearly from the share ``harden_from`` of
    the steps on, and is 1 from ``harden_to`` on; the gain goes to 3, the noise to 0.

    Attributes:
        gain: Initial steepness of soft signs.
        noise: Initial standard deviation of the noise on soft signs.
        random_everywhere: Share of examples with random initial bits at every position, so that an
            answer cannot rely on the initial state.
        random_somewhere: The same at a tenth of the positions.
    """

    hard: Share = 0.0
    harden_from: Share = 0.45
    harden_to: Share = 0.75
    gain: PositiveFloat = 1.0
    noise: NonNegativeFloat = 0.3
    random_everywhere: Share = 0.0
    random_somewhere: Share = 0.0

    def _conflicts(self) -> Iterator[Conflict]:
        if self.harden_from > self.harden_to:
            expected = f"harden_from={self.harden_from} or more"
            yield Conflict("harden_to", expected, "Order the two.")
        if self.random_everywhere + self.random_somewhere > 1:
            expected = f"at most 1 with random_everywhere={self.random_everywhere}"
            yield Conflict("random_somewhere", expected, "Lower one of the two.")

    def hardness(self, progress: float) -> float:
        """Share of hard signs after a share of the steps."""
        span = self.harden_to - self.harden_from
        if progress >= self.harden_to:
            return 1.0
        return max(0.0, round((progress - self.harden_from) / span, 12)) if span else 0.0


@settings
class OptimiserConfig(Settings):
    """The optimiser and its schedule.

    Attributes:
        kind: ``adamw``, or ``muon`` for the matrices of attention and MLPs beside AdamW for all
            other weights (:class:`~loopinterp.training.muon.Muon`).
        lr: Peak learning rate of AdamW.
        matrix_lr: Peak learning rate of Muon.
        clip: Greatest norm of the gradient; None for no clipping.
        schedule: ``linear`` (down to 0 over the last ``decay`` share of the steps), ``cosine``
            (down to 0 from the end of the curriculum on) or ``constant``.
    """

    kind: Literal["adamw", "muon"] = "adamw"
    lr: PositiveFloat = 1e-3
    matrix_lr: Annotated[PositiveFloat, OnlyWith("kind", "muon")] = 1e-3
    betas: tuple[_BelowOne, _BelowOne] = (0.9, 0.99)
    eps: NonNegativeFloat = 1e-8
    weight_decay: NonNegativeFloat = 0.01
    clip: PositiveFloat | None = 1.0
    warmup_steps: NonNegativeInt = 100
    schedule: Literal["linear", "cosine", "constant"] = "linear"
    decay: Annotated[Share, OnlyWith("schedule", "linear")] = 0.2


@settings
class SnapshotConfig(Settings):
    """Steps after which the averaged weights are kept, for studies of training.

    Attributes:
        kind: ``none``, ``even`` (every ``every`` steps), ``log`` (1 and each next step ``ratio``
            times later) or ``listed`` (``steps``). ``even`` and ``log`` include the untrained model
            (step 0) and the last step.
    """

    kind: Literal["none", "even", "log", "listed"] = "none"
    every: Annotated[PositiveInt | None, OnlyWith("kind", "even", needed=True)] = None
    ratio: Annotated[float, Field(ge=1.1), OnlyWith("kind", "log")] = 2.0
    steps: Annotated[tuple[NonNegativeInt, ...], OnlyWith("kind", "listed", needed=True)] = ()

    def at(self, n_steps: int) -> tuple[int, ...]:
        """The steps of a run of ``n_steps``, in order.

        Example:
            >>> SnapshotConfig(kind="log").at(10), SnapshotConfig(kind="even", every=4).at(10)
            ((0, 1, 2, 4, 8, 10), (0, 4, 8, 10))
        """
        match self.kind:
            case "even":
                chosen = {*range(0, n_steps, self.every or 1), n_steps}
            case "log":
                powers = int(math.log(n_steps, self.ratio)) + 1
                chosen = {0, *(round(self.ratio**power) for power in range(powers)), n_steps}
            case _:
                chosen = {*self.steps}
        return tuple(sorted(chosen))


@settings
class TrainingConfig(_ModelAndTask):
    """Everything that decides a training run; equal configurations give equal numbers.

    Attributes:
        state_noise: Standard deviation of Gaussian noise on the state before each loop; it makes
            the model's states attractors.
        start_from: Folder of a run whose model training starts from, instead of random weights.
            From a larger state code, the bits that cost the least loss are dropped.
        start_sha256: SHA-256 of that model's weights; training writes it.
        offset_per_example: Whether each example, not each batch, draws its start of abacus
            positions.
        ema: Decay of the averaged weights that are evaluated and saved; 0 for none.
        log_every: Steps per line of metrics.
        device: ``auto`` is the GPU if there is one, decided when the run starts.
        precision: ``bf16`` is for autocast.
        threads: CPU threads while training; None keeps PyTorch's number.

    Example:
        >>> from loopinterp.training.recipes import RECIPES
        >>> config = RECIPES["addition"]
        >>> TrainingConfig.from_dict(config.to_dict()) == config
        True
    """

    model: LoopedTransformerConfig
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    curriculum: CurriculumConfig = field(default_factory=CurriculumConfig)
    optimiser: OptimiserConfig = field(default_factory=OptimiserConfig)
    steps: PositiveInt = 1000
    batch_size: PositiveInt = 64
    state_noise: NonNegativeFloat = 0.0
    code: CodeConfig = field(default_factory=CodeConfig)
    start_from: str | None = None
    start_sha256: str | None = None
    offset_per_example: bool = False
    ema: _BelowOne = 0.999
    seed: Seed = 0
    log_every: PositiveInt = 10
    checkpoint_every: PositiveInt = 100
    snapshots: SnapshotConfig = field(default_factory=SnapshotConfig)
    device: str = "auto"
    precision: Literal["fp32", "bf16"] = "fp32"
    compile: bool = False
    threads: Annotated[int, Field(ge=1, le=MOST_THREADS)] | None = 1

    def _conflicts(self) -> Iterator[Conflict]:
        yield from super()._conflicts()
        model = self.model
        if not self.device.startswith("cuda:"):  # the number of a card is looked up later
            check_choice("device", self.device, ("auto", "cpu", "cuda"), error=ConfigError)
        if (last := max(self.snapshots.at(self.steps), default=0)) > self.steps:
            expected = f"steps up to steps={self.steps}"
            yield Conflict("snapshots.steps", expected, "Leave later steps out.", str(last))
        if model.state_code is None and self.code != CodeConfig():
            fix = "Set model.state_code, or leave code out."
            yield Conflict("code", "its defaults without model.state_code", fix)
        if self.start_sha256 is not None and self.start_from is None:
            yield Conflict(
                "start_sha256", "none without start_from", "Leave it out: training writes it."
            )
        check_size(self.make_task(), self.curriculum.max_n, self.batch_size, "batch_size")
        if self.offset_per_example and model.positions != "abacus":
            expected = f"false with model.positions={model.positions}"
            yield Conflict("offset_per_example", expected, "Leave it out, or use abacus positions.")
        if self.compile and model.abacus_window is not None:
            fix = "Leave compile out, or set model.abacus_window to none."
            yield Conflict("compile", "false with model.abacus_window", fix)
        if self.compile and model.abacus_target != "input":
            fix = "Leave compile out, or use model.abacus_target=input."
            yield Conflict("compile", "false with abacus positions on queries and keys", fix)
        if self.compile and model.state_code:
            expected = "false with model.state_code, whose signs are drawn in every loop"
            yield Conflict("compile", expected, "Leave compile out.")
