from __future__ import annotations

import copy
import json
import pickle
from dataclasses import FrozenInstanceError, field
from typing import Annotated, Any, Literal

import pytest
from pydantic import Field, PositiveInt

from loopinterp.core.errors import ConfigError, InputError
from loopinterp.core.settings import OnlyWith, Settings, settings


@settings
class Inner(Settings):
    shape: Literal["none", "round", "square"] = "none"
    radius: Annotated[float | None, OnlyWith("shape", "round", needed=True)] = None
    share: Annotated[float, Field(ge=0, lt=1)] = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.radius is not None and self.radius > 100:
            raise ConfigError("radius", expected="a small one", given="more", fix="Shrink it.")


@settings
class Outer(Settings):
    width: PositiveInt
    inner: Inner = field(default_factory=Inner)
    betas: tuple[float, float] = (0.5, 1.0)
    sizes: tuple[PositiveInt, ...] = ()
    free: dict[str, Any] = field(default_factory=dict)
    by_length: dict[int, Annotated[float, Field(ge=0, le=1)]] = field(default_factory=dict)
    name: str | None = None
    big: bool = False


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "width: expected an integer >= 1, got nothing. Set width."),
        ({"width": 0}, "width: expected an integer >= 1, got 0. Change width."),
        ({"width": True}, "width: expected an integer >= 1, got True."),
        ({"width": 1.0}, "width: expected an integer >= 1, got 1.0."),
        ({"widht": 1}, "setting of Outer: expected one of "),
        ({"widht": 1}, "Did you mean 'width'?"),
        ({"width": 1, "inner": 3}, "inner: expected an object with named settings, got 3."),
        ({"width": 1, "inner": {"shap": 1}}, "setting of inner: expected one of radius, shape"),
        ({"width": 1, "inner": {"shape": "ruond"}}, "inner.shape: expected one of none, round"),
        ({"width": 1, "inner": {"shape": "ruond"}}, "Did you mean 'round'?"),
        ({"width": 1, "inner": {"shape": None}}, "one of none, round, square, got None."),
        ({"width": 1, "inner": {"share": 1}}, "inner.share: expected a number >= 0 and < 1, got 1"),
        ({"width": 1, "inner": {"share": float("nan")}}, "a number >= 0 and < 1, got nan."),
        ({"width": 1, "betas": [1]}, "betas: expected a list of 2, each a number"),
        ({"width": 1, "sizes": [1, 0]}, "sizes: expected a list, each an integer >= 1, got 0."),
        ({"width": 1, "free": []}, "free: expected an object with named settings, got []."),
        ({"width": 1, "by_length": {"3": 2}}, "by_length.3: expected a number in 0..1, got 2."),
        ({"width": 1, "name": 2}, "name: expected text or none, got 2."),
        ({"width": 1, "name": {"a": 1}}, "name: expected text or none, got an object."),
        ({"width": 1, "big": 1}, "big: expected true or false, got 1."),
        ({"width": object()}, "width: expected an integer >= 1, got '<object object"),
        ({"width": 1, "inner": {"shape": "round"}}, "inner.radius: expected a value with shape=r"),
        ({"width": 1, "inner": {"radius": 2}}, "inner.radius: expected no radius with shape=none"),
        ({"width": 1, "inner": {"radius": 2}}, "Leave radius out, or set it to none."),
        (
            {"width": 1, "inner": {"shape": "round", "radius": 101}},
            "inner.radius: expected a small one, got more. Shrink it.",
        ),
        ([], "Outer: expected an object with named settings, got []. Change Outer."),
    ],
)
@pytest.mark.usefixtures("no_type_checks")
def test_a_wrong_value_is_explained(values: Any, message: str) -> None:
    with pytest.raises(ConfigError) as info:
        Outer.from_dict(values)
    assert message in str(info.value)


def test_construction_checks_as_reading_does() -> None:
    wrong: Any = "2"
    with pytest.raises(ConfigError) as caught:
        Outer(width=wrong)
    assert (caught.value.what, caught.value.given) == ("width", "'2'")
    assert caught.value.expected.endswith(" >= 1")
    with pytest.raises(ConfigError) as caught:
        Outer(width=1, widths=2)  # type: ignore[call-arg]
    assert caught.value.what == "setting of Outer" and "'width'" in caught.value.fix
    with pytest.raises(ConfigError) as caught:
        Inner(shape="round", radius=200)
    assert (caught.value.what, caught.value.expected) == ("radius", "a small one")
    with pytest.raises(ConfigError):
        Outer(1)  # type: ignore[misc]


def test_settings_go_through_json_and_back() -> None:
    config = Outer(
        width=2, inner=Inner(shape="round", radius=1), sizes=(1, 2), free={"a": [1, {"b": None}]}
    )
    plain = json.loads(json.dumps(config.to_dict()))
    assert plain["inner"] == {"shape": "round", "radius": 1.0, "share": 0.5}
    assert plain["sizes"] == [1, 2]
    assert Outer.from_dict(plain) == config


def test_settings_are_values() -> None:
    inner = Inner(share=0.25)
    assert inner == Inner().replace(share=0.25) != Inner()
    assert hash(inner) == hash(Inner(share=0.25))
    assert pickle.loads(pickle.dumps(inner)) == copy.deepcopy(inner) == inner
    with pytest.raises(FrozenInstanceError):
        inner.share = 0.5  # type: ignore[misc]
    with pytest.raises(ConfigError, match="share"):
        inner.replace(share=2.0)


def test_the_dict_given_is_not_the_one_kept() -> None:
    free = {"a": 1}
    config = Outer(width=1, free=free)
    free["a"] = 2
    assert config.free == {"a": 1}


def test_choices_are_found_by_path() -> None:
    assert Outer.choices(["inner", "shape"]) == ("none", "round", "square")
    assert Outer.choices(["width"]) == Outer.choices(["free", "anything"]) == ()


def test_errors_of_other_kinds_keep_theirs() -> None:
    @settings
    class Task(Settings):
        def __post_init__(self) -> None:
            raise InputError("task", expected="a known one", given="none", fix="Name one.")

    with pytest.raises(InputError) as info:
        Task()
    assert type(info.value) is InputError


def test_what_is_the_default_can_be_left_out() -> None:
    plain = Outer(width=3, inner=Inner(share=0.25), by_length={12: 1.0})
    short = plain.to_dict(defaults=False)
    assert short == {"width": 3, "inner": {"share": 0.25}, "by_length": {"12": 1.0}}
    assert Outer.from_dict(short) == plain == Outer.from_dict(plain.to_dict())
    assert Outer(width=3).to_dict(defaults=False) == {"width": 3}
