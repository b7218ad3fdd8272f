"""Binary arithmetic: a + b on bit pairs; a + b and a * b with full output."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from pydantic import PositiveInt
from torch.nn.functional import pad

from loopinterp.core.errors import need
from loopinterp.core.settings import settings
from loopinterp.tasks import carries as carry_arithmetic
from loopinterp.tasks.full_output import FullOutput
from loopinterp.tasks.sampling import (
    Sampler,
    check_digits,
    check_tokens,
    choice,
    coins,
    inside,
    integers,
    join,
    lengths,
    need_form,
    operand_digits,
    operands_of,
    product_digits,
    random_bits,
    same,
)
from loopinterp.tasks.task import IGNORE, Batch, inputs_of, or_text, spell

if TYPE_CHECKING:
    from jaxtyping import Bool, Int
    from torch import Tensor

BOS, _PAD = 4, 5
_OPERATOR = 2  # the token of ``+``, and of ``*``, with full-output prediction

PROPAGATE_PROBABILITIES = (0.5, 0.8, 0.95)


def _at_positions(function: Callable[..., Tensor]) -> Callable[[Any, Batch | Tensor], Tensor]:
    """A function of bits as a method of the task's inputs."""

    def method(self: Addition, inputs: Batch | Tensor) -> Tensor:
        return function(*self.operands(inputs))

    method.__name__, method.__qualname__ = function.__name__, f"Addition.{function.__name__}"
    method.__doc__ = (function.__doc__ or "").partition("\n")[0]
    return method


@settings
class Addition(Sampler):
    """a + b mod 2^n on aligned bit pairs, least significant first. T(n) = n + 1.

    With ``format="pairs"`` the tokens are ``a_i + 2 b_i`` after BOS (4): bit i is at position i +
    1; PAD is 5. With ``format="features"`` bit i is the float vector ``(a_i, b_i)`` at position i;
    padding is (0, 0). Targets are the sum bits, ``IGNORE`` at BOS and padding.

    :meth:`carries` and the other analyses have the model's positions; BOS and PAD count as the bits
    (0, 0), which stop a carry.

    Distributions: ``"propagate"`` (each example draws the probability that a position propagates
    from {.5, .8, .95}), ``"uniform"`` (fair bits), ``"chain"`` (bit 0 generates and all others
    propagate: the carry runs the whole length).

    Example:
        >>> task = Addition()
        >>> batch = task.encode([(3, 5)], n=4)
        >>> batch.inputs.tolist(), batch.targets.tolist()
        ([[4, 3, 1, 2, 0]], [[-100, 0, 0, 0, 1]])
        >>> task.carries(batch).tolist()
        [[0, 1, 1, 1, 0]]
    """

    name = "addition"
    goal = "add binary numbers"
    d_vocab_out = 2
    distributions = ("propagate", "uniform", "chain")

    format: Literal["pairs", "features"] = "pairs"

    @property
    def d_vocab(self) -> int | None:
        return 6 if self.format == "pairs" else None

    @property
    def d_features(self) -> int | None:
        return 2 if self.format == "features" else None

    @property
    def offset(self) -> int:
        """Position of bit 0: 1 after a BOS token, else 0."""
        return 1 if self.format == "pairs" else 0

    def _n_positions(self, n: int) -> int:
        return n + self.offset

    def describe(self) -> str:
        where = "tokens a + 2b after BOS" if self.format == "pairs" else "float vectors (a, b)"
        return f"Binary addition mod 2^n on aligned bits, least significant first ({where})."

    def say(self, row: Sequence[Any], answer: Sequence[int] | None) -> str:
        pairs = [(t & 1, t >> 1) for t in row if t < 4] if self.format == "pairs" else row
        need_form(pairs, self.name, "a pair of bits")
        a, b = (spell(bits, turned=True) for bits in zip(*pairs))
        if answer is None:
            return f"{a} + {b} ="
        total = spell(answer[self.offset : self.offset + len(pairs)], turned=True)
        return f"{a} + {b} = {total} mod 2^{len(pairs)}"

    def from_bits(
        self, a: Int[Tensor, "batch width"], b: Int[Tensor, "batch width"], n: Int[Tensor, " batch"]
    ) -> Batch:
        """The batch of bits, least significant first; the first ``n`` of each row count."""
        _check_bits(a, b, n)
        if self.format == "pairs":
            tokens = join([same(BOS, n), (a + 2 * b, n)], width=a.shape[1] + 1, fill=_PAD)
            return Batch(tokens, self.targets(tokens), n, n + 1, self)
        real = inside(n, a.shape[1])  # [batch, width]: no padding
        a, b = a * real, b * real
        answer = carry_arithmetic.total(a, b).masked_fill(~real, IGNORE)
        return Batch(torch.stack([a, b], dim=-1).float(), answer, n, n + 1, self)

    @or_text
    def encode(self, operands: Iterable[Sequence[int]], n: int) -> Batch:
        """The batch of integers, each in 0..2^n - 1."""
        a, b = operand_digits(operands, n, n)
        return self.from_bits(a, b, torch.full((len(a),), n))

    def operands(
        self, inputs: Batch | Tensor
    ) -> tuple[Int[Tensor, "batch pos"], Int[Tensor, "batch pos"]]:
        """The bits (a, b) at each model position; (0, 0) at BOS and PAD."""
        if self.format == "pairs":
            tokens = check_tokens(inputs, 6)  # a + 2 b, or BOS and PAD
            bits = torch.where(tokens < 4, tokens, 0)
            return bits & 1, bits >> 1
        x = inputs_of(inputs)
        pairs = x.ndim == 3 and x.shape[-1] == 2 and x.is_floating_point()
        fits = pairs and ((x == 0) | (x == 1)).all()
        fix = "Pass a batch of this task; for tokens use Addition(format='pairs')."
        need(fits, "inputs", "float bit pairs [batch, pos, 2] of 0.0 and 1.0", x, fix)
        a, b = x.long().unbind(-1)
        return a, b

    def targets(self, inputs: Batch | Tensor) -> Int[Tensor, "batch pos"]:
        """The sum bits; ``IGNORE`` at BOS and PAD tokens.

        In the features format padding looks like the bits (0, 0), so every position is answered.
        """
        answer = carry_arithmetic.total(*self.operands(inputs))
        if self.format == "features":
            return answer
        return answer.masked_fill(inputs_of(inputs) >= 4, IGNORE)

    generate = _at_positions(carry_arithmetic.generate)
    propagate = _at_positions(carry_arithmetic.propagate)
    carries = _at_positions(carry_arithmetic.carries)
    carry_in = _at_positions(carry_arithmetic.carry_in)
    chain_length = _at_positions(carry_arithmetic.chain_length)
    chain_length_in = _at_positions(carry_arithmetic.chain_length_in)

    def chain_reaches_start(self, inputs: Batch | Tensor) -> Bool[Tensor, "batch pos"]:
        """Whether the carry OUT of a position depends on a chain that runs back to bit 0.

        Such a carry is always 0.
        """
        a, b = self.operands(inputs)
        return carry_arithmetic.propagate(a, b) & (carry_arithmetic.chain_start(a, b) < self.offset)

    def chain_in_reaches_start(self, inputs: Batch | Tensor) -> Bool[Tensor, "batch pos"]:
        """:meth:`chain_reaches_start` of the carry INTO each position; True at bit 0 and BOS."""
        out = self.chain_reaches_start(inputs)
        first = torch.ones_like(out[:, : self.offset + 1])  # no bit decides the carry into bit 0
        return torch.cat([first, out[:, self.offset : -1]], dim=1)

    def _draw(self, kind: str, n: Tensor, generator: torch.Generator) -> Batch:
        return self.from_bits(*draw_bits(kind, len(n), int(n.max()), generator), n)


@settings
class TokenAddition(FullOutput):
    """a + b of n bits each, in the full-output format: ``BOS a_1 … a_n + b_1 … b_n = EOS …``.

    The most significant bit comes first, so that carries run against the direction of causal
    attention. T(n) = n. Distributions are those of :class:`Addition`; in ``"chain"`` the last bits
    generate.

    Source: arXiv 2409.15647.

    Example:
        >>> batch = TokenAddition().encode([(3, 5)], n=3)
        >>> batch.inputs.tolist()
        [[5, 0, 1, 1, 2, 1, 0, 1, 3, 4, 4, 4, 4]]
        >>> batch.targets[0, 8:].tolist()    # 3 + 5 = 1000
        [1, 0, 0, 0, 2]
    """

    name = "token_addition"
    goal = "write out the sum of two binary numbers"
    about = "Binary addition of n-bit numbers, a + b =, most significant bit first."
    symbols = ("0", "1", "+")
    distributions = ("uniform", "propagate", "chain")

    def prompt_length(self, n: int) -> int:
        return 2 * n + 1

    def answer_length(self, n: int) -> int:
        return n + 1

    def from_bits(
        self, a: Int[Tensor, "batch width"], b: Int[Tensor, "batch width"], n: Int[Tensor, " batch"]
    ) -> Batch:
        """The batch of bits, most significant first; the first ``n`` of each row count."""
        _check_bits(a, b, n)
        return self._batch([(a, n), same(_OPERATOR, n), (b, n)], n, n.clone())

    @or_text
    def encode(self, operands: Iterable[Sequence[int]], n: int) -> Batch:
        """The batch of integers, each in 0..2^n - 1."""
        a, b = operand_digits(operands, n, n)
        return self.from_bits(a.flip(1), b.flip(1), torch.full((len(a),), n))

    def _draw(self, kind: str, n: Tensor, generator: torch.Generator) -> Batch:
        a, b = draw_bits(kind, len(n), int(n.max()), generator)
        return self.from_bits(_turn(a, n), _turn(b, n), n)

    def _solve(self, prompt: Tensor, n: Tensor) -> tuple[Tensor, Tensor]:
        operands, length = operands_of(prompt, n, operator=_OPERATOR, base=2, task=self.name)
        n_a, n_b = length.unbind(dim=1)
        need_form(torch.equal(n_a, n_b), self.name, "two operands of the same length")
        a, b = (pad(_turn(x, n_a), (0, 1)) for x in operands.unbind(dim=1))
        return _turn(carry_arithmetic.total(a, b), n_a + 1), n_a + 1


@settings
class Multiplication(FullOutput):
    """a * b, m bits times n bits, in the full-output format: ``BOS a_1 … a_m * b_1 … b_n = EOS …``.

    The least significant bit comes first; the answer has n + m bits. The length n is that of b, the
    setting ``m`` the most bits of a. T is n times the bits of a, or n times the setting ``m`` with
    ``equal_loops``.

    Distributions: ``"uniform"`` (a has m bits, all fair), ``"biased"`` (each factor draws the
    probability of a one from {.05, .5, .95}), ``"mixed"`` (fair bits; a's length is drawn from
    1..m, as in the published training data).

    Source: arXiv 2409.15647.

    Example:
        >>> batch = Multiplication().encode([(3, 6)], n=3)
        >>> batch.inputs.tolist()
        [[5, 1, 1, 2, 0, 1, 1, 3, 4, 4, 4, 4, 4]]
        >>> batch.targets[0, 7:].tolist()    # 18 = 10010, read backwards
        [0, 1, 0, 0, 1, 2]
    """

    name = "multiplication"
    goal = "multiply binary numbers"
    about = "Binary multiplication, {self.m} bits * n bits =, least significant bit first."
    symbols = ("0", "1", "*")
    distributions = ("uniform", "biased", "mixed")
    least_first = ("prompt", "answer")

    m: PositiveInt = 2
    equal_loops: bool = False

    def _n_loops(self, n: int) -> int:
        return n * self.m

    def prompt_length(self, n: int) -> int:
        return n + self.m + 1

    def answer_length(self, n: int) -> int:
        return n + self.m

    def from_bits(
        self,
        a: Int[Tensor, "batch width_a"],
        b: Int[Tensor, "batch width_b"],
        m: Int[Tensor, " batch"],
        n: Int[Tensor, " batch"],
    ) -> Batch:
        """The batch of bits: the first ``m`` of each row of ``a``, ``n`` of ``b``."""
        check_digits(check_tokens(a, 2, "bits a")[:, : self.m], m, 2, "bits a")
        check_digits(b, n, 2, "bits b")
        n_loops = n * (self.m if self.equal_loops else m)
        return self._batch([(a, m), same(_OPERATOR, n), (b, n)], n, n_loops)

    @or_text
    def encode(self, operands: Iterable[Sequence[int]], n: int, m: int | None = None) -> Batch:
        """The batch of integers: a in 0..2^m - 1, b in 0..2^n - 1."""
        m = self.m if m is None else m
        a, b = operand_digits(operands, m, n)
        return self.from_bits(a, b, torch.full((len(a),), m), torch.full((len(b),), n))

    def sample_operands(
        self, m: int, n: int, *, batch_size: int, generator: torch.Generator
    ) -> Batch:
        """Draw products of ``m`` and ``n`` fair bits."""
        drawn = [lengths(k, batch_size=batch_size, generator=generator) for k in (m, n)]
        a, b = (random_bits("uniform", batch_size, k, generator) for k in (m, n))
        return self.from_bits(a, b, *drawn)

    def _draw(self, kind: str, n: Tensor, generator: torch.Generator) -> Batch:
        bits = "biased" if kind == "biased" else "uniform"
        a = random_bits(bits, len(n), self.m, generator)
        b = random_bits(bits, len(n), int(n.max()), generator)
        m = torch.full_like(n, self.m)
        if kind == "mixed":
            m = integers(1, self.m + 1, (len(n),), generator)
        return self.from_bits(a, b, m, n)

    def _solve(self, prompt: Tensor, n: Tensor) -> tuple[Tensor, Tensor]:
        operands, length = operands_of(prompt, n, operator=_OPERATOR, base=2, task=self.name)
        a, b = operands.unbind(dim=1)  # [batch, width]; the "*" is the one symbol that is no bit
        return product_digits(a[:, : int(length[:, 0].max())], b, 2), n - 1


def _turn(bits: Int[Tensor, "batch width"], n: Int[Tensor, " batch"]) -> Tensor:
    """Reverse the first ``n`` bits of each row; zeros after them."""
    column = torch.arange(bits.shape[1], device=bits.device)
    at = n[:, None] - 1 - column  # [batch, width]; negative behind the first n bits
    return bits.gather(1, at.clamp(min=0)).masked_fill(at < 0, 0)


def draw_bits(
    distribution: str, batch_size: int, width: int, generator: torch.Generator
) -> tuple[Int[Tensor, "batch width"], Int[Tensor, "batch width"]]:
    shape = (batch_size, width)
    a = coins(0.5, shape, generator)
    if distribution == "uniform":
        return a.long(), coins(0.5, shape, generator).long()
    if distribution == "propagate":  # b differs from a where a position propagates
        probability = choice(PROPAGATE_PROBABILITIES, (batch_size, 1), generator)
        b = a ^ coins(probability, shape, generator)
    else:  # bit 0 generates, all others propagate
        a[:, 0] = True
        b = ~a
        b[:, 0] = True
    return a.long(), b.long()


def _check_bits(a: Tensor, b: Tensor, n: Tensor) -> None:
    check_digits(a, n, 2, "bits a")
    check_tokens(b, 2, "bits b")
    expected = f"shape {list(a.shape)}, as bits a"
    need(a.shape == b.shape, "bits b", expected, f"{list(b.shape)}", "Pass equal widths.")
