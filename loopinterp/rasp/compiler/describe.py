"""Stage 5, assemble: a layout as a circuit, with a name for every node."""

from __future__ import annotations

from collections import Counter

import numpy as np
import torch

from loopinterp.rasp.compiler.assemble import carried, neurons
from loopinterp.rasp.compiler.circuit import (
    Circuit,
    Directions,
    HeadNode,
    HeldFeature,
    NeuronGroup,
)
from loopinterp.rasp.compiler.layout import Layout
from loopinterp.rasp.compiler.lower.features import Feature
from loopinterp.rasp.compiler.lower.plan import SectionPlan

EMBEDDING = "embedding"


def describe(layout: Layout) -> Circuit:
    """The circuit of a layout."""
    return _Description(layout).circuit()


class _Description:
    """Collects nodes and edges, section by section."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.names: dict[Feature, str] = {}
        self._taken: set[str] = set()
        self._copies: Counter[str] = Counter()
        # Variables go by their own names, whatever else is called so.
        for feature in sorted(layout.plan.persistent, key=lambda f: f.role != "variable"):
            self._call(feature, feature.name)
        self.features = [self._held(f, EMBEDDING) for f in layout.plan.persistent]
        self.heads: list[HeadNode] = []
        self.groups: list[NeuronGroup] = []
        self.edges: dict[tuple[str, str], None] = {}

    def circuit(self) -> Circuit:
        plan = self.layout.plan
        for section in plan.sections:
            self._name(section)
            self._connect(section)
        program = plan.source.program
        return Circuit(
            program=program.name,
            inputs=program.inputs,
            max_length=plan.source.max_length,
            n_layers={name: len(layers) for name, layers in self.layout.sections.items()},
            features=tuple(self.features),
            heads=tuple(self.heads),
            neurons=tuple(self.groups),
            edges=tuple(self.edges),
            directions={self.names[f]: self._directions(f) for f in self._unique()},
        )

    def _unique(self) -> list[Feature]:
        """Features by id; what the prelude writes into a persistent one is that one."""
        targets = {f for section in self.layout.plan.sections for f in section.targets}
        return [f for f in self.names if f not in targets]

    def _name(self, section: SectionPlan) -> None:
        for feature in section.live:
            if feature in section.targets:
                self.names[feature] = self.names[section.targets[feature]]
                continue
            self._call(feature, f"{section.name}: {feature.name}")
            self.features.append(self._held(feature, section.name))

    def _call(self, feature: Feature, name: str) -> None:
        """Give a feature a name that no other has."""
        own = name
        while own in self._taken:
            self._copies[name] += 1
            own = f"{name} ({self._copies[name] + 1})"
        self._taken.add(own)
        self.names[feature] = own

    def _held(self, feature: Feature, section: str) -> HeldFeature:
        inside = feature.role == "scratch"
        return HeldFeature(
            id=self.names[feature],
            name=feature.name,
            role=feature.role,
            section=section,
            layer=feature.layer,
            last_use=feature.last_use if inside else -1,
            values=feature.values,
        )

    def _connect(self, section: SectionPlan) -> None:
        for number, layer in enumerate(self.layout.sections[section.name]):
            for head_number, head in enumerate(layer.heads):
                select = self.layout.plan.source.selects[head.select]
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
                node = NeuronGroup(
                    id=f"{section.name}.{number}.neurons.{k}",
                    section=section.name,  # type: ignore[arg-type]
                    layer=number,
                    neurons=tuple(group),
                    writes="" if feature is None else self.names[feature],
                    how=how,
                )
                if feature is None and not group:
                    continue
                self.groups.append(node)
                if feature is not None:
                    self.edges.update({(self.names[f], node.id): None for f in inputs[feature]})
                    self.edges[node.id, self.names[feature]] = None

    def _directions(self, feature: Feature) -> Directions:
        basis = np.zeros((feature.width, self.layout.d_model), dtype=np.float32)
        basis[:, feature.start : feature.start + feature.width] = np.eye(feature.width)
        both = torch.from_numpy(basis)
        return Directions(write=both, read=both.clone())
