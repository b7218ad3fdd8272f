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
    # Counted in plain arrays: there are hundreds of counts, each of few numbers.
    by_program = ("program", "pair", "delay")
    changes, agree, random_agree = (
        other[name].transpose(*by_program).values for name in ("changes", "agree", "random_agree")
    )
    apart = other.apart.transpose("program", "rival", "pair", "delay").values
    moves, within = (other[name].transpose("pair", "delay").values for name in ("moves", "within"))
    base, of_stratum = other.base.values, masks.transpose("stratum", "program", "pair").values
    pairs, last = np.arange(len(base)), within.sum(-1) - 1

    def ended(x: np.ndarray) -> np.ndarray:
        """As :func:`with_end`, of an array [… pair, delay]."""
        whole = np.zeros((*x.shape[:-1], n_delays + 1), dtype=bool)
        whole[..., : x.shape[-1]], whole[..., -1] = x, x[..., pairs, last]
        return whole

    def by_stratum(x: np.ndarray) -> np.ndarray:
        """Pairs of each program and stratum of which something holds [program, pair, …]."""
        rows = x.reshape(*x.shape[:2], -1).astype(float)
        found = of_stratum.swapaxes(0, 1).astype(float) @ rows
        return found.astype(int).reshape(*found.shape[:2], *x.shape[2:])

    def inputs_by_stratum(x: np.ndarray) -> np.ndarray:
        of_each = []
        for mask in of_stratum:
            some = mask.any(0)
            held = mask[:, some].reshape(*mask[:, some].shape, *(1 for _ in x.shape[2:]))
            of_each.append(_inputs(x[:, some] & held, base[some], 1))
        return np.stack(of_each, 1)

    happens = changes | moves
    ever, holds = happens.any(-1), (agree | ~within).all(-1)
    # Runs that have ended say nothing of later delays.
    so_far = (happens.cumsum(-1) > 0) & within
    kept = (within & ~agree).cumsum(-1) == 0
    said = changes.any(-1)
    random_holds = (random_agree | ~within).all(-1)
    at_end, so_far_at_end, apart_at_end = ended(happens), ended(so_far), ended(apart)
    arrays = {
        "active_inputs": ("program stratum delay", inputs_by_stratum(at_end)),
        "run_inputs": ("program stratum", inputs_by_stratum(ever)),
        "prefix_inputs": ("program delay", _inputs(so_far_at_end, base, 1)),
        "apart_inputs": ("program rival delay", _inputs(apart_at_end, base, 2)),
        "random_inputs": ("program", _inputs(said, base, 1)),
        "same_inputs": ("", np.unique(same.base).size),
        "right": ("program stratum delay", by_stratum(ended(happens & agree))),
        "active": ("program stratum delay", by_stratum(at_end)),
        "nothing_right": ("program stratum delay", by_stratum(ended(happens & ~changes))),
        "run_right": ("program stratum", by_stratum(ever & holds)),
        "run_active": ("program stratum", by_stratum(ever)),
        "prefix_right": ("program delay", ended(so_far & kept).sum(1)),
        "prefix_active": ("program delay", so_far_at_end.sum(1)),
        "duel_right": ("program rival delay", ended(apart & agree[:, None]).sum(2)),
        "apart": ("program rival delay", apart_at_end.sum(2)),
        "random_right": ("program", (said & random_holds).sum(1)),
        "exchange_right": ("program", (said & holds).sum(1)),
        "random_active": ("program", said.sum(1)),
    }
    return xr.Dataset(
        {
            **{name: (axes.split(), array) for name, (axes, array) in arrays.items()},
            "pairs": masks.sum("pair"),
            "undisturbed": other.undisturbed.sum("input"),
            "slipped": (other.undisturbed < 1).sum("input"),
            "worst_loop": other.worst_loop.min("batch"),
            "decided": other.decided.mean("input"),
            "n_runs": other.sizes["input"],
            "alike": other.alike.all("batch"),
            "unchanged": (~same.moves.any("delay")).sum(),
            "n_same": same.sizes["pair"],
            "solved": other.solved.min(),
        },
        coords={name: other[name] for name in ("program", "rival")}
        | {"delay": delay_names(n_delays)},
    )


def _inputs(x: np.ndarray, base: np.ndarray, axis: int) -> np.ndarray:
    """The number of inputs that have a pair, along an axis, of which something holds."""
    order = base.argsort()
    _, starts = np.unique(base[order], return_index=True)
    return np.logical_or.reduceat(x.take(order, axis), starts, axis).sum(axis)


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

    reached = reached.transpose("program", "pair")
    ends = reached.values
    masks = {
        ALL: np.ones_like(ends),
        f"{MANIFOLD}: {REACHED}": ends,
        f"{MANIFOLD}: {UNREACHED}": ~ends,
        **{str(k): np.broadcast_to(x.to_numpy(), ends.shape) for k, x in classes.items()},
    }
    return xr.DataArray(
        np.stack(list(masks.values()), 1),
        coords={"program": reached["program"], "stratum": list(masks)},
        dims=("program", "stratum", "pair"),
    )
