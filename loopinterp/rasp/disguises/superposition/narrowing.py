"""How far a model can be superposed with a proof that its outputs stay the same."""

from __future__ import annotations

from loopinterp.rasp.compiler.compiled import Compiled
from loopinterp.rasp.disguises.draws import check_whole, generator
from loopinterp.rasp.disguises.superposition.search import FrameSearch, checked_width
from loopinterp.rasp.disguises.superposition.superposing import superpose


def narrowest_superposition(
    compiled: Compiled, *, seed: int, steps: int = 200, tries: int = 2
) -> Compiled:
    """The narrowest superposition with a proof that the outputs stay the same.

    Found by halving the interval between what has to be kept apart and what is exact, with a few
    seeds at each width; so there is a proof for what is returned, and no promise that there is
    none for fewer dimensions.

    Args:
        compiled: The model and its circuit; it is not changed.
        seed: First of the seeds that are tried.
        steps: Steps of each search for directions.
        tries: Seeds that are tried at each width.

    Raises:
        InputError: as for :func:`superpose`.

    Example:
        >>> from loopinterp.rasp import compile_program, narrowest_superposition
        >>> plain = compile_program("ripple", max_length=6)
        >>> dense = narrowest_superposition(plain, seed=0, steps=50, tries=1)
        >>> record = dense.circuit.superposition
        >>> record.d_model, record.exact_d_model, record.proven
        (11, 14, True)
    """
    generator(seed)
    check_whole("steps", steps, least=0)
    check_whole("tries", tries, least=1)
    search = FrameSearch(compiled)
    checked_width(None, search, compiled.model.config.d_model)
    best, chosen = search.needed, seed
    unproven = len(search.kept)
    while best - unproven > 1:
        width = (best + unproven) // 2
        for other in range(seed, seed + tries):
            frame = search.frame(width, steps=steps, g=generator(other))
            if search.record(frame).proven:
                best, chosen = width, other
                break
        else:
            unproven = width
    return superpose(compiled, d_model=best, seed=chosen, steps=steps)
