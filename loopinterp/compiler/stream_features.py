"""The features in the residual stream of a compiled model, site by site.

A site is a section and a sublayer: attention of layer l reads the stream at sublayer 2 l, its MLP
at 2 l + 1, and sublayer 2 n is behind the last of n layers. At every site the stream is a sum of
features, each of which is at one of a few known points: at one of its values' directions, or,
where a head wrote it, between them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from loopinterp.compiler.circuit import Circuit, FeatureNode

STATE = ("block", 0)
"""The site of the state, which holds variables and inputs, and nothing else."""


@dataclass(frozen=True, eq=False)
class FeaturePoints:
    """For each feature that one site may hold, points it is at or between."""

    points: tuple[Float[Tensor, "point d_model"], ...]

    @property
    def mean(self) -> Float[Tensor, " d_model"]:
        """The sum of the means of all features' points."""
        return torch.stack([p.mean(0) for p in self.points]).sum(0)

    @property
    def centred(self) -> list[Float[Tensor, "point d_model"]]:
        """The points of each feature, from their mean."""
        return [p - p.mean(0) for p in self.points]

    @cached_property
    def span(self) -> Float[Tensor, "row d_model"]:
        """Rows that span all states of the site: points from their mean, and the mean of all."""
        return torch.cat([*self.centred, self.mean[None]])

    def extremes(
        self, rows: Float[Tensor, "row d_model"]
    ) -> tuple[Float[Tensor, " row"], Float[Tensor, " row"]]:
        """The least and the greatest that rows can read here, whatever the features are."""
        reads = [rows @ p.mT for p in self.points]  # per feature: [row, point]
        low, high = (torch.stack(ends) for ends in zip(*((r.amin(-1), r.amax(-1)) for r in reads)))
        return low.sum(0), high.sum(0)


class StreamFeatures:
    """Which features the stream holds at each site of a circuit's model, and at which points."""

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
        """The points of the features at a site."""
        return self.points(self._live(section, sublayer))

    def points(self, features: tuple[str, ...]) -> FeaturePoints:
        """The points of some features, by id."""
        return FeaturePoints(tuple(self._points[name] for name in features))

    def distinct_sites(self) -> list[FeaturePoints]:
        """The points at each site, once for each different set of features."""
        sets = {
            self._live(section, sublayer): None
            for section, n_layers in self.circuit.n_layers.items()
            for sublayer in range(2 * n_layers + 1)
        }
        return [self.points(features) for features in sets if features]

    def last_site(self, feature: FeatureNode) -> tuple[str, int]:
        """The last site at which a feature is held; that of the state for what is always."""
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
        """Section -> first and last sublayer that find the feature."""
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
