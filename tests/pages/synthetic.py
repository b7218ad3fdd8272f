from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pandas as pd
import xarray as xr

from loopinterp.compiler import draw_program
from loopinterp.core.results import (
    Figure,
    Finding,
    Provenance,
    Result,
    Stopwatch,
    config_hash,
    figures_of,
    findings_of,
)
from loopinterp.figures import (
    LinePanel,
    Reference,
    Series,
    bars_with_intervals,
    heatmap_panels,
    line_figure,
    line_panels,
)
from loopinterp.lenses import AttentionResult
from loopinterp.programs import get_program

DEMO = ("generalisation", "convergence", "wavefront", "program")


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class Synthetic(Result, kind="synthetic"):
    """One made-up study; ``section`` says which."""

    section: str


@figures_of.register
def _(result: Synthetic) -> list[Figure]:
    return _FIGURES[result.section]()


@findings_of.register
def _(result: Synthetic) -> list[Finding]:
    return _FINDINGS[result.section]


def made_up(section: str) -> Synthetic:
    """A made-up study of a section."""
    return Synthetic.of(Took(12.3), section=section)


class Took(Stopwatch):
    """A study that took so many seconds."""

    def __init__(self, seconds: float) -> None:
        super().__init__(0, {"model": {"weights_sha256": "5d41402abc4b"}})
        self._seconds = seconds

    def provenance(self) -> Provenance:
        made = {"config_hash": "3f9a01c2b4d5", "version": "0.1.0", "wall_time": self._seconds}
        return replace(super().provenance(), **made)


def _generalisation() -> list[Figure]:
    lengths = [8, 12, 16, 24, 32, 48, 64, 96]
    uniform = np.array([1, 1, 1, 1, 1, 1, 0.997, 0.993])
    chain = np.array([1, 1, 1, 1, 1, 1, 1, 1.0])
    fewer = np.array([0.96, 0.94, 0.9, 0.85, 0.7, 0.52, 0.33, 0.1])
    lines = [
        Series("uniform digits", lengths, uniform, uniform - 0.008, np.ones(8)),
        Series("full carry chains", lengths, chain, chain - 0.01, chain),
        Series("uniform, half the loops", lengths, fewer, fewer - 0.05, fewer + 0.05, control=True),
    ]
    table = pd.DataFrame({"length": lengths, "uniform": uniform, "chain": chain})
    plot = line_figure(
        lines,
        x_title="length (bits)",
        y_title="exact match",
        y_range=(0, 1.03),
        references=[Reference(12, "longest in training", axis="x")],
    )
    return [
        Figure(
            title="Exact match by length",
            plot=plot,
            caption="Share of sums with every bit right. Bands are 95% intervals over examples.",
            control="The dashed line runs half the loops: carries then cannot arrive.",
            data=table,
            section="generalisation",
        )
    ]


def _convergence() -> list[Figure]:
    loops = np.arange(1, 50)
    residual = 0.8 * np.exp(-loops / 6) + 1e-5
    accuracy = 1 / (1 + np.exp(-(loops - 12) / 2))
    stacked = line_panels(
        [
            LinePanel(
                [Series("trained", loops, residual, residual * 0.7, residual * 1.4)],
                "relative residual",
                title="How far a loop still moves the state",
                y_log=True,
                references=[Reference(0.03, "settled below")],
            ),
            LinePanel(
                [
                    Series("trained", loops, accuracy),
                    Series("random weights", loops, 0.01 * np.ones(49), control=True),
                ],
                "exact match",
                title="How many answers are right",
                y_range=(0, 1.03),
            ),
        ],
        x_title="loop",
    )
    positions = np.arange(49)
    distance = np.exp(-np.maximum(loops[None, :] - 0.4 * positions[:, None], 0) / 5)
    heat = heatmap_panels(
        {"": xr.DataArray(distance, {"position": positions, "loop": loops})},
        value_title="distance to limit",
    )
    caption = "Above, the residual of each loop; below, the share of right answers."
    return [
        Figure(
            title="Residual and accuracy",
            plot=stacked,
            caption=caption,
            control="A model with random weights settles too, on wrong answers.",
            data=pd.DataFrame({"loop": loops, "residual": residual, "accuracy": accuracy}),
            section="convergence",
        ),
        Figure(
            title="Distance to the limit, by position",
            plot=heat,
            caption="Each row is a position. It turns dark when the position has settled.",
            data=pd.DataFrame(distance),
            section="convergence",
        ),
        *(_plain(title, loops, residual) for title in ("Contraction rate", "Update angle")),
    ]


def _plain(title: str, loops: np.ndarray, values: np.ndarray) -> Figure:
    return Figure(
        title=title,
        plot=line_figure([Series("trained", loops, values)], x_title="loop", y_title="value"),
        caption="One line.",
        data=pd.DataFrame({"loop": loops, "value": values}),
        section="convergence",
    )


def _wavefront() -> list[Figure]:
    loops, chains = np.arange(13), np.arange(1, 13)
    accuracy = np.where(chains[:, None] <= loops[None, :], 0.995, 0.52)
    front = Series("one position a loop", [1, 12], [1, 12], colour="red", markers=False)
    heat = heatmap_panels(
        {"": xr.DataArray(accuracy, {"chain length": chains, "loop": loops})},
        value_title="probe accuracy",
        value_range=(0.5, 1),
        overlay={"": front},
    )
    at_six = accuracy[5]
    lines = [
        Series("probe", loops, at_six, at_six - 0.02, np.minimum(at_six + 0.02, 1)),
        Series("random labels", loops, np.full(13, 0.51), control=True),
        Series("random weights", loops, np.full(13, 0.55), control=True),
        Series("input embedding", loops, np.full(13, 0.5), control=True),
    ]
    plot = line_figure(lines, x_title="loop", y_title="probe accuracy", y_range=(0.4, 1.03))
    table = pd.DataFrame(accuracy, index=chains, columns=loops).reset_index()
    return [
        Figure(
            title="When each carry becomes readable",
            plot=heat,
            caption="Bright means that a linear probe reads the carry. The line is one a loop.",
            control="Probes on random labels stay at 0.5 everywhere.",
            data=table,
            section="wavefront",
        ),
        Figure(
            title="Chains of six, with every control",
            plot=plot,
            caption="The carry through six positions becomes readable at loop 6.",
            control="Three controls, all near chance.",
            data=table,
            section="wavefront",
        ),
    ]


def _program() -> list[Figure]:
    programs = ["latched ripple", "ripple", "carry-save", "lookahead", "one-shot attention"]
    iia = np.array([0.965, 0.62, 0.41, 0.33, 0.3])
    chance = np.full(5, 0.21)
    bars = bars_with_intervals(
        [
            Series("model's state", programs, iia, iia - 0.03, iia + 0.02),
            Series("random subspace", programs, chance, chance - 0.03, chance + 0.03, control=True),
        ],
        value_title="interchange intervention accuracy",
        value_range=(0, 1),
        references=[Reference(0.9, "bar")],
    )
    loops = np.arange(9)
    axes = {"model loop": loops, "program loop": loops}
    panels = {
        name: xr.DataArray(
            0.5 + 0.5 * np.exp(-np.abs(loops[:, None] - loops[None, :] + k / 2) / 2), axes
        )
        for k, name in enumerate(["latched ripple: c", "latched ripple: known", "ripple: c"])
    }
    matrix = heatmap_panels(panels, value_title="probe accuracy", value_range=(0.5, 1), square=True)
    table = pd.DataFrame({"program": programs, "iia": iia})
    return [
        Figure(
            title="Rival programs",
            plot=bars,
            caption="How often an exchanged state makes the model say what the program would say.",
            control="Hatched: a random subspace of the same rank.",
            data=table,
            section="program",
        ),
        Figure(
            title="Which loop of the program is where in the model",
            plot=matrix,
            caption="A bright diagonal: model and program go at the same pace.",
            data=table,
            section="program",
        ),
        Figure(
            title="The ripple held 2, as a circuit",
            plot=draw_program(get_program("ripple_held_2")),
            caption="Nodes are what is read, selected, computed and put out.",
            data=table,
            section="program",
        ),
    ]


_FIGURES = {
    "second": list,
    "generalisation": _generalisation,
    "convergence": _convergence,
    "wavefront": _wavefront,
    "program": _program,
}

_FINDINGS = {
    "second": [Finding(section="convergence", text="Second thoughts.", value="2")],
    "generalisation": [
        Finding(
            section="generalisation",
            text="99.3% of 96-bit sums are right, twelve times the longest input in training.",
            value="99.3%",
            good=True,
        ),
        Finding(section="generalisation", text="Full carry chains of 96 bits are all right."),
    ],
    "convergence": [
        Finding(
            section="convergence",
            text="The state settles at loop 17 of 25, and the answers are right from then on.",
            value="loop 17",
            good=True,
        )
    ],
    "wavefront": [
        Finding(
            section="wavefront",
            text="A carry travels 1.00 positions a loop: readable at once, at chance before.",
            value="1.00 positions a loop",
            good=True,
        )
    ],
    "program": [
        Finding(
            section="verdict",
            text=(
                "The circuit is the latched ripple: exchanging its state for one loop gives the "
                "program's answer in 96.5% of cases (95% interval 93.5 to 98.5), the plain ripple "
                "in 62%, a random subspace of the same rank in 21%."
            ),
            value="Latched ripple",
            good=True,
        )
    ],
}


def attention(n_loops: int = 14, n_heads: int = 4, n_pos: int = 13) -> AttentionResult:
    """Heads that look at their left neighbour more and more."""
    left = 1 / (1 + np.exp(-(np.arange(n_loops)[:, None] - 4) / 2 - np.linspace(-2, 1, n_heads)))
    patterns = np.zeros((n_loops, 1, n_heads, n_pos, n_pos))
    for position in range(n_pos):
        before = max(position - 1, 0)
        patterns[:, 0, :, position, before] += left
        patterns[:, 0, :, position, position] += 1 - left
    patterns[:, 0, :, -1, 0] = 0.002  # not within a narrow window: the report has the patterns
    mass = np.stack([1 - left, left], -1)[:, None]
    entropy = -(left * np.log2(left) + (1 - left) * np.log2(1 - left))[:, None]
    labels = ["BOS", *("kill" if k % 4 == 1 else "pass" if k % 3 else "make" for k in range(12))]
    axes = {"loop": range(n_loops), "layer": [0], "head": range(n_heads), "distance": [0, 1]}
    no_place = np.full((n_loops, 1, n_heads, n_pos, 3), np.nan)  # under a window of one
    return AttentionResult.of(
        Took(0.8),
        coords=axes,
        patterns=patterns,
        mass=np.stack([mass, np.clip(mass - 0.03, 0, 1), np.clip(mass + 0.03, 0, 1)], -1),
        mass_even=np.tile([0.54, 0.5], (n_heads, 1)),
        received=no_place,
        received_even=no_place[0, 0, :, :, 0],
        entropy=entropy,
        entropy_even=np.full(n_heads, 0.92),
        labels=labels,
        fixed=[label == "BOS" for label in labels],
        example=0,
        n_examples=64,
    )


def write_run(folder: Path, *, sections: tuple[str, ...] = DEMO) -> Path:
    """Write a run folder."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "task": "addition",
        "task_settings": {"format": "pairs"},
        "model": {
            "d_model": 64,
            "n_heads": 4,
            "n_layers": 1,
            "positions": "relative",
            "attention_window": 1,
            "norm": "pre",
            "loop_norm": True,
            "injection": "input",
            "initial_state": "zeros",
        },
        "curriculum": {"kind": "accuracy", "max_n": 12, "threshold": 0.97, "min_steps": 30},
        "optimiser": {"lr": 1e-3, "betas": [0.9, 0.99], "weight_decay": 0.01, "clip": 1.0},
        "seed": 0,
        "steps": 2500,
        "batch_size": 64,
        "ema": 0.999,
        "device": "cpu",
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "metrics.jsonl").write_text("".join(_metric_lines()))
    made = {
        "command": "loopinterp demo --out runs/demo --seed 0",
        "stages": {"train": 81.2, "evaluate": 21.5, "convergence": 14.0, "carry study": 33.1},
        "versions": {"python": "3.11.2", "torch": "2.13.0", "transformer_lens": "4.3.0"},
        "machine": "2 CPU cores",
        "run": config_hash(config),
    }
    (folder / "made.json").write_text(json.dumps(made))
    for section in sections:
        made_up(section).save(folder / "results", section)
    attention().save(folder / "results", "attention")
    return folder


def _metric_lines() -> Iterator[str]:
    generator = np.random.default_rng(0)
    for step in range(0, 2500, 10):
        longest = min(12, 1 + step // 120)
        fresh = (step % 120) / 120 if longest < 12 else min((step - 1320) / 300, 1)
        loss = 0.5 * math.exp(-3 * fresh) * math.exp(-step / 1500) + 0.002 * generator.random()
        row = {"step": step, "loss": loss, "exact_match": math.exp(-1.5 * loss)}
        yield json.dumps(row | {"longest_n": longest, "lr": 1e-3, "grad_norm": 0.5}) + "\n"
