"""Fewer dimensions for the same program: exactly where that is possible, with a bound where not."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from loopinterp.rasp.compiler.circuit import Directions, Superposition
from loopinterp.rasp.compiler.compiled import Compiled
from loopinterp.rasp.disguises.places import Places
from loopinterp.rasp.disguises.superposition.frame import Frame
from loopinterp.rasp.disguises.superposition.rewriting import superposed_weights
from loopinterp.rasp.disguises.superposition.search import (
    FrameSearch,
    check_search,
    checked_width,
)
from loopinterp.rasp.disguises.weights import rebuilt

if TYPE_CHECKING:
    from loopinterp.rasp.compiler.circuit import Circuit


def superpose(
    compiled: Compiled,
    *,
    d_model: int | None = None,
    seed: int,
    steps: int = 200,
    tries: int = 4,
) -> Compiled:
    r"""Hold the program in fewer dimensions than its features have directions.

    h' = W h with a wide W. A read of h becomes the least-squares read of h' for what may stand in
    the stream at that place.

    * Down to ``circuit.superposition.exact_d_model`` dimensions every read is the same number as
      before. As few suffice since the shares of a feature's values sum up to 1, and since what
      never stands in the stream at the same time may fall together; that number is the largest
      dimension of what stands in one place, below which no linear read can tell it apart.
    * Below that, values interfere. What heads write, and what is read by heads whose attention is
      counted, keep dimensions of their own; everything else shares the rest, along directions
      that are sought for small interference. The largest interference that any input can cause is
      bounded (:mod:`loopinterp.rasp.disguises.superposition.interference`); while
      ``circuit.superposition.error_bound`` is below 1, units absorb it, and the outputs are
      proven to be the same. Wipes that cannot be exact are rewritten as units, for the same
      reason, which takes neurons.

    The recall takes from the injected input whatever is not along a variable.

    Args:
        compiled: The model and its circuit; it is not changed.
        d_model: Dimensions; by default the fewest in which it is exact.
        seed: Seed of the directions.
        steps: Steps of a search for directions below the exact number; with 0 they are random.
        tries: Searches, each from another start; the first with a proof is taken, or the best.

    Returns:
        The model; ``circuit.superposition`` says what it costs.

    Raises:
        InputError: ``d_model`` is not below the model's, or not above what has to keep dimensions
            of its own; the model is noisy or superposed inexactly, so that nothing could be said;
            or a number is none.

    Example:
        >>> from loopinterp.rasp import compile_program, superpose
        >>> plain = compile_program("ripple", max_length=6)
        >>> dense = superpose(plain, seed=0)
        >>> plain.model.config.d_model, dense.model.config.d_model
        (18, 14)
        >>> dense.circuit.superposition.exact
        True
    """
    check_search(seed, steps, tries)
    search = FrameSearch(compiled)
    old = compiled.model.config
    width = checked_width(d_model, search, old.d_model)
    frame = search.frame(width, seed, steps=steps, tries=tries)
    new, circuit = superposed_weights(search.weights, old, search.places, search.reads, frame)
    record = search.record(frame)
    how = "exactly" if record.exact else f"bound {record.error_bound:.2g}"
    return rebuilt(
        compiled,
        new,
        _moved(circuit, search.places, frame, record),
        f"superposed in {width} of {old.d_model} dimensions, {how} (seed {seed})",
        d_model=width,
        d_head=old.head_width,
        d_mlp=len(new["block.0.mlp.fc_in.bias"]),
    )


def _moved(circuit: Circuit, places: Places, frame: Frame, record: Superposition) -> Circuit:
    """The circuit with its directions in the new stream, and with the record."""
    directions = {}
    for feature in circuit.features:
        old = circuit.directions[feature.id]
        read = frame.read(places.at(*places.last_place(feature)))
        directions[feature.id] = Directions(
            write=(old.write.double() @ frame.write.mT).to(old.write),
            read=(old.read.double() @ read).to(old.read),
        )
    return dataclasses.replace(circuit, directions=directions, superposition=record)
