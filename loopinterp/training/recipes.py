"""Configurations with measurements: one JSON file each in ``recipes/``."""

from __future__ import annotations

import difflib
import functools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Annotated, Any, NamedTuple

from pydantic import Field, PositiveFloat, PositiveInt

from loopinterp.core.errors import (
    ConfigError,
    UnknownKeyError,
    check_choice,
    unknown_name,
)
from loopinterp.core.settings import Seed, flatten_settings, settings
from loopinterp.core.storage import read_json_object
from loopinterp.core.text import say
from loopinterp.training.answer_scores import Lowest, lowest_of
from loopinterp.training.config import Conflict, Share, TrainingConfig, WithConflicts

_FOLDER = Path(__file__).with_suffix("")
_WELL = 0.9

Line = Annotated[str, Field(min_length=1, pattern=r"^\S[^\n]*$")]


@settings
class Measurement(WithConflicts):
    """The measured accuracy of models of a recipe.

    Attributes:
        samples: Least number of examples behind each share.
        exact_match: Share of fully right examples after T(n) loops, by input distribution and
            length, one for each seed; None if a seed was not measured.
        minutes: Time to train one seed.
    """

    seeds: tuple[Seed, ...]
    samples: PositiveInt
    exact_match: Mapping[str, Mapping[int, tuple[Share | None, ...]]]
    minutes: PositiveFloat
    on: Line

    def _conflicts(self) -> Iterator[Conflict]:
        if not (self.seeds and self.exact_match and all(self.exact_match.values())):
            expected, fix = "shares of one seed at least", "Measure the recipe first."
            yield Conflict("exact_match", expected, fix, given="none")
        for distribution, by_length in self.exact_match.items():
            for length, shares in by_length.items():
                measured = sum(share is not None for share in shares)
                if len(shares) != len(self.seeds) or not measured:
                    yield Conflict(
                        f"exact_match.{distribution}.{length}",
                        expected=f"one share for each of {len(self.seeds)} seeds",
                        fix="Measure the seeds that are missing.",
                        given=f"{len(shares)}, {measured} of them measured",
                    )

    @property
    def lengths(self) -> tuple[int, ...]:
        """Lengths at which all distributions were measured."""
        return tuple(sorted(set.intersection(*map(set, self.exact_match.values()))))

    def mean(self, distribution: str, n: int) -> _SeedMean:
        """Mean and standard error over the measured seeds."""
        known = [share for share in self.exact_match[distribution][n] if share is not None]
        error = stdev(known) / len(known) ** 0.5 if len(known) > 1 else float("nan")
        return _SeedMean(fmean(known), error, len(known))

    def lowest(self, n: int) -> Lowest:
        """The lowest mean over seeds at a length, and its distributions."""
        return lowest_of({name: self.mean(name, n).value for name in self.exact_match})

    def worst(self) -> dict[int, float]:
        """The share of :meth:`lowest` at each of :attr:`lengths`."""
        return {n: self.lowest(n).share for n in self.lengths}

    def reach(self) -> tuple[int, int | None]:
        """The length up to which :meth:`worst` is .9 or more (else 0), and the first below.

        One distribution under .9 is enough, even if others were not measured.

        Example:
            >>> shares = {"uniform": {12: (1.0,), 24: (0.95,), 30: (0.7,), 48: (0.9,)}}
            >>> Measurement(seeds=(0,), samples=9, exact_match=shares, minutes=1, on="x").reach()
            (24, 30)
        """
        well = 0  # the greatest length so far that all distributions pass
        for n in sorted(set().union(*self.exact_match.values())):
            measured = [name for name, shares in self.exact_match.items() if n in shares]
            if min(self.mean(name, n).value for name in measured) < _WELL:
                return well, n
            if len(measured) == len(self.exact_match):
                well = n
        return well, None


class _SeedMean(NamedTuple):
    """A mean over seeds with its standard error (NaN for one seed)."""

    value: float
    error: float
    n_seeds: int


@settings
class Recipe(WithConflicts):
    """A configuration to start from, with its measurements.

    Attributes:
        tried: Changes that were worse, in a line each.
    """

    about: Line
    config: TrainingConfig
    measured: Measurement
    tried: tuple[Line, ...] = ()

    def _conflicts(self) -> Iterator[Conflict]:
        name, fix = "measured.exact_match", "Measure there as well."
        known, measured = self.config.make_task().distributions, self.measured.exact_match
        for distribution in measured:
            check_choice("distribution", distribution, known, error=ConfigError)
        if left := [name for name in known if name not in measured]:
            # The lowest of them is what the recipe is worth.
            expected = f"all distributions of the task: {', '.join(known)}"
            yield Conflict(name, expected, fix, given=f"none of {', '.join(left)}")
        cutoff, lengths = self.config.curriculum.max_n, self.measured.lengths
        if cutoff not in lengths:
            got = ", ".join(map(str, lengths)) or "no length that all distributions have"
            yield Conflict(name, f"the training cutoff, {cutoff}, among the lengths", fix, got)

    @property
    def generalises(self) -> bool:
        """Whether :meth:`Measurement.worst` is at least .9 at 1.5 times the cutoff or beyond."""
        far = self.config.curriculum.max_n * 1.5
        return any(share >= _WELL for n, share in self.measured.worst().items() if n >= far)


@functools.cache
def list_recipes() -> tuple[str, ...]:
    """Names of the recipes."""
    return tuple(sorted(path.stem for path in _FOLDER.glob("*.json")))


@functools.cache
def get_recipe(name: str) -> Recipe:
    """A recipe by its name."""
    file = _FOLDER / f"{check_choice('recipe', name, list_recipes())}.json"
    try:
        return Recipe.from_dict(read_json_object(file))
    except ConfigError as error:
        raise error.renamed(f"{error.what} of {file.name}") from error


class _Configurations(Mapping[str, TrainingConfig]):
    def __getitem__(self, name: str) -> TrainingConfig:
        if name not in list_recipes():
            raise unknown_name("recipe", name, list_recipes(), UnknownKeyError)
        return get_recipe(name).config

    def __iter__(self) -> Iterator[str]:
        return iter(list_recipes())

    def __len__(self) -> int:
        return len(list_recipes())

    def __repr__(self) -> str:
        return say("RECIPES", [("names", list(self))])


RECIPES: Mapping[str, TrainingConfig] = _Configurations()
"""Configurations by recipe name; :func:`get_recipe` adds the measurements."""


def apply_settings(config: TrainingConfig, settings: Iterable[str]) -> TrainingConfig:
    """A configuration with some settings changed, independent of their order.

    ``settings`` are ``key=value``, with dots in the key for nested settings; :func:`parse_value`
    reads the values.

    Example:
        >>> from loopinterp.training.recipes import RECIPES
        >>> config = apply_settings(RECIPES["addition"], ["optimiser.lr=3e-4", "seed=7"])
        >>> config.optimiser.lr, config.seed
        (0.0003, 7)
    """
    values = config.to_dict()
    known = sorted(flatten_settings(values))  # dotted names
    for setting in settings:
        key, equals, text = setting.partition("=")
        *parents, last = path = key.strip().split(".")
        if not equals or not last:
            what, fix = f"setting {setting!r}", "Write for instance optimiser.lr=3e-4."
            raise ConfigError(what, expected="key=value", given=repr(setting), fix=fix)
        # The names of a task's own settings are checked by the task.
        name = ".".join(path)
        if name not in known and parents != ["task_settings"]:
            # As text "lr" is far from "optimiser.lr".
            endings = [other for other in known if other.split(".")[-1] == last]
            if not endings:
                raise unknown_name("setting", name, known, ConfigError)
            meant = difflib.get_close_matches(name, endings, n=len(endings), cutoff=0.0)
            expected, fix = "the full name of a setting", f"Did you mean {' or '.join(meant)}?"
            raise ConfigError("setting", expected=expected, given=repr(name), fix=fix)
        place = values
        for parent in parents:
            place = place[parent]
        place[last] = parse_value(text, TrainingConfig.choices(path))
    return TrainingConfig.from_dict(values)


def parse_value(text: str, choices: Sequence[str] = ()) -> Any:
    """A value from the command line: a choice of its setting, else JSON, else text.

    ``none`` is None, unless it is one of the choices.

    Example:
        >>> [parse_value(text) for text in ("3", "3e-4", "true", "none", "[1, 2]", "pairs")]
        [3, 0.0003, True, None, [1, 2], 'pairs']
        >>> parse_value("none", choices=("none", "rotary"))
        'none'
    """
    text = text.strip()
    if text in choices:
        return text
    if text.lower() == "none":
        return None
    try:
        return json.loads(text)
    except (ValueError, RecursionError):  # no JSON, or more of it than Python reads
        return {"True": True, "False": False}.get(text, text)
