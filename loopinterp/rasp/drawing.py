"""Programs, expressions and circuits as graphs to look at."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import count, product

from loopinterp.errors import InputError
from loopinterp.plotting.circuit_graph import CircuitGraph
from loopinterp.plotting.circuit_parts import GraphEdge, GraphNode
from loopinterp.rasp.compiler.circuit import Circuit, FeatureNode, HeadNode, NeuronGroup
from loopinterp.rasp.compiler.circuit_description import describe
from loopinterp.rasp.compiler.lower.program_lowering import lower_program
from loopinterp.rasp.compiler.stream_layout import lay_out
from loopinterp.rasp.compiler.validate import validate
from loopinterp.rasp.compiler.value_domains import infer_domains
from loopinterp.rasp.expr import Seq
from loopinterp.rasp.expression_graph import expression_graph, program_graph
from loopinterp.rasp.program import LoopProgram
from loopinterp.rasp.program_registry import get_program, list_programs

PARTS = {"embedding": "input", "prelude": "prelude", "block": "loop", "coda": "readout"}
"""Section of a model -> of a drawing."""

OUTPUT = "output"
"""The node of the unembedding, which reads the answer."""

_MOST_VALUES, _LONG = 24, 20
_NAMED = re.compile(r"select\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*?name='(\w+)'\)")
"""A selection that has a name, in code; parentheses in it two deep."""


def draw(what: LoopProgram | Seq | Circuit, *, program: LoopProgram | None = None) -> CircuitGraph:
    """A program, an expression or a circuit as a graph, to be shown, clicked through or saved.

    A program is drawn as its expressions: heads with what they select, and maps. A circuit is drawn
    as it is in the model's layers: heads, groups of neurons, variables, and what each reads; the
    features that only go from one part to the next within a loop are its edges. In a notebook the
    graph is shown as it is; ``.show()`` opens it in a browser, and
    :func:`loopinterp.report.write_circuit_page` writes it to a file.

    Args:
        what: A program, a sequence expression, or the circuit of a compiled model.
        program: Of a circuit: the program beside it; the registered one of its name by default.

    Raises:
        InputError: it is none of them, or too large to be looked at.

    Example:
        >>> from loopinterp.rasp import compile_program, get_program
        >>> draw(compile_program("ripple", max_length=6).circuit)
        <CircuitGraph ripple: 8 nodes, 10 edges>
        >>> [node.label for node in draw(get_program("prefix_xor")).nodes if node.kind == "head"]
        ['shift_1: prefix, 1 to the left']
    """
    if isinstance(what, LoopProgram):
        return program_graph(what)
    if isinstance(what, Seq):
        return expression_graph(what)
    if isinstance(what, Circuit):
        if program is None and what.program in list_programs():
            program = get_program(what.program)
        return _circuit_graph(what, program)
    raise InputError(
        "what to draw",
        expected="a LoopProgram, a sequence expression or a Circuit",
        given=type(what).__name__,
        fix="Pass get_program('ripple'), an expression such as cumsum(tokens), or "
        "compiled.circuit.",
    )


def draw_program(program: LoopProgram, *, max_length: int = 9) -> CircuitGraph:
    """The circuit that a program compiles to, as a graph; its expressions if it does not compile.

    No weights are made, so that it takes a moment only.

    Args:
        program: The program.
        max_length: Positions of the longest sequence; it changes numbers of neurons and values.

    Example:
        >>> from loopinterp.rasp import get_program
        >>> draw_program(get_program("ripple"))
        <CircuitGraph ripple: 8 nodes, 10 edges>
    """
    try:
        source = validate(program, max_length)
        circuit = describe(lay_out(lower_program(source, infer_domains(source))))
    except InputError:
        return draw(program)
    return draw(circuit, program=program)


def _circuit_graph(circuit: Circuit, program: LoopProgram | None) -> CircuitGraph:
    features = {f.id: f for f in circuit.features}
    parts = [*circuit.heads, *(group for group in circuit.neurons if group.writes)]
    writers: dict[str, list[str]] = {}
    readers: dict[str, list[str]] = {}
    for source, target in circuit.edges:
        if target in features:
            writers.setdefault(target, []).append(source)
        elif target in {part.id for part in parts}:
            readers.setdefault(source, []).append(target)
    answers = _answers(circuit, program, readers)
    called = _labels(parts, features)
    nodes = {part.id: _part(part, called[part.id], features, circuit) for part in parts}
    edges: dict[GraphEdge, None] = {}
    for f in circuit.features:
        to = [*readers.get(f.id, []), *([OUTPUT] if f.id in answers else [])]
        by = [name for name in writers.get(f.id, []) if name in nodes]
        if f.role != "variable" and by:  # it only goes from one part to others
            edges.update({GraphEdge(a, b): None for a, b in product(by, to)})
        elif to or by:
            nodes[f.id] = _feature(f)
            edges.update({GraphEdge(f.id, name): None for name in to})
            for name in by:
                lag = int(nodes[name].section == "loop")
                edges[GraphEdge(name, f.id, lag=lag)] = None
    if answers:
        last = 1 + max((n.stage for n in nodes.values() if n.section == "readout"), default=-1)
        facts = (("What it is", "the unembedding: it reads the answer from the last loop"),)
        nodes[OUTPUT] = GraphNode(OUTPUT, "readout", OUTPUT, "readout", last, facts=facts)
    title = ", ".join((circuit.program, *circuit.disguises))
    return CircuitGraph(title, tuple(nodes.values()), tuple(edges), str(program or ""))


def _answers(
    circuit: Circuit, program: LoopProgram | None, readers: Mapping[str, list[str]]
) -> set[str]:
    """The features that the unembedding reads: of the coda what nothing else does."""
    of_coda = {f.id for f in circuit.features if f.section == "coda" and f.id not in readers}
    if circuit.n_layers.get("coda") or of_coda:
        return of_coda
    read = program.finish.variables if program else set(circuit.variables)
    return {f.id for name, f in circuit.variables.items() if name in read}


def _labels(
    parts: Sequence[HeadNode | NeuronGroup], features: Mapping[str, FeatureNode]
) -> dict[str, str]:
    """What each part is called: code in which parts before it go by short names of their own."""
    order = sorted(parts, key=lambda p: ([*PARTS].index(p.section), p.layer))
    short: dict[str, str] = {}
    numbers = count(1)
    labels = {}
    for part in order:
        if isinstance(part, HeadNode):
            whole = re.sub(r"var\('(\w+)'\)", r"\1", part.attends_to or part.selector)
            name = part.selector if part.selector != part.attends_to else ""
        else:
            whole, name = features[part.writes].name.removeprefix("answer: "), ""
            if features[part.writes].role == "variable":
                labels[part.id] = f"new {whole}"
                continue
        label = whole
        for code in sorted(short, key=len, reverse=True):
            label = label.replace(code, short[code])
        label = _NAMED.sub(r"\1", label)
        if name:
            label = short[whole] = name
        elif len(label) > _LONG and whole not in short:
            short[whole] = f"m{next(numbers)}"
            label = f"{short[whole]} = {label}"
        labels[part.id] = label
    return labels


def _part(
    part: HeadNode | NeuronGroup,
    label: str,
    features: Mapping[str, FeatureNode],
    circuit: Circuit,
) -> GraphNode:
    section = PARTS[part.section]
    if isinstance(part, HeadNode):
        note = f"head {part.layer}.{part.head}"
        facts = [("Attends to", part.attends_to)] if part.attends_to else []
        return GraphNode(
            part.id,
            "head",
            label,
            section,
            2 * part.layer,
            note,
            (part.selector, *(["shift_right"] if part.selector.startswith("shift_") else [])),
            (("Selector", part.selector), *facts),
        )
    written = features[part.writes]
    name = written.name.removeprefix("answer: ")
    n = len(part.neurons)
    note = f"MLP {part.layer}" + (f", {n} neuron{'s' * (n != 1)}" if n else "")
    what = "the variable" if written.role == "variable" else "for those that read it"
    facts = (("Computes", name), ("How", f"{part.how}, {what}"), ("Values", _values(written)))
    names = (name,) if written.role == "variable" else (name, *_words(name, circuit))
    return GraphNode(part.id, "neurons", label, section, 2 * part.layer + 1, note, names, facts)


def _words(name: str, circuit: Circuit) -> tuple[str, ...]:
    """The program's variables that an expression is of."""
    inside = name.replace("(", " ").replace(")", " ").replace(",", " ").split()
    return tuple(v for v in circuit.variables if v in inside)


def _feature(feature: FeatureNode) -> GraphNode:
    if feature.role == "variable":
        n = len(feature.values)
        note, facts = f"variable, {n} values", (("Values", _values(feature)),)
        return GraphNode(
            feature.id, "variable", feature.name, "loop", -1, note, (feature.name,), facts
        )
    label = {"indices": "positions"}.get(feature.name, feature.name)
    facts = (("What it is", "read anew at every loop"), ("Values", _values(feature)))
    return GraphNode(feature.id, "input", label, "input", 0, "", (feature.name,), facts)


def _values(feature: FeatureNode) -> str:
    shown = ", ".join(map(str, feature.values[:_MOST_VALUES]))
    return f"{shown}, … ({len(feature.values)})" if len(feature.values) > _MOST_VALUES else shown
