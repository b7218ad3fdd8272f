"""Counts and shares of a comparison, by program, stratum and delay."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from loopinterp.comparison.pair_strategies import KIND, OTHER_VALUE, SAME_VALUE
from loopinterp.core.intervals import wilson_estimate

if TYPE_CHECKING:
    import pandas as pd
    import xarray as xr
    from jaxtyping import Bool, Int

    from loopinterp.comparison.evidence import Evidence

ALL = "all"  # the stratum of all pairs

END = "end"  # the delay that reads each pair's answer after T(n) loops

MANIFOLD = "states"
REACHED, UNREACHED = "that a run reaches", "that no run reaches"


def count_evidence(evidence: Sequence[Evidence]) -> xr.Dataset:
    """Counts behind the estimates and verdicts, over several models.

    Only effective pairs whose source has other values count: at that delay an answer of the model
    or of the program changes, so that their number differs between programs. Axes as in
    :class:`~loopinterp.comparison.ProgramComparison`:

    - [program, stratum, delay]: ``right`` of ``effective`` pairs; ``nothing_right``: the program
      predicts no change;
    - [program, stratum]: ``run_right`` of ``run_effective`` pairs, at every delay; all ``pairs``;
    - [program, delay]: ``prefix_right`` of ``prefix_effective`` pairs, right up to this delay;
    - [program, rival, delay]: ``duel_right`` of the pairs that set two programs ``apart``;
    - [program]: of ``random_effective`` runs with a predicted change, ``random_right`` after a
      random perturbation of equal norm, ``interchange_right`` after the interchange;
    - ``unchanged`` of ``n_same`` runs with a same-value source;
    - of ``n_runs`` clean runs, by program: ``undisturbed`` (sum of shares of loops), ``slipped``
      (some loop differs), ``decided`` (share of answers), ``worst_loop`` (share at the worst loop
      and length), ``alike`` [program, rival]; ``solved``, the share right at the worst length.

    ``…_inputs`` count the inputs of these pairs, for intervals.
    """
    import xarray as xr

    n_delays = max(each.data.sizes["delay"] for each in evidence)
    counts = []
    for each, classes in zip(evidence, _classes(evidence)):
        kind = each.strata[KIND].to_numpy()
        same, other = (each.data.isel(pair=kind == value) for value in (SAME_VALUE, OTHER_VALUE))
        on_distribution = other.on_distribution.transpose("program", "pair").values
        masks = {  # [program, pair]
            ALL: np.ones_like(on_distribution),
            f"{MANIFOLD}: {REACHED}": on_distribution,
            f"{MANIFOLD}: {UNREACHED}": ~on_distribution,
            **{
                str(k): np.broadcast_to(x.to_numpy(), on_distribution.shape)
                for k, x in classes.items()
            },
        }
        arrays = {
            **_pair_counts(other, np.stack(list(masks.values())), n_delays),
            "pairs": (("program", "stratum"), np.stack([m.sum(1) for m in masks.values()], 1)),
            "same_inputs": np.unique(same.base).size,
            "undisturbed": other.undisturbed.sum("input"),
            "slipped": (other.undisturbed < 1).sum("input"),
            "worst_loop": other.worst_loop.min("batch"),
            "decided": other.decided.mean("input"),
            "n_runs": other.sizes["input"],
            "alike": other.alike.all("batch"),
            "unchanged": (~same.moves.any("delay")).sum(),
            "n_same": same.sizes["pair"],
            "solved": other.solved.min(),
        }
        coords = {name: other[name] for name in ("program", "rival")}
        coords |= {"stratum": list(masks), "delay": delay_names(n_delays)}
        counts.append(xr.Dataset(arrays, coords=coords))
    return xr.concat(counts, "model").assign_coords(model=range(len(evidence)))


def _classes(evidence: Sequence[Evidence]) -> list[pd.DataFrame]:
    import pandas as pd

    tables = []
    for each in evidence:
        other = each.strata[each.strata[KIND] == OTHER_VALUE].drop(columns=KIND)
        table = pd.get_dummies(other, prefix_sep=": ", dtype=bool)
        tables.append(table.loc[:, table.any()])
    classes = list(dict.fromkeys(name for table in tables for name in table))
    return [table.reindex(columns=classes, fill_value=False) for table in tables]


def shares_of(counts: xr.Dataset) -> dict[str, np.ndarray | xr.DataArray]:
    """The arrays of a :class:`~loopinterp.comparison.ProgramComparison`."""

    def share(successes: str, trials: str, inputs: str) -> np.ndarray:
        return wilson_estimate(counts[successes], counts[trials], independent=counts[inputs])

    duels = counts.drop_sel(delay=END)
    trials = {"trials": duels.apart, "independent": duels.apart_inputs}
    # [model, program, rival, delay, estimate]: pairs on which the first is right, and the second.
    first = wilson_estimate(duels.duel_right, **trials)
    second = wilson_estimate(duels.duel_right.values.swapaxes(1, 2), **trials)
    # [model, program, rival, delay]: the gap between the two intervals, whichever is higher.
    lead = np.maximum(first[..., 1] - second[..., 2], second[..., 1] - first[..., 2])
    duel_delay = np.nan_to_num(lead, nan=-2.0).argmax(-1)
    best = duel_delay[..., None]
    return {
        "iia": share("right", "effective", "effective_inputs"),
        "effective": counts.effective,
        "no_interchange": counts.nothing_right / counts.effective.where(counts.effective > 0),
        "whole_run": share("run_right", "run_effective", "run_inputs"),
        "whole_run_effective": counts.run_effective,
        "whole_run_inputs": counts.run_inputs,
        "followed": share("prefix_right", "prefix_effective", "prefix_inputs"),
        "pairs": counts.pairs,
        # A run's loops are alike, so that intervals count runs.
        "undisturbed": wilson_estimate(counts.undisturbed, counts.n_runs.values[:, None]),
        "decided": counts.decided,
        "alike": counts.alike,
        "random_change": share("random_right", "random_effective", "random_inputs"),
        "specific": share("interchange_right", "random_effective", "random_inputs"),
        "same_value": share("unchanged", "n_same", "same_inputs"),
        "duel": np.take_along_axis(first, best[..., None], axis=3)[:, :, :, 0],
        "duel_delay": duel_delay,
        "apart": np.take_along_axis(duels.apart.values, best, axis=3)[..., 0],
    }


def _pair_counts(
    other: xr.Dataset, masks: Bool[np.ndarray, "stratum program pair"], n_delays: int
) -> dict[str, tuple[list[str], np.ndarray]]:
    changes, agree, random_agree = (
        other[name].transpose("program", "pair", "delay").values
        for name in ("changes", "agree", "random_agree")
    )
    separated = other.apart.transpose("program", "rival", "pair", "delay").values
    moves, within = (other[name].transpose("pair", "delay").values for name in ("moves", "within"))
    base = other.base.values  # [pair]: its input

    def by_delay(x: np.ndarray) -> np.ndarray:
        return with_end(x, within.sum(-1) - 1, n_delays)

    def by_stratum(x: np.ndarray) -> np.ndarray:
        """[program, pair, …] -> [program, stratum, …]."""
        rows = x.reshape(*x.shape[:2], -1).astype(float)
        # A product over pairs for each program: [stratum, pair] @ [pair, …].
        sums = (masks.swapaxes(0, 1).astype(float) @ rows).astype(int)
        return sums.reshape(*sums.shape[:2], *x.shape[2:])

    def inputs_by_stratum(x: np.ndarray) -> np.ndarray:
        counts = []
        for mask in masks:
            pairs = mask.any(0)  # those of the stratum for some program
            in_stratum = mask[:, pairs].reshape(len(mask), -1, *(1 for _ in x.shape[2:]))
            counts.append(_inputs(x[:, pairs] & in_stratum, base[pairs], 1))
        return np.stack(counts, 1)

    effective = changes | moves
    # [program, pair]: effective at some delay; right at every delay of the run.
    ever, right = effective.any(-1), (agree | ~within).all(-1)
    predicted, random_right = changes.any(-1), (random_agree | ~within).all(-1)
    # [program, pair, delay]: effective up to a delay; a run that has ended is no evidence later.
    so_far = by_delay((effective.cumsum(-1) > 0) & within)
    right_so_far = by_delay((within & ~agree).cumsum(-1) == 0)
    at_delay, separating = by_delay(effective), by_delay(separated)
    arrays = {
        "right": ("program stratum delay", by_stratum(by_delay(effective & agree))),
        "effective": ("program stratum delay", by_stratum(at_delay)),
        "effective_inputs": ("program stratum delay", inputs_by_stratum(at_delay)),
        "nothing_right": ("program stratum delay", by_stratum(by_delay(effective & ~changes))),
        "run_right": ("program stratum", by_stratum(ever & right)),
        "run_effective": ("program stratum", by_stratum(ever)),
        "run_inputs": ("program stratum", inputs_by_stratum(ever)),
        "prefix_right": ("program delay", (so_far & right_so_far).sum(1)),
        "prefix_effective": ("program delay", so_far.sum(1)),
        "prefix_inputs": ("program delay", _inputs(so_far, base, 1)),
        "duel_right": ("program rival delay", by_delay(separated & agree[:, None]).sum(2)),
        "apart": ("program rival delay", separating.sum(2)),
        "apart_inputs": ("program rival delay", _inputs(separating, base, 2)),
        "random_right": ("program", (predicted & random_right).sum(1)),
        "interchange_right": ("program", (predicted & right).sum(1)),
        "random_effective": ("program", predicted.sum(1)),
        "random_inputs": ("program", _inputs(predicted, base, 1)),
    }
    return {name: (axes.split(), array) for name, (axes, array) in arrays.items()}


def _inputs(x: np.ndarray, base: np.ndarray, axis: int) -> np.ndarray:
    """Number of inputs for which x holds on some pair, along an axis."""
    order = base.argsort()
    # Pairs in the order of their inputs; "or" over the stretch of each input, then count inputs.
    _, starts = np.unique(base[order], return_index=True)
    return np.logical_or.reduceat(x.take(order, axis), starts, axis).sum(axis)


def with_end(
    x: Bool[np.ndarray, "*lead pair delay"], last: Int[np.ndarray, " pair"], n_delays: int
) -> Bool[np.ndarray, "*lead pair delays"]:
    """Pad to ``n_delays``, and add a delay that reads each pair's last one."""
    padded = np.zeros((*x.shape[:-1], n_delays + 1), dtype=bool)
    padded[..., : x.shape[-1]] = x
    padded[..., -1] = x[..., np.arange(len(last)), last]
    return padded


def delay_names(n_delays: int) -> list[str]:
    """Coordinates of delays; "end" reads each pair's answer at the end of its run.

    Example:
        >>> delay_names(2)
        ['0', '1', 'end']
    """
    return [*map(str, range(n_delays)), END]
