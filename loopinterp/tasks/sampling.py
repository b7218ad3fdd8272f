"""Drawing batches: rows of tokens, integers as rows of digits, the base of tasks, checks.

Tokens and digits are integers [batch, width]; lengths and places are integers [batch].
"""

from __future__ import annotations

import reprlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import replace
from html import escape
from typing import TYPE_CHECKING, Any

import torch
from pydantic import NonNegativeInt, PositiveInt
from torch.nn.functional import pad

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


def join(parts: Sequence[tuple[Tensor, Tensor]], *, width: int, fill: int) -> Tensor:
    """Concatenate the parts (values, counts) of each row."""
    values = torch.cat([part for part, _ in parts], dim=1)
    keep = torch.cat([inside(length, part.shape[1]) for part, length in parts], dim=1)
    return pack(values, keep, width=width, fill=fill)


def pack(values: Tensor, keep: Tensor, *, width: int, fill: int) -> Tensor:
    """The kept values of each row without gaps; ``fill`` up to the width."""
    # Other values go to one more column, which is dropped.
    at = torch.where(keep, keep.cumsum(dim=1) - 1, width)
    out = values.new_full((len(values), width + 1), fill)
    return out.scatter_(1, at, values)[:, :width]


def put(rows: Tensor, values: Tensor, start: Tensor, length: Tensor) -> Tensor:
    """The rows with ``length`` values written over them from ``start`` on."""
    width = rows.shape[1]
    at = start[:, None] + torch.arange(values.shape[1], device=rows.device)  # [batch, longest]
    # Values that do not count, or are beyond the row's end, go to one more column: dropped.
    at = torch.where(inside(length, values.shape[1]) & (at < width), at, width)
    return pad(rows, (0, 1)).scatter_(1, at, values)[:, :width]


def cut(rows: Tensor, start: Tensor, length: Tensor) -> Tensor:
    """``length`` columns of each row from ``start`` on, then zeros."""
    column = torch.arange(int(length.max()), device=rows.device)
    # [batch, longest]
    values = rows.gather(1, (start[:, None] + column).clamp(max=rows.shape[1] - 1))
    return values.masked_fill(~inside(length, len(column)), 0)


def places(marks: Tensor, most: int) -> Tensor:
    """Columns of each row's first ``most`` marks [batch, most]; 0 for missing ones."""
    column = torch.arange(marks.shape[1], device=marks.device)
    at = torch.where(marks, marks.cumsum(dim=1) - 1, most).clamp(max=most)
    # Marks beyond the first ``most`` go to one more column, which is dropped.
    columns = column.new_zeros((len(marks), most + 1))
    return columns.scatter_(1, at, column.expand_as(at))[:, :most]


def split(rows: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
    """The parts of each row [batch, part, longest], padded with zeros, and their lengths.

    ``ends`` [batch, part] is the column after each part; 0 for no part.
    """
    # [batch, part]: each part starts one column after the end of the part before
    start = torch.cat([torch.zeros_like(ends[:, :1]), ends[:, :-1] + 1], dim=1)
    length = (ends - start).clamp(min=0)
    longest = max(int(length.max()), 1)
    # Columns of each part, [batch, part, longest]
    at = (start[..., None] + torch.arange(longest, device=rows.device)).clamp(max=rows.shape[1] - 1)
    values = rows.gather(1, at.flatten(1)).view_as(at)
    return values.masked_fill(~inside(length, longest), 0), length


def same(symbol: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """A part of one symbol, for every row."""
    return torch.full_like(like, symbol)[:, None], torch.ones_like(like)


def read_strings(words: Sequence[str], alphabet: str) -> tuple[Tensor, Tensor]:
    """Symbols of each string, by their place in the alphabet, and the strings' lengths."""
    listed = bool(words) and not isinstance(words, str)
    fits = listed and all(word and {*word} <= {*alphabet} for word in words)
    expected = f"a list of strings of one or more symbols of {alphabet!r}"
    need(fits, "words", expected, repr(words), f"Pass e.g. [{alphabet!r}].")
    longest = max(map(len, words))
    padded = [word.ljust(longest, alphabet[0]) for word in words]
    symbols = torch.tensor([[alphabet.index(x) for x in word] for word in padded])
    return symbols, torch.tensor([len(word) for word in words])


def operand_digits(operands: Iterable[Any], *n: int) -> tuple[Tensor, ...]:
    """The ``n`` bits of the first operands, of the second, and so on."""
    columns = zip(*check_operands(operands, len(n)))
    return tuple(to_digits(column, k, base=2) for column, k in zip(columns, n))


def check_operands(operands: Iterable[Any], n: int) -> list[tuple[Any, ...]]:
    """The operands as tuples of ``n``, checked."""
    try:
        rows = [tuple(example) for example in operands]
    except TypeError:  # not a sequence, or not of sequences
        rows = []
    fits, fix = rows and {*map(len, rows)} == {n}, f"Pass e.g. [{tuple(range(3, 3 + 2 * n, 2))}]."
    need(fits, "operands", f"examples of {n} integers", reprlib.repr(operands), fix)
    return rows


def to_digits(numbers: Sequence[int], n: int, base: int) -> Tensor:
    """The ``n`` digits of each number, if they fit."""
    most = base ** check_length(n) - 1
    fix = f"It must fit in {n} digits to base {base}: pass a larger n, or a smaller number."
    values = [check_integer("operand", x, least=0, most=most, fix=fix) for x in numbers]
    return torch.tensor([[x // base**k % base for k in range(n)] for x in values])


def carry_over(columns: Tensor, base: int) -> Tensor:
    """Digits of numbers given as column sums, without the last carry."""
    carry = torch.zeros_like(columns[:, 0])  # [batch]
    digits = []
    for column in columns.unbind(dim=1):
        total = column + carry
        digits.append(total % base)
        carry = total // base
    return torch.stack(digits, dim=1)


def product_digits(a: Tensor, b: Tensor, base: int) -> Tensor:
    """Digits of products, as many as both factors have."""
    # Long multiplication: [batch, width] sums of columns, carried over at the end.
    columns = b.new_zeros((len(b), a.shape[1] + b.shape[1]))
    for i in range(a.shape[1]):
        columns[:, i : i + b.shape[1]] += a[:, i : i + 1] * b
    return carry_over(columns, base)


def n_significant(digits: Tensor) -> Tensor:
    """Digits of each number without leading zeros; 0 has none."""
    column = torch.arange(1, digits.shape[1] + 1, device=digits.device)
    return ((digits > 0) * column).amax(dim=1)  # place of the last digit that is not 0


def lead(digits: Tensor, n_digits: Tensor, first: Tensor) -> Tensor:
    """Numbers [..., width] with another leading digit, if they have several."""
    at = (n_digits - 1)[..., None]  # the place of the leading digit
    fresh = torch.where(at > 0, first[..., None], digits.gather(-1, at))
    return digits.scatter(-1, at, fresh)


def place_of_equals(equals: int, tokens: Tensor, task: str) -> Tensor:
    """Each row's position of its one ``=`` (token ``equals``)."""
    marks = tokens == equals
    need_form((marks.sum(dim=1) == 1).all(), task, f"one '=' (token {equals})")
    return marks.long().argmax(dim=1)


def operands_of(
    prompt: Tensor, n: Tensor, *, operator: int, base: int, task: str, n_operands: int = 2
) -> tuple[Tensor, Tensor]:
    """Digits [batch, operand, longest] and lengths [batch, operand] of each prompt's operands."""
    marks = (prompt == operator) & inside(n, prompt.shape[1])
    expected = f"{n_operands} operands, operators (token {operator}) between them"
    need_form((marks.sum(dim=1) == n_operands - 1).all(), task, expected)
    ends = torch.cat([places(marks, n_operands - 1), n[:, None]], dim=1)
    digits, n_digits = split(prompt, ends)
    expected = "a digit on both sides of each operator, and then the '='"
    need_form((n_digits > 0).all(), task, expected)
    need_form((digits < base).all(), task, f"operands of digits 0..{base - 1} alone")
    return digits, n_digits


def need_form(holds: object, task: str, expected: str, got: str = "a row without") -> None:
    fix = "Pass inputs as a batch of this task has them."
    need(holds, "inputs", f"{expected} ({task})", got, fix)


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
    fits = well_typed and tokens.ndim == 2
    if fits and tokens.numel():
        low, high = map(int, tokens.aminmax())
        fits = low >= 0 and high < d_vocab
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
