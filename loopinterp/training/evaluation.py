"""Length generalisation: exact match and bit accuracy by length and distribution."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from loopinterp.errors import InputError, check_integer
from loopinterp.intervals import ESTIMATE
from loopinterp.models.looped_model import need_model
from loopinterp.models.model_description import describe_model, device_of
from loopinterp.models.run_length import own_depth, rule_of
from loopinterp.models.stopping_rules import Oracle
from loopinterp.progress import track
from loopinterp.results import Result, study
from loopinterp.study_examples import fit_to_model, need_model_of
from loopinterp.tasks.sampling import check_size, pick_distribution
from loopinterp.tasks.study_data import need_task
from loopinterp.training.answer_scores import Lowest, constant_scores, lowest_of
from loopinterp.training.evaluation_cells import Cell, arrays_of, measure_cell
from loopinterp.training.seeding import stream
from loopinterp.training.unseen_answers import need_unseen_answers

if TYPE_CHECKING:
    from loopinterp.models.looped_model import LoopedModel
    from loopinterp.models.stopping_rules import StoppingRule
    from loopinterp.tasks.task import Task

ORACLE = "oracle T(n)"
"""The rule that is told T(n): what the others are compared with."""

BEST = "best loop in hindsight"
"""The one number of loops at which most examples of a cell are right; of equals the least."""

ANY = "any loop right"
"""Each example at the first loop at which it is right: what no rule can be above."""


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class EvaluationResult(Result, kind="evaluation"):
    """How often a model is right, by length and distribution.

    Arrays:
        exact_match: Share of examples that are right at every position that is asked for, with
            its 95% Wilson interval. ``extra_loop`` counts loops beyond T(n).
        bit_accuracy: Share of positions that are right, each example counting the same. Its
            interval has the number of examples as sample size: bits of one example are not
            independent, so this is on the safe side.
        constant_exact_match: Control: the best answer that is the same for every example, such as
            the commonest. It is chosen on the examples that it is scored on.
        constant_bit_accuracy: Control: the likeliest class at each position. High bit accuracy
            beside a low exact match is what an answer without the hard part looks like.
        perplexity: Of the right answer, the geometric mean over its positions and then over
            examples: exp of the mean cross-entropy; with its 95% interval over examples.
        loop_exact_match: Exact match after ``loop`` loops, whatever T(n) is: after those that were
            asked for, and after all where stopping rules were. NaN where a length was not run on.
        loop_perplexity: The same, of the perplexity.
        stopped_exact_match: Exact match where each stopping rule stops, if any were asked for;
            :data:`ORACLE` is among them, and in hindsight :data:`BEST` and :data:`ANY`.
        stopped_at: Mean number of loops at which it stops.

    Attributes:
        task: Name of the task.
        n_samples: Examples in each cell.
        trained_up_to: Greatest length seen in training, or None if not known.
        depth: Loops of a model that makes as many whatever the length, as one that was trained so:
            it is asked after those instead of T(n). None for all others.
        answered_after: The loops after which the answer is read, in words: ``T(n)``, or what the
            model's ``loop_rule`` makes of it, as ``T(n) + 1``.
        not_judged: Distributions of the task that were left out, so that :meth:`lowest` is not the
            task's.
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

        Args:
            length: One of the lengths.
            extra_loop: One of the extra loops; :attr:`nearest_extra_loop` if None.
        """
        loop = self.nearest_extra_loop if extra_loop is None else extra_loop
        at = {"length": length, "extra_loop": loop, ESTIMATE: "value"}
        return lowest_of(self.data["exact_match"].sel(at, drop=True).to_series().to_dict())

    @property
    def nearest_extra_loop(self) -> int:
        """The number of extra loops that is nearest to none: 0 where T(n) itself was run."""
        return min(self.data["extra_loop"].values.tolist(), key=abs)


@torch.no_grad()
def evaluate(
    model: LoopedModel | Any,
    task: Task,
    lengths: Sequence[int],
    *,
    distributions: Sequence[str] | None = None,
    extra_loops: Sequence[int] = (0,),
    loops: Sequence[int] = (),
    stopping: Mapping[str, StoppingRule] | None = None,
    stopping_margin: int = 25,
    n_samples: int = 300,
    trained_up_to: int | None = None,
    seed: int = 0,
) -> EvaluationResult:
    """Exact match, bit accuracy and perplexity at T(n) loops, and at others if asked.

    A model that has a depth of its own (its ``loop_rule`` names one number of loops, as that of a
    run with ``objective.n_loops``; an ordinary transformer's is 1) is asked after that instead;
    one that was trained to answer after another number than T(n) (``objective.extra_loops``)
    after what its rule makes of T(n).

    Of a task that is answered token by token, exact match is that of greedy generation up to the
    end token: until its first mistake a model has generated the right answer, which is what stands
    before it here, so one pass over the right answers tells. A model that sees what comes after is
    refused. Bit accuracy and perplexity are those of the next token after right ones.

    The examples come from another random stream than those of training, whatever the seed.

    Args:
        model: Any looped model; the examples are moved to where its weights are.
        task: What to ask it.
        lengths: Problem lengths.
        distributions: Input distributions; all of the task if None.
        extra_loops: Loops more than T(n), or fewer where negative.
        loops: Numbers of loops that do not depend on the length, as ``[1, 2, 4, 8, 16, 32]``.
        stopping: Stopping rules by name (:func:`loopinterp.workflow.stopping_rules` makes some),
            to be compared with reading the answer at T(n) and with the best loop in hindsight;
            none by default.
        stopping_margin: Loops past T(n) after which an example is stopped in any case.
        n_samples: Examples for each length and distribution.
        trained_up_to: Greatest length seen in training, to be marked in the figures.
        seed: Seed of the examples.

    Raises:
        InputError: If a list is empty, a number is out of range, or a name is unknown; if the
            model is of another task, or sees answers that stand in its input.
    """
    need_model(model)
    need_task(task)
    need_model_of(task, model)
    asked = task.distributions if distributions is None else distributions
    names = list(dict.fromkeys(asked))
    _check(task, lengths, names, extra_loops, n_samples)
    need_unseen_answers(task, model, min(lengths))
    extra, cells = sorted(set(extra_loops)), sorted(set(lengths))
    loops = sorted({check_integer("loops", loop, least=0) for loop in loops})
    check_integer("stopping_margin", stopping_margin, least=0)
    if trained_up_to is not None:
        check_integer("trained_up_to", trained_up_to, least=1)
    for name in {ORACLE, BEST, ANY} & set(stopping or ()):
        fix = "Give that rule another name."
        raise InputError("stopping", expected=f"no {name!r}", given="one", fix=fix)
    rules = {ORACLE: Oracle(), **stopping} if stopping else {}
    where = list(product(enumerate(names), enumerate(cells)))
    found: dict[tuple[int, int], Cell] = {}
    described = {"task": {"name": task.name, **task.config()}, "model": describe_model(model)}
    settings = {"n_samples": n_samples, "stopping": [repr(rule) for rule in rules.values()]}
    with study(seed, **described, **settings) as watch:
        for (d, distribution), (k, length) in track(where, "evaluate"):
            generator = stream(seed, f"evaluation {distribution} {length}")
            batch = task.sample(
                length, batch_size=n_samples, generator=generator, distribution=distribution
            )
            batch = fit_to_model(model, replace(batch, task=task).to(device_of(model)))
            cell = measure_cell(model, batch, extra, loops, [*rules.values()], stopping_margin)
            found[d, k] = cell._replace(constant=constant_scores(batch.targets))
        by_loop = sorted({loop for cell in found.values() for loop in cell.by_loop})
        shape = (len(names), len(cells))
        return EvaluationResult.of(
            watch,
            coords={
                "extra_loop": extra,
                "distribution": names,
                "length": cells,
                **({"loop": by_loop} if by_loop else {}),
                **({"rule": [*rules, BEST, ANY]} if rules else {}),
            },
            **arrays_of(found, shape, extra, by_loop, n_samples),
            task=task.name,
            n_samples=n_samples,
            trained_up_to=trained_up_to,
            depth=own_depth(model),
            answered_after=str(rule_of(model) or "T(n)"),
            not_judged=[name for name in task.distributions if name not in names],
        )


def _check(
    task: Task,
    lengths: Sequence[int],
    distributions: Sequence[str],
    extra: Sequence[int],
    n_samples: int,
) -> None:
    given = {"lengths": lengths, "distributions": distributions, "extra_loops": extra}
    for name, values in given.items():
        if not values:
            fix = f"Pass {name}=[…]."
            raise InputError(name, expected="at least one value", given="none", fix=fix)
    for name in distributions:
        pick_distribution(task, name)
    for k in extra:
        check_integer("extra_loops", k)
    check_integer("n_samples", n_samples, least=1)
    check_size(task, max(lengths), n_samples, "lengths, n_samples")
