"""Published looped language models at their real sizes: what hooks cost, and what fits.

    python -m analyses.benchmarks.published_scale --device cuda
    python -m analyses.benchmarks.published_scale --models ouro-1.4B      # memory, on a processor

The shapes of Ouro-1.4B, Ouro-2.6B and Huginn-3.5B with random weights in bfloat16, made of the
copies in ``loopinterp.adapters.plain``, whose logits are those of the published files. For each:

- a prompt of 512 tokens: the model's own forward, ours, ours with one residual kept of every
  loop and layer, and ours with everything kept;
- the peak of memory with that cache, and the size that ``cache_nbytes`` says before;
- 8 new tokens after 128 with kept keys, without and with a hook at one loop, against running the
  whole again for each token;
- the page of a lens for a prompt of 16 tokens.
"""

from __future__ import annotations

import resource
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from analyses.benchmarks.timing import compare, parser, settle, show, write
from analyses.published_code import KINDS
from analyses.published_settings import SHAPES
from loopinterp.adapters import adapt
from loopinterp.adapters.plain import language_models
from loopinterp.models import generate
from loopinterp.pages import explore, write_results

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor, nn

RESIDUALS = ["hook_resid_pre", "hook_resid_mid", "hook_resid_post"]
SMALL = {
    "ouro": {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 64}
    | {"num_attention_heads": 2, "num_key_value_heads": 2},
    "huginn": {"n_embd": 64, "n_heads": 2, "intermediate_size": 96, "vocab_size": 64}
    | {"mean_recurrence": 3, "block_size": 64},
}
"""Sizes of seconds, to try the rest on."""


def random_model(kind: str, sizes: dict[str, Any], device: str) -> nn.Module:
    """A model of the shape."""
    with torch.device(device):
        made = KINDS[kind].build(language_models, **sizes)
    torch.manual_seed(0)
    for weight in made.parameters():
        torch.nn.init.normal_(weight, std=weight.shape[-1] ** -0.5)
    return made.eval().to(device)


def peak(device: str) -> float:
    """GiB that the card has held at most, or else the process."""
    if device != "cpu":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def memory(model: Any, tokens: Tensor, device: str) -> dict[str, float]:
    """Peaks of a run without and with all residuals kept, and what is said of them before."""
    with torch.no_grad():
        if device != "cpu":
            torch.cuda.reset_peak_memory_stats(device)
        model(tokens)
        without = peak(device)
        _, cache = model.run_with_cache(tokens, names_filter=RESIDUALS)
        said = model.cache_nbytes(*tokens.shape, names_filter=RESIDUALS)
        assert cache.nbytes == said
        return {"peak": without, "peak with cache": peak(device), "cache": said / 2**30}


def forwards(
    kind: str, published: nn.Module, model: Any, tokens: Tensor
) -> dict[str, Callable[[], Any]]:
    """Name -> one run."""
    start = model.initial_state(model.embed(tokens))
    state = {"state": start} if kind == "huginn" else {}
    cached = partial(model.run_with_cache, tokens, names_filter="hook_resid_post", **state)
    made = {
        "its own forward": partial(KINDS[kind].native, published, tokens, model.n_loops, start),
        "no hooks": partial(model, tokens, **state),
        "residuals of all (loop, layer)": cached,
        "everything cached": partial(model.run_with_cache, tokens, **state),
    }
    # In bfloat16 two orders of summation differ by its rounding, added up over all layers.
    expected, ours = made["its own forward"]().float(), made["no hooks"]().float()
    apart = float((ours - expected).norm() / expected.norm())
    print(f"  logits differ by {apart:.4f} of their size", file=sys.stderr)
    assert apart < 0.1
    return made


def generations(model: Any, prompt: Tensor, new: int) -> dict[str, Callable[[], Any]]:
    """Name -> one generation."""
    ours = partial(generate, model, prompt, max_new_tokens=new, n_loops=model.n_loops)
    hook = (f"loops.{model.n_loops // 2}.hook_state_post", lambda x, hook: 1.01 * x)
    return {
        "the whole again": partial(ours, use_cache=False),
        "no hooks": ours,
        "a hook at one loop": partial(ours, fwd_hooks=[hook]),
    }


def lens_page(model: Any, tokens: Tensor) -> dict[str, float]:
    """Seconds and MB of a page that shows what the readout says after each loop."""
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        page = write_results(
            {"explorer": explore(model, tokens)}, Path(folder) / "lens.html", title="A lens"
        )
        return {"seconds": time.perf_counter() - start, "MB": page.stat().st_size / 1e6}


def main() -> None:
    made = parser(__doc__, rounds=3, device=True)
    made.add_argument("--models", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    made.add_argument("--small", action="store_true", help="sizes of seconds")
    options = made.parse_args()
    settle(options)
    torch.set_default_dtype(torch.bfloat16)
    device, tables = options.device, {}
    pos, before, new = (16, 8, 4) if options.small else (512, 128, 8)
    for name in options.models:
        kind, sizes = SHAPES[name]
        sizes = SMALL[kind] if options.small else sizes
        published = random_model(kind, sizes, device)
        model = adapt(published)
        tokens = torch.randint(sizes["vocab_size"], (1, pos), device=device)
        weights = sum(weight.numel() for weight in published.parameters())
        print(f"{name}: {weights / 1e9:.2f} billion weights", file=sys.stderr)
        values = {f"{name}, GiB": memory(model, tokens, device)}
        with torch.no_grad():
            timed = partial(compare, rounds=options.rounds, clock=options.clock, device=device)
            runs = forwards(kind, published, model, tokens)
            timings = {f"{name}, {pos} tokens": timed(runs)}
            show(timings)
            runs = generations(model, tokens[:, :before], new)
            timings[f"{name}, {new} new tokens"] = rows = timed(runs)
            show({f"{name}, {new} new tokens": rows})
        values[f"{name}, tokens a second"] = {
            way: 1e3 * new / row["milliseconds"] for way, row in rows.items()
        }
        values[f"{name}, page of a lens"] = lens_page(model, tokens[:, :16])
        for what, numbers in values.items():
            print(what, {key: round(number, 3) for key, number in numbers.items()}, flush=True)
        tables |= timings | {what: {"value": numbers} for what, numbers in values.items()}
        if options.json:  # as far as it is measured
            write(tables, options.json)
        del published, model, runs
        if device != "cpu":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
