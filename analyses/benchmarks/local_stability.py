"""What local stability costs: products for a leading eigenvalue, and memory against a step.

    python -m analyses.benchmarks.local_stability

The model is as wide as the published ones (width 256, 8 heads, 64 tokens, one layer, loop norm);
the state is its limit by plain iteration. The reference is ARPACK (scipy's ``eigs``) at 1e-4, one
example after another, which takes minutes for a batch of 16.

Memory is the rise of a process's peak resident size (``VmHWM`` of Linux, set back before the work)
over its size when model and state had been made, each way in a process of its own: so it counts
what PyTorch's allocator takes. What was freed before goes back to the system first: else the work
would take that, and seem to need less. Each way is first run on a tiny model, so that code which is
loaded once (forward derivatives, scipy) is not counted.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.sparse.linalg import LinearOperator, eigs

from loopinterp.dynamics import jvp, leading_eigenvalues
from loopinterp.models import Iteration, LoopedTransformer, LoopedTransformerConfig, bind

POSITIONS = 64
WAYS = ("step", "eigenvalue", "reference")


def _setting(batch: int, seed: int) -> tuple[Iteration, torch.Tensor]:
    config = LoopedTransformerConfig(
        d_model=256,
        n_heads=8,
        d_vocab=6,
        d_vocab_out=2,
        injection="input",
        initial_state="zeros",
        loop_norm=True,
    )
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randint(6, (batch, POSITIONS), generator=generator)
    iteration = bind(LoopedTransformer(config, seed=seed), inputs)
    h = iteration.h0
    with torch.no_grad():
        for _ in range(64):
            h = iteration.step(h)
    return iteration, h


def _megabytes(line: str) -> float:
    """What Linux says of this process: ``VmRSS`` now, ``VmHWM`` its peak."""
    status = Path("/proc/self/status").read_text()
    return next(float(row.split()[1]) for row in status.splitlines() if row.startswith(line)) / 1024


def _measure(way: str, batch: int, seed: int, vectors: int, products: int) -> dict[str, Any]:
    tiny = LoopedTransformerConfig(d_model=8, n_heads=2, d_vocab=6, d_vocab_out=2)
    small = bind(LoopedTransformer(tiny), torch.zeros(1, 4, dtype=torch.int64))
    leading_eigenvalues(small.step, small.h0, 1, max_vectors=6, max_products=20)
    small.step(small.h0.detach().requires_grad_()).sum().backward()
    iteration, h = _setting(batch, seed)
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before, start = _megabytes("VmRSS"), time.process_time()
    said: dict[str, Any] = {}
    if way == "step":
        iteration.step(h.detach().requires_grad_()).square().sum().backward()
    elif way == "eigenvalue":
        found = leading_eigenvalues(
            iteration.step, h, 1, tol=1e-2, max_vectors=vectors, max_products=products
        )
        said = {
            "radius": found.values.abs()[:, 0].tolist(),
            "products": found.n_products,
            "converged": found.converged[:, 0].tolist(),
        }
    else:
        each = [_arpack(iteration.select(slice(row, row + 1)), h[[row]]) for row in range(batch)]
        said = {"radius": [radius for radius, _ in each], "products": [n for _, n in each]}
    return {
        "megabytes": _megabytes("VmHWM") - before,
        "seconds": time.process_time() - start,
    } | said


def _arpack(one: Iteration, h: torch.Tensor) -> tuple[float, int]:
    """The spectral radius of one example, and the products that it took."""
    count = 0

    def product(v: np.ndarray) -> np.ndarray:
        nonlocal count
        count += 1
        tangent = torch.from_numpy(v.astype(np.float32)).reshape(h.shape)
        return jvp(one.step, h, tangent).flatten().numpy()

    operator = LinearOperator(shape=(h.numel(),) * 2, matvec=product, dtype=np.float32)  # pyright: ignore[reportCallIssue]
    loose: Any = 1e-4  # scipy's annotation says int
    value = eigs(operator, k=2, ncv=40, tol=loose, return_eigenvectors=False)
    return float(np.abs(value).max()), count


def main() -> None:
    cli = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    cli.add_argument("--batch", type=int, default=1)
    cli.add_argument("--seed", type=int, default=0)
    cli.add_argument("--vectors", type=int, default=60)
    cli.add_argument("--products", type=int, default=60)
    cli.add_argument("--way", choices=WAYS)
    given = cli.parse_args()
    options = [given.batch, given.seed, given.vectors, given.products]
    torch.set_num_threads(1)
    if given.way:
        print(json.dumps(_measure(given.way, *options)))
        return
    names = ("--batch", "--seed", "--vectors", "--products")
    flags = [word for pair in zip(names, map(str, options)) for word in pair]
    here = [sys.executable, "-m", "analyses.benchmarks.local_stability", *flags]
    said: dict[str, dict[str, Any]] = {}
    for way in WAYS:
        made = subprocess.run([*here, "--way", way], check=True, capture_output=True, text=True)
        print(way, made.stdout.strip())
        said[way] = json.loads(made.stdout)
    step, found, known = (said[way] for way in WAYS)
    away = np.abs(np.array(found["radius"]) / np.array(known["radius"]) - 1)
    print(
        f"memory of {found['megabytes'] / step['megabytes']:.1f} steps; {np.sum(away <= 0.01)} of "
        f"{given.batch} radii within 1% of ARPACK's (furthest {away.max():.1%}), "
        f"{sum(found['converged'])} with a residual under 1%, in {found['products']} products"
    )


if __name__ == "__main__":
    main()
