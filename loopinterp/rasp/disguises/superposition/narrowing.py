"""How far a model can be superposed with a proof that its outputs stay the same."""

from __future__ import annotations

from loopinterp.rasp.compiler.compiled import Compiled
from loopinterp.rasp.disguises.superposition.search import (
    FrameSearch,
    check_search,
    checked_width,
)
from loopinterp.rasp.disguises.superposition.superposing import superpose


def narrowest_superposition(
    compiled: Compiled, *, seed: int, steps: int = 200, tries: int = 4
) -> Compiled:
    """The narrowest superposition with a proof that the outputs stay the same.

    Found by halving the interval between what has to be kept apart and what is exact. So there is
    a proof for what is returned, and no promise that there is none for fewer dimensions.

    Args:
        compiled: The model and its circuit; it is not changed.
        seed: Seed of the directions.
        steps: Steps of each search for directions.
        tries: Searches at each width, each from another start.

    Raises:
        InputError: as for :func:`superpose`.

    Example:
        >>> from loopinterp.rasp import compile_program, narrowest_superposition
        >>> plain = compile_program("ripple", max_length=6)
        >>> dense = narrowest_superposition(plain, seed=0, steps=50, tries=1)
        >>> record = dense.circuit.superposition
        >>> record.d_model < record.exact_d_model, record.proven
        (True, True)
    """
    check_search(seed, steps, tries)
    search = FrameSearch(compiled)
    best = checked_width(None, search, compiled.model.config.d_model)
    unproven = len(search.kept)
    while best - unproven > 1:
        width = (best + unproven) // 2
        frame = search.frame(width, seed, steps=steps, tries=tries)
        if search.record(frame).proven:
            best = width
        else:
            unproven = width
    return superpose(compiled, d_model=best, seed=seed, steps=steps, tries=tries)
