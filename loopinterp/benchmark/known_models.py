"""Known-circuit models: compiled programs with inputs, and the benchmark of them in a folder.

The folder's ``benchmark.json`` lists every file with its SHA-256. A model's folder has the files of
:meth:`Compiled.save`, ``pairs.safetensors`` with the inputs that edges are scored on, and
``card.json`` with the program's code.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import torch
from jaxtyping import Float, Int
from pydantic import Field, PositiveInt
from torch import Tensor

from loopinterp.benchmark.circuit_training import TRAINED
from loopinterp.comparison.pair_strategies import check_program_list
from loopinterp.compiler import add_noise, distract, permute, rotate
from loopinterp.compiler.circuit import orthonormal
from loopinterp.compiler.compiled import Compiled, compile_program
from loopinterp.core.boundary import checked
from loopinterp.core.errors import CheckpointError, need, unknown_name
from loopinterp.core.settings import Seed
from loopinterp.core.storage import (
    read_bytes,
    read_json_object,
    read_tensors,
    write_json,
    write_tensors,
)
from loopinterp.core.text import ShortRepr, track
from loopinterp.edges.known_edges import program_edges, wiping_edges
from loopinterp.edges.unrolled_graph import TiedEdge
from loopinterp.models import LoopedTransformer, iterate
from loopinterp.models.protocol import LoopedModel
from loopinterp.programs.language import UNKNOWN
from loopinterp.programs.program import LoopProgram
from loopinterp.programs.stock_programs import get_program, list_programs
from loopinterp.tasks.task import Batch, Task
from loopinterp.tasks.task_registry import get_task

Disguise = Callable[[Compiled], Compiled]
VERSION = 1  # of the benchmark's list of models. Scores of different versions are not comparable
DISGUISES: dict[str, Disguise] = {
    "bare": lambda compiled: compiled,
    "rotated, permuted": lambda c: rotate(permute(c, seed=0), seed=0),
    "distracted, rotated": lambda c: rotate(distract(c, seed=0), seed=0),
    "noisy": partial(add_noise, relative=0.01, seed=0),
}

_BROKEN_BY_NOISE = {
    *("abacus_ripple", "binary_sum", "copy", "multiplication", "one_shot"),
    *("token_addition", "unique_set"),
}
"""Programs without a noisy model: noise adds up over their hundreds of directions."""

_LEFT_OUT = {"regular_language"}  # tasks that are newer than this version of the list
TRAINED_MODELS = Path(__file__).parent / "trained_models"
"""Models of :func:`~loopinterp.benchmark.train_to_circuit`, by program."""

# Longest problems of the tasks with wide programs; 6 for all others
LENGTHS = {"multiplication": 3, "unique_set": 4, "token_addition": 4, "abacus_addition": 4}


@dataclass(frozen=True, eq=False, repr=False)
class KnownModel(ShortRepr):
    """A compiled model to test a tool on, with inputs of one length."""

    compiled: Compiled
    batch: Batch
    n_loops: int  # T(n), the loops of a full run
    label: str = ""  # the disguise, in a word or two

    @property
    def name(self) -> str:
        """The program, and the disguise."""
        program = self.compiled.program.name
        return f"{program}, {self.label}" if self.label else program

    def of_distractors(self, states: Float[Tensor, "*shape d"]) -> Float[Tensor, "*shape d"]:
        """The part of states outside the circuit's directions."""
        written = torch.cat([d.write for d in self.compiled.circuit.directions.values()])
        basis = orthonormal(written).to(states)  # [rank, d_model], of the circuit
        rest = states - (states @ basis.mT) @ basis
        return torch.zeros_like(rest) if len(basis) == states.shape[-1] else rest

    @property
    def without_distractors(self) -> LoopedModel:
        """The model with distractors removed from each state; they converge one loop after the
        program.
        """
        model = self.compiled.model

        def without(h: Tensor) -> Tensor:
            return h - self.of_distractors(h)

        without_them: Any = SimpleNamespace(
            embed=model.embed,
            initial_state=lambda e: without(model.initial_state(e)),
            step=lambda h, e: without(model.step(h, e)),
            readout=model.readout,
        )
        return without_them


@dataclass(frozen=True)
class Score:
    """A tool's score on one model, and its control; NaN where a check does not apply."""

    value: float
    control: float = float("nan")


@checked
def known_models(
    programs: Sequence[str | LoopProgram],
    *,
    n: PositiveInt = 6,
    examples: Annotated[int, Field(ge=8)] = 256,
    disguises: Sequence[Disguise] = (),
    label: str | None = None,
    seed: Seed = 0,
) -> list[KnownModel]:
    """Compile programs, and apply the same disguises to each model, in order.

    Args:
        programs: Loop programs whose task is registered.
        n: Problem length of the inputs; the models are compiled for it.
        disguises: Changes of a model, e.g. ``partial(rotate, seed=0)``.
        label: Name of the disguises in tables; by default a word for each.

    Example:
        >>> [known.name for known in known_models(["ripple", "copy"], n=3, examples=8)]
        ['ripple', 'copy']
    """
    models = []
    for program in check_program_list(programs):
        compiled, (batch,) = compiled_with_inputs(program, [n], examples=examples, seed=seed)
        for disguise in disguises:
            compiled = disguise(compiled)
        names = " ".join(words.split()[0] for words in compiled.circuit.disguises)
        name = names if label is None else label
        models.append(KnownModel(compiled, batch, program.n_loops(n), name))
    return models


def compiled_with_inputs(
    program: LoopProgram, lengths: Sequence[int], *, examples: int, seed: int
) -> tuple[Compiled, list[Batch]]:
    """A program compiled for the last of several problem lengths, and a batch of each length."""
    task = get_task(program.task, **program.task_settings)
    generator = torch.Generator().manual_seed(seed)
    batches = [task.sample(torch.full((examples,), n), generator=generator) for n in lengths]
    return compile_program(program, max_length=batches[-1].inputs.shape[1]), batches


@dataclass(frozen=True, repr=False)
class BenchmarkModel(ShortRepr):
    """One model of the benchmark."""

    program_name: str
    disguise: str  # one of DISGUISES, or TRAINED if its weights were learnt

    @property
    def name(self) -> str:
        """Its name, and that of its folder."""
        return f"{self.program_name}.{self.disguise.replace(', ', '-')}"

    @property
    def program(self) -> LoopProgram:
        """The stock program that it runs."""
        return get_program(self.program_name)

    @property
    def task(self) -> Task:
        """The task of the program."""
        return get_task(self.program.task, **self.program.task_settings)

    @property
    def n(self) -> int:
        """The longest problem of its inputs."""
        return LENGTHS.get(self.program.task, 6)

    @property
    def n_loops(self) -> int:
        """T(n), and at least two loops, so that some edges cross loops."""
        return max(self.program.n_loops(self.n), 2)

    @cached_property
    def compiled(self) -> Compiled:
        """The model with its circuit: compiled now, or trained before."""
        if self.disguise == TRAINED:
            return Compiled.load(TRAINED_MODELS / self.program_name, program=self.program)
        bare = _compiled(self.program, max_length=self.task.n_positions(self.n))
        # A copy, as its user may change weights in place.
        return DISGUISES[self.disguise](replace(bare, model=deepcopy(bare.model)))

    def pairs(self) -> tuple[Int[Tensor, "pair pos"], Int[Tensor, "pair pos"]]:
        """Base and source inputs for edges, of all lengths up to n."""
        generator = torch.Generator().manual_seed(0)
        lengths = torch.randint(min(2, self.n), self.n + 1, (2, 48), generator=generator)
        lengths[:, 0] = self.n  # all inputs are padded to the full length
        base, source = (self.task.sample(n, generator=generator).inputs for n in lengths)
        return base, source


_compiled = lru_cache(maxsize=1)(compile_program)  # the disguises of a program follow one another


def benchmark_models(names: Iterable[str] | None = None) -> list[BenchmarkModel]:
    """The models of the benchmark, or those with these names or programs.

    Example:
        >>> len(benchmark_models()), len({model.task.name for model in benchmark_models()})
        (97, 9)
        >>> benchmark_models(["ripple.noisy"])[0].n_loops
        5
    """
    every = [
        BenchmarkModel(program, disguise)
        for program in list_programs()
        if get_program(program).task not in _LEFT_OUT
        for disguise in DISGUISES
        if disguise != "noisy" or program not in _BROKEN_BY_NOISE
    ]
    every += [BenchmarkModel(folder.name, TRAINED) for folder in sorted(TRAINED_MODELS.iterdir())]
    if names is None:
        return every
    names = [names] if isinstance(names, str) else list(names)
    known = {name for model in every for name in (model.name, model.program_name)}
    for name in names:
        if name not in known:
            raise unknown_name("model of the benchmark", name, known)
    return [model for model in every if {model.name, model.program_name} & {*names}]


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
        same, what = card.get("code") == str(about.program), f"program of {folder}"
        expected = f"the one that was compiled, {about.program_name} as {CARD} has it"
        got = "another one of that name, in this version of loopinterp"
        fix = "Make the benchmark again, or use the version that it was made with."
        need(same, what, expected, got, fix, error=CheckpointError)
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
