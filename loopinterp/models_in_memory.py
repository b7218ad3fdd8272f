"""Studies and report of a model that is somebody else's, and stays where it is: in memory."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loopinterp.errors import InputError, check_integer
from loopinterp.models.looped_model import need_model
from loopinterp.models.model_description import describe_model
from loopinterp.saved_results import Owner
from loopinterp.storage import json_default, read_json_object, write_json
from loopinterp.studied_model import StudiedModel
from loopinterp.study_examples import need_model_of
from loopinterp.tasks.data_files import digest_file, task_files
from loopinterp.tasks.study_data import need_task
from loopinterp.training.run import CONFIG, IN_MEMORY
from loopinterp.workflow import Analysis, analyze, check_names, evaluate

if TYPE_CHECKING:
    from loopinterp.models import LoopedModel
    from loopinterp.tasks import Task


def analyze_model(
    model: LoopedModel | Any,
    task: Task,
    out: str | Path,
    *,
    max_n: int,
    origin: str | None = None,
    distribution: str | None = None,
    studies: Sequence[str] | None = None,
    samples: int = 300,
    seed: int = 0,
    progress: bool = True,
) -> Analysis:
    """Evaluate and study a model in memory, any :class:`~loopinterp.LoopedModel`.

    Results are saved in ``OUT/results``, and :func:`loopinterp.report.write_report` reads them
    there; the weights stay where they are. A ``LoopedTransformer`` is better put into a run with
    :meth:`loopinterp.training.Run.from_model`, which keeps them.

    Args:
        model: The model, in evaluation mode. An attribute ``n_ctx`` says how many positions it
            has room for, an attribute ``reach`` how far a loop sees to the left.
        task: What it is asked. A model with a vocabulary of its own is mapped to the task's by
            :class:`~loopinterp.models.WithVocabulary`.
        out: A folder without a run, or the one of the same model before.
        max_n: Greatest problem length that it was trained on, or made for.
        origin: Where it comes from, in words that go on after "The model was".
        distribution: Input distribution that is drawn from; the task's first if None.
        studies: As in :func:`~loopinterp.workflow.analyze_run`.
        samples: Examples for each length and distribution of the evaluation.
        seed: Seed of the examples.
        progress: Whether to say what is being done.

    Raises:
        InputError: As :func:`~loopinterp.workflow.analyze_run`, or if the folder holds another run.
    """
    check_names(studies)
    studied = keep_in_memory(
        model,
        task,
        out,
        max_n=max_n,
        origin=origin or f"given in memory, as a {type(model).__name__}",
        distribution=distribution,
        seed=seed,
    )
    found = analyze(studied, studies, progress)
    evaluate(studied, samples=samples, progress=progress)
    return found


def keep_in_memory(
    model: LoopedModel | Any,
    task: Task,
    folder: str | Path,
    *,
    max_n: int,
    origin: str,
    distribution: str | None = None,
    seed: int = 0,
) -> StudiedModel:
    """A model that stays in memory, with a folder for its results and its report.

    The folder's ``config.json`` says what the model is; weights are not written, as a module of
    somebody else's cannot be read back from its weights alone.

    Raises:
        InputError: If the model or the task is none, the two do not speak the same tokens, or the
            folder holds another run, or that of a model without weights, which may be another.
    """
    need_model(model)
    need_task(task)
    need_model_of(task, model)
    folder, files = Path(folder), task_files(task)
    paths = {name: str(path) for name, path in files.items()}
    digests = {name: digest_file(path) for name, path in files.items()}
    described = {
        "task": task.name,
        "task_settings": dict(task.config()) | paths,
        **({"data_sha256": digests} if digests else {}),
        "model": describe_model(model),
        IN_MEMORY: type(model).__name__,
        "max_n": check_integer("max_n", max_n, least=1),
        "origin": origin,
        "distribution": distribution,
    }
    if (folder / CONFIG).is_file():
        _need_same(folder, json.loads(json.dumps(described, default=json_default)))
    else:
        write_json(folder / CONFIG, described)
    return StudiedModel(
        model=model,
        task=task,
        folder=folder,
        owner=Owner.of_run(folder),
        cutoff=max_n,
        distribution=distribution,
        seed=seed,
    )


def _need_same(folder: Path, described: dict[str, Any]) -> None:
    """Raise unless a folder holds the results of this very model, as far as can be known."""
    kept = read_json_object(folder / CONFIG)
    given = ", ".join(name for name in described if kept.get(name) != described[name])
    weights = "weights_sha256"
    model, before = described["model"], kept.get("model")
    has_weights = isinstance(model, dict) and weights in model and _says_all(model)
    if has_weights and isinstance(before, dict) and before | {weights: model[weights]} == model:
        given = given.replace("model", "weights")
    if given or not has_weights:
        raise InputError(
            f"output folder {folder}",
            expected="a folder without a run, or the one of the same model before",
            given=f"one of a run that differs in: {given}"
            if given
            else "one of a model without weights, of which it is not known whether it is this one",
            fix="Choose another folder."
            if has_weights
            else "Choose another folder, or make the model a torch.nn.Module.",
        )


def _says_all(model: dict[str, Any] | str) -> bool:
    """Whether what is said of a model, and of those inside it, is more than a class."""
    return isinstance(model, dict) and all(map(_says_all, model.get("inside", {}).values()))
