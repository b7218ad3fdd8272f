"""The geometry study: in how many directions states lie, where trajectories run, how they end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, cast

import numpy as np
import torch
from pydantic import PositiveFloat, PositiveInt

from loopinterp.core.boundary import checked
from loopinterp.core.intervals import share_of
from loopinterp.core.progress import track
from loopinterp.core.results import Result, study
from loopinterp.core.settings import Seed
from loopinterp.dynamics import runs
from loopinterp.dynamics.geometry_measures import StateSets, principal_axes
from loopinterp.dynamics.inside_loop import layer_limits, no_layers
from loopinterp.dynamics.limits import centre, limits_of_run
from loopinterp.dynamics.measures import correctness, exact_match, likeliest
from loopinterp.dynamics.regimes import (
    ClassifiedLoops,
    SettlingClass,
    classify_regimes,
    classify_settling,
)
from loopinterp.models.iteration import bind

if TYPE_CHECKING:
    import xarray as xr
    from torch import Tensor

    from loopinterp.models.protocol import LoopedModel
    from loopinterp.models.run import HookedRun
    from loopinterp.tasks.task import Batch, Task

EMBEDDING, LIMITS = "embedding", "limits"
"""Sets of states beside those of the loops: the injected input, and the limits found."""


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class GeometryResult(Result, kind="geometry"):
    r"""Dimension of the states, trajectories along principal axes, classes, and layers' limits.

    Loop 0 is the initial state. A set of states is that of all counted tokens of all examples; its
    dimension is that of its spread about the mean, 0 where it is one point, and NaN where it is not
    finite. Sets beside those of the loops are the injected input and the limits found (of cycles
    their mean state). The control is as many Gaussian vectors as the set has states.

    Arrays:
        rank, participation: Effective rank and participation ratio of the states after each loop.
        spread: Root mean square distance from their mean, over the root mean square norm.
        set_rank, set_participation, set_spread: The same of the sets beside them; NaN of no states.
        set_size: States in each; the states of a loop are as many as embeddings.
        control_rank, control_participation: Those of as many Gaussian vectors.
        exact: Whether an example is right if read after a loop.
        right: Of each token after the last loop: 1 right, 0 wrong, -1 not asked.
        regime, settling: :class:`Regime` and :class:`SettlingClass` codes.
        rate, exponent: Those of :class:`SettlingClasses`.
        limit_status: How the search for a limit ended (:class:`Status`).
        path, path_limit: States and limits of the first examples along the principal axes of them
            all; NaN where no limit was found.
        explained: Share of the variance of those states along each axis.
        layer_residual, layer_cosine, layer_distance: Those of :class:`LayerLimits`.
        answer_loops: T(n) of each example.

    Attributes:
        no_layers: Why there is nothing of layers, a :class:`NoLayers` code; "" if there is.
    """

    VARIABLES: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("rank", "participation", "spread"), "loop"),
        **dict.fromkeys(("set_rank", "set_participation", "set_spread", "set_size"), "set"),
        **dict.fromkeys(("control_rank", "control_participation"), "set draw"),
        "exact": "loop batch",
        **dict.fromkeys(
            ("right", "regime", "settling", "rate", "exponent", "counted"), "batch pos"
        ),
        "path": "loop shown pos component",
        "path_limit": "shown pos component",
        "explained": "component",
        **dict.fromkeys(("limit_status", "answer_loops"), "batch"),
        "layer_residual": "loop layer batch",
        **dict.fromkeys(("layer_cosine", "layer_distance"), "layer other batch pos"),
    }
    OPTIONAL: ClassVar[frozenset[str]] = frozenset(n for n in VARIABLES if n.startswith("layer"))

    no_layers: str = ""

    @property
    def n_loops(self) -> int:
        """Loops of the run."""
        return self.data.sizes["loop"] - 1

    def exact_match(self) -> xr.DataArray:
        """Share of examples that are right if read after each loop, [loop, estimate]."""
        return share_of(self.data["exact"], "batch")

    def classes(self) -> xr.DataArray:
        """Counted tokens of each settling class, by whether they are right at the end.

        Axes ``settling`` (in words) and ``answer`` (right, wrong, not asked).
        """
        import xarray as xr

        codes = self.data["settling"].where(self.data["counted"])
        answers = {"right": 1, "wrong": 0, "not asked": -1}
        cells = [
            [int(((codes == kind) & (self.data["right"] == a)).sum()) for a in answers.values()]
            for kind in SettlingClass
        ]
        coords = {"settling": [kind.label for kind in SettlingClass], "answer": [*answers]}
        return xr.DataArray(cells, coords, dims=("settling", "answer"))

    def rests(self) -> xr.DataArray:
        """Examples all of whose counted tokens settle, [batch]."""
        settles = self.data["settling"] == SettlingClass.SETTLING
        return (settles | ~self.data["counted"]).all("pos")

    def of_pairs(self, name: str) -> xr.DataArray:
        """An array of pairs of layers, for each pair once and counted tokens alone, [pair, …]."""
        n_layers = self.data.sizes["layer"]
        first, second = np.triu_indices(n_layers, 1)
        at = [f"{a} and {b}" for a, b in zip(first, second)]
        values = self.data[name].where(self.data["counted"])
        pairs = values.stack(pair=("layer", "other"), create_index=False)
        chosen = pairs.isel(pair=first * n_layers + second).transpose("pair", ...)
        return chosen.drop_vars(("layer", "other"), errors="ignore").assign_coords(pair=at)


@checked
def geometry_study(
    model: LoopedModel,
    data: Batch | Task,
    *,
    n_loops: ClassifiedLoops | None = None,
    n_trajectories: PositiveInt = 4,
    limit_tol: PositiveFloat = 1e-5,
    limit_steps: PositiveInt = 200,
    positions: runs.Counted = "asked",
    n: PositiveInt | None = None,
    batch_size: PositiveInt | None = None,
    seed: Seed = 0,
) -> GeometryResult:
    """Measure the sets of states that examples make up after each loop, and follow a few of them.

    Of all states only their second moments are kept, ``n_loops * d_model**2`` numbers, however
    many examples there are. The state after each layer is followed where the model has hooks and
    its block several layers.

    Args:
        data: Examples with targets, or a task to draw them from.
        n_loops: By default twice the longest T(n), and at least 48, as classes are told from the
            second half.
        n_trajectories: Examples whose trajectories are kept, along principal axes.
        limit_tol, limit_steps: Relative tolerance of a limit, and most steps beyond the run.
        positions: Count the positions where an answer is asked, or all (padding included).

    Source: geometry of the fixed points, arXiv 2604.15259; trajectories, arXiv 2502.05171; cyclic
        fixed points of layers, arXiv 2604.11791.

    Example:
        >>> from loopinterp import load_pretrained
        >>> run = load_pretrained("parity")
        >>> result = geometry_study(run.model(), run.task(), n=4, batch_size=4)
        >>> result.classes().sel(settling="settling").values.tolist()
        [8, 0, 0]
    """
    drawn = {"n": n, "batch_size": batch_size, "seed": seed}
    batch, counted = runs.counted_examples(
        model, data, positions, needs_loops=n_loops is None, of_states=True, **drawn
    )
    n_loops = n_loops or runs.usual_loops(batch, times=2, least=48)
    skipped = no_layers(model)
    settings = {"n_loops": n_loops, "limit_tol": limit_tol, "limit_steps": limit_steps}
    settings |= {"positions": positions, "n_examples": len(batch)}
    with study(seed, **runs.described(model, batch), **settings) as watch, torch.no_grad():
        sets, shown, parts = StateSets(), [], []
        for rows in track(runs.state_chunks(model, batch, n_loops + 1), "geometry"):
            iteration, tokens = bind(model, batch.inputs[rows]), counted[rows]
            states = runs.run_loops(iteration, n_loops)
            limits = limits_of_run(iteration, states, max_loops=limit_steps, tol=limit_tol)
            reached = limits.found  # [batch]
            # Limit points, NaN where none was reached, [batch, pos, d_model]
            middle = centre(iteration, limits).masked_fill(~reached[:, None, None], float("nan"))
            sets.add("loops", states[:, tokens])
            sets.add(EMBEDDING, iteration.e[tokens])
            sets.add(LIMITS, middle[reached][tokens[reached]])
            n_shown = max(0, min(n_trajectories, len(batch)) - rows.start)
            shown.append(torch.cat([states[:, :n_shown], middle[None, :n_shown]]))
            answers = [likeliest(iteration.read(state, loop)) for loop, state in enumerate(states)]
            right = correctness(torch.stack(answers), batch.targets[rows])  # [loop, batch, pos]
            classes = classify_settling(states)
            part = {
                "exact": exact_match(right).bool(),
                "right": right[-1],
                "regime": classify_regimes(states).regime.to(torch.int8),
                "settling": classes.settling.to(torch.int8),
                "rate": classes.rate.float(),
                "exponent": classes.exponent.float(),
                "limit_status": limits.status.to(torch.int8),
            }
            if not skipped:
                hooked = cast("HookedRun", model)
                of_layers = layer_limits(
                    hooked, batch.inputs[rows], n_loops=n_loops, counted=tokens
                )
                # Before the first loop there are no states between layers.
                residual = torch.cat([of_layers.residual[:1], of_layers.residual])
                part |= {"layer_residual": residual, "layer_cosine": of_layers.cosine}
                part["layer_distance"] = of_layers.distance
            parts.append(part)
        generator = torch.Generator().manual_seed(seed)
        return GeometryResult.of(
            watch,
            coords={"loop": range(n_loops + 1), "set": (EMBEDDING, LIMITS)},
            **runs.gather(GeometryResult, parts),
            **sets.measures("loops", (EMBEDDING, LIMITS), generator),
            **_paths(torch.cat(shown, dim=1), counted[:n_trajectories]),
            counted=counted,
            answer_loops=batch.n_loops,
            no_layers=skipped.value if skipped else "",
        )


def _paths(states: Tensor, counted: Tensor) -> dict[str, Tensor]:
    """Trajectories, and their limits (the last of the states), along axes of the finite ones."""
    trajectories = states[:-1]
    through = trajectories.isfinite().all(dim=-1).all(dim=0) & counted  # [shown, pos]
    n_components = min(3, states.shape[-1])
    if not through.any():
        path = states[..., :n_components].float() * float("nan")
        explained = torch.full((n_components,), float("nan"), dtype=torch.float32)
    else:
        axes = principal_axes(trajectories[:, through], n_components)
        path, explained = axes.project(states).float(), axes.explained.float()
    path = path.masked_fill(~(through[..., None]), float("nan"))  # [loop, shown, pos, component]
    return {"path": path[:-1], "path_limit": path[-1], "explained": explained}
