"""nnsight keeping the residuals of all loops, against the plain loop; run by ``forward``.

It needs PyTorch and nnsight alone, and prints one line of JSON.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import torch
from torch import nn

from analyses.benchmarks.plain import SIZES, PlainLoop, plain_loop
from analyses.benchmarks.timing import compare, parser, settle

if TYPE_CHECKING:
    from torch import Tensor


class Unrolled(nn.Module):
    """The plain loop with a module per loop: nnsight addresses modules, so each loop has one."""

    def __init__(self, plain: PlainLoop) -> None:
        super().__init__()
        self.plain = plain
        self.loops = nn.ModuleList(OneLoop(plain.block[0]) for _ in range(plain.n_loops))

    def forward(self, tokens: Tensor) -> Tensor:
        plain = self.plain
        h = plain.embedding(tokens) + plain.position_embedding.weight[: tokens.shape[1]]
        for loop in self.loops:
            h = loop(h)
        return plain.unembedding(plain.ln_final(h))


class OneLoop(nn.Module):
    """A name for one pass through the shared layer, which nnsight must not wrap 16 times."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self._layer = [layer]

    def forward(self, h: Tensor) -> Tensor:
        return self._layer[0](h)


def main() -> None:
    import nnsight  # pyright: ignore[reportMissingImports]

    cli = parser(__doc__, rounds=30)
    cli.add_argument("size", choices=list(SIZES))
    options = cli.parse_args()
    settle(options)
    torch.set_grad_enabled(False)
    size = SIZES[options.size]
    plain, tokens = PlainLoop(size).eval(), size.tokens()
    lean, traced = plain_loop(plain), nnsight.NNsight(Unrolled(plain))

    def residuals() -> list[Tensor]:
        with traced.trace(tokens):
            kept = nnsight.save([loop.output for loop in traced.loops])
        return kept  # noqa: RET504 (a trace's body cannot return)

    assert len(residuals()) == size.n_loops
    ways = {"plain loop": lambda: lean(tokens), "nnsight": residuals}
    rows = compare(ways, rounds=options.rounds, clock=options.clock)
    print(json.dumps({"nnsight, residuals of all loops": rows["nnsight"]}))


if __name__ == "__main__":
    main()
