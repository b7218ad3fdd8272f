from __future__ import annotations

import json
from dataclasses import FrozenInstanceError, dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

import loopinterp
from loopinterp import results
from loopinterp.errors import CheckpointError, InputError
from loopinterp.results import Provenance, Result, config_hash, load_result, percent, study


@dataclass(frozen=True, kw_only=True)
class Sample(Result):
    AXES: ClassVar[dict[str, tuple[str, ...]]] = {
        "accuracy": ("loop", "length"),
        "control": ("loop", "length"),
        "residual": ("loop",),
    }

    accuracy: np.ndarray
    control: np.ndarray | None
    residual: np.ndarray
    lengths: list[int]
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Other(Result):
    pass


@pytest.fixture(autouse=True)
def _samples_pass_for_results_of_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    for cls in (Sample, Other):
        monkeypatch.setattr(cls, "__module__", "loopinterp.results")
        monkeypatch.setattr(results, cls.__name__, cls, raising=False)


def sample(**changes: object) -> Sample:
    with study(3, model={"d_model": 8}) as watch:
        fields: dict[str, object] = {
            "accuracy": np.arange(6.0).reshape(2, 3),
            "control": np.zeros((2, 3)),
            "residual": np.array([0.5, 0.25]),
            "lengths": [8, 16, 32],
            "note": "×",
        } | changes
        return Sample(provenance=watch.provenance(), **fields)  # pyright: ignore


def test_a_result_comes_back_from_disk_whole(tmp_path: Path) -> None:
    saved = sample()
    path = saved.save(tmp_path, "first")
    assert path == tmp_path / "first.json"
    back = load_result(path)
    assert isinstance(back, Sample)
    assert back.provenance == saved.provenance
    assert (back.lengths, back.note) == (saved.lengths, saved.note)
    for name in Sample.AXES:
        np.testing.assert_array_equal(getattr(back, name), getattr(saved, name))


def test_the_name_on_disk_is_the_class_name_by_default(tmp_path: Path) -> None:
    assert sample().save(tmp_path).name == "Sample.json"


def test_an_optional_array_may_be_absent(tmp_path: Path) -> None:
    back = Sample.load(sample(control=None).save(tmp_path))
    assert back.control is None
    assert "control" not in back.to_frame()


def test_provenance_says_seed_config_version_and_time() -> None:
    provenance = sample().provenance
    assert provenance.seed == 3
    assert provenance.config == {"model": {"d_model": 8}}
    assert provenance.config_hash == config_hash({"model": {"d_model": 8}})
    assert provenance.version == loopinterp.__version__
    assert provenance.wall_time >= 0


def test_the_config_hash_depends_on_content_alone() -> None:
    assert config_hash({"a": 1, "b": {"c": 2, "d": 3}}) == config_hash(
        {"b": {"d": 3, "c": 2}, "a": 1}
    )
    assert config_hash({"a": 1}) != config_hash({"a": 2})


def test_results_are_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        sample().note = "changed"  # pyright: ignore[reportAttributeAccessIssue]


def test_an_array_with_a_dimension_too_few_is_refused() -> None:
    with pytest.raises(InputError, match=r"Sample.accuracy: expected axes .*shape \(6,\)"):
        sample(accuracy=np.arange(6.0))


def test_the_table_has_a_row_for_each_cell_and_a_column_for_each_axis() -> None:
    frame = sample().to_frame()
    assert list(frame.columns) == ["loop", "length", "accuracy", "control"]
    assert len(frame) == 6
    row = frame[(frame.loop == 1) & (frame.length == 32)].iloc[0]
    assert (row.accuracy, row.control) == (5.0, 0.0)


def test_a_result_without_arrays_has_an_empty_table(tmp_path: Path) -> None:
    other = Other(provenance=Provenance(seed=0))
    assert other.to_frame().empty
    assert (other.figures(), other.summary()) == ([], [])
    assert isinstance(load_result(other.save(tmp_path)), Other)


def test_loading_through_the_wrong_class_names_the_right_one(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"Load it with Sample\.load"):
        Other.load(sample().save(tmp_path))


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("os:system", "a result class of loopinterp"),
        ("loopinterp.results:Gone", "of this version"),
        ("loopinterp.gone:Sample", "of this version"),
        ("loopinterp.errors:InputError", "of this version"),
        ("loopinterp.results:load_result", "of this version"),
    ],
)
def test_only_result_classes_of_the_package_are_loaded(
    tmp_path: Path, address: str, message: str
) -> None:
    path = sample().save(tmp_path)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"class": address}))
    with pytest.raises(CheckpointError, match=message):
        load_result(path)


@pytest.mark.parametrize("content", ["[]", "3", '{"class": "loopinterp.results:Sample"}'])
def test_json_that_is_no_result_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "x.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"a file written by Result\.save"):
        load_result(tmp_path / "x.json")


def test_fields_of_another_version_are_refused(tmp_path: Path) -> None:
    path = sample().save(tmp_path)
    document = json.loads(path.read_text())
    document["scalars"]["new_field"] = 1
    path.write_text(json.dumps(document))
    with pytest.raises(CheckpointError, match="the fields of Sample in this version"):
        load_result(path)


def test_arrays_of_another_result_are_refused(tmp_path: Path) -> None:
    path = sample().save(tmp_path, "a")
    wider = {"accuracy": np.zeros((2, 4)), "control": None, "lengths": [1, 2, 3, 4]}
    sample(**wider).save(tmp_path, "b")
    (tmp_path / "b.safetensors").rename(tmp_path / "a.safetensors")
    with pytest.raises(CheckpointError, match="do not belong together"):
        load_result(path)


def test_a_missing_arrays_file_is_named(tmp_path: Path) -> None:
    path = sample().save(tmp_path)
    (tmp_path / "Sample.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"Sample\.safetensors.*No such file"):
        load_result(path)


def test_no_share_below_all_is_said_to_be_all() -> None:
    shares = (1, 0.9999, 0.99, 0.994, 0.42, 0.01, 0.0001, 0)
    said = ["100%", "99.9%", "99%", "99.4%", "42%", "1%", "0.1%", "0%"]
    assert [percent(share) for share in shares] == said
