"""Seal runs that an earlier version wrote: ``python tools/seal_runs.py RUN [RUN ...]``.

The weights' file is told which run it is of and which metrics came before it, as training tells it
today; tensors and all other files stay as they are. Only for runs whose files are known to belong
together, as those of the zoo, whose cards hold the digests of weights and configuration.
"""

from __future__ import annotations

import sys
from pathlib import Path

from loopinterp.core.results import config_hash
from loopinterp.core.run_files import LinesDigest, check_lines, read_run_config
from loopinterp.core.storage import read_tensors_and_metadata, write_tensors
from loopinterp.training.run import METRICS, WEIGHTS, complete_lines


def seal(run: Path) -> None:
    """Write the seal into the weights of one run."""
    lines = complete_lines(run / METRICS)
    if mismatch := check_lines(lines, None):
        sys.exit(f"{run / METRICS}: {mismatch.value}")
    texts = LinesDigest(lines).seal(config_hash(read_run_config(run))).texts()
    tensors, about = read_tensors_and_metadata(run / WEIGHTS)
    write_tensors(run / WEIGHTS, tensors, about | texts)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        seal(Path(name))
