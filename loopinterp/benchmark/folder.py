"""The benchmark as a folder of safetensors and JSON files with digests.

``benchmark.json`` lists every file with its SHA-256. A model's folder has the files of
:meth:`Compiled.save`, ``pairs.safetensors`` with the inputs that edges are scored on, and
``card.json`` with the program's code.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from loopinterp.benchmark.circuit_training import TRAINED
from loopinterp.benchmark.known_models import VERSION, BenchmarkModel, benchmark_models
from loopinterp.compiler.compiled import Compiled
from loopinterp.core.errors import CheckpointError, need, unknown_name
from loopinterp.core.progress import track
from loopinterp.core.storage import (
    read_bytes,
    read_json_object,
    read_tensors,
    write_json,
    write_tensors,
)
from loopinterp.core.text import ShortRepr
from loopinterp.edges.known_edges import program_edges, wiping_edges
from loopinterp.edges.unrolled_graph import TiedEdge
from loopinterp.models import LoopedTransformer, iterate
from loopinterp.programs.language import UNKNOWN
from loopinterp.tasks.task import Task

LIST, CARD, PAIRS = "benchmark.json", "card.json", "pairs.safetensors"


@dataclass(frozen=True, eq=False, repr=False)
class Exercise(ShortRepr):
    """The input of a tool: a model with task and inputs, without its circuit."""

    model: LoopedTransformer
    task: Task
    n: int  # the longest problem of its inputs
    n_loops: int  # of a full run
    base: Tensor  # inputs [pair, pos], of all lengths up to n
    source: Tensor  # the others of each pair


@dataclass(frozen=True, eq=False, repr=False)
class KnownCircuit(ShortRepr):
    """A model read from a benchmark's folder."""

    about: BenchmarkModel
    compiled: Compiled
    base: Tensor  # inputs [pair, pos] that edges are scored on
    source: Tensor  # the others of each pair
    card: Mapping[str, Any]  # the contents of card.json

    def true_edges(self) -> set[TiedEdge]:
        """The edges of the circuit.

        Raises:
            InputError: If the model was trained; then only its variables are known.
        """
        got = f"{self.about.name}, a trained one of unknown edges"
        fix = "Score its variables or its program."
        need(self.about.disguise != TRAINED, "known", "a compiled model", got, fix)
        return program_edges(self.compiled)

    @property
    def exercise(self) -> Exercise:
        """The input of a tool."""
        about, model = self.about, self.compiled.model
        return Exercise(model, about.task, about.n, about.n_loops, self.base, self.source)


class Benchmark(ShortRepr):
    """A folder that :func:`make_benchmark` wrote.

    Args:
        digest: Expected :attr:`digest`, if known from elsewhere.

    Attributes:
        files: Model -> file -> SHA-256.

    Raises:
        CheckpointError: If there is no such folder, or its version or digest differs.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     benchmark = make_benchmark(folder, ["prefix_xor.bare"])
        ...     list(benchmark), benchmark["prefix_xor.bare"].compiled
        (['prefix_xor.bare'], <Compiled prefix_xor: d_model 15, layers 0 + 1 + 0>)
    """

    def __init__(self, folder: str | Path, *, digest: str | None = None) -> None:
        self.folder = Path(folder)
        path = self.folder / LIST
        saved = read_json_object(path)
        version, listed = saved.get("version"), saved.get("models")
        if (
            version != VERSION
            or not isinstance(listed, dict)
            or not all(_is_entry(name, files) for name, files in listed.items())
        ):
            what = f"benchmark {path}"
            expected = f"version {VERSION}: for each model its files, each with its SHA-256"
            got = f"version {version!r}, or a list of another make"
            fix = "Make it again with `loopinterp benchmark`."
            raise CheckpointError(what, expected=expected, given=got, fix=fix)
        self.files: dict[str, dict[str, str]] = listed
        if digest not in (None, self.digest):
            raise _changed(path, str(digest), self.digest)

    def __repr__(self) -> str:
        return f"<Benchmark: version {VERSION}, {len(self)} models, {self.digest[:12]}>"

    def __len__(self) -> int:
        return len(self.files)

    def __iter__(self) -> Iterator[str]:
        return iter(self.files)

    @property
    def digest(self) -> str:
        """SHA-256 of the list of files and digests."""
        listed = json.dumps([VERSION, self.files], sort_keys=True)
        return hashlib.sha256(listed.encode()).hexdigest()

    def __getitem__(self, name: str) -> KnownCircuit:
        """A model, after a check of every file's digest.

        Raises:
            CheckpointError: If a file is missing or changed, or the program has changed.
        """
        if name not in self.files:
            raise unknown_name("model of the benchmark", name, self.files)
        folder = self.folder / name
        for file, expected in self.files[name].items():
            digest = hashlib.sha256(read_bytes(folder / file)).hexdigest()
            if digest != expected:
                raise _changed(folder / file, expected, digest)
        (about,), card = benchmark_models([name]), read_json_object(folder / CARD)
        if card.get("code") != str(about.program):
            what = f"program of {folder}"
            expected = f"the one that was compiled, {about.program_name} as {CARD} has it"
            got = "another one of that name, in this version of loopinterp"
            fix = "Make the benchmark again, or use the version that it was made with."
            raise CheckpointError(what, expected=expected, given=got, fix=fix)
        pairs = read_tensors(folder / PAIRS)
        compiled = Compiled.load(folder, program=about.program)
        return KnownCircuit(about, compiled, pairs["base"], pairs["source"], card)


def _is_entry(name: str, files: object) -> bool:
    if not isinstance(files, dict):
        return False
    names = [name, *files]
    # A name may not lead out of the folder.
    plain = all(part not in ("", ".", "..") and not re.search(r"[/\\\0]", part) for part in names)
    digests = (isinstance(x, str) and re.fullmatch("[0-9a-f]{64}", x) for x in files.values())
    return plain and {CARD, PAIRS} <= files.keys() and all(digests)


def make_benchmark(folder: str | Path, names: Iterable[str] | None = None) -> Benchmark:
    """Make the models of the benchmark, and write them to a folder.

    Existing models are made again; others stay. The same machine gives the same digests. ``names``
    are those of :func:`benchmark_models`.
    """
    folder = Path(folder)
    entries = {model.name for model in benchmark_models()} | {LIST}
    usable = not folder.exists() or (
        folder.is_dir() and {p.name for p in folder.iterdir()} <= entries
    )
    expected, got = "a new folder, or one with a benchmark", f"{folder}, which holds something else"
    need(usable, "folder", expected, got, "Choose another name.")
    files = Benchmark(folder).files if (folder / LIST).exists() else {}
    for model in track(benchmark_models(names), "models"):
        place, compiled, (base, source) = folder / model.name, model.compiled, model.pairs()
        program, config = model.program, compiled.model.config
        compiled.save(place)
        write_tensors(place / PAIRS, {"base": base.contiguous(), "source": source.contiguous()})
        card = {
            "name": model.name,
            "program": model.program_name,
            "code": str(program),
            "task": program.task,
            "task_settings": dict(program.task_settings),
            "disguise": model.disguise,
            "n": model.n,
            "n_loops": model.n_loops,
            "variables": {v: list(f.values) for v, f in compiled.circuit.variables.items()},
            "heads": {h.id: h.selector for h in compiled.circuit.heads},
            "edges": sorted(map(list, program_edges(compiled))),
            "edges_of_wiping": sorted(map(list, wiping_edges(compiled))),
            "agreement": agreement(compiled, base, model.n_loops),
            "d_model": config.d_model,
            "layers": [config.n_prelude, config.n_layers, config.n_coda],
            "weights": sum(p.numel() for p in compiled.model.parameters()),
        }
        write_json(place / CARD, card)
        files[model.name] = {
            path.name: hashlib.sha256(path.read_bytes()).hexdigest()
            for path in sorted(place.iterdir())
        }
    # Written last, so that an incomplete folder is not a benchmark.
    write_json(folder / LIST, {"version": VERSION, "models": files})
    return Benchmark(folder)


def agreement(compiled: Compiled, inputs: Tensor, n_loops: int) -> float:
    model, outputs = compiled.model, compiled.program.trace(inputs, n_loops).outputs
    read = [model.readout(h).argmax(-1) for _, h in iterate(model, inputs, n_loops)]
    right = torch.stack(read[-len(outputs) :]) == outputs
    return float(right[outputs != UNKNOWN].double().mean())


def _changed(path: Path, expected: str, digest: str) -> CheckpointError:
    what, expected = str(path), f"the file that was made, sha256 {expected[:12]}…"
    got, fix = f"sha256 {digest[:12]}…", "The file was changed since: make the benchmark again."
    return CheckpointError(what, expected=expected, given=got, fix=fix)
