"""Length generalisation: exact match and bit accuracy by length and distribution."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch

from loopinterp.errors import InputError, check_integer
from loopinterp.intervals import ESTIMATE, wilson_estimate
from loopinterp.models.looped_model import bind, need_model
from loopinterp.models.model_description import describe_model, device_of
from loopinterp.models.run_length import own_depth
from loopinterp.models.stopped_run import run_until
from loopinterp.models.stopping_rules import Oracle
from loopinterp.progress import track
from loopinterp.results import Result, study
from loopinterp.study_examples import fit_to_model, need_model_of
from loopinterp.tasks.sampling import check_size, pick_distribution
from loopinterp.tasks.study_data import need_task
from loopinterp.tasks.task import IGNORE
from loopinterp.training.seeding import stream

if TYPE_CHECKING:
    from jaxtyping import Int
    from torch import Tensor

    from loopinterp.models.looped_model import LoopedModel
    from loopinterp.models.stopping_rules import StoppingRule
    from loopinterp.tasks.task import Batch, Task

_EXAMPLES_AT_ONCE = 32
"""Few enough that the activations stay in a CPU's cache."""

ORACLE = "oracle T(n)"
"""The rule that is told T(n): what the others are compared with."""


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class EvaluationResult(Result, kind="evaluation"):
    """How often a model is right, by length and distribution.

    Arrays:
        exact_match: Share of examples that are right at every position that is asked for, with
            its 95% Wilson interval. ``extra_loop`` counts loops beyond T(n).
        bit_accuracy: Share of positions that are right, each example counting the same. Its
            interval has the number of examples as sample size: bits of one example are not
            independent, so this is on the safe side.
        constant_exact_match: Control: the best answer that is the same at every position.
        constant_bit_accuracy: Control: the same answer, by position. High bit accuracy beside a
            low exact match is what an answer without the hard part looks like.
        stopped_exact_match: Exact match where each stopping rule stops, if any were asked for;
            the rule :data:`ORACLE` is among them.
        stopped_at: Mean number of loops at which it stops.

    Attributes:
        task: Name of the task.
        n_samples: Examples in each cell.
        trained_up_to: Greatest length seen in training, or None if not known.
        depth: Loops of a model that makes as many whatever the length, as one that was trained so:
            it is asked after those instead of T(n). None for all others.
    """

    VARIABLES: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(
            ("exact_match", "bit_accuracy"), f"extra_loop distribution length {ESTIMATE}"
        ),
        **dict.fromkeys(("constant_exact_match", "constant_bit_accuracy"), "distribution length"),
        "stopped_exact_match": f"rule distribution length {ESTIMATE}",
        "stopped_at": "rule distribution length",
    }
    OPTIONAL: ClassVar[frozenset[str]] = frozenset({"stopped_exact_match", "stopped_at"})

    task: str
    n_samples: int
    trained_up_to: int | None
    depth: int | None = None

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
    stopping: Mapping[str, StoppingRule] | None = None,
    stopping_margin: int = 25,
    n_samples: int = 300,
    trained_up_to: int | None = None,
    seed: int = 0,
) -> EvaluationResult:
    """Exact match and bit accuracy at T(n) loops, and at others if asked.

    A model that has a depth of its own (its ``loop_rule`` names one number of loops, as that of a
    run with ``objective.n_loops``; an ordinary transformer's is 1) is asked after that instead.

    The examples come from another random stream than those of training, whatever the seed.

    Args:
        model: Any looped model; the examples are moved to where its weights are.
        task: What to ask it.
        lengths: Problem lengths.
        distributions: Input distributions; all but the one made for training if None
            (see :func:`judged_distributions`).
        extra_loops: Loops more than T(n), or fewer where negative.
        stopping: Stopping rules by name (:func:`loopinterp.workflow.stopping_rules` makes some),
            to be compared with reading the answer at T(n); none by default.
        stopping_margin: Loops past T(n) after which an example is stopped in any case.
        n_samples: Examples for each length and distribution.
        trained_up_to: Greatest length seen in training, to be marked in the figures.
        seed: Seed of the examples.

    Raises:
        InputError: If a list is empty, a number is out of range, or a name is unknown.
    """
    need_model(model)
    need_task(task)
    need_model_of(task, model)
    asked = judged_distributions(task) if distributions is None else distributions
    names = list(dict.fromkeys(asked))
    depth = own_depth(model)
    _check(task, lengths, names, extra_loops, n_samples, depth)
    extra, cells = sorted(set(extra_loops)), sorted(set(lengths))
    check_integer("stopping_margin", stopping_margin, least=0)
    if trained_up_to is not None:
        check_integer("trained_up_to", trained_up_to, least=1)
    if stopping and ORACLE in stopping:
        fix = "Give that rule another name."
        raise InputError("stopping", expected=f"no {ORACLE!r}", given="one", fix=fix)
    rules = {ORACLE: Oracle(), **stopping} if stopping else {}
    shape = (len(names), len(cells))
    exact, bits = np.zeros((2, len(extra), *shape))
    constant_exact, constant_bits = np.zeros((2, *shape))
    stopped, stopped_at = np.zeros((2, len(rules), *shape))
    described = {"task": {"name": task.name, **task.config()}, "model": describe_model(model)}
    settings = {"n_samples": n_samples, "stopping": [repr(rule) for rule in rules.values()]}
    with study(seed, **described, **settings) as watch:
        where = list(product(enumerate(names), enumerate(cells)))
        for (d, distribution), (k, length) in track(where, "evaluate"):
            generator = stream(seed, f"evaluation {distribution} {length}")
            batch = task.sample(
                length, batch_size=n_samples, generator=generator, distribution=distribution
            )
            batch = fit_to_model(model, replace(batch, task=task).to(device_of(model)))
            constant_exact[d, k], constant_bits[d, k] = _constant(batch, task.d_vocab_out)
            exact[:, d, k], bits[:, d, k] = _score(model, batch, extra)
            for r, rule in enumerate(rules.values()):
                stopped[r, d, k], stopped_at[r, d, k] = _stop(model, batch, rule, stopping_margin)
        return EvaluationResult.of(
            watch,
            coords={
                "extra_loop": extra,
                "distribution": names,
                "length": cells,
                **({"rule": list(rules)} if rules else {}),
            },
            exact_match=wilson_estimate(exact * n_samples, n_samples),
            bit_accuracy=wilson_estimate(bits * n_samples, n_samples),
            constant_exact_match=constant_exact,
            constant_bit_accuracy=constant_bits,
            stopped_exact_match=wilson_estimate(stopped * n_samples, n_samples) if rules else None,
            stopped_at=stopped_at if rules else None,
            task=task.name,
            n_samples=n_samples,
            trained_up_to=trained_up_to,
            depth=depth,
        )


def judged_distributions(task: Task) -> tuple[str, ...]:
    """The distributions a task is judged on: the plain one and the hardest, where it has both.

    Plain is ``"uniform"``, or the task's first where there is none; hardest is ``"chain"``.

    Example:
        >>> from loopinterp.tasks import get_task
        >>> judged_distributions(get_task("addition"))
        ('uniform', 'chain')
    """
    known = task.distributions
    plain = "uniform" if "uniform" in known else known[0]
    return (plain, "chain") if "chain" in known and plain != "chain" else (plain,)


def _score(
    model: LoopedModel | Any, batch: Batch, extra_loops: list[int]
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Exact match and bit accuracy after T(n) + k loops, for each k, in one run."""
    wanted = [int(batch.n_loops[0]) + k for k in extra_loops]
    chunks = [_answers(model, inputs, wanted) for inputs in batch.inputs.split(_EXAMPLES_AT_ONCE)]
    scores = [shares_right(torch.cat(answers), batch.targets) for answers in zip(*chunks)]
    exact, bits = zip(*scores)
    return exact, bits


def _answers(model: LoopedModel | Any, inputs: Tensor, loops: list[int]) -> list[Tensor]:
    """The most probable class at each position, after each of some increasing numbers of loops."""
    bound = bind(model, inputs)
    run = bound.run(loops[-1])
    return [bound.read(state, loop).argmax(-1) for loop, state in run if loop in loops]


def _stop(
    model: LoopedModel | Any, batch: Batch, rule: StoppingRule, margin: int
) -> tuple[float, float]:
    """Exact match, and mean number of loops, where a rule stops."""
    found = run_until(
        model,
        batch.inputs,
        rule,
        max_loops=int(batch.n_loops.max()) + margin,
        mask=batch.targets != IGNORE,
        n_loops=batch.n_loops,
    )
    exact, _ = shares_right(found.logits.argmax(-1), batch.targets)
    return exact, float(found.loop.double().mean())


def shares_right(
    answer: Int[Tensor, "batch pos"], targets: Int[Tensor, "batch pos"]
) -> tuple[float, float]:
    """Share of examples that are wholly right, and mean share of right positions."""
    asked = targets != IGNORE
    right = (answer == targets) & asked
    exact = (right | ~asked).all(-1).double().mean()
    by_example = right.sum(-1).double() / asked.sum(-1).double()
    return float(exact), float(by_example.mean())


def _constant(batch: Batch, d_vocab_out: int) -> tuple[float, float]:
    """The best of the answers that say the same everywhere."""
    answers = (torch.full_like(batch.targets, token) for token in range(d_vocab_out))
    exact, bits = zip(*(shares_right(answer, batch.targets) for answer in answers))
    return max(exact), max(bits)


def _check(
    task: Task,
    lengths: Sequence[int],
    distributions: Sequence[str],
    extra: Sequence[int],
    n_samples: int,
    depth: int | None,
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
    least = depth or min(task.n_loops(n) for n in lengths)
    if least + min(extra) < 0:
        raise InputError(
            "extra_loops",
            expected=f"at least -{least}, as length {min(lengths)} has {least} loops",
            given=str(min(extra)),
            fix="Take away fewer loops, or drop the short lengths.",
        )
