"""Parity with full-output prediction: the whole answer is read from the ``=`` sign on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from loopinterp.tasks.sampling import (
    check_fits,
    check_length,
    check_tokens,
    lengths,
    pick_distribution,
    random_bits,
)
from loopinterp.tasks.task import IGNORE, Batch

if TYPE_CHECKING:
    from jaxtyping import Int
    from torch import Tensor

EQUALS = 2
EOS = 3
BOS = 4
EOS_OUT = 2
"""Output class of the end of the answer (the classes 0 and 1 are the parity bit)."""


@dataclass(frozen=True)
class Parity:
    """The parity of n bits, in the full-output format: ``BOS b_1 … b_n = EOS …``.

    Tokens: bits 0 and 1, ``=`` (2), EOS (3, which is also the padding), BOS (4). Output classes:
    0, 1, EOS (2). The answer starts AT the ``=``: there the parity bit is asked for, at every
    later position EOS, up to the padded length; before it, nothing. T(n) = n.

    Distributions: ``"uniform"`` (fair bits), ``"biased"`` (each example draws its probability
    of a one from {.05, .5, .95}).

    Source: arXiv 2409.15647.

    Example:
        >>> batch = Parity().from_bits(torch.tensor([[1, 0, 1, 1]]), torch.tensor([4]))
        >>> batch.inputs.tolist()
        [[4, 1, 0, 1, 1, 2, 3]]
        >>> batch.targets.tolist()
        [[-100, -100, -100, -100, -100, 1, 2]]
    """

    @property
    def name(self) -> str:
        return "parity"

    @property
    def d_vocab(self) -> int | None:
        return 5

    @property
    def d_features(self) -> int | None:
        return None

    @property
    def d_vocab_out(self) -> int:
        return 3

    @property
    def distributions(self) -> tuple[str, ...]:
        return ("uniform", "biased")

    def n_loops(self, n: int) -> int:
        """T(n) = n."""
        return check_length(n)

    def n_positions(self, n: int) -> int:
        """BOS, n bits, ``=`` and one EOS."""
        return check_length(n) + 3

    def config(self) -> dict[str, object]:
        return {}

    def describe(self) -> str:
        return "Parity of n bits, answered at the '=' sign and closed by EOS."

    def sample(
        self,
        n: int | Int[Tensor, " batch"],
        *,
        batch_size: int | None = None,
        generator: torch.Generator,
        distribution: str | None = None,
    ) -> Batch:
        """Draw examples on the generator's device; see :meth:`Task.sample`."""
        kind = pick_distribution(self, distribution)
        each = lengths(n, batch_size=batch_size, generator=generator)
        return self.from_bits(random_bits(kind, len(each), int(each.max()), generator), each)

    def from_bits(self, bits: Int[Tensor, "batch width"], n: Int[Tensor, " batch"]) -> Batch:
        """The batch of given bits; only the first ``n`` of each row count.

        Raises:
            InputError: ``bits`` are not 0 and 1, or a length does not fit.
        """
        check_tokens(bits, 2, "bits")
        check_fits(n, bits)
        first, last = bits.new_full((len(n), 1), BOS), bits.new_full((len(n), 2), EOS)
        tokens = torch.cat([first, bits, last], dim=1)
        position = torch.arange(tokens.shape[1], device=n.device)
        equals = (n + 1)[:, None]
        tokens = tokens.masked_fill(position > equals, EOS).masked_fill(position == equals, EQUALS)
        return Batch(tokens, self.targets(tokens), n, n.clone())

    def targets(self, inputs: Batch | Tensor) -> Int[Tensor, "batch pos"]:
        """The exact answer to given inputs: parity at ``=``, EOS after it, ``IGNORE`` before.

        Raises:
            InputError: the inputs are not tokens of this task.
        """
        tokens = check_tokens(inputs.inputs if isinstance(inputs, Batch) else inputs, 5)
        equals = tokens == EQUALS
        after = equals.cumsum(dim=1) > 0
        parity = ((tokens == 1) & ~after).sum(dim=1, keepdim=True) % 2
        answer = torch.where(equals, parity, EOS_OUT)
        return answer.masked_fill(~after, IGNORE)
