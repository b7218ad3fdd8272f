"""Expressions and programs as readable code."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from loopinterp.rasp.expr import (
    Aggregate,
    Elementwise,
    Full,
    Indices,
    Select,
    SelWidth,
    ShiftRight,
    Tokens,
    TokMap,
    Var,
)
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
    roots = [*program.prepare.values(), *program.step.values(), program.finish]
    lines = [f"program {program.name} for {program.task}: T(n) = {program.n_loops}"]
    for node in postorder(roots):
        if isinstance(node, TokMap) and node.name:
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
    if isinstance(node, Tokens):
        return "tokens"
    if isinstance(node, Indices):
        return "indices"
    if isinstance(node, Full):
        return f"full({node.value})"
    if isinstance(node, Var):
        return node.name if short else f"var({node.name!r})"
    if isinstance(node, Elementwise):
        return _write_elementwise(node, text)
    if isinstance(node, ShiftRight):
        return f"shift_right({text[node.x]}, {node.n}, default={node.default})"
    if isinstance(node, SelWidth):
        return f"sel_width({text[node.selector]})"
    if isinstance(node, Aggregate):
        inside = f"{text[node.selector]}, {text[node.value]}"
        return f"aggregate({inside}, {node.mode!r}, default={node.default})"
    if isinstance(node, TokMap):
        return _write_table(node, text, short)
    if isinstance(node, Select):
        return _write_select(node, text)
    raise TypeError(f"no code for {type(node).__name__}")


def _write_elementwise(node: Elementwise, text: dict[Expr, str]) -> str:
    symbol = OPS[node.op].symbol
    if symbol is None:
        bare = len(node.args) > 1  # abs(3) would be Python's own
        args = [
            str(arg.value) if bare and isinstance(arg, Full) else text[arg] for arg in node.args
        ]
        return f"{node.op}({', '.join(args)})"
    args = [
        f"({text[arg]})" if isinstance(arg, Elementwise) and OPS[arg.op].symbol else text[arg]
        for arg in node.args
    ]
    if len(args) == 1:
        return f"{symbol}{args[0]}"
    # A bare integer is enough where the other side is a sequence already.
    if isinstance(node.args[1], Full):
        args[1] = str(node.args[1].value)
    return f"{args[0]} {symbol} {args[1]}"


def _write_table(node: TokMap, text: dict[Expr, str], short: bool) -> str:
    if short and node.name:
        return node.name if isinstance(node.x, Tokens) else f"{node.name}({text[node.x]})"
    rest = "" if node.default is None else f", default={node.default}"
    rest += "" if node.name is None else f", name={node.name!r}"
    return f"tok_map({text[node.x]}, {dict(node.table)}{rest})"


def _write_select(node: Select, text: dict[Expr, str]) -> str:
    predicate = node.predicate if isinstance(node.predicate, str) else list(node.predicate)
    rest = "" if node.causal else ", causal=False"
    rest += "" if node.name is None else f", name={node.name!r}"
    return f"select({text[node.k]}, {text[node.q]}, {predicate!r}{rest})"
