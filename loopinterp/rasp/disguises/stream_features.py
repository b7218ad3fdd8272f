"""What may stand in the residual stream of a compiled model, site by site.

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

from loopinterp.rasp.compiler.circuit import orthonormal

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from loopinterp.rasp.compiler.circuit import Circuit, FeatureNode
    from loopinterp.rasp.disguises.compiled_weights import Weights

STATE = ("block", 0)
"""The site of the state, where variables and inputs stand, and nothing else."""

LAST = 2**31


@dataclass(frozen=True, eq=False)
class FeaturePoints:
    """What may stand in the stream at one site: for each feature, points it is at or between."""

    points: tuple[Float[Tensor, "point d_model"], ...]

    @property
    def mean(self) -> Float[Tensor, " d_model"]:
        """The sum of the means of all features' points."""
        return torch.stack([p.mean(0) for p in self.points]).sum(0)

    @property
    def apart(self) -> list[Float[Tensor, "point d_model"]]:
        """The points of each feature, from their mean."""
        return [p - p.mean(0) for p in self.points]

    @cached_property
    def span(self) -> Float[Tensor, "row d_model"]:
        """Rows that span all that may stand here: points from their mean, and the mean of all."""
        return torch.cat([*self.apart, self.mean[None]])

    def extremes(
        self, rows: Float[Tensor, "row d_model"]
    ) -> tuple[Float[Tensor, " row"], Float[Tensor, " row"]]:
        """The least and the greatest that rows can read here, whatever the features are."""
        read = [rows @ p.mT for p in self.points]
        low, high = (torch.stack(ends) for ends in zip(*((r.amin(-1), r.amax(-1)) for r in read)))
        return low.sum(0), high.sum(0)


class StreamFeatures:
    """Which features the stream holds at each site of a circuit's model, and at which points."""

    def __init__(self, circuit: Circuit) -> None:
        self.circuit = circuit
        self.n_layers = dict(circuit.n_layers)
        heads = {node.id for node in circuit.heads}
        self.writing_head = {target: source for source, target in circuit.edges if source in heads}
        self._points = {f.id: self._points_of(f) for f in circuit.features}
        self._lifetimes = {f.id: self._lifetime(f) for f in circuit.features}

    def at(self, section: str, sublayer: int) -> FeaturePoints:
        """What may stand at a site."""
        return self.points(self._live(section, sublayer))

    def points(self, features: tuple[str, ...]) -> FeaturePoints:
        """What may stand where some features are held, by id."""
        return FeaturePoints(tuple(self._points[name] for name in features))

    def distinct_sites(self) -> list[FeaturePoints]:
        """What may stand at each site, once for each different set of features."""
        sets = {
            self._live(section, sublayer): None
            for section, n_layers in self.n_layers.items()
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

    def _points_of(self, feature: FeatureNode) -> Float[Tensor, "point d_model"]:
        write = self.circuit.directions[feature.id].write.double()
        if len(write) == len(feature.values):
            return write
        # A flag or a count stands along one direction.
        return torch.stack([min(feature.values) * write[0], max(feature.values) * write[0]])

    def _lifetime(self, feature: FeatureNode) -> dict[str, tuple[int, int]]:
        """Section -> first and last sublayer that find the feature."""
        if feature.role == "scratch":
            first = 2 * feature.layer + (1 if feature.id in self.writing_head else 2)
            never_read = feature.last_use < feature.layer
            end = 2 * self.n_layers[feature.section]
            return {feature.section: (first, end if never_read else 2 * feature.last_use + 1)}
        written = [
            2 * group.layer + 2
            for group in self.circuit.neurons
            if group.section == "prelude" and group.writes == feature.id
        ]
        return {"prelude": (max([0, *written]), LAST), "block": (0, LAST), "coda": (0, LAST)}


def unlisted_directions(weights: Weights, circuit: Circuit) -> Float[Tensor, "row d_model"]:
    """An orthonormal basis of what is written where no feature of the circuit stands."""
    written = [
        w if "embedding" in name else w.mT if w.ndim == 2 else w[None]
        for name, w in weights.items()
        if name.split(".")[0] in ("embedding", "position_embedding")
        or name.split(".")[-2] in ("out", "fc_out")
    ]
    rows = torch.cat(written)
    listed = orthonormal(torch.cat([d.write.double() for d in circuit.directions.values()]))
    return orthonormal(rows - rows @ listed.mT @ listed, largest=float(rows.norm(dim=-1).max()))
