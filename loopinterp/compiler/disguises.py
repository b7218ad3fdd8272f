"""Disguises and near misses of a compiled model.

A disguise changes the weights so that the circuit is hidden and the behaviour kept. A near miss
runs a mutation of the program: the same answers at T(n) by another mechanism.

Each disguise returns another compiled model, whose circuit has the new places and lists the
disguises. All but :func:`add_noise`, which comes last, preserve the function up to rounding.

Example:
    >>> from loopinterp.compiler import add_noise, compile_program, distract, permute, rotate
    >>> plain = compile_program("unique_set", max_length=12)
    >>> busy = distract(plain, heads=1, neurons=4, width=3, seed=0)
    >>> hidden = rotate(permute(busy, seed=1), seed=2)
    >>> hidden.model.config.d_model - plain.model.config.d_model
    3
    >>> add_noise(hidden, relative=0.01, seed=0).circuit.disguises[1:]
    ('permuted (seed 1)', 'rotated (seed 2)', 'noise of 0.01 on the weights (seed 0)')
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
from jaxtyping import Float, Int
from pydantic import NonNegativeFloat, NonNegativeInt, PositiveInt
from torch import Tensor

from loopinterp.compiler.circuit import Circuit
from loopinterp.compiler.compiled import Compiled, compile_program, need_compiled
from loopinterp.compiler.features import FeaturePoints, StreamFeatures
from loopinterp.core.boundary import checked
from loopinterp.core.errors import InputError, need
from loopinterp.core.settings import Seed
from loopinterp.models.config import LoopedTransformerConfig
from loopinterp.models.transformer import LoopedTransformer
from loopinterp.programs import mutations
from loopinterp.programs.equivalence import SCREENED, equivalence_at, inputs_of
from loopinterp.programs.expressions import Seq
from loopinterp.programs.mutations import ALWAYS, Condition, reads_of_other_positions
from loopinterp.programs.program import LoopProgram, ProgramOffset
from loopinterp.programs.stock_programs import get_program
from loopinterp.tasks.task import IGNORE, Batch
from loopinterp.tasks.task_registry import get_task

NOISE = "noise"  # what the record of :func:`add_noise` begins with
Weights = dict[str, "Tensor"]


@checked
def rotate(compiled: Compiled, *, seed: Seed) -> Compiled:
    r"""Rotate the residual stream by a random orthogonal matrix Q: h' = Q h.

    Weights that read the stream are multiplied by :math:`Q^\top` from the right, weights that
    write it by Q from the left, the recall by both.
    """
    plain = weights_of(compiled)
    # [d_model, d_model], of the whole stream; its transpose undoes it.
    q = _random_rotation(compiled.model.config.d_model, torch.Generator().manual_seed(seed))
    weights = moved(plain, q, q.mT)
    return rebuilt(compiled, weights, compiled.circuit.moved(q, q.mT), f"rotated (seed {seed})")


@checked
def permute(compiled: Compiled, *, seed: Seed) -> Compiled:
    r"""Shuffle the heads and neurons of every layer, and rotate inside every head.

    Queries and keys of a head are multiplied by a random orthogonal matrix A, :math:`(A
    q)^\top (A k) = q^\top k`, and its values by another, which the output weights undo.
    """
    g, weights = torch.Generator().manual_seed(seed), weights_of(compiled)
    config = compiled.model.config
    heads, neurons = {}, {}
    for section, layer, prefix in layers(config):
        head_order = torch.randperm(config.n_heads, generator=g)
        neuron_order = torch.randperm(config.mlp_width, generator=g)
        # [3, head, d_head, d_model], [3, head, d_head], [d_model, head, d_head]
        names = [f"{prefix}attn.{name}" for name in ("qkv.weight", "qkv.bias", "out.weight")]
        qkv, bias, out = (by_head(weights, name, config.n_heads) for name in names)
        for head in range(config.n_heads):
            scores, values = (_random_rotation(config.head_width, g) for _ in range(2))
            for which, turn in enumerate((scores, scores, values)):
                qkv[which, head] = turn @ qkv[which, head]
                bias[which, head] = turn @ bias[which, head]
            out[:, head] = out[:, head] @ values.mT
        for name, by_heads in zip(names, (qkv, bias, out)):
            weights[name] = by_heads[:, head_order].reshape(weights[name].shape)
        for name, axis in (("fc_in.weight", 0), ("fc_in.bias", 0), ("fc_out.weight", 1)):
            name = f"{prefix}mlp.{name}"
            weights[name] = weights[name].index_select(axis, neuron_order)
        # The head or neuron at order[k] becomes number k.
        heads[section, layer] = head_order.argsort().tolist()
        neurons[section, layer] = neuron_order.argsort().tolist()
    circuit = compiled.circuit.renumbered(heads, neurons)
    return rebuilt(compiled, weights, circuit, f"permuted (seed {seed})")


@checked
def distract(
    compiled: Compiled,
    *,
    heads: NonNegativeInt = 2,
    neurons: NonNegativeInt = 16,
    width: PositiveInt = 8,
    seed: Seed,
) -> Compiled:
    """Add heads and neurons to every layer that are active and change no output.

    They read the program's features and each other with random weights, and write along ``width``
    new directions of the stream, which the program does not read and the recall drops. Rotate the
    model afterwards, because zeros in the weights give the distractors away.
    """
    expected, fix = "at least one distractor in each layer", "Pass heads=1 or neurons=1."
    need(heads + neurons, "heads and neurons", expected, "0 and 0", fix)
    plain, old, circuit = weights_of(compiled), compiled.model.config, compiled.circuit
    # [new_d_model, d_model]: the old stream in the first dimensions, and zeros in the new ones.
    write = torch.eye(old.d_model + width, old.d_model, dtype=torch.float64)
    weights = moved(plain, write, write.mT)
    features, g = StreamFeatures(circuit), torch.Generator().manual_seed(seed)
    for section, layer, prefix in layers(old):
        depth = circuit.n_layers[section]
        if heads:
            rows = heads * old.head_width
            read, bias = _random_reads(3 * rows, features.at(section, 2 * layer), width, g)
            # Scores with a standard deviation of 3: attention is uneven, and depends on the input.
            read[: 2 * rows] *= 3.0**0.5
            bias[: 2 * rows] *= 3.0**0.5
            new = {f"{prefix}attn.qkv.weight": read, f"{prefix}attn.qkv.bias": bias}
            for name in new:  # new heads stand behind those of the layer
                both = by_head(weights, name, old.n_heads), by_head(new, name, heads)
                weights[name] = torch.cat(both, 1).flatten(0, 2)
            _add_writes(weights, f"{prefix}attn.out.weight", rows, width, depth, g)
        if neurons:
            here = features.at(section, 2 * layer + 1)
            for name, more in zip(("weight", "bias"), _random_reads(neurons, here, width, g)):
                name = f"{prefix}mlp.fc_in.{name}"
                weights[name] = torch.cat([weights[name], more])
            _add_writes(weights, f"{prefix}mlp.fc_out.weight", neurons, width, depth, g)
    sizes = {"d_model": old.d_model + width, "n_heads": old.n_heads + heads}
    sizes |= {"d_head": old.head_width, "d_mlp": old.mlp_width + neurons}
    disguise = f"distracted by {heads} heads and {neurons} neurons a layer along {width} directions"
    circuit = circuit.moved(write, write.mT)
    return rebuilt(compiled, weights, circuit, f"{disguise} (seed {seed})", **sizes)


def _random_reads(
    rows: int, here: FeaturePoints, width: int, g: torch.Generator
) -> tuple[Float[Tensor, "row new_d_model"], Float[Tensor, " row"]]:
    """Reads of all features of a site, with biases that put their mean at 1: few units are off."""
    spread = sum(float(x.square().sum(-1).mean()) for x in here.centred)
    # Reads of the program have a standard deviation of 1, of other distractors one of 0.5.
    size = max(spread, 1e-12) ** -0.5
    # [row, d_model] of the program's dimensions, [row, width] of the added ones.
    program = size * normal(rows, len(here.mean), g=g)
    distractors = 0.5 * width**-0.5 * normal(rows, width, g=g)
    return torch.cat([program, distractors], 1), 1.0 - program @ here.mean


def _add_writes(
    weights: Weights, name: str, columns: int, width: int, depth: int, g: torch.Generator
) -> None:
    """Add columns that write only along the new directions, in one of ``depth`` layers."""
    none = torch.zeros(len(weights[name]) - width, columns, dtype=torch.float64)
    new = (8 * columns * depth) ** -0.5 * normal(width, columns, g=g)
    weights[name] = torch.cat([weights[name], torch.cat([none, new])], 1)


@checked
def add_noise(compiled: Compiled, *, relative: NonNegativeFloat, seed: Seed) -> Compiled:
    r"""Add Gaussian noise to every entry of every weight matrix. Not exact.

    .. math:: W' = W + \epsilon, \qquad \epsilon_{ij} \sim
        \mathcal{N}(0, \sigma^2), \quad \sigma = \text{relative} \cdot \mathrm{rms}(W)

    Queries, keys and values count as three matrices. Biases stay unchanged.
    """
    g, weights = torch.Generator().manual_seed(seed), weights_of(compiled)
    for name, w in weights.items():
        if name.endswith("weight"):
            parts = w.chunk(3) if name.endswith("qkv.weight") else (w,)
            sizes = [relative * part.square().mean().sqrt() for part in parts]
            noisy = [part + size * normal(*part.shape, g=g) for part, size in zip(parts, sizes)]
            weights[name] = torch.cat(noisy)
    disguise = f"{NOISE} of {relative:g} on the weights (seed {seed})"
    return rebuilt(compiled, weights, compiled.circuit, disguise)


def weights_of(compiled: Compiled) -> Weights:
    need_compiled(compiled)
    state = compiled.model.state_dict()
    return {name: w.to("cpu", torch.float64, copy=True) for name, w in state.items()}


def rebuilt(
    compiled: Compiled, weights: Weights, circuit: Circuit, disguise: str, **changes: Any
) -> Compiled:
    """A compiled model with other weights, on the same device and in the same precision.

    ``disguise`` is added to the circuit's list; ``changes`` are fields of the configuration.
    """
    old = compiled.model
    model = LoopedTransformer(old.config.replace(**changes)).to(device=old.device, dtype=old.dtype)
    model.load_state_dict(weights)
    circuit = dataclasses.replace(circuit, disguises=(*circuit.disguises, disguise))
    return Compiled(model, circuit, compiled.program)


def layers(config: LoopedTransformerConfig) -> Iterator[tuple[str, int, str]]:
    """(section, layer, prefix of its weights) of all layers, in running order."""
    sections = (("prelude", config.n_prelude), ("block", config.n_layers), ("coda", config.n_coda))
    for section, n_layers in sections:
        for layer in range(n_layers):
            yield section, layer, f"{section}.{layer}."


def by_head(weights: Weights, name: str, n_heads: int) -> Tensor:
    """A view by head: [3, head, d_head, …], or [d_model, head, d_head] for output weights."""
    w = weights[name]
    if name.endswith("out.weight"):
        return w.view(len(w), n_heads, -1)
    return w.view(3, n_heads, -1, *w.shape[1:])


def moved(
    weights: Weights,
    write: Float[Tensor, "new_d_model d_model"],
    read: Float[Tensor, "d_model new_d_model"],
) -> Weights:
    # Linear weights are [output, input], embeddings [token, d_model].
    result = {}
    for name, w in weights.items():
        parent, kind = name.split(".")[-2:]
        if parent in ("out", "fc_out"):
            result[name] = write @ w
        elif kind == "bias":
            result[name] = w
        elif parent in ("embedding", "position_embedding"):
            result[name] = w @ write.mT
        elif parent in ("qkv", "fc_in", "unembedding"):
            result[name] = w @ read
        else:  # recall: reads the stream and writes it
            result[name] = write @ w @ read
    return result


def normal(*shape: int, g: torch.Generator) -> Tensor:
    return torch.randn(*shape, generator=g, dtype=torch.float64)


def _random_rotation(size: int, g: torch.Generator) -> Float[Tensor, "size size"]:
    """A uniformly random orthogonal matrix (Mezzadri 2007, math-ph/0609050)."""
    # The signs of R's diagonal make the decomposition unique, and so the draw even.
    q, r = torch.linalg.qr(normal(size, size, g=g))
    return q * r.diagonal().sign()


# Lengths of the inputs on which a near miss must answer as the original does
LENGTHS = (*range(1, 8), 16)
# Kinds that no intervention on whole positions separates from the original
_STORED_OTHERWISE = ("negated", "doubled")


def near_misses(
    program: LoopProgram | str, *, most: int | None = None, seed: int = 0
) -> list[LoopProgram]:
    """Mutations of a program that give its answers at T(n), and compile.

    A mutation acts everywhere or at some tokens. It starts at the first loop from which the answers
    stay right, or else once clean runs are constant. Mutations that no interchange reveals are left
    out. Some may be equivalent to the original: see :func:`~loopinterp.programs.equivalence`.

    Args:
        most: Return at most this many, of as many kinds as possible; all by default.
        seed: Seed of the tokens at which some mutations act, of the inputs, and of the choice.

    Example:
        >>> [miss.name for miss in near_misses("prefix_xor", most=1)]
        ['prefix_xor, prefix held 3 loops once settled']
    """
    kinds = near_misses_by_kind(program, most=most, seed=seed)
    return [miss for misses in kinds.values() for miss in misses]


@checked
def near_misses_by_kind(
    program: LoopProgram | str, *, most: NonNegativeInt | None = None, seed: Seed = 0
) -> dict[str, list[LoopProgram]]:
    """:func:`near_misses` by kind of mutation; kinds without any are left out."""
    original = get_program(program)
    task = get_task(original.task, **original.task_settings)
    batch = inputs_of(task, LENGTHS, 48, seed=seed)
    needed = torch.tensor([original.n_loops(n) for n in batch.n.tolist()])
    answers = _answers(original, batch, needed)

    def is_near_miss(kind: str, miss: LoopProgram) -> bool:
        try:
            if not torch.equal(_answers(miss, batch, needed), answers):
                return False
            result = equivalence_at(
                original, miss, ProgramOffset(), interventions=SCREENED, seed=seed
            )
            if result.equivalent and kind not in _STORED_OTHERWISE:
                return False
            compile_program(miss, max_length=task.n_positions(2))
        except InputError:  # it divides by 0, or takes too many values
            return False
        return True

    # Mutations act everywhere and at some tokens: when, the broadest first.
    converged = mutations.once_converged(
        original, mutations.lateness(original, batch.inputs, n_loops=int(needed.max()) + 1)
    )
    seen = batch.inputs[batch.n == max(LENGTHS), 1:].unique().tolist()
    chosen = sorted(random.Random(seed).sample(seen, max(len(seen) // 2, 1)))
    at_tokens = mutations.at_tokens(original, chosen)
    conditions = [(ALWAYS, converged), (at_tokens, converged & at_tokens)]
    by_kind: dict[str, list[tuple[Callable[[], LoopProgram], ...]]] = {}
    for kind, broadest_first in _mutations(original, conditions):
        by_kind.setdefault(kind, []).append(broadest_first)
    for same_kind in by_kind.values():
        random.Random(seed).shuffle(same_kind)
    misses: dict[str, list[LoopProgram]] = {}
    # One attempt of each kind, then another of each, and so on.
    for one_each in zip_longest(*by_kind.values(), fillvalue=()):
        for kind, broadest_first in zip(by_kind, one_each):
            if sum(map(len, misses.values())) == most:
                return misses
            mutated = (mutate() for mutate in broadest_first)
            miss = next((miss for miss in mutated if is_near_miss(kind, miss)), None)
            if miss is not None:
                misses.setdefault(kind, []).append(miss)
    return misses


def _answers(
    program: LoopProgram, batch: Batch, needed: Int[Tensor, " batch"]
) -> Int[Tensor, "batch pos"]:
    outputs = program.trace(batch.inputs, int(needed.max())).outputs  # [loop, batch, pos]
    at_end = outputs[needed, torch.arange(len(batch))]
    return torch.where(batch.targets == IGNORE, IGNORE, at_end)


def _mutations(
    program: LoopProgram, conditions: list[tuple[Condition, Condition]]
) -> Iterator[tuple[str, tuple[Callable[[], LoopProgram], ...]]]:
    reads = reads_of_other_positions(program)
    for kind, mutated in _conditional(program, reads):
        for broadest_first in conditions:
            yield kind, tuple(partial(mutated, when) for when in broadest_first)
    for name in program.prepare:
        yield "negated", (partial(mutations.negated, program, name),)
    for name in program.step:
        yield "doubled", (partial(mutations.doubled, program, name),)
        if name in program.finish.variables:
            larger = partial(mutations.answers_by_the_larger, program, name)
            yield "answers by the larger", (larger,)
    for read in reads:
        for trust in ("copy", "larger", "smaller"):
            copied = partial(mutations.read_from_a_copy, program, read, trust=trust)
            yield "read from a copy", (copied,)
    yield "faster", (partial(mutations.several_steps, program, 3, ALWAYS),)
    yield "answers ahead", (partial(mutations.answers_ahead, program),)


def _conditional(
    program: LoopProgram, reads: list[Seq]
) -> Iterator[tuple[str, Callable[[Condition], LoopProgram]]]:
    read_by_others = {name for read in reads for name in read.variables}
    for name in program.step:
        altered = partial(mutations.altered, program, name)
        for loops in (2, 3):
            yield "held", partial(mutations.held, program, name, loops=loops)
        yield "held for ever", partial(altered, how="held for ever")
        yield "one-sided", partial(altered, how="only grows")
        yield "one-sided", partial(altered, how="only falls")
        yield "delayed", partial(mutations.delayed, program, name)
        yield "forgetting", partial(altered, how="forgotten")
        if name in read_by_others:
            yield "old value read", partial(mutations.reading_old, program, name)
            yield "out of phase", partial(mutations.held_out_of_phase, program, name)
            yield "second change", partial(mutations.forgotten_the_second_time, program, name)
        if mutations.keep_choice(program, name) is not None:
            for loops in (1, 2):
                shorter = partial(mutations.kept_shorter, program, name, loops=loops)
                yield "kept shorter", shorter
    for name in program.prepare:
        if name not in program.step:
            yield "recomputed", partial(mutations.recomputed, program, name)
    for read in reads:
        before = partial(mutations.worked_out_from_before, program, read)
        yield "worked out from before", before
    yield "faster", partial(mutations.several_steps, program, 2)
    yield "slower", partial(mutations.every_other_loop, program)
