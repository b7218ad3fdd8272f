"""Drawing batches: the base of tasks, data of studies, checks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from html import escape
from typing import TYPE_CHECKING, Any

import torch
from pydantic import NonNegativeInt, PositiveInt

from loopinterp.core.boundary import checked
from loopinterp.core.errors import InputError, check_choice, check_integer, describe_tensor, need
from loopinterp.core.settings import Seed, Settings
from loopinterp.tasks.task import (
    IGNORE,
    Batch,
    InWords,
    check_values,
    inputs_of,
    is_task,
)

if TYPE_CHECKING:
    from jaxtyping import Bool, Int
    from torch import Tensor

    from loopinterp.tasks.task import Task

MOST_TOKENS = 2**27
"""Most positions drawn at once (1 GiB)."""


class Sampler(Settings, InWords, ABC):
    """Base of the tasks here: declared settings and checked lengths.

    A subclass defines ``_draw``, ``_n_positions`` and, unless T(n) is n + 1, ``_n_loops``.

    Attributes:
        name: The name in :func:`get_task`.
        goal: What a model of the task learns to do, as in "learnt to add binary numbers".
        about: One line, with the task's settings as ``{self.box}``.
        distributions: The first one is the default.
    """

    name: str
    goal: str
    about: str
    distributions: tuple[str, ...]

    @property
    def d_features(self) -> int | None:
        return None

    @checked
    def n_loops(self, n: PositiveInt) -> int:
        """T(n), the required number of loops for length ``n``."""
        return self._n_loops(n)

    @checked
    def n_positions(self, n: PositiveInt) -> int:
        """Positions of an example of length ``n``."""
        return self._n_positions(n)

    def _n_loops(self, n: int) -> int:
        return n + 1

    @abstractmethod
    def _n_positions(self, n: int) -> int: ...

    def config(self) -> dict[str, object]:
        """The task's settings: ``get_task(task.name, **task.config())`` is the task."""
        return self.to_dict()

    def longest(self, n: int) -> int:
        """The greatest length up to n that can be drawn, else the shortest of all."""
        return n

    def describe(self) -> str:
        """One line: what is computed, and in which format."""
        return self.about.format(self=self)

    def _repr_html_(self) -> str:
        return f"<p>{escape(self.describe())}</p>{super()._repr_html_()}"

    @abstractmethod
    def _draw(self, kind: str, n: Tensor, generator: torch.Generator) -> Batch:
        """Examples of the given lengths [batch], of one distribution."""

    @checked
    def sample(
        self,
        n: int | Int[Tensor, " batch"],
        *,
        batch_size: int | None = None,
        generator: torch.Generator | None = None,
        seed: Seed = 0,
        distribution: str | None = None,
    ) -> Batch:
        """Draw examples on the generator's device; see :meth:`Task.sample`.

        ``seed`` makes a generator on the CPU if none is given.
        """
        kind = pick_distribution(self, distribution)
        if generator is None:
            generator = torch.Generator().manual_seed(seed)
        return self._draw(kind, lengths(n, batch_size=batch_size, generator=generator), generator)


@checked
def as_batch(
    data: object,
    *,
    n: PositiveInt | None = None,
    batch_size: PositiveInt | None = None,
    examples: PositiveInt = 64,
    seed: Seed = 0,
    device: torch.device | str = "cpu",
) -> Batch:
    """The batch given to a study, or one drawn from a task.

    Args:
        data: A batch, returned unchanged, or a task.
        n: Problem length of the drawn examples; 8 by default.
        batch_size: Number of drawn examples; ``examples`` by default.
        examples: A study's default for ``batch_size``.

    Example:
        >>> from loopinterp.tasks import Addition
        >>> as_batch(Addition(), n=5, batch_size=2)
        Batch(examples=2, n=5, n_loops=6, inputs=int64[2, 6])
    """
    if is_task(data):
        size, length = batch_size or examples, n or 8
        check_size(data, length, size, "n, batch_size")
        generator = torch.Generator().manual_seed(seed)
        batch = data.sample(length, batch_size=size, generator=generator)
        return replace(batch, task=data).to(device)  # a task of a user's own may leave it out
    if not isinstance(data, Batch):
        raise _no_task("data", "a Batch, or a task to draw one from", data)
    for name, value in (("n", n), ("batch_size", batch_size)):
        expected, fix = f"no {name} beside a batch", "Leave it out, or pass the task instead."
        need(value is None, name, expected, repr(value), fix)
    check_values(data)
    if data.inputs.numel() == 0:
        raise _no_task("data", "at least one example and position", data.inputs)
    return data


def as_batches(data: object, *, n: int | Sequence[int] | None = None, **drawn: Any) -> list[Batch]:
    """Several batches by :func:`as_batch`; of a task, one of each length in ``n``."""
    several = data if isinstance(data, (list, tuple)) else [data]
    each: Any = n if isinstance(n, (list, tuple, range)) else [n]
    expected, fix = "batches or tasks, and of tasks lengths n", "Pass at least one of each."
    need(several and each, "data", expected, "an empty list", fix)
    return [as_batch(one, n=length, **drawn) for one in several for length in each]


@checked
def as_prompts(tokens: Int[Tensor, "batch pos"], *, n_loops: NonNegativeInt) -> Batch:
    """Prompts of a language model as a batch: the target of each token is the next one.

    Example:
        >>> as_prompts(torch.tensor([[5, 3, 8]]), n_loops=4).targets
        tensor([[   3,    8, -100]])
    """
    numbers = isinstance(tokens, torch.Tensor) and tokens.dtype in (torch.int32, torch.int64)
    fits = numbers and tokens.dim() == 2 and tokens.shape[1] > 1
    fix = "Pass tokenizer(texts, return_tensors='pt')['input_ids']."
    need(fits, "tokens", "integers [batch, pos], of two positions or more", tokens, fix)
    targets = tokens.long().roll(-1, dims=1)  # nothing follows the last position
    targets[:, -1] = IGNORE
    each = torch.ones(len(tokens), dtype=torch.int64, device=tokens.device)
    return Batch(tokens, targets, each * tokens.shape[1], each * n_loops)


def need_asked(batch: Batch) -> None:
    missing = (batch.targets == IGNORE).all(dim=1).nonzero().flatten().tolist()
    got = f"none in examples {missing[:8]}" if missing else "no examples"
    fix = "Leave those examples out, or sample the batch from a task."
    need(len(batch) and not missing, "batch", "a target in each example", got, fix)


def need_task(task: object) -> None:
    if not is_task(task):
        raise _no_task("task", "a task", task)


def _no_task(what: str, expected: str, data: object) -> InputError:
    got = f"a {describe_tensor(data)}"
    fix = "Draw one with task.sample(n, batch_size=..., generator=...), or pass the task itself."
    if isinstance(data, str):
        got, fix = repr(data), f"Pass get_task({data!r}), or a batch drawn from it."
    elif isinstance(data, type):
        got, fix = f"the class {data.__name__} itself", f"Pass {data.__name__}()."
    return InputError(what, expected=expected, given=got, fix=fix)


def check_length(n: int) -> int:
    fix = "Pass a problem length, e.g. n=8."
    return check_integer("n", n, least=1, far=MOST_TOKENS, fix=fix)


def longest_length(task: Task, n: int) -> int:
    """:meth:`Sampler.longest`, for any task."""
    longest = getattr(task, "longest", None)  # a user's own task without it can draw all lengths
    return n if longest is None else longest(n)


def check_size(task: Task, n: int, n_examples: int, what: str) -> None:
    """Raise unless this many examples can be drawn at once, and run to T(n)."""
    positions, most_steps = n_examples * task.n_positions(n), 10**11
    steps = positions * max(task.n_loops(n), 1)
    fits = positions <= MOST_TOKENS and steps <= most_steps
    expected = f"at most {MOST_TOKENS:,} positions together, and {most_steps:,} times loops"
    got = f"{n_examples:,} of length {n:,}: {positions:,} positions, {steps:,} times loops"
    need(fits, what, expected, got, "Take shorter ones, or fewer.")


def lengths(
    n: int | Int[Tensor, " batch"], *, batch_size: int | None, generator: torch.Generator
) -> Int[Tensor, " batch"]:
    """Each example's length, from the arguments of :meth:`Task.sample`."""
    fits, fix = isinstance(generator, torch.Generator), "Pass torch.Generator().manual_seed(0)."
    need(fits, "generator", "a torch.Generator", generator, fix)
    device = generator.device
    if not isinstance(n, torch.Tensor):
        fix = "Pass batch_size=64, or a tensor with one length per example as n."
        size = check_integer("batch_size", batch_size, least=1, far=MOST_TOKENS, fix=fix)
        return torch.full((size,), check_length(n), device=device)
    well_typed = n.dtype == torch.int64 and n.ndim == 1 and n.numel() and n.device == device
    expected = f"an int64 tensor [batch] of lengths >= 1 on {device}, as the generator"
    need(well_typed and n.min() >= 1, "n", expected, n, "Pass e.g. torch.randint(1, 9, (64,)).")
    expected, fix = f"{len(n)}, the number of lengths in n", "Leave batch_size out."
    need(batch_size in (None, len(n)), "batch_size", expected, repr(batch_size), fix)
    return n


def pick_distribution(task: Task | Sampler, distribution: str | None) -> str:
    """The named distribution, or the task's first one."""
    if distribution is None:
        return task.distributions[0]
    return check_choice(f"distribution of task {task.name}", distribution, task.distributions)


def inside(n: Int[Tensor, "*batch"], width: int) -> Bool[Tensor, "*batch width"]:
    """True at the first ``n`` of ``width`` columns."""
    return torch.arange(width, device=n.device) < n[..., None]


def uniform(shape: tuple, generator: torch.Generator) -> Tensor:
    """Uniform numbers from [0, 1), always float32."""
    return torch.rand(shape, generator=generator, device=generator.device, dtype=torch.float32)


def coins(probability: float | Tensor, shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """Independent booleans, True with the given probability (broadcast to ``shape``)."""
    return uniform(tuple(shape), generator) < probability


def random_bits(
    distribution: str, batch_size: int, width: int, generator: torch.Generator
) -> Int[Tensor, "batch width"]:
    """Fair bits (``"uniform"``), or bits with a random bias per row (``"biased"``)."""
    probability: float | Tensor = 0.5
    if distribution == "biased":
        probability = choice((0.05, 0.5, 0.95), (batch_size, 1), generator)
    return coins(probability, (batch_size, width), generator).long()


def integers(low: int, high: int, shape: Sequence[int], generator: torch.Generator) -> Tensor:
    return torch.randint(low, high, tuple(shape), generator=generator, device=generator.device)


def choice(values: Sequence[float], shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """Values drawn uniformly from a list."""
    index = integers(0, len(values), shape, generator)
    return torch.tensor(values, device=generator.device)[index]


def check_tokens(inputs: Batch | Tensor, d_vocab: int, what: str = "inputs") -> Tensor:
    """The inputs, if they are int64 tokens [batch, pos] in ``0 .. d_vocab - 1``."""
    tokens = inputs_of(inputs)
    well_typed = isinstance(tokens, torch.Tensor) and tokens.dtype == torch.int64
    fits = well_typed and tokens.ndim == 2 and ((tokens >= 0) & (tokens < d_vocab)).all()
    expected = f"tokens in 0..{d_vocab - 1}, as int64 tokens of shape [batch, pos]"
    fix = "Pass the tokens of a batch of this task and format, tokens[None] for one example."
    need(fits, what, expected, tokens, fix)
    return tokens


def check_digits(digits: Tensor, n: Tensor, base: int, what: str) -> None:
    """Raise unless the first ``n`` [batch] of each row are digits."""
    rows, width = check_tokens(digits, base, what).shape
    well_typed = isinstance(n, torch.Tensor) and n.dtype == torch.int64 and n.shape == (rows,)
    expected = f"int64 of shape [{rows}] with lengths in 1..{width}, the width of {what}"
    fix = "Pass how many digits of each row count, one number for each."
    need(well_typed and ((n >= 1) & (n <= width)).all(), "n", expected, n, fix)
