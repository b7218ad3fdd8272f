"""nnsight keeping the residuals of all loops; run by ``forward`` and ``adapters``.

Sizes A to C are of the plain loop, and need PyTorch and nnsight alone; the others are of HRM-Text
against its own forward, and need lazy-loader too. It prints one line of JSON.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from analyses.benchmarks.plain import SIZES, PlainLoop, Size, plain_loop
from analyses.benchmarks.timing import compare, parser, settle

if TYPE_CHECKING:
    from collections.abc import Callable

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


def plain_ways(size: Size, device: str) -> dict[str, Callable[[], Any]]:
    """The plain loop, and nnsight on it with a module per loop."""
    import nnsight  # pyright: ignore[reportMissingImports]

    plain, tokens = PlainLoop(size).eval().to(device), size.tokens().to(device)
    lean, traced = plain_loop(plain), nnsight.NNsight(Unrolled(plain))

    def residuals() -> list[Tensor]:
        with traced.trace(tokens):
            kept = nnsight.save([loop.output for loop in traced.loops])
        return kept  # noqa: RET504 (a trace's body cannot return)

    assert len(residuals()) == size.n_loops
    return {"plain loop": lambda: lean(tokens), "nnsight, residuals of all loops": residuals}


def hrm_text_ways(size: str, device: str) -> dict[str, Callable[[], Any]]:
    """HRM-Text's own forward, and nnsight keeping what each layer wrote at each of its firings."""
    import nnsight  # pyright: ignore[reportMissingImports]

    from analyses.benchmarks.published import random_model

    published: Any
    published, tokens = random_model("hrm_text", None, size, device=device)
    slow, fast = published.config.H_cycles, published.config.L_cycles
    expected = by_pytorch(published, tokens)
    traced = nnsight.NNsight(published)

    def residuals() -> list[Tensor]:
        with traced.trace(tokens, use_cache=False) as tracer:
            kept = nnsight.save([])
            for t in range(slow):  # in the order in which they fire
                for _ in tracer.iter[t * fast : (t + 1) * fast]:
                    for layer in traced.model.L_module.layers:
                        kept.append(layer.output)
                for _ in tracer.iter[t : t + 1]:
                    for layer in traced.model.H_module.layers:
                        kept.append(layer.output)
        return kept

    firings = len(residuals())
    assert firings == len(expected) and all(map(torch.equal, residuals(), expected))
    return {
        "its own forward": lambda: published(tokens, use_cache=False).logits,
        f"nnsight, residuals ({firings} of {firings})": residuals,
    }


def by_pytorch(published: Any, tokens: Tensor) -> list[Tensor]:
    """What each layer of HRM-Text wrote at each of its firings, by PyTorch's own hooks."""
    inner, kept = published.model, []
    hooks = [
        layer.register_forward_hook(lambda layer, given, made: kept.append(made))
        for layer in (*inner.L_module.layers, *inner.H_module.layers)
    ]
    published(tokens, use_cache=False)
    for hook in hooks:
        hook.remove()
    return kept


def main() -> None:
    cli = parser(__doc__, rounds=30, device=True)
    cli.add_argument("size", choices=[*SIZES, "tiny", "100M"])
    options = cli.parse_args()
    settle(options)
    torch.set_grad_enabled(False)
    if options.size in SIZES:
        ways = plain_ways(SIZES[options.size], options.device)
    else:
        ways = hrm_text_ways(options.size, options.device)
    rows = compare(ways, rounds=options.rounds, clock=options.clock, device=options.device)
    print(json.dumps({name: row for name, row in rows.items() if name.startswith("nnsight")}))


if __name__ == "__main__":
    main()
