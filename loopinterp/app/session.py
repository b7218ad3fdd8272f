"""An open model with its task, folder, stopping rules and the programs to compare it with."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from pydantic import PositiveInt

from loopinterp import models, training, zoo
from loopinterp.core.boundary import checked
from loopinterp.core.errors import CheckpointError, InputError, check_choice, check_integer, need
from loopinterp.core.results import SUFFIX, config_hash, load_result
from loopinterp.core.run_files import CONFIG, IN_MEMORY, Owner, spell_mismatch
from loopinterp.core.settings import Seed
from loopinterp.core.storage import (
    digest_tensors,
    json_default,
    read_json,
    read_json_object,
    write_json,
)
from loopinterp.core.text import ShortRepr
from loopinterp.models import STOPPING_RULES, reach
from loopinterp.models.protocol import (
    declared,
    describe_model,
    device_of,
    every_tensor,
    need_model,
)
from loopinterp.models.study_examples import loops_at, need_model_of
from loopinterp.programs import get_program, list_programs
from loopinterp.tasks import get_task
from loopinterp.tasks.sampling import MOST_TOKENS, check_size, longest_length, need_task
from loopinterp.tasks.task import digest_file, task_files
from loopinterp.training import Run

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from loopinterp.core.results import Result
    from loopinterp.models import LoopedModel, LoopedTransformer
    from loopinterp.tasks import Batch, Task


MOST_LOOPS = 100
"""Most loops of the inputs of studies that follow every loop."""

MOST_WORK = 2**24
"""Most loops times pairs of positions, for lengths that ``evaluate`` chooses itself.

This is addition without a window at some 250 bits, or a maze of 16 x 16 cells.
"""


@dataclass(frozen=True, kw_only=True, repr=False)
class Session(ShortRepr):
    """A model with its task, on the device it is studied on.

    Attributes:
        model: Any looped model; an attribute ``n_ctx`` limits its positions.
        folder: Results are saved under its ``results/``.
        owner: The run's present state.
        cutoff: Greatest length that it was trained on, or made for.
        trained: Whether it was trained in that folder.
        distribution: The task's first if None.
        asked_length: The length for all studies; each study's own if None.
    """

    model: Any
    task: Task
    folder: Path
    owner: Owner
    cutoff: int
    trained: bool = False
    distribution: str | None = None
    seed: int = 0
    asked_length: int | None = None

    @property
    def name(self) -> str:
        return self.folder.resolve().name

    @property
    def results(self) -> Path:
        """Folder of the saved results."""
        return self.folder / "results"

    def save(self, result: Result, name: str) -> Path:
        """Save a result with the run's provenance."""
        provenance = replace(result.provenance, run=self.owner.config)
        return replace(result, provenance=provenance).save(self.results, name)

    def own_file(self, name: str) -> Path:
        """The file of one of the run's results.

        Raises:
            CheckpointError: If it is missing, damaged, or of other weights.
        """
        path = self.results / f"{name}{SUFFIX}"
        if why := self.owner.disowns(load_result(path).provenance):
            what, expected = f"result {name!r}", "a result of the model's present weights"
            got, fix = f"one that {spell_mismatch(why)}", f"Run the study {name!r} again."
            raise CheckpointError(what, expected=expected, given=got, fix=fix)
        return path

    def length(self, n: int) -> int:
        """:attr:`asked_length`, else the greatest length up to n with room and few enough loops."""
        if self.asked_length is not None:
            return self.asked_length
        return self.with_room(n, lambda k: self.n_loops(k) <= MOST_LOOPS)

    def affordable(self, n: int) -> int:
        """The greatest length up to n with room and within :data:`MOST_WORK`."""
        seen = reach(self.model)

        def fits(k: int) -> bool:
            # Loops times the pairs of positions that attention compares: without a window, all.
            positions = self.task.n_positions(k)
            width = positions if seen is None else min(seen + 1, positions)
            return max(self.n_loops(k), 1) * positions * width <= MOST_WORK

        return self.with_room(n, fits)

    def with_room(self, n: int, fits: Callable[[int], bool] = lambda k: True) -> int:
        """The greatest length up to n that fits the predicate, the task and the model's positions.

        Else the shortest length of the task.
        """
        room = declared(self.model, "n_ctx")
        k = longest_length(self.task, n)
        while not fits(k) or (room is not None and self.task.n_positions(k) > room):
            # A task may lack problems of some lengths.
            shorter = longest_length(self.task, k - 1) if k > 1 else k
            if shorter >= k:
                break
            k = shorter
        return k

    def at_length(self, n: int) -> Session:
        """The same model with this length for all studies."""
        check_integer("length", n, least=1, far=MOST_TOKENS)
        check_size(self.task, n, 1, "length")
        longest, room = longest_length(self.task, n), declared(self.model, "n_ctx")
        positions = self.task.n_positions(n)
        has = f"length {longest}" if longest != n else f"{room} positions"
        expected = f"one that the task and the model have, which go to {has} here"
        got, fits = f"{n}, which takes {positions} positions", room is None or positions <= room
        need(longest == n and fits, "length", expected, got, "Choose another length.")
        return replace(self, asked_length=n)

    def n_loops(self, n: int) -> int:
        """Loops for problems of length n: T(n), or what the model's rule gives."""
        return loops_at(self.model, self.task, n)

    def examples(self, times: int, batch_size: int) -> Batch:
        """Examples of so many times the training cutoff, or as long as affordable."""
        return self.sample(self.length(times * self.cutoff), batch_size)

    def sample(self, n: int, batch_size: int, *, distribution: str | None = None) -> Batch:
        """Examples of one length; of the run's distribution if None."""
        batch = self.task.sample(
            n,
            batch_size=batch_size,
            generator=torch.Generator().manual_seed(self.seed),
            distribution=distribution or self.distribution,
        )
        return replace(batch, task=self.task).to(device_of(self.model))

    def programs(self) -> list[str]:
        """Stock programs that solve the task, with its settings and tokens."""
        names = []
        for name in list_programs():
            program = get_program(name)
            if program.task == self.task.name and len(program.inputs) == self.task.d_vocab:
                # A task with other settings is another task: its modulus, its alphabet.
                solved = get_task(program.task, **program.task_settings)
                if dict(solved.config()) == dict(self.task.config()):
                    names.append(name)
        return names


@checked
def open_run(folder: str | Path, *, seed: Seed = 0, device: str = "auto") -> Session:
    """Open a run's model and task on a device.

    Raises:
        CheckpointError: If the folder holds no run, or its files are damaged.
        InputError: If the device is not there.
    """
    run = _load_run(folder)
    model = run.model(device)
    config = config_hash(read_json(run.folder / CONFIG))
    return Session(
        model=model,
        task=run.task,
        folder=run.folder,
        # Of the weights that were read, not of the file, which a training may replace at any time.
        owner=Owner(config=config, weights=digest_tensors(every_tensor(model))),
        cutoff=run.cutoff,
        trained=run.is_trained,
        distribution=run.config.distribution,
        seed=seed,
    )


@checked
def load(folder: str | Path, *, device: str | torch.device = "cpu") -> LoopedTransformer:
    """The model of a run, with its task as ``model.task``.

    :meth:`loopinterp.training.Run.load` gives the run itself,
    :func:`~loopinterp.zoo.load_pretrained` a model of the zoo.
    """
    return _load_run(folder).model(device)


def _load_run(folder: str | Path) -> Run:
    name = str(folder)
    if name in zoo.list_names() and not os.path.isdir(name):
        expected, got = "the folder of a run", "the name of a model of the zoo"
        fix = f"Call load_pretrained({name!r}), or: loopinterp zoo {name} --out {name}"
        raise CheckpointError(f"run {name}", expected=expected, given=got, fix=fix)
    return Run.load(folder)


@checked
def keep_in_memory(
    model: LoopedModel | Any,
    task: Task,
    folder: str | Path,
    *,
    max_n: PositiveInt,
    origin: str,
    distribution: str | None = None,
    seed: Seed = 0,
) -> Session:
    """Open a model in memory, with a folder for its results and report.

    The folder's ``config.json`` describes the model; weights are not written.

    Raises:
        InputError: If model and task do not fit, or the folder holds another run, or a model that
            may differ.
    """
    need_model(model)
    need_task(task)
    need_model_of(task, model)
    folder, files = Path(folder), task_files(task)
    paths = {name: str(path) for name, path in files.items()}
    # Data files may change under the same name.
    digests = {name: digest_file(path) for name, path in files.items()}
    described = {
        "task": task.name,
        "task_settings": dict(task.config()) | paths,
        **({"data_sha256": digests} if digests else {}),
        "model": describe_model(model),
        IN_MEMORY: type(model).__name__,
        "max_n": max_n,
        "origin": origin,
        "distribution": distribution,
    }
    if (folder / CONFIG).is_file():
        # Through JSON, as the saved description went: tuples become lists.
        _check_same(folder, json.loads(json.dumps(described, default=json_default)))
    else:
        write_json(folder / CONFIG, described)
    return Session(
        model=model,
        task=task,
        folder=folder,
        owner=Owner.of_run(folder),
        cutoff=max_n,
        distribution=distribution,
        seed=seed,
    )


def _check_same(folder: Path, described: dict[str, Any]) -> None:
    """Raise if the folder may hold the results of another model."""
    saved = read_json_object(folder / CONFIG)
    differing = [name for name in described if saved.get(name) != described[name]]
    weights = "weights_sha256"
    model, former = described["model"], saved.get("model")

    def says_all(part: dict[str, Any] | str) -> bool:
        return isinstance(part, dict) and all(map(says_all, part.get("inside", {}).values()))

    has_weights = isinstance(model, dict) and weights in model and says_all(model)
    if has_weights and isinstance(former, dict) and former | {weights: model[weights]} == model:
        differing = ["weights" if name == "model" else name for name in differing]
    if not differing and has_weights:
        return
    unknown = "one of a model without weights, which may be another model"
    fix = "Choose another folder, or make the model a torch.nn.Module."
    raise InputError(
        f"output folder {folder}",
        expected="a folder without a run, or the one of the same model before",
        given=f"one of a run that differs in: {', '.join(differing)}" if differing else unknown,
        fix="Choose another folder." if has_weights else fix,
    )


CALIBRATED = "calibrated"
"""The stopping rule fitted on answers at training lengths."""


class _Number(NamedTuple):
    """The number of a rule: its type, its word in help, and its format in a label."""

    kind: type
    word: str
    label: str


_NUMBERS = {
    "tolerance": _Number(float, "TOLERANCE", " < {:g}"),
    "threshold": _Number(float, "THRESHOLD", " > {:g}"),
    "hold": _Number(int, "LOOPS", " {} loops"),
}
"""Numbers of stopping rules, by the field that holds them."""


def stopping_rules(names: Sequence[str]) -> dict[str, models.StoppingRule]:
    """Stopping rules from their names on the command line, by the names in results.

    Example:
        >>> stopping_rules(["residual=0.01"])
        {'residual < 0.01': ResidualBelow(tolerance=0.01)}
    """
    rules: dict[str, models.StoppingRule] = {}
    for text in names:
        name, _, number = text.partition("=")
        rule: Any = STOPPING_RULES[check_choice("stopping rule", name, [*STOPPING_RULES])]
        field = _number_field(rule)
        if number:
            try:
                value = _NUMBERS[field].kind(number)
            except (KeyError, ValueError):  # the rule takes no number, or not this one
                known = {other: _number_field(its) for other, its in STOPPING_RULES.items()}
                spelled = (f"{o}={_NUMBERS[f].word}" if f else o for o, f in known.items())
                raise InputError(
                    "stopping rule",
                    expected=f"{', '.join(spelled)} or {CALIBRATED}",
                    given=repr(text),
                    fix="Write residual=0.03, for instance.",
                ) from None
            rule = replace(rule, **{field: value})
        label = name.replace("-", " ").replace("kl", "KL").replace(" batch", " per batch")
        if field:
            label += _NUMBERS[field].label.format(getattr(rule, field))
        rules[label] = rule
    return rules


def _number_field(rule: Any) -> str:
    """The field of a rule's number; "" if it has none."""
    names = {field.name for field in fields(rule)}
    return next((name for name in _NUMBERS if name in names), "")


def calibrate_stopping(model: Session) -> models.LengthLine:
    """A line of loops against length, fitted on the upper half of the training lengths."""
    last = model.affordable(model.cutoff)
    # At most six lengths, evenly from the middle of the training lengths to their end.
    upper = last - last // 2
    steps = min(6, upper + 1) - 1
    evenly = (last // 2 + k * upper // max(steps, 1) for k in range(steps + 1))
    lengths = sorted({model.affordable(max(n, 1)) for n in evenly})
    return training.calibrate_stopping(model.model, model.task, lengths, seed=model.seed)
