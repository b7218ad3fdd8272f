"""The protocol of a task (sampler, exact oracle, T(n)), and its batches."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeGuard, runtime_checkable

import torch

from loopinterp.core.boundary import resolve_device
from loopinterp.core.errors import MOST_LOOPS, InputError, need
from loopinterp.core.text import ShortRepr

if TYPE_CHECKING:
    from jaxtyping import Float, Int
    from torch import Tensor

IGNORE = -100
"""Target at positions without loss and score (PyTorch's ``ignore_index``)."""


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
        _need(self.task is None or is_task(self.task), "task", "a task, or None", self.task)
        inputs = self.inputs
        tokens = _is_integer(inputs) and inputs.ndim == 2
        features = torch.is_tensor(inputs) and inputs.ndim == 3 and inputs.is_floating_point()
        expected = "integers [batch, pos], or floats [batch, pos, d_features]"
        _need(tokens or features, "inputs", expected, inputs)
        shapes = {"targets": inputs.shape[:2], "n": inputs.shape[:1], "n_loops": inputs.shape[:1]}
        for name, shape in shapes.items():
            part = getattr(self, name)
            fits = _is_integer(part) and part.shape == shape and part.device == inputs.device
            expected = f"integers of shape {list(shape)} on {inputs.device}, as the inputs"
            _need(fits, name, expected, part)
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
        "targets": (batch.targets[batch.targets != IGNORE], 0, d_vocab_out),
        "n": (batch.n, 1, None),
        "n_loops": (batch.n_loops, 0, MOST_LOOPS + 1),
    }
    for name, (values, least, end) in ranges.items():
        if values.is_floating_point():
            _need(values.isfinite().all(), name, "finite numbers", values)
        elif values.numel():
            low, high = (int(x) for x in values.aminmax())
            fits = low >= least and (end is None or high < end)
            expected = f"integers >= {least}" if end is None else f"integers in {least}..{end - 1}"
            but = f", or IGNORE ({IGNORE}) without a target" if name == "targets" else ""
            _need(fits, name, f"{expected}{but}", getattr(batch, name))


def _is_integer(part: object) -> bool:
    return isinstance(part, torch.Tensor) and not (
        part.is_floating_point() or part.is_complex() or part.dtype == torch.bool
    )


def _need(holds: object, name: str, expected: str, part: object) -> None:
    fix = "Draw the batch with task.sample or task.encode."
    need(holds, f"{name} of a batch", expected, part, fix)
