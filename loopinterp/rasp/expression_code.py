"""Expressions and programs as readable code."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from loopinterp.rasp import expr as nodes
from loopinterp.rasp.graph import postorder
from loopinterp.rasp.node import Expr
from loopinterp.rasp.ops import OPS

if TYPE_CHECKING:
    from loopinterp.rasp.program import LoopProgram

MAX_LENGTH = 2_000
"""Characters of code after which a subexpression is left out as ``…``."""


def code(expr: Expr, *, short: bool = False, names: Mapping[Expr, str] | None = None) -> str:
    """The expression as code in the words of :mod:`loopinterp.rasp.language`.

    Evaluated, the code gives the same node, unless parts of a very large expression were left
    out.

    Args:
        expr: Any expression.
        short: Write named tables and selectors by their names alone.
        names: Subexpressions that go by a name.
    """
    text = dict(names or {})
    for node in postorder([expr], text):
        written = _write(node, text, short)
        text[node] = written if len(written) <= MAX_LENGTH else "…"
    return text[expr]


def program_code(program: LoopProgram) -> str:
    """A loop program in a few lines: its tables, ``prepare``, ``loop`` and ``finish``."""
    lines = [f"program {program.name} for {program.task}: T(n) = {program.n_loops}"]
    for node in postorder(program.expressions):
        if isinstance(node, nodes.TokMap) and node.name:
            rest = "" if node.default is None else f", otherwise {node.default}"
            table = str(dict(node.table))
            table = table if len(table) <= MAX_LENGTH else f"a table of {len(node.table):,} entries"
            lines.append(f"  {node.name}: {table}{rest}")
    lines.append("  prepare")
    lines += [f"    {name} = {code(x, short=True)}" for name, x in program.prepare.items()]
    lines.append("  loop")
    lines += [f"    {name} = {code(x, short=True)}" for name, x in program.step.items()]
    lines += ["  finish", f"    {code(program.finish, short=True)}"]
    return "\n".join(lines)


def _write(node: Expr, text: dict[Expr, str], short: bool) -> str:
    """The code of one node, given that of the nodes below it."""
    match node:
        case nodes.Tokens():
            return "tokens"
        case nodes.Indices():
            return "indices"
        case nodes.Full():
            return f"full({node.value})"
        case nodes.Var():
            return node.name if short else f"var({node.name!r})"
        case nodes.Elementwise():
            return _write_elementwise(node, text)
        case nodes.ShiftRight():
            return f"shift_right({text[node.x]}, {node.n}, default={node.default})"
        case nodes.SelWidth():
            return f"sel_width({text[node.selector]})"
        case nodes.Aggregate():
            inside = f"{text[node.selector]}, {text[node.value]}"
            return f"aggregate({inside}, {node.mode!r}, default={node.default})"
        case nodes.TokMap() if short and node.name:
            is_plain = isinstance(node.x, nodes.Tokens)
            return node.name if is_plain else f"{node.name}({text[node.x]})"
        case nodes.TokMap():
            default = "" if node.default is None else f", default={node.default}"
            return f"tok_map({text[node.x]}, {dict(node.table)}{default}{_name(node)})"
        case nodes.Select():
            predicate = node.predicate if isinstance(node.predicate, str) else list(node.predicate)
            causal = "" if node.causal else ", causal=False"
            inside = f"{text[node.k]}, {text[node.q]}, {predicate!r}{causal}{_name(node)}"
            return f"select({inside})"
    raise TypeError(f"no code for {type(node).__name__}")


def _name(node: nodes.TokMap | nodes.Select) -> str:
    return "" if node.name is None else f", name={node.name!r}"


def _write_elementwise(node: nodes.Elementwise, text: dict[Expr, str]) -> str:
    symbol = OPS[node.op].symbol
    bare = [str(arg.value) if isinstance(arg, nodes.Full) else text[arg] for arg in node.args]
    if symbol is None:
        # abs(3) would be Python's own.
        args = bare if len(bare) > 1 else [text[node.args[0]]]
        return f"{node.op}({', '.join(args)})"
    args = [
        f"({text[arg]})" if isinstance(arg, nodes.Elementwise) and OPS[arg.op].symbol else text[arg]
        for arg in node.args
    ]
    if len(args) == 1:
        return f"{symbol}{args[0]}"
    # A bare integer is enough where the other side is a sequence already.
    right = bare[1] if isinstance(node.args[1], nodes.Full) else args[1]
    return f"{args[0]} {symbol} {right}"
