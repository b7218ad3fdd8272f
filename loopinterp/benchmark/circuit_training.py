"""Looped transformers trained to run a program, with each variable in a given subspace."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
import torch.nn.functional as F
from jaxtyping import Int
from pydantic import Field, PositiveInt
from torch import Tensor

from loopinterp.compiler.circuit import Circuit, Directions, FeatureNode
from loopinterp.compiler.compiled import Compiled
from loopinterp.core.boundary import checked
from loopinterp.core.errors import need
from loopinterp.core.settings import Seed
from loopinterp.core.text import track
from loopinterp.models import LoopedTransformer, LoopedTransformerConfig, bind
from loopinterp.models.taps import recording_gradients
from loopinterp.programs.language import UNKNOWN
from loopinterp.programs.paired_runs import numbered
from loopinterp.programs.program import LoopProgram
from loopinterp.programs.stock_programs import get_program
from loopinterp.tasks.task import Task
from loopinterp.tasks.task_registry import get_task

TRAINED = "trained"
_EXTRA_LOOPS = 2  # beyond T(n), where a program's answers hold
_BATCH, _EXAMPLES = 64, 2048
_RATE, _WARM_UP = 2e-3, 100


@checked
def train_to_circuit(
    program: LoopProgram | str,
    *,
    n: PositiveInt = 6,
    steps: PositiveInt = 3000,
    d_model: Annotated[int, Field(ge=8)] = 64,
    seed: Seed = 0,
) -> Compiled:
    """Train a looped transformer to run a program with its variables in given subspaces.

    Each variable has a random subspace of the state, one dimension for each value. The loss is the
    cross-entropy of the program's answers after every loop, in the clean run and, with twice the
    weight, after interchanges that the program makes too:

    * of each variable's subspace, at random positions, between inputs and loops, each value equally
      often;
    * of whole states, likewise, between positions with one token;
    * of all directions outside the variables', between positions with one token; this must change
      nothing.

    Noise of a fifth of the state's spread, after every loop, keeps values separable.

    Args:
        program: A program that reads only a position and its left neighbour.
        n: Longest problems in training.
        steps: Batches of 64.
        seed: Seed of subspaces and batches; initial weights are always the same.

    Returns:
        The model and its circuit: the subspace of each variable, no heads, neurons or edges.
        Directions of values are a least-squares fit, and may fail to separate some values.

    Source: strict interchange intervention training (arXiv 2407.14494), on states between loops.
    """
    program = get_program(program)
    task = get_task(program.task, **program.task_settings)
    generator = torch.Generator().manual_seed(seed)
    subspaces = _Subspaces.draw(program, task, n, d_model, generator)
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
    model = LoopedTransformer(config)
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
            _loss(model, program, task, subspaces, n, generator).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        rate.step()
    model.eval().requires_grad_(False)
    return Compiled(model, _circuit(model, program, task, subspaces, n, generator), program)


@dataclass(frozen=True)
class _Subspaces:
    """Orthonormal rows and values of each variable, and all other rows."""

    rows: dict[str, Tensor]
    values: dict[str, tuple[int, ...]]
    rest: Tensor

    @classmethod
    def draw(
        cls, program: LoopProgram, task: Task, n: int, d_model: int, generator: torch.Generator
    ) -> _Subspaces:
        inputs = task.sample(torch.full((_EXAMPLES,), n), generator=generator).inputs
        trace = program.trace(inputs, program.n_loops(n) + _EXTRA_LOOPS)
        values = {name: tuple(x.unique().tolist()) for name, x in trace.variables.items()}
        sizes = [max(len(x), 2) for x in values.values()]
        expected = f"at least {2 * sum(sizes)}, twice the values of all variables"
        fix = "Pass a wider d_model, or a program of fewer values."
        need(sum(sizes) <= d_model // 2, "d_model", expected, str(d_model), fix)
        square = torch.randn(d_model, d_model, generator=generator, dtype=torch.float64)
        # Orthonormal rows [value, d_model] for each variable; the rest spans what no variable uses.
        *rows, rest = torch.linalg.qr(square).Q.float().split([*sizes, d_model - sum(sizes)])
        return cls(dict(zip(values, rows)), values, rest)


def _loss(
    model: LoopedTransformer,
    program: LoopProgram,
    task: Task,
    subspaces: _Subspaces,
    longest: int,
    generator: torch.Generator,
) -> Tensor:
    def rand(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator, dtype=torch.float32)

    # Lengths are mixed, so that padding of one input is beside the end of another.
    n = torch.randint(1, longest + 1, (_BATCH,), generator=generator)
    inputs = task.sample(n, generator=generator).inputs
    n_loops = program.n_loops(int(n.max())) + _EXTRA_LOOPS
    trace, run = program.trace(inputs, n_loops), bind(model, inputs)
    clean = [run.h0]
    for _ in range(n_loops):
        h = run.step(clean[-1])
        # Noise of a fifth of the spread of the features at each position.
        noise = torch.randn(h.shape, generator=generator, dtype=torch.float32)
        clean.append(h + 0.2 * h.detach().std(-1, keepdim=True) * noise)
    states = torch.stack(clean)  # [loop, batch, pos, d_model]
    loop = int(torch.randint(n_loops, (), generator=generator))
    h, values = states[loop], {name: x[loop] for name, x in trace.variables.items()}
    whole_state = rand(_BATCH, 1) < 0.3  # inputs that get an interchange of whole states alone
    # Interchanges of the subspace of each variable, from any input and loop.
    for name, rows in subspaces.rows.items():
        variable = trace.variables[name]
        source = _balanced(variable[None], generator)
        where = rand(*inputs.shape) < 0.4
        where &= (rand(_BATCH, 1) < 0.7) & ~whole_state
        h = _interchange(h, _at(states, source), rows, where)
        values[name] = _at(variable, source).where(where, values[name])
    # Of all other directions, between equal tokens.
    source_loop = int(torch.randint(n_loops + 1, (), generator=generator))
    other = torch.randperm(_BATCH, generator=generator)
    where = rand(*inputs.shape) < 0.5
    where &= (inputs == inputs[other]) & ~whole_state
    h = _interchange(h, states[source_loop, other], subspaces.rest, where)
    # Of whole states, between equal tokens.
    source = _balanced(torch.stack([*trace.variables.values()]), generator)
    where = (rand(*inputs.shape) < 0.8) & whole_state
    where &= _at(inputs.expand(n_loops + 1, -1, -1), source) == inputs
    h = _at(states, source).where(where[..., None], h)
    values = {k: _at(trace.variables[k], source).where(where, x) for k, x in values.items()}
    after = program.run(inputs, n_loops=n_loops - loop, variables=values)
    # The run that goes on from the changed state, [loop, batch, pos, d_model].
    changed = torch.stack([h, *(h := run.step(h) for _ in range(n_loops - loop))])
    clean_loss = _cross_entropy(model.readout(states.flatten(0, 1)), trace.outputs)
    return clean_loss + 2 * _cross_entropy(model.readout(changed.flatten(0, 1)), after.outputs)


def _interchange(h: Tensor, source: Tensor, rows: Tensor, where: Tensor) -> Tensor:
    # rows [rank, d_model] are orthonormal, so that rows.T rows projects on the subspace.
    return h + where[..., None] * ((source - h) @ rows.mT @ rows)


def _balanced(
    values: Int[Tensor, "variable loop batch pos"], generator: torch.Generator
) -> Int[Tensor, "batch pos"]:
    """Sources (loop and input as one index) for each position, all values equally often."""
    n_batch = values.shape[2]
    by_source = values.flatten(1, 2)
    states = by_source.flatten(1)
    kinds = states[:, numbered(states)[1]]  # [variable, kind]
    # Whether each source has each combination of values, [source, pos, kind].
    same = (by_source[..., None] == kinds[:, None, None]).all(0)
    weight = (same / same.sum(0).clamp(min=1)).sum(-1)
    # weight [source, pos]: a source counts as 1 over the number that share its values.
    return torch.multinomial(weight.T, n_batch, replacement=True, generator=generator).T


def _at(values: Tensor, source: Int[Tensor, "batch pos"]) -> Tensor:
    return values.flatten(0, 1)[source, torch.arange(source.shape[1])]


def _cross_entropy(logits: Tensor, answers: Int[Tensor, "loop batch pos"]) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), answers.flatten(), ignore_index=UNKNOWN)


def _circuit(
    model: LoopedTransformer,
    program: LoopProgram,
    task: Task,
    subspaces: _Subspaces,
    n: int,
    generator: torch.Generator,
) -> Circuit:
    inputs = task.sample(torch.full((_EXAMPLES,), n), generator=generator).inputs
    n_loops = program.n_loops(n) + _EXTRA_LOOPS
    trace = program.trace(inputs, n_loops)
    with torch.no_grad():
        states = torch.stack([h for _, h in bind(model, inputs).run(n_loops)])
    directions, features = {}, []
    for name, rows in subspaces.rows.items():
        values = subspaces.values[name]
        # Coordinates in the subspace [place, dimension] and one-hot values [place, value].
        coordinates = (states @ rows.mT).flatten(0, 2).double()
        one_hot = (trace.variables[name].flatten()[:, None] == torch.tensor(values)).double()
        read = torch.linalg.pinv(coordinates) @ one_hot
        write = torch.linalg.pinv(read)  # [value, dimension]
        # Back from the subspace to the stream, [value, d_model].
        pair = [(x.to(rows) @ rows).contiguous() for x in (write, read.mT)]
        directions[name] = Directions(write=pair[0], read=pair[1])
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
