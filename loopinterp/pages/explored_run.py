"""Runs that are explored, of a model and of programs beside it, and an exploration made of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from loopinterp.core.errors import InputError
from loopinterp.pages.exploration import NOT_SAID, Exploration
from loopinterp.pages.typed_examples import answer_words, token_words, words_at
from loopinterp.programs.expressions import Aggregate, SelWidth, ShiftRight
from loopinterp.programs.nodes import postorder
from loopinterp.tasks.task import IGNORE, Batch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from jaxtyping import Bool, Float, Int
    from torch import Tensor

    from loopinterp.core.results import Stopwatch
    from loopinterp.programs.program import LoopProgram
    from loopinterp.programs.trace import Trace


@dataclass(frozen=True)
class Chosen:
    """An example, and why it was chosen.

    Attributes:
        row: Its row in the batch.
        reason: In a few words.
        detail: In a sentence.
    """

    row: int
    reason: str
    detail: str


class ExploredRun:
    """The examples chosen from one batch, and the run of the model on them.

    Args:
        batch: These examples alone.
        rows: Those chosen.
        reader: What its states are read with: a model bound to inputs, or a lens on it.
        states: Its states after 0, 1, … loops.
        ranks: Answers to keep of each readout.
        words: A word for each token; those of the task if None.
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
        self.rows, self.batch = rows, batch
        self.n_pos = batch.inputs.shape[1]
        self._words = token_words(batch.task) if words is None else words
        kept, answer, probability, entropy = [], [], [], []
        self.n_classes = 0
        for loop, h in states:
            shares = reader.read(h, loop).double().softmax(-1)
            self.n_classes = shares.shape[-1]
            best = shares.topk(min(ranks, shares.shape[-1]), dim=-1)
            kept.append(h.double())
            answer.append(best.indices)
            probability.append(best.values)
            entropy.append(torch.special.entr(shares).sum(-1) / np.log(2))
        self.states, self.n_loops = torch.stack(kept), len(kept) - 1
        step, size = self.states.diff(dim=0).norm(dim=-1), self.states[1:].norm(dim=-1)
        moved = torch.cat([torch.full_like(step[:1], torch.nan), step / size])
        self.answer, self.probability = _first(answer), _first(probability)
        self.entropy, self.moved = _first(entropy).astype(np.float32), _numpy(moved.transpose(0, 1))
        self.target = _numpy(self.batch.targets.where(self.batch.targets != IGNORE, -1))
        self.asked = self.target >= 0

    def classes(self) -> set[int]:
        """Those that are shown."""
        return set(np.unique(self.answer).tolist()) | set(np.unique(self.target).tolist()) - {-1}

    def tokens(self) -> list[list[str]]:
        """What stands at each position of each example."""
        return [words_at(row, self._words) for row in self.batch.inputs.cpu()]

    def said(self) -> list[str]:
        """Each example in the words of its task."""
        say = getattr(self.batch.task, "decode", None)
        return say(self.batch.to("cpu")) if say else [""] * len(self.rows)


def chosen_from(batch: Batch, chosen: Sequence[Chosen]) -> Batch:
    """Those examples of a batch."""
    return batch[torch.tensor([one.row for one in chosen], device=batch.inputs.device)]


def _first(by_loop: list[Tensor]) -> np.ndarray:
    """[example, loop, …] of what was read loop by loop."""
    return torch.stack(by_loop, 1).cpu().numpy()


def _numpy(x: Tensor) -> np.ndarray:
    return x.cpu().numpy().astype(np.float32 if x.is_floating_point() else np.int32)


@dataclass(frozen=True)
class ShownPlane:
    """Two directions that states are shown along, and what they are."""

    centre: Tensor
    axes: Tensor
    names: list[str]

    @classmethod
    def of(cls, parts: Sequence[ExploredRun], given: Tensor | None) -> ShownPlane:
        states = torch.cat([part.states.flatten(0, 2) for part in parts])
        centre = states.mean(0)
        if given is None:
            _, size, rows = torch.linalg.svd(states - centre, full_matrices=False)
            axes = torch.zeros(2, states.shape[-1], dtype=states.dtype, device=states.device)
            axes[: len(rows[:2])] = rows[:2]
            # The sign of a component says nothing: its largest entry is made positive.
            largest = axes.gather(1, axes.abs().argmax(1, keepdim=True))
            axes *= torch.where(largest < 0, -1.0, 1.0)
            share = size.square() / size.square().sum().clamp(min=1e-300)
            shares = [*share[:2].tolist(), 0.0][:2]
            names = [f"principal component {k + 1} ({p:.0%})" for k, p in enumerate(shares)]
            return cls(centre, axes, names)
        if given.shape != (2, states.shape[-1]):
            raise InputError(
                "plane",
                expected=f"two directions, of shape {[2, states.shape[-1]]}",
                given=str(list(given.shape)),
                fix="Pass the first two rows of a subspace.",
            )
        return cls(torch.zeros_like(centre), given.to(states), ["direction 1", "direction 2"])

    def of_states(self, states: Tensor) -> np.ndarray:
        return _numpy(((states - self.centre) @ self.axes.mT).transpose(0, 1))


Values = Mapping[str, Sequence[tuple[np.ndarray, np.ndarray]]]
"""Variables by name: what each is and what is implied [example, loop, pos], of each run."""

Patterns = Sequence[tuple[np.ndarray, np.ndarray]]
"""Keys and weights [example, loop, layer, head, pos, nth] of each run."""

Inner = Sequence[tuple[np.ndarray, np.ndarray]]
"""Answers within the loop and their probabilities [example, loop, layer, pos], of each run."""


def assemble(
    watch: Stopwatch,
    runs: Sequence[ExploredRun],
    plane: ShownPlane,
    *,
    variables: Values,
    patterns: Patterns | None,
    inner: Inner | None,
    symbols: Sequence[str] | None,
    **fields: Any,
) -> Exploration:
    """The exploration of all examples of some runs."""
    within = {c for answers, _ in inner or () for c in np.unique(answers).tolist()} - {-1}
    classes = sorted(within.union(*(run.classes() for run in runs)))
    known = symbols or answer_words(runs[0].batch.task) or ()
    return Exploration.of(
        watch,
        coords={"name": list(variables)},
        row=[one.row for run in runs for one in run.rows],
        n_pos=[run.n_pos for run in runs for _ in run.rows],
        n_loops=[run.n_loops for run in runs for _ in run.rows],
        asked_after=[loop for run in runs for loop in run.batch.n_loops.tolist()],
        target=_padded([run.target for run in runs], -1),
        answer=_padded([run.answer for run in runs], -1),
        probability=_padded([run.probability for run in runs], np.nan).astype(np.float16),
        entropy=_padded([run.entropy for run in runs], np.nan),
        moved=_padded([run.moved for run in runs], np.nan),
        plane=_padded([plane.of_states(run.states) for run in runs], np.nan),
        inner_answer=inner and _padded([answers for answers, _ in inner], -1),
        inner_probability=inner and _padded([p for _, p in inner], np.nan).astype(np.float16),
        key=patterns and _padded([key for key, _ in patterns], 0),
        attention=patterns and _padded([x for _, x in patterns], 0).astype(np.float16),
        variable=_stacked(variables, 0),
        implied=_stacked(variables, 1),
        reasons=[one.reason for run in runs for one in run.rows],
        details=[one.detail for run in runs for one in run.rows],
        said=[text for run in runs for text in run.said()],
        tokens=[row for run in runs for row in run.tokens()],
        n_classes=max(run.n_classes for run in runs),
        symbols={str(c): known[c] if c < len(known) else str(c) for c in classes},
        axes=plane.names,
        **fields,
    )


def _padded(arrays: list[np.ndarray], fill: float) -> np.ndarray:
    """Arrays [example, (loop,) …, pos, …] of several lengths as one, with ``fill`` beyond each."""
    most = [max(sizes) for sizes in zip(*(x.shape[1:] for x in arrays))]
    return np.concatenate(
        [
            np.pad(
                x,
                [(0, 0), *((0, size - own) for size, own in zip(most, x.shape[1:]))],
                constant_values=fill,
            )
            for x in arrays
        ]
    )


def _stacked(variables: Values, which: int) -> np.ndarray | None:
    if not variables:
        return None
    each = [_padded([pair[which] for pair in x], NOT_SAID) for x in variables.values()]
    return np.stack(each).astype(np.int16)


_MOST_VALUES = 16
"""A variable of more values than this is shown without what answers imply."""


def program_values(
    program: LoopProgram,
    inputs: Int[Tensor, "batch pos"],
    answers: Int[Tensor, "loop batch pos"],
    asked: Bool[Tensor, "batch pos"],
    run: Trace | None = None,
) -> Iterator[tuple[str, Int[Tensor, "loop batch pos"], Int[Tensor, "loop batch pos"]]]:
    """Each variable of a program and its answer: name, value, and what the model's answer implies.

    A value is implied where it is the only one, of those that the variable takes in this run, with
    which the program, all its other variables left as they are, would answer as the model does; the
    answer is its own implication. Where the program's answer at a position depends on variables
    elsewhere, none is.

    Args:
        program: The program.
        inputs: Its inputs.
        answers: The model's, after 0, 1, … loops.
        asked: Where one is asked for.
        run: The program's run, where it is another than the undisturbed one.

    Example:
        >>> from loopinterp.programs import get_program
        >>> tokens, answers = torch.tensor([[4, 3, 1]]), torch.zeros(2, 1, 3, dtype=torch.int64)
        >>> found = program_values(get_program("ripple"), tokens, answers, tokens < 4)
        >>> name, value, implied = next(found)      # 1 + 1, then 1 + 0: 0 if a carry comes in
        >>> name, value[:, 0].tolist(), implied[0, 0, 1:].tolist()
        ('ripple.carry', [[0, 0, 0], [0, 0, 1]], [0, 1])
    """
    n_loops = len(answers) - 1
    trace = run or program.trace(inputs, n_loops=n_loops)
    # Every loop of every example as an example of its own: one run for each value.
    tokens = inputs.repeat(n_loops + 1, 1)
    held = {name: values.flatten(0, 1) for name, values in trace.variables.items()}
    local = _answers_here(program)
    for name, values in trace.variables.items():
        implied, known = torch.full_like(values, NOT_SAID), values.unique()
        if local and len(known) <= _MOST_VALUES:
            agreeing = torch.zeros_like(values)
            for value in known.tolist():
                tried = {**held, name: torch.full_like(tokens, value)}
                answered = program.run(tokens, n_loops=0, variables=tried).outputs[0]
                agrees = (answered.view_as(values) == answers) & asked
                implied[agrees] = value
                agreeing += agrees
            implied[agreeing != 1] = NOT_SAID
        yield f"{program.name}.{name}", values, implied
    yield f"{program.name}'s answer", trace.outputs, answers.where(asked, NOT_SAID)


def _answers_here(program: LoopProgram) -> bool:
    """Whether the answer at a position reads variables at that position alone."""
    elsewhere = (Aggregate, SelWidth, ShiftRight)
    return not any(
        isinstance(node, elsewhere) and node.variables for node in postorder([program.finish])
    )
