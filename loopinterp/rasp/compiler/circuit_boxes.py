"""A circuit in boxes: the features, the heads and neurons that read it, and what they write."""

from __future__ import annotations

from loopinterp.rasp.compiler.circuit import Circuit, HeadNode, NeuronGroup
from loopinterp.rasp.expression_boxes import Box, wrapped

PARTS = {"prelude": "prelude", "block": "loop", "coda": "readout"}


def circuit_boxes(circuit: Circuit) -> dict[str, list[Box]]:
    """The boxes of each section: persistent features, heads, neurons, and what is written.

    Neurons that wipe are left out; scratch features are the boxes that write them.
    """
    found = {title: _SectionBoxes(circuit, section).boxes for section, title in PARTS.items()}
    return {title: boxes for title, boxes in found.items() if boxes}


class _SectionBoxes:
    """The boxes of one section, in the order in which it computes them."""

    def __init__(self, circuit: Circuit, section: str) -> None:
        self._features = {f.id: f for f in circuit.features}
        read = {source for source, _ in circuit.edges}
        self._box_of: dict[str, Box] = {}
        self.boxes: list[Box] = []
        ends: list[tuple[str, Box]] = []
        nodes = [n for n in (*circuit.heads, *circuit.neurons) if n.section == section]
        for node in sorted(nodes, key=lambda n: (n.layer, isinstance(n, NeuronGroup))):
            if isinstance(node, NeuronGroup) and not node.writes:
                continue
            box = self._box(node)
            for source in (s for s, target in circuit.edges if target == node.id):
                box.inputs.append((self._source(source), ""))
            self.boxes.append(box)
            for target in (t for source, t in circuit.edges if source == node.id):
                if target not in read:  # but by the unembedding
                    ends.append(("output", box))
                elif self._features[target].role == "scratch":
                    self._box_of[target] = box
                else:
                    ends.append((target, box))
        for name, box in ends:
            after = f"{name} after a loop" if section == "block" else name
            self.boxes.append(Box("result", after, [], name, [(box, "")]))

    def _source(self, feature: str) -> Box:
        if feature not in self._box_of:
            name, values = self._features[feature].name, self._features[feature].values
            lines = [f"{len(values)} values"] if len(values) != 1 else []
            self._box_of[feature] = Box("source", name, lines, name)
            self.boxes.append(self._box_of[feature])
        return self._box_of[feature]

    def _box(self, node: HeadNode | NeuronGroup) -> Box:
        if isinstance(node, HeadNode):
            where = f"layer {node.layer}, head {node.head}"
            return Box("head", node.selector, [where], node.attends_to)
        written = self._features[node.writes]
        where = f"layer {node.layer}, {len(node.neurons)} neurons: {node.how}"
        name = written.name if written.role == "variable" else "map"
        lines = [] if written.role == "variable" else wrapped(written.name)
        return Box("map", name, [*lines, where], written.name)
