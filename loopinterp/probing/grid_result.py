"""What a probe study found: accuracies, each with its controls."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from loopinterp.results import Figure, Finding, Result

_GRID = ("loop", "site", "group", "target")


@dataclass(frozen=True, kw_only=True)
class ProbeResult(Result):
    """Held-out accuracy of probes by loop, site, position group and target, with controls.

    Attributes:
        loops: Indices of the loops.
        sites: Activations within a loop.
        groups: Names of the position groups.
        targets: Names of the targets.
        n_train: Places each group was trained on.
        n_test: Other places it was scored on.
        accuracy: Accuracy of the probes.
        control_task: The same probes on random labels fixed by the local input (control).
        random_model: The same probes on the model with random weights (control).
        embedding: The same probes on the embedding alone (control; by loop only if the target
            differs from loop to loop).
        majority: Always saying the most frequent class (control).
        code_length: Online code length in bits per label, or None where it was not asked for.
    """

    AXES: ClassVar[dict[str, tuple[str, ...]]] = {
        "accuracy": _GRID,
        "control_task": _GRID,
        "random_model": _GRID,
        "embedding": ("loop", "group", "target"),
        "majority": ("loop", "group", "target"),
        "code_length": _GRID,
    }

    loops: list[int]
    sites: list[str]
    groups: list[str]
    targets: list[str]
    n_train: list[int]
    n_test: list[int]
    accuracy: np.ndarray
    control_task: np.ndarray
    random_model: np.ndarray
    embedding: np.ndarray
    majority: np.ndarray
    code_length: np.ndarray | None

    @property
    def selectivity(self) -> np.ndarray:
        """Accuracy above that of the same probe on random labels, [loop, site, group, target]."""
        return self.accuracy - self.control_task

    @property
    def chance(self) -> np.ndarray:
        """The best control of each cell but the random labels, [loop, site, group, target]."""
        rivals = [self.random_model, self.embedding[:, None], self.majority[:, None]]
        return np.maximum.reduce([np.broadcast_to(r, self.accuracy.shape) for r in rivals])

    def summary(self) -> list[Finding]:
        gain = (self.accuracy - self.chance).max((0, 1, 2))
        best = int(gain.argmax())
        text = (
            f"Of {len(self.targets)} probed variables, {self.targets[best]!r} gains most over the "
            f"best control: {gain[best]:.2f} in accuracy."
        )
        return [Finding(kind="wavefront", text=text, value=self.targets[best])]

    def figures(self) -> list[Figure]:
        from loopinterp.probing.figures import grid_figures

        return grid_figures(self)
