"""What an ablation study returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from loopinterp.results import Result

if TYPE_CHECKING:
    import xarray as xr

MEASURES = ("exact_match", "agreement", "margin")
"""What is measured of every ablation."""

CONTROL, REFERENCE = "control_", "reference_"

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
        control_exact_match: Control: the same, with noise in the part that moves it as far as the
            ablation does, in a random direction. So for the other measures.
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

    def weakest(self, measure: str = "exact_match") -> xr.DataArray:
        """How far a measure is surely below its control, whichever way a part is ablated.

        The lower end of the control less the upper end of the ablation, least over the kinds of
        ablation: above 0, the part is needed for what it carries, and not for being disturbed.
        """
        ablated = self.data[measure].sel(estimate="high", drop=True)
        control = self.data[CONTROL + measure].sel(estimate="low", drop=True)
        return (control - ablated).min("ablation")
