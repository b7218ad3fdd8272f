"""Several seeds of one configuration: trained with their loops in one batch, and summarised."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

from loopinterp.core.errors import InputError, need
from loopinterp.core.intervals import ESTIMATE
from loopinterp.core.results import Result, study
from loopinterp.models.positions import AttentionContext
from loopinterp.models.weights import need_unchanged
from loopinterp.training.answer_scores import Lowest
from loopinterp.training.device import send
from loopinterp.training.evaluation import EvaluationResult, lowest_at, nearest_extra_loop

if TYPE_CHECKING:
    import pandas as pd
    from jaxtyping import Float
    from torch import Tensor

    from loopinterp.models import LoopedTransformer
    from loopinterp.training.run import Run
    from loopinterp.training.sweep_file import Sweep
    from loopinterp.training.trainer import Drawn, Trainer


def advance_together(trainers: Sequence[Trainer]) -> None:
    """One step of each trainer, with all loops in one batch.

    The loops use all weights, stacked ``[seed, ...]``. Everything else (data, noise, readout,
    gradient, optimiser, average) is each trainer's own. Configurations may differ only in the seed;
    :func:`read` returns metrics.
    """
    if len(trainers) == 1:
        return trainers[0].advance()
    for trainer in trainers:
        need_unchanged(trainer.model, "seeds that are trained together")
        trainer.zero_grad()
    drawn = [trainer.draw() for trainer in trainers]
    with trainers[0].autocast():
        supervised = []
        for trainer, one, states in zip(trainers, drawn, _answers(trainers, drawn)):
            logits = trainer.model.readout(states.flatten(0, 1))
            supervised.append(one.questions.score(logits.unflatten(0, states.shape[:2])))
    torch.stack([one.loss for one in supervised]).sum().backward()
    for trainer, one, answered in zip(trainers, drawn, supervised):
        trainer.finish(one, answered)
    return None


def read(trainer: Trainer) -> list[dict[str, float | int]]:
    """:meth:`Trainer.read`, with the seed in errors."""
    try:
        return trainer.read()
    except InputError as error:
        raise error.renamed(f"seed {trainer.config.seed}: {error.what}") from error


def _answers(
    trainers: Sequence[Trainer], drawn: Sequence[Drawn]
) -> list[Float[Tensor, "ask batch pos d_model"]]:
    """By seed, each example's state after the loops of its readings."""
    bound = [trainer.bind(one) for trainer, one in zip(trainers, drawn)]
    ends = torch.stack([one.questions.loops.amax(0) for one in drawn])  # [seed, example]
    order = ends.argsort(dim=1, descending=True, stable=True)  # those that run longest first
    rows = [it.select(send(at, it.e.device)) for it, at in zip(bound, order)]
    # [seed, loop]: how many examples go on into each loop
    running = (ends[:, None] > torch.arange(int(ends.max()))[:, None]).sum(2)
    noise = zip(*[t.noise(it.h0, n) for t, it, n in zip(trainers, rows, running.tolist())])
    offset = None
    if rows[0].context.qk_offset is not None:
        offset = _stacked([it.context.qk_offset for it in rows])
    h, e = _stacked([it.h0 for it in rows]), _stacked([it.e for it in rows])
    models = [trainer.model for trainer in trainers]
    weights = [dict(model.named_parameters()) for model in models]
    stacked = {
        f"model.{name}": torch.stack([w[name] for w in weights])
        for name in weights[0]
        if name.startswith(("block.", "ln_loop.", "gate", "recall."))
    }
    stacked = {name: x if x.dim() > 1 else x[:, None, None] for name, x in stacked.items()}
    contexts = [model.length_context(h.shape[2], all_pairs=True) for model in models]
    inputs = h, e, offset, [_stacked(each) for each in noise], contexts, running.amax(0).tolist()
    states = functional_call(_Loops(models[0]), stacked, inputs)
    first = torch.tensor([0, *(x.shape[1] for x in states[:-1])]).cumsum(0)  # row of each loop
    answers = []
    for seed, (one, it) in enumerate(zip(drawn, bound)):
        # [loop and example, pos, d_model], and the rows that are read, [ask, batch]
        flat = torch.cat([x[seed, :, : it.e.shape[1]] for x in states])
        at = first[one.questions.loops] + order[seed].argsort()
        answers.append(flat[send(at, flat.device)])
    return answers


def _stacked(batches: Sequence[Tensor]) -> Float[Tensor, "seed example *head pos feature"]:
    n, width = (max(x.shape[dim] for x in batches) for dim in (0, -2))
    return torch.stack(
        [
            F.pad(x, (0, 0, 0, width - x.shape[-2], *(0, 0) * (x.dim() - 3), 0, n - len(x)))
            for x in batches
        ]
    )


class _Loops(nn.Module):
    def __init__(self, model: LoopedTransformer) -> None:
        super().__init__()
        self.model = model

    def forward(
        self,
        h: Float[Tensor, "seed example pos d_model"],
        e: Float[Tensor, "seed example pos d_model"],
        offset: Float[Tensor, "seed example head pos d_head"] | None,
        noise: Sequence[Float[Tensor, "seed _ pos d_model"]],
        contexts: Sequence[AttentionContext],
        n_running: Sequence[int],
    ) -> list[Float[Tensor, "seed _ pos d_model"]]:
        states, mask = [h], contexts[0].mask
        if self.model.relative_bias is not None:  # [seed, head, query, key]: each has its own
            mask = torch.cat([context.mask for context in contexts if context.mask is not None])
        for loop, n in enumerate(n_running):
            h = h[:, :n] + noise[loop] if noise else h[:, :n]
            # Each seed's examples in a row [seed, example and pos, d_model]
            rotation = contexts[0].rotation
            context = AttentionContext(
                rotation=rotation and (rotation[0].repeat(n, 1), rotation[1].repeat(n, 1)),
                qk_offset=None if offset is None else offset[:, :n].transpose(1, 2).flatten(2, 3),
                attend=partial(_attend, mask=mask, n=n),
            )
            h = self.model.run_loop(h.flatten(1, 2), e[:, :n].flatten(1, 2), context)
            h = h.unflatten(1, (n, -1))
            states.append(h)
        return states


def _attend(q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None, n: int) -> Tensor:
    """Attention within each of ``n`` examples, ``[seed, head, place, d_head]``."""
    # [seed and example, head, pos, d_head]
    q, k, v = (x.unflatten(2, (n, -1)).transpose(1, 2).flatten(0, 1) for x in (q, k, v))
    if mask is not None and len(mask) > 1:
        mask = mask.repeat_interleave(n, 0)
    z = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
    return z.unflatten(0, (-1, n)).transpose(1, 2).flatten(2, 3)


_MEASURES = {  # summarised measures and their axes
    name: axes.removesuffix(f" {ESTIMATE}")
    for name, axes in EvaluationResult.VARIABLES.items()
    if not name.startswith("constant_")
}


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class SeedSummary(Result, kind="seed-summary"):
    """Mean over seeds and its standard error, from an :class:`EvaluationResult` of each seed.

    Arrays:
        exact_match: Mean over seeds, as for the other arrays that all evaluations have; the
            geometric mean of perplexities.
        exact_match_se: Its standard error, ``s / sqrt(seeds)`` with s the standard deviation of the
            seeds (denominator n - 1); for a perplexity, that of its logarithm.
    """

    VARIABLES: ClassVar[Mapping[str, str]] = {
        name + end: axes for name, axes in _MEASURES.items() for end in ("", "_se")
    }
    OPTIONAL: ClassVar[frozenset[str]] = frozenset(VARIABLES) - {"exact_match", "exact_match_se"}

    task: str
    n_seeds: int
    n_samples: int
    trained_up_to: int | None = None
    not_judged: Sequence[str] = ()

    def lowest(self, length: int) -> Lowest:
        """The lowest mean exact match at a length."""
        return lowest_at(self, length=length)


def summarise_seeds(results: Sequence[EvaluationResult]) -> SeedSummary:
    """Mean and standard error over seeds of evaluations of the same cells, one per seed.

    This includes the variation between seeds, which an interval over examples lacks.
    """
    fix = "Evaluate runs of several seeds."
    need(len(results) > 1, "results", "two or more", str(len(results)), fix)
    first, expected = results[0], "an evaluation of the same cells as results[0]"
    for at, result in enumerate(results[1:], 1):
        name, fix = _difference(first, result), "Evaluate all seeds with the same options."
        need(name is None, f"results[{at}]", expected, f"another {name}", fix)
    # A seed that is given twice would count as two models.
    weights = [digests for r in results if (digests := tuple(r.provenance.weights))]
    different = len({*weights}) == len(weights)
    need(different, "results", "different models", "one twice", "Give each seed once.")
    arrays = _over_seeds(results)
    axes = {axis for name in arrays for axis in SeedSummary.VARIABLES[name].split()}
    models = [result.provenance.config.get("model") for result in results]
    with study(first.provenance.seed, models=models) as watch:
        return SeedSummary.of(
            watch,
            coords={axis: first.data[axis].values.tolist() for axis in sorted(axes)},
            **arrays,
            task=first.task,
            n_seeds=len(results),
            n_samples=first.n_samples,
            trained_up_to=first.trained_up_to,
            not_judged=first.not_judged,
        )


def _over_seeds(results: Sequence[EvaluationResult]) -> dict[str, np.ndarray]:
    """Mean and standard error (``NAME_se``, NaN for one seed) of each measure."""
    arrays = {}
    for name in (name for name in _MEASURES if name in results[0].data):
        each = [result.data[name] for result in results]
        values = np.stack([x.sel({ESTIMATE: "value"}) if ESTIMATE in x.dims else x for x in each])
        geometric = "perplexity" in name
        with np.errstate(invalid="ignore"):  # a perplexity beyond all numbers has no error
            values = np.log(values) if geometric else values  # [seed, …]
            spread = values.std(0, ddof=1) if len(each) > 1 else np.full(values.shape[1:], np.nan)
            arrays[name] = np.exp(values.mean(0)) if geometric else values.mean(0)
            arrays[f"{name}_se"] = spread / np.sqrt(len(each))
    return arrays


def _difference(one: EvaluationResult, other: EvaluationResult) -> str | None:
    for name in ("task", "n_samples", "trained_up_to", "depth", "answered_after"):
        if getattr(one, name) != getattr(other, name):
            return name
    if one.provenance.config.get("task") != other.provenance.config.get("task"):
        return "setting of the task"
    for axis in ("extra_loop", "distribution", "length", "loop", "rule"):
        a, b = (result.data.coords.get(axis) for result in (one, other))
        if (a is None) != (b is None) or (a is not None and not a.equals(b)):
            return axis.replace("_", " ")
    return "set of measures" if {*one.data.data_vars} != {*other.data.data_vars} else None


_SUMMARISED = {name: axes for name, axes in _MEASURES.items() if "rule" not in axes}


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class SweepResult(Result, kind="sweep"):
    """Mean over the seeds of each setting, and its standard error.

    NaN without a finished seed; the error is NaN for a single one.

    Arrays:
        exact_match: As in :class:`SeedSummary`, like the other measures of an evaluation.
        n_seeds: Seeds behind the mean.
        seconds: Mean time to train a seed.

    Attributes:
        figure_axes: The axis along which each measure is drawn.
        failed: Error messages, by setting and seed.
        missing: Settings and seeds that were not run yet (``only``).
    """

    VARIABLES: ClassVar[Mapping[str, str]] = {
        **{
            name + end: f"setting {axes}"
            for name, axes in _SUMMARISED.items()
            for end in ("", "_se")
        },
        **dict.fromkeys(("n_seeds", "trained_up_to", "seconds"), "setting"),
    }
    OPTIONAL: ClassVar[frozenset[str]] = frozenset(
        name + end for name in _SUMMARISED for end in ("", "_se") if name != "exact_match"
    )

    about: str
    task: str
    n_samples: int
    seeds: list[int]
    figure_axes: dict[str, str]
    failed: dict[str, str]
    missing: list[str]
    not_judged: Sequence[str] = ()

    def lowest(self, setting: str, length: int) -> Lowest:
        """The lowest mean exact match of a setting at a length."""
        return lowest_at(self, setting=setting, length=length)

    def table(self) -> pd.DataFrame:
        """The table of ``sweep.csv``, with ``n_seeds`` and ``failed``."""
        names = [n for n in self._widest() if n.removesuffix("_se") in _SUMMARISED]
        rows = self.to_dataframe(*names)
        settings = self.data["setting"].values.tolist()
        counts = dict(zip(settings, self.data["n_seeds"].values))
        errors = dict.fromkeys(settings, "")
        for setting, seed in itertools.product(settings, self.seeds):
            if error := self.failed.get(_cell_name(setting, seed)):
                errors[setting] += f"{errors[setting] and '; '}seed {seed}: {error}"
        # After the axes: setting, extra_loop, distribution, length.
        rows.insert(4, "n_seeds", rows["setting"].map(counts))
        return rows.assign(failed=rows["setting"].map(errors))

    def in_short(self, measure: str = "exact_match") -> pd.DataFrame:
        """Mean ± standard error as text: a row for each setting and distribution, by length."""
        import pandas as pd

        # [setting, distribution, length]
        cells = self.data.sel(extra_loop=nearest_extra_loop(self))
        axes, rows = ("setting", "distribution"), {}
        for setting, distribution in itertools.product(*(cells[k].values for k in axes)):
            at = cells.sel(setting=setting, distribution=distribution)
            pairs = zip(at["length"].values, at[measure].values, at[f"{measure}_se"].values)
            rows[setting, distribution, int(at["n_seeds"])] = {
                n: mean_and_error(mean, error) for n, mean, error in pairs
            }
        table = pd.DataFrame.from_dict(rows, orient="index")
        return table.rename_axis(index=["setting", "distribution", "seeds"], columns="length")


def mean_and_error(mean: float, error: float) -> str:
    """``mean ± error``; ``mean`` without an error, ``-`` without a mean."""
    return "-" if np.isnan(mean) else f"{mean:.3f}" + ("" if np.isnan(error) else f" ± {error:.3f}")


def _cell_name(setting: str, seed: int) -> str:
    return f"{setting}, seed {seed}"


def gather(
    sweep: Sweep,
    finished: Mapping[tuple[str, int], tuple[Run, EvaluationResult]],
    failed: Mapping[tuple[str, int], str],
) -> SweepResult:
    """The result of a sweep, from what its cells (setting, seed) ended with."""
    task, settings = sweep.base.make_task(), [*sweep.changes]
    coords = sweep.evaluation.coords(task)
    cells = list(itertools.product(settings, sweep.seeds))
    by_setting = [[end for cell, end in finished.items() if cell[0] == k] for k in settings]
    done = [_over_seeds([result for _, result in ends]) if ends else {} for ends in by_setting]
    # Arrays with the setting first, NaN where no seed came to its end.
    arrays = {}
    for name, axes in _SUMMARISED.items():
        if all(axis in coords for axis in axes.split()):
            missing = np.full([len(coords[axis]) for axis in axes.split()], np.nan)
            for full in (name, f"{name}_se"):
                arrays[full] = np.stack([measured.get(full, missing) for measured in done])

    def mean(values: Sequence[float]) -> float:
        return float(np.mean(values)) if values else float("nan")

    weights = [
        {"setting": setting, "seed": seed, "weights_sha256": digest}
        for (setting, seed), (_, result) in finished.items()
        for digest in result.provenance.weights
    ]
    with study(sweep.evaluation.seed, sweep=sweep.to_dict(defaults=False), models=weights) as watch:
        return SweepResult.of(
            watch,
            coords={"setting": settings, **coords},
            **arrays,
            n_seeds=[len(ends) for ends in by_setting],
            trained_up_to=[mean([run.cutoff for run, _ in ends]) for ends in by_setting],
            seconds=[mean([run.seconds for run, _ in ends]) for ends in by_setting],
            about=sweep.about,
            task=sweep.base.task,
            n_samples=sweep.evaluation.samples,
            seeds=list(sweep.seeds),
            figure_axes={**sweep.show},
            failed={_cell_name(*cell): failed[cell] for cell in cells if cell in failed},
            missing=[_cell_name(*cell) for cell in cells if cell not in {*finished, *failed}],
            not_judged=[name for name in task.distributions if name not in coords["distribution"]],
        )
