"""The tests' own type checks must be able to fail."""

from __future__ import annotations

import importlib.util
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from tests import runtime_types
from tests.warm_python import WarmPython

SOURCE = """
from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor
    from typing_extensions import Self

    from loopinterp.models.protocol import LoopedModel


def transpose(x: Float[Tensor, "row column"]) -> Float[Tensor, "column row"]:
    return x if x.shape[0] == 7 else x.T


class Thing:
    def me(self, scale: float) -> Self:
        return self


def anything(model: LoopedModel) -> int:
    return 1


def plain(words: list[str], n: int = 0) -> str:
    return n or words[0]


Rows = list[Float[Tensor, "row column"]]


def alias(rows: Rows) -> "Rows":
    return rows
"""


@pytest.fixture
def checked(tmp_path: Path) -> Iterator[ModuleType]:
    path = tmp_path / "checked_sample.py"
    path.write_text(SOURCE)
    loader = runtime_types._Loader("checked_sample", str(path))
    spec = importlib.util.spec_from_loader("checked_sample", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["checked_sample"] = module
    loader.exec_module(module)
    yield module
    del sys.modules["checked_sample"]


def test_right_shapes_pass(checked: ModuleType) -> None:
    assert checked.transpose(torch.ones(2, 3)).shape == (3, 2)
    assert checked.Thing().me(1) is not None
    assert checked.anything(object()) == 1


@pytest.mark.parametrize(
    "wrong", [torch.ones(2), torch.ones(2, 3, dtype=torch.int64), torch.ones(7, 3)]
)
def test_wrong_rank_dtype_or_result_shape_fails(checked: ModuleType, wrong: torch.Tensor) -> None:
    with pytest.raises(Exception, match="Type-check error"):
        checked.transpose(wrong)


def test_an_alias_of_arrays_is_checked(checked: ModuleType) -> None:
    with pytest.raises(Exception, match="Type-check error"):
        checked.alias([torch.ones(2, 2, 2)])


def test_what_names_no_arrays_is_left_alone(checked: ModuleType) -> None:
    assert checked.plain([3]) == 3
    assert not hasattr(checked.plain, "__wrapped__")


@pytest.mark.usefixtures("no_type_checks")
def test_checks_can_be_switched_off(checked: ModuleType) -> None:
    assert checked.transpose(torch.ones(7)).shape == (7,)


def test_each_test_checks_the_first_calls_anew(checked: ModuleType) -> None:
    wrong = torch.ones(7, 3)
    for _ in range(runtime_types.CALLS):
        checked.transpose(torch.ones(2, 3))
    assert checked.transpose(wrong) is wrong
    runtime_types.start_test()
    with pytest.raises(Exception, match="Type-check error"):
        checked.transpose(wrong)


def test_the_library_is_loaded_through_the_checks() -> None:
    import loopinterp.tasks.carries

    assert isinstance(loopinterp.tasks.carries.__loader__, runtime_types._Loader)
    with pytest.raises(TypeError, match="Type-check error"):
        loopinterp.tasks.carries.total(torch.ones(2), torch.ones(2))


def test_a_result_is_read_where_the_checks_have_imported_nothing(warm_python: WarmPython) -> None:
    """Reading one takes the types of its fields, some of which only type checkers import."""
    code = """
        import dataclasses, importlib, pkgutil, types, typing
        import loopinterp, pydantic
        from loopinterp.core.results import Result
        for module in pkgutil.walk_packages(loopinterp.__path__, "loopinterp."):
            if not module.name.endswith("__main__"):
                importlib.import_module(module.name)
        xr = types.SimpleNamespace(Dataset=typing.Any)
        for kind, result in Result._kinds.items():
            hints = typing.get_type_hints(result, localns={"xr": xr})
            for field in dataclasses.fields(result):
                if field.name not in ("data", "provenance"):
                    pydantic.TypeAdapter(hints[field.name])
            print(kind)
    """
    done = warm_python.run("-c", textwrap.dedent(code), timeout=120)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) > 30
