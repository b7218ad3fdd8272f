"""Length generalisation: how often a model is right, by length and distribution, or by operands."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np
import torch
from pydantic import NonNegativeInt, PositiveInt

from loopinterp.core.boundary import checked
from loopinterp.core.errors import InputError
from loopinterp.core.intervals import ESTIMATE, wilson_estimate
from loopinterp.core.progress import track
from loopinterp.core.results import Result, config_hash, study
from loopinterp.core.settings import Seed
from loopinterp.core.storage import read_arrays, write_arrays
from loopinterp.models.iteration import check_increasing
from loopinterp.models.protocol import describe_model, device_of, own_depth, rule_of
from loopinterp.models.stopped_run import run_rules
from loopinterp.models.stopping import Oracle
from loopinterp.models.study_examples import fit_to_model
from loopinterp.tasks.sampling import need_task
from loopinterp.tasks.task import IGNORE
from loopinterp.training.answer_scores import (
    Lowest,
    Scores,
    askable_distributions,
    constant_scores,
    lowest_of,
    perplexity_estimate,
    scores_at,
)
from loopinterp.training.device import stream

if TYPE_CHECKING:
    from loopinterp.models.protocol import LoopedModel
    from loopinterp.models.stopped_run import StoppingRule
    from loopinterp.tasks.task import Batch, Task


ORACLE = "oracle T(n)"
"""The rule that knows T(n): the baseline of the others."""

BEST = "best loop in hindsight"
"""The one number of loops at which most examples of a cell are right; of equals the least."""

ANY = "any loop right"
"""Each example at the first loop at which it is right: the upper bound of all rules."""


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class EvaluationResult(Result, kind="evaluation"):
    """How often a model is right, by length and distribution.

    Arrays:
        exact_match: Share of examples that are right at every position that is asked for, with
            its 95% Wilson interval. ``extra_loop`` counts loops beyond T(n).
        bit_accuracy: Share of positions that are right, each example counting the same. Its
            interval takes the number of examples as sample size, as bits of one are dependent.
        constant_exact_match: Control: the best answer that is the same for every example, such as
            the commonest. It is chosen on the examples that it is scored on.
        constant_bit_accuracy: Control: the likeliest class at each position. High bit accuracy
            beside a low exact match is what an answer without the hard part looks like.
        perplexity: Of the right answer, the geometric mean over its positions and then over
            examples: exp of the mean cross-entropy; with its 95% interval over examples.
        loop_exact_match: Exact match after ``loop`` loops, whatever T(n) is; NaN where a length
            was not run on.
        loop_perplexity: The same, of the perplexity.
        stopped_exact_match: Exact match where each stopping rule stops, if any were asked for;
            :data:`ORACLE` is among them, and in hindsight :data:`BEST` and :data:`ANY`.
        stopped_at: Mean number of loops at which it stops.

    Attributes:
        n_samples: Examples in each cell.
        trained_up_to: Greatest length seen in training, if that is known.
        depth: Loops of a model that makes as many whatever the length; None for all others.
        answered_after: The loops after which the answer is read, in words: ``T(n)``, or what the
            model's ``loop_rule`` makes of it, as ``T(n) + 1``.
        not_judged: Distributions of the task that were left out.
    """

    VARIABLES: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(
            ("exact_match", "bit_accuracy", "perplexity"),
            f"extra_loop distribution length {ESTIMATE}",
        ),
        **dict.fromkeys(
            ("loop_exact_match", "loop_perplexity"), f"loop distribution length {ESTIMATE}"
        ),
        **dict.fromkeys(("constant_exact_match", "constant_bit_accuracy"), "distribution length"),
        "stopped_exact_match": f"rule distribution length {ESTIMATE}",
        "stopped_at": "rule distribution length",
    }
    # Files of before there was a perplexity are read all the same.
    OPTIONAL: ClassVar[frozenset[str]] = frozenset(
        {"perplexity", "loop_exact_match", "loop_perplexity", "stopped_exact_match", "stopped_at"}
    )

    task: str
    n_samples: int
    trained_up_to: int | None
    depth: int | None = None
    answered_after: str = "T(n)"
    not_judged: Sequence[str] = ()

    def lowest(self, length: int, extra_loop: int | None = None) -> Lowest:
        """The lowest exact match over the distributions at a length, and where it is.

        It is read after the extra loops that are nearest to none, or after those given.
        """
        return lowest_at(self, length=length, extra_loop=extra_loop)


def nearest_extra_loop(result: Result) -> int:
    """The number of extra loops of a result that is nearest to none."""
    return min(result.data["extra_loop"].values.tolist(), key=abs)


def lowest_at(result: Result, *, extra_loop: int | None = None, **at: Any) -> Lowest:
    """The lowest exact match of a result over its distributions at a place on its other axes."""
    exact = result.data["exact_match"]
    at["extra_loop"] = nearest_extra_loop(result) if extra_loop is None else extra_loop
    if ESTIMATE in exact.dims:
        at[ESTIMATE] = "value"
    return lowest_of(exact.sel(at, drop=True).to_series().to_dict())


@torch.no_grad()
@checked
def evaluate(
    model: LoopedModel | Any,
    task: Task,
    lengths: Sequence[int],
    *,
    distributions: Sequence[str] | None = None,
    extra_loops: Sequence[int] = (0,),
    loops: Sequence[NonNegativeInt] = (),
    stopping: Mapping[str, StoppingRule] | None = None,
    stopping_margin: NonNegativeInt = 25,
    n_samples: PositiveInt = 300,
    trained_up_to: PositiveInt | None = None,
    seed: Seed = 0,
) -> EvaluationResult:
    """Exact match, bit accuracy and perplexity at T(n) loops, and at others if asked.

    A model that has a depth of its own (its ``loop_rule`` names one number of loops; an ordinary
    transformer's is 1) is asked after that instead; one whose rule shifts T(n) after what the rule
    makes of it.

    Of a task that is answered token by token, exact match is that of greedy generation up to the
    end token: until its first mistake a model has generated the right answer, which is what stands
    before it here, so one pass over the right answers tells. Bit accuracy and perplexity are those
    of the next token after right ones.

    The examples come from another random stream than those of training, whatever the seed.

    Args:
        model: Any looped model; the examples are moved to where its weights are.
        task: What to ask it.
        lengths: Problem lengths.
        distributions: Input distributions; all of the task if None.
        extra_loops: Loops more than T(n), or fewer where negative.
        loops: Numbers of loops that do not depend on the length, as ``[1, 2, 4, 8, 16, 32]``.
        stopping: Stopping rules by name (:func:`~loopinterp.app.stopping_rules` makes some), to be
            compared with reading the answer at T(n) and with the best loop in hindsight.
        stopping_margin: Loops past T(n) after which an example is stopped in any case.
        n_samples: Examples for each length and distribution.
        trained_up_to: Greatest length seen in training, to be marked in the figures.
        seed: Seed of the examples.

    Raises:
        InputError: If a list is empty, a number is out of range, or a name is unknown; if the
            model is of another task, or sees answers that stand in its input.
    """
    lists = {"lengths": lengths, "distributions": distributions, "extra_loops": extra_loops}
    for name, values in lists.items():
        if values is not None and not len(values):
            fix = f"Pass {name}=[…]."
            raise InputError(name, expected="at least one value", given="none", fix=fix)
    for name in {ORACLE, BEST, ANY} & set(stopping or ()):
        fix = "Give that rule another name."
        raise InputError("stopping", expected=f"no {name!r}", given="one", fix=fix)
    names = askable_distributions(model, task, lengths, n_samples, distributions)
    extra, lengths, loops = (sorted(set(x)) for x in (extra_loops, lengths, loops))
    rules = {ORACLE: Oracle(), **stopping} if stopping else {}
    described = {"task": {"name": task.name, **task.config()}, "model": describe_model(model)}
    settings = {"n_samples": n_samples, "stopping": [repr(rule) for rule in rules.values()]}
    with study(seed, **described, **settings) as watch:
        cells = []
        for distribution, length in track(list(product(names, lengths)), "evaluate"):
            generator = stream(seed, f"evaluation {distribution} {length}")
            batch = task.sample(
                length, batch_size=n_samples, generator=generator, distribution=distribution
            )
            batch = fit_to_model(model, replace(batch, task=task).to(device_of(model)))
            cells.append(_cell(model, batch, extra, loops, [*rules.values()], stopping_margin))
        by_loop = sorted({loop for cell in cells for loop in cell.by_loop})
        measures = [_measures(cell, by_loop, n_samples) for cell in cells]
        arrays = {}
        for name in measures[0]:
            values = np.stack([m[name] for m in measures])  # [distribution * length, axis, …]
            values = values.reshape(len(names), len(lengths), *values.shape[1:])
            arrays[name] = np.moveaxis(values, 2, 0) if values.ndim > 2 else values
        return EvaluationResult.of(
            watch,
            coords={
                "extra_loop": extra,
                "distribution": names,
                "length": lengths,
                **({"loop": by_loop} if by_loop else {}),
                **({"rule": [*rules, BEST, ANY]} if rules else {}),
            },
            **arrays,
            task=task.name,
            n_samples=n_samples,
            trained_up_to=trained_up_to,
            depth=own_depth(model),
            answered_after=str(rule_of(model) or "T(n)"),
            not_judged=[name for name in task.distributions if name not in names],
        )


class _Cell(NamedTuple):
    """The scores of one distribution and length: beyond T(n), after any loop, by stopping rule."""

    by_extra: list[Scores]
    by_loop: dict[int, Scores]
    stopped: list[tuple[float, float]]  # exact match and mean number of loops
    constant: tuple[float, float]


def _cell(
    model: LoopedModel | Any,
    batch: Batch,
    extra: list[int],
    loops: Sequence[int],
    rules: list[StoppingRule],
    margin: int,
) -> _Cell:
    """All scores of a batch, and where each rule stops its examples."""
    n_loops, last = batch.n_loops, int(batch.n_loops.max()) + margin
    if (least := int(n_loops.min())) + min(extra) < 0:
        expected = f"at least -{least}, as length {int(batch.n.min())} has {least} loops"
        fix = "Take away fewer loops, or drop the short lengths."
        raise InputError("extra_loops", expected=expected, given=str(min(extra)), fix=fix)
    # Rules are read after every loop up to the last, and their best in hindsight with them.
    absolute = {*loops, *range(last + 1 if rules else 0)}
    ends = {loop + k for loop in n_loops.unique().tolist() for k in extra}
    # A rule may be asked long after the states have ceased to be finite.
    scores = scores_at(model, batch, ends | absolute, may_diverge=bool(rules))
    by_extra = []
    for k in extra:  # each example after its own number of loops
        at, which = (n_loops + k).unique(return_inverse=True)
        parts = zip(*(scores[loop] for loop in at.tolist()))
        by_extra.append(Scores(*(torch.stack(x).gather(0, which[None])[0] for x in parts)))
    stopped = []
    if rules:
        mask = batch.targets != IGNORE
        stops = run_rules(model, batch.inputs, rules, max_loops=last, mask=mask, n_loops=n_loops)
        right = torch.stack([scores[loop].exact for loop in range(last + 1)])  # [loop, example]
        best = right.double().mean(1).argmax().expand(1, len(batch))
        first = torch.where(right.any(0), right.int().argmax(0), last)[None]
        stops = torch.cat([stops, best, first])  # [rule, example]; two rules know in hindsight
        exact = right.gather(0, stops).double().mean(1)
        stopped = list(zip(exact.tolist(), stops.double().mean(1).tolist()))
    by_loop = {loop: scores[loop] for loop in sorted(absolute)}
    return _Cell(by_extra, by_loop, stopped, constant_scores(batch.targets))


def _measures(cell: _Cell, by_loop: list[int], n_samples: int) -> dict[str, np.ndarray]:
    """The arrays of one cell; NaN after loops that its length was not run to."""

    def shares(values: Sequence[float]) -> np.ndarray:
        return wilson_estimate(np.array(values) * n_samples, n_samples)

    def exact(scores: Sequence[Scores | None]) -> np.ndarray:
        return shares([np.nan if s is None else float(s.exact.double().mean()) for s in scores])

    def perplexity(scores: Sequence[Scores | None]) -> np.ndarray:
        missing = np.full(3, np.nan)  # value, low, high
        each = [missing if s is None else perplexity_estimate(s.cross_entropy) for s in scores]
        return np.stack(each)

    measures = {
        "exact_match": exact(cell.by_extra),
        "bit_accuracy": shares([float(scores.share.mean()) for scores in cell.by_extra]),
        "perplexity": perplexity(cell.by_extra),
        "constant_exact_match": np.array(cell.constant[0]),
        "constant_bit_accuracy": np.array(cell.constant[1]),
    }
    if by_loop:
        at_loop = [cell.by_loop.get(loop) for loop in by_loop]
        measures |= {"loop_exact_match": exact(at_loop), "loop_perplexity": perplexity(at_loop)}
    if cell.stopped:
        exact_match, loops = zip(*cell.stopped)
        measures |= {"stopped_exact_match": shares(exact_match), "stopped_at": np.array(loops)}
    return measures


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class OperandGrid(Result, kind="operand-grid"):
    """How often a model is right, by the lengths of both operands and the number of loops.

    Arrays:
        exact_match: Share of answers that are wholly right, with its 95% Wilson interval.

    Attributes:
        n_samples: Examples in each cell.
        trained_up_to: Greatest length seen in training, if that is known.
    """

    VARIABLES: ClassVar[Mapping[str, str]] = {"exact_match": f"loop n_a n_b {ESTIMATE}"}

    task: str
    n_samples: int
    trained_up_to: int | None = None


@torch.no_grad()
@checked
def operand_grid(
    model: LoopedModel | Any,
    task: Task | Any,
    to: PositiveInt,
    *,
    loops: Sequence[int] = (1, 2, 4, 8, 16, 32),
    n_samples: PositiveInt = 100,
    trained_up_to: PositiveInt | None = None,
    unfinished: str | Path | None = None,
    seed: Seed = 0,
) -> OperandGrid:
    """Exact match for all pairs of operand lengths from 1 to N, after several numbers of loops.

    An answer that is written token by token counts as right if greedy generation gives it.

    Args:
        model: Any looped model that does not see an answer that stands in its input.
        task: One with ``sample_operands(n_a, n_b, batch_size=, generator=)``.
        to: N.
        loops: Numbers of loops, increasing.
        n_samples: Examples in each cell.
        trained_up_to: Greatest length seen in training, to be said in the figure.
        unfinished: A file of the cells that are done, complete or absent; a grid that was stopped
            goes on from it with the same numbers. Remove it once the result is saved.
        seed: Seed of the examples; those of a cell do not depend on the other cells.

    Raises:
        InputError: If the task cannot draw operands of given lengths, the model is of another
            task or sees the answers, or a number is out of range.
    """
    need_task(task)
    draw: Any = getattr(task, "sample_operands", None)
    if not callable(draw):
        expected = "one that draws operands of given lengths (sample_operands)"
        fix = "Take a task of two operands, or evaluate it by length."
        raise InputError("task", expected=expected, given=f"{task.name!r}", fix=fix)
    askable_distributions(model, task, [1, to], n_samples)
    loops = check_increasing(loops)
    described = {"task": {"name": task.name, **task.config()}, "model": describe_model(model)}
    options = {"to": to, "loops": loops, "n_samples": n_samples, "seed": seed}
    digest = json.dumps(config_hash(described | options))
    file = None if unfinished is None else Path(unfinished)
    exact = np.full((len(loops), to, to), np.nan)  # [loop, n_a, n_b]
    if file is not None and file.exists():
        arrays, texts = read_arrays(file)
        if texts.get("made") == digest and arrays["exact"].shape == exact.shape:
            exact = arrays["exact"].copy()
    with study(seed, **described, n_samples=n_samples) as watch:
        for n_a, n_b in track(list(product(range(1, to + 1), repeat=2)), "grid"):
            at = (slice(None), n_a - 1, n_b - 1)  # a cell, at all numbers of loops
            if not np.isnan(exact[at]).any():
                continue
            generator = stream(seed, f"operands {n_a} {n_b}")
            batch: Any = draw(n_a, n_b, batch_size=n_samples, generator=generator)
            scores = scores_at(model, batch.to(device_of(model)), loops)
            exact[at] = [float(scores[loop].exact.double().mean()) for loop in loops]
            if file is not None:  # after each cell, as one may take minutes
                write_arrays(file, {"exact": exact}, {"made": digest})
        return OperandGrid.of(
            watch,
            coords={"loop": loops, "n_a": range(1, to + 1), "n_b": range(1, to + 1)},
            exact_match=wilson_estimate(exact * n_samples, n_samples),
            task=task.name,
            n_samples=n_samples,
            trained_up_to=trained_up_to,
        )
