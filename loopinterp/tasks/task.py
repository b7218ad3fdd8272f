"""The protocol of a task (sampler, exact oracle, T(n)), its batches, and its examples in words."""

from __future__ import annotations

import hashlib
import importlib
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, TypeGuard, runtime_checkable

import torch
from pydantic import PositiveInt

from loopinterp.core.boundary import checked, resolve_device
from loopinterp.core.errors import MOST_LOOPS, InputError, need
from loopinterp.core.text import ShortRepr

if TYPE_CHECKING:
    from typing import Concatenate

    from jaxtyping import Float, Int
    from torch import Tensor


IGNORE = -100
"""Target at positions without loss and score (PyTorch's ``ignore_index``)."""

_FIX = "Draw the batch with task.sample or task.encode."


@dataclass(frozen=True, repr=False)
class Batch(ShortRepr):
    """Examples of possibly different lengths, padded on the right.

    Attributes:
        inputs: Tokens, or feature vectors for tasks with ``d_features``.
        targets: The right output at each position; ``IGNORE`` where there is none.
        n: Problem length of each example (bits, not positions).
        n_loops: T(n) of each example: the loop after which the answer is read.
        task: The task, if known; models of other tokens refuse the batch.
    """

    inputs: Int[Tensor, "batch pos"] | Float[Tensor, "batch pos d_features"]
    targets: Int[Tensor, "batch pos"]
    n: Int[Tensor, " batch"]
    n_loops: Int[Tensor, " batch"]
    task: Task | None = None

    def __post_init__(self) -> None:
        fits = self.task is None or is_task(self.task)
        need(fits, "task of a batch", "a task, or None", self.task, _FIX)
        inputs = self.inputs
        tokens = _is_integer(inputs) and inputs.ndim == 2
        features = torch.is_tensor(inputs) and inputs.ndim == 3 and inputs.is_floating_point()
        expected = "integers [batch, pos], or floats [batch, pos, d_features]"
        need(tokens or features, "inputs of a batch", expected, inputs, _FIX)
        shapes = {"targets": inputs.shape[:2], "n": inputs.shape[:1], "n_loops": inputs.shape[:1]}
        for name, shape in shapes.items():
            part = getattr(self, name)
            fits = _is_integer(part) and part.shape == shape and part.device == inputs.device
            expected = f"integers of shape {list(shape)} on {inputs.device}, as the inputs"
            need(fits, f"{name} of a batch", expected, part, _FIX)
        if inputs.device.type == "cpu":
            check_values(self)

    def __len__(self) -> int:
        return self.inputs.shape[0]

    def _shown(self) -> list[tuple[str, object]]:
        shown: list[tuple[str, object]] = [("examples", len(self))]
        for name, values in (("n", self.n), ("n_loops", self.n_loops)):
            if len(self):
                ends = sorted({int(values.min()), int(values.max())})
                shown.append((name, ends[0] if len(ends) == 1 else ends))
        return [*shown, ("inputs", self.inputs)]

    def to(self, device: torch.device | str) -> Batch:
        """The same examples on another device."""
        device = resolve_device(device)
        return replace(self, **{name: x.to(device) for name, x in self._tensors().items()})

    def __getitem__(self, index: Tensor | slice) -> Batch:
        return replace(self, **{name: x[index] for name, x in self._tensors().items()})

    def _tensors(self) -> dict[str, Tensor]:
        return {name: getattr(self, name) for name in ("inputs", "targets", "n", "n_loops")}


def inputs_of(inputs: Batch | Tensor) -> Tensor:
    return inputs.inputs if isinstance(inputs, Batch) else inputs


@runtime_checkable
class Task(Protocol):
    """The protocol of every task; either ``d_vocab`` (tokens) or ``d_features`` is set."""

    @property
    def name(self) -> str: ...

    @property
    def d_vocab(self) -> int | None: ...

    @property
    def d_features(self) -> int | None: ...

    @property
    def d_vocab_out(self) -> int: ...

    @property
    def distributions(self) -> tuple[str, ...]:
        """Names of the input distributions; the first is the default."""
        ...

    def n_loops(self, n: int) -> int:
        """T(n), the required number of loops for length ``n``."""
        ...

    def n_positions(self, n: int) -> int:
        """Sequence positions of an example of length ``n`` (BOS and ``=`` included)."""
        ...

    def sample(
        self,
        n: int | Int[Tensor, " batch"],
        *,
        batch_size: int | None = None,
        generator: torch.Generator,
        distribution: str | None = None,
    ) -> Batch:
        """Draw examples: ``batch_size`` of length ``n``, or one of each length."""
        ...

    def targets(self, inputs: Batch | Tensor) -> Int[Tensor, "batch pos"]:
        """The exact answer, ``IGNORE`` where there is none."""
        ...

    @property
    def encode(self) -> Callable[..., Batch]:
        """Makes a batch of given examples, or of one as text."""
        ...

    def decode(
        self, inputs: Batch | Tensor, answers: Int[Tensor, "batch pos"] | None = None
    ) -> list[str]:
        """Examples in words."""
        ...

    def show(
        self, batch: Batch, answers: Int[Tensor, "batch pos"] | None = None, *, most: int = 8
    ) -> None:
        """Print examples in words, with their right answers."""
        ...

    def describe(self) -> str:
        """What is computed, and in which format, in one line."""
        ...

    def config(self) -> Mapping[str, object]:
        """JSON-ready settings: ``get_task(task.name, **task.config())`` equals the task."""
        ...


def is_task(data: object) -> TypeGuard[Task]:
    """Whether an object has a sampler, an oracle and T(n)."""
    parts = ("sample", "targets", "n_loops", "n_positions")
    return not isinstance(data, type) and all(callable(getattr(data, p, None)) for p in parts)


def task_files(task: Task) -> dict[str, Path]:
    """Absolute paths of the files that a task reads, by setting."""
    paths = {name: getattr(task, name) for name in getattr(task, "data_files", ())}
    return {name: Path(path).absolute() for name, path in paths.items() if path is not None}


def digest_file(path: Path) -> str:
    """SHA-256 of a file, cached by its time and size."""
    try:
        stat = path.stat()
        return _digest(path, (stat.st_mtime_ns, stat.st_size, stat.st_ino))
    except (OSError, ValueError) as error:  # ValueError: a character that no file name can have
        expected, got = "a file that can be read", getattr(error, "strerror", None) or str(error)
        fix = "Put it back where it was, or give the path of another one to a new run."
        raise InputError(f"data file {path}", expected=expected, given=got, fix=fix) from error


@lru_cache(maxsize=16)
def _digest(path: Path, stamp: tuple[int, int, int]) -> str:
    with path.open("rb") as file:
        sha256 = hashlib.sha256()
        while block := file.read(2**20):
            sha256.update(block)
    return sha256.hexdigest()


def check_values(batch: Batch) -> None:
    """Raise on values out of range, or features that are not finite."""
    d_vocab, d_vocab_out = (getattr(batch.task, name, None) for name in ("d_vocab", "d_vocab_out"))
    ranges = {  # values, the least of them, and the first number beyond them
        "inputs": (batch.inputs, 0, d_vocab),
        "targets": (batch.targets.masked_fill(batch.targets == IGNORE, 0), 0, d_vocab_out),
        "n": (batch.n, 1, None),
        "n_loops": (batch.n_loops, 0, MOST_LOOPS + 1),
    }
    for name, (values, least, end) in ranges.items():
        what = f"{name} of a batch"
        if values.is_floating_point():
            need(values.isfinite().all(), what, "finite numbers", values, _FIX)
        elif values.numel():
            low, high = map(int, values.aminmax())
            fits = low >= least and (end is None or high < end)
            expected = f"integers >= {least}" if end is None else f"integers in {least}..{end - 1}"
            but = f", or IGNORE ({IGNORE}) without a target" if name == "targets" else ""
            need(fits, what, f"{expected}{but}", getattr(batch, name), _FIX)


def _is_integer(part: object) -> bool:
    return isinstance(part, torch.Tensor) and not (
        part.is_floating_point() or part.is_complex() or part.dtype == torch.bool
    )


P = ParamSpec("P")


def or_text(encode: Callable[Concatenate[Any, P], Batch]) -> Callable[..., Batch]:
    """A method ``encode``, checked, that also takes one example as text.

    Example:
        >>> from loopinterp.tasks import Addition
        >>> task = Addition()
        >>> task.decode(task.encode("13 + 9"))
        ['01101 + 01001 = 10110 mod 2^5']
    """
    of_values = checked(encode)

    @wraps(encode)
    def call(self: Any, *examples: Any, **options: Any) -> Batch:
        text = examples[0] if examples else None
        if not isinstance(text, str):
            return of_values(self, *examples, **options)
        if more := [*examples[1:], *options]:
            raise InputError(
                "encode",
                expected="the text alone, which says its length",
                given=f"{text!r}, and {more}",
                fix="Leave the rest out, or pass a list of examples.",
            )
        return InWords.encode(self, text)

    return call


class InWords:
    """Base of tasks that write examples in words; a subclass defines :meth:`say`."""

    @abstractmethod
    def targets(self, inputs: Any) -> Int[Tensor, "batch pos"]: ...

    @abstractmethod
    def n_positions(self, n: int) -> int: ...

    @checked
    def encode(self, text: str) -> Batch:
        """The batch of one example as text (:func:`~loopinterp.tasks.typed_example`)."""
        # By name, as it imports every task.
        registry = importlib.import_module("loopinterp.tasks.task_registry")
        return registry.typed_example(self, text)

    def say(self, row: Sequence[Any], answer: Sequence[int] | None) -> str:
        """One example in words: its inputs [pos], and an answer at each position, if any."""
        words = " ".join(map(str, row))
        return words if answer is None else f"{words} = {spell(answer, separator=' ')}"

    def decode(
        self, inputs: Batch | Tensor, answers: Int[Tensor, "batch pos"] | None = None
    ) -> list[str]:
        """Examples in words, numbers with the most significant digit first.

        A batch is shown with its right answers, or with others (``logits.argmax(-1)``).

        Example:
            >>> from loopinterp.tasks import TokenAddition
            >>> task = TokenAddition()
            >>> batch = task.encode([(11, 6)], n=4)
            >>> task.decode(batch), task.decode(batch.inputs)
            (['1011 + 0110 = 10001'], ['1011 + 0110 ='])
        """
        right = self.right_answers(inputs)  # refuses the inputs of another task
        rows = inputs_of(inputs).tolist()
        lengths: list[int | None] = [None] * len(rows)
        if isinstance(inputs, Batch):
            # A batch knows where each example ends; padded features do not show it.
            lengths = inputs.n.tolist()
            answers = inputs.targets if answers is None else answers
        if answers is None:
            return [self.say(self.unpadded(row, n), None) for row, n in zip(rows, lengths)]
        expected, got = f"shape {list(right.shape)}", f"{list(answers.shape)}"
        need(answers.shape == right.shape, "answers", expected, got, "Pass e.g. logits.argmax(-1).")
        return [
            self.say(self.unpadded(row, n), self.unpadded(answer, n))
            for row, answer, n in zip(rows, answers.tolist(), lengths)
        ]

    def right_answers(self, inputs: Batch | Tensor) -> Int[Tensor, "batch pos"]:
        """The exact answer to inputs of :meth:`decode`."""
        return self.targets(inputs_of(inputs))

    def unpadded(self, row: Sequence[Any], n: int | None) -> Sequence[Any]:
        """An example of length n without padding."""
        return row if n is None else row[: self.n_positions(n)]

    @checked
    def show(
        self,
        batch: Batch,
        answers: Int[Tensor, "batch pos"] | None = None,
        *,
        most: PositiveInt = 8,
    ) -> None:
        """Print ``most`` examples with their right answers, and wrong ones of ``answers``.

        Example:
            >>> from loopinterp.tasks import TokenAddition
            >>> batch = TokenAddition().encode([(11, 6), (1, 2)], n=4)
            >>> answers = batch.targets.clone()
            >>> answers[1, -3] = 0
            >>> TokenAddition().show(batch, answers)
            1011 + 0110 = 10001
            0001 + 0010 = 00011, answered 00001
        """
        shown = batch[:most]
        lines = self.decode(shown)
        if answers is not None:
            answers = answers[:most]
            right = ((answers == shown.targets) | (shown.targets == IGNORE)).all(1).tolist()
            for k, other in enumerate(self.decode(shown, answers)):
                if not right[k]:
                    lines[k] += f", answered {other.rpartition('= ')[2].partition(' mod ')[0]}"
        if len(batch) > len(shown):
            lines.append(f"… and {len(batch) - len(shown)} more")
        print("\n".join(lines))  # noqa: T201


def spell(
    values: Sequence[float],
    words: Sequence[str] | None = None,
    *,
    separator: str = "",
    turned: bool = False,
) -> str:
    """Values as words, ``?`` where there is none, in reverse if ``turned``."""
    numbers = [int(value) for value in (reversed(values) if turned else values)]
    if words is None:
        return separator.join(str(x) if x >= 0 else "?" for x in numbers)
    return separator.join(words[x] if 0 <= x < len(words) else "?" for x in numbers)


def spell_grid(cells: Sequence[str], side: int) -> str:
    """Cells row by row, with a slash between rows."""
    return "/".join("".join(cells[k : k + side]) for k in range(0, len(cells), side))


def until(values: Sequence[int], end: int) -> Sequence[int]:
    """The values before the first ``end``, if any."""
    return values[: values.index(end)] if end in values else values
