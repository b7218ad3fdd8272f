"""Length generalisation: accuracy by length and distribution, or operand lengths."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
import torch
from pydantic import NonNegativeInt, PositiveInt

from loopinterp.core.boundary import checked
from loopinterp.core.errors import need
from loopinterp.core.intervals import ESTIMATE, wilson_estimate
from loopinterp.core.results import Result, config_hash, study
from loopinterp.core.settings import Seed
from loopinterp.core.storage import read_arrays, write_arrays
from loopinterp.core.text import track
from loopinterp.models.iteration import check_increasing
from loopinterp.models.protocol import describe_model, device_of, own_depth, rule_of
from loopinterp.models.stopped_run import run_rules
from loopinterp.models.stopping import Oracle
from loopinterp.models.study_examples import fit_to_model, loops_at
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
    import xarray as xr
    from torch import Tensor

    from loopinterp.models.protocol import LoopedModel
    from loopinterp.models.stopped_run import StoppingRule
    from loopinterp.tasks.task import Batch, Task


# Baselines of stopping rules: the answer read at T(n), at the one number of loops at which most
# examples of a cell are right, and of each example at the first loop at which it is right.
ORACLE, BEST, ANY = "oracle T(n)", "best loop in hindsight", "any loop right"
_PAST_T = 25  # loops past T(n) that rules may run, where no limit is given


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class EvaluationResult(Result, kind="evaluation"):
    """How often a model is right, by length and distribution.

    Arrays:
        exact_match: Share of examples right at every position with a target, with its 95% Wilson
            interval. ``extra_loop`` counts loops beyond T(n).
        bit_accuracy: Share of right positions, each example counting the same. Its interval counts
            examples, as the bits of one are dependent.
        constant_exact_match: Control: the best constant answer, chosen on the scored examples.
        constant_bit_accuracy: Control: the most frequent class at each position.
        perplexity: Of the right answer: exp of the mean cross-entropy over positions, then
            examples, with its 95% interval.
        loop_exact_match, loop_perplexity: The same after ``loop`` loops, whatever T(n) is; NaN for
            lengths that were not run.
        stopped_exact_match: Exact match where each stopping rule stops, and of the baselines T(n),
            best loop in hindsight, any loop right.
        stopped_at: Mean number of loops at which a rule stops.

    Attributes:
        n_samples: Examples in each cell.
        trained_up_to: Greatest length seen in training, if known.
        depth: Loops of a model with the same number at every length; else None.
        answered_after: The loops after which the answer is read, such as ``T(n) + 1``.
        not_judged: Distributions of the task that were left out.
        stopping_reads: The positions that stopping rules read, ``answer`` or ``state`` (all).
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
    stopping_reads: str = "answer"

    def lowest(self, length: int, extra_loop: int | None = None) -> Lowest:
        """The lowest exact match over distributions; by default at the extra loops closest to 0."""
        return lowest_at(self, length=length, extra_loop=extra_loop)


def nearest_extra_loop(result: Result) -> int:
    return min(result.data["extra_loop"].values.tolist(), key=abs)


def lowest_at(result: Result, *, extra_loop: int | None = None, **at: Any) -> Lowest:
    """The lowest exact match over distributions, at one place on the other axes."""
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
    stopping_reads: Literal["answer", "state"] = "answer",
    max_loops: NonNegativeInt | None = None,
    n_samples: PositiveInt = 300,
    trained_up_to: PositiveInt | None = None,
    seed: Seed = 0,
) -> EvaluationResult:
    """Exact match, bit accuracy and perplexity at T(n) loops, and at others if asked.

    A model with a ``loop_rule`` is read by it (an ordinary transformer after 1 loop). Tasks
    answered token by token are scored in one pass over the right answers: exact match is that of
    greedy generation, bit accuracy and perplexity are of the next token after right ones. The
    examples are never those of training.

    Args:
        distributions: Input distributions; all of the task if None.
        extra_loops: Loops relative to T(n); may be negative.
        loops: Absolute numbers of loops.
        stopping: Stopping rules by name (:func:`~loopinterp.app.stopping_rules` makes some).
        stopping_reads: The positions that rules read: those of the answer, or every position.
        max_loops: Loops after which rules stop every example, at all lengths alike. If None,
            T(n) + 25, which tells a rule something of n.
        n_samples: Examples for each length and distribution.
        trained_up_to: Greatest length seen in training, marked in the figures.

    Raises:
        InputError: If the model is of another task, or sees answers in its input.
    """
    lists = {"lengths": lengths, "distributions": distributions, "extra_loops": extra_loops}
    for name, values in lists.items():
        fits = values is None or len(values)
        need(fits, name, "at least one value", "none", f"Pass {name}=[…].")
    for name in {ORACLE, BEST, ANY} & set(stopping or ()):
        need(False, "stopping", f"no {name!r}", "one", "Give that rule another name.")
    import xarray as xr

    names = askable_distributions(model, task, lengths, n_samples, distributions)
    extra, lengths, loops = (sorted(set(x)) for x in (extra_loops, lengths, loops))
    rules = {ORACLE: Oracle(), **stopping} if stopping else {}
    used = stopping or (max_loops is None and stopping_reads == "answer")
    fix = "Pass stopping={name: rule} too."
    need(bool(used), "max_loops, stopping_reads", "their defaults without stopping", "others", fix)
    most = max(loops_at(model, task, n) for n in lengths)
    expected, fix = f"at least {most}, the loops of the longest length", "Raise it."
    need(max_loops is None or max_loops >= most, "max_loops", expected, str(max_loops), fix)
    described = {"task": {"name": task.name, **task.config()}, "model": describe_model(model)}
    settings = {"n_samples": n_samples, "stopping": [repr(rule) for rule in rules.values()]}
    if rules:
        settings["max_loops"] = max_loops
    with study(seed, **described, **settings) as watch:
        cells = []
        for distribution, length in track(list(product(names, lengths)), "evaluate"):
            generator = stream(seed, f"evaluation {distribution} {length}")
            batch = task.sample(
                length, batch_size=n_samples, generator=generator, distribution=distribution
            )
            batch = fit_to_model(model, replace(batch, task=task).to(device_of(model)))
            cell = _cell(model, batch, extra, loops, rules, stopping_reads, max_loops)
            cells.append(cell.expand_dims(distribution=[distribution], length=[length]))
        by_distribution = (cells[k : k + len(lengths)] for k in range(0, len(cells), len(lengths)))
        # Lengths may be run to different loops: NaN after the others.
        parts = [xr.concat(each, "length", join="outer") for each in by_distribution]
        data = xr.concat(parts, "distribution", join="outer")
        axes = {str(k): EvaluationResult.VARIABLES[str(k)].split() for k in data}
        return EvaluationResult.of(
            watch,
            coords={str(k): x.values.tolist() for k, x in data.coords.items() if k != ESTIMATE},
            **{name: data[name].transpose(*axes[name]).values for name in axes},
            task=task.name,
            n_samples=n_samples,
            trained_up_to=trained_up_to,
            depth=own_depth(model),
            answered_after=str(rule_of(model) or "T(n)"),
            not_judged=[name for name in task.distributions if name not in names],
            stopping_reads=stopping_reads,
        )


def _cell(
    model: LoopedModel | Any,
    batch: Batch,
    extra: list[int],
    loops: Sequence[int],
    rules: Mapping[str, StoppingRule],
    reads: str,
    max_loops: int | None,
) -> xr.Dataset:
    import xarray as xr

    n_loops, n = batch.n_loops, len(batch)
    last = int(n_loops.max()) + _PAST_T if max_loops is None else max_loops
    least, fix = int(n_loops.min()), "Take away fewer loops, or drop the short lengths."
    expected = f"at least -{least}, as length {int(batch.n.min())} has {least} loops"
    need(least + min(extra) >= 0, "extra_loops", expected, str(min(extra)), fix)
    # Rules are read after every loop up to the last, and their best in hindsight with them.
    absolute = sorted({*loops, *range(last + 1 if rules else 0)})
    ends = {loop + k for loop in n_loops.unique().tolist() for k in extra}
    # A rule may be asked long after the states have ceased to be finite.
    scores = scores_at(model, batch, ends | {*absolute}, may_diverge=bool(rules))
    by_extra = []
    for k in extra:  # each example after its own number of loops
        at, which = (n_loops + k).unique(return_inverse=True)
        parts = zip(*(scores[loop] for loop in at.tolist()))
        by_extra.append(Scores(*(torch.stack(x).gather(0, which[None])[0] for x in parts)))

    def shares(scores: Sequence[Tensor]) -> np.ndarray:
        means = [float(x.double().mean()) for x in scores]
        return wilson_estimate(np.array(means) * n, n)

    def perplexity(scores: Sequence[Scores]) -> np.ndarray:
        return np.stack([perplexity_estimate(s.cross_entropy) for s in scores])

    along, constant = ("extra_loop", ESTIMATE), constant_scores(batch.targets)
    coords: dict[str, Any] = {"extra_loop": extra}
    arrays: dict[str, Any] = {
        "exact_match": (along, shares([s.exact for s in by_extra])),
        "bit_accuracy": (along, shares([s.share for s in by_extra])),
        "perplexity": (along, perplexity(by_extra)),
        "constant_exact_match": constant[0],
        "constant_bit_accuracy": constant[1],
    }
    if absolute:
        along, at_loop = ("loop", ESTIMATE), [scores[loop] for loop in absolute]
        coords["loop"] = absolute
        arrays["loop_exact_match"] = along, shares([s.exact for s in at_loop])
        arrays["loop_perplexity"] = along, perplexity(at_loop)
    if rules:
        mask = batch.targets != IGNORE if reads == "answer" else None
        each = [*rules.values()]
        stops = run_rules(model, batch.inputs, each, max_loops=last, mask=mask, n_loops=n_loops)
        right = torch.stack([scores[loop].exact for loop in range(last + 1)])  # [loop, example]
        best = right.double().mean(1).argmax().expand(1, n)
        first = torch.where(right.any(0), right.int().argmax(0), last)[None]
        stops = torch.cat([stops, best, first])  # [rule, example]; two rules know in hindsight
        coords["rule"] = [*rules, BEST, ANY]
        arrays["stopped_exact_match"] = ("rule", ESTIMATE), shares([*right.gather(0, stops)])
        arrays["stopped_at"] = "rule", stops.double().mean(1).cpu().numpy()
    return xr.Dataset(arrays, coords)


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class OperandGrid(Result, kind="operand-grid"):
    """Exact match by the lengths of both operands and the number of loops.

    ``exact_match`` is the share of answers that are fully right, with its 95% Wilson interval.
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
    """Exact match for all pairs of operand lengths up to ``to``, after several numbers of loops.

    An answer written token by token is right if greedy generation gives it.

    Args:
        task: One with ``sample_operands(n_a, n_b, batch_size=, generator=)``.
        n_samples: Examples in each cell.
        unfinished: A file of finished cells, from which an interrupted grid resumes with the same
            numbers. Remove it once the result is saved.
    """
    need_task(task)
    draw: Any = getattr(task, "sample_operands", None)
    expected = "one that draws operands of given lengths (sample_operands)"
    fix = "Take a task of two operands, or evaluate it by length."
    need(callable(draw), "task", expected, f"{task.name!r}", fix)
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
