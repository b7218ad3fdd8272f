"""Stage 5, assemble: a layout as a circuit, with a name for every node."""

from __future__ import annotations

from collections import Counter

import torch

from loopinterp.rasp.compiler.assemble import carried, neurons
from loopinterp.rasp.compiler.circuit import Circuit, Directions, FeatureNode, HeadNode, NeuronGroup
from loopinterp.rasp.compiler.lower.lowered_features import Feature
from loopinterp.rasp.compiler.lower.program_lowering import LoweredSection
from loopinterp.rasp.compiler.stream_layout import StreamLayout

EMBEDDING = "embedding"


def describe(layout: StreamLayout) -> Circuit:
    """The circuit of a layout."""
    return _Description(layout).circuit()


class _Description:
    """Collects nodes and edges, section by section."""

    def __init__(self, layout: StreamLayout) -> None:
        self.layout = layout
        self.names: dict[Feature, str] = {}
        self._taken: set[str] = set()
        self._copies: Counter[str] = Counter()
        # Variables go by their own names, whatever else is called so.
        for feature in sorted(layout.lowered.persistent, key=lambda f: f.role != "variable"):
            self._call(feature, feature.name)
        self.features = [self._node(f, EMBEDDING) for f in layout.lowered.persistent]
        self.heads: list[HeadNode] = []
        self.groups: list[NeuronGroup] = []
        self.edges: dict[tuple[str, str], None] = {}

    def circuit(self) -> Circuit:
        lowered = self.layout.lowered
        for section in lowered.sections:
            self._name(section)
            self._connect(section)
        program = lowered.source.program
        return Circuit(
            program=program.name,
            inputs=program.inputs,
            max_length=lowered.source.max_length,
            n_layers={name: len(layers) for name, layers in self.layout.sections.items()},
            features=tuple(self.features),
            heads=tuple(self.heads),
            neurons=tuple(self.groups),
            edges=tuple(self.edges),
            directions={self.names[f]: self._directions(f) for f in self._unique()},
        )

    def _unique(self) -> list[Feature]:
        """Features by id; what the prelude writes into a persistent one is that one."""
        targets = {f for section in self.layout.lowered.sections for f in section.targets}
        return [f for f in self.names if f not in targets]

    def _name(self, section: LoweredSection) -> None:
        for feature in section.live:
            if feature in section.targets:
                self.names[feature] = self.names[section.targets[feature]]
                continue
            self._call(feature, f"{section.name}: {feature.name}")
            self.features.append(self._node(feature, section.name))

    def _call(self, feature: Feature, name: str) -> None:
        """Give a feature a name that no other has."""
        own = name
        while own in self._taken:
            self._copies[name] += 1
            own = f"{name} ({self._copies[name] + 1})"
        self._taken.add(own)
        self.names[feature] = own

    def _node(self, feature: Feature, section: str) -> FeatureNode:
        return FeatureNode(
            id=self.names[feature],
            name=feature.name,
            role=feature.role,
            section=section,
            layer=feature.layer,
            last_use=feature.last_use if feature.role == "scratch" else -1,
            values=feature.values,
        )

    def _connect(self, section: LoweredSection) -> None:
        for number, layer in enumerate(self.layout.sections[section.name]):
            for head_number, head in enumerate(layer.heads):
                select = self.layout.lowered.source.selects[head.select]
                node = HeadNode(
                    id=f"{section.name}.{number}.head.{head_number}",
                    section=section.name,  # type: ignore[arg-type]
                    layer=number,
                    head=head_number,
                    selector=select.name or repr(select),
                    attends_to=repr(select),
                )
                self.heads.append(node)
                written = carried(head, self.layout)
                for feature in (*head.inputs, *(c.feature for _, c in written if c.feature)):
                    self.edges[self.names[feature], node.id] = None
                for feature, _ in written:
                    self.edges[node.id, self.names[feature]] = None
            inputs = {feature: writes.inputs for feature, writes in layer.writes}
            for k, (how, feature, group) in enumerate(neurons(layer)):
                if feature is None and not group:
                    continue
                node = NeuronGroup(
                    id=f"{section.name}.{number}.neurons.{k}",
                    section=section.name,  # type: ignore[arg-type]
                    layer=number,
                    neurons=tuple(group),
                    writes="" if feature is None else self.names[feature],
                    how=how,
                )
                self.groups.append(node)
                if feature is not None:
                    self.edges.update({(self.names[f], node.id): None for f in inputs[feature]})
                    self.edges[node.id, self.names[feature]] = None

    def _directions(self, feature: Feature) -> Directions:
        basis = torch.eye(self.layout.d_model)[feature.slots]
        return Directions(write=basis.clone(), read=basis.clone())
