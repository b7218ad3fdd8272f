"""Addition at a hundred times the training length: three seeds, random numbers and full chains.

    python -m analyses.long_addition
    python -m analyses.long_addition --length 192 --samples 200

The models of the zoo that are the recipe ``addition`` with seeds 0, 1 and 2; trained on at most 12
bits. Each evaluation is a process of its own, so that its time and its peak memory are its own.
What is found goes to ``analyses/results/long_addition.csv`` (and, with ``python -m
analyses.reproductions``, into the documentation); what is there already is not measured again.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pandas as pd
import torch

import loopinterp
from analyses.tables_in_pages import RESULTS
from loopinterp.training import evaluate

FILE = "long_addition.csv"
MODELS = {0: "addition", 1: "addition-seed-1", 2: "addition-seed-2"}
DIGITS = ("uniform", "chain")
KEY = ["seed", "digits", "length", "samples"]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--length", type=int, default=1200)
    parser.add_argument("--samples", type=int, default=64, help="Of each kind of digits.")
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args()
    args.results.mkdir(parents=True, exist_ok=True)
    file = args.results / FILE
    rows = pd.read_csv(file).to_dict("records") if file.exists() else []
    done = {tuple(row[name] for name in KEY) for row in rows}
    for seed, name in MODELS.items():
        for digits in DIGITS:
            cell = (seed, digits, args.length, args.samples)
            if cell in done:
                continue
            alone = multiprocessing.get_context("spawn")
            with ProcessPoolExecutor(1, mp_context=alone) as process:
                found = process.submit(measured, name, *cell[1:]).result()
            rows.append(dict(zip(KEY, cell)) | found)
            pd.DataFrame(rows).sort_values(KEY).to_csv(file, index=False, float_format="%.4g")
            print(rows[-1], flush=True)


def measured(name: str, digits: str, length: int, samples: int) -> dict[str, Any]:
    """Exact match, minutes of one core, the process's peak memory in MB, and of which weights."""
    torch.set_num_threads(1)
    run = loopinterp.zoo.pretrained_run(name)
    started = time.process_time()
    options: dict[str, Any] = {"distributions": [digits], "n_samples": samples}
    found = evaluate(run.model(), run.task, [length], **options)
    exact = found.data["exact_match"].sel(estimate="value", extra_loop=0)
    return {
        "exact_match": float(exact.squeeze()),
        "minutes": (time.process_time() - started) / 60,
        "megabytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "weights": found.provenance.weights[0][:12],
    }


if __name__ == "__main__":
    main()
