"""What an import costs, checked by what it loads: times depend on the machine, modules do not."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import loopinterp
from loopinterp._lazy import lazy_exports

HEAVY = {
    "accelerate",
    "datasets",
    "einops",
    "huggingface_hub",
    "jaxtyping",
    "jinja2",
    "pandas",
    "plotly",
    "rich",
    "scipy",
    "sklearn",
    "tqdm",
    "transformer_lens",
    "transformers",
    "typer",
    "wandb",
}
PACKAGES = (
    "circuits",
    "dynamics",
    "lenses",
    "models",
    "plotting",
    "probing",
    "rasp",
    "report",
    "tasks",
    "training",
)


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
    code = "import torch\nimport loopinterp\n" + "\n".join(f"loopinterp.{p}" for p in PACKAGES)
    assert not (loaded_by(code) - loaded_by("import torch")) & HEAVY


@pytest.mark.parametrize("arguments", ["--help", "--version", "train --help"])
def test_help_on_the_command_line_does_not_wait_for_torch(arguments: str) -> None:
    code = (
        "import io, contextlib\nfrom loopinterp.cli import main\n"
        "with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):\n"
        f"    main({arguments.split()!r})"
    )
    assert not loaded_by(code) & {"torch", "transformer_lens", "numpy", "pandas", "plotly"}


@pytest.mark.parametrize("name", PACKAGES)
def test_every_public_name_can_be_reached(name: str) -> None:
    package = getattr(loopinterp, name)
    assert package.__all__, f"loopinterp.{name} exports nothing"
    assert set(package.__all__) <= set(dir(package))
    for public in package.__all__:
        assert getattr(package, public) is not None


def test_an_unknown_name_is_an_attribute_error_that_names_the_package() -> None:
    with pytest.raises(AttributeError, match="module 'loopinterp' has no attribute 'nothing'"):
        loopinterp.nothing  # noqa: B018
    getter, lister, public = lazy_exports("json", {"decoder": ".decoder", "dumps": "."})
    assert lister() == public == ["decoder", "dumps"]
    assert getter("decoder").__name__ == "json.decoder"


def test_packages_list_what_they_export() -> None:
    assert set(PACKAGES) <= set(dir(loopinterp))
    assert set(PACKAGES) <= set(loopinterp.__all__)
