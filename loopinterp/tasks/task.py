"""What a task is (token format, sampler, exact oracle, T(n)), and the batches that it draws."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeGuard, runtime_checkable

import torch

from loopinterp.core.errors import MOST_LOOPS, InputError
from loopinterp.core.text import ShortRepr

if TYPE_CHECKING:
    from jaxtyping import Float, Int
    from torch import Tensor

IGNORE = -100
"""Target value at positions that carry no loss and no score (PyTorch's ``ignore_index``)."""


@dataclass(frozen=True, repr=False)
class Batch(ShortRepr):
    """Examples of possibly different lengths, padded on the right.

    Attributes:
        inputs: Tokens, or feature vectors for tasks with ``d_features``.
        targets: The right output at each position; ``IGNORE`` where nothing is asked.
        n: Problem length of each example (bits, not positions).
        n_loops: T(n) of each example: the loop after which the answer is asked for.
        task: The task, where that is known: a model of other tokens is refused by it.

    Raises:
        InputError: parts of other shapes or types, on several devices, or out of their ranges.
            Values on a GPU are looked at by the studies, so that no training step waits for them.
    """

    inputs: Int[Tensor, "batch pos"] | Float[Tensor, "batch pos d_features"]
    targets: Int[Tensor, "batch pos"]
    n: Int[Tensor, " batch"]
    n_loops: Int[Tensor, " batch"]
    task: Task | None = None

    def __post_init__(self) -> None:
        _check_shapes(self)
        if self.inputs.device.type == "cpu":
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
        return replace(self, **{name: x.to(device) for name, x in self._tensors().items()})

    def __getitem__(self, index: Tensor | slice) -> Batch:
        return replace(self, **{name: x[index] for name, x in self._tensors().items()})

    def _tensors(self) -> dict[str, Tensor]:
        return {name: getattr(self, name) for name in ("inputs", "targets", "n", "n_loops")}


def inputs_of(inputs: Batch | Tensor) -> Tensor:
    """The inputs of a batch; anything else as it is."""
    return inputs.inputs if isinstance(inputs, Batch) else inputs


@runtime_checkable
class Task(Protocol):
    """The protocol every task meets. Tasks are frozen dataclasses; they hold no tensors.

    Exactly one of ``d_vocab`` (token input) and ``d_features`` (feature input) is set.
    """

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
        """Names of the input distributions the sampler knows; the first is the default."""
        ...

    def n_loops(self, n: int) -> int:
        """T(n): loops after which an example of length ``n`` must be answered."""
        ...

    def n_positions(self, n: int) -> int:
        """Sequence positions that an example of length ``n`` takes (BOS and ``=`` included)."""
        ...

    def sample(
        self,
        n: int | Int[Tensor, " batch"],
        *,
        batch_size: int | None = None,
        generator: torch.Generator,
        distribution: str | None = None,
    ) -> Batch:
        """Draw examples: all of length ``n`` (``batch_size`` is needed), or one length each."""
        ...

    def targets(self, inputs: Batch | Tensor) -> Int[Tensor, "batch pos"]:
        """The exact answer to given inputs, ``IGNORE`` where nothing is asked."""
        ...

    def decode(
        self, inputs: Batch | Tensor, answers: Int[Tensor, "batch pos"] | None = None
    ) -> list[str]:
        """Examples in words; :class:`~loopinterp.tasks.InWords` provides it."""
        ...

    def show(
        self, batch: Batch, answers: Int[Tensor, "batch pos"] | None = None, *, most: int = 8
    ) -> None:
        """Print examples in words, with their right answers."""
        ...

    def describe(self) -> str:
        """One line for people: what is computed, and in which format."""
        ...

    def config(self) -> Mapping[str, object]:
        """JSON-ready settings, so that ``get_task(task.name, **task.config())`` equals the task."""
        ...


def is_task(data: object) -> TypeGuard[Task]:
    """Whether an object has a sampler, an oracle and T(n); words are optional."""
    parts = ("sample", "targets", "n_loops", "n_positions")
    return not isinstance(data, type) and all(callable(getattr(data, p, None)) for p in parts)


def task_files(task: Task) -> dict[str, Path]:
    """The files that a task draws from, by the setting that names each; absolute paths.

    A task that has such settings names them in its attribute ``data_files``.

    Example:
        >>> from loopinterp.tasks import get_task
        >>> task_files(get_task("addition"))
        {}
        >>> task_files(get_task("chess_puzzles", csv="/puzzles.csv"))["csv"].name
        'puzzles.csv'
    """
    paths = {name: getattr(task, name) for name in getattr(task, "data_files", ())}
    return {name: Path(path).absolute() for name, path in paths.items() if path is not None}


def digest_file(path: Path) -> str:
    """SHA-256 of a file, read again where its time or size has changed.

    Raises:
        InputError: If it cannot be read.
    """
    try:
        stat = path.stat()
        return _digest(path, (stat.st_mtime_ns, stat.st_size, stat.st_ino))
    except (OSError, ValueError) as error:  # ValueError: a character that no file name can have
        raise InputError(
            f"data file {path}",
            expected="a file of the task's that can be read",
            given=getattr(error, "strerror", None) or str(error),
            fix="Put it back where it was, or give the path of another one to a new run.",
        ) from error


@lru_cache(maxsize=16)
def _digest(path: Path, stamp: tuple[int, int, int]) -> str:
    with path.open("rb") as file:
        sha256 = hashlib.sha256()
        while block := file.read(2**20):
            sha256.update(block)
    return sha256.hexdigest()


def _check_shapes(batch: Batch) -> None:
    """Raise unless the parts are tensors of one batch, on one device."""
    if batch.task is not None and not is_task(batch.task):
        raise _refused("task", "a task, or None", batch.task)
    inputs = batch.inputs
    tokens = _is_integer(inputs) and inputs.ndim == 2
    features = isinstance(inputs, torch.Tensor) and inputs.ndim == 3 and inputs.is_floating_point()
    if not (tokens or features):
        expected = "integers [batch, pos], or floats [batch, pos, d_features]"
        raise _refused("inputs", expected, inputs)
    n_examples, n_pos = inputs.shape[:2]
    shapes = {"targets": (n_examples, n_pos), "n": (n_examples,), "n_loops": (n_examples,)}
    for name, shape in shapes.items():
        part = getattr(batch, name)
        if not _is_integer(part) or part.shape != shape:
            raise _refused(name, f"integers of shape {list(shape)}, as the inputs have it", part)
        if part.device != inputs.device:
            raise InputError(
                f"{name} of a batch",
                expected=f"a tensor on {inputs.device}, where the inputs are",
                given=f"one on {part.device}",
                fix="Move the whole batch: batch.to(device).",
            )


def check_values(batch: Batch) -> None:
    """Raise unless tokens, targets, lengths and loops are in their ranges.

    Raises:
        InputError: features that are not finite, a token or target below 0 (but ``IGNORE``) or
            beyond those of the batch's task, a length below 1, or loops that no run makes.
    """
    if not len(batch):
        return
    inputs, targets = batch.inputs, batch.targets
    d_vocab, d_vocab_out = (getattr(batch.task, name, None) for name in ("d_vocab", "d_vocab_out"))
    if inputs.is_floating_point():
        if not bool(inputs.isfinite().all()):
            raise _refused("inputs", "finite numbers", inputs)
    elif not _inside(inputs, 0, d_vocab):
        raise _refused("inputs", f"tokens{_range(d_vocab)}", inputs)
    if not _inside(targets[targets != IGNORE], 0, d_vocab_out):
        expected = f"classes{_range(d_vocab_out)}, or IGNORE ({IGNORE}) where nothing is asked"
        raise _refused("targets", expected, targets)
    if not _inside(batch.n, 1, None):
        raise _refused("n", "lengths of at least 1", batch.n)
    if not _inside(batch.n_loops, 0, MOST_LOOPS + 1):
        raise _refused("n_loops", f"numbers of loops in 0..{MOST_LOOPS}", batch.n_loops)


def _is_integer(part: object) -> bool:
    return isinstance(part, torch.Tensor) and not (
        part.is_floating_point() or part.is_complex() or part.dtype == torch.bool
    )


def _inside(values: Tensor, least: int, end: int | None) -> bool:
    """Whether all are in ``least .. end - 1``."""
    if values.numel() == 0:
        return True
    low, high = (int(x) for x in values.aminmax())
    return least <= low and (end is None or high < end)


def _range(end: int | None) -> str:
    return " of 0 or more" if end is None else f" in 0..{end - 1}"


def _refused(name: str, expected: str, part: object) -> InputError:
    return InputError(
        f"{name} of a batch",
        expected=expected,
        given=describe_tensor(part),
        fix="Draw the batch with task.sample or task.encode, or give its parts these shapes and "
        "values.",
    )


def describe_tensor(values: object) -> str:
    """Dtype, shape and range of a tensor, in words; the type of anything else."""
    if not isinstance(values, torch.Tensor):
        return type(values).__name__
    ends = f" from {values.min().item()} to {values.max().item()}" if values.numel() else ""
    return f"{values.dtype} of shape {list(values.shape)}{ends}"
