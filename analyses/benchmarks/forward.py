"""What looking inside costs: a forward pass of 16 loops, against a plain hand-written loop.

    python -m analyses.benchmarks.forward
    python -m analyses.benchmarks.forward --peer-python ../nnsight/bin/python

Beside loopinterp stand TransformerLens' own bridge, 16 layers with tied weights, and nnsight. Where
nnsight cannot be installed beside TransformerLens, give it an environment of its own (PyTorch and
nnsight are all it needs) and name that environment's Python; it brings its own yardstick along.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from analyses.benchmarks.bridge_peer import untied_bridge
from analyses.benchmarks.plain import SIZES, PlainLoop, Size, plain_loop
from analyses.benchmarks.timing import compare, parser, settle, show
from loopinterp.models import LoopedTransformer, LoopedTransformerConfig

if TYPE_CHECKING:
    from collections.abc import Callable

TARGETS = {
    "A": {"no hooks": 1.08, "residuals of all loops": 1.12, "everything cached": 2.2},
    "B": {"no hooks": 1.08, "residuals of all loops": 1.12, "everything cached": 2.2},
    "C": {"no hooks": 1.35, "residuals of all loops": 1.50, "everything cached": 3.6},
}


def looped_transformer(size: Size, plain: PlainLoop) -> LoopedTransformer:
    """loopinterp's model with the plain loop's weights."""
    model = LoopedTransformer(
        LoopedTransformerConfig(
            d_model=size.d_model,
            n_heads=size.n_heads,
            d_vocab=size.d_vocab,
            d_vocab_out=size.d_vocab,
            n_loops=size.n_loops,
            positions="absolute",
            n_ctx=size.n_pos,
            unembed_bias=False,
        )
    )
    model.load_state_dict(plain.state_dict())
    return model.eval()


def ways(size: Size, device: str) -> dict[str, Callable[[], Any]]:
    """Name -> one run."""
    plain, tokens = PlainLoop(size).eval().to(device), size.tokens().to(device)
    lean, ours = plain_loop(plain), looped_transformer(size, plain)
    bridge = untied_bridge(ours, size.n_loops, tied=True).to(device)
    ours = ours.to(device)
    residuals = [f"blocks.{loop}.hook_resid_post" for loop in range(size.n_loops)]
    for other in (plain, ours, bridge):
        torch.testing.assert_close(other(tokens), lean(tokens), atol=1e-4, rtol=1e-4)
    return {
        "plain loop": lambda: lean(tokens),
        "plain loop as modules": lambda: plain(tokens),
        "no hooks": lambda: ours(tokens),
        "residuals of all loops": lambda: ours.run_with_cache(tokens, names_filter="resid_post"),
        "everything cached": lambda: ours.run_with_cache(tokens),
        "bridge, no hooks": lambda: bridge(tokens),
        "bridge, residuals of all loops": lambda: bridge.run_with_cache(
            tokens, names_filter=residuals
        ),
        "bridge, everything cached": lambda: bridge.run_with_cache(tokens),
    }


def nnsight(python: Path, size: str, options: Any, *more: str) -> dict[str, dict[str, float]]:
    """nnsight's rows, timed by another Python against the same yardstick."""
    command = [str(python), "-m", "analyses.benchmarks.nnsight_peer", size, *more]
    for option in ("rounds", "threads", "clock", "allocator", "device"):
        command += [f"--{option}", str(getattr(options, option))]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    cli = parser(__doc__, rounds=30, device=True)
    cli.add_argument("--sizes", nargs="+", default=list(SIZES), choices=list(SIZES))
    cli.add_argument("--peer-python", type=Path, help="the Python that has nnsight")
    options = cli.parse_args()
    settle(options)
    torch.set_grad_enabled(False)
    tables = {}
    for name in options.sizes:
        print(f"size {name}: {SIZES[name]}", file=sys.stderr)
        tables[name] = compare(
            ways(SIZES[name], options.device),
            rounds=options.rounds,
            clock=options.clock,
            device=options.device,
        )
        if options.peer_python:
            tables[name] |= nnsight(options.peer_python, name, options)
    show(tables, targets=TARGETS, path=options.json)


if __name__ == "__main__":
    main()
