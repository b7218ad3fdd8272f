"""One training step of the notebook's looped model: ours against its own encoder layer.

    python -m analyses.benchmarks.training_step

A step is forward, loss, backward, clipping to 1 and Adam, at the published size: batch 64, 8
bits, 12 loops. The published model trains with dropout 0.1; loopinterp has none, so the same
model without dropout stands beside it. A speed-up is the notebook's time over ours.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from analyses.benchmarks import notebook_peer as notebook
from analyses.benchmarks.timing import compare, parser, settle, show

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor, nn

BATCH, BITS, N_LOOPS = 64, 8, 12
SPEED_UP = 1.3


def training_step(
    model: nn.Module, forward: Callable[[Tensor], Tensor], bits: Tensor, sums: Tensor
) -> Callable[[], None]:
    """A function that trains the model once more on the batch."""
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-3)
    model.train()

    def step() -> None:
        optimiser.zero_grad()
        logits = forward(bits)
        F.cross_entropy(logits.reshape(-1, 2), sums.reshape(-1)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()

    return step


def main() -> None:
    options = parser(__doc__, rounds=40, device=True).parse_args()
    settle(options)
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(0, 2, (BATCH, BITS, 2), generator=generator).float()
    sums = torch.randint(0, 2, (BATCH, BITS), generator=generator)
    published, without, ours = notebook.Looped(), notebook.Looped(), notebook.Looped()
    for module in without.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    without.layer.self_attn.dropout = 0.0
    model = notebook.looped_as_ours(ours).to(options.device)
    published, without = published.to(options.device), without.to(options.device)
    bits, sums = bits.to(options.device), sums.to(options.device)
    rows = compare(
        {
            "notebook, as published": training_step(
                published, lambda x: published(x, N_LOOPS), bits, sums
            ),
            "notebook, without dropout": training_step(
                without, lambda x: without(x, N_LOOPS), bits, sums
            ),
            "loopinterp": training_step(model, lambda x: model(x, n_loops=N_LOOPS), bits, sums),
        },
        rounds=options.rounds,
        clock=options.clock,
        device=options.device,
    )
    targets = {"training step": {"loopinterp": 1 / SPEED_UP}}
    show({"training step": rows}, targets=targets, path=options.json)
    for name in ("notebook, as published", "notebook, without dropout"):
        speed_up = rows[name]["ratio"] / rows["loopinterp"]["ratio"]
        print(f"  speed-up over {name}: {speed_up:.2f}")


if __name__ == "__main__":
    main()
