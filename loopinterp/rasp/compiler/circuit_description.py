"""Stage 5, assemble: a layout as a circuit, with a name for every node."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain, count
from typing import Any

import torch

from loopinterp.rasp.compiler.assemble import neurons
from loopinterp.rasp.compiler.circuit import Circuit, Directions, FeatureNode, HeadNode, NeuronGroup
from loopinterp.rasp.compiler.lower.lowered_features import Feature
from loopinterp.rasp.compiler.lower.program_lowering import LoweredProgram
from loopinterp.rasp.compiler.stream_layout import LayerLayout, StreamLayout

EMBEDDING = "embedding"

Node = tuple[HeadNode | NeuronGroup, Iterable[Feature], Iterable[Feature]]
"""A node, the features that it reads, and those that it writes."""


def describe(layout: StreamLayout) -> Circuit:
    """The circuit of a layout."""
    lowered, source = layout.lowered, layout.lowered.source
    names = _names(lowered)
    # What the prelude writes into a persistent feature is that one.
    stands = {EMBEDDING: lowered.persistent}
    stands |= {s.name: [f for f in s.live if f not in s.targets] for s in lowered.sections}
    nodes = [
        node
        for section, layers in layout.sections.items()
        for number, layer in enumerate(layers)
        for node in _nodes(layout, names, section, number, layer)
    ]
    edges: dict[tuple[str, str], None] = {}
    for node, reads, writes in nodes:
        edges.update({(names[feature], node.id): None for feature in reads})
        edges.update({(node.id, names[feature]): None for feature in writes})
    basis = torch.eye(layout.d_model)
    return Circuit(
        program=source.program.name,
        inputs=source.program.inputs,
        max_length=source.max_length,
        n_layers={name: len(layers) for name, layers in layout.sections.items()},
        features=tuple(_feature(f, names[f], s) for s, held in stands.items() for f in held),
        heads=tuple(node for node, _, _ in nodes if isinstance(node, HeadNode)),
        neurons=tuple(node for node, _, _ in nodes if isinstance(node, NeuronGroup)),
        edges=tuple(edges),
        directions={
            names[f]: Directions(write=basis[f.slots].clone(), read=basis[f.slots].clone())
            for held in stands.values()
            for f in held
        },
    )


def _names(lowered: LoweredProgram) -> dict[Feature, str]:
    """A name for every feature; only what stands in another's place has the name of that."""
    names: dict[Feature, str] = {}

    def call(feature: Feature, name: str) -> None:
        numbered = (f"{name} ({k})" for k in count(2))
        names[feature] = next(n for n in chain([name], numbered) if n not in names.values())

    # Variables go by their own names, whatever else is called so.
    for feature in sorted(lowered.persistent, key=lambda f: f.role != "variable"):
        call(feature, feature.name)
    for section in lowered.sections:
        for feature in section.live:
            if feature in section.targets:
                names[feature] = names[section.targets[feature]]
            else:
                call(feature, f"{section.name}: {feature.name}")
    return names


def _feature(feature: Feature, name: str, section: str) -> FeatureNode:
    return FeatureNode(
        id=name,
        name=feature.name,
        role=feature.role,
        section=section,
        layer=feature.layer,
        last_use=feature.last_use if feature.role == "scratch" else -1,
        values=feature.values,
    )


def _nodes(
    layout: StreamLayout, names: dict[Feature, str], section: str, number: int, layer: LayerLayout
) -> Iterator[Node]:
    """The heads and the neurons of a layer."""
    place: dict[str, Any] = {"section": section, "layer": number}
    for head_number, head in enumerate(layer.heads):
        select = layout.lowered.source.selects[head.select]
        node = HeadNode(
            id=f"{section}.{number}.head.{head_number}",
            head=head_number,
            selector=select.name or repr(select),
            attends_to=repr(select),
            **place,
        )
        carried = (codes.feature for codes in head.carried.values() if codes.feature)
        yield node, [*head.inputs, *carried], head.carried
    inputs = {feature: writes.inputs for feature, writes in layer.writes}
    for k, (how, feature, group) in enumerate(neurons(layer)):
        written = [] if feature is None else [feature]
        if written or group:
            node = NeuronGroup(
                id=f"{section}.{number}.neurons.{k}",
                neurons=tuple(group),
                writes="" if feature is None else names[feature],
                how=how,
                **place,
            )
            yield node, [read for x in written for read in inputs[x]], written
