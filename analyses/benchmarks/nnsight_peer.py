"""nnsight keeping the residuals of all loops; run by ``forward`` and ``adapters``.

Sizes A to C are of the plain loop, and need PyTorch and nnsight alone; the others are of a
published model against its own forward, and need lazy-loader too. It prints one line of JSON.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from analyses.benchmarks.plain import SIZES, PlainLoop, Size, plain_loop
from analyses.benchmarks.timing import compare, parser, settle

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    Firings = tuple[int, list[tuple[Any, int]]]


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


def published_ways(
    kind: str, file: Path | None, size: str, device: str
) -> dict[str, Callable[[], Any]]:
    """A published model's own forward, and nnsight keeping what each layer wrote at each firing."""
    import nnsight  # pyright: ignore[reportMissingImports]

    from analyses.benchmarks.published import random_model
    from analyses.published_code import KINDS

    published: Any
    published, tokens = random_model(kind, file, size, device=device)
    loops, order = FIRINGS[kind](published)
    given: dict[str, Any] = {"use_cache": False}
    if kind == "huginn":
        start = torch.randn(*tokens.shape, published.config.n_embd, device=device)
        given = {"input_states": start, "num_steps": loops}
    native = partial(KINDS[kind].native, published, tokens, loops, given.get("input_states"))
    expected = by_pytorch([layer for stack, _ in order for layer in stack], native)
    traced = nnsight.NNsight(published)
    _, order = FIRINGS[kind](traced)

    def residuals() -> list[Tensor]:
        with traced.trace(tokens, **given) as tracer:
            kept = nnsight.save([])
            for stack, firing in order:
                for _ in tracer.iter[firing : firing + 1]:
                    for layer in stack:
                        kept.append(layer.output)
        return kept

    firings = len(residuals())
    assert firings == len(expected) and all(map(torch.equal, residuals(), expected))
    return {"its own forward": native, f"nnsight, residuals ({firings} of {firings})": residuals}


def _ouro(model: Any) -> Firings:
    loops = int(model.model.total_ut_steps)
    return loops, [(model.model.layers, t) for t in range(loops)]


def _huginn(model: Any) -> Firings:
    loops, inner = int(model.config.mean_recurrence), model.transformer
    core = [(inner.core_block, t) for t in range(loops)]
    return loops, [(inner.prelude, 0), *core, (inner.coda, 0)]


def _hrm_text(model: Any) -> Firings:
    loops, fast, order = int(model.config.H_cycles), int(model.config.L_cycles), []
    for t in range(loops):
        order += [(model.model.L_module.layers, t * fast + i) for i in range(fast)]
        order.append((model.model.H_module.layers, t))
    return loops, order


FIRINGS = {"ouro": _ouro, "huginn": _huginn, "hrm_text": _hrm_text}
"""Loops of a model, and its stacks in the order in which they fire, each with the number of that
firing."""


def by_pytorch(layers: list[nn.Module], run: Callable[[], Any]) -> list[Tensor]:
    """What each layer wrote at each of its firings, by PyTorch's own hooks."""
    kept: list[Any] = []
    hooks = [
        layer.register_forward_hook(lambda layer, given, made: kept.append(made))
        for layer in dict.fromkeys(layers)
    ]
    run()
    for hook in hooks:
        hook.remove()
    return kept


def main() -> None:
    cli = parser(__doc__, rounds=30, device=True)
    cli.add_argument("size", choices=[*SIZES, "tiny", "100M"])
    cli.add_argument("--kind", choices=list(FIRINGS), default="hrm_text")
    cli.add_argument("--file", type=Path, help="your own copy of the modelling file")
    options = cli.parse_args()
    settle(options)
    torch.set_grad_enabled(False)
    if options.size in SIZES:
        ways = plain_ways(SIZES[options.size], options.device)
    else:
        ways = published_ways(options.kind, options.file, options.size, options.device)
    rows = compare(ways, rounds=options.rounds, clock=options.clock, device=options.device)
    print(json.dumps({name: row for name, row in rows.items() if name.startswith("nnsight")}))


if __name__ == "__main__":
    main()
