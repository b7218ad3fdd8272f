"""Looped transformers trained to run a program, with each variable in a place chosen before.

Compiled models have weights that nobody would learn. Here the weights are learnt, and what is known
of a compiled model is known of them too, as far as variables go: where each is kept, and that
nothing else counts. Which heads and neurons compute them is left to the training.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from loopinterp.errors import InputError, check_integer
from loopinterp.models import Iteration, LoopedTransformer, LoopedTransformerConfig, bind
from loopinterp.models.recorded_gradients import recording_gradients
from loopinterp.progress import track
from loopinterp.rasp.compiler.circuit import Circuit, Directions, FeatureNode
from loopinterp.rasp.compiler.compiled import Compiled
from loopinterp.rasp.language import UNKNOWN
from loopinterp.rasp.program_registry import get_program
from loopinterp.tasks.task_registry import get_task

if TYPE_CHECKING:
    from jaxtyping import Float, Int
    from torch import Tensor

    from loopinterp.rasp.program import LoopProgram
    from loopinterp.rasp.trace import Trace
    from loopinterp.tasks.task import Task

TRAINED = "trained"

_FURTHER = 2
"""Loops beyond T(n) that a run goes on for: a program's answers hold."""

_BATCH, _EXAMPLES = 64, 2048
_NOISE = 0.2
_RATE, _WARM_UP = 2e-3, 100


def train_to_circuit(
    program: LoopProgram | str,
    *,
    n: int = 6,
    steps: int = 3000,
    d_model: int = 64,
    seed: int = 0,
) -> Compiled:
    r"""Train a looped transformer to run a program with its variables where they are put.

    Each variable is given a subspace of its own in the state, of as many dimensions as it has
    values and in a random direction. The loss is the cross-entropy of the program's answers after
    every loop, as the model runs by itself and, counted twice, after exchanges that the program
    makes as well:

    * of the subspace of each variable, at positions drawn for each, between inputs and loops, each
      of its values as often as the others;
    * of whole states, likewise, between positions of one token;
    * of all but the variables' subspaces, between positions of one token. It must not count.

    Noise of a fifth of the state's spread, after every loop, keeps values apart. What they look
    like in their subspace, and how they are computed, is not said.

    Args:
        program: A program that reads the position itself and its left neighbour, or its name: the
            model's heads see no more.
        n: Longest problems of the training.
        steps: Batches of 64.
        d_model: Width of the state.
        seed: Of weights, subspaces and batches.

    Returns:
        The model, and its circuit: each variable with its subspace, no heads, neurons and edges.
        The directions of values are those of least squares: they need not tell all values apart.

    Raises:
        InputError: A number out of range, or more values than dimensions.

    Source: strict interchange intervention training (arXiv 2407.14494), on states between loops.
    """
    program = get_program(program)
    task = get_task(program.task, **program.task_settings)
    check_integer("n", n, least=1)
    check_integer("steps", steps, least=1)
    check_integer("d_model", d_model, least=8)
    generator = torch.Generator().manual_seed(seed)
    places = _places(program, task, n, d_model, generator)
    model = _model(program, task, d_model, seed)
    optimiser = torch.optim.AdamW(model.parameters(), lr=_RATE)
    rate = torch.optim.lr_scheduler.SequentialLR(
        optimiser,
        [
            torch.optim.lr_scheduler.LinearLR(optimiser, 0.01, 1.0, _WARM_UP),
            torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, max(steps - _WARM_UP, 1), 1e-4),
        ],
        [_WARM_UP],
    )
    for _ in track(range(steps), "step"):
        optimiser.zero_grad()
        with recording_gradients():
            _loss(model, program, task, places, n, generator).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        rate.step()
    model.eval().requires_grad_(False)
    return Compiled(model, _circuit(model, program, task, places, n, generator), program)


@dataclass(frozen=True)
class _Places:
    """Where variables are put: orthonormal rows ``[dimension, d_model]`` and values of each."""

    rows: dict[str, Tensor]
    values: dict[str, tuple[int, ...]]
    rest: Tensor

    def exchanged(self, h: Tensor, source: Tensor, rows: Tensor, where: Tensor) -> Tensor:
        """States with the part of others in a subspace, at some positions."""
        return h + where[..., None] * ((source - h) @ rows.mT @ rows)


def _places(
    program: LoopProgram, task: Task, n: int, d_model: int, generator: torch.Generator
) -> _Places:
    trace = _trace(program, task, n, generator)
    values = {name: tuple(of.unique().tolist()) for name, of in trace.variables.items()}
    sizes = [max(len(of), 2) for of in values.values()]
    if sum(sizes) > d_model // 2:
        raise InputError(
            "d_model",
            expected=f"at least {2 * sum(sizes)}, twice the values of all variables",
            given=str(d_model),
            fix="Pass a wider d_model, or a program of fewer values.",
        )
    square = torch.randn(d_model, d_model, generator=generator, dtype=torch.float64)
    *rows, rest = torch.linalg.qr(square).Q.float().split([*sizes, d_model - sum(sizes)])
    return _Places(dict(zip(values, rows)), values, rest)


def _trace(program: LoopProgram, task: Task, n: int, generator: torch.Generator) -> Trace:
    inputs = task.sample(torch.full((_EXAMPLES,), n), generator=generator).inputs
    return program.trace(inputs, program.n_loops(n) + _FURTHER)


def _model(program: LoopProgram, task: Task, d_model: int, seed: int) -> LoopedTransformer:
    config = LoopedTransformerConfig(
        d_model=d_model,
        n_heads=4,
        d_mlp=2 * d_model,
        d_vocab=len(program.inputs),
        d_vocab_out=task.d_vocab_out,
        n_coda=1,
        attention_window=1,
        positions="relative",
        relative_window=1,
        loop_norm=True,
        injection="input",
        initial_state="embedding",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LoopedTransformer(config)


def _loss(
    model: LoopedTransformer,
    program: LoopProgram,
    task: Task,
    places: _Places,
    longest: int,
    generator: torch.Generator,
) -> Tensor:
    def drawn(high: int) -> int:
        return int(torch.randint(high, (), generator=generator))

    # Lengths are mixed, so that what is padding in one input stands beside another's end.
    n = torch.randint(1, longest + 1, (_BATCH,), generator=generator)
    inputs = task.sample(n, generator=generator).inputs
    n_loops = program.n_loops(int(n.max())) + _FURTHER
    trace, run = program.trace(inputs, n_loops), bind(model, inputs)
    states = torch.stack([*_noisy(run, run.h0, n_loops, generator)])
    loop = drawn(n_loops)
    h, said = states[loop], {name: of[loop] for name, of in trace.variables.items()}
    together = torch.rand(_BATCH, 1, generator=generator, dtype=torch.float32) < 0.3
    for name, rows in places.rows.items():
        of = trace.variables[name]
        found = _balanced(of[None], generator)
        where = torch.rand(inputs.shape, generator=generator, dtype=torch.float32) < 0.4
        where &= (torch.rand(_BATCH, 1, generator=generator, dtype=torch.float32) < 0.7) & ~together
        h = places.exchanged(h, _at(states, found), rows, where)
        said[name] = _at(of, found).where(where, said[name])
    at, other = drawn(n_loops + 1), torch.randperm(_BATCH, generator=generator)
    where = torch.rand(inputs.shape, generator=generator, dtype=torch.float32) < 0.5
    where &= (inputs == inputs[other]) & ~together
    h = places.exchanged(h, states[at, other], places.rest, where)
    found = _balanced(torch.stack([*trace.variables.values()]), generator)
    where = (torch.rand(inputs.shape, generator=generator, dtype=torch.float32) < 0.8) & together
    where &= _at(inputs.expand(n_loops + 1, -1, -1), found) == inputs
    h = _at(states, found).where(where[..., None], h)
    said = {k: _at(trace.variables[k], found).where(where, of) for k, of in said.items()}
    after = program.run(inputs, n_loops=n_loops - loop, variables=said)
    changed = torch.stack([h, *(h := run.step(h) for _ in range(n_loops - loop))])
    own = _cross_entropy(model.readout(states.flatten(0, 1)), trace.outputs)
    return own + 2 * _cross_entropy(model.readout(changed.flatten(0, 1)), after.outputs)


def _balanced(
    values: Int[Tensor, "variable loop batch pos"], generator: torch.Generator
) -> Int[Tensor, "batch pos"]:
    """Which of all loops and inputs to take, for each position, with all values as often as others.

    The values of a count that runs now and then are rare, and what is rare is not learnt.
    """
    n_batch = values.shape[2]
    each = values.flatten(1, 2)
    kinds = each.flatten(1).unique(dim=1)
    same = (each[..., None] == kinds[:, None, None]).all(0)
    weight = (same / same.sum(0).clamp(min=1)).sum(-1)
    return torch.multinomial(weight.T, n_batch, replacement=True, generator=generator).T


def _at(of: Tensor, found: Int[Tensor, "batch pos"]) -> Tensor:
    """What is at given loops and inputs, counted as one, at each position."""
    return of.flatten(0, 1)[found, torch.arange(found.shape[1])]


def _noisy(
    run: Iteration, h: Tensor, n_loops: int, generator: torch.Generator
) -> Iterator[Float[Tensor, "batch pos d_model"]]:
    yield h
    for _ in range(n_loops):
        h = run.step(h)
        noise = torch.randn(h.shape, generator=generator, dtype=torch.float32)
        h = h + _NOISE * h.detach().std(-1, keepdim=True) * noise
        yield h


def _cross_entropy(logits: Tensor, answers: Int[Tensor, "loop batch pos"]) -> Tensor:
    right = answers.flatten()
    return F.cross_entropy(logits.flatten(0, 1), right, ignore_index=UNKNOWN)


def _circuit(
    model: LoopedTransformer,
    program: LoopProgram,
    task: Task,
    places: _Places,
    n: int,
    generator: torch.Generator,
) -> Circuit:
    """Variables with the directions that their values have come to have."""
    inputs = task.sample(torch.full((_EXAMPLES,), n), generator=generator).inputs
    n_loops = program.n_loops(n) + _FURTHER
    trace = program.trace(inputs, n_loops)
    with torch.no_grad():
        states = torch.stack([h for _, h in bind(model, inputs).run(n_loops)])
    directions, features = {}, []
    for name, rows in places.rows.items():
        values = places.values[name]
        there = (states @ rows.mT).flatten(0, 2).double()
        one_hot = (trace.variables[name].flatten()[:, None] == torch.tensor(values)).double()
        read = torch.linalg.pinv(there) @ one_hot
        write = torch.linalg.pinv(read)
        own = [(of.to(rows) @ rows).contiguous() for of in (write, read.mT)]
        directions[name] = Directions(write=own[0], read=own[1])
        features.append(FeatureNode(name, name, "variable", "block", 0, -1, values))
    return Circuit(
        program=program.name,
        inputs=program.inputs,
        max_length=task.n_positions(n),
        n_layers={"prelude": 0, "block": 1, "coda": 1},
        features=tuple(features),
        heads=(),
        neurons=(),
        edges=(),
        directions=directions,
        disguises=(TRAINED,),
    )
