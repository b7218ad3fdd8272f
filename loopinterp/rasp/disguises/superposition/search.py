"""The search for directions to superpose a model along."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from loopinterp.errors import InputError
from loopinterp.rasp.compiler.circuit import Superposition
from loopinterp.rasp.compiler.compiled import Compiled, need_compiled
from loopinterp.rasp.disguises.draws import check_whole, generator
from loopinterp.rasp.disguises.noise import NOISE
from loopinterp.rasp.disguises.places import (
    Places,
    orthonormal,
    unlisted_directions,
)
from loopinterp.rasp.disguises.superposition.frame import (
    Frame,
    dense_frame,
    dimensions_needed,
    exact_frame,
)
from loopinterp.rasp.disguises.superposition.interference import errors
from loopinterp.rasp.disguises.superposition.program_reads import program_reads
from loopinterp.rasp.disguises.weights import weights_of

if TYPE_CHECKING:
    from torch import Tensor

    from loopinterp.rasp.compiler.circuit import Circuit

NORM = 16
"""A search for inexact directions lowers the mean of the bounds to this power: the large ones."""


class FrameSearch:
    """What has to be known of a model to superpose it.

    Attributes:
        weights: Its weights.
        places: What is held where.
        reads: What the program reads.
        apart: Directions of distractors.
        kept: Directions with dimensions of their own, where a superposition is not exact.
        needed: The fewest dimensions of an exact one.

    Args:
        compiled: The model.

    Raises:
        InputError: it is noisy, or superposed inexactly.
    """

    def __init__(self, compiled: Compiled) -> None:
        need_compiled(compiled)
        _check_exact(compiled.circuit)
        self.weights = weights_of(compiled)
        self.places = Places(compiled.circuit)
        self.reads = program_reads(self.weights, compiled.model.config, self.places)
        self.apart = unlisted_directions(self.weights, compiled.circuit)
        self.kept = orthonormal(torch.cat([self.apart, self.reads.exactly]))
        self.needed = dimensions_needed(self.apart, self.places)
        self._length = compiled.circuit.max_length

    def frame(self, width: int, seed: int, *, steps: int, tries: int) -> Frame:
        """Directions in so many dimensions: exact ones if that is enough.

        Args:
            width: The dimensions.
            seed: Seed of the directions to start from.
            steps: Steps of a search for inexact ones.
            tries: Searches for inexact ones, each from another start; the first with a proof is
                taken, or the best.
        """
        g = generator(seed)
        if width >= self.needed:
            return exact_frame(self.apart, self.places, width, g)

        def interference(frame: Frame) -> Tensor:
            shares = errors(self.reads, frame, self._length, smooth=True).shares
            return shares.pow(NORM).mean().pow(1 / NORM).log()

        best, least = None, math.inf
        for _ in range(tries):
            found = dense_frame(self.kept, width, interference, steps, g)
            bound = self.record(found).error_bound
            if best is None or bound < least:
                best, least = found, bound
            if least < 1:
                break
        assert best is not None
        return best

    def record(self, frame: Frame) -> Superposition:
        """What a frame costs."""
        bounds = errors(self.reads, frame, self._length)
        width = len(frame.write)
        return Superposition(
            d_model=width,
            exact_d_model=self.needed,
            error_bound=0.0 if width >= self.needed else _largest(bounds.shares),
            unit_error=_largest(torch.cat(bounds.units)),
            score_error=_largest(torch.stack(bounds.scores)) if bounds.scores else 0.0,
            logit_error=_largest(bounds.logits),
            read_error=_largest(bounds.variables),
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


def check_search(seed: int, steps: int, tries: int) -> None:
    """Check the numbers that a search is asked for.

    Raises:
        InputError: one is no integer, or too small.
    """
    generator(seed)
    check_whole("steps", steps, least=0)
    check_whole("tries", tries, least=1)


def checked_width(d_model: int | None, search: FrameSearch, current: int) -> int:
    """The dimensions to superpose in.

    Raises:
        InputError: they are too few, or no fewer than there are.
    """
    needed, least = search.needed, len(search.kept) + 1
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
    if d_model >= current or d_model < min(least, needed):
        raise InputError(
            "d_model",
            expected=f"an integer from {min(least, needed)} to {current - 1}: fewer dimensions "
            f"than the model has, and more than the {least - 1} that have to be kept apart",
            given=str(d_model),
            fix=f"{needed} are exact." if needed < current else "Pass another one.",
        )
    return d_model


def _largest(bounds: Tensor) -> float:
    return float(bounds.max()) if bounds.numel() else 0.0
