"""Drawing batches: the base of all tasks, the data of studies, checks of lengths and tokens."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from loopinterp.core.errors import InputError, check_choice, check_integer, check_seed
from loopinterp.core.settings import Settings
from loopinterp.tasks.task import IGNORE, Batch, check_values, describe_tensor, inputs_of, is_task
from loopinterp.tasks.words import InWords

if TYPE_CHECKING:
    from jaxtyping import Bool, Int
    from torch import Tensor

    from loopinterp.tasks.task import Task

_LENGTH, _EXAMPLES = 8, 64
"""Problem length and number of the examples that are drawn by default."""

MOST_TOKENS, _MOST_STEPS = 2**27, 10**11
"""Positions drawn at once (1 GiB), and times loops; more is taken for a slip."""


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


def as_batch(
    data: object,
    *,
    n: int | None = None,
    batch_size: int | None = None,
    examples: int = _EXAMPLES,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> Batch:
    """The batch that a study is given, or one drawn from a task; T(n) is then the task's.

    Args:
        data: A batch, which is taken as it is, or a task.
        n: Problem length of the examples drawn from a task; 8 by default.
        batch_size: Number of examples drawn from a task; ``examples`` by default.
        examples: The default of a study for ``batch_size``.
        seed: Seed of the drawn examples.
        device: Where the drawn examples are put.

    Raises:
        InputError: neither a batch nor a task, a batch with ``n`` or ``batch_size``, or more than
            can be drawn at once.

    Example:
        >>> from loopinterp.tasks import Addition
        >>> as_batch(Addition(), n=5, batch_size=2)
        Batch(examples=2, n=5, n_loops=6, inputs=int64[2, 6])
    """
    if is_task(data):
        generator = torch.Generator().manual_seed(check_seed(seed))
        size = check_integer("batch_size", examples if batch_size is None else batch_size, least=1)
        length = check_length(_LENGTH if n is None else n)
        check_size(data, length, size, "n, batch_size")
        batch = data.sample(length, batch_size=size, generator=generator)
        return replace(batch, task=data).to(device)  # a task of a user's own may leave it out
    if not isinstance(data, Batch):
        raise _no_task("data", "a Batch, or a task to draw one from", data)
    for name, value in (("n", n), ("batch_size", batch_size)):
        if value is not None:
            raise InputError(
                name,
                expected=f"no {name} beside a batch, whose examples are there already",
                given=repr(value),
                fix=f"Leave {name} out, or pass the task instead of the batch.",
            )
    check_values(data)
    if data.inputs.numel() == 0:
        raise InputError(
            "data",
            expected="a batch of at least one example and position",
            given=f"inputs of shape {list(data.inputs.shape)}",
            fix="Draw it with task.sample(n, batch_size=..., generator=...).",
        )
    return data


def as_batches(data: object, *, n: int | Sequence[int] | None = None, **drawn: Any) -> list[Batch]:
    """One batch or several; from each task, one of each length in ``n``. See :func:`as_batch`.

    Raises:
        InputError: as :func:`as_batch`, or an empty list of batches or of lengths.
    """
    several = data if isinstance(data, (list, tuple)) else [data]
    each: Any = n if isinstance(n, (list, tuple, range)) else [n]
    if not several or not each:
        expected = "a Batch or a task, or a list of them; with a task, a length n or a list of them"
        raise InputError("data", expected=expected, given="an empty list", fix=_fix(data))
    return [as_batch(one, n=length, **drawn) for one in several for length in each]


def as_prompts(tokens: Int[Tensor, "batch pos"], *, n_loops: int) -> Batch:
    """Prompts of a language model as a batch: the right output of each token is the next one.

    Args:
        tokens: A tokenizer's output, all of one length.
        n_loops: Loops after which the answer is read.

    Raises:
        InputError: no integers ``[batch, pos]`` of two positions or more.

    Example:
        >>> as_prompts(torch.tensor([[5, 3, 8]]), n_loops=4).targets
        tensor([[   3,    8, -100]])
    """
    check_integer("n_loops", n_loops, least=0)
    numbers = isinstance(tokens, torch.Tensor) and tokens.dtype in (torch.int32, torch.int64)
    if not numbers or tokens.dim() != 2 or tokens.shape[1] < 2:
        expected = "integers [batch, pos], of two positions or more"
        fix = "Pass tokenizer(texts, return_tensors='pt')['input_ids']."
        raise InputError("tokens", expected=expected, given=_kind(tokens), fix=fix)
    targets = tokens.long().roll(-1, dims=1)
    targets[:, -1] = IGNORE
    each = torch.ones(len(tokens), dtype=torch.int64, device=tokens.device)
    return Batch(tokens, targets, each * tokens.shape[1], each * n_loops)


def need_asked(batch: Batch) -> None:
    """Raise unless each example has a target: an answer to nothing would count as right.

    Raises:
        InputError: no examples, or one whose targets are all ``IGNORE``.
    """
    missing = (batch.targets == IGNORE).all(dim=1).nonzero().flatten().tolist()
    if len(batch) == 0 or missing:
        raise InputError(
            "batch",
            expected="examples that each have a position with a target",
            given="no examples" if len(batch) == 0 else f"none in examples {missing[:8]}",
            fix="Leave those examples out, or sample the batch from a task.",
        )


def need_task(task: object) -> None:
    """Raise unless an object is a task."""
    if not is_task(task):
        raise _no_task("task", "a task", task)


def _no_task(what: str, expected: str, data: object) -> InputError:
    return InputError(what, expected=expected, given=_kind(data), fix=_fix(data))


def _kind(data: object) -> str:
    if isinstance(data, type):
        return f"the class {data.__name__} itself"
    if isinstance(data, torch.Tensor):
        return f"a tensor, {describe_tensor(data)}"
    return repr(data) if isinstance(data, str) else f"a {type(data).__name__}"


def _fix(data: object) -> str:
    if isinstance(data, str):
        return f"Pass get_task({data!r}), or a batch drawn from it."
    if isinstance(data, type):
        return f"Pass {data.__name__}()."
    return "Draw one with task.sample(n, batch_size=..., generator=...), or pass the task itself."


def check_length(n: int) -> int:
    """Return ``n``; raise unless it is a problem length, an integer of at least 1."""
    fix = "Pass a problem length, e.g. n=8."
    return check_integer("n", n, least=1, far=MOST_TOKENS, fix=fix)


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
    if positions > MOST_TOKENS or steps > _MOST_STEPS:
        raise InputError(
            what,
            expected=f"examples of at most {MOST_TOKENS:,} positions together, which are "
            f"{_MOST_STEPS:,} times loops",
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
        fix = "Pass batch_size=64, or a tensor with one length per example as n."
        size = check_integer("batch_size", batch_size, least=1, far=MOST_TOKENS, fix=fix)
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


def uniform(shape: tuple, generator: torch.Generator) -> Tensor:
    """Numbers drawn uniformly from [0, 1), in float32 whatever the default type is."""
    return torch.rand(shape, generator=generator, device=generator.device, dtype=torch.float32)


def coins(
    probability: float | Tensor, shape: Sequence[int], generator: torch.Generator
) -> Bool[Tensor, "*shape"]:
    """Independent coins that are True with the given probability (broadcast to ``shape``)."""
    return uniform(tuple(shape), generator) < probability


def random_bits(
    distribution: str, batch_size: int, width: int, generator: torch.Generator
) -> Int[Tensor, "batch width"]:
    """Fair bits (``"uniform"``), or bits whose bias each row draws (``"biased"``)."""
    probability: float | Tensor = 0.5
    if distribution == "biased":
        probability = choice((0.05, 0.5, 0.95), (batch_size, 1), generator)
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
    well_typed = isinstance(tokens, torch.Tensor) and tokens.dtype == torch.int64
    if (
        not well_typed
        or tokens.ndim != 2
        or (tokens.numel() and not 0 <= int(tokens.min()) <= int(tokens.max()) < d_vocab)
    ):
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
    well_formed = isinstance(n, torch.Tensor) and n.dtype == torch.int64 and n.shape == (rows,)
    if not well_formed or (rows and not 1 <= int(n.min()) <= int(n.max()) <= width):
        raise InputError(
            "n",
            expected=f"int64 of shape [{rows}] with lengths in 1..{width}, the width of {what}",
            given=describe_tensor(n),
            fix="Pass how many digits of each row count, one number for each.",
        )
