"""Early exits: accuracy against loops, for a fixed budget, an oracle and stopping rules."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch

from loopinterp.core.boundary import Loops, checked
from loopinterp.core.errors import InputError, check_integer
from loopinterp.core.progress import track
from loopinterp.core.results import Result, study
from loopinterp.core.settings import Seed
from loopinterp.dynamics.measures import correctness, exact_match
from loopinterp.dynamics.rounding import described
from loopinterp.dynamics.runs import chunks, gather, stream_measures
from loopinterp.models.iteration import bind
from loopinterp.models.precision import in_float32, no_autocast
from loopinterp.models.protocol import need_model
from loopinterp.models.stopped_run import first_ready, score_loops
from loopinterp.models.stopping import STOPPING_RULES, GateAbove
from loopinterp.models.study_examples import examples_for, inputs_and_loops, need_loops
from loopinterp.tasks.sampling import need_asked
from loopinterp.tasks.task import IGNORE, Batch

if TYPE_CHECKING:
    from torch import Tensor

    from loopinterp.models import LoopedModel
    from loopinterp.models.stopped_run import StoppingRule
    from loopinterp.tasks.task import Task

RULES: dict[str, StoppingRule] = {
    "residual": STOPPING_RULES["residual"],
    "readout KL": STOPPING_RULES["readout-kl"],
    "second-order": STOPPING_RULES["acceleration"],
    "entropy": STOPPING_RULES["entropy"],
    "confidence": STOPPING_RULES["confidence"],
}
"""The compared rules; each is swept over all tolerances."""


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class ExitResult(Result, kind="exits"):
    """The result of :func:`exit_study`. ``loop`` counts loops made, from 0.

    Arrays:
        exact: Whether all asked positions of an example are right after a loop.
        agreement: Share of them with the answer of the last loop.
        norm: Mean norm of the state there, as in :class:`LoopMeasures`.
        residual: Mean residual there, likewise.
        cosine: Median cosine between successive updates there, likewise.
        confidence: Mean probability of the top class there.
        entropy: Mean entropy of the readout there, in nats.
        readout_kl: Mean divergence of the readout from the previous loop's, in nats.
        score: Score of each rule; lower is readier to stop.
        tolerance: Tolerances of each rule, from no stop to all stops.
        swept_exact: Share of examples right where the rule stops them, at each tolerance.
        swept_loops: Mean number of loops, at least 1.
        swept_dealt: Control: share right with the same stops assigned to examples at random.
        own_exact: Share right with the rule's own tolerance.
        own_loops: Mean number of loops with it.
        another: Control: whether another example's right answer is read after some loop.
        answer_loops: T(n) of each example; the last loop for inputs alone.
        float32_exact: Of a run in half precision: ``exact`` of the same weights in float32.

    Attributes:
        targets: Whether the data has targets; if not, the last loop's answer counts as right.
        rules: Each rule as it was given.
    """

    VARIABLES: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("exact", "agreement", "norm", "residual", "cosine"), "loop batch"),
        **dict.fromkeys(("confidence", "entropy", "readout_kl"), "loop batch"),
        "score": "rule loop batch",
        **dict.fromkeys(("tolerance", "swept_exact", "swept_loops", "swept_dealt"), "rule step"),
        **dict.fromkeys(("own_exact", "own_loops"), "rule"),
        **dict.fromkeys(("another", "answer_loops"), "batch"),
        "float32_exact": "loop batch",
    }
    OPTIONAL: ClassVar[frozenset[str]] = frozenset(("float32_exact",))

    targets: bool
    rules: dict[str, str]

    @property
    def n_loops(self) -> int:
        """Loops of the run."""
        return self.data.sizes["loop"] - 1

    def decided_by_rounding(self) -> int | None:
        """Examples with a loop at which one precision alone is right; None for a float32 run."""
        if "float32_exact" not in self.data:
            return None
        return int((self.data["exact"] != self.data["float32_exact"]).any("loop").sum())

    def oracle(self) -> tuple[float, float]:
        """Share of examples that are right after some loop, and the mean of the first such loop.

        An example that is never right counts with the last loop.
        """
        exact = self.data["exact"].values[1:]  # [loop, batch]
        first = np.where(exact.any(0), exact.argmax(0) + 1, self.n_loops)
        return float(exact.any(0).mean()), float(first.mean())

    def best_loop(self) -> tuple[float, int]:
        """The largest share right with a fixed budget, and that budget."""
        exact = self.data["exact"].mean("batch").values[1:]  # [loop]
        return float(exact.max()), int(exact.argmax()) + 1

    def gain(self, rule: str) -> tuple[float, float, float]:
        """Share right, that of the control, and mean loops, where the two shares differ most."""
        at = self.data.sel(rule=rule)
        best = int(np.argmax((at["swept_exact"] - at["swept_dealt"]).values))
        exact, dealt, loops = (
            float(at[name][best]) for name in ("swept_exact", "swept_dealt", "swept_loops")
        )
        return exact, dealt, loops

    def cheapest(self, rule: str) -> float | None:
        """Least mean number of loops at which a rule matches the best fixed budget.

        None if it never does, or no budget gets anything right.
        """
        at, best = self.data.sel(rule=rule), self.best_loop()[0]
        good = at["swept_loops"].where((at["swept_exact"] >= best) & (best > 0))
        return float(good.min()) if good.notnull().any() else None


@torch.no_grad()
@checked
def exit_study(
    model: LoopedModel | Any,
    data: Batch | Task | Tensor,
    *,
    rules: Mapping[str, StoppingRule] | None = None,
    gate: Callable[[Tensor], Tensor] | None = None,
    n_loops: Loops | None = None,
    n: int | None = None,
    batch_size: int | None = None,
    seed: Seed = 0,
) -> ExitResult:
    """Accuracy against loops, for fixed budgets, an oracle and stopping rules.

    Every rule is swept over all tolerances, so that rules are compared at equal mean numbers of
    loops. The oracle stops each example at its first right loop.

    Args:
        data: A batch, a task to draw from, or inputs alone, where the last loop's answer counts as
            right.
        rules: Online rules by name; :data:`RULES` by default.
        gate: The model's own gate: maps a state to a probability of stopping for each position or
            example. It adds the rules "gate" and "gate, cumulated".
        n_loops: Loops to run; the longest T(n) by default.
        n, batch_size, seed: As for :func:`~loopinterp.tasks.as_batch`; 256 examples by default.

    Raises:
        InputError: If a rule is offline, or an example has no asked position.

    Source: oracle over exits against gates and confidence, arXiv 2607.20519; second-order exits,
        arXiv 2509.23314.

    Example:
        >>> from loopinterp.compiler import compile_program
        >>> from loopinterp.tasks import Addition
        >>> model = compile_program("ripple", max_length=6).model
        >>> result = exit_study(model, Addition(), n=5, batch_size=32)
        >>> result.best_loop()[0], result.oracle()[0]
        (1.0, 1.0)
    """
    need_model(model)
    asked_rules = {**(RULES if rules is None else rules)}
    if gate is not None:
        asked_rules["gate"] = GateAbove(gate)
        asked_rules["gate, cumulated"] = GateAbove(gate, cumulated=True)
    offline = [name for name, rule in asked_rules.items() if rule.tolerance is None]
    if offline or not asked_rules:
        raise InputError(
            "rules",
            expected="online rules, whose tolerance can be swept",
            given=f"{', '.join(offline)}, which see all loops first" if offline else "none",
            fix="Leave rules out, or measure offline rules with training.evaluate(stopping=...).",
        )
    inputs, targets, n_loops, ends = _examples(model, data, n_loops, n, batch_size, seed)
    config = {"n_loops": n_loops, "n_examples": len(inputs), "rules": list(asked_rules)}
    about = described(model, inputs)
    precise = in_float32(model, inputs) if "state_dtype" in about else None
    with study(seed, study="exits", **about, **config) as watch:
        bound = bind(model, inputs[:1])
        size = 4 * (4 * bound.h0.numel() + 8 * bound.readout(bound.h0).numel())
        parts, score_parts = [], []
        for rows in track(list(chunks(len(inputs), size)), "exits"):
            part = _follow(
                model, inputs[rows], targets if targets is None else targets[rows], n_loops
            )
            if precise is not None:  # the same answers are right
                with no_autocast(inputs.device):
                    other = _follow(precise, inputs[rows], part["_want"], n_loops)
                part["float32_exact"] = other["exact"]
            mask, listed = part["_want"] != IGNORE, list(asked_rules.values())
            parts.append(part)
            score_parts.append(
                score_loops(model, inputs[rows], listed, max_loops=n_loops, mask=mask)
            )
        scores = [torch.cat([s.cpu() for s in each], 1) for each in zip(*score_parts)]
        arrays = gather(ExitResult, [{k: v for k, v in p.items() if k[0] != "_"} for p in parts])
        answers, right = (torch.cat([p[k].cpu() for p in parts], -2) for k in ("_answer", "_want"))
        other = right.roll(1, 0)  # the right answer of another example, unless it is the same
        # Whether it is read after some loop, [batch].
        at_some = ((answers[1:] == other) | (other == IGNORE)).all(-1).any(0)
        another = torch.where((other == right).all(1), math.nan, at_some.double())
        return ExitResult.of(
            watch,
            coords={"loop": range(n_loops + 1), "rule": list(asked_rules)},
            **arrays,
            score=torch.stack(scores),
            **_sweep(arrays["exact"], scores, list(asked_rules.values())),
            another=another,
            answer_loops=ends,
            targets=targets is not None,
            rules={name: repr(rule) for name, rule in asked_rules.items()},
        )


def _examples(
    model: Any, data: Any, n_loops: int | None, n: int | None, batch_size: int | None, seed: int
) -> tuple[Tensor, Tensor | None, int, Tensor]:
    """Inputs, targets if there are any, loops, and T(n) of each example."""
    if isinstance(data, torch.Tensor):
        inputs, n_loops = inputs_and_loops(model, data, n_loops)
        return inputs, None, n_loops, torch.full((len(inputs),), n_loops)
    if n_loops is None:
        need_loops(model)
    if batch_size is None and not isinstance(data, Batch):
        batch_size = 256
    batch = examples_for(model, data, n=n, batch_size=batch_size, seed=seed)
    n_loops = int(batch.n_loops.max()) if n_loops is None else n_loops
    check_integer("n_loops", n_loops, least=1)
    need_asked(batch)
    return batch.inputs, batch.targets, n_loops, batch.n_loops


def _follow(model: Any, inputs: Tensor, targets: Tensor | None, n_loops: int) -> dict[str, Tensor]:
    """Readings of some examples after every loop, and measures of their states."""
    series: dict[str, list[Tensor]] = defaultdict(list)
    counted = torch.ones(inputs.shape[:2], dtype=torch.bool, device=inputs.device)
    counted = counted if targets is None else targets != IGNORE
    share = counted / counted.sum(1, keepdim=True)  # of each position in its example, [batch, pos]
    before: Tensor | None = None
    iteration = bind(model, inputs)
    for loop, h, moved in stream_measures(iteration, n_loops):
        logits = iteration.read(h, loop)
        log_p = logits.log_softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))
        p = log_p.exp()  # [batch, pos, class]
        series["_answer"].append(log_p.argmax(-1))
        gap = torch.full_like(share, math.nan) if before is None else (p * (log_p - before)).sum(-1)
        per_position = {"confidence": p.amax(-1), "readout_kl": gap.clamp(min=0)}
        per_position |= {"entropy": torch.special.entr(p).sum(-1)}
        per_position |= {name: getattr(moved, name) for name in ("norm", "residual")}
        for name, values in per_position.items():
            series[name].append(torch.where(counted, values * share, 0).sum(1).float())
        cosine = moved.cosine.masked_fill(~counted, math.nan)  # [batch, pos]
        series["cosine"].append(cosine.nanmedian(dim=1).values.float())
        before = log_p
    arrays = {name: torch.stack(values) for name, values in series.items()}  # [loop, batch, ...]
    answers = arrays["_answer"]  # [loop, batch, pos]
    right_answers = answers[-1] if targets is None else targets
    arrays["exact"] = exact_match(correctness(answers, right_answers)).bool()
    arrays["agreement"] = ((answers == answers[-1]) * share).sum(-1).float()
    arrays["_want"] = right_answers
    return arrays


def _sweep(
    exact: Tensor, scores: list[Tensor], rules: list[StoppingRule], *, n_steps: int = 33
) -> dict[str, np.ndarray]:
    """Every rule at tolerances from no stop to all stops."""
    by_loop = exact.double().mean(1)  # share that is right if all stop there
    swept: dict[str, list[Any]] = defaultdict(list)

    def stopped(score: Tensor, tolerance: float) -> tuple[float, float, float]:
        loops = first_ready(score, tolerance)  # where each example stops
        # Share right where each example stops
        right = exact.gather(0, loops[None])[0].double().mean()
        return float(right), float(loops.double().mean()), float(by_loop[loops].mean())

    for rule, by_example in zip(rules, scores):
        score = by_example.clone()  # [loop, batch]
        score[0] = math.inf  # no loop was made
        finite = score[score.isfinite()].double()
        steps = torch.linspace(0, 1, n_steps, dtype=torch.float64)
        # From the least finite score to the greatest
        tolerances = finite.quantile(steps).float().tolist() if len(finite) else [0.0] * n_steps
        tolerances = [-math.inf, *tolerances]
        rows = [stopped(score, tolerance) for tolerance in tolerances]
        swept["tolerance"].append(tolerances)
        for name, values in zip(("swept_exact", "swept_loops", "swept_dealt"), zip(*rows)):
            swept[name].append(values)
        assert rule.tolerance is not None  # as of every online rule
        right, loops, _ = stopped(score, rule.tolerance)
        swept["own_exact"].append(right)
        swept["own_loops"].append(loops)
    return {name: np.asarray(values, dtype=float) for name, values in swept.items()}
