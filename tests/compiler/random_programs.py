"""Random loop programs: of every primitive and every language function, small enough to compile."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from hypothesis import reject
from hypothesis import strategies as st

from loopinterp.core.errors import InputError
from loopinterp.programs import LoopProgram, Selector, Seq, full, indices, language, tokens, var
from loopinterp.programs.language import (
    aggregate,
    eq,
    larger,
    ne,
    sel_width,
    select,
    seq_map,
    shift_right,
    smaller,
    tok_map,
    where,
)
from loopinterp.programs.selection import PREDICATES
from tests.compiler.small_programs import program

SMALL = st.integers(-3, 3)
VARIABLES = ("u", "v", "w")
TABLES = st.dictionaries(SMALL, SMALL, max_size=4)
RELATIONS = st.lists(st.tuples(SMALL, SMALL), max_size=5)
MODES = st.sampled_from(["mean", "max", "min"])
NULL = st.sampled_from([-9, -999])


@st.composite
def programs(draw: st.DrawFn) -> LoopProgram:
    """A program of one to three variables, some of which its step may keep."""
    names = VARIABLES[: draw(st.integers(1, 3))]
    before = Grower(draw, [tokens, indices])
    inside = Grower(draw, [tokens, indices, *(var(name) for name in names)])
    changed = draw(st.lists(st.sampled_from(names), min_size=1, unique=True))
    prepare = {name: before.bounded(draw(st.integers(0, 5))) for name in names}
    step = {name: inside.bounded(draw(st.integers(1, 7))) for name in changed}
    finish = larger(inside.bounded(draw(st.integers(0, 5))), -1)
    try:
        return program(prepare, step, finish, n_tokens=draw(st.integers(1, 4)))
    except InputError:  # two selectors that are too long to be told apart by their code
        reject()


class Grower:
    """Draws sequences: inner nodes as long as there is fuel, then leaves."""

    def __init__(self, draw: st.DrawFn, leaves: list[Seq]) -> None:
        self.draw, self.leaves = draw, leaves

    def seq(self, fuel: int) -> Seq:
        if fuel <= 0:
            leaf = self.draw(st.sampled_from([*self.leaves, None]))
            return full(self.draw(SMALL)) if leaf is None else leaf
        return self.draw(st.sampled_from(KINDS))(self, fuel - 1)

    def several(self, number: int, fuel: int) -> list[Any]:
        """Sequences that share the fuel."""
        return [self.seq(self.draw(st.integers(0, fuel))) for _ in range(number)]

    def bounded(self, fuel: int) -> Seq:
        """What takes few values, whatever is inside."""
        return self.draw(st.sampled_from(BOUNDS))(self, self.seq(fuel))

    def selector(self, fuel: int) -> Selector:
        predicate = self.draw(st.sampled_from(list(PREDICATES)) | RELATIONS)
        name = self.draw(st.none() | st.integers(0, 10**6).map("selector_{}".format))
        k, q = self.several(2, fuel)
        return select(k, q, predicate, causal=self.draw(st.booleans()), name=name)


def _two(
    functions: list[Callable[[Seq, Seq], Seq]],
) -> Callable[[Grower, int], Seq]:
    def grow(g: Grower, fuel: int) -> Seq:
        return g.draw(st.sampled_from(functions))(*g.several(2, fuel))

    return grow


def _one(functions: list[Callable[[Seq], Seq]]) -> Callable[[Grower, int], Seq]:
    def grow(g: Grower, fuel: int) -> Seq:
        return g.draw(st.sampled_from(functions))(g.seq(fuel))

    return grow


def _divide(g: Grower, fuel: int) -> Seq:
    divide = g.draw(st.sampled_from([operator.floordiv, operator.mod]))
    x, y = g.several(2, fuel)
    # Never by 0.
    return divide(x, g.draw(st.sampled_from([-2, 2, 3, larger(y, 1), smaller(y, -1)])))


def _induction(g: Grower, fuel: int) -> Seq:
    functions: list[Any] = [language.induct, language.induct_prev, language.induct_kqv]
    function = g.draw(st.sampled_from(functions))
    number = 3 if function is language.induct_kqv else 2
    offset = st.integers(-2 if function is language.induct_prev else 0, 2)
    some: dict[str, Any] = {"default": g.draw(SMALL), "null_val": g.draw(NULL)}
    return function(*g.several(number, fuel), g.draw(offset), **some)


def _two_readings(g: Grower, fuel: int) -> Seq:
    """Two aggregates of one selector: one head carries both."""
    selector = g.selector(fuel)
    x, y = g.several(2, fuel)
    return aggregate(selector, x, g.draw(MODES), g.draw(SMALL)) - aggregate(selector, y)


_OPERATORS = ["add", "sub", "mul", "lt", "le", "gt", "ge", "and", "or", "xor"]

KINDS: list[Callable[[Grower, int], Seq]] = [
    lambda g, fuel: seq_map(g.draw(st.sampled_from(_OPERATORS)), *g.several(2, fuel)),
    _two([eq, ne, smaller, larger]),
    _one([abs, operator.neg, operator.invert]),
    _divide,
    lambda g, fuel: where(*g.several(3, fuel)),
    lambda g, fuel: tok_map(g.seq(fuel), g.draw(TABLES), default=g.draw(SMALL)),
    lambda g, fuel: g.bounded(fuel),
    lambda g, fuel: shift_right(g.seq(fuel), g.draw(st.integers(1, 4)), default=g.draw(SMALL)),
    lambda g, fuel: aggregate(g.selector(fuel), g.seq(fuel), g.draw(MODES), g.draw(SMALL)),
    lambda g, fuel: sel_width(g.selector(fuel)),
    _two_readings,
    _one([language.cumsum, language.maximum, language.minimum, language.argmax, language.argmin]),
    _one([language.mode, language.binary_mode]),
    lambda g, fuel: language.first_true(g.seq(fuel), default=g.draw(SMALL)),
    _two([language.num_prev, language.has_seen, language.mask]),
    lambda g, fuel: g.draw(
        st.sampled_from([language.firsts, language.lasts, language.index_select])
    )(*g.several(2, fuel), default=g.draw(SMALL)),
    _induction,
]

BOUNDS: list[Callable[[Grower, Seq], Seq]] = [
    lambda g, x: x % g.draw(st.integers(1, 5)),
    lambda g, x: -(x % g.draw(st.integers(1, 3))),
    lambda g, x: smaller(larger(x, g.draw(SMALL)), g.draw(SMALL)),
    lambda g, x: where((x >= 0) & (x < g.draw(st.integers(1, 5))), x, 0),
    lambda g, x: tok_map(x, g.draw(TABLES), default=g.draw(SMALL)),
    lambda g, x: smaller(larger(x, -1), indices + 1),
    lambda g, x: ~x,
]
