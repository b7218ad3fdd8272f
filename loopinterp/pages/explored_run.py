"""Runs of a model and of programs on the chosen examples."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from loopinterp.core.errors import need
from loopinterp.dynamics.geometry import principal_axes
from loopinterp.dynamics.measures import relative_residual
from loopinterp.pages.exploration import NOT_SAID, Exploration
from loopinterp.programs.expressions import Aggregate, SelWidth, ShiftRight, postorder
from loopinterp.tasks.task import IGNORE, Batch
from loopinterp.tasks.task_registry import answer_words, token_words, words_at

if TYPE_CHECKING:
    from collections.abc import Iterator

    from jaxtyping import Bool, Float, Int
    from torch import Tensor

    from loopinterp.core.results import Stopwatch
    from loopinterp.programs.interpreter import Trace
    from loopinterp.programs.program import LoopProgram


class ExampleReason(Enum):
    """Why an example is shown, in a few words and in a sentence."""

    AS_GIVEN = ("as given", "")
    RANDOM = ("random", "Drawn at random.")
    WRONG = ("wrong", "Wrong at the end: {n} of {asked} answers.")
    RELAPSED = (
        "wrong after right",
        "Right after loop {loop}; {n} {are} wrong at the end.",
    )
    LOST = (
        "wrong after right",
        "{n} of {asked} answers {were} wrong at the end.",
    )
    LAST = (
        "slowest",
        "Slowest: right from loop {loop} on, later than every other example.",
    )
    LATE = (
        "slow",
        "Slow: right from loop {loop} on, among the latest.",
    )
    LONG_CHAIN = (
        "long chain",
        "A long chain: {program} needs {loop} loops for it.",
    )
    INTERCHANGE = (
        "with another's state",
        "After loop {loop}, position {pos} is given the state of example {source}.",
    )
    MEAN = (
        "with the mean",
        "After loop {loop}, position {pos} is given the mean state of all examples.",
    )
    ZERO = ("with zeros", "After loop {loop}, position {pos} is given zeros.")


@dataclass(frozen=True)
class Chosen:
    """An example by its row in the batch, and the reason why it is shown."""

    row: int
    reason: ExampleReason
    values: Mapping[str, Any] = field(default_factory=dict)


def spell_choice(one: Chosen) -> tuple[str, str]:
    """Why an example is shown, in a few words and in a sentence.

    Example:
        >>> spell_choice(Chosen(3, ExampleReason.WRONG, {"n": 1, "asked": 4}))
        ('wrong', 'Wrong at the end: 1 of 4 answers.')
    """
    words, sentence = one.reason.value
    forms = {"are": "are", "were": "were right, and are"}
    if one.values.get("n") == 1:
        forms = {"are": "is", "were": "was right at some loop, and is"}
    return words, sentence.format(**forms, **one.values)


class ExploredRun:
    """A model's run on the examples chosen from one batch.

    Args:
        rows: Their rows in the original batch, with reasons.
        reader: A model bound to inputs, or a lens on it.
        states: Loops and states, from 0 on.
        ranks: Answers to keep of each reading.
        words: Words of tokens; the task's if None.
    """

    def __init__(
        self,
        batch: Batch,
        rows: list[Chosen],
        reader: Any,
        states: Iterable[tuple[int, Float[Tensor, "example pos d_model"]]],
        *,
        ranks: int,
        words: Sequence[str] | None = None,
    ) -> None:
        self.rows, self.batch, self.reader = rows, batch, reader
        self.n_pos = batch.inputs.shape[1]
        self._words = token_words(batch.task) if words is None else words
        states_by_loop, answer, probability, entropy = [], [], [], []
        self.n_classes = 0
        for loop, h in states:
            shares = reader.read(h, loop).double().softmax(-1)  # [example, pos, class]
            self.n_classes = shares.shape[-1]
            best = shares.topk(min(ranks, shares.shape[-1]), dim=-1)
            states_by_loop.append(h.double())
            answer.append(best.indices)
            probability.append(best.values)
            entropy.append(torch.special.entr(shares).sum(-1) / np.log(2))  # in bits
        # [loop, example, pos, d_model]; what is kept as an array is [example, loop, pos, …].
        self.states, self.n_loops = torch.stack(states_by_loop), len(states_by_loop) - 1
        moved = relative_residual(self.states, allow_nonfinite=True)
        moved = torch.cat([torch.full_like(moved[:1], torch.nan), moved])
        self.answer, self.probability = _stacked(answer), _stacked(probability)
        self.entropy = _stacked(entropy).astype(np.float32)
        self.moved = _numpy(moved.transpose(0, 1))
        self.target = _numpy(self.batch.targets.where(self.batch.targets != IGNORE, -1))
        self.asked = self.target >= 0

    def tokens(self) -> list[list[str]]:
        return [words_at(row, self._words) for row in self.batch.inputs.cpu()]

    def decoded(self) -> list[str]:
        say = getattr(self.batch.task, "decode", None)
        return say(self.batch.to("cpu")) if say else [""] * len(self.rows)


def _stacked(by_loop: list[Tensor]) -> np.ndarray:
    return torch.stack(by_loop, 1).cpu().numpy()


def _numpy(x: Tensor) -> np.ndarray:
    return x.cpu().numpy().astype(np.float32 if x.is_floating_point() else np.int32)


def _plane(
    runs: Sequence[ExploredRun], directions: Tensor | None
) -> tuple[Tensor, Tensor, list[str]]:
    """Centre, two axes and their names: those given, or the first two principal components."""
    states = torch.cat([run.states.flatten(0, 2) for run in runs])  # [state, d_model]
    if directions is None:
        principal = principal_axes(states, min(2, *states.shape))
        axes = states.new_zeros(2, states.shape[-1])
        axes[: len(principal.axes)] = principal.axes
        shares = [*principal.explained.tolist(), 0.0][:2]
        names = [f"principal component {k + 1} ({p:.0%})" for k, p in enumerate(shares)]
        return principal.mean, axes, names
    fits = directions.shape == (2, states.shape[-1])
    expected = f"two directions, of shape {[2, states.shape[-1]]}"
    fix = "Pass the first two rows of a subspace."
    need(fits, "plane", expected, str(list(directions.shape)), fix)
    return torch.zeros_like(states[0]), directions.to(states), ["direction 1", "direction 2"]


Pairs = Sequence[tuple[np.ndarray, np.ndarray]]
"""Two arrays of each run: [example, loop, …]."""


def assemble(
    watch: Stopwatch,
    runs: Sequence[ExploredRun],
    *,
    symbols: Sequence[str] | None,
    directions: Tensor | None = None,
    variables: Mapping[str, Pairs] | None = None,
    patterns: Pairs | None = None,
    inner: Pairs | None = None,
    **fields: Any,
) -> Exploration:
    """The exploration of all examples of some runs.

    ``variables`` holds values and implied values [example, loop, pos]; ``patterns`` keys and
    weights [example, loop, layer, head, pos, nth]; ``inner`` answers and probabilities
    [example, loop, layer, pos].
    """
    shown = [x for run in runs for x in (run.answer, run.target)]
    shown += [answers for answers, _ in inner or ()]
    classes = sorted({c for x in shown for c in np.unique(x).tolist()} - {-1})
    known = symbols or answer_words(runs[0].batch.task) or ()
    centre, axes, names = _plane(runs, directions)
    # From [loop, example, pos, axis] to [example, loop, pos, axis].
    plane = [_numpy(((run.states - centre) @ axes.mT).transpose(0, 1)) for run in runs]
    choices = [spell_choice(one) for run in runs for one in run.rows]
    variable, implied = None, None
    if variables:
        padded = (
            [_padded([pair[k] for pair in pairs], NOT_SAID) for pairs in variables.values()]
            for k in (0, 1)
        )
        variable, implied = (np.stack(arrays).astype(np.int32) for arrays in padded)
    return Exploration.of(
        watch,
        coords={"name": list(variables or ())},
        row=[one.row for run in runs for one in run.rows],
        n_pos=[run.n_pos for run in runs for _ in run.rows],
        n_loops=[run.n_loops for run in runs for _ in run.rows],
        asked_after=[loop for run in runs for loop in run.batch.n_loops.tolist()],
        target=_padded([run.target for run in runs], -1),
        answer=_padded([run.answer for run in runs], -1),
        probability=_padded([run.probability for run in runs], np.nan).astype(np.float16),
        entropy=_padded([run.entropy for run in runs], np.nan),
        moved=_padded([run.moved for run in runs], np.nan),
        plane=_padded(plane, np.nan),
        inner_answer=inner and _padded([answers for answers, _ in inner], -1),
        inner_probability=inner and _padded([p for _, p in inner], np.nan).astype(np.float16),
        key=patterns and _padded([key for key, _ in patterns], 0),
        attention=patterns and _padded([x for _, x in patterns], 0).astype(np.float16),
        variable=variable,
        implied=implied,
        reasons=[words for words, _ in choices],
        details=[sentence for _, sentence in choices],
        said=[text for run in runs for text in run.decoded()],
        tokens=[row for run in runs for row in run.tokens()],
        n_classes=max(run.n_classes for run in runs),
        symbols={str(c): known[c] if c < len(known) else str(c) for c in classes},
        axes=names,
        **fields,
    )


def _padded(arrays: list[np.ndarray], fill: float) -> np.ndarray:
    """Arrays [example, (loop,) …, pos, …] of several lengths as one, padded with ``fill``."""
    sizes = [max(every) for every in zip(*(x.shape[1:] for x in arrays))]
    beyond = ([(0, 0), *((0, n - k) for n, k in zip(sizes, x.shape[1:]))] for x in arrays)
    padded = (np.pad(x, room, constant_values=fill) for x, room in zip(arrays, beyond))
    return np.concatenate([*padded])


def program_values(
    program: LoopProgram,
    inputs: Int[Tensor, "batch pos"],
    answers: Int[Tensor, "loop batch pos"],
    is_asked: Bool[Tensor, "batch pos"],
    run: Trace | None = None,
) -> Iterator[tuple[str, Int[Tensor, "loop batch pos"], Int[Tensor, "loop batch pos"]]]:
    """Name, value and implied value of each variable of a program, and of its answer.

    A value is implied if it alone, among those that the variable takes in this run, makes the
    program give the model's answer, other variables unchanged. No value is implied if the answer at
    a position depends on variables at others.

    Args:
        answers: The model's, after 0, 1, … loops.
        is_asked: Where answers are scored.
        run: The program's run; the clean one by default.
    """
    n_loops = len(answers) - 1
    trace = run or program.trace(inputs, n_loops=n_loops)
    # [loop * batch, pos]: every loop of every example as an example of its own.
    tokens = inputs.repeat(n_loops + 1, 1)
    variables = {name: values.flatten(0, 1) for name, values in trace.variables.items()}
    # Whether the answer at a position reads variables at that position alone.
    elsewhere = (Aggregate, SelWidth, ShiftRight)
    nodes = postorder([program.finish])
    local = not any(isinstance(node, elsewhere) and node.variables for node in nodes)
    for name, values in trace.variables.items():
        implied, known = torch.full_like(values, NOT_SAID), values.unique()
        if local and len(known) <= 16:  # a run for each value
            agreeing = torch.zeros_like(values)
            for value in known.tolist():
                tried = {**variables, name: torch.full_like(tokens, value)}
                # Without a further loop: the answer that the variables give as they are.
                answered = program.run(tokens, n_loops=0, variables=tried).outputs[0]
                agrees = (answered.view_as(values) == answers) & is_asked
                implied[agrees] = value
                agreeing += agrees
            implied[agreeing != 1] = NOT_SAID  # none of the values, or more than one
        yield f"{program.name}.{name}", values, implied
    yield f"{program.name}'s answer", trace.outputs, answers.where(is_asked, NOT_SAID)
