"""What kept keys and values save: generation with them against running the whole again.

    python -m analyses.benchmarks.generation

The model has one layer of width 64 with 4 heads, as the demo's; 8 loops, a batch of 16 prompts of
16 tokens, and 64 new ones for each. The hook doubles the state after loop 4, at every position.
"""

from __future__ import annotations

from functools import partial

import torch

from analyses.benchmarks.timing import compare, parser, settle, show
from loopinterp.models import LoopedTransformer, LoopedTransformerConfig, generate

BATCH, PROMPT, NEW, LOOPS = 16, 16, 64, 8
KINDS = {
    "no positions": {},
    "rotary": {"positions": "rotary"},
    "fire": {"positions": "fire"},
    "window of 1, relative bias": {
        "positions": "relative",
        "relative_window": 1,
        "attention_window": 1,
    },
}


def main() -> None:
    options = parser(__doc__, rounds=10, device=True).parse_args()
    settle(options)
    tables = {}
    for title, settings in KINDS.items():
        config = LoopedTransformerConfig(
            d_model=64,
            n_heads=4,
            d_vocab=6,
            d_vocab_out=6,
            injection="input",
            loop_norm=True,
            **settings,
        )
        model = LoopedTransformer(config, seed=0).to(options.device)
        prompts = torch.randint(6, (BATCH, PROMPT), generator=torch.Generator().manual_seed(0))
        decode = partial(
            generate, model, prompts.to(options.device), n_loops=LOOPS, max_new_tokens=NEW
        )
        hooked = partial(decode, fwd_hooks=[("loops.4.hook_state_post", lambda x, hook: 2 * x)])
        ways = {
            "the whole again": partial(decode, use_cache=False),
            "with the cache": decode,
            "the whole again, with a hook": partial(hooked, use_cache=False),
            "with the cache and a hook": hooked,
        }
        answers = [way() for way in ways.values()]
        assert torch.equal(*answers[:2]) and torch.equal(*answers[2:])
        tables[title] = compare(
            ways, rounds=options.rounds, clock=options.clock, device=options.device
        )
    target: dict[str, float] = dict.fromkeys(("with the cache", "with the cache and a hook"), 1 / 3)
    show(tables, targets=dict.fromkeys(tables, target), path=options.json)


if __name__ == "__main__":
    main()
