"""Persistence of an injected carry: one loop (ripple) or for ever (sticky ripple)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from pydantic import PositiveInt

from loopinterp.comparison.pair_strategies import check_batch, named_models
from loopinterp.core.boundary import checked
from loopinterp.core.errors import need
from loopinterp.core.results import Result, study
from loopinterp.core.settings import Seed
from loopinterp.interventions.engine import InterchangeRun
from loopinterp.interventions.pairs import InterchangePairs, draw_pairs
from loopinterp.models import describe_model
from loopinterp.programs.stock_programs import get_program
from loopinterp.tasks.addition import Addition
from loopinterp.tasks.task import IGNORE

if TYPE_CHECKING:
    from jaxtyping import Int
    from torch import Tensor

    from loopinterp.models import LoopedModel
    from loopinterp.tasks.task import Batch, Task

KINDS = INJECTED, ERASED = "planted", "erased"
TOKENS = get_program("ripple").inputs[:4]
MOST = 12  # persistences of so many loops or more are counted together


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class InjectedCarry(Result, kind="planted-carry"):
    """The result of :func:`injected_carry_study`.

    ``count`` is the number of interchanges after which a carry persisted for ``life`` loops (0: no
    answer changed; the last: 12 or more), by token at the position and at its left neighbour. The
    kind ``planted`` injects a carry, ``erased`` removes one.
    """

    VARIABLES: ClassVar = {"count": "model kind token left_token life"}

    n: int

    def counts(self, model: str, kind: str = INJECTED, **where: Any) -> np.ndarray:
        """Number of carries that persisted for 0, 1, 2, … loops."""
        counts = self.data["count"].sel(model=model, kind=kind, **where)
        return counts.sum([d for d in counts.dims if d != "life"]).values

    def quantile(self, share: float, model: str, kind: str = INJECTED, **where: Any) -> float:
        """A quantile of the persistence in loops; NaN without carries."""
        total = self.counts(model, kind, **where).cumsum()
        if not total[-1]:
            return float("nan")
        return float(np.searchsorted(total, share * total[-1]))


@checked
def injected_carry_study(
    models: LoopedModel | Any | Sequence[LoopedModel | Any],
    data: Batch | Task,
    *,
    names: Sequence[str] | None = None,
    per_cell: PositiveInt = 24,
    n: PositiveInt | None = None,
    batch_size: PositiveInt | None = None,
    seed: Seed = 0,
) -> InjectedCarry:
    """Inject carries into additions, and count the loops for which the answer shows them.

    The state of one bit is taken from an input with the same two bits there and the opposite carry
    into them, both final for at least two loops, at least 12 loops before the end. A carry persists
    as long as the answer at that bit stays changed.

    Args:
        models: A model of additions (tokens ``a + 2b`` after BOS), or several.
        data: Additions of one length, at least 16 bits, or their task (``batch_size`` of length
            ``n``).
        per_cell: Most interchanges for each kind, token and left token.
    """
    by_name = named_models(models, names)
    drawn = {"n": n, "batch_size": batch_size, "seed": seed}
    batches = [check_batch(m, data, [get_program("ripple")], **drawn) for m in by_name.values()]
    pairs = [_pairs(batch, per_cell, torch.Generator().manual_seed(seed)) for batch in batches]
    n = int(batches[0].n[0])
    with study(
        seed,
        study="planted carry",
        models=[describe_model(model) for model in by_name.values()],
        n=n,
        per_cell=per_cell,
    ) as watch:
        return InjectedCarry.of(
            watch,
            coords={
                "model": list(by_name),
                "kind": KINDS,
                "token": TOKENS,
                "left_token": TOKENS,
                "life": range(MOST + 1),
            },
            count=np.stack([_counts(model, *x) for model, x in zip(by_name.values(), pairs)]),
            n=n,
        )


def _counts(
    model: LoopedModel | Any, pairs: InterchangePairs, cell: Int[Tensor, " pair"]
) -> np.ndarray:
    run = InterchangeRun(model, pairs)
    rows = torch.arange(len(pairs), device=run.base.device)
    # Whether the answer at the changed bit differs from the clean one, [pair, delay].
    changed = (run.interchange() != run.base)[rows, : MOST + 1, run.pairs.positions[:, 0]]
    life = changed.int().cummin(1).values.sum(1).clamp(max=MOST).cpu()
    shape = (len(KINDS), len(TOKENS), len(TOKENS), MOST + 1)
    index = (cell * (MOST + 1) + life).numpy()
    return np.bincount(index, minlength=int(np.prod(shape))).reshape(shape)


def _pairs(
    batch: Batch, per_cell: int, generator: torch.Generator
) -> tuple[InterchangePairs, Int[Tensor, " pair"]]:
    """Interchanges of final carries, and their cells (kind, token, left token)."""
    task, tokens = Addition(), batch.inputs
    carry, chain = task.carry_in(tokens), task.chain_length_in(tokens)
    # Both carries have been final for two loops or more, and MOST loops are left.
    final, last = 2, int(batch.n_loops.max()) - MOST
    base, source = draw_pairs(len(batch), 64 * per_cell, generator)
    loop = torch.randint(final + 1, max(last, final + 1) + 1, base.shape, generator=generator)
    is_asked = batch.targets != IGNORE
    # Equal tokens and opposite carries, at an asked bit: [pair, pos].
    fits = (tokens[base] == tokens[source]) & (carry[base] != carry[source]) & is_asked[base]
    for row in (base, source):
        fits &= chain[row] + 1 + final <= loop[:, None]
    fits[:, :2] = False  # the first bit has no carry, and no left neighbour
    pair, position = fits.nonzero(as_tuple=True)
    expected = f"additions of {MOST + 4} bits or more, of which some differ in a carry"
    fix = "Draw more, or longer ones, of the distribution 'propagate'."
    got = f"{len(batch)} of {int(batch.n[0])} bits"
    need(last > final and len(pair), "batch", expected, got, fix)
    row = base[pair]
    kind = carry[row, position]  # a carry of 1 in the base is erased
    cell = (kind * 4 + tokens[row, position]) * 4 + tokens[row, position - 1]
    shuffled = torch.randperm(len(cell), generator=generator)
    some = torch.cat([shuffled[cell[shuffled] == k][:per_cell] for k in cell.unique().tolist()])
    pairs = InterchangePairs.of(
        batch,
        base=row[some],
        source=source[pair][some],
        positions=position[some, None],
        loop=loop[pair][some],
    )
    return pairs, cell[some]
