"""Expressions as data: an immutable graph of sequences and selectors.

Equal nodes are one object, so ``==`` and ``hash`` compare structure; ``eq(x, y)`` compares values.
``<``, ``+``, ``&`` and other operators build expressions.
"""

from __future__ import annotations

import dataclasses
import reprlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, ClassVar, TypeVar
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from loopinterp.core.errors import InputError, check_choice, check_integer
from loopinterp.programs.selection import OPS, PREDICATES, Lookup

# The deepest expression; characters of code after which a subexpression is left out as ``…``
MAX_DEPTH, MAX_LENGTH = 5_000, 2_000
_Node = TypeVar("_Node")
_NODES: WeakValueDictionary[tuple[Any, ...], Any] = WeakValueDictionary()


class _Interned(type):
    """Calling the class returns the one node with these fields."""

    def __call__(cls: Callable[..., _Node], *args: Any, **kwargs: Any) -> _Node:
        node = type.__call__(cls, *args, **kwargs)  # type: ignore[arg-type]
        # An equal node that somebody holds takes the place of the new one.
        return _NODES.setdefault(node.__reduce__(), node)


class Expr(metaclass=_Interned):
    """A node of an expression graph."""

    form: ClassVar[str]  # how it is written, in terms of its fields
    children: tuple[Expr, ...]  # the nodes it is made from, in order
    variables: frozenset[str]  # of the loop program, that it or a node below reads
    depth: int  # longest path to a leaf

    def __post_init__(self) -> None:
        _, values = self.__reduce__()
        # Fields are nodes, tuples of nodes, or plain values.
        flat = [v for value in values for v in (value if isinstance(value, tuple) else (value,))]
        children = tuple(v for v in flat if isinstance(v, Expr))
        self._set("children", children)
        self._set("variables", frozenset().union(*(c.variables for c in children)))
        self._set("depth", 1 + max((c.depth for c in children), default=0))
        if self.depth > MAX_DEPTH:
            expected, got = f"a depth of at most {MAX_DEPTH}", "a deeper one"
            fix = "Keep intermediate values in variables of a loop program."
            raise InputError("expression", expected=expected, given=got, fix=fix)

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def written(self, text: Mapping[Expr, str], *, short: bool) -> str:
        """This node's code, given that of the nodes below it; see :func:`code`."""
        fields = {name: getattr(self, name) for name in _types(type(self))}
        return self.form.format(**{name: text.get(x, x) for name, x in fields.items()})

    def __repr__(self) -> str:
        return code(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Expr:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), tuple(getattr(self, name) for name in _types(type(self)))


@cache
def _types(kind: type[Expr]) -> dict[str, str]:
    """The types of a node's fields, as written."""
    return {field.name: str(field.type) for field in dataclasses.fields(kind)}  # type: ignore[arg-type]


def postorder(roots: Iterable[Expr], known: Collection[Expr] = ()) -> list[Expr]:
    """Every node below the roots, once, children before parents; ``known`` ones are left out."""
    seen = set(known)
    order: list[Expr] = []
    stack = [(root, False) for root in reversed(list(roots))]
    while stack:
        node, children_done = stack.pop()
        if children_done:
            order.append(node)
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            stack.extend((child, False) for child in reversed(node.children))
    return order


def code(expr: Expr, *, short: bool = False, names: Mapping[Expr, str] | None = None) -> str:
    """The expression as code of :mod:`loopinterp.programs.language`; a very large one is abridged.

    ``short`` writes named tables by name only; ``names`` replaces subexpressions.
    """
    text = dict(names or {})
    for node in postorder([expr], text):
        written = node.written(text, short=short)
        text[node] = written if len(written) <= MAX_LENGTH else "…"
    return text[expr]


def rewritten(roots: Iterable[Expr], change: Callable[[Expr, Expr], Expr]) -> dict[Expr, Expr]:
    """Every node below the roots -> ``change(node, node rebuilt from changed children)``."""
    new: dict[Expr, Expr] = {}

    def renewed(field: Any) -> Any:
        if isinstance(field, tuple):
            return tuple(map(renewed, field))
        return new[field] if isinstance(field, Expr) else field

    for node in postorder(roots):
        kind, fields = node.__reduce__()
        new[node] = change(node, kind(*map(renewed, fields)))
    return new


# Most entries of a table (or input tokens of a program), and most pairs of a predicate
MAX_TABLE, MAX_RELATION = 65_536, 4_096


class _Checked(Expr):
    word: ClassVar[str] = ""

    def __post_init__(self) -> None:
        checks = {"Seq": need_seq, "Selector": _need_selector, "int": _check_int}
        for name, written in _types(type(self)).items():
            if (check := checks.get(written)) is not None:
                check(getattr(self, name), f"{name} of {self.word}")
        super().__post_init__()


class Selector(_Checked):
    """Which keys each query attends to."""


def _operator(op: str) -> Callable[[Seq, Seq | int], Seq]:
    return lambda self, other: Elementwise(op, (self, as_seq(other)))


def _reflected(op: str) -> Callable[[Seq, int], Seq]:
    return lambda self, other: Elementwise(op, (as_seq(other), self))


class Seq(_Checked):
    """A sequence of integers."""

    __add__, __radd__ = _operator("add"), _reflected("add")
    __sub__, __rsub__ = _operator("sub"), _reflected("sub")
    __mul__, __rmul__ = _operator("mul"), _reflected("mul")
    __and__, __rand__ = _operator("and"), _reflected("and")
    __or__, __ror__ = _operator("or"), _reflected("or")
    __xor__, __rxor__ = _operator("xor"), _reflected("xor")
    __floordiv__, __mod__ = _operator("floordiv"), _operator("mod")
    __lt__, __le__ = _operator("lt"), _operator("le")
    __gt__, __ge__ = _operator("gt"), _operator("ge")

    def __invert__(self) -> Seq:
        return Elementwise("not", (self,))

    def __neg__(self) -> Seq:
        return Elementwise("neg", (self,))

    def __abs__(self) -> Seq:
        return Elementwise("abs", (self,))

    def __bool__(self) -> bool:
        expected, got = "an expression", f"`if`, `and`, `or` or `not` on {self!r}"
        fix = "Use &, |, ~ and where(condition, x, y)."
        raise InputError("truth value", expected=expected, given=got, fix=fix)


@dataclass(frozen=True, eq=False, repr=False)
class Tokens(Seq):
    form = "tokens"


@dataclass(frozen=True, eq=False, repr=False)
class Indices(Seq):
    """The positions 0, 1, 2, …"""

    form = "indices"


@dataclass(frozen=True, eq=False, repr=False)
class Full(Seq):
    word, form = "full", "full({value})"

    value: int


@dataclass(frozen=True, eq=False, repr=False)
class Var(Seq):
    name: str

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.name, str) or not self.name.isidentifier():
            expected, fix = "a Python identifier", "Name it like carry or span_2."
            raise InputError("name of var", expected=expected, given=repr(self.name), fix=fix)
        self._set("variables", frozenset((self.name,)))

    def written(self, text: Mapping[Expr, str], *, short: bool) -> str:
        return self.name if short else f"var({self.name!r})"


@dataclass(frozen=True, eq=False, repr=False)
class TokMap(Seq):
    """A finite table applied at each position; see :func:`loopinterp.programs.tok_map`."""

    word = "tok_map"

    x: Seq
    table: tuple[tuple[int, int], ...]
    default: int | None = None
    name: str | None = None

    def __post_init__(self) -> None:
        table = dict(self.table)
        if len(table) > MAX_TABLE:
            expected, got = f"at most {MAX_TABLE:,} entries", f"{len(table):,}"
            fix = "Write the function with operators (x * x % 7), or give most values a default."
            raise InputError("table of tok_map", expected=expected, given=got, fix=fix)
        for value in (*table, *table.values()):
            _check_int(value, "entry in the table of tok_map")
        self._set("table", tuple(sorted(self.table)))
        if self.default is not None:
            _check_int(self.default, "default of tok_map")
        super().__post_init__()

    @cached_property
    def lookup(self) -> Lookup:
        """What reads the table; 0 without a default, where :attr:`lists` says what it lacks."""
        keys, new = self._entries
        return Lookup(keys, new, self.default or 0)

    @cached_property
    def lists(self) -> Lookup:
        """1 for each key of the table, else 0."""
        keys, _ = self._entries
        return Lookup(keys, torch.ones_like(keys), 0)

    @property
    def _entries(self) -> Tensor:
        """Sorted keys of the table and their values [2, entry]."""
        return torch.tensor(self.table, dtype=torch.int64).reshape(-1, 2).T

    def written(self, text: Mapping[Expr, str], *, short: bool) -> str:
        if short and self.name:
            return self.name if isinstance(self.x, Tokens) else f"{self.name}({text[self.x]})"
        default = "" if self.default is None else f", default={self.default}"
        return f"tok_map({text[self.x]}, {dict(self.table)}{default}{_named(self.name)})"


@dataclass(frozen=True, eq=False, repr=False)
class Elementwise(Seq):
    """An operation of :data:`~loopinterp.programs.selection.OPS` at each position."""

    op: str
    args: tuple[Seq, ...]

    def __post_init__(self) -> None:
        check_choice("operation", self.op, OPS)
        for arg in self.args:
            need_seq(arg, f"argument of {self.op}")
        super().__post_init__()
        if len(self.args) != OPS[self.op].arity:
            expected, got = f"{OPS[self.op].arity} arguments", ", ".join(map(repr, self.args))
            fix = "Pass as many sequences as the operation takes."
            raise InputError(f"args of {self.op}", expected=expected, given=got, fix=fix)

    def written(self, text: Mapping[Expr, str], *, short: bool) -> str:
        symbol = OPS[self.op].symbol
        bare = [str(x.value) if isinstance(x, Full) else text[x] for x in self.args]
        if symbol is None:
            # abs(3) would be Python's own.
            args = bare if len(bare) > 1 else [text[self.args[0]]]
            return f"{self.op}({', '.join(args)})"
        args = [
            f"({text[x]})" if isinstance(x, Elementwise) and OPS[x.op].symbol else text[x]
            for x in self.args
        ]
        if len(args) == 1:
            return f"{symbol}{args[0]}"
        # A bare integer is enough where the other side is a sequence already.
        right = bare[1] if isinstance(self.args[1], Full) else args[1]
        return f"{args[0]} {symbol} {right}"


@dataclass(frozen=True, eq=False, repr=False)
class Select(Selector):
    """A selection; see :func:`loopinterp.programs.select`."""

    word = "select"

    k: Seq
    q: Seq
    predicate: str | tuple[tuple[int, int], ...]
    causal: bool = True
    name: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        what, pairs = "predicate of select", self.predicate
        if isinstance(pairs, str):
            check_choice(what, pairs, PREDICATES)
            return
        if not isinstance(pairs, Sequence) or not all(
            isinstance(pair, tuple) and len(pair) == 2 for pair in pairs[: MAX_RELATION + 1]
        ):
            expected = "a function of two tokens: a name such as '==', or (key, query) pairs"
            fix = 'Write select(k, q, "=="), or list the pairs: [(0, 1), (1, 0)].'
            raise InputError(what, expected=expected, given=reprlib.repr(pairs), fix=fix)
        if len(pairs) > MAX_RELATION:
            expected, got = f"at most {MAX_RELATION:,} pairs", reprlib.repr(pairs)
            fix = "Map keys and queries with tok_map first, and compare what comes out."
            raise InputError(what, expected=expected, given=got, fix=fix)
        for value in (v for pair in pairs for v in pair):
            _check_int(value, "token in the predicate of select")
        self._set("predicate", tuple(sorted(set(pairs))))

    def written(self, text: Mapping[Expr, str], *, short: bool) -> str:
        predicate = self.predicate if isinstance(self.predicate, str) else list(self.predicate)
        causal = "" if self.causal else ", causal=False"
        inside = f"{text[self.k]}, {text[self.q]}, {predicate!r}{causal}{_named(self.name)}"
        return f"select({inside})"


@dataclass(frozen=True, eq=False, repr=False)
class Aggregate(Seq):
    """Mean (truncated towards zero), max or min of the selected values; ``default`` if none."""

    word, form = "aggregate", "aggregate({selector}, {value}, {mode!r}, default={default})"

    selector: Selector
    value: Seq
    mode: str = "mean"
    default: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("mode of aggregate", self.mode, ("mean", "max", "min"))


@dataclass(frozen=True, eq=False, repr=False)
class SelWidth(Seq):
    word, form = "sel_width", "sel_width({selector})"

    selector: Selector


@dataclass(frozen=True, eq=False, repr=False)
class ShiftRight(Seq):
    """The value ``n`` positions before, else ``default``; compiled as :attr:`expanded`."""

    word, form = "shift_right", "shift_right({x}, {n}, default={default})"

    x: Seq
    n: int = 1
    default: int = 0

    def __post_init__(self) -> None:
        fix = "To read ahead, or n back, use kqv(indices, indices - n, x, '==', causal=False)."
        check_integer("n of shift_right", self.n, least=1, fix=fix)
        super().__post_init__()

    @cached_property
    def selector(self) -> Select:
        back = Elementwise("sub", (Indices(), Full(self.n)))
        return Select(Indices(), back, "==", True, f"shift_{self.n}")

    @cached_property
    def expanded(self) -> Aggregate:
        return Aggregate(self.selector, self.x, "mean", self.default)


def as_seq(x: Seq | int) -> Seq:
    return Full(int(x)) if isinstance(x, int) else need_seq(x, "operand")


def need_seq(x: object, what: str) -> Seq:
    if isinstance(x, Seq):
        return x
    fix = "Use tokens, indices, full(0), var('name'), or an expression made of them."
    if isinstance(x, Selector):
        fix = "Read values with aggregate(selector, value), or count with sel_width(selector)."
    raise InputError(what, expected="a sequence", given=f"{type(x).__name__} {x!r}", fix=fix)


def selects(roots: Iterable[Expr]) -> list[Select]:
    """Every selection below the roots, those of shifts included."""
    nodes = [node.selector if isinstance(node, ShiftRight) else node for node in postorder(roots)]
    return [node for node in dict.fromkeys(nodes) if isinstance(node, Select)]


def selectors(roots: Iterable[Expr]) -> dict[str, Select]:
    """:func:`selects` by name, or by code if it has none."""
    return {select.name or repr(select): select for select in selects(roots)}


def _need_selector(x: object, what: str) -> None:
    if not isinstance(x, Selector):
        got, fix = f"{type(x).__name__} {x!r}", "Make one with select(k, q, predicate)."
        raise InputError(what, expected="a selector", given=got, fix=fix)


def _check_int(x: object, what: str) -> None:
    if isinstance(x, bool) or not isinstance(x, int) or not -(2**63) <= x < 2**63:
        got = f"one of {x.bit_length()} bits" if type(x) is int else reprlib.repr(x)
        fix = "Sequences hold integers from -2**63 to 2**63 - 1 only."
        raise InputError(what, expected="an integer of 64 bits", given=got, fix=fix)


def _named(name: str | None) -> str:
    return "" if name is None else f", name={name!r}"
