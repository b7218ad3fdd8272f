"""Stage 4, lay out: which layers there are, and where in the residual stream everything stands.

Persistent features (tokens, positions, what the prelude computed, variables) have coordinates of
their own. Scratch features are wiped by the MLP of the last layer that reads them, and others use
their coordinates after that, so that a section leaves nothing behind but what it was asked for.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from loopinterp.rasp.compiler.lower.lowered_features import Feature, LoweredHead, Writes
from loopinterp.rasp.compiler.lower.program_lowering import LoweredProgram, LoweredSection


@dataclass(eq=False)
class LayerLayout:
    """One layer: its heads, what its MLP writes, and what it wipes."""

    heads: list[LoweredHead] = field(default_factory=list)
    writes: list[tuple[Feature, Writes]] = field(default_factory=list)
    wiped: list[Feature] = field(default_factory=list)

    @property
    def n_neurons(self) -> int:
        """Two for each unit and each coordinate that is wiped, but one where a variable was."""
        units = sum(len(writes.units) for _, writes in self.writes)
        wiped = sum(f.width * (1 if f.role == "variable" else 2) for f in self.wiped)
        return 2 * units + wiped


@dataclass(frozen=True, eq=False)
class StreamLayout:
    """Where everything that is computed stands, in the layers of each section."""

    lowered: LoweredProgram
    sections: dict[str, list[LayerLayout]]
    d_model: int


def lay_out(lowered: LoweredProgram) -> StreamLayout:
    """Place every feature that is needed, and put layers together."""
    sections = {section.name: _layers(section) for section in lowered.sections}
    start = 0
    for feature in lowered.persistent:
        feature.start, start = start, start + feature.width
    for section in lowered.sections:
        for written, target in section.targets.items():
            written.start = target.start
    widest = max(_place_scratch(section, start) for section in lowered.sections)
    return StreamLayout(lowered, sections, max(widest, start))


def _layers(section: LoweredSection) -> list[LayerLayout]:
    layers = [LayerLayout() for _ in range(section.n_layers)]
    for feature in section.live:
        if feature.head is not None and feature.head not in layers[feature.layer].heads:
            layers[feature.layer].heads.append(feature.head)
        if feature.writes is not None:
            layers[feature.layer].writes.append((feature, feature.writes))
        for read in feature.inputs:
            read.last_use = max(read.last_use, feature.layer)
    if section.name == "block":
        layers[-1].wiped += section.targets.values()
    for feature in section.live:
        # The answer is read by none of them: it is left for the unembedding.
        if feature.role == "scratch" and feature.last_use >= 0:
            layers[feature.last_use].wiped.append(feature)
    return layers


def _place_scratch(section: LoweredSection, start: int) -> int:
    """Give scratch features the first coordinates that are free while they live; the end used."""
    busy: list[tuple[int, int, int]] = []  # from, to, free again at
    end = start
    scratch = [f for f in section.live if f.role == "scratch"]
    for feature in sorted(scratch, key=_birth):
        busy = [spell for spell in busy if spell[2] > _birth(feature)]
        start_at = start
        for first, last, _ in sorted(busy):
            if start_at + feature.width <= first:
                break
            start_at = max(start_at, last)
        feature.start = start_at
        end_of_life = 2 * feature.last_use + 1 if feature.last_use >= 0 else 2 * section.n_layers
        busy.append((start_at, start_at + feature.width, end_of_life))
        end = max(end, start_at + feature.width)
    return end


def _birth(feature: Feature) -> int:
    """When it is written: attention of layer l at 2 l, its MLP at 2 l + 1."""
    return 2 * feature.layer + (0 if feature.head is not None else 1)
