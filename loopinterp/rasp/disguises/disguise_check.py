"""How far a disguised model is from the original, measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from loopinterp.rasp.compiler.agreement import Agreement, compare_with_program, parts_of
from loopinterp.rasp.compiler.compiled import Compiled, need_compiled
from loopinterp.short_repr import ShortRepr

if TYPE_CHECKING:
    from jaxtyping import Float, Int
    from torch import Tensor


@dataclass(frozen=True, eq=False, repr=False)
class DisguiseCheck(ShortRepr):
    """How far a disguised model is from the original on some inputs, at every loop.

    Attributes:
        logits: Largest difference of a logit.
        reads: Largest difference of a read of a variable's value: 1 for the value that it has, 0
            for the others in the original.
        agreement: The disguised model against its program.
    """

    logits: Float[Tensor, " loops"]
    reads: Float[Tensor, " loops"]
    agreement: Agreement

    @property
    def exact(self) -> bool:
        """Whether all values and answers are the program's, at every loop."""
        return self.agreement.exact


@torch.no_grad()
def check_disguise(
    disguised: Compiled, original: Compiled, inputs: Int[Tensor, "batch pos"], *, n_loops: int
) -> DisguiseCheck:
    r"""Compare a disguised model with the original.

    .. math:: \max_{x, p} |y'_t - y_t| \quad\text{and}\quad
        \max_{x, p, v} |r'_v h'_t - r_v h_t|, \qquad t = 0 \dots T

    over inputs x, positions p and the values v of all variables, whose reads r are the circuits'.

    Args:
        disguised: The disguised model.
        original: The model as it was.
        inputs: Tokens.
        n_loops: Loops T to run.

    Raises:
        InputError: no compiled models, or inputs and loops that :func:`compare_with_program`
            refuses.

    Example:
        >>> from loopinterp.rasp import check_disguise, compile_program, superpose
        >>> plain = compile_program("ripple", max_length=6)
        >>> tokens = torch.tensor([[4, 3, 1, 2, 0]])
        >>> check = check_disguise(superpose(plain, seed=0), plain, tokens, n_loops=5)
        >>> check.exact, bool(check.logits.max() < 1e-4), len(check.logits)
        (True, True, 6)
    """
    need_compiled(original)
    agreement = compare_with_program(disguised, inputs, n_loops=n_loops)
    parts = []
    for part in parts_of(inputs, n_loops, original):
        now, before = (_logits_and_reads(c, part, n_loops) for c in (disguised, original))
        apart = [(x - y).abs().flatten(1).amax(1) for x, y in zip(now, before)]
        parts.append(torch.stack(apart))
    logits, reads = torch.stack(parts).amax(0)
    return DisguiseCheck(logits, reads, agreement)


def _logits_and_reads(compiled: Compiled, inputs: Tensor, n_loops: int) -> tuple[Tensor, Tensor]:
    """[loop, batch, pos, class] and [loop, batch, pos, value]."""
    model, circuit = compiled.model, compiled.circuit
    states = model(inputs, n_loops=n_loops, return_type="states")
    read = torch.cat([circuit.of(name).read for name in circuit.variables]).to(states)
    return torch.stack([model.readout(state) for state in states]), states @ read.mT
