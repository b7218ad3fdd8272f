from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from loopinterp.core.errors import (
    CheckpointError,
    ConfigError,
    HookError,
    InputError,
    UnknownKeyError,
    check_choice,
    check_integer,
    check_number,
    unknown_name,
)


def test_an_error_says_what_was_expected_what_was_given_and_the_fix() -> None:
    error = InputError("n_loops", expected="an integer >= 1", given="0", fix="Pass n_loops=1.")
    assert str(error) == "n_loops: expected an integer >= 1, got 0. Pass n_loops=1."
    assert (error.what, error.expected, error.given) == ("n_loops", "an integer >= 1", "0")
    assert error.fix == "Pass n_loops=1."


@pytest.mark.parametrize("kind", [ConfigError, HookError, CheckpointError])
def test_every_kind_is_an_input_error_and_a_value_error(kind: type[InputError]) -> None:
    error = kind("x", expected="1", given="2", fix="Say 1.")
    assert isinstance(error, InputError)
    assert isinstance(error, ValueError)


def test_a_message_is_no_longer_for_a_longer_name() -> None:
    def message(n: int) -> str:
        return str(InputError("n" * n, expected="a run", given="g" * n, fix="f" * n))

    assert len(message(10**6)) < 1500 and message(10**6).count("…") == 3
    assert "…" not in message(3) and all(part in message(3) for part in ("nnn", "ggg", "fff"))


def test_the_nearest_known_name_is_suggested() -> None:
    error = unknown_name("hook", "hook_resid_pots", ["hook_resid_post", "hook_z"], HookError)
    assert isinstance(error, HookError)
    assert "'hook_resid_post'" in error.fix


def test_nothing_is_suggested_where_nothing_is_near() -> None:
    assert "Did you mean" not in str(unknown_name("task", "zzzz", ["addition", "parity"]))


def test_a_choice_of_one_is_the_fix() -> None:
    error = unknown_name("positions", "every", ["all at once"])
    assert error.expected == "'all at once'" and "'all at once'" in error.fix


def test_an_unknown_key_is_a_key_error_with_the_whole_message() -> None:
    error = unknown_name("recipe", "adition", ["addition", "parity"], UnknownKeyError)
    assert isinstance(error, KeyError) and isinstance(error, InputError)
    assert str(error).startswith("recipe: ") and "'addition'" in error.fix


def test_long_lists_are_cut_and_counted() -> None:
    message = str(unknown_name("task", "q", [f"name{i:02}" for i in range(40)]))
    assert "name11" in message
    assert "name12" not in message
    assert "(40 in all)" in message


def test_an_empty_list_of_known_names_still_reads() -> None:
    assert unknown_name("task", "q", []).expected.endswith("(none)")


def test_integers_come_back_as_int_whatever_made_them() -> None:
    for number in (3, np.int64(3), np.uint8(3)):
        checked = check_integer("n", number, least=3, most=3)
        assert type(checked) is int
        assert checked == 3
    assert check_integer("n", -7) == -7


@pytest.mark.parametrize("value", [True, np.bool_(True), 1.0, np.float64(1), "1", None, [1], 0, 6])
def test_what_is_no_integer_of_the_range_is_refused(value: Any) -> None:
    with pytest.raises(InputError) as caught:
        check_integer("n_loops", value, least=1, most=5)
    assert (caught.value.what, caught.value.given) == ("n_loops", repr(value))
    assert "1..5" in caught.value.expected and "1" in caught.value.fix


def test_the_error_of_an_integer_names_its_end_and_the_fix() -> None:
    with pytest.raises(InputError) as caught:
        check_integer("seed", 10, most=9, fix="Shrink it.")
    assert (caught.value.what, caught.value.given, caught.value.fix) == ("seed", "10", "Shrink it.")
    assert caught.value.expected.endswith(" <= 9")
    with pytest.raises(InputError) as caught:
        check_integer("seed", "a")
    assert (caught.value.expected, caught.value.given) == ("an integer", "'a'")
    assert "0" in caught.value.fix


def test_numbers_come_back_as_float() -> None:
    for number in (1, 1.0, np.float32(1), np.int64(1)):
        checked = check_number("share", number, least=0, most=1)
        assert type(checked) is float
        assert checked == 1.0


@pytest.mark.parametrize("value", [True, "1", None, math.nan, math.inf, -math.inf, -1, 2, 10**400])
def test_what_is_no_finite_number_of_the_range_is_refused(value: Any) -> None:
    with pytest.raises(InputError) as caught:
        check_number("share", value, least=0, most=1)
    assert caught.value.what == "share" and "0..1" in caught.value.expected


def test_a_choice_is_one_of_the_names() -> None:
    assert check_choice("device", "cpu", ("cpu", "cuda")) == "cpu"
    with pytest.raises(ConfigError) as caught:
        check_choice("device", "gpu", ("cpu", "cuda"), error=ConfigError)
    assert (caught.value.what, caught.value.given) == ("device", "'gpu'")
    assert "'cpu'" in caught.value.fix
    with pytest.raises(InputError, match="device"):
        check_choice("device", ["cpu"], ("cpu", "cuda"))
