"""Features of the residual stream, and what writes them: heads, and units of an MLP."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import numpy as np

if TYPE_CHECKING:
    from loopinterp.rasp.expr import Select

Role = Literal["tokens", "indices", "fixed", "variable", "scratch"]

PLAIN, WITNESS, RAW = 0, 1, 2
"""Order in which the features of one rule are tested.

What a head writes means something only where it found a key. So a rule first tests what says that
it did, and only then what the head wrote.
"""


@dataclass(eq=False)
class Feature:
    """Something that the residual stream holds, from where it is written to its last use.

    Attributes:
        name: What it is, as code.
        values: Its values, in order.
        role: ``tokens``, ``indices`` and ``fixed`` are injected into every loop, ``variable`` is
            the program's state, ``scratch`` lives inside a pass through the layers.
        layer: Layer that writes it; -1 if it is there from the start.
        order: When a rule may test it: PLAIN, WITNESS or RAW.
        one_direction: Whether its value stands along a single direction (a flag or a count)
            in place of one direction for each value.
        writes: What the MLP of its layer writes for it.
        head: The head that writes it instead.
        last_use: Last layer that reads it; set when the layers are laid out.
        start: Its first coordinate in the residual stream, before any disguise.
    """

    name: str
    values: tuple[int, ...]
    role: Role = "scratch"
    layer: int = -1
    order: int = PLAIN
    one_direction: bool = False
    writes: Writes | None = None
    head: LoweredHead | None = None
    last_use: int = -1
    start: int = -1

    @property
    def width(self) -> int:
        """Directions it takes."""
        return 1 if self.one_direction else len(self.values)

    @property
    def slots(self) -> slice:
        """Its coordinates in the residual stream."""
        return slice(self.start, self.start + self.width)

    @property
    def inputs(self) -> tuple[Feature, ...]:
        """The features that it is made from."""
        if self.writes is not None:
            return self.writes.inputs
        if self.head is None:
            return ()
        carried = self.head.carried[self].feature
        return self.head.inputs if carried is None else (*self.head.inputs, carried)

    @property
    def for_attention(self) -> int:
        """First layer whose attention can read it."""
        return self.layer + 1

    @property
    def for_mlp(self) -> int:
        """First layer whose MLP can read it: attention comes before it in the same layer."""
        return self.layer if self.head is not None else self.layer + 1


@dataclass(frozen=True, eq=False)
class Codes:
    """What the keys, or the queries, of a head say: a matrix [value of the feature, dimension].

    A constant has no feature, and one row.
    """

    feature: Feature | None
    matrix: np.ndarray


@dataclass(eq=False)
class LoweredHead:
    """A head: what it looks at, and what it carries.

    Its score is the sum over ``pairs`` of the products of keys' and queries' codes. For each
    feature that it writes, it carries codes of the keys [value of what is read, direction written].
    """

    select: Select
    pairs: tuple[tuple[Codes, Codes], ...]
    carried: dict[Feature, Codes] = field(default_factory=dict)

    @property
    def inputs(self) -> tuple[Feature, ...]:
        """Features that its queries and keys read."""
        read = [codes.feature for pair in self.pairs for codes in pair]
        return tuple(dict.fromkeys(f for f in read if f is not None))


@dataclass(frozen=True, eq=False)
class Read:
    """A linear read of a feature: weights along its directions, plus a constant."""

    feature: Feature
    weights: np.ndarray
    constant: float = 0.0


def read_any(feature: Feature, chosen: np.ndarray) -> Read:
    """A read that is 1 where the feature has one of the chosen values, else 0."""
    if not feature.one_direction:
        return Read(feature, chosen.astype(float))
    low, high = (float(c) for c in chosen)
    return Read(feature, np.array([high - low]), low)


@dataclass(frozen=True, eq=False)
class Unit:
    """``clip(sum of reads + bias, 0, 1)``, by two neurons, written along some directions.

    Both ends are flat, so errors of the reads do not come through: what a unit writes is as exact
    after 500 loops as after one.
    """

    reads: tuple[Read, ...]
    bias: float
    out: tuple[tuple[int, float], ...]


@dataclass(frozen=True, eq=False)
class Writes:
    """What an MLP writes into one feature: units, and constants along its directions."""

    how: str
    inputs: tuple[Feature, ...]
    units: tuple[Unit, ...] = ()
    constants: tuple[tuple[int, float], ...] = ()

    @property
    def layer(self) -> int:
        """First layer whose MLP can write it."""
        return max((f.for_mlp for f in self.inputs), default=0)


def one_if_all(reads: tuple[Read, ...], out: tuple[tuple[int, float], ...]) -> Unit:
    """The unit that is 1 where all reads are 1, and 0 where one of them is 0."""
    return at_least(reads, len(reads) - 0.5, 1.0, out)


def one_if_any(reads: tuple[Read, ...], out: tuple[tuple[int, float], ...]) -> Unit:
    """The unit that is 1 where one of the reads is 1, and 0 where all of them are 0."""
    return at_least(reads, 0.5, 1.0, out)


def at_least(
    reads: tuple[Read, ...], threshold: float, gap: float, out: tuple[tuple[int, float], ...]
) -> Unit:
    """The unit that says whether the sum of the reads is above a threshold.

    It is 1 from ``threshold + gap / 2`` on and 0 up to ``threshold - gap / 2``, with half of that
    distance to spare on either side.
    """
    scale = 2.0 / gap
    scaled = (Read(read.feature, scale * read.weights, scale * read.constant) for read in reads)
    return Unit(tuple(scaled), 0.5 - scale * threshold, out)
