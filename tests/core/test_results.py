from __future__ import annotations

import dataclasses
import errno
import importlib
import inspect
import json
import math
import os
import re
import reprlib
import textwrap
from collections.abc import Mapping
from dataclasses import FrozenInstanceError, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

import loopinterp
from loopinterp.core import results
from loopinterp.core.errors import CheckpointError, InputError
from loopinterp.core.results import (
    Figure,
    Finding,
    Provenance,
    Result,
    config_hash,
    figures_of,
    findings_of,
    load_result,
    registered_kinds,
    result_files,
    study,
    tidy,
)
from loopinterp.core.storage import read_arrays, write_arrays
from loopinterp.core.text import percent
from tests.warm_python import WarmPython

KINDS = registered_kinds()
CORE = {
    "convergence",
    "extrapolation",
    "attention-stabilisation",
    "attention",
    "carry",
    "probes",
    "evaluation",
    "decodability",
    "head-match",
    "activation-patching",
}
"""Kinds that no other package needs to be there for."""


@dataclass(frozen=True)
class Part:
    name: str
    sizes: list[int]


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class Sample(Result, kind="a-sample"):
    VARIABLES: ClassVar[Mapping[str, str]] = {
        "accuracy": "loop length estimate",
        "control": "loop length",
        "right": "loop",
    }
    OPTIONAL: ClassVar[frozenset[str]] = frozenset({"control"})

    note: str = ""
    parts: list[Part] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class Bare(Result, kind="bare"):
    pass


def sample(**changes: Any) -> Sample:
    value = np.arange(6.0).reshape(2, 3)
    arrays = {
        "accuracy": np.stack([value, value - 1, value + 1], -1),
        "control": np.zeros((2, 3)),
        "right": np.array([True, False]),
        "note": "×",
        "parts": [Part("a", [1, 2])],
        "coords": {"loop": [0, 4], "length": [8, 16, 32]},
    }
    with study(3, model={"d_model": 8}) as watch:
        return Sample.of(watch, **(arrays | changes))


def test_every_kind_brings_its_figures_or_findings(warm_python: WarmPython) -> None:
    """In a process of its own, in which nothing but the results has imported their modules."""
    code = """
        import importlib
        from loopinterp.core import results
        for kind, entry in results.registered_kinds().items():
            importlib.import_module(entry.module)
            result = results.Result._kinds[kind]
            results._import_figures(result)
            drawn = (results.figures_of, results.findings_of)
            if all(f.dispatch(result) is f.dispatch(object) for f in drawn):
                print(kind)
    """
    done = warm_python.run("-c", textwrap.dedent(code))
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


def test_a_result_comes_back_from_disk_whole(tmp_path: Path) -> None:
    saved = sample()
    path = saved.save(tmp_path, "first")
    assert path == tmp_path / "first.safetensors" and [*tmp_path.iterdir()] == [path]
    back = load_result(path)
    assert isinstance(back, Sample)
    assert back.data.identical(saved.data)
    assert (back.provenance, back.note, back.parts) == (saved.provenance, saved.note, saved.parts)


def test_the_name_on_disk_is_the_kind_by_default(tmp_path: Path) -> None:
    path = sample().save(tmp_path)
    assert path.name == "a-sample.safetensors"
    sample().save(tmp_path, "another")
    assert [p.stem for p in result_files(tmp_path)] == ["a-sample", "another"]


def test_tensors_are_taken_as_arrays() -> None:
    result = sample(control=torch.ones(2, 3, requires_grad=False), right=torch.tensor([1, 0]))
    assert result.data["control"].values.tolist() == [[1.0] * 3] * 2


def test_a_cell_is_asked_for_by_name() -> None:
    cell = sample().data["accuracy"].sel(loop=4, length=32)
    assert cell.sel(estimate=["value", "low", "high"]).values.tolist() == [5, 4, 6]


def test_an_optional_array_may_be_absent(tmp_path: Path) -> None:
    back = Sample.load(sample(control=None).save(tmp_path))
    assert "control" not in back.data
    with pytest.raises(AssertionError, match="right"):
        sample(right=None)


def test_one_number_is_an_array_without_axes(tmp_path: Path) -> None:
    @dataclass(frozen=True, kw_only=True, repr=False, eq=False)
    class OneNumber(Result, kind="one number"):
        VARIABLES: ClassVar[Mapping[str, str]] = {"speed": ""}

    with study(0) as watch:
        result = OneNumber.of(watch, speed=1.5)
    assert OneNumber.load(result.save(tmp_path)).data.identical(result.data)
    assert result.to_dataframe().to_dict("records") == [{"speed": 1.5}]


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


def test_provenance_says_whose_weights_they_were() -> None:
    plain, half, other = ({"d_model": 8, "weights_sha256": digest} for digest in "abc")
    for config, digests in (
        ({"model": plain}, ["a"]),
        ({"models": [half, other]}, ["b", "c"]),
        ({"model": "Halving", "models": ["ripple"]}, []),
        ({"model": {"d_model": 8}, "models": 3}, []),
    ):
        assert Provenance(seed=0, config=config).weights == digests


@pytest.mark.parametrize(
    "name", ["../up", "/tmp/far", "a/b", "a\\b", "..", "", "nul\x00", "half \ud800"]
)
def test_a_name_that_leads_elsewhere_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / "results").mkdir()
    with pytest.raises(InputError) as caught:
        sample().save(tmp_path / "results", name)
    assert caught.value.what.startswith("name of") and caught.value.given == repr(name)
    assert [path.name for path in tmp_path.rglob("*")] == ["results"]


def test_a_flip_of_any_byte_of_a_result_is_found(tmp_path: Path) -> None:
    path = sample().save(tmp_path)
    original = path.read_bytes()
    for place in range(0, len(original), 7):
        flipped = bytearray(original)
        flipped[place] ^= 1
        path.write_bytes(flipped)
        with pytest.raises(CheckpointError):
            load_result(path)


def test_results_are_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        sample().note = "changed"  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize(
    "changes",
    [
        {"control": np.zeros(6)},
        {"right": np.zeros(3)},
        {"coords": {"loop": [0], "length": [8, 16, 32]}},
        {"accuracy": np.zeros((2, 3, 2))},
    ],
)
def test_arrays_that_do_not_fit_their_axes_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"loop|length|estimate|dimensions"):
        sample(**changes)


def test_axes_in_another_order_are_refused() -> None:
    result = sample()
    data = result.data.transpose("length", ...)
    with pytest.raises(AssertionError, match="accuracy"):
        Sample(data=data, provenance=result.provenance)


def test_the_table_has_a_row_for_each_cell_and_a_column_for_each_axis() -> None:
    frame = sample().to_dataframe()
    columns = ["loop", "length", "accuracy", "accuracy_low", "accuracy_high", "control"]
    assert list(frame.columns) == columns and len(frame) == 6
    row = frame[(frame.loop == 4) & (frame.length == 32)].iloc[0]
    assert (row.accuracy, row.accuracy_low, row.control) == (5.0, 4.0, 0.0)
    assert list(sample().to_dataframe("right")["loop"]) == [0, 4]


def test_tables_of_what_does_not_fit_are_refused() -> None:
    with pytest.raises(InputError) as caught:
        sample().to_dataframe("accurcy")
    assert (caught.value.what, caught.value.given) == ("array", "'accurcy'")
    assert "accuracy" in caught.value.expected
    with pytest.raises(InputError) as caught:
        sample().to_dataframe("accuracy", "right")
    assert caught.value.what == "arrays" and "right ['loop']" in caught.value.given
    assert tidy({}).empty


def test_a_result_without_arrays_has_an_empty_table(tmp_path: Path) -> None:
    with study(0) as watch:
        bare = Bare.of(watch)
    assert bare.to_dataframe().empty
    assert (bare.figures(), bare.findings()) == ([], [])
    assert isinstance(load_result(bare.save(tmp_path)), Bare)


def test_what_a_result_says_is_registered_from_outside(capsys: pytest.CaptureFixture[str]) -> None:
    class Loud(Sample, kind="loud"):
        pass

    shown: list[str] = []

    class Plot:
        def show(self) -> None:
            shown.append("plot")

    figure = Figure(title="t", plot=Plot(), caption="c")  # pyright: ignore[reportArgumentType]
    findings_of.register(Loud, lambda result: [Finding(section="x", text=f"a < b{result.note}")])
    figures_of.register(Loud, lambda result: [figure])
    plain = sample()
    loud = Loud(data=plain.data, provenance=plain.provenance, note="!")
    loud.show()
    assert capsys.readouterr().out == "a < b!\n" and shown == ["plot"]
    shape, arrays = repr(loud).removesuffix(")").split("; ")
    assert shape.startswith("Loud(") and re.findall(r"\w+: \d", shape) == [
        "loop: 2", "length: 3", "estimate: 3"
    ]  # fmt: skip
    assert arrays.split(", ") == ["accuracy", "control", "right"]
    assert "<li>a &lt; b!</li>" in loud._repr_html_()
    assert plain.findings() == [] and plain.figures() == []


def test_views_are_imported_when_they_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    imported: list[str] = []
    found = lambda name: name.endswith("test_results_figures") or None  # noqa: E731
    monkeypatch.setattr(results, "find_spec", found)
    monkeypatch.setattr(importlib, "import_module", imported.append)
    sample().findings()
    assert imported[-1] == "tests.core.test_results_figures"


def test_loading_through_the_wrong_class_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        Bare.load(path := sample().save(tmp_path))
    assert caught.value.what == f"result {path}"
    assert "'bare'" in caught.value.expected and repr(Sample.kind) in caught.value.given


def _changed(path: Path, **parts: Any) -> Path:
    """A saved result with parts of its description replaced."""
    arrays, texts = read_arrays(path)
    ((key, text),) = texts.items()
    write_arrays(path, arrays, metadata={key: json.dumps(json.loads(text) | parts)})
    return path


@pytest.mark.parametrize(
    "kind", ["os:system", "gone", "loopinterp.core.results:Result", ".".join("a" * 4000)]
)
def test_only_known_kinds_are_loaded_and_nothing_named_in_a_file_is_imported(
    tmp_path: Path, kind: str
) -> None:
    path = _changed(sample().save(tmp_path), kind=kind)
    with pytest.raises(CheckpointError) as caught:
        load_result(path)
    assert caught.value.what == f"result {path}" and "a-sample" in caught.value.expected
    assert reprlib.repr(kind) in caught.value.given
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    "parts",
    [
        {"fields": {"new_field": 1}},
        {"fields": {"note": 3}},
        {"fields": {"parts": [{"name": "a"}]}},
        {"axes": {"accuracy": ["loop", "length", "estimate"]}},
        {"axes": {"accuracy": ["loop"], "control": ["loop", "length"], "right": ["loop"]}},
        {"coords": {"loop": [0, 1, 2]}},
        {"provenance": {"seed": "many"}},
        {"provenance": {"seed": 0, "wall_time": math.inf}},
        {"coords": {"loop": [0, 10**400], "length": {"a": [[[]]]}}},
    ],
)
def test_a_result_of_another_version_is_refused(tmp_path: Path, parts: dict[str, Any]) -> None:
    path = _changed(sample().save(tmp_path), **parts)
    with pytest.raises(CheckpointError) as caught:
        load_result(path)
    assert caught.value.what == f"result {path}" and "Sample" in caught.value.expected


@pytest.mark.parametrize(
    "texts",
    [{}, *({"loopinterp.result": text} for text in ("{", "[3]", "1" * 5000, "[" * 200_000))],
    ids=range(5),
)
def test_a_file_that_is_no_result_is_refused(tmp_path: Path, texts: dict[str, str]) -> None:
    path = tmp_path / "x.safetensors"
    write_arrays(path, {"a": np.zeros(2)}, metadata=texts)
    with pytest.raises(CheckpointError) as caught:
        load_result(path)
    assert caught.value.what == f"result {path}" and "Result.save" in caught.value.expected


@pytest.mark.parametrize("part", ["kind", "axes", "coords", "fields", "provenance"])
def test_a_description_of_another_type_is_refused(tmp_path: Path, part: str) -> None:
    path = _changed(sample().save(tmp_path), **{part: [1]})
    with pytest.raises(CheckpointError) as caught:
        load_result(path)
    assert caught.value.what == f"result {path}" and "Result.save" in caught.value.expected


def test_a_truncated_or_missing_file_is_named(tmp_path: Path) -> None:
    path = sample().save(tmp_path)
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(CheckpointError) as caught:
        load_result(path)
    size = path.stat().st_size
    assert caught.value.what == f"file {path}" and caught.value.given.startswith(f"{size} bytes")
    with pytest.raises(CheckpointError) as caught:
        load_result(absent := tmp_path / "absent.safetensors")
    assert caught.value.what == f"file {absent}"
    assert caught.value.given == os.strerror(errno.ENOENT)


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_no_field_of_a_result_hides_what_every_result_can_do(kind: str) -> None:
    module = importlib.import_module(KINDS[kind].module)
    cls = next(c for c in vars(module).values() if getattr(c, "kind", None) == kind)
    shared = {name for name in dir(Result) if not name.startswith("_")}
    shared -= {"VARIABLES", "OPTIONAL", "kind"}  # which each kind declares for itself
    own_fields = {f.name for f in dataclasses.fields(cls)} - {
        f.name for f in dataclasses.fields(Result)
    }
    assert not own_fields & shared
    for name in shared & vars(cls).keys():  # an override does what it is called
        hidden = inspect.signature(getattr(Result, name)).parameters
        assert list(inspect.signature(getattr(cls, name)).parameters)[: len(hidden)] == list(hidden)


@pytest.mark.parametrize("kind", sorted(CORE))
def test_each_kind_is_defined_where_it_is_looked_up_and_knows_no_views(kind: str) -> None:
    module = KINDS[kind].module
    importlib.import_module(module)
    cls = Result._kinds[kind]
    assert cls.__module__ == module
    names = (f"{module}_figures", f"{module.rpartition('.')[0]}.figures")
    modules = [name for name in names if find_spec(name) is not None]
    assert modules
    text = Path(str(find_spec(module).origin)).read_text()  # type: ignore[union-attr]
    for name in modules:
        assert name not in text
        importlib.import_module(name)
    for registry in (findings_of, figures_of):
        assert registry.dispatch(cls) is not registry.dispatch(Result)


def test_no_share_below_all_is_said_to_be_all() -> None:
    shares = (1, 0.9999, 0.99, 0.994, 0.42, 0.01, 0.0001, 0)
    spelt = ["100%", "99.9%", "99%", "99.4%", "42%", "1%", "0.1%", "0%"]
    assert [percent(share) for share in shares] == spelt


def test_results_that_cannot_be_listed_are_no_results_at_all(tmp_path: Path) -> None:
    assert list(result_files(tmp_path / "absent")) == []
    (tmp_path / "results").write_text("a file")
    with pytest.raises(CheckpointError):
        result_files(tmp_path / "results")
