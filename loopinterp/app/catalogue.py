"""The studies of ``loopinterp analyze``: question, data, and when each is skipped.

``analyze``, the reader of saved results, the report and the conformance tests use this list.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from loopinterp import (
    benchmark,
    comparison,
    compiler,
    decompiler,
    dynamics,
    interventions,
    lenses,
    models,
    pages,
    probing,
    programs,
    tasks,
)
from loopinterp.app.study import STUDIES as STUDIES
from loopinterp.app.study import Skip, SkipReason, register_study
from loopinterp.core.errors import CheckpointError, InputError
from loopinterp.core.results import register_kind

if TYPE_CHECKING:
    from loopinterp.app.session import Session
    from loopinterp.core.results import Result
    from loopinterp.tasks import Addition, Batch

# Kinds of result that no study of ``analyze`` makes.
register_kind("activation-patching", "loopinterp.interventions.patching", "program")
register_kind("edges", "loopinterp.edges.edge_study", "program")
register_kind("evaluation", "loopinterp.training.evaluation", "generalisation")
register_kind("false-names", "loopinterp.benchmark.ground_truth", "ground-truth")
register_kind("features", "loopinterp.features.feature_study", "program")
register_kind("operand-grid", "loopinterp.training.evaluation", "generalisation")
register_kind("probes", "loopinterp.probing.probe_grid", "program")
register_kind("seed-summary", "loopinterp.training.seeds", "generalisation")
register_kind("steering", "loopinterp.interventions.steering", "program")
register_kind("sweep", "loopinterp.training.seeds", "generalisation")
register_kind("training-dynamics", "loopinterp.app.training_dynamics", "generalisation")
register_kind("variable-interchange", "loopinterp.comparison.variable_interchange", "program")


def _readable_length(session: Session, longest: int, positions: int) -> int | None:
    """The greatest length up to ``longest`` whose inputs have at most so many positions."""
    fits = (n for n in range(longest, 1, -1) if session.task.n_positions(n) <= positions)
    return next(fits, None)


@register_study(
    "explorer", "loopinterp.pages.exploration", "explorer", kind="exploration", loops=False
)
def _explorer(session: Session) -> Result:
    """What does the model answer after each loop, on a few inputs?"""
    # One length that can be read, and one at which there is something to be seen.
    readable = _readable_length(session, 8, 16) or 1
    lengths = sorted({session.length(n) for n in (readable, 4 * session.cutoff)})
    return pages.explore(
        session.model,
        [session.sample(n, 128) for n in lengths],
        programs=session.programs(),
        asks=session.task.describe(),
        explain=partial(_by_hand, session),
        seed=session.seed,
    )


def _by_hand(session: Session, example: Batch) -> str:
    from loopinterp.tasks import Addition

    if not isinstance(session.task, Addition):
        # A task of a user's own need not have words for examples.
        words = getattr(session.task, "decode", None)
        return f"The right answer: {words(example)[0]}." if words else ""
    is_asked = example.targets[0] >= 0
    numbers = (*(x[0].long() for x in session.task.operands(example)), example.targets[0])
    a, b, total = (sum(int(bit) << k for k, bit in enumerate(x[is_asked])) for x in numbers)
    fits = f", of which {int(example.n[0])} bits hold {total}" if a + b != total else ""
    return (
        f"By hand: {a} + {b} = {a + b}{fits}. At each bit from the left, count the ones among the "
        "two bits and the carry in. Two or three send a carry to the next bit. One or three make "
        "the answer 1."
    )


@register_study("convergence", "loopinterp.dynamics.convergence", "convergence")
def _convergence(session: Session) -> Result:
    """Does the state converge, and is the answer right?"""
    return dynamics.convergence_study(session.model, session.examples(4, 32), seed=session.seed)


@register_study("extrapolation", "loopinterp.dynamics.extrapolation", "convergence")
def _extrapolation(session: Session) -> Result:
    """What happens when the model runs for more loops?"""
    trained = session.n_loops(session.cutoff)
    return dynamics.extrapolation_study(
        session.model, session.examples(2, 64), n_loops=10 * trained, trained_loops=trained
    )


@register_study("lens", "loopinterp.lenses.lens_by_loop", "convergence")
def _lens(session: Session) -> Result:
    """What does the state say about the answer after each loop?"""
    from loopinterp.compiler.circuit import CIRCUIT_FILE
    from loopinterp.training.run import MODEL

    batch = session.examples(2, 64)
    n_loops = session.n_loops(int(batch.n[0]))
    expected, folder = None, session.folder / MODEL
    if (folder / CIRCUIT_FILE).is_file():  # of a compiled model the program is known
        name = compiler.Circuit.load(folder).program
        if name in programs.list_programs():
            trace = programs.get_program(name).trace(batch.inputs.cpu(), n_loops=n_loops)
            expected = trace.outputs
    options: Any = {"n_loops": n_loops, "expected": expected, "seed": session.seed}
    return lenses.lens_study(session.model, batch, lens="coda", **options)


@register_study("exits", "loopinterp.lenses.exits_by_loop", "convergence")
def _exits(session: Session) -> Result:
    """How early can each example be read, and by which stopping rule?"""
    return lenses.exit_study(session.model, session.examples(2, 128), seed=session.seed)


@register_study("reachability", "loopinterp.dynamics.reachability", "limits")
def _reachability(session: Session) -> Result:
    """Does every initial state reach one fixed point, also after a perturbation?"""
    return dynamics.reachability_study(session.model, session.examples(1, 16), seed=session.seed)


def _no_derivative(session: Session) -> Skip | None:
    import torch

    inputs = session.sample(session.length(1), 1).inputs
    iteration = models.bind(session.model, inputs).at(0)
    try:
        dynamics.vjp(iteration.step, iteration.h0, torch.ones_like(iteration.h0))
    except InputError:
        return Skip(SkipReason.NOT_DIFFERENTIABLE)
    return None


@register_study("input-dependence", "loopinterp.dynamics.input_dependence", "limits")
def _input_dependence(session: Session) -> Result:
    """Does the fixed point depend on the input, and on which tokens?"""
    # A run for each token of some of the examples, and a linear system for those of a few.
    sizes: Any = {"n_substituted": 4, "n_sensitivity": 0 if _no_derivative(session) else 2}
    batch = session.examples(1, 16)
    return dynamics.input_dependence_study(session.model, batch, **sizes, seed=session.seed)


@register_study(
    "local-stability", "loopinterp.dynamics.local_stability", "limits", skips=_no_derivative
)
def _local_stability(session: Session) -> Result:
    """Is the fixed point stable?"""
    return dynamics.local_stability_study(session.model, session.examples(1, 4), seed=session.seed)


@register_study("basins", "loopinterp.dynamics.basins", "limits")
def _basins(session: Session) -> Result:
    """Which fixed point does each initial state of a plane reach?"""
    return dynamics.basin_map(session.model, session.examples(1, 16), points=15, seed=session.seed)


@register_study("geometry", "loopinterp.dynamics.geometry", "limits")
def _geometry(session: Session) -> Result:
    """How many directions do the states span, and how do they move?"""
    return dynamics.geometry_study(session.model, session.examples(2, 32), seed=session.seed)


@register_study(
    "stabilisation",
    "loopinterp.dynamics.inside_loop",
    "attention",
    kind="attention-stabilisation",
    hooks=True,
)
def _stabilisation(session: Session) -> Result:
    """Do the heads' attention patterns stop changing?"""
    return dynamics.attention_stabilisation_study(session.model, session.examples(2, 32))


def _carry_bits(session: Session) -> int:
    return session.length(max(24, 2 * session.cutoff))


def _no_room_for_carries(session: Session) -> Skip | None:
    needed, room = 16, _carry_bits(session)  # on both sides of the front
    return Skip(SkipReason.NO_ROOM, {"needed": needed, "room": room}) if room < needed else None


def _no_wavefront(session: Session) -> Skip | None:
    import torch

    module = isinstance(session.model, torch.nn.Module)
    if not module or next(session.model.parameters(), None) is None:
        return Skip(SkipReason.NO_WEIGHTS)
    return _no_room_for_carries(session)


@register_study(
    "wavefront",
    "loopinterp.probing.carry_wavefront",
    "wavefront",
    kind="carry",
    tasks=("addition",),
    skips=_no_wavefront,
)
def _wavefront(session: Session) -> Result:
    """How far has the carry moved after each loop?"""
    n = session.length(max(24, 4 * session.cutoff))
    task = cast("Addition", session.task)
    return probing.carry_study(session.model, task, n=n, seed=session.seed)


def _cutoff_of_programs(session: Session) -> int:
    """Programs are compared on inputs of at least twice this length, if there is room."""
    return max(session.cutoff, 6)


@register_study(
    "programs",
    "loopinterp.comparison.program_comparison",
    "program",
    kind="program-comparison",
    of_programs=True,
)
def _programs(session: Session) -> Result:
    """Which program does the model run?"""
    # Twice the training cutoff, and twice that; where there is no room, half of it and all.
    short, long = (session.length(k * _cutoff_of_programs(session)) for k in (2, 4))
    lengths = [short, long] if short < long else [session.with_room(max(short // 2, 2)), short]
    batches = [session.sample(n, 512) for n in lengths]
    options: Any = {"names": [session.name], "seed": session.seed}
    known = session.programs()
    found = comparison.compare_programs(session.model, known, batches, **options)
    if found.verdict.identified:
        return found
    # Where it is no stock program, a finite-state model's own program stands beside them.
    finite = decompiler.finite_program(session.model, session.task)
    if finite is None or finite.name in known:
        return found
    return comparison.compare_programs(session.model, [*known, finite], batches, **options)


def _no_planted_carry(session: Session) -> Skip | None:
    known = session.programs()
    return _no_room_for_carries(session) if known else Skip(SkipReason.NO_BIT_PAIRS)


@register_study(
    "hold-time",
    "loopinterp.comparison.injected_carry",
    "program",
    kind="planted-carry",
    tasks=("addition",),
    skips=_no_planted_carry,
)
def _hold_time(session: Session) -> Result:
    """How long does an injected carry persist?"""
    batch = session.sample(_carry_bits(session), 128, distribution="propagate")
    names = [session.name]
    return comparison.injected_carry_study(session.model, batch, names=names, seed=session.seed)


def _closest_program(session: Session) -> str:
    file = session.own_file("programs")
    return comparison.ProgramComparison.load(file).verdict.closest


def _subspace_data(session: Session) -> tuple[Batch, comparison.SpreadPairs]:
    # Under a window only a cone is run again after an exchange, else the whole sequence.
    n_pairs = 256 if models.reach(session.model) is None else 768
    batch = session.sample(session.length(2 * _cutoff_of_programs(session)), 2048)
    return batch, comparison.SpreadPairs(pairs=n_pairs, same_value=0)


def _no_effect(session: Session) -> Skip | None:
    """Skip the search for subspaces if no interchange changes an answer."""
    from loopinterp.comparison.subspace_search import answers_moved, runs_to_fit_and_score
    from loopinterp.models.study_examples import fit_to_model

    try:
        program = programs.get_program(_closest_program(session))
    except CheckpointError:
        return None  # said once the comparison is made
    batch, pairs = _subspace_data(session)
    batch = fit_to_model(session.model, batch).to("cpu")
    # A few pairs tell most often.
    for some, drawn in ((batch[:128], replace(pairs, pairs=32)), (batch, pairs)):
        _, held_out = runs_to_fit_and_score(session.model, [some], program, drawn, session.seed)
        if bool(answers_moved(held_out).any()):
            return None
    return Skip(SkipReason.NO_EFFECT)


@register_study(
    "subspaces",
    "loopinterp.comparison.subspace_search",
    "program",
    kind="subspace-search",
    of_programs=True,
    needs="programs",
    skips=_no_effect,
)
def _subspaces(session: Session) -> Result:
    """How many directions carry the effect of an interchange? (after programs)"""
    batch, pairs = _subspace_data(session)
    options: Any = {"ranks": (1, 2, 3), "pairs": pairs, "steps": 40, "seed": session.seed}
    return comparison.search_subspaces(session.model, batch, _closest_program(session), **options)


def _not_reduced(session: Session) -> Skip | None:
    from loopinterp.models.protocol import declared

    if declared(session.model, "state_code") is not None:
        return Skip(SkipReason.STATE_CODE)
    return None if session.task.d_features is None else Skip(SkipReason.NO_TOKENS)


@register_study("reduction", "loopinterp.comparison.reduced_model", "program", skips=_not_reduced)
def _reduction(session: Session) -> Result:
    """How few numbers per position predict interchanges?"""
    lengths = sorted({session.length(k * _cutoff_of_programs(session)) for k in (1, 2)})
    batches = [session.sample(n, 256) for n in lengths]
    return comparison.reduction_study(session.model, batches, seed=session.seed)


@register_study("decodability", "loopinterp.comparison.variables", "program", of_programs=True)
def _decodability(session: Session) -> Result:
    """Which variables of the programs can be decoded?"""
    batch, known = session.examples(2, 64), session.programs()
    return comparison.decodability(session.model, batch, known, seed=session.seed)


@register_study("decompilation", "loopinterp.decompiler.decompilation_study", "program")
def _decompilation(session: Session) -> Result:
    """Which program can be read off the model, given none?"""
    from loopinterp.decompiler.decompilation import READ_AT

    read_at = sorted({session.length(n) for n in READ_AT})
    shorter, longer = session.with_room(max(read_at[0] - 1, 2)), session.length(2 * read_at[-1])
    options: Any = {"lengths": sorted({shorter, *read_at, longer}), "seed": session.seed}
    return decompiler.decompilation_study(session.model, session.task, n=read_at, **options)


@register_study(
    "heads",
    "loopinterp.comparison.heads",
    "program",
    kind="head-match",
    of_programs=True,
    hooks=True,
)
def _heads(session: Session) -> Result:
    """Do the heads attend where the programs' selectors do?"""
    batch, known = session.examples(2, 64), session.programs()
    return comparison.head_study(session.model, batch, known, seed=session.seed)


@register_study("ablation", "loopinterp.interventions.ablation", "program", hooks=True, loops=False)
def _ablation(session: Session) -> Result:
    """Which heads and MLPs are needed, and at which loops?"""
    from loopinterp.models.study_examples import fit_to_model

    batch = session.examples(1, 64)
    last = int(fit_to_model(session.model, batch).n_loops.max()) - 1
    options: Any = {"when": ("all",)}
    if last:
        options = {"when": ("all", "one"), "loops": sorted({last * k // 4 for k in range(5)})}
    return interventions.ablation_study(session.model, batch, **options, seed=session.seed)


@register_study(
    "attention", "loopinterp.lenses.attention_by_loop", "attention", hooks=True, loops=False
)
def _attention(session: Session) -> Result:
    """Where does each head attend at each loop?"""
    batch, words = session.examples(2, 64), tasks.token_words(session.task)
    labels = None if words is None else tasks.words_at(batch.inputs[0], words)
    return lenses.attention_study(session.model, batch, labels=labels, seed=session.seed)


@register_study(
    "ground-truth", "loopinterp.benchmark.ground_truth", "ground-truth", of_programs=True
)
def _ground_truth(session: Session) -> Result:
    """Do the tools find the known circuits of compiled models?"""
    disguises = (compiler.distract, compiler.permute, compiler.rotate)
    stock = session.programs()
    known = benchmark.known_models(
        stock[:: math.ceil(len(stock) / 6)],  # six at most take half a minute
        n=_readable_length(session, 5, 14) or 2,  # long enough to see every loop
        examples=128,
        disguises=[partial(disguise, seed=session.seed) for disguise in disguises],
        label="disguised",
        seed=session.seed,
    )
    return benchmark.ground_truth_study(known, seed=session.seed)
