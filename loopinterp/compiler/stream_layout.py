"""Stage 4, lay out: the layers, the coordinates of every feature, and the circuit.

The MLP of the last layer that reads a scratch feature erases it; others then use its coordinates.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import chain, count
from typing import Any

import torch

from loopinterp.compiler.circuit import Circuit, Directions, FeatureNode, HeadNode, NeuronGroup
from loopinterp.compiler.features import Feature, LoweredHead, Writes
from loopinterp.compiler.lowering import LoweredProgram, LoweredSection


@dataclass(eq=False)
class LayerLayout:
    heads: list[LoweredHead] = field(default_factory=list)
    writes: list[tuple[Feature, Writes]] = field(default_factory=list)
    wiped: list[Feature] = field(default_factory=list)

    @property
    def n_neurons(self) -> int:
        """Two for each unit and each erased coordinate, one for that of a variable."""
        units = sum(len(writes.units) for _, writes in self.writes)
        wiped = sum(f.width * (1 if f.role == "variable" else 2) for f in self.wiped)
        return 2 * units + wiped


@dataclass(frozen=True, eq=False)
class StreamLayout:
    lowered: LoweredProgram
    sections: dict[str, list[LayerLayout]]
    d_model: int


def lay_out(lowered: LoweredProgram) -> StreamLayout:
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
    """Give scratch features the first coordinates that are free; return the end of those used."""

    def birth(feature: Feature) -> int:
        """When it is written: 2 l by attention of layer l, 2 l + 1 by its MLP."""
        return 2 * feature.layer + (0 if feature.head is not None else 1)

    busy: list[tuple[int, int, int]] = []  # from, to, free again at
    end = start
    for feature in sorted((f for f in section.live if f.role == "scratch"), key=birth):
        busy = [taken for taken in busy if taken[2] > birth(feature)]
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


def describe(layout: StreamLayout) -> Circuit:
    lowered, source = layout.lowered, layout.lowered.source
    names = _names(lowered)
    # What the prelude writes into a persistent feature is that one.
    by_section = {"embedding": lowered.persistent}
    by_section |= {s.name: [f for f in s.live if f not in s.targets] for s in lowered.sections}
    features = [(f, section) for section, fs in by_section.items() for f in fs]
    heads: list[HeadNode] = []
    groups: list[NeuronGroup] = []
    edges: dict[tuple[str, str], None] = {}
    stacks = layout.sections
    layers = [(name, k, layer) for name in stacks for k, layer in enumerate(stacks[name])]
    for section, number, layer in layers:
        place: dict[str, Any] = {"section": section, "layer": number}
        for k, head in enumerate(layer.heads):
            name, select = f"{section}.{number}.head.{k}", source.selects[head.select]
            selector, attends_to = select.name or repr(select), repr(select)
            node = HeadNode(id=name, head=k, selector=selector, attends_to=attends_to, **place)
            heads.append(node)
            carried = (codes.feature for codes in head.carried.values() if codes.feature)
            edges.update({(names[feature], name): None for feature in (*head.inputs, *carried)})
            edges.update({(name, names[feature]): None for feature in head.carried})
        first = 0  # each group's neurons follow those of the group before it; what wipes is last
        for k, (feature, writes) in enumerate(layer.writes):
            name, end = f"{section}.{number}.neurons.{k}", first + 2 * len(writes.units)
            edges.update({(names[read], name): None for read in writes.inputs})
            edges[name, names[feature]] = None
            neurons = tuple(range(first, end))
            groups.append(
                NeuronGroup(name, neurons=neurons, writes=names[feature], how=writes.how, **place)
            )
            first = end
        if first < layer.n_neurons:
            name = f"{section}.{number}.neurons.{len(layer.writes)}"
            neurons = tuple(range(first, layer.n_neurons))
            groups.append(NeuronGroup(name, neurons=neurons, writes="", how="wipe", **place))
    basis = torch.eye(layout.d_model)
    return Circuit(
        program=source.program.name,
        inputs=source.program.inputs,
        max_length=source.max_length,
        n_layers={name: len(stack) for name, stack in stacks.items()},
        features=tuple(
            FeatureNode(names[f], f.name, f.role, section, f.layer, last_use, f.values)
            for f, section in features
            for last_use in [f.last_use if f.role == "scratch" else -1]
        ),
        heads=tuple(heads),
        neurons=tuple(groups),
        edges=tuple(edges),
        directions={
            names[f]: Directions(write=basis[f.slots].clone(), read=basis[f.slots].clone())
            for f, _ in features
        },
    )


def _names(lowered: LoweredProgram) -> dict[Feature, str]:
    """A name for every feature; a feature that replaces another has its name."""
    names: dict[Feature, str] = {}

    def add(feature: Feature, name: str) -> None:
        numbered = (f"{name} ({k})" for k in count(2))
        names[feature] = next(n for n in chain([name], numbered) if n not in names.values())

    # Variables come first, so that they have their own names.
    for feature in sorted(lowered.persistent, key=lambda f: f.role != "variable"):
        add(feature, feature.name)
    for section in lowered.sections:
        for feature in section.live:
            if feature in section.targets:
                names[feature] = names[section.targets[feature]]
            else:
                add(feature, f"{section.name}: {feature.name}")
    return names
