"""Programs by name."""

from __future__ import annotations

import pytest

from loopinterp.core.errors import InputError
from loopinterp.programs import get_program, list_programs, register_program
from loopinterp.programs import registry as registry_module


def test_every_program_goes_by_its_own_name_and_task():
    for name in list_programs():
        program = get_program(name)
        assert program.name == name
        assert name in list_programs(task=program.task)
        assert program.doc.endswith(".")


def test_unknown_names_are_refused_with_the_nearest():
    with pytest.raises(InputError, match="'ripple'"):
        get_program("riple")
    with pytest.raises(InputError, match=r"^task of"):
        list_programs(task="sorting")


@pytest.mark.usefixtures("no_type_checks")
def test_a_registered_program_is_found_and_its_name_is_protected(monkeypatch):
    import dataclasses

    monkeypatch.setattr(registry_module, "_PROGRAMS", dict(registry_module._PROGRAMS))
    mine = register_program(dataclasses.replace(get_program("ripple"), name="mine"))
    assert get_program("mine") is mine
    assert "mine" in list_programs(task="addition")
    with pytest.raises(InputError, match=r"^program name:"):
        register_program(mine)
    register_program(mine, replace=True)
    with pytest.raises(InputError, match=r"^program:"):
        register_program("ripple")  # type: ignore[arg-type]
