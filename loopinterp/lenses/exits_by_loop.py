"""Early exits: accuracy against loops, for a fixed budget, an oracle and stopping rules.

Weighted exits are answers of mixtures of all loops, by a gate's distribution over exits.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
import torch

from loopinterp.core.boundary import Loops, checked
from loopinterp.core.errors import InputError, check_integer
from loopinterp.core.results import Result, study
from loopinterp.core.settings import Seed
from loopinterp.core.text import track
from loopinterp.dynamics.measures import (
    AfterLoops,
    beside_float32,
    chunks,
    correctness,
    exact_match,
    gather,
    stream_measures,
)
from loopinterp.models.iteration import bind, no_autocast
from loopinterp.models.protocol import need_model
from loopinterp.models.stopped_run import first_ready, run_frozen, score_loops
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


Per = Literal["example", "token"]


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class ExitResult(AfterLoops, Result, kind="exits"):
    """The result of :func:`exit_study`. ``loop`` counts loops made, from 0.

    With ``per="token"``, a row of ``batch`` is an asked token.

    Arrays:
        exact: Whether all asked positions are right after a loop.
        agreement: Share of them with the last loop's answer.
        norm, residual, cosine: Means (of the cosine the median) over them (:class:`LoopMeasures`).
        confidence, entropy: Mean probability of the top class, and entropy of the readout (nats).
        readout_kl: Mean divergence from the previous loop's readout (nats).
        score: Score of each rule; lower is readier to stop.
        tolerance: Tolerances of each rule, from no stop to all stops.
        swept_exact: Share right where the rule stops, at each tolerance.
        swept_loops: Mean number of loops.
        swept_dealt: Control: share right with the same stops assigned at random.
        own_exact, own_loops: The same with the rule's own tolerance.
        another: Control: whether another row's right answer is read after some loop.
        answer_loops: T(n); the last loop for inputs alone.
        swept_examples: Share of examples with all asked tokens right where each stops.
        swept_examples_dealt: Control: the same with stops drawn from the rule's.
        own_dealt, own_examples: As ``swept_dealt``, ``swept_examples``, with the own tolerance.
        frozen_exact, frozen_examples, frozen_loops: As ``own_exact``, ``own_examples`` and
            ``own_loops``, with frozen states (:func:`~loopinterp.models.run_frozen`).
        weighted_exact: Whether the answer of the mixture of all loops is right.
        weighted_loops: Mean loop under the gate's distribution over exits.
        weighted_dealt: Control: share right with other tokens' distributions, by deal.
        float32_exact: In half precision: ``exact`` of the same weights in float32.

    Attributes:
        targets: If not, the last loop's answer counts as right.
        per: What stops by itself: each ``example``, or each asked ``token``.
    """

    VARIABLES: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("exact", "agreement", "norm", "residual", "cosine"), "loop batch"),
        **dict.fromkeys(("confidence", "entropy", "readout_kl"), "loop batch"),
        "score": "rule loop batch",
        **dict.fromkeys(("tolerance", "swept_exact", "swept_loops", "swept_dealt"), "rule step"),
        **dict.fromkeys(("own_exact", "own_loops"), "rule"),
        **dict.fromkeys(("another", "answer_loops", "example"), "batch"),
        **dict.fromkeys(("swept_examples", "swept_examples_dealt"), "rule step"),
        **dict.fromkeys(("own_dealt", "own_examples"), "rule"),
        **dict.fromkeys(("frozen_exact", "frozen_examples", "frozen_loops"), "rule"),
        **dict.fromkeys(("weighted_exact", "weighted_loops"), "batch"),
        "weighted_dealt": "deal",
        "float32_exact": "loop batch",
    }
    # Earlier versions saved only the arrays before ``example``.
    OPTIONAL: ClassVar[frozenset[str]] = frozenset([*VARIABLES][[*VARIABLES].index("example") :])

    targets: bool
    rules: dict[str, str]
    per: Per = "example"

    def decided_by_rounding(self) -> int | None:
        """Examples with a loop at which one precision alone is right; None for a float32 run."""
        if "float32_exact" not in self.data:
            return None
        return int((self.data["exact"] != self.data["float32_exact"]).any("loop").sum())

    def oracle(self) -> tuple[float, float]:
        """Share of rows that are right after some loop, and the mean of the first such loop.

        A row that is never right counts with the last loop.
        """
        exact = self.data["exact"].values[1:]  # [loop, batch]
        first = np.where(exact.any(0), exact.argmax(0) + 1, self.n_loops)
        return float(exact.any(0).mean()), float(first.mean())

    def best_loop(self) -> tuple[float, int]:
        """The largest share right with a fixed budget, and that budget."""
        exact = self.data["exact"].mean("batch").values[1:]  # [loop]
        return float(exact.max()), int(exact.argmax()) + 1

    def gain(self, rule: str) -> tuple[float, float, float]:
        """Share right, the control's, and mean loops, where the shares differ most."""
        at = self.data.sel(rule=rule)
        best = int(np.argmax((at["swept_exact"] - at["swept_dealt"]).values))
        exact, dealt, loops = (
            float(at[name][best]) for name in ("swept_exact", "swept_dealt", "swept_loops")
        )
        return exact, dealt, loops

    def cheapest(self, rule: str) -> float | None:
        """Least mean number of loops at which a rule matches the best fixed budget, if ever."""
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
    per: Per = "example",
    frozen: bool = False,
    n_loops: Loops | None = None,
    n: int | None = None,
    batch_size: int | None = None,
    seed: Seed = 0,
) -> ExitResult:
    r"""Accuracy against loops, for fixed budgets, an oracle and stopping rules.

    Every rule is swept over all tolerances, to compare rules at equal mean numbers of loops. The
    oracle stops each example at its first right loop.

    With ``per="token"``, each asked token stops by itself; its answer is the readout of the full
    run at that loop.

    With a gate :math:`\lambda_t`, the weighted exit of each token is the most probable class of

    .. math::
        \sum_t p_t \operatorname{softmax}(y_t), \quad p_t = \lambda_t \prod_{s<t} (1 - \lambda_s),

    with what is left at the last loop.

    Args:
        data: Examples, or inputs alone, where the last loop's answer counts as right.
        rules: Online rules by name; :data:`RULES` by default.
        gate: The model's own: maps a state to a probability of stopping for each position or
            example. It adds the rules "gate" and "gate, cumulated", and weighted exits.
        frozen: With ``per="token"``: one more run for each rule, at its own tolerance, with the
            states of stopped tokens frozen, as in some published models.
        n_loops: The longest T(n) by default.
        batch_size: 256 by default.

    Raises:
        InputError: If a rule is offline, or an example has no asked position.

    Source: oracle exits, arXiv 2607.20519; second-order exits, arXiv 2509.23314; weighted exits,
    arXiv 2510.25741.

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
    if frozen and per == "example":
        expected, fix = "per='token' with frozen=True", "Leave frozen out, or pass per='token'."
        raise InputError("per", expected=expected, given="'example'", fix=fix)
    inputs, targets, n_loops, ends = _examples(model, data, n_loops, n, batch_size, seed)
    listed, has_targets = list(asked_rules.values()), targets is not None
    config = {"n_loops": n_loops, "n_examples": len(inputs), "rules": list(asked_rules), "per": per}
    about, precise = beside_float32(model, inputs)
    with study(seed, study="exits", **about, **config) as watch:
        bound = bind(model, inputs[:1])
        size = 4 * (4 * bound.h0.numel() + 8 * bound.readout(bound.h0).numel())
        parts, score_parts = [], []
        slices = list(chunks(len(inputs), size))
        for rows in track(slices, "exits"):
            right = None if targets is None else targets[rows]
            part = _follow(model, inputs[rows], right, n_loops, per)
            if precise is not None:  # the same answers are right
                with no_autocast(inputs.device):
                    other = _follow(precise, inputs[rows], part["_right"], n_loops, per)
                part["float32_exact"] = other["exact"]
            parts.append(part)
            mask = part["_mask"]
            options: Any = {"max_loops": n_loops, "mask": mask, "per_token": per == "token"}
            scores = score_loops(model, inputs[rows], listed, **options)
            # [loop, batch]; of tokens [loop, asked token]
            score_parts.append([s[:, mask] if per == "token" else s for s in scores])
        scores = [torch.cat([s.cpu() for s in each], 1) for each in zip(*score_parts)]
        arrays = gather(ExitResult, parts)
        mask, targets = (
            torch.cat([part[key].cpu() for part in parts]) for key in ("_mask", "_right")
        )
        example = torch.arange(len(inputs))
        example = example.repeat_interleave(mask.sum(1)) if per == "token" else example
        if gate is not None:
            arrays |= _weighted_exits(model, inputs, targets, mask, gate, n_loops, per, seed)
        if frozen:
            arrays |= _frozen_exits(model, inputs, targets, mask, listed, n_loops, slices, example)
        return ExitResult.of(
            watch,
            coords={"loop": range(n_loops + 1), "rule": list(asked_rules)},
            **arrays,
            score=torch.stack(scores),
            **_sweep(arrays["exact"], scores, listed, example),
            another=_of_another(parts),
            answer_loops=ends.cpu()[example],
            example=example,
            targets=has_targets,
            rules={name: repr(rule) for name, rule in asked_rules.items()},
            per=per,
        )


def _examples(
    model: Any, data: Any, n_loops: int | None, n: int | None, batch_size: int | None, seed: int
) -> tuple[Tensor, Tensor | None, int, Tensor]:
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


def _follow(
    model: Any, inputs: Tensor, targets: Tensor | None, n_loops: int, per: Per
) -> dict[str, Tensor]:
    """Readings of some examples after every loop, and measures of their states."""
    series: dict[str, list[Tensor]] = defaultdict(list)
    counted = torch.ones(inputs.shape[:2], dtype=torch.bool, device=inputs.device)
    counted = counted if targets is None else targets != IGNORE
    share = counted / counted.sum(1, keepdim=True)  # of each position in its example, [batch, pos]

    def of_rows(values: Tensor) -> Tensor:
        """From [batch, pos] to [batch], or to [asked token]."""
        if per == "token":
            return values[counted].float()
        return torch.where(counted, values * share, 0).sum(1).float()

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
            series[name].append(of_rows(values))
        cosine = moved.cosine.masked_fill(~counted, math.nan)  # [batch, pos]
        by_row = cosine[counted] if per == "token" else cosine.nanmedian(dim=1).values
        series["cosine"].append(by_row.float())
        before = log_p
    arrays = {name: torch.stack(values) for name, values in series.items()}  # [loop, batch, ...]
    answers = arrays["_answer"]  # [loop, batch, pos]
    right_answers = answers[-1] if targets is None else targets
    arrays["_right"], arrays["_mask"] = right_answers, right_answers != IGNORE
    arrays["_want"] = right_answers
    if per == "token":  # each token is an example of one position
        answers, right_answers = answers[:, counted][..., None], right_answers[counted][:, None]
        arrays |= {"_answer": answers, "_want": right_answers}
        share = torch.ones_like(right_answers)
    arrays["exact"] = exact_match(correctness(answers, right_answers)).bool()
    arrays["agreement"] = ((answers == answers[-1]) * share).sum(-1).float()
    return arrays


def _of_another(parts: list[dict[str, Tensor]]) -> Tensor:
    """Whether the right answer of another row, if it differs, is read at some loop."""
    answers = torch.cat([part["_answer"].cpu() for part in parts], 1)  # [loop, row, ...]
    right = torch.cat([part["_want"].cpu() for part in parts])
    other = right.roll(1, 0)
    at_some = ((answers[1:] == other) | (other == IGNORE)).all(-1).any(0)
    return torch.where((other == right).all(1), math.nan, at_some.double())


def _frozen_exits(
    model: Any,
    inputs: Tensor,
    targets: Tensor,
    mask: Tensor,
    rules: list[StoppingRule],
    n_loops: int,
    slices: list[slice],
    example: Tensor,
) -> dict[str, Tensor]:
    """Right answers and loops of the asked tokens by rule, where stopped states are frozen."""
    loops, right = [], []
    for rule in rules:
        stops, hits = [], []
        for rows in track(slices, "frozen exits"):
            asked = mask[rows].to(inputs.device)
            stop, logits = run_frozen(model, inputs[rows], rule, max_loops=n_loops, mask=asked)
            stops.append(stop[asked].cpu())
            hits.append((logits.argmax(-1).cpu() == targets[rows])[mask[rows]])
        loops.append(torch.cat(stops))
        right.append(torch.cat(hits))
    return {
        "frozen_exact": torch.stack(right).double().mean(1),
        "frozen_loops": torch.stack(loops).double().mean(1),
        "frozen_examples": torch.stack([_all_of_example(x, example).mean() for x in right]),
    }


def _sweep(
    exact: Tensor, scores: list[Tensor], rules: list[StoppingRule], example: Tensor
) -> dict[str, np.ndarray]:
    """Every rule at tolerances from no stop to all stops."""
    by_loop = exact.double().mean(1)  # share that is right if all stop there
    swept: dict[str, list[Any]] = defaultdict(list)

    def stopped(score: Tensor, tolerance: float) -> tuple[float, ...]:
        loops = first_ready(score, tolerance)  # where each row stops
        right = exact.gather(0, loops[None])[0]  # whether it is right there
        # The chance of each row to be right at a loop drawn from those where rows stop.
        stops = torch.bincount(loops, minlength=len(exact)).double() / len(loops)
        drawn = (stops[:, None] * exact).sum(0)
        return (
            float(right.double().mean()),
            float(loops.double().mean()),
            float(by_loop[loops].mean()),
            float(_all_of_example(right, example).mean()),
            float(_all_of_example(drawn, example).mean()),
        )

    names = ("exact", "loops", "dealt", "examples", "examples_dealt")
    for rule, by_example in zip(rules, scores):
        score = by_example.clone()  # [loop, batch]
        score[0] = math.inf  # no loop was made
        finite = score[score.isfinite()].double()
        steps = torch.linspace(0, 1, 33, dtype=torch.float64)
        # From the least finite score to the greatest
        tolerances = finite.quantile(steps).float().tolist() if len(finite) else [0.0] * len(steps)
        tolerances = [-math.inf, *tolerances]
        rows = [stopped(score, tolerance) for tolerance in tolerances]
        swept["tolerance"].append(tolerances)
        for name, values in zip(names, zip(*rows)):
            swept[f"swept_{name}"].append(values)
        assert rule.tolerance is not None  # as of every online rule
        for name, value in zip(names[:-1], stopped(score, rule.tolerance)):
            swept[f"own_{name}"].append(value)
    return {name: np.asarray(values, dtype=float) for name, values in swept.items()}


N_DEALS = 16
"""Deals of the distributions over exits among tokens."""


def _weighted_exits(
    model: Any,
    inputs: Tensor,
    targets: Tensor,
    mask: Tensor,
    gate: Callable[[Tensor], Tensor],
    n_loops: int,
    per: Per,
    seed: int,
) -> dict[str, Tensor]:
    """Weighted exits of the asked tokens, with their own distribution and with others'."""
    one = bind(model, inputs[:1])
    size = 4 * (1 + N_DEALS) * one.readout(one.h0).numel()
    slices = list(chunks(len(inputs), size))
    rule, parts = GateAbove(gate, cumulated=True), []
    for rows in slices:
        (going,) = score_loops(model, inputs[rows], [rule], max_loops=n_loops, per_token=True)
        # None is left after the last loop: it takes all who have not stopped before.
        going = torch.cat([going[:-1], torch.zeros_like(going[:1])])
        parts.append(-going.diff(dim=0).cpu()[:, mask[rows]])
    exits = torch.cat(parts, 1)  # the gate's distribution over exits, [loop, asked token]
    generator = torch.Generator().manual_seed(seed)
    n_tokens = exits.shape[1]
    deals = [torch.arange(n_tokens)]
    deals += [torch.randperm(n_tokens, generator=generator) for _ in range(N_DEALS)]
    right, done = [], 0
    for rows in slices:
        here = slice(done, done := done + int(mask[rows].sum()))
        # [deal, loop, asked token], the first of them not dealt
        weights = torch.stack([exits[:, deal[here]] for deal in deals])
        iteration, mixture = bind(model, inputs[rows]), torch.zeros(())
        for loop, h in iteration.run(n_loops, may_diverge=True):
            if loop > 0:
                logits = iteration.read(h, loop)[mask[rows].to(h.device)]  # [asked token, class]
                p = logits.softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))
                mixture = mixture + weights[:, loop - 1, :, None].to(p) * p
        right.append(mixture.argmax(-1).cpu() == targets[rows][mask[rows]])
    by_token = torch.cat(right, 1).cpu()  # [deal, asked token]
    mean_exit = (exits * torch.arange(1, n_loops + 1)[:, None]).sum(0)  # [asked token]
    if per == "token":
        exact, loops = by_token, mean_exit
    else:
        example = torch.arange(len(inputs)).repeat_interleave(mask.sum(1))
        exact = torch.stack([_all_of_example(row, example) for row in by_token])
        loops = torch.zeros(len(inputs)).scatter_reduce(
            0, example, mean_exit, "mean", include_self=False
        )
    own, dealt = exact[0].bool(), exact[1:].double().mean(1)
    return {"weighted_exact": own, "weighted_loops": loops, "weighted_dealt": dealt}


def _all_of_example(right: Tensor, example: Tensor) -> Tensor:
    """Products of rows' shares within each example."""
    ones = torch.ones(int(example.max()) + 1, dtype=torch.float64)
    return ones.scatter_reduce(0, example, right.double(), "prod")
