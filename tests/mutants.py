"""How strong are the tests? Random mutants of the package, each put before the tests that know it.

python -m tests.mutants --count 300 --seed 0 --log mutants.jsonl

Each mutant changes one operator, comparison, constant or condition of one module, drawn evenly over
rooms. It is put before the module's own tests and examples, then before other test files that know
it. What none of them fails on is a survivor: a test is missing, or the code is dead,
or the mutant means the same. A run that was stopped goes on where the log ends.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import re
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
LEFT_OUT = ("plotting", "__init__.py", "__main__.py")
SECONDS = 240
MOST_FILES = 4
"""Of other test files so many are tried, those that name what the module defines first."""

SWAPS: dict[type[Any], type[Any]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult, ast.Mod: ast.Add, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
}  # fmt: skip


def mutated(node: ast.AST) -> str | None:
    """The source of a node's mutant; None if it has none."""
    if isinstance(node, ast.Compare) and type(node.ops[0]) in SWAPS:
        ops = [SWAPS[type(node.ops[0])](), *node.ops[1:]]
        return ast.unparse(ast.Compare(node.left, ops, node.comparators))
    if isinstance(node, ast.BoolOp):
        return ast.unparse(ast.BoolOp(SWAPS[type(node.op)](), node.values))
    if isinstance(node, ast.BinOp) and type(node.op) in SWAPS:
        return ast.unparse(ast.BinOp(node.left, SWAPS[type(node.op)](), node.right))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.Not, ast.Invert, ast.USub)):
        return ast.unparse(node.operand)
    if isinstance(node, ast.Constant) and isinstance(node.value, bool):
        return repr(not node.value)
    if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
        return repr(node.value + 1)
    if isinstance(node, (ast.If, ast.IfExp, ast.While)):
        return f"not ({ast.unparse(node.test)})"
    return None


def mutants(path: Path) -> Iterator[tuple[int, str, str, str]]:
    """Every mutant of a file: line, what was there, what is there now, the whole new source."""
    source = path.read_text()
    starts = [0]
    for line in source.encode().splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    for node in _code(ast.parse(source)):
        text = mutated(node)
        place = node.test if isinstance(node, (ast.If, ast.IfExp, ast.While)) else node
        if text is None or not isinstance(place, ast.expr):
            continue
        assert place.end_lineno is not None and place.end_col_offset is not None
        begin = starts[place.lineno - 1] + place.col_offset
        end = starts[place.end_lineno - 1] + place.end_col_offset
        data = source.encode()
        new = data[:begin] + f"({text})".encode() + data[end:]
        yield place.lineno, data[begin:end].decode(), text, new.decode()


def _code(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes that run: no annotations, no f-strings (words), nothing for type checkers."""
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list"):
            continue
        for child in value if isinstance(value, list) else [value]:
            typing = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
            if not isinstance(child, ast.AST) or isinstance(child, ast.JoinedStr) or typing:
                continue
            yield child
            yield from _code(child)


def draw(count: int, seed: int) -> list[tuple[str, int, str, str, str]]:
    """Mutants of the package, evenly over its rooms: path, line, old, new, new source."""
    rooms: dict[str, list[Path]] = {}
    for path in sorted((ROOT / "loopinterp").rglob("*.py")):
        parts = path.relative_to(ROOT / "loopinterp").parts
        if not set(parts) & set(LEFT_OUT):
            rooms.setdefault(parts[0] if len(parts) > 1 else "root", []).append(path)
    generator, drawn = random.Random(seed), {}
    names = sorted(rooms)
    found = {p: list(mutants(p)) for paths in rooms.values() for p in paths}
    by_room = {r: [(p, m) for p in paths for m in found[p]] for r, paths in rooms.items()}
    while len(drawn) < count:
        path, (line, old, new, text) = generator.choice(by_room[names[len(drawn) % len(names)]])
        drawn.setdefault((str(path.relative_to(ROOT)), line, old, new), text)
    return [(*key, text) for key, text in drawn.items()]


def tests_of(module: str) -> list[list[str]]:
    """The module's own tests and examples; then other test files that import it."""
    path = Path(module)
    own = Path("tests", *path.parts[1:-1], f"test_{path.name}")
    dotted = ".".join(path.with_suffix("").parts)
    defined = ast.parse((ROOT / path).read_text()).body
    names = [n.name for n in defined if isinstance(n, (ast.FunctionDef, ast.ClassDef))]
    knows = re.compile("|".join([rf"{dotted}\b", *(rf"\b{name}\b" for name in names)]))
    files = sorted((ROOT / "tests").rglob("test_*.py"), key=lambda file: file.stat().st_size)
    others = [file.relative_to(ROOT) for file in files if knows.search(file.read_text())]
    room = [file.relative_to(ROOT) for file in files if file.parent == (ROOT / own).parent]
    tried = [str(file) for file in dict.fromkeys([*others, *room]) if file != own]
    first = [str(own), module] if (ROOT / own).is_file() else [module]
    return [first, *([t] for t in tried[:MOST_FILES])]


def fails(tree: Path, files: list[str]) -> bool:
    """Whether the tests in some files fail on a tree, or do not end."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.chdir(tree)
            sys.path.insert(0, str(tree))
            signal.alarm(SECONDS)
            quiet = os.open(os.devnull, os.O_WRONLY)
            os.dup2(quiet, 1)
            os.dup2(quiet, 2)
            import pytest

            options = ["-x", "-q", "-p", "no:cacheprovider", "-m", "not gpu and not peers"]
            options += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # imported beforehand
            code = int(pytest.main([*options, *files]))
        finally:
            os._exit(0 if code in (0, 5) else 1)  # 5: there are no tests
    return os.waitpid(child, 0)[1] != 0


def killer(tree: Path, module: str, text: str, tried: list[list[str]]) -> str:
    """The tests that fail on a mutant of a module, and not without it; "" if none does."""
    whole = (tree / module).read_text()
    (tree / module).write_text(text)
    failing = (" ".join(files) for files in tried if fails(tree, files))
    found = next((f for f in failing if not fails_anyway(tree, f, module, whole)), "")
    (tree / module).write_text(whole)
    return found


def fails_anyway(tree: Path, files: str, module: str, whole: str) -> bool:
    """Whether tests fail without the mutant, too; they would seem to kill every one."""
    if files not in _FAIL_ANYWAY:
        mutant = (tree / module).read_text()
        (tree / module).write_text(whole)
        _FAIL_ANYWAY[files] = fails(tree, files.split())
        (tree / module).write_text(mutant)
    return _FAIL_ANYWAY[files]


_FAIL_ANYWAY: dict[str, bool] = {}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log", type=Path, required=True, help="a line of JSON for each mutant")
    args = parser.parse_args()
    sys.dont_write_bytecode = True
    import pandas  # noqa: F401  forked children need not import it again
    import plotly  # noqa: F401
    import sklearn  # noqa: F401
    import transformer_lens  # noqa: F401
    import xarray  # noqa: F401

    drawn = draw(args.count, args.seed)
    with tempfile.TemporaryDirectory() as folder, args.log.open("a+") as log:
        tree = Path(folder, "tree")
        ignored = shutil.ignore_patterns(".git", ".venv", "__pycache__", "runs", "_build")
        shutil.copytree(ROOT, tree, ignore=ignored)
        log.seek(0)
        rows = [json.loads(line) for line in log]
        for tests in ("own", "others"):  # the quick ones first, for all mutants
            done = {row["number"] for row in rows if row["killed_by"] or row["tests"] == tests}
            for number in (n for n in range(len(drawn)) if n not in done):
                module, line, old, new, text = drawn[number]
                files = tests_of(module)
                tried = files[:1] if tests == "own" else files[1:]
                row = {"number": number, "module": module, "line": line, "old": old, "new": new}
                row |= {"tests": tests, "killed_by": killer(tree, module, text, tried)}
                rows.append(row)
                log.write(json.dumps(row) + "\n")
                log.flush()
    survivors = [r for r in rows if r["tests"] == "others" and not r["killed_by"]]
    print(f"{len(drawn) - len(survivors)} of {len(drawn)} mutants killed")
    for row in survivors:
        print(f"{row['module']}:{row['line']}: {row['old']} -> {row['new']}")


if __name__ == "__main__":
    main()
