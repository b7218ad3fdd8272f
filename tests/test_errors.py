from __future__ import annotations

import pytest

from loopinterp.errors import CheckpointError, ConfigError, HookError, InputError, unknown_name


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


def test_the_nearest_known_name_is_suggested() -> None:
    error = unknown_name("hook", "hook_resid_pots", ["hook_resid_post", "hook_z"], HookError)
    assert isinstance(error, HookError)
    assert "Did you mean 'hook_resid_post'?" in str(error)


def test_nothing_is_suggested_where_nothing_is_near() -> None:
    assert "Did you mean" not in str(unknown_name("task", "zzzz", ["addition", "parity"]))


def test_long_lists_are_cut_and_counted() -> None:
    message = str(unknown_name("task", "q", [f"name{i:02}" for i in range(40)]))
    assert "name11" in message
    assert "name12" not in message
    assert "(40 in all)" in message


def test_an_empty_list_of_known_names_still_reads() -> None:
    assert "expected one of (none)" in str(unknown_name("task", "q", []))
