"""What the carry study found, and the numbers that sum it up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from loopinterp.results import Figure, Finding, Result

_GRID = ("loop", "chain_length")


@dataclass(frozen=True, kw_only=True)
class CarryStudyResult(Result):
    """Accuracy of probes for the carry into a position, after each number of loops.

    The chain length of a carry is the number of positions it travels, from the bit that decides
    it to the position it enters: one more than the propagating positions it passes. ``loop`` is
    the number of loops run (0: the initial state). A carry that travels one position a loop is
    decodable exactly where chain length <= loops. Chains that run back to bit 0 are left out.

    Attributes:
        loops: Numbers of loops run.
        chain_lengths: Chain lengths.
        variables: Names along the axis ``variable``.
        n: Bits of the additions.
        n_short: Bits of the additions of the short-to-long control.
        n_train_pairs: Matched pairs for each chain length that the probes were trained on.
        n_test_pairs: Other pairs for each chain length that they were scored on.
        threshold: Accuracy from which a chain length counts as decodable.
        accuracy: Probes that each have one loop and one chain length. Where they fail, no linear
            probe trained on more does better.
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
    """

    AXES: ClassVar[dict[str, tuple[str, ...]]] = {
        "accuracy": _GRID,
        "shared_probe": _GRID,
        "last_loop_probe": _GRID,
        "short_to_long": _GRID,
        "control_task": _GRID,
        "random_model": _GRID,
        "embedding": ("chain_length",),
        "majority": ("chain_length",),
        "variable_accuracy": ("variable", *_GRID),
        "variable_random_model": ("variable", *_GRID),
        "variable_embedding": ("variable", "chain_length"),
        "code_length": ("loop",),
        "code_length_control": ("loop",),
        "code_length_random_model": ("loop",),
    }

    loops: list[int]
    chain_lengths: list[int]
    variables: list[str]
    n: int
    n_short: int
    n_train_pairs: int
    n_test_pairs: int
    threshold: float
    accuracy: np.ndarray
    shared_probe: np.ndarray
    last_loop_probe: np.ndarray
    short_to_long: np.ndarray
    control_task: np.ndarray
    random_model: np.ndarray
    embedding: np.ndarray
    majority: np.ndarray
    variable_accuracy: np.ndarray
    variable_random_model: np.ndarray
    variable_embedding: np.ndarray
    code_length: np.ndarray
    code_length_control: np.ndarray
    code_length_random_model: np.ndarray

    @property
    def selectivity(self) -> np.ndarray:
        """Accuracy above that of the same probe on random labels, [loop, chain_length]."""
        return self.accuracy - self.control_task

    @property
    def first_loop(self) -> np.ndarray:
        """First number of loops after which each chain length is decodable; NaN if never."""
        return first_decodable(self.accuracy, self.loops, self.threshold)

    @property
    def resolved(self) -> float:
        """Least accuracy over all cells where the chain length is at most the loops run."""
        chain, loop = np.asarray(self.chain_lengths), np.asarray(self.loops)[:, None]
        return float(self.accuracy[chain <= loop].min(initial=1.0))

    @property
    def unresolved(self) -> float:
        """Greatest accuracy over all cells where the chain is longer than the loops plus 2."""
        chain, loop = np.asarray(self.chain_lengths), np.asarray(self.loops)[:, None]
        return float(self.accuracy[chain > loop + 2].max(initial=0.0))

    @property
    def speed(self) -> float:
        """Positions the front travels in a loop, by least squares.

        The slope of the first decodable loop on the chain length, inverted; infinite if all
        chain lengths become decodable at once. NaN, and no wavefront, if less than half of the
        chain lengths (or fewer than three) ever are: any model passes on a position or two.
        """
        first, chain = self.first_loop, np.asarray(self.chain_lengths, dtype=float)
        known = np.isfinite(first)
        if known.sum() < max(3, len(chain) / 2):
            return float("nan")
        slope = float(np.polyfit(chain[known], first[known], 1)[0])
        return 1.0 / slope if slope > 1e-9 else float("inf")

    def summary(self) -> list[Finding]:
        good = self.resolved >= 0.98 and self.unresolved <= 0.60
        if not np.isfinite(self.speed):
            n_known, n_all = int(np.isfinite(self.first_loop).sum()), len(self.chain_lengths)
            text = (
                f"No wavefront of the carry: a linear probe reads {n_known} of {n_all} chain "
                f"lengths (best accuracy {self.accuracy.max():.2f}), and not one after the other."
            )
            return [Finding(kind="wavefront", text=text, value="no wavefront", good=False)]
        text = (
            f"The carry travels {self.speed:.2f} positions in a loop: a linear probe reads it with "
            f"an accuracy of {self.resolved:.2f} at worst once as many loops have run as it has "
            f"positions to travel, and of {self.unresolved:.2f} at best (chance is 0.50) where it "
            "has three positions or more still to go."
        )
        value = f"{self.speed:.2f} positions / loop"
        return [Finding(kind="wavefront", text=text, value=value, good=good)]

    def figures(self) -> list[Figure]:
        from loopinterp.probing.figures import carry_figures

        return carry_figures(self)


def first_decodable(accuracy: np.ndarray, loops: list[int], threshold: float) -> np.ndarray:
    """First loops at which accuracy [loop, ...] reaches a threshold; NaN where it never does."""
    reached = accuracy >= threshold
    first = np.asarray(loops, dtype=float)[reached.argmax(0)]
    return np.where(reached.any(0), first, np.nan)
