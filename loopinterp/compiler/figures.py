"""Programs, expressions and circuits as graphs."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import count, product
from typing import Annotated

from pydantic import Field

from loopinterp.compiler.assembly import describe, lay_out
from loopinterp.compiler.circuit import Circuit, FeatureNode, HeadNode, NeuronGroup
from loopinterp.compiler.lowering import lower_program
from loopinterp.compiler.validation import MAX_LENGTH, validate
from loopinterp.core.boundary import checked
from loopinterp.core.errors import InputError, need
from loopinterp.figures.circuit_graph import CircuitGraph
from loopinterp.figures.circuit_layout import MOST_NODES, GraphEdge, GraphNode
from loopinterp.programs import expressions as nodes
from loopinterp.programs.expressions import Expr, Seq, code, postorder
from loopinterp.programs.program import LoopProgram
from loopinterp.programs.stock_programs import get_program, list_programs

# Section of a model, in running order -> of a drawing
_PARTS = {"prelude": "prelude", "block": "loop", "coda": "readout"}
_OUTPUT = "output"  # the node of the unembedding, which reads the answer
_MAP = nodes.Elementwise | nodes.TokMap


def draw(what: LoopProgram | Seq | Circuit, *, program: LoopProgram | None = None) -> CircuitGraph:
    """A program, an expression or a circuit as a graph.

    A program is drawn as its expressions: heads with their selections, and maps. A circuit is drawn
    by layers: heads, groups of neurons, variables, and their reads; features within a loop are
    edges. ``program`` is shown beside a circuit; by default the registered one of its name.
    ``.show()`` opens the graph in a browser; :func:`loopinterp.pages.write_circuit_page` writes it.

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
    expected = "a LoopProgram, a sequence expression or a Circuit"
    fix = "Pass get_program('ripple'), cumsum(tokens) or compiled.circuit."
    raise InputError("what to draw", expected=expected, given=type(what).__name__, fix=fix)


@checked
def draw_program(
    program: LoopProgram, *, max_length: Annotated[int, Field(ge=1, le=MAX_LENGTH)] = 9
) -> CircuitGraph:
    """The circuit that a program compiles to; its expressions if it does not compile.

    ``max_length``, the positions of the longest sequence, changes numbers of neurons and values.

    Example:
        >>> draw_program(get_program("ripple"))
        <CircuitGraph ripple: 8 nodes, 10 edges>
    """
    try:
        circuit = describe(lay_out(lower_program(validate(program, max_length))))
    except InputError:
        return draw(program)
    return draw(circuit, program=program)


def _expression_graph(
    title: str, parts: Mapping[str, Mapping[str, Seq]], *, variables: tuple[str, ...], text: str
) -> CircuitGraph:
    drawn: dict[str, GraphNode] = {
        f"var {name}": GraphNode(f"var {name}", "variable", name, "loop", -1, "variable", (name,))
        for name in variables
    }
    edges: dict[GraphEdge, None] = {}
    for section, results in parts.items():
        ids: dict[Expr, str] = {}
        stage: dict[Expr, int] = {}
        titles: dict[Expr, str] = {}  # by which the formulas that read them call them
        numbers = {"map": count(1), "head": count(1)}
        for node in _drawn(results):
            formula = code(node, short=True)
            if isinstance(node, nodes.Tokens | nodes.Indices | nodes.Var):
                ids[node] = f"var {node.name}" if isinstance(node, nodes.Var) else formula
                titles[node], stage[node] = formula, -1
                if ids[node] not in drawn:
                    label = {"indices": "positions"}.get(formula, formula)
                    drawn[formula] = GraphNode(formula, "input", label, "input")
                continue
            # What the node reads, and the maps inside it: the nodes of both, each with its role.
            inputs: dict[tuple[Expr, str], None] = {}
            stack = _reads(node)[::-1]
            while stack:
                child, role = stack.pop()
                if child in ids:
                    inputs[child, role] = None
                elif not isinstance(child, nodes.Full):
                    stack += [(below, role) for below, _ in _reads(child)][::-1]
            name, does = _described(node, titles)
            kind = "map" if isinstance(node, _MAP) else "head"
            titles[node] = name or f"{kind} {next(numbers[kind])}"
            stage[node] = 1 + max((stage[child] for child, _ in inputs), default=-1)
            ids[node] = f"{section} {len(drawn)}"
            unnamed = kind == "map" and not name
            drawn[ids[node]] = GraphNode(
                ids[node],
                "head" if kind == "head" else "neurons",
                titles[node] if kind == "map" and name else f"{titles[node]}: {does}",
                section,
                stage[node],
                names=() if unnamed else (titles[node],),
                facts=(("Computes", does), ("As code", formula)),
            )
            edges.update({GraphEdge(ids[c], ids[node], role=role): None for c, role in inputs})
        for name, x in results.items():
            to, lag = (f"var {name}", int(section == "loop")) if section != "readout" else (name, 0)
            if section == "readout":
                last = 1 + max(stage.values(), default=0)
                drawn[name] = GraphNode(name, "readout", name, section, max(last, 0))
            if x in ids:
                edges[GraphEdge(ids[x], to, lag=lag)] = None
    return CircuitGraph(title, tuple(drawn.values()), tuple(edges), text)


def _drawn(results: Mapping[str, Seq]) -> list[Expr]:
    unseen = nodes.Full | nodes.Select
    every = [node for node in postorder(results.values()) if not isinstance(node, unseen)]
    parents = Counter(child for node in every for child, _ in _reads(node))
    parents.update(results.values())
    in_a_formula = {child for node in every if isinstance(node, _MAP) for child in node.children}
    named = {node for node in every if getattr(node, "name", None)} | set(results.values())
    # A map that only one formula reads is a part of that formula.
    drawn = [
        node
        for node in every
        if not isinstance(node, _MAP)
        or node in named
        or parents[node] != 1
        or node not in in_a_formula
    ]
    expected, fix = f"at most {MOST_NODES} boxes", "Draw a subexpression."
    need(len(drawn) <= MOST_NODES, "what to draw", expected, str(len(drawn)), fix)
    return drawn


def _reads(node: Expr) -> list[tuple[Expr, str]]:
    if isinstance(node, nodes.ShiftRight):
        return [(node.x, "value")]
    if isinstance(node, nodes.Aggregate | nodes.SelWidth):
        value = [(node.value, "value")] if isinstance(node, nodes.Aggregate) else []
        return [*zip(node.selector.children, ("key", "query")), *value]
    return [(child, "") for child in node.children]


def _described(node: Expr, titles: Mapping[Expr, str]) -> tuple[str, str]:
    """The name of a head or map, if any, and its computation in terms of titled nodes."""

    def text(x: Expr) -> str:
        return str(x.value) if isinstance(x, nodes.Full) else code(x, short=True, names=titles)

    match node:
        case nodes.TokMap() if node.name:
            otherwise = "" if node.default is None else f", else {node.default}"
            return node.name, f"{text(node.x)}: {dict(node.table)}{otherwise}"
        case nodes.TokMap() | nodes.Elementwise():
            return "", text(node)
        case nodes.ShiftRight():
            return node.selector.name or "shift", f"{text(node.x)}, {node.n} to the left"
    assert isinstance(node, nodes.Aggregate | nodes.SelWidth)
    select = node.selector
    assert isinstance(select, nodes.Select)  # there is no other selector
    holds = select.predicate if isinstance(select.predicate, str) else "in pairs with"
    where = f"where {text(select.k)} {holds} {text(select.q)}"
    where = "of all before" if holds == "true" else where
    if isinstance(node, nodes.SelWidth):
        return select.name or "", f"number of keys {where}"
    what = f"{node.mode} of {text(node.value)} {where}, else {node.default}"
    return select.name or "", what


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
                facts = (("Role", "injected input, read at every loop"), values)
                node = GraphNode(f.id, "input", label, "input", 0, "", (f.name,), facts)
            drawn[f.id] = node
            edges.update({GraphEdge(f.id, name): None for name in to})
            for name in by:
                lag = int(drawn[name].section == "loop")
                edges[GraphEdge(name, f.id, lag=lag)] = None
    if answers:
        last = 1 + max((n.stage for n in drawn.values() if n.section == "readout"), default=-1)
        facts = (("Role", "unembedding of the state after the last loop"),)
        drawn[_OUTPUT] = GraphNode(_OUTPUT, "readout", _OUTPUT, "readout", last, facts=facts)
    title = ", ".join((circuit.program, *circuit.disguises))
    return CircuitGraph(title, tuple(drawn.values()), tuple(edges), str(program or ""))


def _labels(
    parts: Sequence[HeadNode | NeuronGroup], features: Mapping[str, FeatureNode]
) -> dict[str, str]:
    """A code for each part, in which earlier parts have short names."""
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
    kind = "a variable" if written.role == "variable" else "an intermediate value"
    facts = (("Computes", name), ("Method", part.how), ("Writes", kind))
    facts = (*facts, ("Values", _values(written)))
    # The program's variables in the expression.
    words = re.split(r"[\s(),]+", name)
    variables = () if written.role == "variable" else (v for v in circuit.variables if v in words)
    names = (name, *variables)
    return GraphNode(part.id, "neurons", label, section, 2 * part.layer + 1, note, names, facts)


def _values(feature: FeatureNode) -> str:
    most, n = 24, len(feature.values)
    shown = ", ".join(map(str, feature.values[:most]))
    return f"{shown}, … ({n})" if n > most else shown
