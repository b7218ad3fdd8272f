"""Features of the residual stream, what writes them, and functions of them as tables."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from loopinterp.compiler.circuit import Circuit, FeatureNode
from loopinterp.programs.expressions import Select

Role = Literal["tokens", "indices", "fixed", "variable", "scratch"]
PLAIN, WITNESS, RAW = 0, 1, 2
"""Order in which a rule tests features: a head's output means nothing unless its witness says
that a key was selected."""


@dataclass(eq=False)
class Feature:
    """A finite value in the residual stream, from where it is written to its last use."""

    name: str  # the expression, as code
    values: tuple[int, ...]  # its values, in order
    # ``tokens``, ``indices`` and ``fixed`` are injected into every loop, ``variable`` is
    # the program's state, ``scratch`` lives inside a pass through the layers
    role: Role = "scratch"
    layer: int = -1  # layer that writes it; -1 if it is there from the start
    order: int = PLAIN  # when a rule may test it: PLAIN, WITNESS or RAW
    one_direction: bool = False  # for a flag or a count, in place of one for each value
    writes: Writes | None = None  # what the MLP of its layer writes for it
    head: LoweredHead | None = None  # the head that writes it instead
    last_use: int = -1  # last layer that reads it; set when the layers are laid out
    start: int = -1  # its first coordinate in the residual stream, before any disguise

    @property
    def width(self) -> int:
        return 1 if self.one_direction else len(self.values)

    @property
    def slots(self) -> slice:
        return slice(self.start, self.start + self.width)

    @property
    def inputs(self) -> tuple[Feature, ...]:
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
        """First layer whose MLP can read it; attention comes first in a layer."""
        return self.layer if self.head is not None else self.layer + 1


@dataclass(frozen=True, eq=False)
class Codes:
    """The codes that keys, or queries, have for each value of a feature."""

    feature: Feature | None  # None for a constant, which has one row
    matrix: np.ndarray  # [value of the feature, dimension]


@dataclass(eq=False)
class LoweredHead:
    """A head; its score is the sum over ``pairs`` of products of key and query codes."""

    select: Select
    pairs: tuple[tuple[Codes, Codes], ...]
    # Codes of the keys for each feature that it writes [value of what is read, direction written].
    carried: dict[Feature, Codes] = field(default_factory=dict)

    @property
    def inputs(self) -> tuple[Feature, ...]:
        read = [codes.feature for pair in self.pairs for codes in pair]
        return tuple(dict.fromkeys(f for f in read if f is not None))


@dataclass(frozen=True, eq=False)
class Read:
    """Weights along the directions of a feature, plus a constant."""

    feature: Feature
    weights: np.ndarray
    constant: float = 0.0


@dataclass(frozen=True, eq=False)
class Unit:
    """``clip(sum of reads + bias, 0, 1)``, by two neurons; flat ends stop errors of the reads."""

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
        return max((f.for_mlp for f in self.inputs), default=0)


def read_any(feature: Feature, chosen: np.ndarray) -> Read:
    """1 where the feature has one of the chosen values, else 0."""
    if not feature.one_direction:
        return Read(feature, chosen.astype(float))
    low, high = (float(c) for c in chosen)
    return Read(feature, np.array([high - low]), low)


def one_if_all(reads: tuple[Read, ...], out: tuple[tuple[int, float], ...]) -> Unit:
    return at_least(reads, len(reads) - 0.5, 1.0, out)


def one_if_any(reads: tuple[Read, ...], out: tuple[tuple[int, float], ...]) -> Unit:
    return at_least(reads, 0.5, 1.0, out)


def at_least(
    reads: tuple[Read, ...], threshold: float, gap: float, out: tuple[tuple[int, float], ...]
) -> Unit:
    """1 if the sum of the reads is above a threshold, else 0; it stays ``gap / 2`` away from it."""
    scale = 2.0 / gap
    scaled = (Read(read.feature, scale * read.weights, scale * read.constant) for read in reads)
    return Unit(tuple(scaled), 0.5 - scale * threshold, out)


@dataclass(frozen=True, eq=False)
class FeatureFunction:
    """An integer for each combination of the values of some features."""

    features: tuple[Feature, ...]  # the features, one axis of the table each
    table: np.ndarray  # the values [value of feature 0, value of feature 1, …]
    # (operation, its arguments), where the arguments are functions of at most one feature
    # each; sums and comparisons are lowered by this
    parts: tuple[str, tuple[FeatureFunction, ...]] | None = None

    @cached_property
    def values(self) -> tuple[int, ...]:
        return tuple(np.unique(self.table).tolist())

    @property
    def for_attention(self) -> bool:
        """Whether a head can read it: a linear function of a plain feature."""
        return len(self.features) <= 1 and all(f.order == PLAIN for f in self.features)

    def within(self, values: np.ndarray) -> FeatureFunction:
        # Other values belong to combinations that never occur; they become the next allowed value.
        allowed = values[np.searchsorted(values, self.table).clip(max=len(values) - 1)]
        if bool((allowed == self.table).all()):
            return self
        return FeatureFunction(self.features, allowed, self.parts)


def constant(value: int) -> FeatureFunction:
    return FeatureFunction((), np.array(value))


def of_feature(feature: Feature) -> FeatureFunction:
    return FeatureFunction((feature,), np.array(feature.values))


def fuse(
    apply: Callable[[list[np.ndarray]], np.ndarray],
    args: list[FeatureFunction],
    op: str | None = None,
    *,
    most: int = 2**20,
) -> FeatureFunction | None:
    """An operation on functions as one function of all their features.

    ``op`` is its name, if any. None if the table would exceed ``most`` entries.
    """
    features = tuple(dict.fromkeys(f for arg in args for f in arg.features))
    shape = tuple(len(f.values) for f in features)
    if np.prod(shape, dtype=np.float64) > most:
        return None

    def spread(arg: FeatureFunction) -> np.ndarray:
        if arg.features == features:
            return arg.table
        order = sorted(range(len(arg.features)), key=lambda k: features.index(arg.features[k]))
        index = tuple(slice(None) if f in arg.features else None for f in features)
        return np.broadcast_to(arg.table.transpose(order)[index], shape)

    table = np.broadcast_to(apply([spread(arg) for arg in args]), shape)
    parts = (op, tuple(args)) if op and all(len(arg.features) <= 1 for arg in args) else None
    return without_idle(FeatureFunction(features, table, parts))


def without_idle(function: FeatureFunction) -> FeatureFunction:
    """The same function without features that it does not depend on."""
    table, features = function.table, list(function.features)
    for axis in reversed(range(len(features))):
        first = table.take([0], axis=axis)
        if bool((table == first).all()):
            table = first.squeeze(axis)
            del features[axis]
    return FeatureFunction(tuple(features), table, function.parts)


STATE = ("block", 0)
"""The site of the state, which holds only variables and inputs."""


@dataclass(frozen=True, eq=False)
class FeaturePoints:
    """For each feature that a site may hold, the points whose convex hull contains it."""

    points: tuple[Float[Tensor, "point d_model"], ...]

    @property
    def mean(self) -> Float[Tensor, " d_model"]:
        return torch.stack([p.mean(0) for p in self.points]).sum(0)

    @property
    def centred(self) -> list[Float[Tensor, "point d_model"]]:
        return [p - p.mean(0) for p in self.points]

    @cached_property
    def span(self) -> Float[Tensor, "row d_model"]:
        """Rows that span all states of the site: the centred points, and the mean."""
        return torch.cat([*self.centred, self.mean[None]])

    def extremes(
        self, rows: Float[Tensor, "row d_model"]
    ) -> tuple[Float[Tensor, " row"], Float[Tensor, " row"]]:
        """The least and greatest reads over all states of the site."""
        reads = [rows @ p.mT for p in self.points]  # per feature: [row, point]
        low, high = (torch.stack(ends) for ends in zip(*((r.amin(-1), r.amax(-1)) for r in reads)))
        return low.sum(0), high.sum(0)


class StreamFeatures:
    def __init__(self, circuit: Circuit) -> None:
        self.circuit = circuit
        heads = {node.id for node in circuit.heads}
        self.writing_head = {target: source for source, target in circuit.edges if source in heads}
        self._points: dict[str, Float[Tensor, "point d_model"]] = {}
        for f in circuit.features:
            write = circuit.directions[f.id].write.double()
            if len(write) != len(f.values):  # a flag or a count stands along one direction
                write = torch.stack([min(f.values) * write[0], max(f.values) * write[0]])
            self._points[f.id] = write
        self._lifetimes = {f.id: self._lifetime(f) for f in circuit.features}

    def at(self, section: str, sublayer: int) -> FeaturePoints:
        return self.points(self._live(section, sublayer))

    def points(self, features: tuple[str, ...]) -> FeaturePoints:
        return FeaturePoints(tuple(self._points[name] for name in features))

    def distinct_sites(self) -> list[FeaturePoints]:
        """The points at each site, once for each set of features."""
        sets = {
            self._live(section, sublayer): None
            for section, n_layers in self.circuit.n_layers.items()
            for sublayer in range(2 * n_layers + 1)
        }
        return [self.points(features) for features in sets if features]

    def last_site(self, feature: FeatureNode) -> tuple[str, int]:
        """The last site that holds a feature; the state for a persistent one."""
        if feature.role != "scratch":
            return STATE
        return feature.section, self._lifetimes[feature.id][feature.section][1]

    def _live(self, section: str, sublayer: int) -> tuple[str, ...]:
        return tuple(
            name
            for name, lifetime in self._lifetimes.items()
            if section in lifetime and lifetime[section][0] <= sublayer <= lifetime[section][1]
        )

    def _lifetime(self, feature: FeatureNode) -> dict[str, tuple[int, int]]:
        if feature.role == "scratch":
            first = 2 * feature.layer + (1 if feature.id in self.writing_head else 2)
            never_read = feature.last_use < feature.layer
            end = 2 * self.circuit.n_layers[feature.section]
            return {feature.section: (first, end if never_read else 2 * feature.last_use + 1)}
        written = [
            2 * group.layer + 2
            for group in self.circuit.neurons
            if group.section == "prelude" and group.writes == feature.id
        ]
        end = 2**31  # after every sublayer: inputs and variables stay in the stream
        return {"prelude": (max([0, *written]), end), "block": (0, end), "coda": (0, end)}
