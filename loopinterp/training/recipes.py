"""Configurations to start from, and what was measured of each: a JSON file each in ``recipes/``.

A file has the four parts of a :class:`Recipe`; its name is the recipe's. To add a recipe is to add
a file.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import fmean, stdev
from typing import Annotated, NamedTuple

from pydantic import Field, PositiveFloat, PositiveInt

from loopinterp.errors import ConfigError, check_choice
from loopinterp.settings import Seed, Settings, settings
from loopinterp.short_repr import say
from loopinterp.storage import read_json_object
from loopinterp.training.answer_scores import Lowest, lowest_of
from loopinterp.training.config import Share, TrainingConfig

_FOLDER = Path(__file__).with_suffix("")
_FAR, _WELL = 1.5, 0.9

Line = Annotated[str, Field(min_length=1, pattern=r"^\S[^\n]*$")]


@settings
class Measurement(Settings):
    """What models of a recipe were seen to do.

    Attributes:
        seeds: Seeds of training.
        samples: Examples behind each share, at least.
        exact_match: Share of examples that are wholly right after T(n) loops, by input
            distribution and length, one for each seed; None where a seed was not measured.
        minutes: Time to train one seed.
        on: The machine that took that time.

    Raises:
        ConfigError: If there is no seed, no share, or not one entry for each seed.
    """

    seeds: tuple[Seed, ...]
    samples: PositiveInt
    exact_match: Mapping[str, Mapping[int, tuple[Share | None, ...]]]
    minutes: PositiveFloat
    on: Line

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (self.seeds and self.exact_match and all(self.exact_match.values())):
            raise ConfigError(
                "exact_match",
                expected="shares of one seed at least, at one length at least",
                given="none",
                fix="Measure the recipe first.",
            )
        for distribution, by_length in self.exact_match.items():
            for length, shares in by_length.items():
                known = [share for share in shares if share is not None]
                if len(shares) != len(self.seeds) or not known:
                    raise ConfigError(
                        f"exact_match.{distribution}.{length}",
                        expected=f"one share for each of {len(self.seeds)} seeds",
                        given=f"{len(shares)}, {len(known)} of them measured",
                        fix="Measure the seeds that are missing.",
                    )

    @property
    def lengths(self) -> tuple[int, ...]:
        """The lengths at which all distributions were measured."""
        return tuple(sorted(set.intersection(*map(set, self.exact_match.values()))))

    def mean(self, distribution: str, n: int) -> SeedMean:
        """Mean and standard error over the seeds that were measured there."""
        known = [share for share in self.exact_match[distribution][n] if share is not None]
        error = stdev(known) / len(known) ** 0.5 if len(known) > 1 else float("nan")
        return SeedMean(fmean(known), error, len(known))

    def lowest(self, n: int) -> Lowest:
        """The lowest mean over the seeds at one of :attr:`lengths`, and on which distributions."""
        return lowest_of({name: self.mean(name, n).value for name in self.exact_match})

    def worst(self) -> dict[int, float]:
        """The share of :meth:`lowest` at each of :attr:`lengths`."""
        return {n: self.lowest(n).share for n in self.lengths}

    def reach(self) -> tuple[int, int | None]:
        """How far it goes: the length up to which :meth:`worst` is .9 or more, and where it is not.

        Of the lengths that were measured: the last one before it falls under .9 (0 if it is under
        .9 at all of them), and the one at which it has; None if it never has. A length at which
        one distribution is under .9 counts as such, whether or not the others were measured.

        Example:
            >>> shares = {"uniform": {12: (1.0,), 24: (0.95,), 30: (0.7,), 48: (0.9,)}}
            >>> Measurement(seeds=(0,), samples=9, exact_match=shares, minutes=1, on="x").reach()
            (24, 30)
        """
        well = 0
        for n in sorted(set().union(*self.exact_match.values())):
            measured = [name for name, of in self.exact_match.items() if n in of]
            if min(self.mean(name, n).value for name in measured) < _WELL:
                return well, n
            if len(measured) == len(self.exact_match):
                well = n
        return well, None


class SeedMean(NamedTuple):
    """A mean over seeds, its standard error (NaN of one seed), and how many seeds they are."""

    value: float
    error: float
    n_seeds: int


@settings
class Recipe(Settings):
    """A configuration to start from, and what is known of it.

    Attributes:
        about: What it is for, in a line.
        config: The configuration.
        measured: What its models were seen to do.
        tried: What was tried and was worse, in a line each.

    Raises:
        ConfigError: If a setting is wrong, nothing was measured at the training cutoff, or a
            distribution of the task was left out.
    """

    about: Line
    config: TrainingConfig
    measured: Measurement
    tried: tuple[Line, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        known = self.config.make_task().distributions
        for distribution in self.measured.exact_match:
            check_choice("distribution", distribution, known, error=ConfigError)
        if left := [name for name in known if name not in self.measured.exact_match]:
            raise ConfigError(
                "measured.exact_match",
                expected=f"all distributions of the task: {', '.join(known)}",
                given=f"none of {', '.join(left)}",
                fix="Measure there as well: the lowest of them is what the recipe is worth.",
            )
        cutoff, lengths = self.config.curriculum.max_n, self.measured.worst()
        if cutoff not in lengths:
            raise ConfigError(
                "measured.exact_match",
                expected=f"the training cutoff, {cutoff}, among the lengths",
                given=", ".join(map(str, lengths)) or "no length that all distributions have",
                fix="Measure there as well.",
            )

    @property
    def generalises(self) -> bool:
        """Whether the mean is .9 or more on all distributions at 1.5 times the cutoff or beyond."""
        far = self.config.curriculum.max_n * _FAR
        return any(share >= _WELL for n, share in self.measured.worst().items() if n >= far)


@functools.cache
def list_recipes() -> tuple[str, ...]:
    """Names of the recipes.

    Example:
        >>> list_recipes()[:2]
        ('abacus', 'addition')
    """
    return tuple(sorted(path.stem for path in _FOLDER.glob("*.json")))


@functools.cache
def get_recipe(name: str) -> Recipe:
    """A recipe by its name.

    Raises:
        InputError: If there is none of that name.

    Example:
        >>> get_recipe("parity").config.curriculum.max_n
        12
    """
    known = check_choice("recipe", name, list_recipes())
    file = _FOLDER / f"{known}.json"
    try:
        return Recipe.from_dict(read_json_object(file))
    except ConfigError as error:
        what = f"{error.what} of {file.name}"
        raise type(error)(
            what, expected=error.expected, given=error.given, fix=error.fix
        ) from error


class _Configurations(Mapping[str, TrainingConfig]):
    """The configurations alone, each read when it is asked for."""

    def __getitem__(self, name: str) -> TrainingConfig:
        if name not in list_recipes():
            raise KeyError(name)
        return get_recipe(name).config

    def __iter__(self) -> Iterator[str]:
        return iter(list_recipes())

    def __len__(self) -> int:
        return len(list_recipes())

    def __repr__(self) -> str:
        return say("RECIPES", [("names", list(self))])


RECIPES: Mapping[str, TrainingConfig] = _Configurations()
"""Configurations by the name of their recipe; :func:`get_recipe` has what was measured as well."""
