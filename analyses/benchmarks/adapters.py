"""What an adapter of a published model costs, against that model's own forward.

    python -m analyses.benchmarks.adapters
    python -m analyses.benchmarks.adapters --ouro PATH/modeling_ouro.py \\
        --huginn PATH/raven_modeling_minimal.py --hrm PATH/models/hrm/hrm_act_v1.py \\
        --trm PATH/models/recursive_reasoning/trm.py
    python -m analyses.benchmarks.adapters --large --ouro PATH/modeling_ouro.py

HRM-Text is part of ``transformers``; of the others the file is a copy of your own, and is run. All
are random: tiny (about 1 million weights, 4 prompts of 32 tokens), and of some 100 million weights
(one prompt of 32 tokens). Four loops each; two slow cycles of HRM-Text, HRM and TRM.
"""

from __future__ import annotations

import resource
import time
from functools import partial
from pathlib import Path

import torch

from analyses.benchmarks.timing import compare, parser, settle, show
from analyses.published_code import KINDS, module_of
from loopinterp.adapters import adapt

TOKENS, VOCAB = 32, 1000
SIZES = {
    "ouro": (
        {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 2},
        {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 8},
    ),
    "huginn": (
        {"n_embd": 128, "intermediate_size": 352},
        {"n_embd": 1024, "intermediate_size": 2816},
    ),
    "hrm_text": (
        {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 2},
        {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 4},
    ),
    "hrm": (
        {"hidden_size": 128, "H_layers": 2, "L_layers": 2},
        {"hidden_size": 1024, "H_layers": 4, "L_layers": 4, "expansion": 4},
    ),
    "trm": (
        {"hidden_size": 128, "L_layers": 2},
        {"hidden_size": 1024, "L_layers": 8, "expansion": 4},
    ),
}
LARGE = {
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "vocab_size": 49152,
}
"""The shape of Ouro-1.4B."""
RESIDUALS = ["hook_resid_pre", "hook_resid_mid", "hook_resid_post"]
HEADS = {
    "ouro": lambda n: {"num_attention_heads": n, "num_key_value_heads": n},
    "huginn": lambda n: {"n_heads": n, "block_size": TOKENS},
    "hrm_text": lambda n: {"num_attention_heads": n, "head_dim": 64},
    "hrm": lambda n: {"num_heads": n, "seq_len": TOKENS, "halt_max_steps": 1},
    "trm": lambda n: HEADS["hrm"](n),
}


def large(file: Path | None) -> None:
    """Peak memory of one prompt through a random Ouro of 1.4B weights, all residuals cached."""
    torch.set_default_dtype(torch.bfloat16)
    published = KINDS["ouro"].build(module_of(file), **LARGE).eval()
    model, tokens = adapt(published), torch.randint(VOCAB, (1, TOKENS))
    weights = sum(weight.numel() for weight in model.parameters())
    said = model.cache_nbytes(1, TOKENS, names_filter=RESIDUALS)
    print(f"{weights / 1e9:.2f} billion weights, {weights * 2 / 2**30:.2f} GiB")
    print(f"cache of {RESIDUALS} at 4 loops of 24 layers: {said / 2**20:.1f} MiB, said before")
    with torch.no_grad():
        model(tokens)
        plain = _peak()
        start = time.perf_counter()
        _, cache = model.run_with_cache(tokens, names_filter=RESIDUALS)
        seconds = time.perf_counter() - start
    assert cache.nbytes == said and len(cache) == 3 * 4 * 24
    print(f"peak of the process: {plain:.2f} GiB without a cache, {_peak():.2f} GiB with it")
    print(f"{seconds:.1f} s for the prompt")


def _peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def main() -> None:
    made = parser(__doc__, rounds=10)
    made.add_argument("--ouro", type=Path, help="your own copy of modeling_ouro.py")
    made.add_argument("--huginn", type=Path, help="your own copy of raven_modeling_minimal.py")
    made.add_argument("--hrm", type=Path, help="your own copy of hrm_act_v1.py")
    made.add_argument("--trm", type=Path, help="your own copy of trm.py")
    made.add_argument("--tiny", action="store_true", help="the tiny models only")
    made.add_argument("--large", action="store_true", help="memory of a 1.4B-parameter Ouro alone")
    options = made.parse_args()
    settle(options)
    if options.large:
        large(options.ouro)
        return
    files = {kind: getattr(options, kind, None) for kind in SIZES}
    tables = {}
    for kind, file in files.items():
        if file is None and kind != "hrm_text":
            continue
        module = module_of(file)
        for sizes, batch in zip(SIZES[kind], (4,) if options.tiny else (4, 1)):
            width = sizes.get("hidden_size", sizes.get("n_embd", 0))
            torch.manual_seed(0)
            settings = sizes | HEADS[kind](width // 64) | {"vocab_size": VOCAB}
            published = KINDS[kind].build(module, **settings).eval()
            for weight in published.parameters():
                torch.nn.init.normal_(weight, std=weight.shape[-1] ** -0.5)
            model = adapt(published)
            tokens = torch.randint(VOCAB, (batch, TOKENS))
            n_loops, start = model.n_loops, model.initial_state(model.embed(tokens)).detach()
            state = {"state": start} if kind == "huginn" else {}
            cached = partial(model.run_with_cache, tokens, names_filter="hook_resid_post", **state)
            ways = {
                "its own forward": partial(KINDS[kind].native, published, tokens, n_loops, start),
                "no hooks": partial(model, tokens, **state),
                "residuals of all (loop, layer)": cached,
            }
            with torch.no_grad():
                assert (ways["its own forward"]() - ways["no hooks"]()).abs().max() < 1e-3
                rows = compare(ways, rounds=options.rounds, clock=options.clock)
            weights = sum(weight.numel() for weight in published.parameters()) / 1e6
            tables[f"{kind}, {weights:.1f} million weights"] = rows
    target = {"no hooks": 1.05, "residuals of all (loop, layer)": 1.10}
    show(tables, targets=dict.fromkeys(tables, target), path=options.json)


if __name__ == "__main__":
    main()
