"""What it costs to store activations of many prompts, against running them.

    python -m analyses.benchmarks.stored_activations

The small Ouro of the zoo on prompts of 64 random tokens; two sites of its last layer at every loop.
Beside the time stands the largest memory of the process after a tenth of the prompts and after all:
it must not grow with the prompts.
"""

from __future__ import annotations

import resource
import shutil
import tempfile
from pathlib import Path

import torch

from analyses.benchmarks.timing import compare, parser, settle, show
from loopinterp.models import store_activations
from loopinterp.zoo import load_pretrained

SITES = [f"loops.{t}.blocks.1.{x}" for t in range(4) for x in ("hook_resid_post", "hook_mlp_out")]


def main() -> None:
    cli = parser(__doc__, rounds=5)
    cli.add_argument("--prompts", type=int, default=2000)
    options = cli.parse_args()
    settle(options)
    torch.set_grad_enabled(False)
    model = load_pretrained("ouro-small")
    vocabulary, generator = model.config.d_vocab, torch.Generator().manual_seed(0)
    prompts = torch.randint(vocabulary, (options.prompts, 64), generator=generator)
    folder = Path(tempfile.mkdtemp())

    def store(n: int) -> int:
        """Store so many prompts; the largest memory of the process so far, in KB."""
        shutil.rmtree(folder)
        store_activations(model, prompts[:n], folder, names_filter=SITES)
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    few, all_ = store(len(prompts) // 10), store(len(prompts))
    size = sum(file.stat().st_size for file in folder.iterdir()) / 1e6
    ways = {
        "forward alone": lambda: [model(some) for some in prompts.split(64)],
        "stored": lambda: store(len(prompts)),
    }
    rows = compare(ways, rounds=options.rounds, clock=options.clock)
    title = f"{len(prompts)} prompts of 64 tokens, {size:.0f} MB"
    show({title: rows}, targets={title: {"stored": 1 / 0.8}}, path=options.json)
    print(f"\nlargest memory: {few / 1024:.0f} MB after a tenth, {all_ / 1024:.0f} MB after all")
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
