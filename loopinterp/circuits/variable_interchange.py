"""Interchange interventions on single variables of any loop program, in any looped model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch

from loopinterp.circuits.comparison_inputs import check_batch
from loopinterp.circuits.evidence_counts import delay_names, with_end
from loopinterp.circuits.interchange_engine import InterchangeRun, state_width
from loopinterp.circuits.interchange_pairs import join
from loopinterp.circuits.program_counterfactuals import SILENT, Claims, ProgramRuns
from loopinterp.circuits.subspaces import check_subspace, project, random_change
from loopinterp.circuits.variable_pairs import Control, VariablePairs
from loopinterp.errors import check_choice, check_integer, check_seed
from loopinterp.intervals import wilson_estimate
from loopinterp.models import describe_model
from loopinterp.models.iteration import check_increasing
from loopinterp.rasp.language import UNKNOWN
from loopinterp.rasp.program_registry import get_program
from loopinterp.results import Result, study

if TYPE_CHECKING:
    import xarray as xr
    from jaxtyping import Bool, Float
    from torch import Tensor

    from loopinterp.circuits.interchange_pairs import InterchangePairs
    from loopinterp.models import LoopedModel
    from loopinterp.rasp.program import LoopProgram
    from loopinterp.tasks.task import Batch, Task

VARIABLE = "the variable"
RANDOM = "a random change"
ANOTHER_LOOP = "another loop"
ANOTHER_VARIABLE = "another variable"
NOTHING = "nothing"
SAME_VALUE = "the same value"

INTERVENTIONS = (VARIABLE, RANDOM, ANOTHER_LOOP, ANOTHER_VARIABLE, NOTHING, SAME_VALUE)
"""What is put into the base's state: the first is the intervention, the others its controls."""

UNDISTURBED = "undisturbed"
"""In the tally, beside the interventions: the program's own answer against the model's."""

_COUNTED = "intervention variable loop delay"


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class VariableInterchange(Result, kind="variable-interchange"):
    """What :func:`interchange_study` returns.

    Arrays of ``data``; ``delay`` counts loops from the exchange, ``"end"`` is the last loop;
    where there are no pairs there is NaN:

    - ``agreement``: how often the model's whole answer is the one that the program gives if the
      variable is exchanged, by what was put in (:data:`INTERVENTIONS`): the source's part of the
      state in the variable's subspace; a change of the same norm in a random direction; the same
      subspace of the source after another loop, at which it has another value; another variable's
      subspace; or nothing, which is the chance level. Last, a donor with the same value of the
      variable in another context: there it is how often the answer stays what it was, wherever
      the program has one.
    - ``pairs``: on how many pairs; those on which the program gives another answer at that delay,
      and tells the control from the right exchange.
    - ``whole_run``, ``whole_run_pairs``: the same at every delay at once.
    - ``undisturbed``: how often the model without an exchange answers as the program does without,
      on the pairs of the intervention itself.

    Attributes:
        program: The program.
        ranks: Dimensions of each variable's subspace. For the other variables the whole state is
            exchanged, and in the program all of its variables.
        inputs: The inputs that pairs are of; intervals count no more than these.
    """

    VARIABLES: ClassVar[dict[str, str]] = {
        "agreement": f"{_COUNTED} estimate",
        "pairs": _COUNTED,
        "whole_run": "intervention variable loop estimate",
        "whole_run_pairs": "intervention variable loop",
        "undisturbed": "variable loop delay",
    }

    program: str
    ranks: dict[str, int]
    inputs: int

    @property
    def iia(self) -> Any:
        """Interchange intervention accuracy, a data array [variable, loop, delay]."""
        return self.data["agreement"].sel(intervention=VARIABLE, estimate="value")

    def pooled(self, intervention: str = VARIABLE) -> tuple[float, float, float, int]:
        """Whole runs after an intervention over all variables and loops.

        Returns:
            The share that is right, the ends of its 95% interval, and of how many.
        """
        n = self.data["whole_run_pairs"].sel(intervention=intervention).values
        share = self.data["whole_run"].sel(intervention=intervention, estimate="value").values
        value, low, high = wilson_estimate(
            float(np.nansum(share * n)), int(n.sum()), independent=self.inputs
        )
        return float(value), float(low), float(high), int(n.sum())


def interchange_study(
    model: LoopedModel | Any,
    data: Batch | Task,
    program: str | LoopProgram,
    *,
    subspaces: Mapping[str, Float[Tensor, "rank d_model"]] | None = None,
    n_loops: int | None = None,
    loops: Sequence[int] | None = None,
    pairs_per_loop: int = 64,
    n: int | None = None,
    batch_size: int | None = None,
    seed: int = 0,
) -> VariableInterchange:
    """Exchange every variable of a program after every loop, and see whether the model follows.

    For each variable v and each number of loops t, pairs of inputs (base, source) and a position p
    are drawn on which v has two values and taking v from the source changes the program's answer
    to the base. In the model's run of the base, the part of the state at p that lies in v's
    subspace is then replaced by that of the source, and the run goes on to its end. Wherever an
    answer is asked for, the model should then answer what the program does, or where the exchange
    changes nothing for the program, what the model answers without; at every delay.

    Beside it, in the same bases and against the same counterfactual: a change of equal norm in a
    random direction; the source's state after another loop, at which v has another value; another
    variable's subspace; and no exchange at all. A control counts only where the program itself
    tells it from the right exchange. And the other way round: a donor with the same value of v in
    another context, which must change nothing.

    Args:
        model: Any looped model.
        data: Inputs of one length, or the task to draw them from.
        program: Any loop program, or its name; it must read the model's tokens.
        subspaces: Variable -> orthonormal rows that span the directions it lies in. The whole
            state is exchanged for variables that are not listed, and in the program all of its
            variables, on pairs with the same token at the position.
        n_loops: Loops of a full run; T(n) of the batch by default.
        loops: Numbers of loops after which to exchange; by default 0 .. ``n_loops``.
        pairs_per_loop: Most pairs of a variable after each number of loops.
        n: Problem length, where a task is given; see :func:`~loopinterp.tasks.as_batch`.
        batch_size: Examples, where a task is given.
        seed: Seed of pairs, positions and random directions, and of what is drawn.

    Raises:
        InputError: inputs that are not tokens of the program, or fewer than two; an unknown
            variable or a subspace of another shape; loops out of range.

    Source: interchange interventions, Geiger et al., arXiv 2106.02997 and 2303.02536.

    Example:
        >>> from loopinterp.circuits.program_model import ProgramModel
        >>> from loopinterp.rasp import get_program
        >>> from loopinterp.tasks import get_task
        >>> xor = get_program("prefix_xor")
        >>> task = get_task("prefix_sum")
        >>> batch = task.sample(4, batch_size=32, generator=torch.Generator().manual_seed(0))
        >>> model = ProgramModel(xor, max_length=5)
        >>> where = {"prefix": model.subspace("prefix")}
        >>> float(interchange_study(model, batch, xor, subspaces=where).iia.min())
        1.0
    """
    chosen = get_program(program)
    drawn = {"n": n, "batch_size": batch_size, "seed": seed}
    batch = check_batch(model, data, [chosen], needs_loops=n_loops is None, **drawn)
    last = check_integer(
        "n_loops", int(batch.n_loops.max()) if n_loops is None else n_loops, least=0
    )
    after = check_increasing(range(last + 1) if loops is None else loops, most=last)
    check_integer("pairs_per_loop", pairs_per_loop, least=1)
    bases = dict(subspaces or {})
    for name, rows in bases.items():
        check_choice(f"subspaces: variable of program {chosen.name}", name, chosen.variables)
        check_subspace(rows, state_width(model, batch.inputs), f"subspace of variable {name!r}")
    with study(
        seed,
        study="variable interchange",
        model=describe_model(model),
        program=chosen.name,
        n_loops=last,
        inputs=len(batch),
        pairs_per_loop=pairs_per_loop,
    ) as watch:
        finder = VariablePairs(
            ProgramRuns(chosen, batch.inputs, n_loops=last),
            batch,
            n_loops=last,
            apart=bases,
            per_loop=pairs_per_loop,
            generator=torch.Generator().manual_seed(check_seed(seed)),
        )
        totals = _count_all(model, finder, bases, after, seed)
        put = totals.sel(intervention=list(INTERVENTIONS))
        alone = totals.sel(intervention=UNDISTURBED)
        return VariableInterchange.of(
            watch,
            coords={axis: x.values for axis, x in put.coords.items()},
            agreement=wilson_estimate(put.right, put.n, independent=len(batch)),
            pairs=put.n,
            whole_run=wilson_estimate(put.run_right, put.run_n, independent=len(batch)),
            whole_run_pairs=put.run_n,
            undisturbed=wilson_estimate(alone.right, alone.n)[..., 0],
            program=chosen.name,
            ranks={name: len(rows) for name, rows in bases.items()},
            inputs=len(batch),
        )


def _count_all(
    model: LoopedModel | Any,
    finder: VariablePairs,
    bases: Mapping[str, Tensor],
    loops: Sequence[int],
    seed: int,
) -> xr.Dataset:
    """Counts by what was put in (and by nothing: undisturbed), of every variable."""
    import xarray as xr

    variables = finder.runs.program.variables
    coords = {
        "intervention": [*INTERVENTIONS, UNDISTURBED],
        "variable": list(variables),
        "loop": list(loops),
        "delay": delay_names(finder.n_loops + 1),
    }
    by_delay = xr.DataArray(np.zeros([len(x) for x in coords.values()], int), coords=coords)
    by_run = by_delay.isel(delay=0, drop=True)
    none = {"right": by_delay, "n": by_delay, "run_right": by_run, "run_n": by_run}
    totals = xr.Dataset(none).copy(deep=True)
    # Of its own, so that models of other widths are tried on the same pairs.
    generator = torch.Generator().manual_seed(check_seed(seed))
    for variable in variables:
        pairs = finder.of(variable, loops)
        if len(pairs):
            found = _exchange(model, finder, variable, pairs, bases, generator)
            whole = totals.sel(variable=variable)
            totals.loc[{"variable": variable}] = found.reindex_like(whole, fill_value=0)
    return totals


def _exchange(
    model: LoopedModel | Any,
    finder: VariablePairs,
    variable: str,
    pairs: InterchangePairs,
    bases: Mapping[str, Tensor],
    generator: torch.Generator,
) -> xr.Dataset:
    """Make all interventions on the pairs of one variable, and count [intervention, loop, delay].

    ``right`` of ``n`` pairs; of whole runs, ``run_right`` of ``run_n``.
    """
    import xarray as xr

    told = finder.told(variable, pairs)
    made = {
        VARIABLE: Control(pairs, told),
        RANDOM: Control(pairs, told),
        ANOTHER_LOOP: finder.another_loop(variable, pairs),
        SAME_VALUE: finder.same_value(variable, pairs),
    }
    subspace = dict.fromkeys(made, bases.get(variable))
    if other := finder.another_variable(variable, pairs):
        subspace[ANOTHER_VARIABLE], made[ANOTHER_VARIABLE] = bases[other[0]], other[1]

    rows = {name: control.counts.any(1).nonzero().squeeze(1) for name, control in made.items()}
    rows = {name: where for name, where in rows.items() if len(where)}
    sizes = [len(where) for where in rows.values()]
    joined = join([made[n].pairs[where] for n, where in rows.items()], "intervention", tuple(rows))
    run = InterchangeRun(model, joined)
    changes = dict(zip(rows, run.difference.split(sizes)))
    for name, change in changes.items():
        if (basis := subspace[name]) is not None:
            changes[name] = project(change, basis)
    changes[RANDOM] = random_change(changes[VARIABLE], generator)
    answers = run.after(run.own + torch.cat(list(changes.values()))).cpu()

    natural = run.base[: len(pairs)].cpu()  # the pairs themselves come first, and all count
    prediction = finder.predict(variable, pairs)
    claims = prediction.claims(natural)
    decided = pairs.scored[:, None] & (prediction.base != UNKNOWN)
    unchanged = Claims(natural.masked_fill(~decided, SILENT), claims.changes)
    counts = {
        NOTHING: _count(pairs, claims.agree(natural), told),
        UNDISTURBED: _count(pairs, ((natural == prediction.base) | ~decided).all(-1), told),
    }
    for (name, where), read in zip(rows.items(), answers.split(sizes)):
        expected = unchanged if name == SAME_VALUE else claims
        right = expected[where].agree(read)
        counts[name] = _count(pairs[where], right, made[name].counts[where])
    found = xr.concat(counts.values(), "intervention", join="outer", fill_value=0)
    return found.assign_coords(intervention=list(counts))


def _count(
    pairs: InterchangePairs, right: Bool[Tensor, "pair delay"], counts: Bool[Tensor, "pair delay"]
) -> xr.Dataset:
    """How many pairs are right where they count, after each loop; and over whole runs."""
    import xarray as xr

    last = xr.DataArray(pairs.horizon.numpy(), dims="pair")
    within = torch.arange(right.shape[1]) <= pairs.horizon[:, None]
    ever = counts.any(1)

    def by_delay(x: Bool[Tensor, "pair delay"]) -> xr.DataArray:
        array = xr.DataArray(x.numpy(), dims=("pair", "delay"))
        return with_end(array, last, pairs.n_loops + 1)

    table = xr.Dataset(
        {
            "right": by_delay(right & counts),
            "n": by_delay(counts),
            "run_right": ("pair", ((right | ~within).all(1) & ever).numpy()),
            "run_n": ("pair", ever.numpy()),
        },
        coords={"loop": ("pair", pairs.loop.numpy())},
    )
    return table.groupby("loop").sum()
