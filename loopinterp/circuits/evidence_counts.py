"""The evidence of a comparison, counted by program, stratum and delay."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from loopinterp.circuits.interchange_pairs import KIND, OTHER_VALUE, SAME_VALUE

if TYPE_CHECKING:
    import pandas as pd
    import xarray as xr

    from loopinterp.circuits.comparison_evidence import Evidence

ALL = "all"
"""The stratum of all pairs."""

END = "end"
"""The delay that reads each pair's answer after T(n) loops."""

MANIFOLD = "states"
REACHED, UNREACHED = "that a run reaches", "that no run reaches"


def count_evidence(found: Sequence[Evidence]) -> xr.Dataset:
    """Counts on which comparisons and verdicts rest, of several models.

    Pairs count whose donor has other values, and of these those on which something happens: the
    program or the model changes an answer. The axes model, program (and rival), stratum, delay are
    those of :class:`~loopinterp.circuits.ProgramComparison`; of all pairs where there is no
    stratum:

    - ``right``, ``active`` [program, stratum, delay]: pairs whose whole answer is the one the
      program says, of those on which something happens; ``nothing_right``: pairs on which it says
      that nothing changes;
    - ``run_right``, ``run_active`` [program, stratum]: right at every delay;
    - ``prefix_right``, ``prefix_active`` [program, delay]: right at every delay up to this one;
    - ``pairs`` [program, stratum]: whether something happens or not;
    - ``duel_right``, ``apart`` [program, rival, delay]: of pairs on which two programs differ,
      those on which the first is followed;
    - ``active_inputs``, ``run_inputs``, ``prefix_inputs``, ``apart_inputs``, ``random_inputs``,
      ``same_inputs``: of how many inputs these pairs change the run. Pairs of one input are alike,
      so that intervals count inputs;
    - ``undisturbed``, ``decided`` [program]: runs without exchange whose loops are the program's,
      of ``n_runs``, each by the share of its loops; share of their answers of which the program
      says something; ``slipped``: runs with a loop that is not its own; ``worst_loop``: share of
      the runs of one length that are its own at the worst loop of the worst length; ``alike``
      [program, rival]: whether two programs answer alike in all of them;
    - ``random_right``, ``exchange_right``, ``random_active`` [program]: whole runs after a random
      change that look as the program says, the same after the exchange itself, of those in which
      it says that something changes;
    - ``unchanged``, ``n_same``: runs that a donor with the same values leaves as they are;
    - ``solved``: share of inputs answered right, of the length at which it is least.
    """
    import xarray as xr

    tables = [_classes(evidence.strata) for evidence in found]
    classes = list(dict.fromkeys(name for table in tables for name in table))
    tables = [table.reindex(columns=classes, fill_value=False) for table in tables]
    n_delays = max(evidence.data.sizes["delay"] for evidence in found)
    counted = [_count(evidence, table, n_delays) for evidence, table in zip(found, tables)]
    return xr.concat(counted, "model").assign_coords(model=range(len(found)))


def _classes(strata: pd.DataFrame) -> pd.DataFrame:
    """Which pairs of other values are of each class ``STRATUM: LABEL`` that has any."""
    import pandas as pd

    other = strata[strata[KIND] == OTHER_VALUE].drop(columns=KIND)
    table = pd.get_dummies(other, prefix_sep=": ", dtype=bool)
    return table.loc[:, table.any()]


def _count(evidence: Evidence, classes: pd.DataFrame, n_delays: int) -> xr.Dataset:
    import xarray as xr

    kind = evidence.strata[KIND].to_numpy()
    same = evidence.data.isel(pair=kind == SAME_VALUE)
    other = evidence.data.isel(pair=kind == OTHER_VALUE)
    masks = _masks(other.reached, classes)
    last = other.within.sum("delay") - 1

    def ended(x: xr.DataArray) -> xr.DataArray:
        return with_end(x, last, n_delays)

    def by_stratum(x: xr.DataArray) -> xr.DataArray:
        return xr.dot(masks.astype(int), x.astype(int), dim="pair")

    happens = other.changes | other.moves
    ever, holds = happens.any("delay"), (other.agree | ~other.within).all("delay")
    # Runs that have ended say nothing of later delays.
    so_far = (happens.cumsum("delay") > 0) & other.within
    kept = (other.within & ~other.agree).cumsum("delay") == 0
    said = other.changes.any("delay")
    random_holds = (other.random_agree | ~other.within).all("delay")

    def inputs_by_stratum(x: xr.DataArray) -> xr.DataArray:
        of_each = []
        for stratum in masks.stratum.values:
            mask = masks.sel(stratum=stratum)
            some = mask.any("program").values
            of_each.append(_inputs(x.isel(pair=some) & mask.isel(pair=some), other.base[some]))
        return xr.concat(of_each, masks.stratum).transpose("program", "stratum", ...)

    return xr.Dataset(
        {
            "active_inputs": inputs_by_stratum(ended(happens)),
            "run_inputs": inputs_by_stratum(ever),
            "prefix_inputs": _inputs(ended(so_far), other.base),
            "apart_inputs": _inputs(ended(other.apart), other.base),
            "random_inputs": _inputs(said, other.base),
            "same_inputs": np.unique(same.base).size,
            "right": by_stratum(ended(happens & other.agree)),
            "active": by_stratum(ended(happens)),
            "nothing_right": by_stratum(ended(happens & ~other.changes)),
            "run_right": by_stratum(ever & holds),
            "run_active": by_stratum(ever),
            "prefix_right": ended(so_far & kept).sum("pair"),
            "prefix_active": ended(so_far).sum("pair"),
            "pairs": masks.sum("pair"),
            "duel_right": ended(other.apart & other.agree).sum("pair"),
            "apart": ended(other.apart).sum("pair"),
            "undisturbed": other.undisturbed.sum("input"),
            "slipped": (other.undisturbed < 1).sum("input"),
            "worst_loop": other.worst_loop.min("batch"),
            "decided": other.decided.mean("input"),
            "n_runs": other.sizes["input"],
            "alike": other.alike.all("batch"),
            "random_right": (said & random_holds).sum("pair"),
            "exchange_right": (said & holds).sum("pair"),
            "random_active": said.sum("pair"),
            "unchanged": (~same.moves.any("delay")).sum(),
            "n_same": same.sizes["pair"],
            "solved": other.solved.min(),
        }
    )


def _inputs(x: xr.DataArray, base: xr.DataArray) -> xr.DataArray:
    """The number of inputs that have a pair of which something holds."""
    order = base.values.argsort()
    _, starts = np.unique(base.values[order], return_index=True)

    def count(values: np.ndarray, axis: int) -> np.ndarray:
        return np.logical_or.reduceat(values.take(order, axis), starts, axis).sum(axis)

    return x.reduce(count, "pair")


def with_end(x: xr.DataArray, last: xr.DataArray, n_delays: int) -> xr.DataArray:
    """All delays of a run [pair, delay], false past the end; and one more, each pair's last."""
    import xarray as xr

    whole = x.pad(delay=(0, n_delays - x.sizes["delay"]), constant_values=False)
    end = x.isel(delay=last).assign_coords(delay=END)
    parts: list[xr.DataArray] = [whole.assign_coords(delay=delay_names(n_delays)[:-1]), end]
    return xr.concat(parts, "delay")


def delay_names(n_delays: int) -> list[str]:
    """The coordinates of delays; the last reads each pair's answer at the end of its run.

    Example:
        >>> delay_names(2)
        ['0', '1', 'end']
    """
    return [*map(str, range(n_delays)), END]


def _masks(reached: xr.DataArray, classes: pd.DataFrame) -> xr.DataArray:
    """Which pairs are of each class [program, stratum, pair]; all of them are of the first."""
    import xarray as xr

    every = xr.ones_like(reached)
    masks = {
        ALL: every,
        f"{MANIFOLD}: {REACHED}": reached,
        f"{MANIFOLD}: {UNREACHED}": ~reached,
        **{str(k): every & xr.DataArray(x.to_numpy(), dims="pair") for k, x in classes.items()},
    }
    table = xr.concat(list(masks.values()), "stratum").assign_coords(stratum=list(masks))
    return table.transpose("program", "stratum", "pair")
