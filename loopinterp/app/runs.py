"""Making runs: configurations, training, compilation, sweeps."""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import PositiveInt

from loopinterp import compiler, pages, programs, tasks, training
from loopinterp.core.boundary import checked
from loopinterp.core.errors import ConfigError, InputError, check_choice, need
from loopinterp.core.results import config_hash
from loopinterp.core.run_files import CONFIG, Owner, record_how_it_was_made, record_training
from loopinterp.core.settings import Seed
from loopinterp.core.storage import read_json

DEMO_RECIPE = "addition"


def configure(
    *,
    task: str | None = None,
    recipe: str | None = None,
    file: Path | None = None,
    settings: Sequence[str] = (),
    flags: Mapping[str, Any] | None = None,
    without_recipe: bool = False,
) -> training.TrainingConfig:
    """The configuration that a ``train`` command describes.

    Args:
        task: Start from its recipe, if that generalises.
        recipe: Another recipe to start from.
        file: JSON of a configuration to start from.
        settings: ``key=value`` each.
        flags: Settings with an option of their own; None if not given.
        without_recipe: Start from the demo's model, fitted to the task's inputs and outputs.

    Raises:
        InputError: If nothing says what to train, two things do, or the task has no recipe that
            generalises.
        ConfigError: If an option and a ``key=value`` name the same setting.
    """
    starts = {"--recipe": recipe, "--config": file, "--without-recipe": without_recipe or None}
    named, fix = [name for name, x in starts.items() if x is not None], "Leave one of them out."
    what, expected = "start of the configuration", "a recipe or a file"
    need(len(named) < 2, what, expected, " and ".join(named), fix)
    if file is not None:
        config = training.TrainingConfig.from_dict(read_json(file))
    elif recipe is not None:
        config = training.get_recipe(recipe).config
    elif task is not None and without_recipe:
        # The demo's recipe, fitted to the task's inputs and outputs.
        solved, start = tasks.get_task(task), training.RECIPES[DEMO_RECIPE]
        sizes = {size: getattr(solved, size) for size in ("d_vocab", "d_features", "d_vocab_out")}
        model = dataclasses.replace(start.model, **sizes)
        config = start.replace(task=task, model=model, distribution=None)
    elif task is not None:
        config = _recipe_of(task)
    else:
        raise InputError(
            "task",
            expected="--task NAME, --recipe NAME or --config FILE",
            given="none of them",
            fix="See `loopinterp tasks` for the names.",
        )
    expected = f"{config.task!r}, as the {'file' if file else 'recipe'} has it"
    other = "Leave --task out, or start from something made for that task."
    need(task in (None, config.task), "task", expected, repr(task), other, error=ConfigError)
    set_by_flag = {name: value for name, value in (flags or {}).items() if value is not None}
    for setting in settings:
        key = setting.partition("=")[0].strip()
        twice, once = f"--{key} and --set {setting}", key not in set_by_flag
        need(once, key, "it once", twice, fix, error=ConfigError)
    # Options are settings too, read by the same parser.
    flagged = (f"{name}={json.dumps(value)}" for name, value in set_by_flag.items())
    return training.apply_settings(config, [*settings, *flagged])


def _recipe_of(name: str) -> training.TrainingConfig:
    tasks.get_task(name)  # refused first if it is none
    known = {recipe: training.get_recipe(recipe) for recipe in training.list_recipes()}
    if name in known and known[name].generalises:
        return known[name].config
    working = [task for task in tasks.list_tasks() if task in known and known[task].generalises]
    # Recipes of the task under another name, which do not generalise.
    others = [recipe for recipe in known if known[recipe].config.task == name]
    instead = f"--recipe {others[0]} does not reach far; else" if others else ""
    raise InputError(
        f"recipe for {name}",
        expected=f"a task with one that generalises ({', '.join(working)})",
        given=f"{name}, which has none",
        fix=f"{instead or 'To train it all the same,'} add --without-recipe, which starts from the "
        "demo's model, and change it with --set; or give a --config.",
    )


def train_run(
    config: training.TrainingConfig, out: str | Path, *, progress: bool = True, resume: bool = True
) -> training.Run:
    """Train into a folder, or resume a run; see :func:`training.train`."""
    from loopinterp.training.device import is_first

    run = training.train(config, out, progress=progress, resume=resume)
    if is_first():
        record_training(run.folder, run.seconds)
    return run


def train_finite_run(
    config: training.TrainingConfig, out: str | Path, *, progress: bool = True, resume: bool = True
) -> list[training.FiniteStage]:
    """Train a model with a state code, dropping bits while it stays right: ``train_finite``."""
    stages = training.train_finite(config, out, progress=progress, resume=resume)
    first = shlex.quote(str(stages[0].run.folder / CONFIG))
    for stage in stages:
        if stage.chosen_start:  # no training of its own: all stages make it
            command = f"loopinterp train --config {first} --drop-bits --out NEW"
            record_how_it_was_made(stage.run.folder, command=command)
        else:
            record_training(stage.run.folder, stage.run.seconds)
    return stages


@checked
def compile_run(
    program: str,
    out: str | Path,
    *,
    max_length: PositiveInt,
    disguises: Sequence[str] = (),
    seed: Seed = 0,
) -> training.Run:
    """Compile a program into a run, which can be analysed and reported like a trained one.

    Args:
        max_length: Greatest length that the model has room for.
        disguises: ``distract``, ``permute``, ``superpose`` or ``rotate``, in order.
        seed: Seed of the disguises.
    """
    from loopinterp.compiler.validation import positions_of
    from loopinterp.training.run import MODEL, given_model_config, need_free_folder

    folder = Path(out)
    need_free_folder(folder)
    chosen = programs.get_program(program)
    for disguise in disguises:
        check_choice("disguise", disguise, ("distract", "permute", "superpose", "rotate"))
    task = tasks.get_task(chosen.task, **chosen.task_settings)
    n_positions = positions_of(task, max_length)
    compiled = compiler.compile_program(chosen, max_length=n_positions, n_outputs=task.d_vocab_out)
    for disguise in disguises:
        compiled = getattr(compiler, disguise)(compiled, seed=seed)
    # Weights and circuit first.
    compiled.circuit.save(folder / MODEL)
    origin = ", ".join([f"compiled from the program {program}", *compiled.circuit.disguises])
    config = given_model_config(compiled.model, task, max_n=max_length, origin=origin)
    # A seed matters only to disguises.
    hidden = "".join(f"--disguise {name} " for name in disguises)
    hidden += f"--seed {seed} " if disguises else ""
    command = f"loopinterp compile {program} --max-length {max_length} {hidden}--out NEW"
    owner = Owner(config=config_hash(config.to_dict()))
    record_how_it_was_made(folder, command=command, owner=owner)
    # The configuration comes last: a kill before leaves a folder that is no run.
    return training.Run.of_given_model(compiled.model, folder, config)


@checked
def sweep_file(
    file: str | Path,
    out: str | Path,
    *,
    settings: Sequence[str] = (),
    scale: str | None = None,
    only: Sequence[str] = (),
    jobs: PositiveInt | None = None,
    cluster: str | None = None,
    cluster_options: Sequence[str] = (),
    progress: bool = True,
) -> training.SweepResult:
    """Run or resume the experiment of a file, and write its page, ``OUT/sweep.html``.

    Args:
        file: The experiment, a :class:`~loopinterp.training.Sweep` as JSON.
        out: Folder of its runs, table and page (:func:`~loopinterp.training.run_sweep`).
        settings: Further changes, ``key=value`` each.
        scale: ``laptop`` or ``paper``, if it has them.
        only: Settings to run now; all if empty.
        jobs: Processes, or simultaneous jobs on a cluster.
        cluster: ``slurm`` runs each cell as a job.
        cluster_options: Parameters of submitit, ``key=value`` each.
    """
    from loopinterp.training.recipes import parse_value

    sweep = training.Sweep.read(file).at(scale)
    options = {}
    for option in cluster_options:
        key, equals, text = option.partition("=")
        fix = "Write for instance timeout_min=120."
        need(equals, "--cluster-set", "KEY=VALUE", repr(option), fix)
        options[key] = parse_value(text)
    page = pages.need_page(Path(out) / "sweep.html")  # refused before the hours are spent
    result = training.run_sweep(
        sweep.replace(set=(*sweep.set, *settings)),
        out,
        only=only,
        jobs=jobs,
        cluster=cluster,
        options=options,
        progress=progress,
    )
    pages.write_results({"sweep": result}, page, title=result.about)
    return result
