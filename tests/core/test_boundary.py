"""Arguments of public calls: what fits is passed on in Python's types, what does not is refused."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from loopinterp.core.boundary import Loops, checked, resolve_device
from loopinterp.core.errors import GREATEST_SEED, MOST_LOOPS, ArgumentError, InputError
from loopinterp.core.settings import Seed
from tests.refusals import naming

if TYPE_CHECKING:
    from pathlib import Path

    from jaxtyping import Bool, Int
    from torch import Tensor

    from loopinterp.models.protocol import LoopedModel


@checked
def _study(
    model: LoopedModel | None = None,
    n: PositiveInt | None = None,
    *,
    share: Annotated[float, Field(gt=0, le=1)] = 0.5,
    scale: PositiveFloat = 1.0,
    norm: Literal["2", "max"] = "2",
    lengths: int | Sequence[int] = 3,
    loops: Loops = 4,
    seed: Seed = 0,
    exact: bool = False,
) -> dict[str, Any]:
    """Everything that was passed on."""
    return dict(locals())


@given(st.integers(1, 10**6), st.sampled_from([int, np.int64, np.int32]))
def test_integers_of_numpy_become_those_of_python(n: int, kind: type) -> None:
    passed_on = _study(n=kind(n))["n"]
    assert passed_on == n and type(passed_on) is int


@pytest.mark.parametrize("lengths", [[2, 4], (2, 4), range(2, 5, 2), np.array([2, 4])])
def test_sequences_of_all_kinds_are_taken(lengths: Any) -> None:
    assert list(_study(lengths=lengths)["lengths"]) == [2, 4]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("n", value) for value in (0, -1, True, 2.0, "3", torch.tensor(3))),
        *(("share", value) for value in (0, 1.1, float("nan"), "0.5")),
        *(("scale", value) for value in (0.0, float("inf"), 10**400, None)),
        *(("norm", value) for value in ("mx", 2, None)),
        *(("lengths", value) for value in ("3", [1, "b"], None, [True])),
        *(("loops", value) for value in (0, MOST_LOOPS + 1)),
        *(("seed", value) for value in (-1, GREATEST_SEED + 1)),
        ("exact", 1),
    ],
)
def test_what_does_not_fit_is_refused_by_its_name(name: str, value: Any) -> None:
    with pytest.raises(InputError) as caught:
        _study(**{name: value})
    assert caught.value.what == name and caught.value.fix


def test_the_nearest_choice_is_suggested() -> None:
    with pytest.raises(InputError) as caught:
        _study(norm="mx")  # type: ignore[arg-type]
    assert "2, max" in caught.value.expected and "'max'" in caught.value.fix


def test_what_only_type_checkers_know_is_passed_on_as_it_is() -> None:
    model = object()
    assert _study(model)["model"] is model  # type: ignore[arg-type]


def test_defaults_names_and_signature_are_the_functions_own() -> None:
    assert _study()["n"] is None and _study.__name__ == "_study"
    assert list(inspect.signature(_study).parameters)[:2] == ["model", "n"]
    assert inspect.signature(_study).parameters["lengths"].default == 3


def test_methods_are_checked_too() -> None:
    class Reading:
        @checked
        def at(self, loop: NonNegativeInt) -> int:
            return loop

    assert Reading().at(np.int64(2)) == 2  # type: ignore[arg-type]
    with pytest.raises(InputError):
        Reading().at(-1)


@checked
def _with_values(
    targets: Mapping[str, Int[Tensor, "batch pos"] | Callable[[Tensor], Tensor]],
    *,
    places: str | Int[Tensor, " batch"] | None = None,
    mask: Bool[Tensor, "batch pos"] | None = None,
    listed: Tensor | Sequence[int] = (),
    metric: Callable[[Tensor], Tensor] | None = None,
    out: str | Path | None = None,
) -> dict[str, Any]:
    """Everything that was passed on."""
    return dict(locals())


def test_lists_and_arrays_become_the_tensors_that_are_asked_for() -> None:
    every: list[Any] = [[3, 1], (3, 1), range(3, 0, -2), np.array([3, 1])]
    for places in every:
        passed_on = _with_values({}, places=places)["places"]
        assert torch.equal(passed_on, torch.tensor([3, 1]))
    mask = _with_values({}, mask=[[True, False]])["mask"]  # type: ignore[arg-type]
    assert mask.dtype == torch.bool and mask.shape == (1, 2)
    assert _with_values({}, listed=[1, 2])["listed"] == [1, 2]  # where lists are taken too


def test_what_has_the_class_asked_for_is_passed_on_as_it_is() -> None:
    given: dict[str, Any] = {"metric": torch.sum, "mask": torch.ones(2), "places": "each"}
    passed_on = _with_values({"carry": torch.sin}, **given)
    assert passed_on["targets"] == {"carry": torch.sin}
    assert all(passed_on[name] is value for name, value in given.items())


def test_the_values_of_a_mapping_are_checked_by_their_names() -> None:
    targets: Any = {"listed": [[1, 2]], "drawn": torch.sin}
    passed_on = _with_values(targets)["targets"]
    assert torch.equal(passed_on["listed"], torch.tensor([[1, 2]]))
    assert passed_on["drawn"] is torch.sin
    with naming(r"targets\['x'\]"):
        _with_values(targets | {"x": "carry"})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("targets", value) for value in ("carry", ["carry"], None, torch.ones(2))),
        *(("places", value) for value in (3, {3}, [[1], [2, 3]], ["a"], 2.5)),
        *(("metric", value) for value in ("loss", 3, [len])),
        *(("out", value) for value in (3, ["a"], b"a")),
    ],
)
def test_other_classes_are_refused_by_the_arguments_name(name: str, value: Any) -> None:
    with naming(name):
        _with_values(**{"targets": {}, name: value})


@checked
def _of_unknown_types(
    models: Mapping[str, LoopedModel],
    data: xr.Dataset | None = None,  # noqa: F821
    lengths: Sequence[int] | Sequence[LoopedModel] = (),
) -> tuple[Any, ...]:
    return models, data, lengths


def test_a_type_that_only_type_checkers_know_hides_no_other() -> None:
    """At run time Mapping[str, LoopedModel] is known for a mapping, and no more of it."""
    assert _of_unknown_types({"a": 3}, 4, "b") == ({"a": 3}, 4, "b")  # type: ignore[arg-type]
    with pytest.raises(InputError) as refused:
        _of_unknown_types([3])  # type: ignore[arg-type]
    assert (refused.value.what, refused.value.expected) == ("models", "a mapping")


def test_a_missing_argument_is_named_and_a_type_error_too() -> None:
    with naming("targets", ArgumentError) as caught:
        _with_values(places="each")  # type: ignore[call-arg]
    assert isinstance(caught.value, TypeError) and caught.value.given == "nothing"
    assert caught.value.expected == "a mapping"


def test_an_unknown_argument_gets_the_nearest_name() -> None:
    with naming("argument of _study", ArgumentError) as caught:
        _study(lenghts=3)  # type: ignore[call-arg]
    assert caught.value.given == "'lenghts'" and "'lengths'" in caught.value.fix


def test_too_many_arguments_are_pythons_own_error() -> None:
    with pytest.raises(TypeError, match="too many"):
        _with_values({}, {})  # type: ignore[misc]


def test_cpu_is_cpu() -> None:
    assert resolve_device("cpu") == resolve_device(torch.device("cpu")) == torch.device("cpu")


def test_no_gpu_is_an_error_and_never_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for device in ("cuda", torch.device("cuda")):
        with naming("device 'cuda'"):
            resolve_device(device)
    assert resolve_device("auto") == torch.device("cpu")


def test_auto_takes_the_gpu_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert resolve_device("auto") == torch.device("cuda")
    assert resolve_device("cuda:0") == torch.device("cuda:0")
    for device in ("cuda:3", "cuda:256", "cuda:999"):  # torch reads the last two as 0 and -25
        with naming(f"device '{device}'"):
            resolve_device(device)


@pytest.mark.parametrize("name", ["gpu", "cuda:", "cuda:x", "cud", "meta", ""])
def test_unknown_devices_are_refused(name: str) -> None:
    with naming("device"):
        resolve_device(name)
