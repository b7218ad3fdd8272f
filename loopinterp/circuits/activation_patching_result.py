"""What a patching sweep returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from loopinterp.results import Result, tidy

if TYPE_CHECKING:
    import pandas as pd
    import xarray as xr

PRELUDE, BLOCK, CODA = "prelude", "block", "coda"
LOOP = "loop"
"""On the axis of layers: what happens once per loop, and in no layer."""

MEASURES = ("recovered", "effect", "control_recovered", "control_effect")
"""What is measured of every patch."""

STATE = "state"
"""The component that is no hook point: the state after some loops."""

WORDS = {
    "resid_pre": "the residual stream",
    "attn_out": "the output of attention",
    "mlp_out": "the output of the MLP",
    "z": "the output of one head",
    "pattern": "the attention of one head",
    STATE: "the state",
}
"""Components in words, where they have any."""

_PLACE = "head pos"


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class PatchingSweep(Result, kind="activation-patching"):
    """What :func:`~loopinterp.circuits.activation_patching.patching_sweep` returns.

    An axis that the sweep does not go along has length 1: ``head`` (all of them at once) for all
    components that heads have none of their own of, ``pos`` unless positions were patched one by
    one, ``layer`` of the state and of what happens once per loop.
    ``loop`` is the index of a loop; of the state, the number of loops done.

    Arrays:
        recovered: Share of the counted answers that are the source's after the patch.
        effect: The metric after the patch, 0 as in the base's run and 1 as in the source's.
        control_recovered: Control: the same share after the same patch out of a third input.
        control_effect: Control: the metric after that patch.
        prelude_recovered: The same for the layers before the loop, where there are such; they run
            once and have no loop axis. So for the other measures, and for the coda.

    Attributes:
        component: What was patched.
        metric: Name of the metric.
        metric_base: The metric of the base's run.
        metric_source: The metric of the source's run.
        n_examples: Pairs of inputs.
        n_scored: Answers that count: scored, and different in the base's and the source's run.
    """

    VARIABLES: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(MEASURES, f"loop layer {_PLACE}"),
        **{f"{s}_{m}": f"{s}_layer {_PLACE}" for s in (PRELUDE, CODA) for m in MEASURES},
    }
    OPTIONAL: ClassVar[frozenset[str]] = frozenset(VARIABLES) - frozenset(MEASURES)

    component: str
    metric: str
    metric_base: float
    metric_source: float
    n_examples: int
    n_scored: int

    @property
    def words(self) -> str:
        """What was patched, in words."""
        return WORDS.get(self.component, f"`{self.component}`")

    @property
    def by_head(self) -> bool:
        """Whether heads were patched one by one."""
        return self.data["head"].values.tolist() != ["all"]

    @property
    def by_layer(self) -> bool:
        """Whether what was patched is in layers; else it happens once per loop."""
        return self.data["layer"].values.tolist() not in ([LOOP], [STATE])

    def to_dataframe(self, *names: str) -> pd.DataFrame:
        """A row for each patch, with its section; no loop in the prelude and the coda.

        Args:
            names: Arrays wanted, as of any other result; by default all, with their sections.
        """
        import pandas as pd

        if names:
            return super().to_dataframe(*names)
        around = self.around()
        sections = {PRELUDE: around.get(PRELUDE), BLOCK: self.data, CODA: around.get(CODA)}
        frames = []
        for section, measures in sections.items():
            if measures is not None:
                frame = tidy({name: measures[name] for name in MEASURES})
                frames.append(frame.assign(section=section))
        order = ["section", "loop", "layer", "head", "pos", *MEASURES]
        table = pd.concat(frames, ignore_index=True).astype({"loop": "Int64"})
        return table.reindex(columns=order)

    def around(self) -> dict[str, xr.Dataset]:
        """The measures of the layers around the loop, by section: [layer, head, pos] each."""
        return {
            section: self.data[[f"{section}_{name}" for name in MEASURES]].rename(
                {f"{section}_layer": "layer"} | {f"{section}_{name}": name for name in MEASURES}
            )
            for section in (PRELUDE, CODA)
            if f"{section}_{MEASURES[0]}" in self.data
        }
