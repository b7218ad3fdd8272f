"""Fewer dimensions for the same program: exactly where that is possible, with a bound where not."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch

from loopinterp.errors import InputError
from loopinterp.rasp.compiler.circuit import Directions, Superposition
from loopinterp.rasp.compiler.compiled import Compiled
from loopinterp.rasp.disguises.draws import check_whole, generator
from loopinterp.rasp.disguises.noise import NOISE
from loopinterp.rasp.disguises.superposition.frame import (
    RIDGE,
    Frame,
    dimensions_needed,
    sought_frame,
    told_apart,
)
from loopinterp.rasp.disguises.superposition.interference import Errors, errors
from loopinterp.rasp.disguises.superposition.places import (
    Places,
    orthonormal,
    unlisted_directions,
)
from loopinterp.rasp.disguises.superposition.program_reads import program_reads
from loopinterp.rasp.disguises.superposition.rewriting import superposed_weights
from loopinterp.rasp.disguises.weights import rebuilt, weights_of

if TYPE_CHECKING:
    from torch import Tensor

    from loopinterp.rasp.compiler.circuit import Circuit

SEARCH = 150
"""Steps of the search for the directions of an exact superposition; it settles well before."""

NORM = 8
"""The search for other directions lowers the mean of the bounds to this power: the larger ones."""


def superpose(
    compiled: Compiled, *, d_model: int | None = None, seed: int, steps: int = 200
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
        steps: Steps of the search for directions below the exact number; with 0 they are random.

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
    g = generator(seed)
    check_whole("steps", steps, least=0)
    _check_exact(compiled.circuit)
    config, weights = compiled.model.config, weights_of(compiled)
    places = Places(compiled.circuit)
    apart = unlisted_directions(weights, compiled.circuit)
    distinct = places.distinct()
    needed = dimensions_needed(distinct, apart)
    width = _checked_width(d_model, needed, config.d_model)
    reads = program_reads(weights, config, places)
    length = compiled.circuit.max_length
    if width >= needed:
        distinctness = told_apart(distinct, apart)
        frame = sought_frame(apart, width - len(apart), distinctness, steps=SEARCH, g=g)
    else:
        kept = orthonormal(torch.cat([apart, reads.exactly]))
        if width <= len(kept):
            raise InputError(
                "d_model",
                expected=f"an integer from {len(kept) + 1} to {config.d_model - 1}, as "
                f"{len(kept)} directions have to be kept apart",
                given=str(width),
                fix=f"Pass d_model={len(kept) + 1} or more.",
            )

        def interference(frame: Frame) -> Tensor:
            shares = errors(reads, frame, length, ridge=RIDGE).shares
            return shares.pow(NORM).mean().pow(1 / NORM).log()

        frame = sought_frame(kept, width - len(kept), interference, steps=steps, g=g)
    bounds = errors(reads, frame, length)
    new, circuit = superposed_weights(weights, config, places, reads, frame)
    circuit = _moved(circuit, places, frame, _record(bounds, width, needed))
    how = "exactly" if width >= needed else f"bound {_largest(bounds.shares):.2g}"
    return rebuilt(
        compiled,
        new,
        circuit,
        f"superposed in {width} of {config.d_model} dimensions, {how} (seed {seed})",
        d_model=width,
        d_head=config.head_width,
        d_mlp=len(new["block.0.mlp.fc_in.bias"]),
    )


def _check_exact(circuit: Circuit) -> None:
    inexact = circuit.superposition is not None and not circuit.superposition.exact
    noisy = [d for d in circuit.disguises if d.startswith(NOISE)]
    if inexact or noisy:
        raise InputError(
            "the model to superpose",
            expected="one whose circuit is exact, as its bound rests on that",
            given=f"one that is {circuit.disguises[-1] if inexact else noisy[0]}",
            fix="Superpose it once, and before noise is added.",
        )


def _checked_width(d_model: int | None, needed: int, current: int) -> int:
    if d_model is None:
        if needed >= current:
            raise InputError(
                "d_model",
                expected=f"an integer below {current}, as no fewer dimensions are exact",
                given="None, which stands for the fewest that are",
                fix="Pass d_model, or leave the model as it is.",
            )
        return needed
    check_whole("d_model", d_model, least=1)
    if d_model >= current:
        raise InputError(
            "d_model",
            expected=f"an integer below {current}, the model's own",
            given=str(d_model),
            fix=f"Leave it out for the fewest that are exact, which is {needed}."
            if needed < current
            else "Pass a smaller one.",
        )
    return d_model


def _record(bounds: Errors, width: int, needed: int) -> Superposition:
    return Superposition(
        d_model=width,
        exact_d_model=needed,
        error_bound=0.0 if width >= needed else _largest(bounds.shares),
        unit_error=_largest(torch.cat(bounds.units)),
        score_error=_largest(torch.stack(bounds.scores)) if bounds.scores else 0.0,
        logit_error=_largest(bounds.logits),
        read_error=_largest(bounds.variables),
    )


def _largest(bounds: Tensor) -> float:
    return float(bounds.max()) if bounds.numel() else 0.0


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
