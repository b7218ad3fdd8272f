"""The study behind the explorer: examples chosen, and all that is shown of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from loopinterp.errors import HookError, InputError, check_integer
from loopinterp.explorer.exploration import NOT_SAID, Exploration
from loopinterp.explorer.interesting_examples import Chosen, choose
from loopinterp.explorer.program_values import program_values
from loopinterp.explorer.task_words import answer_words, token_words, words_at
from loopinterp.models.looped_model import bind, need_model
from loopinterp.models.model_description import describe_model, device_of
from loopinterp.rasp.program_registry import get_program
from loopinterp.rasp.trace import kept_from
from loopinterp.results import study
from loopinterp.study_examples import examples_for, inputs_and_loops
from loopinterp.tasks.study_data import as_batches
from loopinterp.tasks.task import IGNORE, Batch

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from loopinterp.models import LoopedModel
    from loopinterp.rasp.program import LoopProgram
    from loopinterp.tasks import Task

_MOST_WEIGHTS = 1_500_000
"""Attention weights that a result keeps; of each pattern the largest, where there are more."""


@torch.no_grad()
def explore(
    model: LoopedModel | Any,
    data: Batch | Task | Tensor | Sequence[Batch],
    *,
    programs: Sequence[str | LoopProgram] = (),
    examples: int = 8,
    n_loops: int | None = None,
    words: Sequence[str] | None = None,
    symbols: Sequence[str] | None = None,
    asks: str = "",
    explain: Callable[[Batch], str] | None = None,
    plane: Float[Tensor, "axis d_model"] | None = None,
    ranks: int = 3,
    n: int | Sequence[int] | None = None,
    batch_size: int | None = None,
    seed: int = 0,
) -> Exploration:
    r"""Choose examples by what is interesting in them, and keep what the explorer shows of them.

    At each loop and position: what the readout would answer, how sure it is (entropy), how far
    the state moved, :math:`\|h_t - h_{t-1}\| / \|h_t\|`, where it lies in a plane, where each head
    looks, and what the variables of programs are, beside what the model's answers imply.

    Args:
        model: Any looped model; one without hooks shows no attention.
        data: Examples of one length, several batches of one length each, a task to draw them
            from, or inputs alone ``[batch, pos]``, which are taken in their order.
        programs: Programs that read the same tokens; shown first is the one that answers as the
            model does at most loops and positions.
        examples: How many to choose, in equal parts of each batch.
        n_loops: Loops to show; those after which each example is asked by default, to be given
            with inputs alone.
        words: A word for each token; those of the task by default.
        symbols: A word for each class of the answer, likewise.
        asks: What the task asks, in a sentence.
        explain: From a batch of one example to how it is done by hand; said of the first.
        plane: Two directions of the state to look along, such as those of a subspace; by default
            the first two principal components of all states that are shown.
        ranks: Answers to keep of each readout.
        n: Problem length, or several, where a task is given.
        batch_size: Examples of each, where a task is given.
        seed: Seed of what is drawn.

    Raises:
        InputError: If a batch has examples of several lengths, or an option is out of range.

    Example:
        >>> from loopinterp.rasp import compile_program
        >>> from loopinterp.tasks import Addition
        >>> model = compile_program("ripple", max_length=6).model
        >>> found = explore(model, Addition(), programs=["ripple"], n=5, examples=2)
        >>> found.data.sizes["loop"], found.data["name"].values.tolist()
        (7, ['ripple.carry', "ripple's answer"])
        >>> bool((found.data["variable"] == found.data["implied"])[1, :, 1:, 1:].all())
        True
    """
    need_model(model)
    check_integer("examples", examples, least=1)
    check_integer("ranks", ranks, least=1)
    batches = _batches(model, data, n_loops, n=n, batch_size=batch_size, seed=seed)
    chosen_programs = [get_program(p) if isinstance(p, str) else p for p in programs]
    drawn = sum(map(len, batches))
    with study(seed, model=describe_model(model), examples=examples, drawn=drawn) as watch:
        generator = torch.Generator().manual_seed(seed)
        parts: list[_Part] = []
        for k, batch in enumerate(batches):
            share = (examples * (k + 1)) // len(batches) - (examples * k) // len(batches)
            if share := min(share, len(batch)):
                last = int(batch.n_loops[0]) if n_loops is None else n_loops
                by_task = not isinstance(data, torch.Tensor)
                rows = _choose(model, batch, last, share, chosen_programs, generator, by_task)
                parts.append(_Part(model, batch, rows, last, ranks, words))
        classes = sorted({c for part in parts for c in part.classes()})
        known = symbols or answer_words(batches[0].task) or ()
        view = _Plane.of(parts, plane)
        missing: dict[str, str] = {}
        patterns = _attention(model, parts, missing)
        variables = _variables(_nearest_first(chosen_programs, parts), parts, missing)
        padded = partial(_padded, parts)
        return Exploration.of(
            watch,
            coords={"name": list(variables)},
            n_pos=[part.n_pos for part in parts for _ in part.rows],
            n_loops=[part.n_loops for part in parts for _ in part.rows],
            asked_after=[loop for part in parts for loop in part.batch.n_loops.tolist()],
            target=padded([part.target for part in parts], -1),
            answer=padded([part.answer for part in parts], -1),
            probability=padded([part.probability for part in parts], np.nan).astype(np.float16),
            entropy=padded([part.entropy for part in parts], np.nan),
            moved=padded([part.moved for part in parts], np.nan),
            plane=padded([view.of_states(part.states) for part in parts], np.nan),
            key=patterns and padded([key for key, _ in patterns], 0),
            attention=patterns and padded([x for _, x in patterns], 0).astype(np.float16),
            variable=_stacked(parts, variables, 0),
            implied=_stacked(parts, variables, 1),
            asks=asks,
            by_hand=explain(parts[0].batch[:1].to("cpu")) if explain else "",
            reasons=[one.reason for part in parts for one in part.rows],
            details=[one.detail for part in parts for one in part.rows],
            said=[text for part in parts for text in part.said()],
            tokens=[row for part in parts for row in part.tokens()],
            n_classes=max(part.n_classes for part in parts),
            symbols={str(c): known[c] if c < len(known) else str(c) for c in classes},
            axes=view.names,
            missing=missing,
            n_examples=drawn,
        )


def _batches(
    model: Any, data: Any, n_loops: int | None, *, n: Any, batch_size: int | None, seed: int
) -> list[Batch]:
    """What is given as batches of one length each, asked as this model is."""
    if isinstance(data, torch.Tensor):
        inputs, n_loops = inputs_and_loops(model, data, n_loops)
        shape, every = inputs.shape[:2], torch.full((len(inputs),), n_loops)
        targets = torch.full(shape, IGNORE, device=inputs.device)
        batches = [Batch(inputs, targets, torch.full_like(every, shape[1]), every)]
    else:
        batches = as_batches(data, n=n, batch_size=batch_size, seed=seed)
    batches = [examples_for(model, batch.to(device_of(model))) for batch in batches]
    for batch in batches:
        if len(lengths := batch.n_loops.unique().tolist()) != 1:
            raise InputError(
                "data",
                expected="examples of one length in each batch",
                given=f"examples that are asked for after {lengths} loops",
                fix="Sample them with one n, and pass several batches as a list.",
            )
    return batches


def _choose(
    model: Any,
    batch: Batch,
    n_loops: int,
    most: int,
    programs: Sequence[LoopProgram],
    generator: torch.Generator,
    by_task: bool,
) -> list[Chosen]:
    asked = batch.targets != IGNORE
    if not by_task or len(batch) == 1:
        return [Chosen(row, "as given", "") for row in range(most)]
    bound = bind(model, batch.inputs)
    answers = [bound.read(h, t).argmax(-1) for t, h in bound.run(n_loops)]
    right = torch.stack([(x == batch.targets) | ~asked for x in answers])
    settled = {}
    for program in programs:
        outputs = program.trace(batch.inputs, n_loops=int(batch.n_loops[0])).outputs
        settled[program.name] = kept_from(torch.where(asked, outputs, 0)).amax(-1).cpu()
    return choose(right.cpu(), asked.cpu(), settled, most, generator)


class _Part:
    """The examples chosen from one batch, and the run of the model on them."""

    def __init__(
        self,
        model: Any,
        batch: Batch,
        rows: list[Chosen],
        n_loops: int,
        ranks: int,
        words: Sequence[str] | None,
    ) -> None:
        self.rows, self.n_loops = rows, n_loops
        index = torch.tensor([one.row for one in rows], device=batch.inputs.device)
        self.batch = _at(batch, index)
        self.n_pos = self.batch.inputs.shape[1]
        self._words = token_words(batch.task) if words is None else words
        bound = bind(model, self.batch.inputs)
        states, answer, probability, entropy = [], [], [], []
        self.n_classes = 0
        for loop, h in bound.run(n_loops):
            shares = bound.read(h, loop).double().softmax(-1)
            self.n_classes = shares.shape[-1]
            best = shares.topk(min(ranks, shares.shape[-1]), dim=-1)
            states.append(h.double())
            answer.append(best.indices)
            probability.append(best.values)
            entropy.append(torch.special.entr(shares).sum(-1) / np.log(2))
        self.states = torch.stack(states)
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


def _at(batch: Batch, rows: Tensor) -> Batch:
    tensors = {name: getattr(batch, name)[rows] for name in ("inputs", "targets")}
    lengths = {name: getattr(batch, name)[rows.to(batch.n.device)] for name in ("n", "n_loops")}
    return replace(batch, **tensors, **lengths)


def _first(by_loop: list[Tensor]) -> np.ndarray:
    """[example, loop, …] of what was read loop by loop."""
    return torch.stack(by_loop, 1).cpu().numpy()


def _numpy(x: Tensor) -> np.ndarray:
    return x.cpu().numpy().astype(np.float32 if x.is_floating_point() else np.int32)


@dataclass(frozen=True)
class _Plane:
    """Two directions that states are shown along, and what they are."""

    centre: Tensor
    axes: Tensor
    names: list[str]

    @classmethod
    def of(cls, parts: list[_Part], given: Tensor | None) -> _Plane:
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


def _attention(
    model: Any, parts: list[_Part], missing: dict[str, str]
) -> list[tuple[np.ndarray, np.ndarray]] | None:
    """Keys and weights [example, loop, layer, head, pos, nth] of each part."""
    if not (hasattr(model, "run_with_cache") and hasattr(model, "site")):
        missing["attention"] = f"{type(model).__name__} has no hooks inside its loops"
        return None
    try:
        patterns = [_patterns(model, part) for part in parts]
    except HookError as error:
        missing["attention"] = f"its patterns cannot be read ({error.given})"
        return None
    seen = max(int((x > 0).sum(-1).max()) for x in patterns)
    heads = sum(x[..., 0].numel() for x in patterns)
    kept = max(1, min(seen, _MOST_WEIGHTS // heads))
    if kept < seen:
        missing["attention below the strongest"] = (
            f"of each head and position the {kept} largest weights of up to {seen} are kept"
        )
    found = []
    for x in patterns:
        best = x.topk(min(kept, x.shape[-1]), dim=-1)
        fill = [(0, 0)] * 5 + [(0, kept - best.values.shape[-1])]
        none = [(0, 0), (1, 0), *fill[2:]]  # at loop 0
        narrow = np.uint8 if x.shape[-1] <= 256 else np.uint16
        found.append(
            (
                np.pad(best.indices.cpu().numpy().astype(narrow), none),
                np.pad(best.values.cpu().numpy(), none),
            )
        )
    return found


def _patterns(model: Any, part: _Part) -> Float[Tensor, "example loop layer head query key"]:
    """Patterns of the tied block, example by example, as a cache of all may be large."""
    kept = []
    for row in part.batch.inputs.split(1):
        name = "attn.hook_pattern"
        _, cache = model.run_with_cache(row, n_loops=part.n_loops, names_filter=name)
        kept.append(cache.stack(name, layer=slice(None))[:, :, 0].float())
    return torch.stack(kept)


def _nearest_first(programs: Sequence[LoopProgram], parts: list[_Part]) -> list[LoopProgram]:
    """Those first that answer as the model does at most loops and positions; then the simpler."""

    def apart(program: LoopProgram) -> tuple[float, int]:
        shares = []
        for part in parts:
            outputs = program.trace(part.batch.inputs.cpu(), n_loops=part.n_loops).outputs
            same = outputs.transpose(0, 1).numpy() == part.answer[..., 0]
            shares.append(same[:, 1:][np.broadcast_to(part.asked[:, None], same.shape)[:, 1:]])
        return 1 - float(np.concatenate(shares).mean()), len(program.variables)

    return sorted(programs, key=apart)


_Variables = dict[str, list[tuple[np.ndarray, np.ndarray]]]


def _variables(
    programs: Sequence[LoopProgram], parts: list[_Part], missing: dict[str, str]
) -> _Variables:
    """Values and what answers imply [example, loop, pos], of each part, by name."""
    if not programs:
        missing["variables"] = "no program is known that reads these tokens and solves the task"
    found: _Variables = {}
    for program in programs:
        for part in parts:
            answers = torch.from_numpy(part.answer[..., 0]).transpose(0, 1)
            asked, inputs = torch.from_numpy(part.asked), part.batch.inputs.cpu()
            for name, *values in program_values(program, inputs, answers, asked):
                value, implied = (x.transpose(0, 1).numpy() for x in values)
                found.setdefault(name, []).append((value, implied))
    return found


def _padded(parts: list[_Part], arrays: list[np.ndarray], fill: float) -> np.ndarray:
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


def _stacked(parts: list[_Part], variables: _Variables, which: int) -> np.ndarray | None:
    if not variables:
        return None
    each = [_padded(parts, [pair[which] for pair in x], NOT_SAID) for x in variables.values()]
    return np.stack(each).astype(np.int16)
