"""What the commands print: findings, facts, the next step, or one JSON document."""

from __future__ import annotations

import dataclasses
import shlex
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

import loopinterp

if TYPE_CHECKING:
    from loopinterp.results import Result


def print_document(document: Any, text: str, as_json: bool) -> None:
    from loopinterp.storage import spell_json

    typer.echo(spell_json(document, indent=1) if as_json else text)


def next_step(command: str, run: Path) -> str:
    # A script of a user's own registers its tasks before it calls this command line.
    script = Path(sys.argv[0])
    own = script.suffix == ".py" and script.name != "__main__.py"
    start = f"python {shlex.quote(str(script))}" if own else "loopinterp"
    return f"Next: {start} {command} {shlex.quote(str(run))}"


def spell_findings(results: Iterable[Result]) -> tuple[list[dict[str, Any]], str]:
    """What results say in plain words: as JSON has it, and as a list to read."""
    findings = loopinterp.workflow.in_reading_order(results)
    told = "\n".join(f"- {finding.text}" for finding in findings)
    return [dataclasses.asdict(finding) for finding in findings], told


def spell_facts(facts: Mapping[str, Any]) -> str:
    (_, title), *rest = facts.items()
    return "\n".join([str(title), *(f"  {name}: {_shown(value)}" for name, value in rest)])


def _shown(value: Any) -> str:
    if value in (None, {}, [], ()):
        return "none"
    if isinstance(value, Mapping):
        return ", ".join(f"{k}={_shown(v)}" for k, v in value.items())
    if not isinstance(value, (list, tuple)):
        return str(value)
    sentences = any(" " in str(part) for part in value)
    return "".join(f"\n  - {part}" for part in value) if sentences else ", ".join(map(str, value))
