"""The studies that ``loopinterp analyze`` runs: what each asks, its data, when it is skipped.

:func:`register_study` is the one place where a study says what it is: its name, the kind of its
result and where that is defined, the section of the report, the tasks that it serves, what it
needs. ``analyze``, the reader of saved results, the report and the conformance tests read it there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from loopinterp.core.errors import CheckpointError, InputError, check_new_name
from loopinterp.core.results import register_kind

if TYPE_CHECKING:
    from torch import Tensor

    from loopinterp.app.session import Session
    from loopinterp.comparison import SpreadPairs
    from loopinterp.core.results import Result
    from loopinterp.tasks import Addition, Batch

KNOWN_LENGTH, KNOWN_POSITIONS = 5, 14
"""Inputs on which the tools themselves are tried: long enough to see every loop."""

SHORT = 6
"""Programs are told apart on inputs of at least twice this length, where the model has room."""

EXAMPLE_LENGTH, EXAMPLE_POSITIONS = 8, 16
"""An input that is worked by hand is so short that it can be read."""

FEWEST_BITS = 16
"""Carries that are followed need room on both sides of the front."""


class SkipReason(Enum):
    """Why a study is skipped; :func:`spell_skip` says it in words."""

    OTHER_TASK = "other task"
    NO_HOOKS = "no hooks"
    ONE_LOOP = "one loop"
    NO_PROGRAM = "no program"
    NO_EFFECT = "no effect"
    NOT_DIFFERENTIABLE = "not differentiable"
    NO_WEIGHTS = "no weights"
    NO_ROOM = "no room"
    NO_BIT_PAIRS = "no bit pairs"
    STATE_CODE = "state code"
    NO_TOKENS = "no tokens"


@dataclass(frozen=True)
class Skip:
    """A study that does not apply to a model: the reason, and the values that it names."""

    reason: SkipReason
    values: Mapping[str, Any] = field(default_factory=dict)


_CLAUSES = {
    SkipReason.OTHER_TASK: "it asks about {asked} and not about {task}",
    SkipReason.NO_HOOKS: "it looks inside a loop, and {model} has no hooks there",
    SkipReason.ONE_LOOP: "the model makes one loop, whatever the length",
    SkipReason.NO_PROGRAM: "no stock program solves {task} with these settings and tokens",
    SkipReason.NO_EFFECT: "no exchange of a state changes an answer of the model",
    SkipReason.NOT_DIFFERENTIABLE: "its loop cannot be differentiated",
    SkipReason.NO_WEIGHTS: (
        "its control shuffles the model's weights, which no torch.nn.Module holds"
    ),
    SkipReason.NO_ROOM: "carries need {needed} bits to be followed, and its examples have {room}",
    SkipReason.NO_BIT_PAIRS: "the model does not read pairs of bits as tokens",
    SkipReason.STATE_CODE: "its state is a code of bits, which decompilation reads whole",
    SkipReason.NO_TOKENS: "its inputs are no tokens",
}


def spell_skip(skip: Skip) -> str:
    """The reason as a clause that goes on after "because".

    Example:
        >>> spell_skip(Skip(SkipReason.NO_ROOM, {"needed": 16, "room": 8}))
        'carries need 16 bits to be followed, and its examples have 8'
    """
    return _CLAUSES[skip.reason].format(**skip.values)


@dataclass(frozen=True, kw_only=True)
class Study:
    """A study that ``analyze`` can run.

    Attributes:
        name: Its name on the command line and of its files.
        about: What it asks.
        run: From an open model to the result.
        kind: The kind of its result.
        tasks: Tasks of whose models it asks anything; any if empty.
        of_programs: Whether it asks only about tasks that a stock program solves.
        needs: The study whose saved result it starts from, if any.
        hooks: Whether it looks inside a loop, which takes a model with hooks.
        loops: Whether it follows a model from loop to loop, which takes one that makes several.
        skips: Why else it is skipped for a model; None where it is not.
    """

    name: str
    about: str
    run: Callable[[Session], Result]
    kind: str
    tasks: tuple[str, ...] = ()
    of_programs: bool = False
    needs: str | None = None
    hooks: bool = False
    loops: bool = True
    skips: Callable[[Session], Skip | None] = lambda session: None

    def skipped(self, session: Session) -> Skip | None:
        """Why it does not apply to a model; None if it does."""
        from loopinterp.models.study_examples import makes_one_loop

        model, task = session.model, session.task.name
        if not self.serves(session):
            return Skip(SkipReason.OTHER_TASK, {"asked": " or ".join(self.tasks), "task": task})
        if self.hooks and not hasattr(model, "run_with_cache"):
            return Skip(SkipReason.NO_HOOKS, {"model": type(model).__name__})
        if self.loops and makes_one_loop(model):
            return Skip(SkipReason.ONE_LOOP)
        if self.of_programs and not session.programs():
            return Skip(SkipReason.NO_PROGRAM, {"task": task})
        return self.skips(session)

    def serves(self, session: Session) -> bool:
        """Whether its question means anything for models of that task."""
        return not self.tasks or session.task.name in self.tasks


STUDIES: list[Study] = []
"""All studies, in the order in which they are run."""


def register_study(
    name: str,
    about: str,
    *,
    module: str,
    section: str,
    kind: str = "",
    tasks: tuple[str, ...] = (),
    of_programs: bool = False,
    **limits: Any,
) -> Callable[[Callable[[Session], Result]], Callable[[Session], Result]]:
    """Make the function below a study of ``analyze``; its result is read and reported from then on.

    Args:
        name: Its name on the command line and of its files.
        about: What it asks.
        module: The module that defines the class of that kind.
        section: The section of the report that it belongs to.
        kind: The kind of its result; its name by default.
        tasks: Tasks that it asks about; any if empty.
        of_programs: Whether it asks only about tasks that a stock program solves.
        limits: ``needs``, ``hooks``, ``loops`` and ``skips``, as :class:`Study` has them.

    Raises:
        InputError: If there is a study of that name.
    """
    kind = kind or name
    check_new_name("study", name, [study.name for study in STUDIES])
    register_kind(kind, module, section=section, study=name, tasks=tasks, of_programs=of_programs)

    def add(run: Callable[[Session], Result]) -> Callable[[Session], Result]:
        entry = {"name": name, "about": about, "run": run, "kind": kind, **limits}
        STUDIES.append(Study(tasks=tasks, of_programs=of_programs, **entry))
        return run

    return add


# Kinds of result that no study of ``analyze`` makes.
register_kind("activation-patching", "loopinterp.interventions.patching", "program")
register_kind("edges", "loopinterp.edges.edge_study", "program")
register_kind("evaluation", "loopinterp.training.evaluation", "generalisation")
register_kind("false-names", "loopinterp.benchmark.false_names", "ground-truth")
register_kind("operand-grid", "loopinterp.training.evaluation", "generalisation")
register_kind("probes", "loopinterp.probing.probe_grid", "program")
register_kind("seed-summary", "loopinterp.training.seed_summary", "generalisation")
register_kind("sweep", "loopinterp.training.seed_summary", "generalisation")
register_kind("variable-interchange", "loopinterp.comparison.variable_interchange", "program")


@register_study(
    "explorer",
    "what is asked, and what does the model make of a few inputs?",
    kind="exploration",
    module="loopinterp.pages.exploration",
    section="explorer",
    loops=False,
)
def _explorer(session: Session) -> Result:
    from loopinterp.pages import explore

    # One length that can be read, and one at which there is something to be seen.
    short = range(EXAMPLE_LENGTH, 1, -1)
    readable = next((n for n in short if session.task.n_positions(n) <= EXAMPLE_POSITIONS), 1)
    lengths = sorted({session.length(n) for n in (readable, 4 * session.cutoff)})
    return explore(
        session.model,
        [session.sample(n, 128) for n in lengths],
        programs=session.programs(),
        asks=session.task.describe(),
        explain=partial(_by_hand, session),
        seed=session.seed,
    )


def _by_hand(session: Session, example: Batch) -> str:
    """How one example is done by hand."""
    from loopinterp.tasks import Addition

    if not isinstance(session.task, Addition):
        # A task of a user's own need not have words for examples.
        words = getattr(session.task, "decode", None)
        return f"The right answer: {words(example)[0]}." if words else ""
    asked = example.targets[0] >= 0
    numbers = (*(x[0].long() for x in session.task.operands(example)), example.targets[0])
    a, b, total = (sum(int(bit) << k for k, bit in enumerate(x[asked])) for x in numbers)
    fits = f", of which {int(example.n[0])} bits hold {total}" if a + b != total else ""
    return (
        f"By hand: {a} + {b} = {a + b}{fits}. Bit by bit from the left, of the two bits and the "
        "carry in: where two or three are 1, a carry goes on to the next bit; where one or three "
        "are, the answer is 1."
    )


@register_study(
    "convergence",
    "does the state settle, and is it right?",
    module="loopinterp.dynamics.convergence",
    section="convergence",
)
def _convergence(session: Session) -> Result:
    from loopinterp.dynamics import convergence_study

    batch = session.sample(session.length(4 * session.cutoff), 32)
    return convergence_study(session.model, batch, seed=session.seed)


@register_study(
    "extrapolation",
    "what if the loops run on?",
    module="loopinterp.dynamics.extrapolation",
    section="convergence",
)
def _extrapolation(session: Session) -> Result:
    from loopinterp.dynamics import extrapolation_study

    trained = session.n_loops(session.cutoff)
    batch = session.sample(session.length(2 * session.cutoff), 64)
    return extrapolation_study(session.model, batch, n_loops=10 * trained, trained_loops=trained)


@register_study(
    "lens",
    "what does the state say of the answer after each loop?",
    module="loopinterp.lenses.lens_by_loop",
    section="convergence",
)
def _lens(session: Session) -> Result:
    from loopinterp.lenses import lens_study

    n = session.length(2 * session.cutoff)
    batch, n_loops = session.sample(n, 64), session.n_loops(n)
    expected = _compiled_answers(session, batch, n_loops)
    return lens_study(
        session.model, batch, lens="coda", n_loops=n_loops, expected=expected, seed=session.seed
    )


def _compiled_answers(session: Session, batch: Batch, n_loops: int) -> Tensor | None:
    """What a compiled model holds after each loop, from its program; None of any other."""
    from loopinterp.compiler import Circuit
    from loopinterp.compiler.circuit import CIRCUIT_FILE
    from loopinterp.programs import get_program, list_programs
    from loopinterp.training.run import MODEL

    folder = session.folder / MODEL
    if not (folder / CIRCUIT_FILE).is_file():
        return None
    name = Circuit.load(folder).program
    if name not in list_programs():
        return None
    return get_program(name).trace(batch.inputs.cpu(), n_loops=n_loops).outputs


@register_study(
    "exits",
    "how early could an example be read, and which rule knows?",
    module="loopinterp.lenses.exits_by_loop",
    section="convergence",
)
def _exits(session: Session) -> Result:
    from loopinterp.lenses import exit_study

    batch = session.sample(session.length(2 * session.cutoff), 128)
    return exit_study(session.model, batch, seed=session.seed)


@register_study(
    "reachability",
    "is one limit reached from every start, and again after a kick?",
    module="loopinterp.dynamics.reachability",
    section="limits",
)
def _reachability(session: Session) -> Result:
    from loopinterp.dynamics import reachability_study

    batch = session.sample(session.length(session.cutoff), 16)
    return reachability_study(session.model, batch, seed=session.seed)


def _no_derivative(session: Session) -> Skip | None:
    import torch

    from loopinterp.dynamics import vjp
    from loopinterp.models import bind

    iteration = bind(session.model, session.sample(session.length(1), 1).inputs).at(0)
    try:
        vjp(iteration.step, iteration.h0, torch.ones_like(iteration.h0))
    except InputError:
        return Skip(SkipReason.NOT_DIFFERENTIABLE)
    return None


@register_study(
    "input-dependence",
    "does the limit know the input, and which of its tokens?",
    module="loopinterp.dynamics.input_dependence",
    section="limits",
)
def _input_dependence(session: Session) -> Result:
    from loopinterp.dynamics import input_dependence_study

    # A run for each token of some of the examples, and a linear system for those of a few.
    n_sensitivity = 0 if _no_derivative(session) else 2
    batch = session.sample(session.length(session.cutoff), 16)
    return input_dependence_study(
        session.model, batch, n_substituted=4, n_sensitivity=n_sensitivity, seed=session.seed
    )


@register_study(
    "local-stability",
    "is it stable where it settles?",
    module="loopinterp.dynamics.local_stability",
    section="limits",
    skips=_no_derivative,
)
def _local_stability(session: Session) -> Result:
    from loopinterp.dynamics import local_stability_study

    batch = session.sample(session.length(session.cutoff), 4)
    return local_stability_study(session.model, batch, seed=session.seed)


@register_study(
    "basins",
    "which limit does each start of a plane lead to?",
    module="loopinterp.dynamics.basins",
    section="limits",
)
def _basins(session: Session) -> Result:
    from loopinterp.dynamics import basin_map

    batch = session.sample(session.length(session.cutoff), 16)
    return basin_map(session.model, batch, points=15, seed=session.seed)


@register_study(
    "geometry",
    "by which ways do states go, and in how many directions do they lie?",
    module="loopinterp.dynamics.geometry",
    section="limits",
)
def _geometry(session: Session) -> Result:
    from loopinterp.dynamics import geometry_study

    batch = session.sample(session.length(2 * session.cutoff), 32)
    return geometry_study(session.model, batch, seed=session.seed)


@register_study(
    "stabilisation",
    "do the heads freeze?",
    kind="attention-stabilisation",
    module="loopinterp.dynamics.inside_loop",
    section="attention",
    hooks=True,
)
def _stabilisation(session: Session) -> Result:
    from loopinterp.dynamics import attention_stabilisation_study

    batch = session.sample(session.length(2 * session.cutoff), 32)
    return attention_stabilisation_study(session.model, batch)


def _carry_bits(session: Session) -> int:
    return session.length(max(24, 2 * session.cutoff))


def _no_room_for_carries(session: Session) -> Skip | None:
    room = _carry_bits(session)
    if room >= FEWEST_BITS:
        return None
    return Skip(SkipReason.NO_ROOM, {"needed": FEWEST_BITS, "room": room})


def _no_wavefront(session: Session) -> Skip | None:
    import torch

    module = isinstance(session.model, torch.nn.Module)
    if not module or next(session.model.parameters(), None) is None:
        return Skip(SkipReason.NO_WEIGHTS)
    return _no_room_for_carries(session)


@register_study(
    "wavefront",
    "how far has the carry come after each loop?",
    kind="carry",
    module="loopinterp.probing.carry_wavefront",
    section="wavefront",
    tasks=("addition",),
    skips=_no_wavefront,
)
def _wavefront(session: Session) -> Result:
    from loopinterp.probing import carry_study

    n = session.length(max(24, 4 * session.cutoff))
    return carry_study(session.model, cast("Addition", session.task), n=n, seed=session.seed)


@register_study(
    "programs",
    "which program does the circuit run?",
    kind="program-comparison",
    module="loopinterp.comparison.program_comparison",
    section="program",
    of_programs=True,
)
def _programs(session: Session) -> Result:
    from loopinterp.comparison import compare_programs
    from loopinterp.decompiler import finite_program

    # Twice the training cutoff, and twice that; where there is no room, half of it and all.
    short, long = (session.length(k * max(session.cutoff, SHORT)) for k in (2, 4))
    lengths = [short, long] if short < long else [session.with_room(max(short // 2, 2)), short]
    # A finite-state model's own program stands beside the others, if it is none of them.
    finite = finite_program(session.model, session.task)
    known = session.programs()
    return compare_programs(
        session.model,
        known if finite is None or finite.name in known else [*known, finite],
        [session.sample(n, 512) for n in lengths],
        names=[session.name],
        seed=session.seed,
    )


def _no_planted_carry(session: Session) -> Skip | None:
    if not session.programs():
        return Skip(SkipReason.NO_BIT_PAIRS)
    return _no_room_for_carries(session)


@register_study(
    "hold-time",
    "how long does a carry live that is put in by hand?",
    kind="planted-carry",
    module="loopinterp.comparison.injected_carry",
    section="program",
    tasks=("addition",),
    skips=_no_planted_carry,
)
def _hold_time(session: Session) -> Result:
    from loopinterp.comparison import injected_carry_study

    batch = session.sample(_carry_bits(session), 128, distribution="propagate")
    return injected_carry_study(session.model, batch, names=[session.name], seed=session.seed)


def _closest_program(session: Session) -> str:
    from loopinterp.comparison import ProgramComparison

    return ProgramComparison.load(session.own_file("programs")).verdict.closest


def _subspace_inputs(session: Session) -> Batch:
    return session.sample(session.length(2 * max(session.cutoff, SHORT)), 2048)


def _subspace_pairs(session: Session) -> SpreadPairs:
    from loopinterp.comparison import SpreadPairs
    from loopinterp.models import reach

    # Under a window only a cone is run again after an exchange, else the whole sequence.
    return SpreadPairs(pairs=256 if reach(session.model) is None else 1536, same_value=0)


def _no_effect(session: Session) -> Skip | None:
    """Where no exchange changes an answer, there is nothing to be looked for."""
    from loopinterp.comparison.subspace_search import answers_moved, runs_to_fit_and_score
    from loopinterp.models.study_examples import fit_to_model
    from loopinterp.programs import get_program

    try:
        program = get_program(_closest_program(session))
    except CheckpointError:
        return None  # said once the comparison is made
    batch = fit_to_model(session.model, _subspace_inputs(session)).to("cpu")
    _, held_out = runs_to_fit_and_score(
        session.model, [batch], program, _subspace_pairs(session), session.seed
    )
    return None if bool(answers_moved(held_out).any()) else Skip(SkipReason.NO_EFFECT)


@register_study(
    "subspaces",
    "in how few directions does an exchange live? (after programs)",
    kind="subspace-search",
    module="loopinterp.comparison.subspace_search",
    section="program",
    of_programs=True,
    needs="programs",
    skips=_no_effect,
)
def _subspaces(session: Session) -> Result:
    from loopinterp.comparison import search_subspaces

    return search_subspaces(
        session.model,
        _subspace_inputs(session),
        _closest_program(session),
        ranks=(1, 2, 3),
        pairs=_subspace_pairs(session),
        steps=60,
        seed=session.seed,
    )


def _not_reduced(session: Session) -> Skip | None:
    from loopinterp.models.protocol import declared

    if declared(session.model, "state_code") is not None:
        return Skip(SkipReason.STATE_CODE)
    return None if session.task.d_features is None else Skip(SkipReason.NO_TOKENS)


@register_study(
    "reduction",
    "how few numbers per position predict interchanges?",
    module="loopinterp.comparison.reduced_model",
    section="program",
    skips=_not_reduced,
)
def _reduction(session: Session) -> Result:
    from loopinterp.comparison import reduction_study

    lengths = sorted({session.length(k * max(session.cutoff, SHORT)) for k in (1, 2)})
    batches = [session.sample(n, 256) for n in lengths]
    return reduction_study(session.model, batches, seed=session.seed)


@register_study(
    "decodability",
    "which variables of the programs can be read?",
    module="loopinterp.comparison.variables",
    section="program",
    of_programs=True,
)
def _decodability(session: Session) -> Result:
    from loopinterp.comparison import decodability

    batch = session.sample(session.length(2 * session.cutoff), 64)
    return decodability(session.model, batch, session.programs(), seed=session.seed)


@register_study(
    "decompilation",
    "what program can be read off it, without being told any?",
    module="loopinterp.decompiler.decompilation_study",
    section="program",
)
def _decompilation(session: Session) -> Result:
    from loopinterp.decompiler import decompilation_study
    from loopinterp.decompiler.decompilation import READ_AT

    read_at = sorted({session.length(n) for n in READ_AT})
    shorter, longer = session.with_room(max(read_at[0] - 1, 2)), session.length(2 * read_at[-1])
    lengths = sorted({shorter, *read_at, longer})
    return decompilation_study(
        session.model, session.task, n=read_at, lengths=lengths, seed=session.seed
    )


@register_study(
    "heads",
    "do the heads look where the programs look?",
    kind="head-match",
    module="loopinterp.comparison.heads",
    section="program",
    of_programs=True,
    hooks=True,
)
def _heads(session: Session) -> Result:
    from loopinterp.comparison import head_study

    batch = session.sample(session.length(2 * session.cutoff), 64)
    return head_study(session.model, batch, session.programs(), seed=session.seed)


@register_study(
    "ablation",
    "which heads and MLPs are needed, and when?",
    module="loopinterp.interventions.ablation",
    section="program",
    hooks=True,
    loops=False,
)
def _ablation(session: Session) -> Result:
    from loopinterp.interventions import ablation_study
    from loopinterp.models.study_examples import fit_to_model

    batch = session.sample(session.length(session.cutoff), 64)
    last = int(fit_to_model(session.model, batch).n_loops.max()) - 1
    some = sorted({last * k // 4 for k in range(5)})
    when = ("all", "one") if last else ("all",)
    return ablation_study(
        session.model, batch, when=when, loops=some if last else None, seed=session.seed
    )


@register_study(
    "attention",
    "where does each head look at each loop?",
    module="loopinterp.lenses.attention_by_loop",
    section="attention",
    hooks=True,
    loops=False,
)
def _attention(session: Session) -> Result:
    from loopinterp.lenses import attention_study
    from loopinterp.pages import token_words, words_at

    batch = session.sample(session.length(2 * session.cutoff), 64)
    words = token_words(session.task)
    labels = None if words is None else words_at(batch.inputs[0], words)
    return attention_study(session.model, batch, labels=labels, seed=session.seed)


@register_study(
    "ground-truth",
    "do the tools find what is known to be there, in compiled models?",
    module="loopinterp.benchmark.ground_truth",
    section="ground-truth",
    of_programs=True,
)
def _ground_truth(session: Session) -> Result:
    """The tools on the programs that the model is compared with, compiled and disguised."""
    from loopinterp.benchmark import ground_truth_study, known_models
    from loopinterp.compiler import distract, permute, rotate

    short = range(KNOWN_LENGTH, 1, -1)
    models = known_models(
        session.programs(),
        n=next((n for n in short if session.task.n_positions(n) <= KNOWN_POSITIONS), 2),
        examples=128,
        disguises=[partial(d, seed=session.seed) for d in (distract, permute, rotate)],
        label="disguised",
        seed=session.seed,
    )
    return ground_truth_study(models, seed=session.seed)
