"""Compiled models: made, saved, read back, and refused."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from loopinterp.compiler import Compiled, compile_program
from loopinterp.core.errors import CheckpointError, InputError
from loopinterp.programs import UNKNOWN, get_program, shift_right, tokens, var
from loopinterp.programs.expressions import MAX_TABLE
from loopinterp.programs.stock_programs import unique_set
from tests.compiler.compiled_properties import same
from tests.compiler.small_models import stock_model
from tests.compiler.small_programs import program

u = var("u")
MINE = program({"u": tokens}, {"u": shift_right(u)}, u, name="mine")


@pytest.mark.parametrize("name", ["ripple", "copy", "unique_set", "multiplication"])
def test_a_model_comes_back_from_its_files_as_it_was(name, tmp_path):
    compiled = stock_model(name)
    compiled.save(tmp_path)
    loaded = Compiled.load(tmp_path)
    assert loaded.program is get_program(name) and same(loaded.circuit, compiled.circuit)
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randint(len(compiled.program.inputs), (20, 7), generator=generator)
    before = compiled.model(inputs, n_loops=5, return_type="all_logits")
    assert torch.equal(loaded.model(inputs, n_loops=5, return_type="all_logits"), before)


def test_a_program_of_ones_own_is_passed_when_its_model_is_read(tmp_path):
    compile_program(MINE, max_length=4).save(tmp_path)
    assert Compiled.load(tmp_path, program=MINE).program is MINE
    with pytest.raises(InputError) as caught:
        Compiled.load(tmp_path)
    assert caught.value.what == "program"


@pytest.mark.parametrize(
    "other",
    [
        get_program("ripple"),
        dataclasses.replace(MINE, inputs=("0", "1")),
        program({"v": tokens}, {"v": shift_right(var("v"))}, name="mine"),
    ],
)
def test_a_model_is_not_read_as_that_of_another_program(other, tmp_path):
    compile_program(MINE, max_length=4).save(tmp_path)
    with pytest.raises(InputError) as caught:
        Compiled.load(tmp_path, program=other)
    assert caught.value.what == "program"


def test_a_model_for_another_alphabet_is_not_that_of_the_registered_program(tmp_path):
    small = unique_set(3)
    compile_program(small, max_length=6).save(tmp_path)
    with pytest.raises(InputError) as caught:
        Compiled.load(tmp_path)
    assert caught.value.what == "program"
    assert Compiled.load(tmp_path, program=small).program is small


@pytest.mark.parametrize(
    "file", ["config.json", "model.safetensors", "circuit.json", "circuit.safetensors"]
)
def test_missing_and_damaged_files_are_refused(file, tmp_path):
    compile_program("parity", max_length=5).save(tmp_path)
    original = (tmp_path / file).read_bytes()
    (tmp_path / file).write_bytes(original[: len(original) // 2])
    with pytest.raises(CheckpointError):
        Compiled.load(tmp_path)
    (tmp_path / file).unlink()
    with pytest.raises(CheckpointError):
        Compiled.load(tmp_path)
    (tmp_path / file).write_bytes(original)
    Compiled.load(tmp_path)


def test_files_of_two_models_do_not_belong_together(tmp_path):
    compile_program("parity", max_length=5).save(tmp_path)
    compile_program("parity", max_length=6).circuit.save(tmp_path)
    with pytest.raises(CheckpointError) as caught:
        Compiled.load(tmp_path)
    assert caught.value.what.startswith("circuit in ")


def test_a_folder_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(InputError):
        compile_program("parity", max_length=5).save(tmp_path / "file" / "folder")


def test_a_model_may_have_more_classes_than_its_answers_and_not_fewer():
    assert compile_program("parity", max_length=5).model.config.d_vocab_out == 3
    assert compile_program("parity", max_length=5, n_outputs=9).model.config.d_vocab_out == 9
    for n_outputs in (2, 0, -1, True):
        with pytest.raises(InputError) as caught:
            compile_program("parity", max_length=5, n_outputs=n_outputs)
        assert caught.value.what == "n_outputs"


@pytest.mark.parametrize("answer", [UNKNOWN - 1, -(2**62), MAX_TABLE, 10**12])
def test_what_is_no_class_is_no_answer(answer):
    with pytest.raises(InputError) as caught:
        compile_program(program({"u": 0}, {"u": u}, answer), max_length=4)
    place, _, expression = caught.value.what.partition(", ")
    assert place.startswith("finish of") and expression == f"full({answer})"


def test_an_answer_that_is_never_decided_is_two_classes_that_are_never_given():
    compiled = compile_program(program({"u": 0}, {"u": u}, UNKNOWN), max_length=4)
    assert compiled.model(torch.tensor([[0, 1]]), n_loops=1).tolist() == [[[0.0, 0.0]] * 2]
