"""What messages, hints and examples name is there: modules, functions, commands and options."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer

import loopinterp
from loopinterp.cli import run_commands, study_commands  # noqa: F401
from loopinterp.cli.shared import app

PACKAGE = Path(loopinterp.__file__).parent
FILES = sorted(str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py"))
NO_NAMES = {
    "loopinterp.autoencoder",
    "loopinterp.lens",
    "loopinterp.result",
    "loopinterp.seal",
    "loopinterp.run",
}
NO_NAMES |= {"loopinterp.metrics.lines", "loopinterp.metrics.sha256"}
"""Keys in the metadata of files."""
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]+")
OF_OTHERS = {"--nproc-per-node"}
"""Options of ``torchrun``."""


def _texts(file: str) -> Iterator[str]:
    """The texts of a module that are no docstrings; one in pieces is joined."""
    tree = ast.parse((PACKAGE / file).read_text(encoding="utf-8"))
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    documentation = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, documented) and node.body and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(v.value) for v in node.values if isinstance(v, ast.Constant))
        elif isinstance(node, ast.Constant) and id(node) not in documentation:
            yield node.value if isinstance(node.value, str) else ""


def _exists(name: str) -> bool:
    there: Any = loopinterp
    path = loopinterp.__name__
    for part in name.split(".")[1:]:
        path += f".{part}"
        try:
            there = getattr(there, part) if hasattr(there, part) else importlib.import_module(path)
        except ImportError:
            return False
    return True


@cache
def _commands() -> dict[str, set[str]]:
    """The options of each command."""
    group: Any = typer.main.get_command(app)
    return {
        name: {option for param in command.params for option in param.opts + param.secondary_opts}
        for name, command in group.commands.items()
    }


@pytest.mark.parametrize("file", FILES)
def test_what_a_text_of_the_package_names_is_there(file: str) -> None:
    known = {option for options in _commands().values() for option in options}
    known |= {"--version", "--help"} | OF_OTHERS
    for text in _texts(file):
        for name in re.findall(r"\bloopinterp(?:\.[A-Za-z_]\w*)+", text):
            assert name in NO_NAMES or _exists(name), f"{name}: {text}"
        for option in OPTION.findall(text):
            assert option in known, f"{option}: {text}"
        for command in re.findall(r"`loopinterp ([a-z]+)", text):
            assert command in _commands(), f"{command}: {text}"


def test_a_name_that_is_not_there_is_seen() -> None:
    assert _exists("loopinterp.core.results.load_result") and _exists("loopinterp.cli.main")
    assert not _exists("loopinterp.load_result") and not _exists("loopinterp.nosuch.thing")
