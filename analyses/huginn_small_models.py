"""The models of ``train_huginn_small.py``, examples to measure them on, and the files of rows."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn

from analyses.huginn_small_tables import NAME
from analyses.small_language_models import ALPHABET, LENGTH, TASK, held_out_windows, read_texts
from analyses.tables_in_pages import replaced
from analyses.train_huginn_small import build, trained
from loopinterp.adapters import adapt, keep_outputs
from loopinterp.probing import with_random_weights
from loopinterp.tasks import Batch

LOOPS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""After which most studies look."""
SHUFFLES = 3
"""Draws of shuffled weights."""


@dataclass(frozen=True)
class Known:
    """Trained models of one part and seed, and the examples to measure them on."""

    part: str
    seed: int
    models: Mapping[str, nn.Module]
    texts: tuple[Tensor, Tensor] | None = None

    @property
    def who(self) -> dict[str, Any]:
        return {"part": self.part, "seed": self.seed}

    @property
    def looped(self) -> Any:
        return adapt(self.models["looped"])

    def untrained(self) -> nn.Module:
        return of_task(self.part, build(self.part, self.seed).eval())

    def examples(self, n: int) -> Batch:
        """Held-out windows; or questions of each p at all positions, as many of each."""
        if self.texts is not None:
            return held_out_windows(self.texts[1], n)
        hops = torch.arange(n) % TASK.most_hops + 1
        return TASK.with_hops(TASK.sample(LENGTH, batch_size=n, seed=10**7), hops)

    def controls(self) -> dict[str, list[Any]]:
        """The looped model, some with its weights shuffled, and an untrained one."""
        return {
            "looped": [self.looped],
            "shuffled": [with_random_weights(self.looped, seed=k) for k in range(SHUFFLES)],
            "untrained": [adapt(self.untrained())],
        }


def of_task(part: str, model: nn.Module) -> nn.Module:
    """A model with the classes of its task."""
    if part == "hops":
        keep_outputs(model, TASK.d_vocab_out)
    return model


def token_kinds(part: str, inputs: Tensor) -> np.ndarray:
    """The kind of each token, [batch, pos]."""
    ids = inputs.numpy()
    if part == "hops":  # all tokens of a question with that p
        return np.broadcast_to(np.char.mod("p = %d", ids[:, :1] - TASK.n_symbols + 1), ids.shape)
    letters = [*ALPHABET, "~"]
    names = ["newline" if x == "\n" else "space" if x == " " else "letter" if x.isalpha()
             else "punctuation" for x in letters]  # fmt: skip
    return np.array(names)[ids]


def columns(estimate: np.ndarray) -> dict[str, float]:
    return dict(zip(("value", "low", "high"), map(float, estimate)))


def everything(
    out: Path, texts: Path | None, seeds: Sequence[int], parts: Sequence[str] = ("hops", "text")
) -> Iterator[Known]:
    """All trained models of a folder, by part and seed; those of text if there are texts."""
    for part in parts:
        for seed in seeds:
            models = {name: of_task(part, model) for name, model in trained(out, part, seed)}
            if "looped" not in models or (part == "text" and texts is None):
                continue
            read = read_texts(texts) if part == "text" and texts is not None else None
            yield Known(part, seed, models, read)


def measure_models(
    study: Callable[[Known, int], pd.DataFrame], file: Path, n: int, models: Iterable[Known]
) -> None:
    """Put what a study finds in each model into its file."""
    for known in models:
        with torch.no_grad():
            write(study(known, n), file)


def rows_of(
    study: Callable[[Known, int], pd.DataFrame],
    args: argparse.Namespace,
    parts: Sequence[str] = ("hops", "text"),
) -> pd.DataFrame:
    """The file of a paper's script, measured anew unless its saved rows are asked for."""
    file = args.results / NAME.format(study.__name__)
    if not args.saved:
        models = [*everything(args.weights, args.texts, args.seed, parts)]
        if not models:
            raise FileNotFoundError(
                f"{args.weights}: no weights; see train_huginn_small, or --saved"
            )
        measure_models(study, file, args.samples, models)
    return pd.read_csv(file)


def write(rows: pd.DataFrame, file: Path) -> None:
    """Put the rows of one part and seed into a file, in place of those that it had."""
    key = ["part", "seed"]
    found = replaced(file, rows, key).sort_values(by=key, kind="stable")
    found.to_csv(file, index=False, float_format="%.6g")
