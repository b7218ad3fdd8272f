"""A circuit in boxes: the features, the heads and neurons that read it, and what they write."""

from __future__ import annotations

from collections.abc import Mapping

from loopinterp.rasp.compiler.circuit import Circuit, FeatureNode, HeadNode, NeuronGroup
from loopinterp.rasp.expression_boxes import Box, wrapped

PARTS = {"prelude": "prelude", "block": "loop", "coda": "readout"}


def circuit_boxes(circuit: Circuit) -> dict[str, list[Box]]:
    """The boxes of each section: persistent features, heads, neurons, and what is written.

    Neurons that wipe are left out; scratch features are the boxes that write them.
    """
    found = {title: _section_boxes(circuit, section) for section, title in PARTS.items()}
    return {title: boxes for title, boxes in found.items() if boxes}


def _section_boxes(circuit: Circuit, section: str) -> list[Box]:
    """The boxes of one section, in the order in which it computes them."""
    features = {f.id: f for f in circuit.features}
    read = {source for source, _ in circuit.edges}
    box_of: dict[str, Box] = {}
    boxes, ends = [], []
    working = (*circuit.heads, *(group for group in circuit.neurons if group.writes))
    nodes = [node for node in working if node.section == section]
    for node in sorted(nodes, key=lambda n: (n.layer, isinstance(n, NeuronGroup))):
        box = _box(node, features)
        for source in (source for source, target in circuit.edges if target == node.id):
            if source not in box_of:
                name, n_values = features[source].name, len(features[source].values)
                lines = [f"{n_values} values"] if n_values != 1 else []
                box_of[source] = Box("source", name, lines, name)
                boxes.append(box_of[source])
            box.inputs.append((box_of[source], ""))
        boxes.append(box)
        for target in (target for source, target in circuit.edges if source == node.id):
            if target in read and features[target].role == "scratch":
                box_of[target] = box
            else:  # what nothing reads, the unembedding does
                ends.append((target if target in read else "output", box))
    after = " after a loop" if section == "block" else ""
    return [*boxes, *(Box("result", f"{n}{after}", [], n, [(box, "")]) for n, box in ends)]


def _box(node: HeadNode | NeuronGroup, features: Mapping[str, FeatureNode]) -> Box:
    if isinstance(node, HeadNode):
        where = f"layer {node.layer}, head {node.head}"
        return Box("head", node.selector, [where], node.attends_to)
    written = features[node.writes]
    where = f"layer {node.layer}, {len(node.neurons)} neurons: {node.how}"
    if written.role == "variable":
        return Box("map", written.name, [where], written.name)
    return Box("map", "map", [*wrapped(written.name), where], written.name)
