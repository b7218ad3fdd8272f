"""What it costs to measure every loop of a long run, against the plain loop.

    python -m analyses.benchmarks.streamed_measures

A loop of width 128 on 32 sequences of 64 tokens. Beside the time of so many loops stands the
largest memory of the process after a tenth of them and after all: it must not grow with the loops.
"""

from __future__ import annotations

import resource
from collections import deque
from collections.abc import Iterable

import torch

from analyses.benchmarks.timing import compare, parser, settle, show
from loopinterp.dynamics import stream_measures
from loopinterp.models import LoopedTransformer, LoopedTransformerConfig, bind


def main() -> None:
    cli = parser(__doc__, rounds=5)
    cli.add_argument("--loops", type=int, default=1000)
    cli.add_argument("--batch", type=int, default=32)
    cli.add_argument("--positions", type=int, default=64)
    cli.add_argument("--width", type=int, default=128)
    options = cli.parse_args()
    settle(options)
    torch.set_grad_enabled(False)
    config = LoopedTransformerConfig(
        d_model=options.width,
        n_heads=4,
        d_vocab=6,
        d_vocab_out=2,
        injection="input",
        initial_state="zeros",
        loop_norm=True,
    )
    model = LoopedTransformer(config).eval()
    iteration = bind(model, torch.randint(6, (options.batch, options.positions)))
    measured = [
        _drain(stream_measures(iteration, n_loops))
        for n_loops in (max(options.loops // 10, 1), options.loops)
    ]
    n_loops = options.loops
    ways = {
        "plain loop": lambda: _drain(iteration.run(n_loops, may_diverge=True)),
        "measured": lambda: _drain(stream_measures(iteration, n_loops)),
    }
    rows = compare(ways, rounds=options.rounds, clock=options.clock)
    title = f"{n_loops} loops, {options.batch} x {options.positions} x {options.width}"
    show({title: rows}, targets={title: {"measured": 1.3}}, path=options.json)
    few, all_ = measured
    print(f"\nlargest memory: {few / 1024:.0f} MB after a tenth, {all_ / 1024:.0f} MB after all")


def _drain(run: Iterable[object]) -> int:
    """Let a run come to its end, keep nothing, and say the largest memory so far, in KB."""
    deque(run, maxlen=0)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


if __name__ == "__main__":
    main()
