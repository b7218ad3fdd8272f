"""An experiment as a file: base, settings, seeds, evaluation."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from loopinterp.core.errors import ConfigError, InputError, check_choice
from loopinterp.core.settings import Seed, Settings, settings
from loopinterp.core.storage import check_file_name, read_json_object
from loopinterp.tasks.sampling import check_size, pick_distribution
from loopinterp.training.config import Conflict, TrainingConfig, WithConflicts
from loopinterp.training.recipes import Line, apply_settings, get_recipe

if TYPE_CHECKING:
    from loopinterp.tasks.task import Task

_Measure = Literal["exact_match", "bit_accuracy", "perplexity"]
_Along = Literal["length", "extra_loop", "loop"]
_Changes = tuple[str, ...]


@settings
class SweepEvaluation(Settings):
    """The evaluation of each model: arguments of :func:`~loopinterp.training.evaluate`."""

    lengths: Annotated[tuple[PositiveInt, ...], Field(min_length=1)]
    distributions: Annotated[tuple[str, ...], Field(min_length=1)] | None = None
    extra_loops: Annotated[tuple[int, ...], Field(min_length=1)] = (0,)
    loops: tuple[NonNegativeInt, ...] = ()
    samples: PositiveInt = 300
    seed: Seed = 0

    def coords(self, task: Task) -> dict[str, list[Any]]:
        """The result's axes with their coordinates."""
        names = task.distributions if self.distributions is None else self.distributions
        check_size(task, max(self.lengths), self.samples, "evaluation.lengths, evaluation.samples")
        return {
            "extra_loop": sorted(set(self.extra_loops)),
            "distribution": [pick_distribution(task, name) for name in dict.fromkeys(names)],
            "length": sorted(set(self.lengths)),
            **({"loop": sorted(set(self.loops))} if self.loops else {}),
        }


@settings
class SweepScale(Settings):
    """Changes of a sweep for one size of machine; ``about`` describes it in a line.

    ``set`` adds changes of the base; seeds and evaluation replace the file's own.
    """

    about: Line
    set: _Changes = ()
    seeds: Annotated[tuple[Seed, ...], Field(min_length=1)] | None = None
    evaluation: dict[str, Any] = field(default_factory=dict)


@settings
class Sweep(WithConflicts):
    """Seeds times settings, their evaluation, and the figures.

    Changes are ``KEY=VALUE``, as in ``loopinterp train --set``.

    Attributes:
        recipe: Name of the recipe that is the base.
        config: The base, if not a recipe's.
        set: Changes of the base, for all settings.
        settings: Changes by name of the setting.
        grid: Instead of ``settings``: all combinations of the values of some keys.
        show: The figures: each measure, and the axis along which it is drawn.
        scales: Changes by size of machine, ``laptop`` or ``paper``.

    Raises:
        ConfigError: If a value is wrong. A single invalid setting fails only when it is run.

    Example:
        >>> sweep = Sweep(
        ...     about="Does noise help?",
        ...     recipe="addition",
        ...     grid={"state_noise": (0, 0.3), "objective.hold_loops": (0, 12)},
        ...     seeds=(0, 1, 2),
        ...     evaluation=SweepEvaluation(lengths=(12, 24)),
        ... )
        >>> list(sweep.changes)[:2]
        ['state_noise=0, hold_loops=0', 'state_noise=0, hold_loops=12']
        >>> sweep.config_of("state_noise=0, hold_loops=12", seed=2).state_noise
        0.0
    """

    about: Line
    seeds: Annotated[tuple[Seed, ...], Field(min_length=1)]
    evaluation: SweepEvaluation
    recipe: str | None = None
    config: TrainingConfig | None = None
    set: _Changes = ()
    settings: dict[str, _Changes] = field(default_factory=dict)
    grid: dict[str, Annotated[tuple[Any, ...], Field(min_length=1)]] = field(default_factory=dict)
    show: dict[_Measure, _Along] = field(default_factory=lambda: {"exact_match": "length"})
    scales: dict[Literal["laptop", "paper"], SweepScale] = field(default_factory=dict)

    def _conflicts(self) -> Iterator[Conflict]:
        for one, other in (("recipe", "config"), ("settings", "grid")):
            if getattr(self, one) and getattr(self, other):
                yield Conflict(one, f"it or {other}", f"Leave {one} or {other} out.", "both")
        if len({*self.seeds}) < len(self.seeds):
            yield Conflict("seeds", "each seed once", "Name each seed once.")
        for name, changes in {"set": self.set, **self.changes}.items():
            check_file_name(name, "name of a setting", ConfigError)  # each has a folder
            for change in changes:
                if change.partition("=")[0].strip() == "seed":
                    yield Conflict(name, "no seed", "Name the seeds in seeds.", change)
        # What is shown along an axis has to be measured along it.
        loops = {"loop": self.evaluation.loops, "extra_loop": self.evaluation.extra_loops[1:]}
        for measure, along in self.show.items():
            option = "extra_loops" if along == "extra_loop" else "loops"
            if not loops.get(along, True) or (measure, along) == ("bit_accuracy", "loop"):
                fix = f"Set evaluation.{option}, or show exact_match along it, or use length."
                expected = "an axis that it is measured along"
                yield Conflict(f"show.{measure}", expected, fix, repr(along))
        self.evaluation.coords(self.base.make_task())
        for scale in self.scales:  # each is a valid sweep of its own
            self.at(scale)

    @classmethod
    def read(cls, path: str | Path) -> Sweep:
        """A sweep from its JSON file."""
        return cls.from_dict(read_json_object(path))

    def at(self, scale: str | None = None) -> Sweep:
        """The sweep at one scale only (``laptop`` if None)."""
        if scale is None and not self.scales:
            return self
        chosen = self.scales[check_choice("scale", scale or "laptop", self.scales)]  # type: ignore[index]
        evaluation = self.evaluation.to_dict() | chosen.evaluation  # by name
        return self.replace(
            set=(*self.set, *chosen.set),
            seeds=chosen.seeds or self.seeds,
            evaluation=SweepEvaluation.from_dict(evaluation),
            scales={},
        )

    @property
    def base(self) -> TrainingConfig:
        """The configuration that the settings change."""
        start = self.config
        if start is None:
            if self.recipe is None:
                fix = "Name a recipe (`loopinterp recipes` lists them)."
                raise ConfigError("recipe", expected="it or config", given="neither", fix=fix)
            start = get_recipe(self.recipe).config
        return apply_settings(start, self.set)

    @property
    def changes(self) -> Mapping[str, _Changes]:
        """The changes of each setting."""
        if not self.grid:
            return self.settings or {"base": ()}  # which changes nothing but the seed
        last = {key: key.split(".")[-1] for key in self.grid}
        # The last part of a key is enough, where no other ends so.
        short = {k: k if [*last.values()].count(last[k]) > 1 else last[k] for k in self.grid}
        texts = [[_text(value) for value in values] for values in self.grid.values()]
        return {
            ", ".join(f"{short[key]}={text}" for key, text in zip(self.grid, values)): tuple(
                f"{key}={text}" for key, text in zip(self.grid, values)
            )
            for values in itertools.product(*texts)
        }

    def config_of(self, setting: str, seed: int) -> TrainingConfig:
        """The configuration of one setting and seed; raise if invalid."""
        changes = self.changes[check_choice("setting", setting, self.changes)]
        return apply_settings(self.base, [*changes, f"seed={seed}"])

    def pick(self, only: Sequence[str]) -> list[str]:
        return [check_choice("setting", name, self.changes) for name in only] or [*self.changes]


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value, allow_nan=False)
    except ValueError as error:
        raise InputError("grid", expected="JSON", given=repr(value), fix="Change it.") from error
