"""Interchange interventions on single variables of any loop program, in any looped model."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch

from loopinterp.comparison.counts import delay_names, with_end
from loopinterp.comparison.inputs import check_batch
from loopinterp.comparison.program_runs import SILENT, Claims, Prediction, ProgramRuns
from loopinterp.core.errors import check_choice, check_integer, check_seed
from loopinterp.core.intervals import wilson_estimate
from loopinterp.core.results import Result, study
from loopinterp.core.text import ShortRepr
from loopinterp.interventions.engine import (
    InterchangeRun,
    check_subspace,
    project,
    random_change,
    state_width,
)
from loopinterp.interventions.pairs import InterchangePairs, draw_pairs, evenly_by_class, join
from loopinterp.models import describe_model
from loopinterp.models.iteration import check_increasing
from loopinterp.programs.language import UNKNOWN
from loopinterp.programs.registry import get_program

if TYPE_CHECKING:
    import xarray as xr
    from jaxtyping import Bool, Float, Int
    from torch import Tensor

    from loopinterp.models import LoopedModel
    from loopinterp.programs.program import LoopProgram
    from loopinterp.tasks.task import Batch, Task


VARIABLE = "the variable"
RANDOM = "a random change"
ANOTHER_LOOP = "another loop"
ANOTHER_VARIABLE = "another variable"
NOTHING = "nothing"
SAME_VALUE = "the same value"

INTERVENTIONS = (VARIABLE, RANDOM, ANOTHER_LOOP, ANOTHER_VARIABLE, NOTHING, SAME_VALUE)
"""What is put into the base's state: the first is the intervention, the others its controls."""

_CLEAN = "clean"
"""Counted beside the interventions: the clean answers of program and model against each other."""

_AXES = "intervention variable loop delay"

_CANDIDATES = 8
"""Candidates per pair that is drawn after each loop."""


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class VariableInterchange(Result, kind="variable-interchange"):
    """What :func:`interchange_study` returns.

    Arrays of ``data``; ``delay`` counts loops from the interchange, ``"end"`` is the last loop;
    cells without pairs are NaN:

    - ``agreement``: share of pairs on which the model's whole answer is that of the program after
      an interchange of the variable, by what was put in (:data:`INTERVENTIONS`): the source's part
      of the state in the variable's subspace; a change of the same norm in a random direction; the
      same subspace of the source after another loop, with another value; another variable's
      subspace; or nothing, the chance level. Last, the same-value control: the share of answers
      that do not change, wherever the program has one.
    - ``pairs``: number of pairs: those on which the program's answer changes at that delay, and
      differs between control and intervention.
    - ``whole_run``, ``whole_run_pairs``: the same at every delay at once.
    - ``undisturbed``: share of the intervention's pairs on which the clean answers of model and
      program agree.

    Attributes:
        program: The program.
        ranks: Dimensions of each variable's subspace. For the other variables the whole state is
            put in, and in the program all of its variables.
        inputs: Number of inputs of the pairs; intervals count no more than these.
    """

    VARIABLES: ClassVar[dict[str, str]] = {
        "agreement": f"{_AXES} estimate",
        "pairs": _AXES,
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
        """Whole-run accuracy after an intervention over all variables and loops.

        Returns:
            The share, the ends of its 95% interval, and the number of pairs.
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
    """Interchange every variable of a program after every loop; compare model and program.

    For each variable v and each number of loops t, pairs of inputs (base, source) and a position p
    are drawn on which v has two values and taking v from the source changes the program's answer
    to the base. In the model's run of the base, the part of the state at p in v's subspace is
    replaced by that of the source, and the run goes on to its end. At every delay and asked
    position the model should then answer as the program does, or, where the program's answer does
    not change, as in its clean run.

    Controls, in the same bases and against the same counterfactual: a change of equal norm in a
    random direction; the source's state after another loop, at which v has another value; another
    variable's subspace; and nothing. A control counts only where the program's answers differ
    between it and the intervention. The same-value control takes a source with the same value of v
    in another context: it must change nothing.

    Args:
        model: Any looped model.
        data: Inputs of one length, or the task to draw them from.
        program: Any loop program, or its name; it must read the model's tokens.
        subspaces: Variable -> orthonormal rows that span its directions. For other variables the
            whole state is put in, and in the program all of its variables, on pairs with the same
            token at the position.
        n_loops: Loops of a full run; T(n) of the batch by default.
        loops: Numbers of loops before the interchange; by default 0 .. ``n_loops``.
        pairs_per_loop: Most pairs of a variable after each number of loops.
        n: Problem length, where a task is given; see :func:`~loopinterp.tasks.as_batch`.
        batch_size: Examples, where a task is given.
        seed: Seed of pairs, positions and random directions, and of what is drawn.

    Raises:
        InputError: inputs that are not tokens of the program, or fewer than two; an unknown
            variable or a subspace of another shape; loops out of range.

    Source: interchange interventions, Geiger et al., arXiv 2106.02997 and 2303.02536.

    Example:
        >>> from loopinterp.comparison.program_runs import ProgramModel
        >>> from loopinterp.programs import get_program
        >>> from loopinterp.tasks import get_task
        >>> xor = get_program("prefix_xor")
        >>> task = get_task("prefix_sum")
        >>> batch = task.sample(4, batch_size=32, generator=torch.Generator().manual_seed(0))
        >>> model = ProgramModel(xor, max_length=5)
        >>> subspaces = {"prefix": model.subspace("prefix")}
        >>> float(interchange_study(model, batch, xor, subspaces=subspaces).iia.min())
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
            separable=bases,
            per_loop=pairs_per_loop,
            generator=torch.Generator().manual_seed(check_seed(seed)),
        )
        counts = _count_all(model, finder, bases, after, seed)
        made = counts.sel(intervention=list(INTERVENTIONS))
        clean = counts.sel(intervention=_CLEAN)
        return VariableInterchange.of(
            watch,
            coords={axis: x.values for axis, x in made.coords.items()},
            agreement=wilson_estimate(made.right, made.n, independent=len(batch)),
            pairs=made.n,
            whole_run=wilson_estimate(made.run_right, made.run_n, independent=len(batch)),
            whole_run_pairs=made.run_n,
            undisturbed=wilson_estimate(clean.right, clean.n)[..., 0],
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
    """Counts of every variable, by intervention (or none: clean)."""
    import xarray as xr

    variables = finder.runs.program.variables
    coords = {
        "intervention": [*INTERVENTIONS, _CLEAN],
        "variable": list(variables),
        "loop": list(loops),
        "delay": delay_names(finder.n_loops + 1),
    }
    by_delay = xr.DataArray(np.zeros([len(x) for x in coords.values()], int), coords=coords)
    by_run = by_delay.isel(delay=0, drop=True)
    none = {"right": by_delay, "n": by_delay, "run_right": by_run, "run_n": by_run}
    totals = xr.Dataset(none).copy(deep=True)
    # A generator of its own, so that models of other widths get the same pairs.
    generator = torch.Generator().manual_seed(seed)
    for variable in variables:
        pairs = finder.draw(variable, loops)
        if len(pairs):
            counts = _count_variable(model, finder, variable, pairs, bases, generator)
            whole = totals.sel(variable=variable)
            totals.loc[{"variable": variable}] = counts.reindex_like(whole, fill_value=0)
    return totals


def _count_variable(
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

    effective = finder.effective(variable, pairs)
    made = {
        VARIABLE: Control(pairs, effective),
        RANDOM: Control(pairs, effective),
        ANOTHER_LOOP: finder.another_loop(variable, pairs),
        SAME_VALUE: finder.same_value(variable, pairs),
    }
    subspace = dict.fromkeys(made, bases.get(variable))
    if other := finder.another_variable(variable, pairs):
        subspace[ANOTHER_VARIABLE], made[ANOTHER_VARIABLE] = bases[other[0]], other[1]

    # All interventions go through one run; each only on the pairs on which it counts.
    rows = {name: control.counts.any(1).nonzero().squeeze(1) for name, control in made.items()}
    rows = {name: row for name, row in rows.items() if len(row)}
    sizes = [len(row) for row in rows.values()]
    joined = join([made[n].pairs[row] for n, row in rows.items()], "intervention", tuple(rows))
    run = InterchangeRun(model, joined)
    changes = dict(zip(rows, run.difference.split(sizes)))
    for name, change in changes.items():
        if (basis := subspace[name]) is not None:
            changes[name] = project(change, basis)
    changes[RANDOM] = random_change(changes[VARIABLE], generator)
    answers = run.after(run.base_state + torch.cat(list(changes.values()))).cpu()

    clean = run.base[: len(pairs)].cpu()  # the pairs themselves come first, and all count
    prediction = finder.predict(variable, pairs)
    claims = prediction.claims(clean)
    decided = pairs.scored[:, None] & (prediction.base != UNKNOWN)
    unchanged = Claims(clean.masked_fill(~decided, SILENT), claims.changes)
    counts = {
        NOTHING: _count(pairs, claims.agree(clean), effective),
        _CLEAN: _count(pairs, ((clean == prediction.base) | ~decided).all(-1), effective),
    }
    for (name, row), read in zip(rows.items(), answers.split(sizes)):
        expected = unchanged if name == SAME_VALUE else claims
        counts[name] = _count(pairs[row], expected[row].agree(read), made[name].counts[row])
    stacked = xr.concat(counts.values(), "intervention", join="outer", fill_value=0)
    return stacked.assign_coords(intervention=list(counts))


def _count(
    pairs: InterchangePairs, right: Bool[Tensor, "pair delay"], counts: Bool[Tensor, "pair delay"]
) -> xr.Dataset:
    """How many pairs are right where they count, after each loop; and over whole runs."""
    import xarray as xr

    last = xr.DataArray(pairs.horizon.numpy(), dims="pair")
    # Delays before the end of the run, [pair, delay].
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


@dataclass(frozen=True, eq=False)
class Control:
    """What is put in instead of the variable, in all bases of some pairs."""

    pairs: InterchangePairs  # the same bases and positions, perhaps with other sources
    counts: Bool[Tensor, "pair delay"]  # where the program's answer differs from the intervention's


@dataclass(frozen=True, eq=False, repr=False)
class VariablePairs(ShortRepr):
    """Draws pairs for every variable of a program, and for its controls.

    The variable has two values there, and the source's value changes the program's answer at some
    delay, so that a model whose answers do not change is never right. Each control puts something
    else into the same bases, and counts only where the program's answer then differs.

    Without a subspace the whole state is put in, and so all variables, at positions with the same
    token.
    """

    runs: ProgramRuns
    batch: Batch
    n_loops: int
    separable: Collection[str]  # the variables with a subspace
    per_loop: int
    generator: torch.Generator

    def draw(self, variable: str, loops: Collection[int]) -> InterchangePairs:
        """Pairs on which the variable is effective, after each number of loops.

        They are drawn evenly by the last delay at which the answer changes.
        """
        return join([self._after(variable, loop) for loop in loops], "loop", tuple(map(str, loops)))

    def effective(self, variable: str, pairs: InterchangePairs) -> Bool[Tensor, "pair delay"]:
        """Where the interchange changes the program's answer."""
        prediction = self.predict(variable, pairs)
        return _differ(prediction.base, prediction.exchanged, pairs)

    def predict(self, variable: str, pairs: InterchangePairs) -> Prediction:
        """The program after an interchange of a variable (or with the whole state, of all)."""
        names = (variable,) if variable in self.separable else None
        return Prediction(self.runs.program, pairs, names=names, runs=self.runs)

    def another_loop(self, variable: str, pairs: InterchangePairs) -> Control:
        """The source after the nearest loop at which the variable has another value there."""
        # Values of the source at its position after each loop, [loop, pair].
        values = self._values(variable)[:, pairs.source, pairs.positions[:, 0]]
        values = values[: pairs.n_loops + 1]
        loops = torch.arange(len(values))[:, None]
        equal = values == values.gather(0, pairs.loop[None])
        # Of two equally near, the later one; where no value differs, the right loop itself.
        distance = 2 * (loops - pairs.loop).abs() + (loops < pairs.loop)
        distance = distance.masked_fill(equal & (loops != pairs.loop), 2 * len(values))
        distance = distance.masked_fill(loops == pairs.loop, 2 * len(values) - 1)
        made = replace(pairs, source_loop=distance.argmin(0))
        return Control(made, self._otherwise(variable, pairs, self.predict(variable, made)))

    def another_variable(
        self, variable: str, pairs: InterchangePairs
    ) -> tuple[str, Control] | None:
        """The separable variable that differs in most of the pairs."""
        others = [n for n in self.runs.program.variables if n in self.separable and n != variable]
        if variable not in self.separable or not others:
            return None
        position = pairs.positions[:, 0]

        def differing(name: str) -> int:
            values = self._values(name)
            base, source = (values[pairs.loop, row, position] for row in (pairs.base, pairs.source))
            return int((base != source).sum())

        other = max(others, key=differing)
        return other, Control(pairs, self._otherwise(variable, pairs, self.predict(other, pairs)))

    def same_value(self, variable: str, pairs: InterchangePairs) -> Control:
        """Sources with the base's value, in another context.

        Another token at the position is preferred, unless the whole state is put in.
        """
        names = (variable,) if variable in self.separable else self.runs.program.variables
        position, token = pairs.positions[:, 0], pairs.inputs[:, pairs.positions[:, 0]].T
        # Inputs with the base's token at the position, [pair, input].
        same_token = token == token.gather(1, pairs.base[:, None])
        fits = torch.ones_like(same_token) if variable in self.separable else same_token.clone()
        for name in names:
            values = self._values(name)[pairs.loop, :, position]  # [pair, input]
            fits &= values == values.gather(1, pairs.base[:, None])
        fits.scatter_(1, pairs.base[:, None], False)
        luck = torch.rand(fits.shape, generator=self.generator, dtype=torch.float32)
        best = (luck + (~same_token).float()).masked_fill(~fits, -1).max(1)
        source = torch.where(best.values < 0, pairs.base, best.indices)
        made = replace(pairs, source=source, source_loop=pairs.loop)
        delays = torch.arange(pairs.longest + 1)
        return Control(made, (source != pairs.base)[:, None] & (delays <= pairs.horizon[:, None]))

    def _after(self, variable: str, loop: int) -> InterchangePairs:
        """The pairs after one number of loops."""
        inputs = self.batch.inputs
        base, source = draw_pairs(len(inputs), _CANDIDATES * self.per_loop, self.generator)
        values = self._values(variable)[loop]
        # Positions at which the variable has two values, [pair, pos].
        differs = values[base] != values[source]
        if variable not in self.separable:
            # The whole state may also hold the token.
            differs &= inputs[base] == inputs[source]
        pair, position = differs.nonzero(as_tuple=True)
        some = torch.randperm(len(pair), generator=self.generator)[: _CANDIDATES * self.per_loop]
        candidates = InterchangePairs.of(
            self.batch,
            base=base[pair[some]],
            source=source[pair[some]],
            positions=position[some, None],
            loop=torch.full_like(some, loop),
            n_loops=self.n_loops,
        )
        effective = self.effective(variable, candidates).int()
        # The last delay at which the answer changes, [pair].
        last = effective.shape[1] - 1 - effective.flip(1).argmax(1)
        rows = effective.any(1).nonzero().squeeze(1)
        return candidates[rows[evenly_by_class(last[rows], self.per_loop, self.generator)]]

    def _values(self, variable: str) -> Int[Tensor, "loops input pos"]:
        return self.runs.trace.variables[variable]

    def _otherwise(
        self, variable: str, pairs: InterchangePairs, control: Prediction
    ) -> Bool[Tensor, "pair delay"]:
        """Where the program's answer differs between a control and the intervention."""
        right = self.predict(variable, pairs)
        effective = _differ(right.base, right.exchanged, pairs)
        return effective & _differ(right.exchanged, control.exchanged, pairs)


def _differ(
    first: Int[Tensor, "pair delay pos"],
    second: Int[Tensor, "pair delay pos"],
    pairs: InterchangePairs,
) -> Bool[Tensor, "pair delay"]:
    """Whether two answers differ at an asked position where both are decided, before the end."""
    decided = (first != UNKNOWN) & (second != UNKNOWN) & pairs.scored[:, None]
    within = torch.arange(first.shape[1]) <= pairs.horizon[:, None]
    return ((first != second) & decided).any(-1) & within
