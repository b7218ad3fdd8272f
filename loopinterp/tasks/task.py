"""What a task is: a token format, a seeded sampler, an exact oracle, and T(n)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from loopinterp.short_repr import ShortRepr

if TYPE_CHECKING:
    import torch
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
        task: What was asked, where that is known: a model of other tokens is refused by it.

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
        from loopinterp.tasks.batch_checks import check_shapes, check_values

        check_shapes(self)
        if self.inputs.device.type == "cpu":
            check_values(self, ignore=IGNORE)

    def __len__(self) -> int:
        return self.inputs.shape[0]

    def _shown(self) -> list[tuple[str, object]]:
        ends = {"n": self.n, "n_loops": self.n_loops}
        spans = {k: sorted({int(x.min()), int(x.max())}) for k, x in ends.items() if len(self)}
        said = [(k, span[0] if len(span) == 1 else span) for k, span in spans.items()]
        return [("examples", len(self)), *said, ("inputs", self.inputs)]

    def to(self, device: torch.device | str) -> Batch:
        return replace(self, **{name: x.to(device) for name, x in self._tensors().items()})

    def __getitem__(self, index: Tensor | slice) -> Batch:
        return replace(self, **{name: x[index] for name, x in self._tensors().items()})

    def _tensors(self) -> dict[str, Tensor]:
        return {name: getattr(self, name) for name in ("inputs", "targets", "n", "n_loops")}


def inputs_of(inputs: Batch | Tensor) -> Tensor:
    """The inputs of a batch, or what was given in its place."""
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
        """Examples in words; :class:`~loopinterp.tasks.InWords` says what a task need not."""
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
