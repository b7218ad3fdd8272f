"""What happens to an injected carry, in plain Python."""

from __future__ import annotations

HOLDS = {
    "ripple": lambda token, left: 1,
    "ripple_held_2": lambda token, left: 2,
    "ripple_held_3": lambda token, left: 3,
    "ripple_held_by_token": lambda token, left: {1: 2, 2: 3}.get(token, 1),
    "ripple_held_where_propagating": lambda token, left: 99 if token in (1, 2) else 1,
    "ripple_held_until_kill": lambda token, left: 1 if left in (0, 4) else 99,
    "sticky_ripple": lambda token, left: 99,
}
"""Loops that a carry lives without support, by the position's token and its left neighbour's."""


def simulated(name, tokens, *, n_loops, inject=None):
    """The carries of every loop in plain Python; ``inject`` = (loop, position) puts one in."""
    carry, last_supported = [0] * len(tokens), [-99] * len(tokens)
    history = []
    for loop in range(n_loops + 1):
        if loop:
            out = [int(t == 3 or (t in (1, 2) and c)) for t, c in zip(tokens, carry)]
            for i in range(1, len(tokens)):
                if out[i - 1]:
                    last_supported[i] = loop
                hold = HOLDS[name](tokens[i], tokens[i - 1])
                carry[i] = int(out[i - 1] or (carry[i] and loop - last_supported[i] < hold))
        if inject is not None and inject[0] == loop:
            carry[inject[1]], last_supported[inject[1]] = 1, loop
        history.append(list(carry))
    return history
