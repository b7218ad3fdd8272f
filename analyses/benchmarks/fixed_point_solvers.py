"""Evaluations of the map that fixed-point solvers need, beside torchdeq's, at one tolerance.

    python -m analyses.benchmarks.fixed_point_solvers
    python -m analyses.benchmarks.fixed_point_solvers --peer-python ../torchdeq/bin/python

Synthetic problems in float64, so that rounding does not decide, and two trained models in float32,
each as a batch of eight examples. What is counted are calls of the map until every example has a
relative residual under the tolerance, as torchdeq counts it: ``|f(x) - x| / |f(x)|``. A
Jacobian-vector product counts as a call. torchdeq's Anderson and Broyden run with its own settings
and no limit of memory, on the same maps and starting points, in the Python that has it (which needs
loopinterp as well, installed or on its path). The state that ours give back is measured again,
outside the count.

``--moved N`` solves each problem from N more starts, moved by a few roundings on each number, and
says the least, the median and the largest count of all: where they differ, rounding decides.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from loopinterp.dynamics import FixedPoint, find_fixed_point, list_solvers
from loopinterp.models import bind
from loopinterp.zoo import pretrained_run

Problem = tuple[Callable[[Tensor], Tensor], Tensor]
PEERS = ("anderson", "broyden")
EXAMPLES = 8


def _random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _scaled(matrix: Tensor, radius: float) -> Tensor:
    return matrix * radius / torch.linalg.eigvals(matrix).abs().max()


def _linear(matrix: Tensor) -> Problem:
    size = len(matrix)
    offset = _random(EXAMPLES, size, seed=1)
    return lambda x: x @ matrix.T + offset, torch.zeros_like(offset)


def linear_contraction() -> Problem:
    """A dense random linear map of 200 dimensions with spectral radius 0.95."""
    return _linear(_scaled(_random(200, 200, seed=0), 0.95))


def tanh_network(size: int = 200, radius: float = 0.9, seed: int = 2) -> Problem:
    """``tanh(W x + b)``; the radius is that of W."""
    linear, start = _linear(_scaled(_random(size, size, seed=seed), radius))
    return lambda x: torch.tanh(linear(x)), start


def non_normal_map() -> Problem:
    """Rotations of radius 0.5 to 0.9 in 50 planes, each driving the next five times as hard."""
    radii, angles = torch.linspace(0.5, 0.9, 50).double(), torch.linspace(0, 3, 50).double()
    c, s = radii * angles.cos(), radii * angles.sin()
    turns = torch.stack([torch.stack([c, -s], 1), torch.stack([s, c], 1)], 1)
    matrix = torch.block_diag(*turns)
    rows = torch.arange(98)
    matrix[rows, rows + 2] = 0.5
    return _linear(matrix)


def nearly_singular_map(size: int = 100, seed: int = 3) -> Problem:
    """A symmetric map, eigenvalues from -0.5 to 0.999."""
    basis = torch.linalg.qr(_random(size, size, seed=seed))[0]
    values = torch.cat([torch.linspace(-0.5, 0.95, size - 1), torch.tensor([0.999])]).double()
    return _linear(basis @ torch.diag(values) @ basis.T)


def trained_model(name: str, n: int = 24) -> Problem:
    """One loop of a model of the zoo, from its initial state, on problems of length n."""
    run = pretrained_run(name)
    task = run.task
    batch = task.sample(n, batch_size=EXAMPLES, generator=torch.Generator().manual_seed(0))
    iteration = bind(run.model().eval(), batch.inputs)
    return iteration.step, iteration.h0


PROBLEMS: dict[str, Callable[[], Problem]] = {
    "linear contraction": linear_contraction,
    "tanh network": tanh_network,
    "addition, 24 bits": lambda: trained_model("addition"),
    "prefix sums, 24 bits": lambda: trained_model("prefix_sum"),
    "non-normal linear map": non_normal_map,
    "nearly singular map": nearly_singular_map,
    # Of another size and seed than those that settings were ever looked at on.
    "larger nearly singular map": lambda: nearly_singular_map(size=160, seed=11),
    "larger tanh network": lambda: tanh_network(size=300, radius=0.98, seed=12),
}


class Counted:
    """A map that knows how often it was called."""

    def __init__(self, f: Callable[[Tensor], Tensor]) -> None:
        self.f, self.calls = f, 0

    def __call__(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.f(x)


def ours(problem: Problem, solver: str, tol: float, most: int) -> dict[str, Any]:
    """Evaluations of one of our solvers, and the largest residual at the state given back."""
    f, x0 = problem
    found: FixedPoint = find_fixed_point(
        f, x0, tol, most, solver=solver, atol=1e-30, patience=None, divergence=1e30
    )
    calls = int(found.evaluations.max())
    return {"evaluations": calls, "residual": _residual(f, found.state)}


def theirs(problem: Problem, solver: str, tol: float, most: int) -> dict[str, Any]:
    """The same of torchdeq's solver of that name."""
    from torchdeq.solver import get_solver  # pyright: ignore[reportMissingImports]

    f, x0 = Counted(problem[0]), problem[1]
    settings = {"max_iter": most, "tol": tol, "stop_mode": "rel"}
    _, _, info = get_solver(solver)(f, x0, **settings)
    # Each example counts until it was first under the tolerance, though the batch goes on until
    # all are at once. Before the first entry that is one of the solver: f(x0), and f of that.
    trace = info["rel_trace"][:, 1:]
    first = (trace <= tol).to(torch.int64).argmax(dim=1) + 1
    calls = int(first.max()) + (2 if solver == "anderson" else 1)
    lowest = float(trace.min(dim=1).values.max())
    return {"evaluations": calls if lowest <= tol else f.calls, "residual": lowest}


def _residual(f: Callable[[Tensor], Tensor], x: Tensor) -> float:
    image = f(x).flatten(1).double()
    gap = (image - x.flatten(1).double()).norm(dim=1)
    return float((gap / image.norm(dim=1)).max())


def _moved(x0: Tensor, seed: int) -> Tensor:
    """A start as good as the given one: some four roundings of a number of size 1 away from it."""
    return x0 + 4 * torch.finfo(x0.dtype).eps * _random(*x0.shape, seed=seed).to(x0)


def measure(
    solve: Callable[..., dict[str, Any]],
    solvers: tuple[str, ...],
    tol: float,
    most: int,
    moved: int = 0,
) -> dict[str, dict[str, Any]]:
    """Evaluations and residual by problem and solver, and the evaluations from moved starts."""
    found: dict[str, dict[str, Any]] = {}
    with torch.no_grad():
        for name, make in PROBLEMS.items():
            f, x0 = make()
            starts = [(f, _moved(x0, seed)) for seed in range(moved)]
            found[name] = {
                s: solve((f, x0), s, tol, most)
                | {"moved": [solve(start, s, tol, most)["evaluations"] for start in starts]}
                for s in solvers
            }
    return found


def show(tables: dict[str, dict[str, dict[str, Any]]], tol: float) -> None:
    """A table in markdown: evaluations, in brackets where the tolerance was not reached.

    Behind them, least / median / largest of all starts where there are several.
    """
    solvers = [(who, name) for who, rows in tables.items() for name in next(iter(rows.values()))]
    print("| problem |", " | ".join(f"{name} ({who})" for who, name in solvers), "|")
    print("|---|" + "---|" * len(solvers))
    for problem in PROBLEMS:
        cells = [tables[who][problem][name] for who, name in solvers]
        print(f"| {problem} |", " | ".join(_cell(c, tol) for c in cells), "|")


def _cell(found: dict[str, Any], tol: float) -> str:
    calls = found["evaluations"]
    if found["residual"] > tol:
        return f"({calls}: {found['residual']:.1g})"
    starts = [calls, *found["moved"]]
    spread = f": {min(starts)} / {median(starts):g} / {max(starts)}" if found["moved"] else ""
    return f"{calls}{spread}"


def main() -> None:
    cli = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    cli.add_argument("--tol", type=float, default=1e-5)
    cli.add_argument("--most", type=int, default=1000, help="steps after which a solver gives up")
    cli.add_argument("--moved", type=int, default=0, help="further starts, moved by roundings")
    cli.add_argument("--peer-python", type=Path, help="the Python that has torchdeq")
    cli.add_argument("--json", type=Path, help="also write the numbers to this file")
    cli.add_argument("--peer", action="store_true", help="print torchdeq's numbers alone, as JSON")
    options = cli.parse_args()
    torch.set_num_threads(1)
    if options.peer:
        print(json.dumps(measure(theirs, PEERS, options.tol, options.most, options.moved)))
        return
    solvers = tuple(list_solvers())
    tables = {"ours": measure(ours, solvers, options.tol, options.most, options.moved)}
    if options.peer_python:
        command = [str(options.peer_python), "-m", "analyses.benchmarks.fixed_point_solvers"]
        command += ["--peer", "--tol", str(options.tol), "--most", str(options.most)]
        command += ["--moved", str(options.moved)]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        tables["torchdeq"] = json.loads(done.stdout.splitlines()[-1])
    show(tables, options.tol)
    if options.json:
        options.json.write_text(json.dumps(tables, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
