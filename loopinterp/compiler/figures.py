"""Programs, expressions and circuits as graphs to look at."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count, product

from loopinterp.compiler.circuit import Circuit, FeatureNode, HeadNode, NeuronGroup
from loopinterp.compiler.lowering import lower_program
from loopinterp.compiler.stream_layout import describe, lay_out
from loopinterp.compiler.validation import infer_domains, validate
from loopinterp.core.errors import InputError
from loopinterp.figures.circuit_graph import CircuitGraph
from loopinterp.figures.circuit_parts import MOST_NODES, GraphEdge, GraphNode
from loopinterp.programs import expressions as nodes
from loopinterp.programs.expressions import Seq
from loopinterp.programs.nodes import Expr, code, postorder
from loopinterp.programs.program import LoopProgram
from loopinterp.programs.registry import get_program, list_programs

_PARTS = {"embedding": "input", "prelude": "prelude", "block": "loop", "coda": "readout"}
"""Section of a model -> of a drawing."""

_OUTPUT = "output"
"""The node of the unembedding, which reads the answer."""

_MAP = nodes.Elementwise | nodes.TokMap


def draw(what: LoopProgram | Seq | Circuit, *, program: LoopProgram | None = None) -> CircuitGraph:
    """A program, an expression or a circuit as a graph, to be shown, clicked through or saved.

    A program is drawn as its expressions: heads with what they select, and maps. A circuit is drawn
    as it is in the model's layers: heads, groups of neurons, variables, and their reads; features
    that only lead from one part to the next within a loop are edges. Beside it stands its
    ``program``, by default the registered one of its name. A notebook shows the graph; ``.show()``
    opens it in a browser, and :func:`loopinterp.pages.write_circuit_page` writes it to a file.

    Raises:
        InputError: it is none of them, or too large to be looked at.

    Example:
        >>> from loopinterp.compiler import compile_program
        >>> draw(compile_program("ripple", max_length=6).circuit)
        <CircuitGraph ripple: 8 nodes, 10 edges>
        >>> [node.label for node in draw(get_program("prefix_xor")).nodes if node.kind == "head"]
        ['shift_1: prefix, 1 to the left']
    """
    if isinstance(what, LoopProgram):
        parts = {
            "prelude": dict(what.prepare),
            "loop": dict(what.step),
            "readout": {_OUTPUT: what.finish},
        }
        title = f"{what.name}: T(n) = {what.n_loops}"
        return _expression_graph(title, parts, variables=what.variables, text=str(what))
    if isinstance(what, Seq):
        parts, variables = {"readout": {_OUTPUT: what}}, tuple(sorted(what.variables))
        return _expression_graph(code(what, short=True)[:60], parts, variables=variables, text="")
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

    No weights are made. ``max_length``, the positions of the longest sequence, changes numbers of
    neurons and values.

    Example:
        >>> draw_program(get_program("ripple"))
        <CircuitGraph ripple: 8 nodes, 10 edges>
    """
    try:
        source = validate(program, max_length)
        circuit = describe(lay_out(lower_program(source, infer_domains(source))))
    except InputError:
        return draw(program)
    return draw(circuit, program=program)


@dataclass(eq=False)
class Box:
    """What one part of a transformer would do: an expression of a program."""

    kind: str  # "source": tokens, positions, variables; "head": a selection; "map": a formula
    title: str
    does: str
    code: str
    # The boxes that it reads, each as "value", "key", "query", or "".
    inputs: list[tuple[Box, str]] = field(default_factory=list)


def expression_boxes(results: Mapping[str, Seq]) -> dict[Expr, Box]:
    """The boxes behind some named results, children before parents.

    Raises:
        InputError: there are too many to be looked at.
    """
    unseen = nodes.Full | nodes.Select
    drawn = [node for node in postorder(results.values()) if not isinstance(node, unseen)]
    parents = Counter(child for node in drawn for child, _ in _reads(node))
    parents.update(results.values())
    in_a_formula = {child for node in drawn if isinstance(node, _MAP) for child in node.children}
    named = {node for node in drawn if getattr(node, "name", None)} | set(results.values())
    # A map that only one formula reads is a part of that formula.
    boxed = [
        node
        for node in drawn
        if not isinstance(node, _MAP)
        or node in named
        or parents[node] != 1
        or node not in in_a_formula
    ]
    if len(boxed) > MOST_NODES:
        raise InputError(
            "what to draw",
            expected=f"at most {MOST_NODES} boxes",
            given=str(len(boxed)),
            fix="Draw a part of it: any subexpression can be drawn.",
        )
    box_of: dict[Expr, Box] = {}
    names: dict[Expr, str] = {}
    numbers = {"map": count(1), "head": count(1)}
    for node in boxed:
        box_of[node] = box = _box(node, names, numbers)
        names[node] = box.title
        # The boxes that its node reads, and the maps inside it.
        inputs: dict[tuple[Box, str], None] = {}
        stack = _reads(node)[::-1]
        while stack:
            child, role = stack.pop()
            if child in box_of:
                inputs[box_of[child], role] = None
            elif not isinstance(child, nodes.Full):
                stack += [(below, role) for below, _ in _reads(child)][::-1]
        box.inputs += inputs
    return box_of


def _reads(node: Expr) -> list[tuple[Expr, str]]:
    """The children of a node, and the role of each."""
    if isinstance(node, nodes.ShiftRight):
        return [(node.x, "value")]
    if isinstance(node, nodes.Aggregate | nodes.SelWidth):
        value = [(node.value, "value")] if isinstance(node, nodes.Aggregate) else []
        return [*zip(node.selector.children, ("key", "query")), *value]
    return [(child, "") for child in node.children]


def _box(node: Expr, names: Mapping[Expr, str], numbers: Mapping[str, Iterator[int]]) -> Box:
    formula = code(node, short=True)

    def text(x: Expr) -> str:
        return str(x.value) if isinstance(x, nodes.Full) else code(x, short=True, names=names)

    match node:
        case nodes.Tokens() | nodes.Indices() | nodes.Var():
            return Box("source", formula, "", formula)
        case nodes.TokMap() if node.name:
            otherwise = "" if node.default is None else f", else {node.default}"
            what = f"{text(node.x)}: {dict(node.table)}{otherwise}"
            return Box("map", node.name, what, formula)
        case nodes.TokMap() | nodes.Elementwise():
            return Box("map", f"map {next(numbers['map'])}", text(node), formula)
        case nodes.ShiftRight():
            what = f"{text(node.x)}, {node.n} to the left"
            return Box("head", node.selector.name or "shift", what, formula)
    assert isinstance(node, nodes.Aggregate | nodes.SelWidth)
    select = node.selector
    assert isinstance(select, nodes.Select)  # there is no other selector
    holds = select.predicate if isinstance(select.predicate, str) else "in pairs with"
    where = f"where {text(select.k)} {holds} {text(select.q)}"
    where = "of all before" if holds == "true" else where
    what = f"number of keys {where}"
    if isinstance(node, nodes.Aggregate):
        what = f"{node.mode} of {text(node.value)} {where}, else {node.default}"
    return Box("head", select.name or f"head {next(numbers['head'])}", what, formula)


def _expression_graph(
    title: str, parts: Mapping[str, Mapping[str, Seq]], *, variables: tuple[str, ...], text: str
) -> CircuitGraph:
    drawn: dict[str, GraphNode] = {
        f"var {name}": GraphNode(f"var {name}", "variable", name, "loop", -1, "variable", (name,))
        for name in variables
    }
    edges: dict[GraphEdge, None] = {}
    for section, results in parts.items():
        boxes = expression_boxes(results)
        ids: dict[Box, str] = {}
        stage: dict[Box, int] = {}
        for expr, box in boxes.items():
            if isinstance(expr, nodes.Var):
                ids[box], stage[box] = f"var {expr.name}", -1
                continue
            if box.kind == "source":
                ids[box], stage[box] = box.title, -1
                label = {"indices": "positions"}.get(box.title, box.title)
                drawn[box.title] = GraphNode(box.title, "input", label, "input")
                continue
            stage[box] = 1 + max((stage[child] for child, _ in box.inputs), default=-1)
            ids[box] = name = f"{section} {len(drawn)}"
            kind = "head" if box.kind == "head" else "neurons"
            unnamed = box.kind == "map" and box.title.startswith("map ")
            label = f"{box.title}: {box.does}" if kind == "head" or unnamed else box.title
            names = () if unnamed else (box.title,)
            facts = (("Computes", box.does), ("As code", box.code))
            node = GraphNode(name, kind, label, section, stage[box], names=names, facts=facts)
            drawn[name] = node
            edges.update({GraphEdge(ids[c], name, role=role): None for c, role in box.inputs})
        for name, x in results.items():
            to, lag = (f"var {name}", int(section == "loop")) if section != "readout" else (name, 0)
            if section == "readout":
                last = 1 + max(stage.values(), default=0)
                drawn[name] = GraphNode(name, "readout", name, section, max(last, 0))
            if x in boxes:
                edges[GraphEdge(ids[boxes[x]], to, lag=lag)] = None
    return CircuitGraph(title, tuple(drawn.values()), tuple(edges), text)


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
    # The unembedding reads the features of the coda that no part reads, or variables.
    answers = {f.id for f in circuit.features if f.section == "coda" and f.id not in readers}
    if not answers and not circuit.n_layers.get("coda"):
        read = program.finish.variables if program else circuit.variables
        answers = {f.id for name, f in circuit.variables.items() if name in read}
    labels = _labels(parts, features)
    drawn = {part.id: _part_node(part, labels[part.id], features, circuit) for part in parts}
    edges: dict[GraphEdge, None] = {}
    for f in circuit.features:
        to = [*readers.get(f.id, []), *([_OUTPUT] if f.id in answers else [])]
        by = [name for name in writers.get(f.id, []) if name in drawn]
        if f.role != "variable" and by:  # it only leads from one part to others
            edges.update({GraphEdge(a, b): None for a, b in product(by, to)})
        elif to or by:
            values = ("Values", _values(f))
            if f.role == "variable":
                note = f"variable, {len(f.values)} values"
                node = GraphNode(f.id, "variable", f.name, "loop", -1, note, (f.name,), (values,))
            else:
                label = {"indices": "positions"}.get(f.name, f.name)
                facts = (("What it is", "read anew at every loop"), values)
                node = GraphNode(f.id, "input", label, "input", 0, "", (f.name,), facts)
            drawn[f.id] = node
            edges.update({GraphEdge(f.id, name): None for name in to})
            for name in by:
                lag = int(drawn[name].section == "loop")
                edges[GraphEdge(name, f.id, lag=lag)] = None
    if answers:
        last = 1 + max((n.stage for n in drawn.values() if n.section == "readout"), default=-1)
        facts = (("What it is", "the unembedding: it reads the answer from the last loop"),)
        drawn[_OUTPUT] = GraphNode(_OUTPUT, "readout", _OUTPUT, "readout", last, facts=facts)
    title = ", ".join((circuit.program, *circuit.disguises))
    return CircuitGraph(title, tuple(drawn.values()), tuple(edges), str(program or ""))


def _labels(
    parts: Sequence[HeadNode | NeuronGroup], features: Mapping[str, FeatureNode]
) -> dict[str, str]:
    """Part -> its code, in which earlier parts have short names."""
    order = sorted(parts, key=lambda p: ([*_PARTS].index(p.section), p.layer))
    short: dict[str, str] = {}
    numbers = count(1)
    labels = {}
    for part in order:
        if isinstance(part, HeadNode):
            formula = re.sub(r"var\('(\w+)'\)", r"\1", part.attends_to or part.selector)
            name = part.selector if part.selector != part.attends_to else ""
        else:
            formula, name = features[part.writes].name.removeprefix("answer: "), ""
            if features[part.writes].role == "variable":
                labels[part.id] = f"new {formula}"
                continue
        label = formula
        for longer in sorted(short, key=len, reverse=True):
            label = label.replace(longer, short[longer])
        # A selection that has a name goes by it; parentheses in it are two deep.
        selection = r"select\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*?name='(\w+)'\)"
        label = re.sub(selection, r"\1", label)
        if name:
            label = short[formula] = name
        elif len(label) > 20 and formula not in short:
            short[formula] = f"m{next(numbers)}"
            label = f"{short[formula]} = {label}"
        labels[part.id] = label
    return labels


def _part_node(
    part: HeadNode | NeuronGroup,
    label: str,
    features: Mapping[str, FeatureNode],
    circuit: Circuit,
) -> GraphNode:
    section = _PARTS[part.section]
    if isinstance(part, HeadNode):
        note = f"head {part.layer}.{part.head}"
        names = (part.selector, *(["shift_right"] if part.selector.startswith("shift_") else []))
        attends = [("Attends to", part.attends_to)] if part.attends_to else []
        facts = (("Selector", part.selector), *attends)
        return GraphNode(part.id, "head", label, section, 2 * part.layer, note, names, facts)
    written = features[part.writes]
    name = written.name.removeprefix("answer: ")
    n = len(part.neurons)
    note = f"MLP {part.layer}" + (f", {n} neuron{'s' * (n != 1)}" if n else "")
    what = "the variable" if written.role == "variable" else "for those that read it"
    facts = (("Computes", name), ("How", f"{part.how}, {what}"), ("Values", _values(written)))
    # The program's variables in the expression.
    words = re.split(r"[\s(),]+", name)
    variables = () if written.role == "variable" else (v for v in circuit.variables if v in words)
    names = (name, *variables)
    return GraphNode(part.id, "neurons", label, section, 2 * part.layer + 1, note, names, facts)


def _values(feature: FeatureNode) -> str:
    most, n = 24, len(feature.values)
    shown = ", ".join(map(str, feature.values[:most]))
    return f"{shown}, … ({n})" if n > most else shown
