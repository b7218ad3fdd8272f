"""The benchmark as a folder: the same each time it is made, and what was changed is not read."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from loopinterp.benchmark import (
    Benchmark,
    BenchmarkModel,
    KnownCircuit,
    benchmark_models,
    make_benchmark,
)
from loopinterp.benchmark.known_models import _BROKEN_BY_NOISE, _LEFT_OUT, LIST, VERSION, agreement
from loopinterp.core.errors import CheckpointError, InputError
from loopinterp.edges import program_edges
from loopinterp.models import LoopedTransformer, iterate
from loopinterp.programs import get_program, list_programs

SOME = ["prefix_xor", "carry_save.bare"]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_benchmark(tmp_path_factory.mktemp("made") / "benchmark", SOME).folder


@pytest.fixture
def shipped(made: Path, tmp_path: Path) -> Benchmark:
    return Benchmark(Path(shutil.copytree(made, tmp_path / "benchmark")))


def test_there_are_sixty_models_of_eight_tasks_at_least() -> None:
    models = benchmark_models()
    assert len({model.name for model in models}) == len(models) >= 60
    assert len({model.task.name for model in models}) >= 8
    assert {model.program_name for model in models} == {
        name for name in list_programs() if get_program(name).task not in _LEFT_OUT
    }


def test_made_twice_it_is_the_same(shipped: Benchmark, tmp_path: Path) -> None:
    again = make_benchmark(tmp_path / "again", SOME)
    assert again.digest == shipped.digest
    assert again.files == shipped.files
    digests = {digest for files in shipped.files.values() for digest in files.values()}
    assert len(digests) > len(shipped)
    assert Benchmark(shipped.folder, digest=shipped.digest).files == shipped.files


def test_a_model_read_back_runs_its_program(shipped: Benchmark) -> None:
    for name in shipped:
        known = shipped[name]
        n_loops = known.about.n_loops
        assert agreement(known.compiled, known.base, n_loops) == known.card["agreement"] == 1
        *_, (_, state) = iterate(known.compiled.model, known.source, n_loops)
        answers = known.compiled.model.readout(state).argmax(-1)
        program_outputs = known.compiled.program.trace(known.source, n_loops).outputs[-1]
        assert (program_outputs >= 0).any()
        assert torch.equal(answers[program_outputs >= 0], program_outputs[program_outputs >= 0])


def test_the_card_says_what_the_circuit_is(shipped: Benchmark) -> None:
    known = shipped["carry_save.bare"]
    assert {(s, r, lag) for s, r, lag in known.card["edges"]} == program_edges(known.compiled)
    assert known.card["variables"] == {"sum": [0, 1], "carry": [0, 1]}
    assert known.card["n_loops"] == known.exercise.n_loops == known.about.program.n_loops(6)
    weights = LoopedTransformer.from_pretrained(shipped.folder / "carry_save.bare").parameters()
    assert known.card["weights"] == sum(p.numel() for p in weights)


def test_what_a_tool_is_given_does_not_know_the_circuit(shipped: Benchmark) -> None:
    exercise = shipped["prefix_xor.bare"].exercise
    assert not hasattr(exercise, "compiled")
    assert not hasattr(exercise, "card")


def test_all_of_a_program_and_one_model_can_be_made_by_themselves(shipped: Benchmark) -> None:
    disguises = ("bare", "rotated-permuted", "distracted-rotated", "noisy", "trained")
    assert {*shipped} == {"carry_save.bare", *(f"prefix_xor.{disguise}" for disguise in disguises)}
    more = make_benchmark(shipped.folder, ["parity.bare"])
    assert set(more) == {*shipped, "parity.bare"}
    assert all(isinstance(more[name], KnownCircuit) for name in more)


@pytest.mark.parametrize("file", ["model.safetensors", "card.json", "circuit.json", "config.json"])
def test_a_changed_file_is_refused(shipped: Benchmark, file: str) -> None:
    path = shipped.folder / "prefix_xor.noisy" / file
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(bytes(data))
    with pytest.raises(CheckpointError) as caught:
        shipped["prefix_xor.noisy"]
    assert caught.value.what.endswith(file)
    assert shipped["prefix_xor.bare"].about.disguise == "bare"  # the others are as they were


def test_a_missing_file_is_named(shipped: Benchmark) -> None:
    (shipped.folder / "prefix_xor.noisy" / "pairs.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"pairs\.safetensors"):
        shipped["prefix_xor.noisy"]


def test_a_changed_list_is_refused_where_its_digest_is_known(shipped: Benchmark) -> None:
    path = shipped.folder / "benchmark.json"
    saved = json.loads(path.read_text())
    saved["models"]["prefix_xor.bare"]["card.json"] = 64 * "0"
    path.write_text(json.dumps(saved))
    assert Benchmark(shipped.folder).digest != shipped.digest
    with pytest.raises(CheckpointError, match=shipped.digest[:12]):
        Benchmark(shipped.folder, digest=shipped.digest)


def test_a_program_that_reads_otherwise_now_is_refused(
    shipped: Benchmark, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BenchmarkModel, "program", property(lambda _: get_program("copy")))
    with pytest.raises(CheckpointError) as caught:
        shipped["prefix_xor.bare"]
    assert caught.value.what.startswith("program of ")


@pytest.mark.parametrize("version", [None, 0, "1"])
def test_another_version_is_refused(shipped: Benchmark, version: object) -> None:
    path = shipped.folder / "benchmark.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "version": version}))
    with pytest.raises(CheckpointError) as caught:
        Benchmark(shipped.folder)
    assert caught.value.what.startswith("benchmark ")


def test_a_folder_with_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("all of it")
    with pytest.raises(InputError) as caught:
        make_benchmark(tmp_path, SOME)
    assert caught.value.what == "folder"
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_unknown_models_are_named(shipped: Benchmark) -> None:
    with pytest.raises(InputError) as caught:
        make_benchmark(shipped.folder, ["prefix_xro"])
    assert caught.value.given == "'prefix_xro'"
    with pytest.raises(InputError) as caught:
        shipped["parity.bare"]
    assert caught.value.given == "'parity.bare'"
    with pytest.raises(CheckpointError):
        Benchmark(shipped.folder / "nowhere")


def test_a_model_that_is_changed_in_place_changes_no_other() -> None:
    one, other = (BenchmarkModel("prefix_xor", "bare") for _ in range(2))
    with torch.no_grad():
        one.compiled.model.unembedding.weight.zero_()
    assert other.compiled.model.unembedding.weight.any()


@pytest.mark.slow
def test_every_model_does_what_its_program_says_and_those_left_out_do_not() -> None:
    # Bare and permuted ones do it exactly, for every program: tests/compiler has them.
    for about in benchmark_models():
        if about.disguise in ("bare", "rotated, permuted"):
            continue
        assert agreement(about.compiled, about.pairs()[0], about.n_loops) == 1, about.name
    for program in _BROKEN_BY_NOISE:
        noisy = BenchmarkModel(program, "noisy")
        assert agreement(noisy.compiled, noisy.pairs()[0], noisy.n_loops) < 1, noisy.name


@pytest.mark.parametrize(
    "models",
    [
        {"parity.bare": None},
        {"parity.bare": []},
        {"parity.bare": {"card.json": 3}},
        {"parity.bare": {"card.json": "x" * 64, "pairs.safetensors": "0" * 64}},
        {"../other": {"card.json": "0" * 64, "pairs.safetensors": "0" * 64}},
        {"parity.bare": {"card.json": "0" * 64, "pairs.safetensors": "0" * 64, "../x": "0" * 64}},
        {"parity.bare": {"card.json": "0" * 64}},
    ],
)
def test_an_odd_entry_of_the_list_is_refused(models: object, tmp_path: Path) -> None:
    (tmp_path / LIST).write_text(json.dumps({"version": VERSION, "models": models}))
    with pytest.raises(CheckpointError):
        Benchmark(tmp_path)
