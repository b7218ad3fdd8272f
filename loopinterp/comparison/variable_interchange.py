"""Interchange interventions on single variables of a program."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np
import torch
from pydantic import NonNegativeInt, PositiveInt

from loopinterp.comparison.counts import delay_names, with_end
from loopinterp.comparison.pair_strategies import check_batch
from loopinterp.comparison.program_runs import SILENT, Claims, Prediction
from loopinterp.core.boundary import checked
from loopinterp.core.errors import check_choice
from loopinterp.core.intervals import wilson_estimate
from loopinterp.core.results import Result, study
from loopinterp.core.settings import Seed
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
from loopinterp.programs.paired_runs import decided_difference
from loopinterp.programs.stock_programs import get_program

if TYPE_CHECKING:
    import xarray as xr
    from jaxtyping import Bool, Float, Int
    from torch import Tensor

    from loopinterp.models import LoopedModel
    from loopinterp.programs.interpreter import Trace
    from loopinterp.programs.program import LoopProgram
    from loopinterp.tasks.task import Batch, Task


VARIABLE = "the variable"
RANDOM = "a random change"
ANOTHER_LOOP = "another loop"
ANOTHER_VARIABLE = "another variable"
NOTHING = "nothing"
SAME_VALUE = "the same value"

INTERVENTIONS = (VARIABLE, RANDOM, ANOTHER_LOOP, ANOTHER_VARIABLE, NOTHING, SAME_VALUE)
"""What replaces the base's state: the intervention, then its controls."""

_CLEAN = "clean"  # counted beside: clean answers of program and model against each other


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class VariableInterchange(Result, kind="variable-interchange"):
    """The result of :func:`interchange_study`.

    Arrays of ``data``; ``delay`` counts loops from the interchange, ``"end"`` is the last loop; NaN
    without pairs:

    - ``agreement``: share of pairs on which the model's whole answer is the program's, by what was
      put in (:data:`INTERVENTIONS`); for the same-value control, the share of unchanged answers;
    - ``pairs``: number of pairs on which the program's answer changes at that delay, and differs
      between control and intervention;
    - ``whole_run``, ``whole_run_pairs``: the same at every delay at once;
    - ``undisturbed``: share of the pairs on which the clean answers of model and program agree.

    Attributes:
        ranks: Dimensions of each variable's subspace.
        inputs: Number of the pairs' inputs, which intervals count.
    """

    VARIABLES: ClassVar[dict[str, str]] = {
        "agreement": "intervention variable loop delay estimate",
        "pairs": "intervention variable loop delay",
        "whole_run": "intervention variable loop estimate",
        "whole_run_pairs": "intervention variable loop",
        "undisturbed": "variable loop delay",
    }

    program: str
    ranks: dict[str, int]
    inputs: int

    @property
    def iia(self) -> Any:
        """Interchange intervention accuracy, [variable, loop, delay]."""
        return self.data["agreement"].sel(intervention=VARIABLE, estimate="value")

    def pooled(self, intervention: str = VARIABLE) -> tuple[float, float, float, int]:
        """Whole-run accuracy of an intervention over all variables and loops.

        Returns:
            The share, the ends of its 95% interval, and the number of pairs.
        """
        n = self.data["whole_run_pairs"].sel(intervention=intervention).values
        share = self.data["whole_run"].sel(intervention=intervention, estimate="value").values
        total = int(n.sum())
        estimate = wilson_estimate(np.nansum(share * n), total, independent=self.inputs)
        value, low, high = estimate.tolist()
        return value, low, high, total


@checked
def interchange_study(
    model: LoopedModel | Any,
    data: Batch | Task,
    program: str | LoopProgram,
    *,
    subspaces: Mapping[str, Float[Tensor, "rank d_model"]] | None = None,
    n_loops: NonNegativeInt | None = None,
    loops: Sequence[int] | None = None,
    pairs_per_loop: PositiveInt = 64,
    n: PositiveInt | None = None,
    batch_size: PositiveInt | None = None,
    seed: Seed = 0,
) -> VariableInterchange:
    """Interchange every variable of a program after every loop; compare model and program.

    For each variable v and number of loops t, inputs (base, source) and a position p are drawn on
    which v differs and taking v from the source changes the program's answer. In the model's base
    run, the part of the state at p in v's subspace becomes the source's. At every delay the model
    should then answer like the program or, where the program's answer does not change, as in its
    clean run.

    Controls, in the same bases: a random change of equal norm; the source after another loop, at
    which v has another value; another variable's subspace; nothing. A control counts only where the
    program's answers differ between it and the intervention. A source with the same v in another
    context must change nothing.

    Args:
        data: Inputs of one length, or the task (``batch_size`` of length ``n``).
        subspaces: Variable -> orthonormal rows that span its directions. For other variables the
            whole state and all variables are put in, on pairs with the same token.
        n_loops: Loops of a full run; T(n) of the batch by default.
        loops: Numbers of loops before the interchange; by default 0 .. ``n_loops``.
        pairs_per_loop: Most pairs of a variable after each number of loops.

    Source: interchange interventions, Geiger et al., arXiv 2106.02997 and 2303.02536.

    Example:
        >>> from loopinterp.comparison import ProgramModel
        >>> from loopinterp.programs import get_program
        >>> from loopinterp.tasks import get_task
        >>> generator = torch.Generator().manual_seed(0)
        >>> batch = get_task("prefix_sum").sample(4, batch_size=32, generator=generator)
        >>> model = ProgramModel(get_program("prefix_xor"), max_length=5)
        >>> subspaces = {"prefix": model.subspace("prefix")}
        >>> result = interchange_study(model, batch, "prefix_xor", subspaces=subspaces)
        >>> float(result.iia.min())
        1.0
    """
    chosen = get_program(program)
    drawn = {"n": n, "batch_size": batch_size, "seed": seed}
    batch = check_batch(model, data, [chosen], needs_loops=n_loops is None, **drawn)
    last = int(batch.n_loops.max()) if n_loops is None else n_loops
    after = check_increasing(range(last + 1) if loops is None else loops, most=last)
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
        finder = _VariablePairs(
            chosen,
            chosen.trace(batch.inputs, n_loops=last),
            batch,
            n_loops=last,
            subspaces=bases,
            per_loop=pairs_per_loop,
            generator=torch.Generator().manual_seed(seed),
        )
        counts = _count_all(model, finder, after, seed)
        outcomes = counts.sel(intervention=list(INTERVENTIONS))
        clean = counts.sel(intervention=_CLEAN)
        return VariableInterchange.of(
            watch,
            coords={axis: x.values for axis, x in outcomes.coords.items()},
            agreement=wilson_estimate(outcomes.right, outcomes.n, independent=len(batch)),
            pairs=outcomes.n,
            whole_run=wilson_estimate(outcomes.run_right, outcomes.run_n, independent=len(batch)),
            whole_run_pairs=outcomes.run_n,
            undisturbed=wilson_estimate(clean.right, clean.n)[..., 0],
            program=chosen.name,
            ranks={name: len(rows) for name, rows in bases.items()},
            inputs=len(batch),
        )


def _count_all(
    model: LoopedModel | Any,
    finder: _VariablePairs,
    loops: Sequence[int],
    seed: int,
) -> xr.Dataset:
    """``right`` of ``n`` pairs, and ``run_right`` of ``run_n`` whole runs."""
    import xarray as xr

    n_delays = finder.n_loops + 1
    coords = {
        "intervention": [*INTERVENTIONS, _CLEAN],
        "variable": list(finder.program.variables),
        "loop": list(loops),
        "delay": delay_names(n_delays),
    }
    shape = [len(x) for x in coords.values()]
    # [right or all, intervention, variable, loop, delay], and last the whole run.
    totals = np.zeros((2, *shape[:-1], shape[-1] + 1), int)
    # A generator of its own, so that models of other widths get the same pairs.
    generator = torch.Generator().manual_seed(seed)
    for v, variable in enumerate(coords["variable"]):
        drawn = finder.draw(variable, loops)
        outcomes = _outcomes(model, finder, variable, drawn, generator)
        for name, pairs, right, counts in outcomes if len(drawn) else ():
            # Delays before the end of the run, [pair, delay].
            within = torch.arange(right.shape[1]) <= pairs.horizon[:, None]
            ever = counts.any(1)
            whole_run = (right | ~within).all(1) & ever
            loop = np.searchsorted(loops, pairs.loop.numpy())
            cells: Any = coords["intervention"].index(name), v, loop
            for total, x, run in zip(totals, (right & counts, counts), (whole_run, ever)):
                ended = with_end(x.numpy(), pairs.horizon.numpy(), n_delays)
                np.add.at(total, cells, np.column_stack([ended, run.numpy()]))
    axes = list(coords)
    arrays = {name: (axes, x[..., :-1]) for name, x in zip(("right", "n"), totals)}
    runs = {name: (axes[:-1], x[..., -1]) for name, x in zip(("run_right", "run_n"), totals)}
    return xr.Dataset(arrays | runs, coords=coords)


def _outcomes(
    model: LoopedModel | Any,
    finder: _VariablePairs,
    variable: str,
    pairs: InterchangePairs,
    generator: torch.Generator,
) -> Iterator[tuple[str, InterchangePairs, Tensor, Tensor]]:
    """Make all interventions on the pairs of one variable.

    Yields:
        Its name, its pairs, on which the model's answer is right, and which count [pair, delay].
    """
    prediction = finder.predict(variable, pairs)
    effective = _effective(prediction)
    controls = {
        VARIABLE: _Control(pairs, effective),
        RANDOM: _Control(pairs, effective),
        ANOTHER_LOOP: finder.another_loop(variable, prediction),
        SAME_VALUE: finder.same_value(variable, pairs),
    }
    subspace = dict.fromkeys(controls, finder.subspaces.get(variable))
    if other := finder.another_variable(variable, prediction):
        name, controls[ANOTHER_VARIABLE] = other
        subspace[ANOTHER_VARIABLE] = finder.subspaces[name]

    # All interventions go through one run; each only on the pairs on which it counts.
    rows = {name: control.counts.any(1).nonzero().squeeze(1) for name, control in controls.items()}
    rows = {name: row for name, row in rows.items() if len(row)}
    sizes = [len(row) for row in rows.values()]
    joined = join([controls[n].pairs[row] for n, row in rows.items()], "intervention", tuple(rows))
    run = InterchangeRun(model, joined)
    changes = dict(zip(rows, run.difference.split(sizes)))
    for name, change in changes.items():
        if (basis := subspace[name]) is not None:
            changes[name] = project(change, basis)
    changes[RANDOM] = random_change(changes[VARIABLE], generator)
    answers = run.after(run.base_state + torch.cat(list(changes.values()))).cpu()

    clean = run.base[: len(pairs)].cpu()  # the pairs themselves come first, and all count
    claims = prediction.claims(clean)
    decided = pairs.scored[:, None] & (prediction.base != UNKNOWN)
    unchanged = Claims(clean.masked_fill(~decided, SILENT), claims.changes)
    yield NOTHING, pairs, claims.agree(clean), effective
    yield _CLEAN, pairs, ((clean == prediction.base) | ~decided).all(-1), effective
    for (name, row), read in zip(rows.items(), answers.split(sizes)):
        expected = unchanged if name == SAME_VALUE else claims
        yield name, pairs[row], expected[row].agree(read), controls[name].counts[row]


class _Control(NamedTuple):
    pairs: InterchangePairs  # the same bases and positions, perhaps with other sources
    counts: Bool[Tensor, "pair delay"]  # where the program's answer differs from the intervention's


@dataclass(frozen=True, eq=False, repr=False)
class _VariablePairs(ShortRepr):
    """Draws pairs for every variable of a program, and for its controls.

    The source's value changes the program's answer at some delay, so that a model whose answers
    never change is never right.
    """

    program: LoopProgram
    trace: Trace  # of all inputs
    batch: Batch
    n_loops: int
    subspaces: Mapping[str, Tensor]  # of some variables
    per_loop: int
    generator: torch.Generator

    def draw(self, variable: str, loops: Collection[int]) -> InterchangePairs:
        inputs, most = self.batch.inputs, 8 * self.per_loop  # candidates, eight for a pair
        parts = []
        for loop in loops:
            base, source = draw_pairs(len(inputs), most, self.generator)
            values = self.trace.variables[variable][loop]
            # Positions at which the variable has two values, [pair, pos].
            differs = values[base] != values[source]
            if variable not in self.subspaces:
                # The whole state may also hold the token.
                differs &= inputs[base] == inputs[source]
            pair, position = differs.nonzero(as_tuple=True)
            some = torch.randperm(len(pair), generator=self.generator)[:most]
            candidates = InterchangePairs.of(
                self.batch,
                base=base[pair[some]],
                source=source[pair[some]],
                positions=position[some, None],
                loop=torch.full_like(some, loop),
                n_loops=self.n_loops,
            )
            effective = _effective(self.predict(variable, candidates)).int()
            # The last delay at which the answer changes, [pair].
            last = effective.shape[1] - 1 - effective.flip(1).argmax(1)
            rows = effective.any(1).nonzero().squeeze(1)
            chosen = evenly_by_class(last[rows], self.per_loop, self.generator)
            parts.append(candidates[rows[chosen]])
        return join(parts, "loop", tuple(map(str, loops)))

    def predict(self, variable: str, pairs: InterchangePairs) -> Prediction:
        """The program after an interchange of a variable (of all, with the whole state)."""
        names = (variable,) if variable in self.subspaces else None
        return Prediction(self.program, pairs, names=names, trace=self.trace)

    def another_loop(self, variable: str, right: Prediction) -> _Control:
        """The source after the closest loop with another value there."""
        pairs = right.pairs
        # Values of the source at its position after each loop, [loop, pair].
        values = self.trace.variables[variable][:, pairs.source, pairs.positions[:, 0]]
        loops = torch.arange(len(values))[:, None]
        equal = values == values.gather(0, pairs.loop[None])
        # Of two equally near, the later one; where no value differs, the right loop itself.
        distance = 2 * (loops - pairs.loop).abs() + (loops < pairs.loop)
        distance = distance.masked_fill(equal & (loops != pairs.loop), 2 * len(values))
        distance = distance.masked_fill(loops == pairs.loop, 2 * len(values) - 1)
        moved = replace(pairs, source_loop=distance.argmin(0))
        return _Control(moved, _otherwise(right, self.predict(variable, moved)))

    def another_variable(self, variable: str, right: Prediction) -> tuple[str, _Control] | None:
        """The variable with a subspace that differs in most of the pairs."""
        others = [n for n in self.program.variables if n in self.subspaces and n != variable]
        if variable not in self.subspaces or not others:
            return None
        pairs, position = right.pairs, right.pairs.positions[:, 0]

        def differing(name: str) -> int:
            values = self.trace.variables[name]
            base, source = (values[pairs.loop, row, position] for row in (pairs.base, pairs.source))
            return int((base != source).sum())

        other = max(others, key=differing)
        return other, _Control(pairs, _otherwise(right, self.predict(other, pairs)))

    def same_value(self, variable: str, pairs: InterchangePairs) -> _Control:
        """Sources with the base's value, in another context.

        Unless the whole state is put in, another token at the position is preferred.
        """
        all_variables, position = variable not in self.subspaces, pairs.positions[:, 0]
        token = pairs.inputs[:, position].T
        # Inputs with the base's token at the position, [pair, input].
        same_token = token == token.gather(1, pairs.base[:, None])
        fits = same_token.clone() if all_variables else torch.ones_like(same_token)
        for name in self.program.variables if all_variables else (variable,):
            values = self.trace.variables[name][pairs.loop, :, position]  # [pair, input]
            fits &= values == values.gather(1, pairs.base[:, None])
        fits.scatter_(1, pairs.base[:, None], False)
        luck = torch.rand(fits.shape, generator=self.generator, dtype=torch.float32)
        best = (luck + (~same_token).float()).masked_fill(~fits, -1).max(1)
        source = torch.where(best.values < 0, pairs.base, best.indices)
        delays = torch.arange(pairs.longest + 1)
        counts = (source != pairs.base)[:, None] & (delays <= pairs.horizon[:, None])
        return _Control(replace(pairs, source=source, source_loop=pairs.loop), counts)


def _effective(prediction: Prediction) -> Bool[Tensor, "pair delay"]:
    return _differ(prediction.base, prediction.interchanged, prediction.pairs)


def _otherwise(right: Prediction, control: Prediction) -> Bool[Tensor, "pair delay"]:
    """Where the program's answer differs between control and intervention."""
    return _effective(right) & _differ(right.interchanged, control.interchanged, right.pairs)


def _differ(
    first: Int[Tensor, "pair delay pos"],
    second: Int[Tensor, "pair delay pos"],
    pairs: InterchangePairs,
) -> Bool[Tensor, "pair delay"]:
    """Whether two decided answers differ at an asked position before the end."""
    within = torch.arange(first.shape[1]) <= pairs.horizon[:, None]
    # At scored positions, [pair, delay, pos].
    return (decided_difference(first, second) & pairs.scored[:, None]).any(-1) & within
