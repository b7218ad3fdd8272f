"""Stock programs of tasks that read ``BOS prompt = EOS …`` and answer from the ``=`` on.

The *place* of a position is its distance after the ``=``, -1 before it.
"""

from __future__ import annotations

from functools import partial

from loopinterp.core.boundary import checked
from loopinterp.core.errors import InputError, check_new_name, unknown_name
from loopinterp.programs.addition_programs import ADDITION_PROGRAMS
from loopinterp.programs.expressions import Seq
from loopinterp.programs.language import (
    UNKNOWN,
    eq,
    firsts,
    full,
    index_select,
    indices,
    kqv,
    larger,
    ne,
    shift_right,
    smaller,
    tok_map,
    tokens,
    var,
    where,
)
from loopinterp.programs.program import Linear, LoopProgram
from loopinterp.tasks.prefixes import get_automaton

_EQUALS, _EOS = 2, 3  # tokens of ``=`` and EOS after the bits of a prompt
_END = 2  # output class of the end of an answer, for tasks of bits
_program = partial(LoopProgram, n_loops=Linear())
_of_bits = partial(_program, inputs=("0", "1", "=", "EOS", "BOS"))
_bit = tok_map(tokens, {1: 1}, default=0, name="bit_of")
_arriving, _parity = shift_right(var("bit")), var("parity")
_left = var("left")
_running = ne(_left, 0)
# A clock: the loops until what moves is held; at -1 it is never held
_countdown = where(_left > 0, _left - 1, _left)


def _position_of(token: int, name: str, *, default: int = -1) -> Seq:
    return kqv(tokens, token, indices, "==", default=default, name=name)


def _place_behind(equals: Seq) -> Seq:
    return where(equals >= 0, indices - equals, -1)


def _token_addition() -> LoopProgram:
    """Digit pairs at the positions of b move right, lowest first, one position a loop::

        carry_i  <-  pair_i = 2 OR (pair_i = 1 AND carry_i)     while left_i > 0
        pair_i   <-  pair_{i-1}                                 while left_i > 0
        answer_i =   (pair_i + carry_i) mod 2

    From the ``+`` on, positions know n and count down from it.
    """
    inputs, end = ("0", "1", "+", "=", "EOS", "BOS"), 3  # end: the pair of "=" and EOS
    is_bit = tok_map(tokens, {0: 1, 1: 1}, default=0, name="is_bit")
    is_end = tok_map(tokens, {3: 1, 4: 1}, default=0, name="is_end")
    plus = _position_of(2, "plus", default=0)
    bit_of_a = kqv(indices, indices - plus, _bit, "==", name="digit_of_a")
    pair_here = where(is_end, end, where(is_bit & plus, _bit + bit_of_a, 0))
    pair, carry = var("pair"), var("carry")
    return _program(
        name="token_addition",
        task="token_addition",
        inputs=inputs,
        prepare={"pair": shift_right(pair_here), "carry": full(0), "left": plus - 1},
        step={
            "carry": where(_running, eq(pair, 2) | (eq(pair, 1) & carry), carry),
            "pair": where(_running, shift_right(pair), pair),
            "left": _countdown,
        },
        finish=where(eq(pair, end), _END, (pair + carry) % 2),
        doc="Pairs of digits move right, lowest first, and each position adds up what passes it.",
    )


def _multiplication() -> LoopProgram:
    """Column k of the product is a_0 b_k + a_1 b_{k-1}; carries move from the ``=``::

        carry_i  <-  carry_i                                      if it is known
                     (column_{i-1} + carry_{i-1}) div 2           else, if carry_{i-1} is known
                     unknown                                      else

    The product has n + 2 columns, so the last carry is known after n + 1 loops.
    """
    inputs, end = ("0", "1", "*", "=", "EOS", "BOS"), 3  # end: the column behind the product
    times, equals = _position_of(2, "times"), _position_of(3, "equals")
    place = _place_behind(equals)
    column_here = (index_select(_bit, 1) & index_select(_bit, times + 1 + place)) + (
        index_select(_bit, 2) & index_select(_bit, times + place)
    )
    is_digit = (place >= 0) & (place < equals - 2)
    carry, column = var("carry"), var("column")
    known = ne(carry, UNKNOWN)
    carry_out = where(known, (column + carry) // 2, UNKNOWN)
    return _program(
        name="multiplication",
        task="multiplication",
        inputs=inputs,
        prepare={
            "column": where(is_digit, column_here, end),
            "carry": where(eq(place, 0), 0, UNKNOWN),
        },
        step={"carry": where(known, carry, shift_right(carry_out, default=UNKNOWN))},
        finish=where(eq(column, end), _END, where(known, (column + carry) % 2, UNKNOWN)),
        n_loops=Linear(offset=1),
        doc="Columns of the product are gathered at the start; a front from the '=' carries them.",
    )


def _binary_sum() -> LoopProgram:
    """Every position reads bit 1, then bit 2, and so on, and keeps the count::

        count_i  <-  count_i + bit at position at_i
        at_i     <-  at_i + 1

    Both are bounded by the position.
    """
    at, count = var("at"), var("count")
    next_bit = kqv(indices, at, _bit, "==", name="next_bit")
    powers = {place: 2**place for place in range(20)}
    power = tok_map(var("place"), powers, default=2**20, name="power_of_2")
    return _of_bits(
        name="binary_sum",
        task="binary_sum",
        prepare={
            "at": full(1),
            "count": full(0),
            "place": _place_behind(_position_of(_EQUALS, "equals")),
        },
        step={
            "count": smaller(count + next_bit, indices),
            "at": smaller(at + 1, indices + 1),
        },
        finish=where(power > larger(count, 1), _END, count // power % 2),
        doc="Every position reads the bits one by one and keeps the count of ones.",
    )


def unique_set(n_symbols: int) -> LoopProgram:
    """Distinct symbols in order of first appearance, for an alphabet of that size::

    answer_i  <-  symbol at at_i, if it is new and found_i = place_i
    found_i   <-  found_i + 1, if it is new
    at_i      <-  at_i + 1
    """
    equals = nothing = n_symbols
    is_new = eq(firsts(tokens, tokens), indices) & (tokens < n_symbols)
    at, n_found, answer = var("at"), var("found"), var("answer")
    here = kqv(indices, at, var("offered"), "==", default=nothing, name="next_symbol")
    new_here = ne(here, nothing)
    return _program(
        name="unique_set",
        task="unique_set",
        task_settings={"n_symbols": n_symbols},
        inputs=(*(f"s{i}" for i in range(n_symbols)), "=", "EOS", "BOS"),
        prepare={
            "offered": where(is_new, tokens, nothing),
            "at": full(1),
            "found": full(0),
            "place": _place_behind(_position_of(equals, "equals")),
            "answer": full(nothing),
        },
        step={
            "answer": where(new_here & eq(n_found, var("place")), here, answer),
            "found": smaller(n_found + new_here, indices),
            "at": smaller(at + 1, indices + 1),
        },
        finish=answer,
        doc="Every position reads the prompt in order and keeps the new symbol of its place.",
    )


def _abacus_ripple() -> LoopProgram:
    """Place k holds the sum of both operands' digits k (0 to 18); each loop computes carries::

        carry_i  <-  column_{i-1} + carry_{i-1} > 9

    After the longer operand a carry is the last digit of the sum, and no carry is its end. The sum
    in the input is not read. Source: the format of arXiv 2405.17399.
    """
    inputs = tuple("0123456789-+*=$")
    end, last, behind = inputs.index("$"), 19, 20  # columns right behind the longer operand, after
    digit = tok_map(tokens, {d: d for d in range(10)}, default=0, name="digit_of")
    plus = _position_of(inputs.index("+"), "plus")
    equals = _position_of(inputs.index("="), "equals")
    place = _place_behind(equals)
    length_of_a, length_of_b = plus, equals - plus - 1
    digit_of_a = where(place < length_of_a, index_select(digit, place), 0)
    digit_of_b = where(place < length_of_b, index_select(digit, plus + 1 + place), 0)
    longer = larger(length_of_a, length_of_b)
    after = where(eq(place, longer), last, behind)
    column_here = where(place < longer, digit_of_a + digit_of_b, after)
    carry, column = var("carry"), var("column")
    return _program(
        name="abacus_ripple",
        task="abacus_addition",
        inputs=inputs,
        prepare={"column": where(place >= 0, column_here, 0), "carry": full(0)},
        step={"carry": shift_right((column < last) & (column + carry > 9))},
        finish=where(column < last, (column + carry) % 10, where(eq(column, last) & carry, 1, end)),
        doc="Each place gathers its column; each loop recomputes its carry from the place before.",
    )


# The shifts are those of arXiv 2409.15647; the clocks, which keep the answer after T(n), are ours.
_SEQUENCE_PROGRAMS = (
    #   bit_i     <-  bit_{i-1}
    #   parity_i  <-  parity_i XOR bit_{i-1}
    # After n loops all n bits have passed the "=", one a loop.
    _of_bits(
        name="parity",
        task="parity",
        prepare={"bit": _bit, "parity": full(0)},
        step={"bit": _arriving, "parity": _parity ^ _arriving},
        finish=where(eq(tokens, _EOS), _END, _parity),
        doc="The bits move right one position a loop; each position adds what arrives.",
    ),
    #   parity_i  <-  b_i XOR parity_{i-1}
    # After t loops it is that of the last t + 1 symbols up to the position.
    _of_bits(
        name="parity_scan",
        task="parity",
        prepare={"parity": _bit},
        step={"parity": _bit ^ shift_right(_parity)},
        finish=where(eq(tokens, _EOS), _END, _parity),
        doc="Each loop recomputes a position's parity from its left neighbour's.",
    ),
    #   symbol_i  <-  symbol_{i-1}  while left_i > 0
    #   left_i    <-  left_i - 1    while left_i > 0
    # Bit k stands n positions before its answer, whatever k is. From the "=" on, positions know n
    # (the distance between BOS and "=", less one). The "=" itself counts as the end of the answer.
    _of_bits(
        name="copy",
        task="copy",
        prepare={
            "symbol": tok_map(tokens, {0: 0, 1: 1}, default=_END, name="symbol_of"),
            "left": kqv(tokens, _EQUALS, indices - 1, "==", default=-1, name="equals"),
        },
        step={
            "symbol": where(_running, shift_right(var("symbol")), var("symbol")),
            "left": _countdown,
        },
        finish=var("symbol"),
        doc="The symbols move right one position a loop, and are held after n loops.",
    ),
    _token_addition(),
    _multiplication(),
    _binary_sum(),
    unique_set(50),
    _abacus_ripple(),
)


_before = shift_right(var("prefix"))
_prefix_sum = partial(
    LoopProgram,
    task="prefix_sum",
    prepare={"prefix": full(0)},
    finish=var("prefix"),
    n_loops=Linear(),
    doc="Each loop recomputes a position's prefix from its left neighbour's.",
)


def prefix_mod(modulus: int) -> LoopProgram:
    """Prefix sums mod m: ``prefix_i <- (d_i + prefix_{i-1}) mod m``."""
    digit = tok_map(tokens, {d: d for d in range(1, modulus)}, default=0, name="digit_of")
    return _prefix_sum(
        name=f"prefix_mod_{modulus}",
        task_settings={"modulus": modulus},
        inputs=(*map(str, range(modulus)), "BOS", "PAD"),
        step={"prefix": (digit + _before) % modulus},
    )


def prefix_automaton(language: str) -> LoopProgram:
    """Prefixes of a regular language: ``state_i <- transitions[state_{i-1}][s_i]``.

    BOS and PAD keep a state. ``tomita3``, ``tomita6`` and ``dyck_2`` are registered; register
    another of :func:`~loopinterp.tasks.list_languages` with
    ``register_program(prefix_automaton("tomita1"))``.

    Example:
        >>> prefix_automaton("dyck_2").finish
        tok_map(var('state'), {0: 1}, default=0, name='accepts')
    """
    automaton = get_automaton(language)
    before = state = shift_right(var("state"))
    for token, next_state in reversed(list(enumerate(zip(*automaton.transitions)))):
        after = tok_map(before, dict(enumerate(next_state)), name=f"on_{token}")
        state = where(eq(tokens, token), after, state)
    accepting = dict.fromkeys(automaton.accepting, 1)
    return LoopProgram(
        name=language,
        task="regular_language",
        task_settings={"language": language},
        inputs=(*automaton.alphabet, "BOS", "PAD"),
        prepare={"state": full(0)},
        step={"state": state},
        finish=tok_map(var("state"), accepting, default=0, name="accepts"),
        n_loops=Linear(),
        doc="Each loop moves the left neighbour's state on by a position's own symbol.",
    )


_PREFIX_PROGRAMS = (
    _prefix_sum(
        name="prefix_xor",
        inputs=("0", "1", "BOS", "PAD"),
        step={"prefix": tok_map(tokens, {1: 1}, default=0, name="bit_of") ^ _before},
    ),
    prefix_mod(5),
    *map(prefix_automaton, ("tomita3", "tomita6", "dyck_2")),
)


_PROGRAMS: dict[str, LoopProgram] = {
    program.name: program
    for program in (*ADDITION_PROGRAMS, *_SEQUENCE_PROGRAMS, *_PREFIX_PROGRAMS)
}


@checked
def list_programs(task: str | None = None) -> list[str]:
    """Names of the programs that solve a task, or of all.

    Example:
        >>> list_programs(task="prefix_sum"), len(list_programs())
        (['prefix_mod_5', 'prefix_xor'], 26)
    """
    names = sorted(n for n, program in _PROGRAMS.items() if task in (None, program.task))
    if not names:
        raise unknown_name("task of a program", task, {p.task for p in _PROGRAMS.values()})
    return names


def get_program(name: str | LoopProgram) -> LoopProgram:
    """The program of that name; a program itself is returned unchanged.

    Example:
        >>> print(get_program("prefix_xor"))
        program prefix_xor for prefix_sum: T(n) = n
          bit_of: {1: 1}, otherwise 0
          prepare
            prefix = full(0)
          loop
            prefix = bit_of ^ shift_right(prefix, 1, default=0)
          finish
            prefix
    """
    if not isinstance(name, str):
        return _need_program(name)
    if name not in _PROGRAMS:
        raise unknown_name("program", name, _PROGRAMS)
    return _PROGRAMS[name]


def register_program(program: LoopProgram, *, replace: bool = False) -> LoopProgram:
    """Make a program available by its name, and return it.

    Raises:
        InputError: If the name is taken and ``replace`` is false.
    """
    _need_program(program)
    if not replace:
        check_new_name("program name", program.name, _PROGRAMS)
    _PROGRAMS[program.name] = program
    return program


def _need_program(program: object) -> LoopProgram:
    if isinstance(program, LoopProgram):
        return program
    got, fix = type(program).__name__, "Build one with LoopProgram(name=..., task=..., ...)."
    raise InputError("program", expected="a LoopProgram", given=got, fix=fix)
