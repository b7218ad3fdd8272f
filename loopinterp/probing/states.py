"""Reading the states of any looped model at chosen places."""

from __future__ import annotations

from loopinterp.models.iteration import check_increasing as check_loops
from loopinterp.models.iteration import states_at
from loopinterp.models.model_description import describe_model, device_of

__all__ = ["check_loops", "describe_model", "device_of", "states_at"]
