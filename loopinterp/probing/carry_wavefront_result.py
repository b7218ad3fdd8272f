"""What the carry study found, and the numbers that sum it up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from loopinterp.results import Result

if TYPE_CHECKING:
    import xarray as xr

_GRID = "loop chain_length"


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class CarryStudyResult(Result, kind="carry"):
    """Accuracy of probes for the carry into a position, after each number of loops.

    The chain length of a carry is the number of positions it travels, from the bit that decides
    it to the position it enters: one more than the propagating positions it passes. ``loop`` is
    the number of loops run (0: the initial state). A carry that travels one position a loop is
    decodable exactly where chain length <= loops. Chains that run back to bit 0 are left out.

    Half of that picture may be no finding. Where attention has a hard window, the states form a
    light cone: a position cannot depend on what lies further to its left than ``reach`` positions
    a loop, and no probe whatever could read a carry ahead of it. Those cells cannot fail; they are
    the ones where ``in_reach`` is false.

    Arrays:
        accuracy: Probes that each have one loop and one chain length. Where they fail, no linear
            probe trained on more does better.
        in_reach: Whether the deciding bit is within the position's reach by then.
        shared_probe: One probe for each loop, trained on all chain lengths together: whether
            there is one code for all. It has to compromise with carries that have not arrived.
        last_loop_probe: The shared probe of the last loop, applied to all: whether the carry is
            written in the same direction as soon as it arrives.
        short_to_long: Shared probes trained on ``n_short`` bits, scored on ``n``.
        control_task: The same probe on random labels fixed by the last four inputs (control).
        random_model: The same probe on the model with random weights (control).
        embedding: The same probe on the embedding alone (control).
        majority: Always saying the more frequent carry (control).
        variable_accuracy: Balanced accuracy for each variable of the addition.
        variable_random_model: The same on the model with random weights (control).
        variable_embedding: The same on the embedding alone (control).
        code_length: Online code length of the carries of all chain lengths, in bits per carry.
        code_length_control: The same for the random labels (control).
        code_length_random_model: The same for the model with random weights (control).

    Attributes:
        n: Bits of the additions.
        n_short: Bits of the additions of the short-to-long control.
        n_train_pairs: Matched pairs for each chain length that the probes were trained on.
        n_test_pairs: Other pairs for each chain length that they were scored on.
        threshold: Accuracy from which a chain length counts as decodable.
        reach: Positions to its left that one loop can bring something in from; None if there is
            no bound.
        reach_before: Positions that the injected input has reached before the first loop.
    """

    VARIABLES: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("accuracy", "in_reach", "shared_probe", "last_loop_probe"), _GRID),
        **dict.fromkeys(("short_to_long", "control_task", "random_model"), _GRID),
        **dict.fromkeys(("embedding", "majority"), "chain_length"),
        **dict.fromkeys(("variable_accuracy", "variable_random_model"), f"variable {_GRID}"),
        "variable_embedding": "variable chain_length",
        **dict.fromkeys(("code_length", "code_length_control"), "loop"),
        "code_length_random_model": "loop",
    }

    n: int
    n_short: int
    n_train_pairs: int
    n_test_pairs: int
    threshold: float
    reach: int | None
    reach_before: int = 0

    @property
    def speed_limit(self) -> int:
        """Positions a loop of the front that the cells are compared with; 1 without a bound."""
        return self.reach or 1

    @property
    def ahead(self) -> xr.DataArray:
        """Positions that each chain is longer than the front has come, [loop, chain_length]."""
        front = self.speed_limit * self.data["loop"] + self.reach_before
        return (self.data["chain_length"] - front).transpose("loop", "chain_length")

    @property
    def selectivity(self) -> xr.DataArray:
        """Accuracy above that of the same probe on random labels, [loop, chain_length]."""
        return self.data["accuracy"] - self.data["control_task"]

    @property
    def first_loop(self) -> xr.DataArray:
        """First number of loops after which each chain length is decodable; NaN if never."""
        return first_decodable(self.data["accuracy"], self.threshold)

    @property
    def resolved(self) -> float:
        """Least accuracy over all cells that the front has come to."""
        return float(self.data["accuracy"].where(self.ahead <= 0, 1.0).min())

    @property
    def unresolved(self) -> float:
        """Greatest accuracy over all cells with three positions or more still to go."""
        return float(self.data["accuracy"].where(self.ahead > 2, 0.0).max())

    @property
    def speed(self) -> float:
        """Positions the front travels in a loop, by least squares.

        The slope of the first decodable loop on the chain length, inverted; infinite if all
        chain lengths become decodable at once. NaN, and no wavefront, if less than half of the
        chain lengths (or fewer than three) ever are: any model passes on a position or two.
        """
        first = self.first_loop.dropna("chain_length")
        if first.size < max(3, self.data.sizes["chain_length"] / 2):
            return float("nan")
        slope = float(np.polyfit(first["chain_length"].astype(float), first, 1)[0])
        return 1.0 / slope if slope > 1e-9 else float("inf")


def first_decodable(accuracy: xr.DataArray, threshold: float) -> xr.DataArray:
    """First loops at which accuracy [loop, ...] reaches a threshold; NaN where it never does."""
    loops = accuracy["loop"].astype(float)
    return loops.where(accuracy >= threshold).min("loop")
