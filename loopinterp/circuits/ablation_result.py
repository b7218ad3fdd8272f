"""What an ablation study returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, ClassVar, Literal

from loopinterp.results import Result

if TYPE_CHECKING:
    import pandas as pd
    import xarray as xr

MEASURES = ("exact_match", "agreement", "margin")
"""What is measured of every ablation."""

CONTROL, REFERENCE = "control_", "reference_"

Need = Literal["needed", "idle", "unclear"]
NEEDED, IDLE, UNCLEAR = "needed", "idle", "unclear"

Role = Literal["information", "constant", "needed", "idle", "unclear"]

LINE = 0.01
"""A part is needed if its ablation surely changes the answers of this share of the examples."""

_AXES = "part ablation when pos estimate"


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class AblationStudy(Result, kind="ablation"):
    """What :func:`~loopinterp.circuits.component_ablation.ablation_study` returns.

    The axis ``part`` names heads as ``head LAYER.HEAD``; ``ablation`` is zero, mean or resample;
    ``when`` says at which loops ("all loops", "loop 2", "from loop 2", "up to loop 2"); ``pos`` has
    length 1 unless positions were ablated one by one. Intervals are over examples.

    Arrays:
        exact_match: Share of examples with all asked answers right, with the part ablated.
        agreement: Share of examples whose asked answers are all those of the undisturbed run.
        margin: Logit of the right answer less the largest other, mean over what is asked.
        control_exact_match: The same, with noise in the part that moves it as far as the ablation
            does, in a random direction. So for the other measures.
        reference_exact_match: The same of the undisturbed run. So for the other measures.

    Attributes:
        spans: First and last loop of each entry of ``when``.
        mean_over: What means are over: "position", "token" or "all".
        n_examples: Examples.
    """

    VARIABLES: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(MEASURES, _AXES),
        **{CONTROL + name: _AXES for name in MEASURES},
        **{REFERENCE + name: "estimate" for name in MEASURES},
    }

    spans: list[list[int]]
    mean_over: str
    n_examples: int

    def reference(self, measure: str = "exact_match") -> xr.DataArray:
        """A measure of the undisturbed run, as an estimate."""
        return self.data[REFERENCE + measure]

    def judged(self) -> pd.DataFrame:
        """Whether each part is needed, by each kind of ablation, at the most loops.

        With c the share of examples whose answers change (1 - agreement), at the position where
        it is most, and its 95% interval:

        - ``needed`` where the interval's low end reaches :data:`LINE`;
        - ``idle`` where no answer of any example changes;
        - ``unclear`` between: some answers change, too few to be sure of that share.

        Noise of equal norm decides nothing here: where a model bears no change of that size it
        does as much harm as the ablation, also in a part that all depends on. What it adds is
        ``specific``: whether it surely changes fewer answers than the ablation, so that it is the
        direction that counts and not the size.

        Returns:
            A row a part and kind: ``part``, ``ablation``, ``changed``, ``low``, ``high``,
            ``noise`` (the share that noise changes), ``need``, ``specific``.

        Source: drops of performance as necessity, and the off-distribution states that zero and
            mean ablation make: arXiv 2309.16042, arXiv 2404.15255.
        """
        import pandas as pd

        at = self.data.sel(when=self.widest)
        rows = []
        for part, kind in product(at["part"].values, at["ablation"].values):
            cell = at.sel(part=part, ablation=kind)
            cell = cell.isel(pos=int(cell["agreement"].sel(estimate="value").values.argmin()))
            kept, low, high = cell["agreement"].values
            noise, least, _ = cell[CONTROL + "agreement"].values
            rows.append({
                "part": str(part), "ablation": str(kind),
                "changed": 1 - kept, "low": 1 - high, "high": 1 - low, "noise": 1 - noise,
                "need": IDLE if kept == 1 else NEEDED if 1 - high >= LINE else UNCLEAR,
                "specific": bool(high < least),
            })  # fmt: skip
        return pd.DataFrame(rows)

    def roles(self) -> dict[str, Role]:
        """What each part is needed for, by all kinds of ablation together.

        - ``information``: needed where its activation is another example's (or, without
          ``resample``, the mean): the answers depend on what it says of the input. Another
          example's is a value that the part has there in some run, so that the drop is no matter
          of size;
        - ``constant``: idle there and needed by another kind: only what is the same in all
          examples counts;
        - ``idle``: no kind changes any answer;
        - ``unclear``: anything else.
        """
        table = self.judged().pivot(index="part", columns="ablation", values="need")
        decisive = next(kind for kind in ("resample", "mean", "zero") if kind in table)
        roles: dict[str, Role] = {}
        for part in map(str, self.data["part"].values):
            needs = table.loc[part]
            if needs[decisive] == NEEDED:
                roles[part] = "information" if decisive != "zero" else "needed"
            elif (needs == IDLE).all():
                roles[part] = "idle"
            elif needs[decisive] == IDLE and (needs == NEEDED).any():
                roles[part] = "constant"
            else:
                roles[part] = "unclear"
        return roles

    @property
    def widest(self) -> str:
        """The choice of most loops, as ``when`` names it."""
        lengths = [last - first for first, last in self.spans]
        return str(self.data["when"].values[lengths.index(max(lengths))])
