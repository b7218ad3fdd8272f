"""Findings and figures of training dynamics."""

from __future__ import annotations

import numpy as np

from loopinterp.app.training_dynamics import Milestone, TrainingDynamics
from loopinterp.core.results import Figure, Finding, figures_of, findings_of
from loopinterp.core.text import percent
from loopinterp.figures import Series, heatmap_panels, line_figure

_CLAUSES = {
    Milestone.RIGHT: "exact match up to length {cutoff}",
    Milestone.GENERALISES: "exact match at length {longest}",
    Milestone.CONVERGES: "the share of tokens that converge",
    Milestone.CONVERGES_RIGHT: "the share that converge on the right answer",
    Milestone.READABLE: "the probe of the {variable} at every {distance}",
    Milestone.PROGRAM: "the share of interchanges that program {program} predicts",
}


@findings_of.register
def _(result: TrainingDynamics) -> list[Finding]:
    """A finding for each milestone that was measured, and one for the wavefront."""
    measured = [m for m in Milestone if result.reached(m) is not None]
    return [*(_finding(result, milestone) for milestone in measured), _wavefront(result)]


def _finding(result: TrainingDynamics, milestone: Milestone) -> Finding:
    step, last = result.step_of(milestone), int(result.data["step"][-1])
    if milestone is Milestone.AUTOMATON:
        cells = int(result.data["cells"][-1])
        text = f"The transition table is the final one, with {cells} cells, from step {step} on."
        return Finding(text, value=f"step {step}", label="Final automaton")
    clause = _CLAUSES[milestone].format(
        cutoff=result.cutoff,
        longest=int(result.data["length"][-1]),
        variable=result.variable,
        distance=result.distance,
        program=result.closest_program,
    )
    clause, limit = clause[0].upper() + clause[1:], f"{result.threshold:g}"
    if step is None:
        text = f"{clause} is below {limit} at the last snapshot (step {last})."
        return Finding(text, value="not reached", good=False, label=milestone.value)
    if step == 0:
        text = f"{clause} is {limit} or more at every snapshot, the untrained model's included."
        return Finding(text, value="untrained", label=milestone.value)
    text = f"{clause} is {limit} or more from step {step} on."
    return Finding(text, value=f"step {step}", good=True, label=milestone.value)


def _wavefront(result: TrainingDynamics) -> Finding:
    speed = result.speed
    known = speed[np.isfinite(speed)]
    what = f"the {result.variable} by {result.distance}"
    if not known.size:
        text = f"No snapshot has a wavefront: {what} is readable at no speed that can be measured."
        return Finding(text, value="no wavefront", good=False)
    first, last = int(known["step"][0]), float(speed[-1])
    at_end = f"{last:.2f} per loop" if np.isfinite(last) else "none"
    text = (
        f"A wavefront of {what} is first measured at step {first} "
        f"({float(known[0]):.2f} per loop); at the last snapshot its speed is {at_end}."
    )
    return Finding(text, value=f"step {first}")


@figures_of.register
def _(result: TrainingDynamics) -> list[Figure]:
    data = result.data
    panels = {
        **{f"exact match, length {n}": data["loop_exact_match"].sel(length=n, drop=True)
           for n in data["length"].values.tolist()},
        "converged and right": data["converged_right"],
        f"{result.variable} readable": result.readable,
    }  # fmt: skip
    panels = {title: x.transpose("loop", "step") for title, x in panels.items()}
    untrained = data["converged"].isel(step=0, loop=-1)
    shuffled = data["probe_random"] >= result.threshold
    maps = Figure(
        title="What training brings, by loop",
        plot=heatmap_panels(
            panels, value_title="share", x_title="step of training", scale="mass", columns=2,
            value_range=(0, 1),
        ),
        caption=(
            f"Each column is a snapshot, each row a loop. Readable: share of values of "
            f"{result.distance} at which a linear probe for the {result.variable} is right in "
            f"{percent(result.threshold)} of held-out cases or more."
        ),
        control=(
            f"The first column is the first snapshot (step {int(data['step'][0])}), at which "
            f"{percent(untrained)} of tokens converge. On shuffled weights, "
            f"{percent(shuffled.mean())} of all cells are readable."
        ),
        data=result.to_dataframe("residual", "converged", "converged_right"),
    )  # fmt: skip
    lines = Series.each(data["exact_match"], "length", "exact match, length {}".format)
    last = {"converges": data["converged"], "converges right": data["converged_right"]}
    last["readable"] = result.readable
    lines += [Series.of(name, values.isel(loop=-1)) for name, values in last.items()]
    if (closest := result.closest_program) is not None:
        lines.append(Series.of(closest, data["whole_run"].sel(program=closest)))
    control = shuffled.mean("distance").isel(loop=-1)
    lines.append(Series.of("readable, shuffled weights", control, control=True))
    times = Figure(
        title="When each property appears",
        plot=line_figure(lines, x_title="step of training", y_title="share", y_range=(0, 1.03)),
        caption=(
            "Exact match after T(n) loops, with its 95% interval; shares of tokens and of "
            f"{result.distance} after the last loop; share of effective interchanges that the "
            "closest program predicts at every delay."
        ),
        data=result.to_dataframe("exact_match"),
    )
    return [maps, times]
