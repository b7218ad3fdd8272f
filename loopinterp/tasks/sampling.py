"""What the samplers share: their arguments and the checks of them, lengths, and random bits."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from loopinterp.errors import InputError, check_choice, check_integer
from loopinterp.settings import Settings
from loopinterp.tasks.batch_checks import describe_tensor
from loopinterp.tasks.examples_in_words import InWords
from loopinterp.tasks.task import Batch, inputs_of

if TYPE_CHECKING:
    from jaxtyping import Bool, Int
    from torch import Tensor

    from loopinterp.tasks.task import Task


BIASES = (0.05, 0.5, 0.95)
"""Probabilities of a one among which each example of the ``"biased"`` distribution draws."""


class Sampler(Settings, InWords, ABC):
    """Base of the tasks here: declared settings, and a sampler whose arguments are checked."""

    name: str
    distributions: tuple[str, ...]

    @property
    def d_features(self) -> int | None:
        return None

    def n_loops(self, n: int) -> int:
        """T(n) = n + 1, where a task does not say otherwise."""
        return check_length(n) + 1

    def config(self) -> dict[str, object]:
        """The task's settings; ``get_task(task.name, **task.config())`` is the task again."""
        return self.to_dict()

    def longest(self, n: int) -> int:
        """The greatest length up to n that can be drawn; the shortest of all if none is."""
        return check_length(n)

    @abstractmethod
    def describe(self) -> str:
        """One line for people; see :meth:`Task.describe`."""

    @abstractmethod
    def _draw(self, kind: str, n: Tensor, generator: torch.Generator) -> Batch:
        """Examples of the given lengths [batch], of one of the distributions."""

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
        return self._draw(kind, lengths(n, batch_size=batch_size, generator=generator), generator)


def check_length(n: int) -> int:
    """Return ``n``; raise unless it is a problem length, an integer of at least 1."""
    fix = "Pass a problem length, e.g. n=8."
    return check_integer("n", n, least=1, far=MOST_TOKENS, fix=fix)


MOST_TOKENS, MOST_STEPS = 2**27, 10**11
"""Positions drawn at once (1 GiB), and times loops; more is taken for a slip."""


def longest_length(task: Task, n: int) -> int:
    """The greatest length up to n that a task can draw; the shortest of all if none is.

    A task of a user's own that has no method ``longest`` can draw all lengths.

    Example:
        >>> from loopinterp.tasks import get_task
        >>> longest_length(get_task("sudoku", box=2), 32), longest_length(get_task("copy"), 32)
        (12, 32)
    """
    longest = getattr(task, "longest", None)
    return n if longest is None else longest(n)


def check_size(task: Task, n: int, n_examples: int, what: str) -> None:
    """Raise unless so many examples of a length can be drawn at once, and run to T(n)."""
    positions = n_examples * task.n_positions(n)
    steps = positions * max(task.n_loops(n), 1)
    if positions > MOST_TOKENS or steps > MOST_STEPS:
        raise InputError(
            what,
            expected=f"examples of at most {MOST_TOKENS:,} positions together, which are "
            f"{MOST_STEPS:,} times loops",
            given=f"{n_examples:,} of length {n:,}: {positions:,} positions, {steps:,} times loops",
            fix="Take shorter ones, or fewer.",
        )


def lengths(
    n: int | Int[Tensor, " batch"], *, batch_size: int | None, generator: torch.Generator
) -> Int[Tensor, " batch"]:
    """The length of each example, on the generator's device: the arguments of :meth:`Task.sample`.

    Raises:
        InputError: a length below 1, a wrong dtype, shape or device, or no batch size.
    """
    if not isinstance(generator, torch.Generator):
        raise InputError(
            "generator",
            expected="a torch.Generator",
            given=type(generator).__name__,
            fix="Pass generator=torch.Generator().manual_seed(0).",
        )
    if not isinstance(n, torch.Tensor):
        size = check_integer(
            "batch_size",
            batch_size,
            least=1,
            far=MOST_TOKENS,
            fix="Pass batch_size=64, or a tensor with one length per example as n.",
        )
        return torch.full((size,), check_length(n), device=generator.device)
    if n.dtype != torch.int64 or n.ndim != 1 or n.numel() == 0 or int(n.min()) < 1:
        raise InputError(
            "n",
            expected="an int64 tensor [batch] of lengths >= 1, one for each example",
            given=describe_tensor(n),
            fix="Pass e.g. torch.randint(1, 9, (64,)).",
        )
    if n.device != generator.device:
        raise InputError(
            "n",
            expected=f"a tensor on the generator's device ({generator.device})",
            given=f"a tensor on {n.device}",
            fix="Move n, or make the generator on the device where you want the examples.",
        )
    if batch_size is not None and batch_size != n.shape[0]:
        raise InputError(
            "batch_size",
            expected=f"{n.shape[0]}, the number of lengths in n",
            given=repr(batch_size),
            fix="Leave batch_size out when n is a tensor.",
        )
    return n


def pick_distribution(task: Task | Sampler, distribution: str | None) -> str:
    """The named distribution of a task, which must have it, or its first one."""
    if distribution is None:
        return task.distributions[0]
    return check_choice(f"distribution of task {task.name}", distribution, task.distributions)


def inside(n: Int[Tensor, "*batch"], width: int) -> Bool[Tensor, "*batch width"]:
    """True at the first ``n`` of ``width`` columns."""
    return torch.arange(width, device=n.device) < n[..., None]


def coins(
    probability: float | Tensor, shape: Sequence[int], generator: torch.Generator
) -> Bool[Tensor, "*shape"]:
    """Independent coins that are True with the given probability (broadcast to ``shape``)."""
    return (
        torch.rand(*shape, generator=generator, device=generator.device, dtype=torch.float32)
        < probability
    )


def random_bits(
    distribution: str, batch_size: int, width: int, generator: torch.Generator
) -> Int[Tensor, "batch width"]:
    """Fair bits (``"uniform"``), or bits of a bias that each row draws (``"biased"``)."""
    probability: float | Tensor = 0.5
    if distribution == "biased":
        probability = choice(BIASES, (batch_size, 1), generator)
    return coins(probability, (batch_size, width), generator).long()


def integers(
    low: int, high: int, shape: Sequence[int], generator: torch.Generator
) -> Int[Tensor, "*shape"]:
    """Integers drawn uniformly from ``low .. high - 1``."""
    return torch.randint(low, high, tuple(shape), generator=generator, device=generator.device)


def choice(values: Sequence[float], shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """Values drawn uniformly from a list."""
    index = integers(0, len(values), shape, generator)
    return torch.tensor(values, device=generator.device)[index]


def check_tokens(inputs: Batch | Tensor, d_vocab: int, what: str = "inputs") -> Tensor:
    """Return the inputs; raise unless they are tokens [batch, pos] in ``0 .. d_vocab - 1``."""
    tokens = inputs_of(inputs)
    whole = isinstance(tokens, torch.Tensor) and tokens.dtype == torch.int64 and tokens.ndim == 2
    if not whole or (tokens.numel() and not 0 <= int(tokens.min()) <= int(tokens.max()) < d_vocab):
        raise InputError(
            what,
            expected=f"tokens in 0..{d_vocab - 1}, as int64 tokens of shape [batch, pos]",
            given=describe_tensor(tokens),
            fix="Pass the tokens of a batch of this task and format, tokens[None] for one example.",
        )
    return tokens


def check_digits(digits: Tensor, n: Tensor, base: int, what: str) -> None:
    """Raise unless they are digits [batch, width], the first ``n`` [batch] of which count."""
    rows, width = check_tokens(digits, base, what).shape
    whole = isinstance(n, torch.Tensor) and n.dtype == torch.int64 and n.shape == (rows,)
    if not whole or (rows and not 1 <= int(n.min()) <= int(n.max()) <= width):
        raise InputError(
            "n",
            expected=f"int64 of shape [{rows}] with lengths in 1..{width}, the width of {what}",
            given=describe_tensor(n),
            fix="Pass how many digits of each row count, one number for each.",
        )
