"""Checks the shapes and dtypes in annotations of loopinterp at run time, in the tests only.

Functions that name no arrays are left alone: pyright checks them, and a wrapper around every small
function takes a tenth of the suite's time.

jaxtyping's own import hook sees nothing here: the library imports jaxtyping and Tensor under
``TYPE_CHECKING`` (they cost nothing at run time), so its annotations name things that do not
exist, and a checker lets what it cannot name pass. This hook first makes those imports real.
"""

from __future__ import annotations

import ast
import builtins
import functools
import re
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import CodeType, ModuleType
from typing import Any

PACKAGE = "loopinterp"
CHECKER = "__check_types__"

CALLS = 3
"""Calls of each function that are checked, anew in each test. A check takes a tenth of a
millisecond: with 30 calls, a fifth of the suite's time went into them."""

_test = 0


def start_test() -> None:
    """Check the next calls of every function again."""
    global _test
    _test += 1


def install() -> None:
    """Check types in every module of the package that is imported from now on."""
    loaded = [name for name in sys.modules if name.split(".")[0] == PACKAGE]
    if loaded:
        raise RuntimeError(f"imported before the type checks were installed: {loaded}")
    sys.meta_path.insert(0, _Finder())


def make_checker() -> Any:
    """jaxtyping's decorator around beartype; an int is accepted where a float is."""
    from beartype import BeartypeConf, beartype
    from jaxtyping import config, jaxtyped

    # What a wrong argument raises is a TypeError, as jaxtyping's own and as Python's are.
    plain = beartype(conf=BeartypeConf(is_pep484_tower=True, violation_type=TypeError))
    with_shapes = jaxtyped(typechecker=plain)

    def checker(function: Callable[..., Any]) -> Callable[..., Any]:
        if not _may_name_arrays(function):
            return function
        checked, calls, test = with_shapes(function), 0, _test

        @functools.wraps(function)
        def first_calls_checked(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls, test
            if config.jaxtyping_disable:  # nothing is counted: a compiled call would see it change
                return function(*args, **kwargs)
            if test != _test:
                calls, test = 0, _test
            calls += 1
            if calls > CALLS:
                return function(*args, **kwargs)
            return checked(*args, **kwargs)

        return first_calls_checked

    return checker


def _may_name_arrays(function: Callable[..., Any]) -> bool:
    """Whether an annotation names a type of jaxtyping, or what is not known to be none."""
    written = " ".join(map(str, function.__annotations__.values()))
    names = set(re.findall(r"[^\W\d]\w*", re.sub(r"\"[^\"]*\"|'[^']*'", "", written)))
    known = vars(builtins) | function.__globals__
    found = [known.get(name, "jaxtyping") for name in names - {"None"}]
    return any("jaxtyping" in f"{getattr(x, '__module__', '')} {x!r}" for x in found)


class _Finder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.split(".")[0] != PACKAGE:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and type(spec.loader) is SourceFileLoader:
            spec.loader = _Loader(fullname, spec.loader.path)
        return spec


class _Loader(SourceFileLoader):
    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        tree = ast.parse(self.get_data(path), path)
        if not self.is_package(fullname):  # packages only re-export lazily
            tree = _Transformer().visit(tree)
        return compile(tree, path, "exec", dont_inherit=True)

    def exec_module(self, module: ModuleType) -> None:
        setattr(module, CHECKER, make_checker())
        super().exec_module(module)


class _Transformer(ast.NodeTransformer):
    """Makes typing-only imports real, and decorates functions and methods."""

    def visit_If(self, node: ast.If) -> Any:
        if not (isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"):
            return node
        return [statement for child in node.body for statement in _real_import(child)]

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        names = {d.id for d in node.decorator_list if isinstance(d, ast.Name)}
        if not names & {"overload", "no_type_check"}:
            node.decorator_list.append(
                ast.copy_location(ast.Name(id=CHECKER, ctx=ast.Load()), node)
            )
        return node  # functions inside functions are the function's own business

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.ClassDef:
        if not any(isinstance(base, ast.Name) and base.id == "Protocol" for base in node.bases):
            self.generic_visit(node)
        return node


def _real_import(node: ast.stmt) -> list[ast.stmt]:
    """The import itself, or names bound to ``Any`` where importing would go round in a circle."""
    if isinstance(node, ast.Import):
        return [node]
    if not isinstance(node, ast.ImportFrom):
        return []
    module = node.module or ""
    opaque, real = [], []
    for alias in node.names:
        inside = node.level > 0 or module.split(".")[0] == PACKAGE
        # beartype knows Self only where it decorates the whole class.
        (opaque if inside or alias.name == "Self" else real).append(alias)
    statements: list[ast.stmt] = []
    if real:
        statements.append(ast.ImportFrom(module=module, names=real, level=node.level))
    if opaque:
        any_names = [
            ast.copy_location(ast.alias("Any", alias.asname or alias.name), alias)
            for alias in opaque
        ]
        statements.append(ast.ImportFrom(module="typing", names=any_names, level=0))
    return [ast.copy_location(statement, node) for statement in statements]
