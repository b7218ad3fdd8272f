"""Which examples are worth a look, and why."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from loopinterp.rasp.trace import kept_from

if TYPE_CHECKING:
    from jaxtyping import Bool, Int
    from torch import Tensor


@dataclass(frozen=True)
class Chosen:
    """An example, and why it was chosen.

    Attributes:
        row: Its row in the batch.
        reason: In a few words.
        detail: In a sentence.
    """

    row: int
    reason: str
    detail: str


def choose(
    right: Bool[Tensor, "loop batch pos"],
    asked: Bool[Tensor, "batch pos"],
    settled: Mapping[str, Int[Tensor, " batch"]],
    most: int,
    generator: torch.Generator,
) -> list[Chosen]:
    """Examples by what is interesting in them, each once; random ones where nothing is.

    Wrong after having been right, wrong at the end, right last, the longest chain of a program,
    in turn; what is left is drawn at random.

    Args:
        right: Whether each answer is right after 0, 1, … loops; true where nothing is asked.
        asked: Where something is.
        settled: After how many loops each program has the whole answer for good.
        most: Examples to choose.
        generator: Draws the rest.

    Example:
        >>> asked = torch.ones(3, 1, dtype=torch.bool)
        >>> right = torch.tensor([[0, 0, 0], [1, 1, 0], [1, 0, 1]]).bool()[..., None]
        >>> for one in choose(right, asked, {}, 3, torch.Generator().manual_seed(0)):
        ...     print(one.row, one.detail)
        1 Wrong after being right: all of its answers are right after loop 1, 1 is wrong at the end.
        2 Right last: all of its answers are right from loop 2 on, later than in the other examples.
        0 Drawn at random.
    """
    kinds = [_relapsed(right, asked), _wrong(right, asked), _late(right), _chains(settled)]
    chosen: dict[int, Chosen] = {}
    telling = max(3 * most // 4, 1)  # what is ordinary belongs to the picture
    while kinds and len(chosen) < telling:
        kind = kinds.pop(0)
        if fresh := next((one for one in kind if one.row not in chosen), None):
            chosen[fresh.row] = fresh
            kinds.append(kind)
    for row in torch.randperm(len(asked), generator=generator).tolist():
        if len(chosen) < most and row not in chosen:
            chosen[row] = Chosen(row, "drawn at random", "Drawn at random.")
    return list(chosen.values())


def _wrong(right: Tensor, asked: Tensor) -> Iterator[Chosen]:
    """What ends wrong, fewest wrong answers first: those that are nearly right tell most."""
    wrong = (~right[-1]).sum(-1)
    for row in wrong.argsort(stable=True).tolist():
        if n := int(wrong[row]):
            detail = f"Wrong at the end: {n} of {int(asked[row].sum())} answers."
            yield Chosen(row, "wrong", detail)


def _relapsed(right: Tensor, asked: Tensor) -> Iterator[Chosen]:
    """What was wholly right, or else had most of its last mistakes right, and is not at the end."""
    whole, lost = right.all(-1), (~right[-1] & right.any(0)).sum(-1)
    for row in (whole.any(0) & ~whole[-1]).nonzero().flatten().tolist():
        loop, n = int(whole[:, row].nonzero().max()), int((~right[-1, row]).sum())
        detail = (
            f"Wrong after being right: all of its answers are right after loop {loop}, "
            f"{n} {'is' if n == 1 else 'are'} wrong at the end."
        )
        yield Chosen(row, "wrong after right", detail)
    for row in lost.argsort(stable=True, descending=True).tolist():
        if (n := int(lost[row])) and not whole[:, row].any():
            were = "was right at some loop, and is wrong" if n == 1 else "were right, and are wrong"
            text = f"Wrong after being right: {n} of its {int(asked[row].sum())} answers {were}"
            yield Chosen(row, "wrong after right", f"{text} at the end.")


def _late(right: Tensor) -> Iterator[Chosen]:
    """What is right for good last, of what ends right."""
    whole = right.all(-1)
    since = kept_from(whole).where(whole[-1], -1)
    for nth, row in enumerate(since.argsort(stable=True, descending=True).tolist()):
        loop = int(since[row])
        if loop < 1:
            return
        alone = nth == 0 and int((since == loop).sum()) == 1
        than = "later than in the other examples" if alone else "among the last"
        detail = f"Right last: all of its answers are right from loop {loop} on, {than}."
        yield Chosen(row, "right last", detail)


def _chains(settled: Mapping[str, Tensor]) -> Iterator[Chosen]:
    """What takes a program most loops: the one that differs most from example to example."""
    if not settled:
        return
    name, loops = max(settled.items(), key=lambda one: int(one[1].max() - one[1].min()))
    for row in loops.argsort(stable=True, descending=True).tolist():
        if (loop := int(loops[row])) <= int(loops.min()):
            return  # as many loops as the shortest one takes are no long chain
        detail = f"A long chain: {name} has its whole answer only after loop {loop}."
        yield Chosen(row, "long chain", detail)
