"""Reading any saved result: the kinds of result there are, where each is defined, whose it is."""

from __future__ import annotations

import importlib
import json
import os
import reprlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loopinterp.errors import CheckpointError
from loopinterp.results import SUFFIX, Result, config_hash, kind_of, known_kinds
from loopinterp.run_seal import Mismatch, Seal
from loopinterp.storage import digest_tensors, read_json_object, read_tensors_and_metadata

if TYPE_CHECKING:
    from loopinterp.results import Provenance

CONFIG = "config.json"
"""The file that makes a folder a run."""

KINDS = {
    "ablation": "loopinterp.circuits.ablation_result",
    "activation-patching": "loopinterp.circuits.activation_patching_result",
    "attention": "loopinterp.lenses.attention_by_loop",
    "attention-stabilisation": "loopinterp.dynamics.attention_stabilisation",
    "basins": "loopinterp.dynamics.basins",
    "carry": "loopinterp.probing.carry_wavefront",
    "convergence": "loopinterp.dynamics.convergence",
    "decodability": "loopinterp.circuits.variable_decodability",
    "decompilation": "loopinterp.circuits.decompiler.decompilation_study",
    "edges": "loopinterp.circuits.edges.edge_study_result",
    "evaluation": "loopinterp.training.evaluation",
    "exits": "loopinterp.lenses.exits_by_loop",
    "exploration": "loopinterp.explorer.exploration",
    "extrapolation": "loopinterp.dynamics.extrapolation",
    "false-names": "loopinterp.benchmark.false_names",
    "geometry": "loopinterp.dynamics.geometry",
    "ground-truth": "loopinterp.benchmark.ground_truth_study",
    "head-match": "loopinterp.circuits.head_matching",
    "input-dependence": "loopinterp.dynamics.input_dependence",
    "lens": "loopinterp.lenses.lens_by_loop",
    "local-stability": "loopinterp.dynamics.local_stability",
    "noise-robustness": "loopinterp.benchmark.noise_robustness",
    "operand-grid": "loopinterp.training.grid_by_operands",
    "planted-carry": "loopinterp.circuits.planted_carry",
    "probes": "loopinterp.probing.probe_grid",
    "program-comparison": "loopinterp.circuits.program_comparison",
    "reachability": "loopinterp.dynamics.reachability",
    "reduction": "loopinterp.circuits.reduced_model",
    "seed-summary": "loopinterp.training.seed_summary",
    "subspace-search": "loopinterp.circuits.subspace_search",
    "sweep": "loopinterp.training.sweep_result",
    "variable-interchange": "loopinterp.circuits.variable_interchange",
}
"""Each kind of result of the package -> the module that defines it."""


def load_result(path: str | Path) -> Result:
    """Read any saved result; nothing is unpickled, and no name in the file is imported.

    Raises:
        CheckpointError: If the file is missing or damaged, or of a kind that is not known here.
    """
    kind = kind_of(path)
    if kind not in known_kinds() and kind in KINDS:
        importlib.import_module(KINDS[kind])
    cls = known_kinds().get(kind)
    if cls is None:
        raise CheckpointError(
            f"result {path}",
            expected=f"one of the kinds {', '.join(sorted({*KINDS, *known_kinds()}))}",
            given=f"the kind {reprlib.repr(kind)}",
            fix="Run the study again with this version, or import the package that defines it.",
        )
    return cls.load(path)


def result_files(folder: str | Path) -> Iterator[Path]:
    """The saved results in a folder, in alphabetical order; none where there is no folder.

    Raises:
        CheckpointError: If it is no folder, or one that may not be read.
    """
    folder = Path(folder)
    try:
        names = sorted(name for name in os.listdir(folder) if name.endswith(SUFFIX))
    except FileNotFoundError:
        names = []
    except OSError as error:
        raise CheckpointError(
            f"results {folder}",
            expected="a folder that can be read",
            given=error.strerror or str(error),
            fix="Check what it is, and its permissions.",
        ) from error
    return (folder / name for name in names)


def read_run_config(folder: str | Path) -> dict[str, Any]:
    """What the ``config.json`` of a run holds.

    Raises:
        CheckpointError: If the folder holds no run, or the file is damaged or spells half a
            character, which no page and no table can hold.
    """
    path = Path(folder) / CONFIG
    if not os.path.isfile(path):  # which takes any name
        raise CheckpointError(
            f"run {folder}",
            expected="a folder written by `loopinterp train`, `compile` or `demo`",
            given=f"a folder without {CONFIG}" if os.path.isdir(folder) else "no such folder",
            fix=f"Check the path, or train: loopinterp train --task addition --out {folder}",
        )
    config = read_json_object(path)
    try:
        json.dumps(config, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise CheckpointError(
            f"file {path}",
            expected="text of whole characters",
            given=f"half of one ({error.object[error.start]!a})",
            fix="Restore it from a copy.",
        ) from error
    return config


@dataclass(frozen=True, kw_only=True)
class Owner:
    """The run that results are saved in, as it is now.

    Attributes:
        config: :func:`~loopinterp.results.config_hash` of its ``config.json``.
        weights: SHA-256 of its model's weights; "" where it has none.
        seal: What its model's weights say of the run that they are of; None where they say
            nothing, as those that an earlier version wrote.
    """

    config: str
    weights: str = ""
    seal: Seal | None = field(default=None, compare=False)

    @classmethod
    def of_run(cls, folder: str | Path) -> Owner:
        """Read it from the files of a run.

        Raises:
            CheckpointError: If a file is damaged, or there is no configuration.
        """
        config = config_hash(read_run_config(folder))
        weights = Path(folder) / "model" / "model.safetensors"
        if not weights.exists():
            return cls(config=config)
        tensors, texts = read_tensors_and_metadata(weights)
        return cls(config=config, weights=digest_tensors(tensors), seal=Seal.of_texts(texts))

    @property
    def mismatch(self) -> Mismatch | None:
        """Why the weights are not, or may not be, those of the configuration; None if they are."""
        if not self.weights:
            return None
        if self.seal is None:
            return Mismatch.UNSEALED
        return Mismatch.OTHER_RUN if self.seal.run != self.config else None

    def disowns(self, provenance: Provenance) -> Mismatch | None:
        """Why a result is not this run's; None if it is.

        Example:
            >>> from loopinterp.results import Provenance
            >>> owner = Owner(config="f00d", weights="cafe")
            >>> owner.disowns(Provenance(seed=0, config={"model": {"weights_sha256": "cafe"}}))
            >>> owner.disowns(Provenance(seed=0, config={"model": {"weights_sha256": "beef"}}))
            <Mismatch.OTHER_WEIGHTS: 'other weights'>
        """
        if provenance.run not in ("", self.config):
            return Mismatch.OTHER_RUN
        if not (provenance.run or provenance.weights):
            return Mismatch.UNKNOWN_MODEL
        if provenance.weights and self.weights and self.weights not in provenance.weights:
            return Mismatch.OTHER_WEIGHTS
        return None

    def disowns_note(self, note: Mapping[str, Any]) -> Mismatch | None:
        """Why a note of ``made.json`` with ``run`` and ``weights`` is not this run's.

        Returns:
            None if it is.
        """
        run, weights = note.get("run"), note.get("weights")
        if run is None or weights is None:
            return Mismatch.UNSEALED
        if run != self.config:
            return Mismatch.OTHER_RUN
        return Mismatch.OTHER_WEIGHTS if weights != self.weights else None
