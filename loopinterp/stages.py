"""Stages of a longer job: said as they begin, timed, and kept with the run."""

from __future__ import annotations

import os
import platform
import shlex
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType
from typing import Any

from loopinterp import __version__
from loopinterp.errors import CheckpointError
from loopinterp.file_locks import in_turn, need_writable
from loopinterp.progress import showing
from loopinterp.results import config_hash
from loopinterp.saved_results import CONFIG, Owner, read_run_config
from loopinterp.storage import read_json_object, write_json

MADE = "made.json"
_PACKAGES = ("torch", "transformer-lens", "numpy", "scikit-learn")


class Stages:
    """Says on stderr what is being done, and keeps in the run how long it took.

    Args:
        run: The run's folder; None keeps nothing.
        show: Whether to say anything.
        owner: The run as it is now, to which the reasons of skipped studies belong.

    Raises:
        InputError: If the folder is inside the package; better before the work than after it.
    """

    def __init__(self, run: Path | None = None, *, show: bool, owner: Owner | None = None) -> None:
        if run is not None:
            need_writable(run)
        self._run, self._show, self._owner = run, show, owner

    @contextmanager
    def stage(self, name: str, about: str) -> Iterator[None]:
        """One stage; its time is said and kept when it ends."""
        self._say(f"{name}: {about}\n")
        start = time.perf_counter()
        with showing(self._show):
            yield
        seconds = time.perf_counter() - start
        self._say(f"  {seconds:.1f} s\n")
        if self._run is not None:
            record_how_it_was_made(self._run, seconds={name: seconds})

    def unsaid(self, name: str, reason: str) -> None:
        """Say and keep of a study why it is not made."""
        self._say(f"{name}: cannot be said because {reason}\n")
        if self._run is not None:
            record_how_it_was_made(self._run, unsaid={name: reason}, owner=self._owner)

    def _say(self, text: str) -> None:
        if self._show:
            sys.stderr.write(text)
            sys.stderr.flush()


def record_how_it_was_made(
    run: Path,
    *,
    command: str | None = None,
    seconds: Mapping[str, float] = MappingProxyType({}),
    unsaid: Mapping[str, str] = MappingProxyType({}),
    owner: Owner | None = None,
) -> None:
    """Keep in the run how it was made: command, seconds by stage, versions, machine.

    What is there of another configuration is dropped.

    Args:
        run: The run's folder.
        command: What makes it again; None leaves what is there.
        seconds: Times of the stages just done, added to those of earlier ones.
        unsaid: Studies that say nothing of this model, each with the reason.
        owner: The run as it is now; read from its folder if None.
    """
    path = run / MADE
    with in_turn(run):  # of two commands at once, neither undoes what the other notes
        if owner is None and (run / CONFIG).is_file():
            owner = Owner.of_run(run) if unsaid else Owner(config=config_hash(read_run_config(run)))
        made = _notes(path, owner)
        if command is not None:
            made["command"] = command
        if owner is not None:
            made["run"] = owner.config
        sealed = {} if owner is None else {"run": owner.config, "weights": owner.weights}
        reasons = {name: {"reason": reason, **sealed} for name, reason in unsaid.items()}
        for name, added in (("stages", seconds), ("unsaid", reasons)):
            earlier = made.get(name)
            made[name] = (earlier if isinstance(earlier, dict) else {}) | dict(added)
        made["unsaid"] = {k: why for k, why in made["unsaid"].items() if k not in seconds}
        made["versions"] = {"loopinterp": __version__, "python": platform.python_version()} | {
            package: version(package) for package in _PACKAGES
        }
        made["machine"] = f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPUs"
        write_json(path, made)


def _notes(path: Path, owner: Owner | None) -> dict[str, Any]:
    """What was noted of the run before; nothing of what can no longer be read."""
    try:
        made = read_json_object(path) if path.exists() else {}
    except CheckpointError:
        return {}
    other = owner is not None and made.get("run", owner.config) != owner.config
    return {} if other else made


def record_training(run: Path, seconds: float) -> None:
    """Keep in a run that its own configuration makes it again, and how long that takes."""
    command = f"loopinterp train --config {shlex.quote(str(run / CONFIG))} --out NEW"
    record_how_it_was_made(run, command=command, seconds={"train": seconds})
