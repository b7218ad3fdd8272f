"""What an import costs, checked by what it loads: times depend on the machine, modules do not."""

from __future__ import annotations

import importlib
import json
import pydoc
import subprocess
import sys
from pathlib import Path

import pytest

import loopinterp

HEAVY = {
    "accelerate",
    "datasets",
    "einops",
    "huggingface_hub",
    "jaxtyping",
    "jinja2",
    "networkx",
    "pandas",
    "plotly",
    "pydantic",
    "rich",
    "scipy",
    "sklearn",
    "tqdm",
    "transformer_lens",
    "transformers",
    "typer",
    "wandb",
    "xarray",
}
ROOT = Path(loopinterp.__file__).parent
STUBS = sorted(ROOT.rglob("__init__.pyi"))
PACKAGES = {stub.parent.name for stub in STUBS if stub.parent.parent == ROOT}
FIRST_NAMES = {
    "LoopedTransformer": "loopinterp.models",
    "LoopedTransformerConfig": "loopinterp.models",
    "Run": "loopinterp.training",
    "analyze_model": "loopinterp.app",
    "compare_programs": "loopinterp.comparison",
    "compile_program": "loopinterp.compiler",
    "evaluate": "loopinterp.training",
    "get_program": "loopinterp.programs",
    "get_task": "loopinterp.tasks",
    "list_pretrained": "loopinterp.zoo",
    "load": "loopinterp.app",
    "load_pretrained": "loopinterp.zoo",
    "studies": "loopinterp.app",
    "train": "loopinterp.training",
}
"""What people look for at the top, and the package that it lives in."""


def loaded_by(code: str) -> set[str]:
    """Top-level packages that a fresh interpreter has loaded after running some code."""
    script = f"{code}\nimport sys, json; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return {name.split(".")[0] for name in json.loads(done.stdout.splitlines()[-1])}


def test_importing_the_package_loads_nothing_but_itself() -> None:
    loaded = loaded_by("import loopinterp")
    assert not loaded & (HEAVY | {"torch", "numpy"})


def test_importing_every_subpackage_loads_nothing_that_torch_does_not() -> None:
    code = "import torch, loopinterp\n" + "\n".join(map("loopinterp.{}".format, PACKAGES))
    assert not (loaded_by(code) - loaded_by("import torch")) & HEAVY


@pytest.mark.parametrize("arguments", ["--help", "--version", "train --help"])
def test_help_on_the_command_line_does_not_wait_for_torch(arguments: str) -> None:
    code = (
        "import io, contextlib\nfrom loopinterp.cli import main\n"
        "with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):\n"
        f"    main({arguments.split()!r})"
    )
    assert not loaded_by(code) & {"torch", "transformer_lens", "numpy", "pandas", "plotly"}


@pytest.mark.parametrize("stub", STUBS, ids=lambda stub: stub.parent.name)
def test_every_name_of_a_stub_can_be_reached(stub: Path) -> None:
    package = importlib.import_module(".".join(stub.parent.relative_to(ROOT.parent).parts))
    assert package.__all__
    assert set(package.__all__) <= set(dir(package))
    for public in package.__all__:
        assert getattr(package, public) is not None


def test_an_unknown_name_is_an_attribute_error_that_names_the_package() -> None:
    with pytest.raises(AttributeError, match=r"loopinterp .*nothing"):
        loopinterp.nothing  # type: ignore[attr-defined]  # noqa: B018


@pytest.mark.parametrize(
    ("name", "room"),
    [("lens_study", "lenses"), ("explore", "pages"), ("adapt", "adapters")],
)
def test_a_name_of_a_subpackage_is_said_to_be_there(name: str, room: str) -> None:
    with pytest.raises(AttributeError) as caught:
        getattr(loopinterp, name)
    assert caught.value.name == name and str(caught.value).endswith(f"loopinterp.{room}.{name}")


def test_help_begins_with_a_page_of_use() -> None:
    page = pydoc.plain(pydoc.render_doc(loopinterp)).splitlines()
    assert sum(">>>" in line for line in page[:40]) >= 5


def test_the_package_lists_its_packages_and_says_that_it_is_typed() -> None:
    assert set(dir(loopinterp)) == PACKAGES | FIRST_NAMES.keys()
    assert (ROOT / "py.typed").exists()


@pytest.mark.parametrize("name", FIRST_NAMES)
def test_the_first_names_are_those_of_their_packages(name: str) -> None:
    assert getattr(loopinterp, name) is getattr(importlib.import_module(FIRST_NAMES[name]), name)
