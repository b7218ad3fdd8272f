"""What patching every loop and position costs, against TransformerLens' own sweep.

    python -m analyses.benchmarks.patching

The model is the addition model of the zoo at 24 bits, with its window of one and with none (the
same weights). The yardstick is ``transformer_lens.patching.get_act_patch_resid_pre`` on the same
model, whose loops are layers to TransformerLens. Both make the same patches and take the same
metric, the logit difference. `patching_sweep` always has its control beside it, the patches out of
the run of a third input; so TransformerLens makes those as well, which is twice its sweep.
"""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformer_lens.patching import get_act_patch_resid_pre

from analyses.benchmarks.timing import compare, parser, settle, show
from loopinterp.interventions import patching_sweep
from loopinterp.models import LoopedTransformer
from loopinterp.tasks import Addition, as_batch
from loopinterp.zoo import load_pretrained

if TYPE_CHECKING:
    from collections.abc import Callable

TARGETS = {"no window": {"patching_sweep": 1 / 5}, "window of one": {"patching_sweep": 1 / 10}}
PAIRS = 16


def without_window(model: LoopedTransformer) -> LoopedTransformer:
    """The same weights, and attention to all earlier positions."""
    free = LoopedTransformer(model.config.replace(attention_window=None))
    free.load_state_dict(model.state_dict())
    return free


def ways(model: LoopedTransformer, bits: int) -> dict[str, Callable[[], Any]]:
    """Name -> one sweep over all loops and positions."""
    batches = [as_batch(Addition(), n=bits, batch_size=PAIRS, seed=seed) for seed in range(3)]
    n_loops, scored = int(batches[0].n_loops.max()), batches[0].targets >= 0
    base, source, other = (batch.inputs for batch in batches)
    deep = model.unroll(n_loops)
    logits = [model(x, n_loops=n_loops) for x in (base, source)]
    answers = [x.argmax(-1) for x in logits]
    differ = (answers[0] != answers[1]) & scored

    def difference(found: torch.Tensor) -> torch.Tensor:
        pair = found[differ].gather(-1, torch.stack(answers[::-1], -1)[differ])
        return (pair[:, 0] - pair[:, 1]).mean()

    def theirs() -> np.ndarray:
        found = []
        for donor in (source, other):
            _, cache = deep.run_with_cache(donor, names_filter="resid_pre")
            with open(os.devnull, "w") as nowhere, contextlib.redirect_stderr(nowhere):
                found.append(get_act_patch_resid_pre(deep, base, cache, difference))
        ends = [difference(x) for x in logits]
        return ((torch.stack(found) - ends[0]) / (ends[1] - ends[0])).numpy()

    def ours() -> np.ndarray:
        found = patching_sweep(
            model, base, source, n_loops=n_loops, positions="each", scored=scored, other=other
        )
        effects = found.data[["effect", "control_effect"]].squeeze(["layer", "head"])
        return effects.to_array().values

    np.testing.assert_allclose(ours(), theirs(), atol=1e-5)
    return {"get_act_patch_resid_pre": theirs, "patching_sweep": ours}


def main() -> None:
    cli = parser(__doc__, rounds=3)
    cli.add_argument("--bits", type=int, default=24)
    cli.add_argument("--models", nargs="+", default=list(TARGETS), choices=list(TARGETS))
    options = cli.parse_args()
    settle(options)
    torch.set_grad_enabled(False)
    windowed = load_pretrained("addition")
    models = {"no window": without_window(windowed), "window of one": windowed}
    tables = {
        title: compare(
            ways(model, options.bits), rounds=options.rounds, clock=options.clock, least=0
        )
        for title, model in models.items()
        if title in options.models
    }
    show(tables, targets=TARGETS, path=options.json)
    for title, rows in tables.items():
        print(f"{title}: {1 / rows['patching_sweep']['ratio']:.1f} times as fast")


if __name__ == "__main__":
    main()
