"""What the commands do: train, evaluate, analyse and report, one run folder through.

The studies themselves know neither training nor each other; this module wires them together.
"""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loopinterp.errors import ConfigError, InputError, unknown_name
from loopinterp.stages import Stages, record_how_it_was_made
from loopinterp.storage import read_json
from loopinterp.studies import RESULTS, STUDIES, open_run

if TYPE_CHECKING:
    from loopinterp.results import Finding, Result
    from loopinterp.studies import Study, Subject
    from loopinterp.training import Run, TrainingConfig
    from loopinterp.training.evaluation import EvaluationResult

DEMO_RECIPE = "addition"
DEMO_SAMPLES = 200
"""Examples for each length: enough to tell .99 from .95, in a minute at 144 positions."""


def configure(
    *,
    task: str | None = None,
    recipe: str | None = None,
    file: Path | None = None,
    settings: Sequence[str] = (),
    flags: Mapping[str, Any] | None = None,
) -> TrainingConfig:
    """The configuration that a ``train`` command asks for.

    Args:
        task: Name of a task; its recipe is the start.
        recipe: Name of a recipe, where it is not the task's own.
        file: JSON of a configuration, instead of a recipe.
        settings: ``key=value`` each.
        flags: Settings with an option of their own; None where the option was not given.

    Raises:
        InputError: If nothing says what to train, or two things say it differently.
        ConfigError: If an option and a ``key=value`` name the same setting.
    """
    from loopinterp.training import RECIPES, TrainingConfig, apply_settings

    if file is not None and recipe is not None:
        raise InputError(
            "start of the configuration",
            expected="a recipe or a file",
            given=f"--recipe {recipe} and --config {file}",
            fix="Leave one of them out.",
        )
    if file is not None:
        config = TrainingConfig.from_dict(read_json(file))
    elif recipe is not None:
        if recipe not in RECIPES:
            raise unknown_name("recipe", recipe, RECIPES)
        config = RECIPES[recipe]
    elif task is not None:
        config = RECIPES[task] if task in RECIPES else _plain_config(task)
    else:
        raise InputError(
            "task",
            expected="--task NAME, --recipe NAME or --config FILE",
            given="none of them",
            fix="See `loopinterp tasks` for the names.",
        )
    if task is not None and config.task != task:
        raise ConfigError(
            "task",
            expected=f"{config.task!r}, as the {'file' if file else 'recipe'} has it",
            given=repr(task),
            fix="Leave --task out, or start from something made for that task.",
        )
    given = {name: value for name, value in (flags or {}).items() if value is not None}
    for setting in settings:
        if (key := setting.partition("=")[0].strip()) in given:
            raise ConfigError(
                key,
                expected="it once",
                given=f"--{key} and --set {setting}",
                fix="Leave one of them out.",
            )
    return apply_settings(config, [*settings, *(f"{k}={json.dumps(v)}" for k, v in given.items())])


def _plain_config(name: str) -> TrainingConfig:
    """The demo's recipe, fitted to the inputs and outputs of a task that has none of its own."""
    from loopinterp.tasks import get_task
    from loopinterp.training import RECIPES

    task, start = get_task(name), RECIPES[DEMO_RECIPE]
    model = dataclasses.replace(
        start.model,
        d_vocab=task.d_vocab,
        d_features=task.d_features,
        d_vocab_out=task.d_vocab_out,
    )
    return start.replace(task=name, model=model, distribution=None)


def train_run(
    config: TrainingConfig, out: str | Path, *, progress: bool = True, resume: bool = True
) -> Run:
    """Train into a folder, or go on with a run that was stopped; see :func:`training.train`."""
    from loopinterp.training import train

    run = train(config, out, progress=progress, resume=resume)
    file = shlex.quote(str(run.folder / "config.json"))
    record_how_it_was_made(
        run.folder, f"loopinterp train --config {file} --out NEW", {"train": run.seconds}
    )
    return run


def evaluate_run(
    folder: str | Path,
    *,
    lengths: Sequence[int] | None = None,
    distributions: Sequence[str] | None = None,
    samples: int = 300,
    seed: int = 0,
    device: str = "auto",
    progress: bool = True,
) -> EvaluationResult:
    """Exact match by length, saved in ``RUN/results/generalisation.json``.

    Args:
        folder: The run.
        lengths: Problem lengths; 1, 2, 4, 8 and 12 times the training cutoff if None.
        distributions: Input distributions; the plain one and the hardest if None.
        samples: Examples for each length and distribution.
        seed: Seed of the examples.
        device: ``auto``, ``cpu`` or ``cuda``.
        progress: Whether to say what is being done.
    """
    from loopinterp.tasks.sampling import pick_distribution
    from loopinterp.training import evaluate

    subject, stages = open_run(folder, seed=seed, device=device), Stages(show=progress)
    for distribution in distributions or ():
        pick_distribution(subject.task, distribution)  # refused before a stage is said to begin
    with stages.stage("generalisation", "is it right beyond its training lengths?"):
        result = evaluate(
            subject.model,
            subject.task,
            [subject.cutoff * k for k in (1, 2, 4, 8, 12)] if lengths is None else lengths,
            distributions=distributions,
            n_samples=samples,
            trained_up_to=subject.cutoff,
            seed=seed,
        )
    result.save(subject.run.folder / RESULTS, "generalisation")
    record_how_it_was_made(subject.run.folder, None, stages.seconds)
    return result


def analyze_run(
    folder: str | Path,
    *,
    studies: Sequence[str] | None = None,
    seed: int = 0,
    device: str = "auto",
    progress: bool = True,
) -> dict[str, Result]:
    """Run studies on a run's model; each result is saved in ``RUN/results`` as it is done.

    Args:
        folder: The run.
        studies: Names of studies, in any order; all that fit the task if None.
        seed: Seed of the examples.
        device: ``auto``, ``cpu`` or ``cuda``.
        progress: Whether to say what is being done.

    Raises:
        InputError: If a study is unknown, does not fit the task, or needs another one's result.
    """
    known = {study.name: study for study in STUDIES}
    for name in studies or ():
        if name not in known:
            raise unknown_name("study", name, known)
    subject, stages = open_run(folder, seed=seed, device=device), Stages(show=progress)
    chosen = [study for study in STUDIES if not studies or study.name in studies]
    if studies:
        _check_studies(chosen, subject)
    results: dict[str, Result] = {}
    for study in chosen:
        if study.fits(subject.task):
            with stages.stage(study.name, study.about):
                results[study.name] = study.run(subject)
                results[study.name].save(subject.run.folder / RESULTS, study.name)
    record_how_it_was_made(subject.run.folder, None, stages.seconds)
    return results


def _check_studies(chosen: Sequence[Study], subject: Subject) -> None:
    """Refuse studies that cannot be run before the first one begins."""
    for study in chosen:
        if not study.fits(subject.task):
            raise InputError(
                f"study {study.name!r}",
                expected=f"a run of the task {' or '.join(study.tasks)}",
                given=f"one of {subject.task.name}",
                fix="Leave the study out.",
            )
        needed = study.needs
        if needed is None or needed in {other.name for other in chosen}:
            continue
        if not (subject.run.folder / RESULTS / f"{needed}.json").is_file():
            raise InputError(
                f"study {study.name!r}",
                expected=f"a run with the result of the study {needed!r}",
                given="one without it",
                fix=f"Add --study {needed}.",
            )


def report_run(folder: str | Path, *, out: str | Path | None = None) -> Path:
    """Write the report of a run from its saved results."""
    from loopinterp.report import write_report

    return write_report(folder, out)


def demo(
    out: str | Path,
    *,
    seed: int | None = None,
    settings: Sequence[str] = (),
    threads: int | None = None,
    progress: bool = True,
) -> Path:
    """Train the demo's model, study it, and write the report.

    Args:
        out: Folder of the run; one that was stopped is gone on with.
        seed: Seed of weights, data and studies; the recipe's if None.
        settings: Changes to the demo's recipe, ``key=value`` each.
        threads: CPU threads; the recipe's if None.
        progress: Whether to say what is being done.

    Returns:
        The report.
    """
    from loopinterp.training.device import cpu_threads

    flags = {"seed": seed, "threads": threads}
    config = configure(recipe=DEMO_RECIPE, settings=settings, flags=flags)
    stages = Stages(show=progress)
    with stages.stage("train", f"{config.steps} steps on {config.task}"):
        run = train_run(config, out, progress=progress)
    with cpu_threads(config.threads):
        evaluate_run(run.folder, samples=DEMO_SAMPLES, seed=config.seed, progress=progress)
        analyze_run(run.folder, seed=config.seed, progress=progress)
    given = [f" --{name} {value}" for name, value in flags.items() if value is not None]
    given += [f" --set {shlex.quote(setting)}" for setting in settings]
    command = f"loopinterp demo --out {shlex.quote(str(out))}{''.join(given)}"
    record_how_it_was_made(run.folder, command, {})
    with stages.stage("report", "one HTML file"):
        return report_run(run.folder)


def findings_of(results: Iterable[Result]) -> list[Finding]:
    """What results say in plain words: verdicts first, then in the order of the report."""
    from loopinterp.report.sections import SECTIONS

    order = {kind: place for place, kind in enumerate(["verdict", *(s.key for s in SECTIONS)])}
    found = [finding for result in results for finding in result.summary()]
    return sorted(found, key=lambda finding: order.get(finding.kind, len(order)))


def saved_results(folder: str | Path) -> dict[str, Result]:
    """The results in a run's folder, by name."""
    from loopinterp.results import load_result

    return {path.stem: load_result(path) for path in sorted(Path(folder, RESULTS).glob("*.json"))}


def list_task_facts() -> list[dict[str, Any]]:
    """What there is to know about each task, by name of the fact."""
    from loopinterp.tasks import get_task, list_tasks

    facts = []
    for name in list_tasks():
        task = get_task(name)
        facts.append(
            {
                "task": name,
                "asks": task.describe(),
                "input": f"tokens 0..{task.d_vocab - 1}"
                if task.d_vocab
                else f"{task.d_features} numbers a position",
                "outputs": task.d_vocab_out,
                "loops T(n)": {f"n={n}": task.n_loops(n) for n in (4, 8, 16)},
                "distributions": list(task.distributions),
            }
        )
    return facts


def list_model_facts(name: str | None = None) -> list[dict[str, Any]]:
    """The model of each recipe, or one recipe with its whole configuration.

    Raises:
        InputError: If the recipe is unknown.
    """
    from loopinterp.models import LoopedTransformer
    from loopinterp.training import RECIPES

    if name is not None and name not in RECIPES:
        raise unknown_name("model", name, RECIPES)
    facts = []
    for recipe in sorted(RECIPES) if name is None else [name]:
        config = RECIPES[recipe]
        weights = sum(p.numel() for p in LoopedTransformer(config.model).parameters())
        about = {"recipe": recipe, "task": config.task, "weights": weights}
        model = config.model.to_dict()
        short = ("n_layers", "d_model", "n_heads", "positions", "norm", "loop_norm", "injection")
        if name is None:
            facts.append(about | {key: model[key] for key in short})
        else:
            facts.append(about | config.to_dict())
    return facts
