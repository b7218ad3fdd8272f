"""Stock programs of running values: each position updates its left neighbour's prefix.

The prefix is recomputed in every loop, so after t loops it covers the last t symbols up to the
position.
"""

from __future__ import annotations

from functools import partial

from loopinterp.programs.language import eq, full, shift_right, tok_map, tokens, var, where
from loopinterp.programs.program import Linear, LoopProgram
from loopinterp.tasks.prefixes import get_automaton

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

    BOS and PAD leave a state as it is. Three languages of :func:`~loopinterp.tasks.list_languages`
    are registered under their own names: ``tomita3``, ``tomita6`` and ``dyck_2``. Register another
    one with ``register_program(prefix_automaton("tomita1"))``.

    Raises:
        InputError: the language is unknown.

    Example:
        >>> print(prefix_automaton("dyck_2"))
        program dyck_2 for regular_language: T(n) = n
          on_0: {0: 1, 1: 2, 2: 3, 3: 3}
          on_1: {0: 3, 1: 0, 2: 1, 3: 3}
          accepts: {0: 1}, otherwise 0
          prepare
            state = full(0)
          loop
            state = where(eq(tokens, 0), on_0(shift_right(state, 1, default=0)), ...)
          finish
            accepts(state)
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


PREFIX_PROGRAMS = (
    _prefix_sum(
        name="prefix_xor",
        inputs=("0", "1", "BOS", "PAD"),
        step={"prefix": tok_map(tokens, {1: 1}, default=0, name="bit_of") ^ _before},
    ),
    prefix_mod(5),
    *map(prefix_automaton, ("tomita3", "tomita6", "dyck_2")),
)
