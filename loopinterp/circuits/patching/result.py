"""What a patching sweep returns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from loopinterp.circuits.sections import BLOCK, CODA, PRELUDE, after
from loopinterp.results import Figure, Finding, Result, percent

if TYPE_CHECKING:
    import pandas as pd

MEASURES = ("recovered", "effect", "control_recovered", "control_effect")
"""What is measured of every patch."""

WORDS = {
    "resid_pre": "the residual stream",
    "attn_out": "the output of attention",
    "mlp_out": "the output of the MLP",
    "z": "the output of one head",
    "state": "the state",
}
"""The components that can be patched, in words."""

_AXES = ("loop", "layer", "head", "pos")


@dataclass(frozen=True, kw_only=True)
class PatchingSweep(Result):
    """What :func:`~loopinterp.circuits.patching_sweep` returns.

    An axis that the sweep does not go along has length 1: ``head`` (all of them at once) for all
    components but ``z``, ``pos`` unless positions were patched one by one, ``layer`` of the state.

    Attributes:
        recovered: Share of the counted answers that are the source's after the patch.
        effect: The metric after the patch, 0 as in the base's run and 1 as in the source's.
        control_recovered: Control: the same share after the same patch out of a third input.
        control_effect: Control: the metric after that patch.
        prelude: The four measures in that order, for the layers before the loop, where there are
            such; they run once and have no loop axis.
        coda: The same for the layers after the loop.
        component: What was patched.
        metric: Name of the metric.
        metric_base: The metric of the base's run.
        metric_source: The metric of the source's run.
        loops: Index of each loop; of the state, the number of loops done.
        layers: Layer inside the block.
        heads: Index of each head, or "all".
        positions: Position of each patch; or "all", or "chosen" (one of each example).
        n_examples: Pairs of inputs.
        n_scored: Answers that count: scored, and different in the base's and the source's run.
    """

    AXES: ClassVar[dict[str, tuple[str, ...]]] = {
        **dict.fromkeys(MEASURES, _AXES),
        PRELUDE: ("measure", *_AXES[1:]),
        CODA: ("measure", *_AXES[1:]),
    }
    measures: ClassVar[tuple[str, ...]] = MEASURES

    recovered: np.ndarray
    effect: np.ndarray
    control_recovered: np.ndarray
    control_effect: np.ndarray
    prelude: np.ndarray | None
    coda: np.ndarray | None
    component: str
    metric: str
    metric_base: float
    metric_source: float
    loops: list[int]
    layers: list[Any]
    heads: list[Any]
    positions: list[Any]
    n_examples: int
    n_scored: int

    def axis_values(self, axis: str, size: int) -> list[Any]:
        return super().axis_values("position" if axis == "pos" else axis, size)

    def to_frame(self) -> pd.DataFrame:
        """A row for each patch, with its section; no loop in the prelude and the coda."""
        import pandas as pd

        index = pd.MultiIndex.from_product(
            [self.loops, self.layers, self.heads, self.positions], names=_AXES
        )
        columns = {name: getattr(self, name).reshape(-1) for name in MEASURES}
        frames = [pd.DataFrame(columns, index=index).reset_index().assign(section=BLOCK)]
        for section, values in self.around().items():
            layers = list(range(values.shape[1]))
            index = pd.MultiIndex.from_product(
                [layers, self.heads, self.positions], names=_AXES[1:]
            )
            columns = dict(zip(MEASURES, values.reshape(len(MEASURES), -1)))
            frame = pd.DataFrame(columns, index=index).reset_index()
            frames.append(frame.assign(section=section, loop=pd.NA))
        order = {PRELUDE: 0, BLOCK: 1, CODA: 2}
        frames.sort(key=lambda frame: order[frame["section"].iloc[0]])
        table = pd.concat([f.astype({"loop": "Int64"}) for f in frames], ignore_index=True)
        return table.reindex(columns=["section", *_AXES, *MEASURES])

    def around(self) -> dict[str, np.ndarray]:
        """The layers around the loop, by section: [measure, layer, head, pos]."""
        both = {PRELUDE: self.prelude, CODA: self.coda}
        return {section: values for section, values in both.items() if values is not None}

    def figures(self) -> list[Figure]:
        from loopinterp.circuits.patching.figures import patching_figures

        return patching_figures(self)

    def summary(self) -> list[Finding]:
        """The patch that carries most over, against its control."""
        table = self.to_frame()
        gain = (table["recovered"] - table["control_recovered"]).to_numpy()
        best = table.to_dict("records")[int(gain.argmax())]
        value = percent(best["recovered"])
        text = (
            f"With {WORDS[self.component]} {self._place(best)} taken from another input, {value} "
            "of the answers that differ become that input's; taken from an unrelated input, "
            f"{percent(best['control_recovered'])} do."
        )
        return [Finding(kind="program", text=text, value=value)]

    def _place(self, row: dict[Any, Any]) -> str:
        """Where a row of the table was patched, in words."""
        if self.component == "state":
            where = after(row["loop"])
        elif row["section"] == BLOCK:
            where = f"in loop {row['loop']}, layer {row['layer']}"
        else:
            where = f"in layer {row['layer']} of the {row['section']}"
        if len(self.heads) > 1:
            where += f", head {row['head']}"
        at = {"all": " at all positions", "chosen": " at one position"}
        return where + at.get(row["pos"], f" at position {row['pos']}")
