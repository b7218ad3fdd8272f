"""The studies that ``loopinterp analyze`` runs: what each asks, and where it can say nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from loopinterp import (
    benchmark,
    circuits,
    dynamics,
    explorer,
    lenses,
    models,
    probing,
    rasp,
    tasks,
)
from loopinterp.errors import CheckpointError, InputError
from loopinterp.models.model_description import said_of
from loopinterp.studied_model import StudiedModel

if TYPE_CHECKING:
    from torch import Tensor

    from loopinterp.results import Result
    from loopinterp.tasks import Addition, Batch

KNOWN_LENGTH, KNOWN_POSITIONS = 5, 14
"""Inputs on which the tools themselves are tried: long enough to see every loop."""

SHORT = 6
"""Programs are told apart on inputs of at least twice this length, where the model has room."""

EXAMPLE_LENGTH, EXAMPLE_POSITIONS = 8, 16
"""An input that is worked by hand is so short that it can be read."""

FEWEST_BITS = 16
"""Carries that are followed need room on both sides of the front."""


@dataclass(frozen=True, kw_only=True)
class Study:
    """A study that ``analyze`` can run.

    Attributes:
        name: Its name on the command line and of its files.
        about: What it asks.
        run: From the model to the result.
        tasks: Tasks of whose models it asks anything; any if empty.
        why_not: Why nothing can be said of this model, as a clause; "" where something can.
        needs: The study whose saved result it starts from, if any.
        hooks: Whether it looks inside a loop, which takes a model with hooks.
        loops: Whether it follows a model from loop to loop, which takes one that makes several.
    """

    name: str
    about: str
    run: Callable[[StudiedModel], Result]
    tasks: tuple[str, ...] = ()
    why_not: Callable[[StudiedModel], str] = lambda model: ""
    needs: str | None = None
    hooks: bool = False
    loops: bool = True

    def unsaid(self, model: StudiedModel) -> str:
        """Why it says nothing of a model, as a clause; "" if it says something."""
        from loopinterp.study_examples import why_no_loops

        if not self.concerns(model):
            return f"it asks about {' or '.join(self.tasks)} and not about {model.task.name}"
        if self.hooks and not hasattr(model.model, "run_with_cache"):
            return f"it looks inside a loop, and {type(model.model).__name__} has no hooks there"
        if self.loops and (why := why_no_loops(model.model)):
            return why
        return self.why_not(model)

    def concerns(self, model: StudiedModel) -> bool:
        """Whether its question means anything for models of that task."""
        return not self.tasks or model.task.name in self.tasks


STUDIES: list[Study] = []
"""All studies, in the order in which they are run."""


def _study(name: str, about: str, **limits: Any) -> Callable[..., Any]:
    """Makes the function below the next study; tracebacks name it."""

    def add(run: Callable[[StudiedModel], Result]) -> Callable[[StudiedModel], Result]:
        STUDIES.append(Study(name=name, about=about, run=run, **limits))
        return run

    return add


def _no_program(model: StudiedModel) -> str:
    if model.programs():
        return ""
    return f"no stock program solves {model.task.name} with these settings and tokens"


def _nothing_moves(model: StudiedModel) -> str:
    """Where no exchange changes an answer, there is nothing to be looked for."""
    from loopinterp.circuits.subspace_search import answers_moved, runs_to_fit_and_score
    from loopinterp.study_examples import fit_to_model

    if why := _no_program(model):
        return why
    try:
        nearest = _nearest(model)
    except CheckpointError:
        return ""  # said once the comparison is made
    batch = fit_to_model(model.model, _subspace_inputs(model)).to("cpu")
    program, strategy = rasp.get_program(nearest), _subspace_pairs(model)
    _, held_out = runs_to_fit_and_score(model.model, [batch], program, strategy, model.seed)
    moved = bool(answers_moved(held_out).any())
    return "" if moved else "no exchange of a state changes an answer of the model"


def _no_derivative(model: StudiedModel) -> str:
    import torch

    iteration = models.bind(model.model, model.sample(model.length(1), 1).inputs).at(0)
    try:
        dynamics.vjp(iteration.step, iteration.h0, torch.ones_like(iteration.h0))
    except InputError:
        return "its loop cannot be differentiated"
    return ""


def _no_wavefront(model: StudiedModel) -> str:
    import torch

    module = isinstance(model.model, torch.nn.Module)
    if not module or next(model.model.parameters(), None) is None:
        return "its control shuffles the model's weights, which no torch.nn.Module holds"
    return _no_room_for_carries(model)


def _no_room_for_carries(model: StudiedModel) -> str:
    room = _carry_bits(model)
    if room >= FEWEST_BITS:
        return ""
    return f"carries need {FEWEST_BITS} bits to be followed, and its examples have {room}"


def _no_planted_carry(model: StudiedModel) -> str:
    if not model.programs():
        return "the model does not read pairs of bits as tokens"
    return _no_room_for_carries(model)


@_study("explorer", "what is asked, and what does the model make of a few inputs?", loops=False)
def _explorer(model: StudiedModel) -> Result:
    # One length that can be read, and one at which there is something to be seen.
    readable = next((n for n in range(EXAMPLE_LENGTH, 1, -1) if _is_readable(model, n)), 1)
    lengths = sorted({model.length(n) for n in (readable, 4 * model.cutoff)})
    return explorer.explore(
        model.model,
        [model.sample(n, 128) for n in lengths],
        programs=model.programs(),
        asks=model.task.describe(),
        explain=partial(_by_hand, model),
        seed=model.seed,
    )


@_study("convergence", "does the state settle, and is it right?")
def _convergence(model: StudiedModel) -> Result:
    batch = model.sample(model.length(4 * model.cutoff), 32)
    return dynamics.convergence_study(model.model, batch, seed=model.seed)


@_study("extrapolation", "what if the loops run on?")
def _extrapolation(model: StudiedModel) -> Result:
    trained = model.n_loops(model.cutoff)
    batch = model.sample(model.length(2 * model.cutoff), 64)
    return dynamics.extrapolation_study(
        model.model, batch, n_loops=10 * trained, trained_loops=trained
    )


@_study("lens", "what does the state say of the answer after each loop?")
def _lens(model: StudiedModel) -> Result:
    n = model.length(2 * model.cutoff)
    batch, n_loops = model.sample(n, 64), model.n_loops(n)
    expected = _compiled_answers(model, batch, n_loops)
    return lenses.lens_study(
        model.model, batch, lens="coda", n_loops=n_loops, expected=expected, seed=model.seed
    )


def _compiled_answers(model: StudiedModel, batch: Batch, n_loops: int) -> Tensor | None:
    """What a compiled model holds after each loop, from its program; None of any other."""
    from loopinterp.rasp.compiler.circuit import CIRCUIT_FILE
    from loopinterp.training.run import MODEL

    folder = model.folder / MODEL
    if not (folder / CIRCUIT_FILE).is_file():
        return None
    name = rasp.Circuit.load(folder).program
    if name not in rasp.list_programs():
        return None
    return rasp.get_program(name).trace(batch.inputs.cpu(), n_loops=n_loops).outputs


@_study("exits", "how early could an example be read, and which rule knows?")
def _exits(model: StudiedModel) -> Result:
    batch = model.sample(model.length(2 * model.cutoff), 128)
    return lenses.exit_study(model.model, batch, seed=model.seed)


@_study("reachability", "is one limit reached from every start, and again after a kick?")
def _reachability(model: StudiedModel) -> Result:
    batch = model.sample(model.length(model.cutoff), 16)
    return dynamics.reachability_study(model.model, batch, seed=model.seed)


@_study("input-dependence", "does the limit know the input, and which of its tokens?")
def _input_dependence(model: StudiedModel) -> Result:
    # A run for each token of some of the examples, and a linear system for those of a few.
    n_sensitivity = 0 if _no_derivative(model) else 2
    return dynamics.input_dependence_study(
        model.model,
        model.sample(model.length(model.cutoff), 16),
        n_substituted=4,
        n_sensitivity=n_sensitivity,
        seed=model.seed,
    )


@_study("local-stability", "is it stable where it settles?", why_not=_no_derivative)
def _local_stability(model: StudiedModel) -> Result:
    batch = model.sample(model.length(model.cutoff), 4)
    return dynamics.local_stability_study(model.model, batch, seed=model.seed)


@_study("basins", "which limit does each start of a plane lead to?")
def _basins(model: StudiedModel) -> Result:
    batch = model.sample(model.length(model.cutoff), 16)
    return dynamics.basin_map(model.model, batch, points=15, seed=model.seed)


@_study("geometry", "by which ways do states go, and in how many directions do they lie?")
def _geometry(model: StudiedModel) -> Result:
    batch = model.sample(model.length(2 * model.cutoff), 32)
    return dynamics.geometry_study(model.model, batch, seed=model.seed)


@_study("stabilisation", "do the heads freeze?", hooks=True)
def _stabilisation(model: StudiedModel) -> Result:
    batch = model.sample(model.length(2 * model.cutoff), 32)
    return dynamics.attention_stabilisation_study(model.model, batch)


@_study(
    "wavefront",
    "how far has the carry come after each loop?",
    tasks=("addition",),
    why_not=_no_wavefront,
)
def _wavefront(model: StudiedModel) -> Result:
    task, n = cast("Addition", model.task), model.length(max(24, 4 * model.cutoff))
    return probing.carry_study(model.model, task, n=n, seed=model.seed)


@_study("programs", "which program does the circuit run?", why_not=_no_program)
def _programs(model: StudiedModel) -> Result:
    # Twice the training cutoff, and twice that; where there is no room, half of it and all.
    short, long = (model.length(k * max(model.cutoff, SHORT)) for k in (2, 4))
    lengths = [short, long] if short < long else [model.with_room(max(short // 2, 2)), short]
    # A finite-state model's own program stands beside the others, if it is none of them.
    own = circuits.finite_program(model.model, model.task)
    known = model.programs()
    return circuits.compare_programs(
        model.model,
        known if own is None or own.name in known else [*known, own],
        [model.sample(n, 512) for n in lengths],
        names=[model.name],
        seed=model.seed,
    )


@_study(
    "hold-time",
    "how long does a carry live that is put in by hand?",
    tasks=("addition",),
    why_not=_no_planted_carry,
)
def _hold_time(model: StudiedModel) -> Result:
    batch = model.sample(_carry_bits(model), 128, distribution="propagate")
    return circuits.planted_carry_study(model.model, batch, names=[model.name], seed=model.seed)


@_study(
    "subspaces",
    "in how few directions does an exchange live? (after programs)",
    why_not=_nothing_moves,
    needs="programs",
)
def _subspaces(model: StudiedModel) -> Result:
    return circuits.search_subspaces(
        model.model,
        _subspace_inputs(model),
        _nearest(model),
        ranks=(1, 2, 3),
        pairs=_subspace_pairs(model),
        steps=60,
        seed=model.seed,
    )


def _not_reduced(model: StudiedModel) -> str:
    if said_of(model.model, "state_code") is not None:
        return "its state is a code of bits, which decompilation reads whole"
    return "" if model.task.d_features is None else "its inputs are no tokens"


@_study("reduction", "how few numbers per position predict interchanges?", why_not=_not_reduced)
def _reduction(model: StudiedModel) -> Result:
    lengths = sorted({model.length(k * max(model.cutoff, SHORT)) for k in (1, 2)})
    return circuits.reduction_study(
        model.model, [model.sample(n, 256) for n in lengths], seed=model.seed
    )


@_study("decodability", "which variables of the programs can be read?", why_not=_no_program)
def _decodability(model: StudiedModel) -> Result:
    batch = model.sample(model.length(2 * model.cutoff), 64)
    return circuits.decodability(model.model, batch, model.programs(), seed=model.seed)


@_study("decompilation", "what program can be read off it, without being told any?")
def _decompilation(model: StudiedModel) -> Result:
    from loopinterp.circuits.decompiler.decompilation import READ_AT

    read_at = sorted({model.length(n) for n in READ_AT})
    shorter, longer = model.with_room(max(read_at[0] - 1, 2)), model.length(2 * read_at[-1])
    lengths = sorted({shorter, *read_at, longer})
    return circuits.decompilation_study(
        model.model, model.task, n=read_at, lengths=lengths, seed=model.seed
    )


@_study("heads", "do the heads look where the programs look?", why_not=_no_program, hooks=True)
def _heads(model: StudiedModel) -> Result:
    batch = model.sample(model.length(2 * model.cutoff), 64)
    return circuits.head_study(model.model, batch, model.programs(), seed=model.seed)


@_study("ablation", "which heads and MLPs are needed, and when?", hooks=True, loops=False)
def _ablation(model: StudiedModel) -> Result:
    from loopinterp.study_examples import fit_to_model

    batch = model.sample(model.length(model.cutoff), 64)
    last = int(fit_to_model(model.model, batch).n_loops.max()) - 1
    some = sorted({last * k // 4 for k in range(5)})
    when = ("all", "one") if last else ("all",)
    return circuits.ablation_study(
        model.model, batch, when=when, loops=some if last else None, seed=model.seed
    )


@_study("attention", "where does each head look at each loop?", hooks=True, loops=False)
def _attention(model: StudiedModel) -> Result:
    batch = model.sample(model.length(2 * model.cutoff), 64)
    return lenses.attention_study(
        model.model,
        batch,
        labels=_labels(model, batch.inputs[0]),
        seed=model.seed,
    )


@_study(
    "ground-truth",
    "do the tools find what is known to be there, in compiled models?",
    why_not=_no_program,
)
def _ground_truth(model: StudiedModel) -> Result:
    """The tools on the programs that the model is compared with, compiled and disguised."""
    hidden = (rasp.distract, rasp.permute, rasp.rotate)
    fits = (n for n in range(KNOWN_LENGTH, 1, -1) if model.task.n_positions(n) <= KNOWN_POSITIONS)
    models = benchmark.known_models(
        model.programs(),
        n=next(fits, 2),
        examples=128,
        disguises=[partial(disguise, seed=model.seed) for disguise in hidden],
        label="disguised",
        seed=model.seed,
    )
    return benchmark.ground_truth_study(models, seed=model.seed)


def _is_readable(model: StudiedModel, n: int) -> bool:
    return model.task.n_positions(n) <= EXAMPLE_POSITIONS


def _by_hand(model: StudiedModel, example: Batch) -> str:
    """How one example is done by hand."""
    if not isinstance(model.task, tasks.Addition):
        # A task of a user's own need not have words for examples.
        words = getattr(model.task, "decode", None)
        return f"The right answer: {words(example)[0]}." if words else ""
    asked = example.targets[0] >= 0
    numbers = (*(x[0].long() for x in model.task.operands(example)), example.targets[0])
    a, b, total = (sum(int(bit) << k for k, bit in enumerate(x[asked])) for x in numbers)
    fits = f", of which {int(example.n[0])} bits hold {total}" if a + b != total else ""
    return (
        f"By hand: {a} + {b} = {a + b}{fits}. Bit by bit from the left, of the two bits and the "
        "carry in: where two or three are 1, a carry goes on to the next bit; where one or three "
        "are, the answer is 1."
    )


def _labels(model: StudiedModel, tokens: Tensor) -> list[str] | None:
    """What stands at each position, where a word for it exists."""
    words = explorer.token_words(model.task)
    return None if words is None else explorer.words_at(tokens, words)


def _subspace_inputs(model: StudiedModel) -> Batch:
    return model.sample(model.length(2 * max(model.cutoff, SHORT)), 2048)


def _subspace_pairs(model: StudiedModel) -> circuits.SpreadPairs:
    # Under a window only a cone is run again after an exchange, else the whole sequence.
    return circuits.SpreadPairs(
        pairs=256 if models.reach(model.model) is None else 1536, same_value=0
    )


def _nearest(model: StudiedModel) -> str:
    return circuits.ProgramComparison.load(model.own_file("programs")).verdict.nearest


def _carry_bits(model: StudiedModel) -> int:
    return model.length(max(24, 2 * model.cutoff))
