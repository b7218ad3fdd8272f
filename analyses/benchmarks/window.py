"""What a hard window saves: a loop block by block against the same loop under the whole mask.

    python -m analyses.benchmarks.window

The model is the demo's (width 64, 4 heads, relative bias), the batch 32.
"""

from __future__ import annotations

from functools import partial

import torch

from analyses.benchmarks.timing import compare, parser, settle, show
from loopinterp.models import LoopedTransformer, LoopedTransformerConfig
from loopinterp.models.positions import attention_context

BATCH = 32
LENGTHS = (49, 97, 193, 385)


def main() -> None:
    cli = parser(__doc__, rounds=20)
    cli.add_argument("--windows", nargs="+", type=int, default=[1, 8])
    options = cli.parse_args()
    settle(options)
    torch.set_grad_enabled(False)
    tables = {}
    for window in options.windows:
        model = LoopedTransformer(
            LoopedTransformerConfig(
                d_model=64,
                n_heads=4,
                d_vocab=6,
                d_vocab_out=2,
                positions="relative",
                relative_window=window,
                attention_window=window,
                injection="input",
                loop_norm=True,
            )
        )
        for n_pos in LENGTHS:
            contexts = (
                attention_context(
                    model.config,
                    n_pos,
                    bias=model.relative_bias,
                    device=model.device,
                    dtype=model.dtype,
                    all_pairs=all_pairs,
                )
                for all_pairs in (True, False)
            )
            e = model.embed(torch.randint(6, (BATCH, n_pos)))
            h = torch.randn_like(e)
            ways = [partial(model.step, h, e, context) for context in contexts]
            torch.testing.assert_close(ways[1](), ways[0](), atol=1e-5, rtol=1e-5)
            tables[f"window {window}, {n_pos} positions"] = compare(
                dict(zip(("whole mask", "as run"), ways)),
                rounds=options.rounds,
                clock=options.clock,
            )
    show(tables, path=options.json)


if __name__ == "__main__":
    main()
