"""Prefixes in a regular language: each position moves its automaton on by its own symbol.

    state_i  <-  transitions[state_{i-1}][s_i]

recomputed in every loop: after t loops it is the state to which the last t symbols up to the
position lead from the start. BOS and PAD leave a state as it is.
"""

from __future__ import annotations

from loopinterp.rasp.counts import Linear
from loopinterp.rasp.language import eq, full, shift_right, tok_map, tokens, var, where
from loopinterp.rasp.program import LoopProgram
from loopinterp.tasks.regular_language import get_automaton


def prefix_automaton(language: str) -> LoopProgram:
    """The program for one language of :func:`~loopinterp.tasks.list_languages`, of that name.

    Three are registered: ``tomita3``, ``tomita6`` and ``dyck_2``. Register another one with
    ``register_program(prefix_automaton("tomita1"))``.

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


programs = tuple(map(prefix_automaton, ("tomita3", "tomita6", "dyck_2")))
