"""Prefix sums mod 2: the running XOR of the bits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from loopinterp.tasks.sampling import (
    check_fits,
    check_length,
    check_tokens,
    inside,
    lengths,
    pick_distribution,
    random_bits,
)
from loopinterp.tasks.task import IGNORE, Batch

if TYPE_CHECKING:
    from jaxtyping import Int
    from torch import Tensor

BOS = 2
PAD = 3


@dataclass(frozen=True)
class PrefixSum:
    """Running XOR of n bits after a BOS token: at each bit, the parity of all bits up to it.

    Tokens: bits 0 and 1, BOS (2), PAD (3, on the right). Targets ``IGNORE`` at BOS and PAD.
    T(n) = n + 1.

    Distributions: ``"uniform"`` (fair bits), ``"biased"`` (each example draws its probability
    of a one from {.05, .5, .95}).

    Source: the prefix-sum task of arXiv 2604.15259.

    Example:
        >>> batch = PrefixSum().from_bits(torch.tensor([[1, 0, 1, 1]]), torch.tensor([4]))
        >>> batch.inputs.tolist(), batch.targets.tolist()
        ([[2, 1, 0, 1, 1]], [[-100, 1, 1, 0, 1]])
    """

    @property
    def name(self) -> str:
        return "prefix_sum"

    @property
    def d_vocab(self) -> int | None:
        return 4

    @property
    def d_features(self) -> int | None:
        return None

    @property
    def d_vocab_out(self) -> int:
        return 2

    @property
    def distributions(self) -> tuple[str, ...]:
        return ("uniform", "biased")

    def n_loops(self, n: int) -> int:
        """T(n) = n + 1."""
        return check_length(n) + 1

    def n_positions(self, n: int) -> int:
        """BOS and n bits."""
        return check_length(n) + 1

    def config(self) -> dict[str, object]:
        return {}

    def describe(self) -> str:
        return "Running XOR of n bits, answered at every bit."

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
        tokens = bits.masked_fill(~inside(n, bits.shape[1]), PAD)
        tokens = torch.cat([tokens.new_full((len(n), 1), BOS), tokens], dim=1)
        return Batch(tokens, self.targets(tokens), n, n + 1)

    def targets(self, inputs: Batch | Tensor) -> Int[Tensor, "batch pos"]:
        """The exact answer to given inputs: the running XOR, ``IGNORE`` at BOS and PAD.

        Raises:
            InputError: the inputs are not tokens of this task.
        """
        tokens = check_tokens(inputs.inputs if isinstance(inputs, Batch) else inputs, 4)
        answer = (tokens == 1).cumsum(dim=1) % 2
        return answer.masked_fill(tokens >= BOS, IGNORE)
