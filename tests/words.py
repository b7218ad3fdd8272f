"""Words that the glossary replaced: in docs, docstrings and texts of the package.

``python -m tests.words [PATH ...]`` lists the hits with their places.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]

REPLACED = {
    r"left alone|undisturbed": "clean run, without intervention",
    r"exchang(e|es|ed|ing)\b|\bswap(s|ped|ping)?\b": "interchange intervention",
    r"donors?\b": "source",
    r"kick(s|ed)?\b": "perturbation",
    r"planted|plants a": "injected value",
    r"hold time|how long (a|the) carr(y|ies) lives?": "persistence",
    r"no run (visits|reaches)|a run (visits|reaches)": "off-distribution, on-distribution state",
    r"something (happens|comes)": "effective intervention",
    r"followed to the end|follows it to the end": "whole-run accuracy",
    r"nearest program|nearest is|nearest of": "closest program",
    r"(not|cannot be|be) told (from|apart)": "indistinguishable",
    r"laid over|lies over": "program offset",
    r"com(e|es|ing) to rest|at rest|go(es)? round|runs? away|wanders?\b": "converges, diverges",
    r"settle(s|d)?\b": "converges",
    r"knows? the input": "input dependence",
    r"\bspots?\b": "position, cell",
    r"table of steps": "transition table",
    r"cannot be said|unsaid|cannot say": "skipped, with the reason",
    r"way back": "attribution pass",
    r"whose circuit is known": "known-circuit model",
    r"none is without effect|said nothing|is not to be believed": "what was measured",
    r"normaliz|generaliz|behavior\b|initializ|optimiz(?!er)|\bcolor(?!s?\b)": "British spelling",
}
PATTERN = re.compile("|".join(f"(?:{x})" for x in REPLACED), re.IGNORECASE)


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """Line and text of everything in a file that a person reads."""
    source = path.read_text()
    if path.suffix == ".md":
        fence = False
        for number, line in enumerate(source.splitlines(), 1):
            fence ^= line.lstrip().startswith("```")
            if not fence:
                yield number, re.sub(r"`[^`]*`|\]\([^)]*\)", "", line)
        return
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            # code in a docstring or text is not prose
            for i, line in enumerate(node.value.splitlines()):
                yield node.lineno + i, re.sub(r"``[^`]*``|:\w+:`[^`]*`|>>>.*", "", line)


def hits(paths: list[Path]) -> Iterator[str]:
    for top in paths:
        for path in sorted([top] if top.is_file() else top.rglob("*")):
            if (
                path.suffix in {".py", ".md"}
                and path.name != "glossary.md"
                and "_build" not in path.parts
            ):
                for number, text in texts(path):
                    for match in PATTERN.finditer(text):
                        yield f"{path}:{number}: {match.group()}"


if __name__ == "__main__":
    named = [Path(x) for x in sys.argv[1:]]
    print(*hits(named or [ROOT / "loopinterp", ROOT / "docs", ROOT / "README.md"]), sep="\n")
