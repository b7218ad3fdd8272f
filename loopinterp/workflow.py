"""What the commands do: train or compile, evaluate, analyse and report, one run folder through.

The studies themselves know neither training nor each other; this module wires them together.
"""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from loopinterp import models, rasp, report, tasks, training, zoo
from loopinterp.errors import ConfigError, InputError, check_choice, check_integer
from loopinterp.results import SUFFIX, config_hash
from loopinterp.saved_results import Owner
from loopinterp.stages import Stages, record_how_it_was_made, record_training
from loopinterp.storage import read_json
from loopinterp.studied_model import open_run
from loopinterp.studies import STUDIES

if TYPE_CHECKING:
    from loopinterp.results import Finding, Result
    from loopinterp.studied_model import StudiedModel
    from loopinterp.studies import Study
    from loopinterp.training.evaluation import EvaluationResult

DEMO_RECIPE = "addition"
DEMO_SAMPLES = 200
"""Examples for each length: enough to tell .99 from .95, in a minute at 144 positions."""

FINITE_MODEL = "addition-finite"
"""The zoo's model that the demo puts beside its own, and what is asked of it."""

FINITE_STUDIES = ("explorer", "convergence", "decompilation")
FINITE_TIMES = (1, 2, 4)
"""Its answers are looked at at so many times its cutoff, and its program at twice that."""

DISGUISES = ("distract", "permute", "superpose", "rotate")
"""What can be done to a compiled model so that its circuit is not to be seen in its weights."""

STOPPING: Mapping[str, models.StoppingRule] = MappingProxyType(
    {
        "max-confidence": models.MaxConfidence(),
        "max-confidence-batch": models.MaxConfidence(per="batch"),
        "residual": models.ResidualBelow(0.03),
        "readout-kl": models.ReadoutKL(5e-4),
        "acceleration": models.AccelerationBelow(0.03),
        "answer-held": models.AnswerHeld(3),
    }
)
"""Rules that read the answer without being told T(n), by the names that a command has for them."""

CALIBRATED = "calibrated"
"""The rule that is learned from right answers of training lengths."""

_CALIBRATION_LENGTHS = 6

UNFINISHED_GRID = "grid.unfinished.safetensors"
"""In a run's folder: the cells of a grid that was stopped."""


@dataclass(frozen=True, kw_only=True)
class Analysis:
    """What :func:`analyze_run` found.

    Attributes:
        results: The result of each study.
        files: Where each was saved.
        unsaid: Studies that say nothing of this model, each with the reason.
        left_out: Studies that ask nothing of its task, each with the reason.
    """

    results: dict[str, Result]
    files: dict[str, Path]
    unsaid: dict[str, str]
    left_out: dict[str, str]


def configure(
    *,
    task: str | None = None,
    recipe: str | None = None,
    file: Path | None = None,
    settings: Sequence[str] = (),
    flags: Mapping[str, Any] | None = None,
    without_recipe: bool = False,
) -> training.TrainingConfig:
    """The configuration that a ``train`` command asks for.

    Args:
        task: Name of a task; its recipe is the start, if its models generalise.
        recipe: Name of a recipe, where it is not the task's own.
        file: JSON of a configuration, instead of a recipe.
        settings: ``key=value`` each.
        flags: Settings with an option of their own; None where the option was not given.
        without_recipe: Whether the start is the demo's model, fitted to the task's inputs and
            outputs, of which nobody has measured what it learns.

    Raises:
        InputError: If nothing says what to train, two things say it differently, or the task has
            no recipe that generalises.
        ConfigError: If an option and a ``key=value`` name the same setting.
    """
    starts = {"--recipe": recipe, "--config": file, "--without-recipe": without_recipe or None}
    if len(both := [option for option, value in starts.items() if value is not None]) > 1:
        raise InputError(
            "start of the configuration",
            expected="a recipe or a file",
            given=" and ".join(both),
            fix="Leave one of them out.",
        )
    if file is not None:
        config = training.TrainingConfig.from_dict(read_json(file))
    elif recipe is not None:
        config = training.get_recipe(recipe).config
    elif task is not None:
        config = _plain_config(task) if without_recipe else _recipe_of(task)
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
    flagged = (f"{name}={json.dumps(value)}" for name, value in given.items())
    return training.apply_settings(config, [*settings, *flagged])


def _recipe_of(name: str) -> training.TrainingConfig:
    """The recipe that is named as the task, if it is known to do what one expects of it."""
    tasks.get_task(name)  # refused first if it is none
    known = {recipe: training.get_recipe(recipe) for recipe in training.list_recipes()}
    if name in known and known[name].generalises:
        return known[name].config
    working = [task for task in tasks.list_tasks() if task in known and known[task].generalises]
    others = [recipe for recipe in known if known[recipe].config.task == name]
    instead = f"--recipe {others[0]} does not reach far; else" if others else ""
    raise InputError(
        f"recipe for {name}",
        expected=f"a task with one that generalises ({', '.join(working)})",
        given=f"{name}, which has none",
        fix=f"{instead or 'To train it all the same,'} add --without-recipe, which starts from the "
        "demo's model, and change it with --set; or give a --config.",
    )


def _plain_config(name: str) -> training.TrainingConfig:
    """The demo's recipe, fitted to the inputs and outputs of a task that has none of its own."""
    task, start = tasks.get_task(name), training.RECIPES[DEMO_RECIPE]
    model = dataclasses.replace(
        start.model,
        d_vocab=task.d_vocab,
        d_features=task.d_features,
        d_vocab_out=task.d_vocab_out,
    )
    return start.replace(task=name, model=model, distribution=None)


def train_run(
    config: training.TrainingConfig, out: str | Path, *, progress: bool = True, resume: bool = True
) -> training.Run:
    """Train into a folder, or go on with a run that was stopped; see :func:`training.train`."""
    from loopinterp.training.processes import is_first

    run = training.train(config, out, progress=progress, resume=resume)
    if is_first():
        record_training(run.folder, run.seconds)
    return run


def train_finite_run(
    config: training.TrainingConfig, out: str | Path, *, progress: bool = True, resume: bool = True
) -> list[training.FiniteStage]:
    """Train a model with a state code and drop bits while it stays right: ``train_finite``."""
    stages = training.train_finite(config, out, progress=progress, resume=resume)
    for stage in stages:
        record_training(stage.run.folder, stage.run.seconds)
    return stages


def compile_run(
    program: str,
    out: str | Path,
    *,
    max_length: int,
    disguises: Sequence[str] = (),
    seed: int = 0,
) -> training.Run:
    """Compile a program into a run that is analysed and reported like a trained one.

    Args:
        program: Name of a stock program.
        out: A folder without a run.
        max_length: Greatest problem length that the model has room for.
        disguises: Of :data:`DISGUISES`, in the order in which they are put on.
        seed: Seed of the disguises.

    Raises:
        InputError: If a name is unknown, the program cannot be compiled, or the folder is taken.
    """
    from loopinterp.training.run import MODEL, given_model_config, need_free_folder

    folder = Path(out)
    need_free_folder(folder)
    chosen = rasp.get_program(program)
    check_integer("max_length", max_length, least=1)
    for disguise in disguises:
        check_choice("disguise", disguise, DISGUISES)
    task = tasks.get_task(chosen.task, **chosen.task_settings)
    compiled = rasp.compile_program(
        chosen, max_length=task.n_positions(max_length), n_outputs=task.d_vocab_out
    )
    for disguise in disguises:
        compiled = getattr(rasp, disguise)(compiled, seed=seed)
    compiled.circuit.save(folder / MODEL)
    origin = ", ".join([f"compiled from the program {program}", *compiled.circuit.disguises])
    config = given_model_config(compiled.model, task, max_n=max_length, origin=origin)
    options = [f"--max-length {max_length}", *(f"--disguise {name}" for name in disguises)]
    options += [f"--seed {seed}"] if disguises else []
    command = f"loopinterp compile {program} {' '.join(options)} --out NEW"
    owner = Owner(config=config_hash(config.to_dict()))
    record_how_it_was_made(folder, command=command, owner=owner)
    # The configuration comes last: a kill before leaves a folder that is no run.
    return training.Run.of_given_model(compiled.model, folder, config)


def evaluate_run(
    folder: str | Path,
    *,
    lengths: Sequence[int] | None = None,
    distributions: Sequence[str] | None = None,
    loops: Sequence[int] = (),
    stop: Sequence[str] = (),
    samples: int = 300,
    seed: int = 0,
    device: str = "auto",
    progress: bool = True,
) -> EvaluationResult:
    """Exact match by length, saved in ``RUN/results``.

    Args:
        folder: The run.
        lengths: Problem lengths; 1, 2, 4, 8 and 12 times the training cutoff if None, as far as
            the task has them, the model has room for them, and an example takes no more than
            :data:`~loopinterp.studied_model.MOST_WORK`.
        distributions: Input distributions; all of the task if None.
        loops: Numbers of loops to read the answer after, whatever the length.
        stop: Stopping rules to compare with reading the answer at T(n): each one of
            :data:`STOPPING`, with its number if wanted (``residual=0.01``), or
            :data:`CALIBRATED`.
        samples: Examples for each length and distribution.
        seed: Seed of the examples.
        device: ``auto``, ``cpu`` or ``cuda``.
        progress: Whether to say what is being done.
    """
    return evaluate(
        open_run(folder, seed=seed, device=device),
        lengths=lengths,
        distributions=distributions,
        loops=loops,
        stop=stop,
        samples=samples,
        progress=progress,
    )


def evaluate(
    model: StudiedModel,
    *,
    lengths: Sequence[int] | None = None,
    distributions: Sequence[str] | None = None,
    loops: Sequence[int] = (),
    stop: Sequence[str] = (),
    samples: int,
    progress: bool,
) -> EvaluationResult:
    """:func:`evaluate_run`, of a model that is open already."""
    from loopinterp.tasks.sampling import pick_distribution

    for distribution in distributions or ():
        pick_distribution(model.task, distribution)  # refused before a stage is said to begin
    rules = stopping_rules([name for name in stop if name != CALIBRATED])
    stages = Stages(model.folder, show=progress)
    with stages.stage("generalisation", "is it right beyond its training lengths?"):
        if CALIBRATED in stop:
            rules[CALIBRATED] = calibrate_stopping(model)
        result = training.evaluate(
            model.model,
            model.task,
            _lengths(model) if lengths is None else lengths,
            distributions=distributions,
            loops=loops,
            stopping=rules,
            n_samples=samples,
            trained_up_to=model.cutoff if model.trained else None,
            seed=model.seed,
        )
        model.save(result, "generalisation")
    return result


def grid_run(
    folder: str | Path,
    *,
    to: int,
    loops: Sequence[int] = (1, 2, 4, 8, 16, 32),
    samples: int = 100,
    seed: int = 0,
    device: str = "auto",
    progress: bool = True,
) -> training.OperandGrid:
    """Exact match by both operand lengths, saved in ``RUN/results``; one that was stopped goes on.

    Args:
        folder: The run.
        to: Greatest length of each operand.
        loops: Numbers of loops.
        samples: Examples for each pair of lengths.
        seed: Seed of the examples.
        device: ``auto``, ``cpu`` or ``cuda``.
        progress: Whether to say what is being done.
    """
    model = open_run(folder, seed=seed, device=device)
    unfinished = model.folder / UNFINISHED_GRID
    with Stages(model.folder, show=progress).stage("grid", "is it right at all pairs of lengths?"):
        result = training.operand_grid(
            model.model,
            model.task,
            to,
            loops=loops,
            n_samples=samples,
            trained_up_to=model.cutoff if model.trained else None,
            unfinished=unfinished,
            seed=model.seed,
        )
        model.save(result, "grid")
        unfinished.unlink(missing_ok=True)
    return result


def sweep_file(
    file: str | Path,
    out: str | Path,
    *,
    settings: Sequence[str] = (),
    scale: str | None = None,
    only: Sequence[str] = (),
    jobs: int | None = None,
    cluster: str | None = None,
    cluster_options: Sequence[str] = (),
    progress: bool = True,
) -> training.SweepResult:
    """Run the experiment of a file, or go on with it, and write its page, ``OUT/sweep.html``.

    Args:
        file: The experiment, as :class:`~loopinterp.training.Sweep` has it.
        out: Folder of its runs, table and page; see :func:`~loopinterp.training.run_sweep`.
        settings: More changes of the base, ``key=value`` each.
        scale: ``laptop`` or ``paper``, of those that it has.
        only: Settings to run now; all if empty.
        jobs: Processes, or most jobs at the same time on a cluster.
        cluster: ``slurm``, to run each cell as a job there.
        cluster_options: Parameters of submitit, ``key=value`` each.
        progress: Whether to show a bar.
    """
    from loopinterp.training.overrides import parse_value

    sweep = training.Sweep.read(file).at(scale)
    options = {}
    for option in cluster_options:
        key, equals, text = option.partition("=")
        if not equals:
            fix = "Write for instance timeout_min=120."
            raise InputError("--cluster-set", expected="KEY=VALUE", given=repr(option), fix=fix)
        options[key] = parse_value(text)
    page = report.need_page(Path(out) / "sweep.html")  # refused before the hours are spent
    result = training.run_sweep(
        sweep.replace(set=(*sweep.set, *settings)),
        out,
        only=only,
        jobs=jobs,
        cluster=cluster,
        options=options,
        progress=progress,
    )
    report.write_results({"sweep": result}, page, title=result.about)
    return result


def _lengths(model: StudiedModel) -> list[int]:
    """Lengths far beyond training; where there is no room for those, parts of what there is."""
    beyond = sorted({model.affordable(model.cutoff * k) for k in (1, 2, 4, 8, 12)})
    if len(beyond) > 1:
        return beyond
    return sorted({model.affordable(max(beyond[0] // k, 1)) for k in (1, 2, 4)})


def calibrate_stopping(model: StudiedModel) -> models.LengthLine:
    """The line of loops against length, learned on the upper half of the training lengths."""
    lengths = _calibration_lengths(model)
    return training.calibrate_stopping(model.model, model.task, lengths, seed=model.seed)


def _calibration_lengths(model: StudiedModel) -> list[int]:
    last = model.affordable(model.cutoff)
    steps = min(_CALIBRATION_LENGTHS, last - last // 2 + 1) - 1
    return sorted(
        {
            model.affordable(max(last // 2 + k * (last - last // 2) // max(steps, 1), 1))
            for k in range(steps + 1)
        }
    )


def stopping_rules(wanted: Sequence[str]) -> dict[str, models.StoppingRule]:
    """Stopping rules as a command line names them, by the names that results show.

    Example:
        >>> stopping_rules(["residual=0.01"])
        {'residual < 0.01': ResidualBelow(tolerance=0.01)}

    Raises:
        InputError: If a rule is unknown, or its number is out of range.
    """
    rules: dict[str, models.StoppingRule] = {}
    for text in wanted:
        name, _, given = text.partition("=")
        rule = STOPPING[check_choice("stopping rule", name, [*STOPPING])]
        try:
            rule = _with_number(rule, given) if given else rule
        except InputError:  # by the rule itself, of a number that is none of its
            raise
        except (TypeError, ValueError):
            raise InputError(
                "stopping rule",
                expected=f"{', '.join(map(_spelled, STOPPING))} or {CALIBRATED}",
                given=repr(text),
                fix="Write residual=0.03, for instance.",
            ) from None
        rules[_label(name, rule)] = rule
    return rules


def _with_number(rule: Any, given: str) -> models.StoppingRule:
    if isinstance(rule, models.AnswerHeld):
        return dataclasses.replace(rule, hold=int(given))
    return dataclasses.replace(rule, tolerance=float(given))


def _spelled(name: str) -> str:
    rule = STOPPING[name]
    number = "LOOPS" if isinstance(rule, models.AnswerHeld) else "TOLERANCE"
    return f"{name}={number}" if rule.tolerance is not None else name


def _label(name: str, rule: models.StoppingRule) -> str:
    if isinstance(rule, models.AnswerHeld):
        return f"answer held {rule.hold} loops"
    label = name.replace("-", " ").replace("kl", "KL").replace(" batch", " per batch")
    return f"{label} < {rule.tolerance:g}" if rule.tolerance else label


def analyze_run(
    folder: str | Path,
    *,
    studies: Sequence[str] | None = None,
    length: int | None = None,
    seed: int = 0,
    device: str = "auto",
    progress: bool = True,
) -> Analysis:
    """Run studies on a run's model; each result is saved in ``RUN/results`` as it is done.

    Args:
        folder: The run.
        studies: Names of studies, in any order; all that ask something of the task if None, those
            that can say nothing of this model left out with the reason.
        length: Problem length of the examples; each study's own if None, which the training
            cutoff, the task and the model's room decide.
        seed: Seed of the examples.
        device: ``auto``, ``cpu`` or ``cuda``.
        progress: Whether to say what is being done.

    Raises:
        InputError: If a study that was asked for is unknown, can say nothing of this model, or
            needs another one's result.
    """
    check_names(studies)
    model = open_run(folder, seed=seed, device=device)
    return analyze(model if length is None else model.at_length(length), studies, progress)


def check_names(studies: Sequence[str] | None) -> None:
    """Refuse names that are no study's."""
    for name in studies or ():
        check_choice("study", name, [study.name for study in STUDIES])


def analyze(model: StudiedModel, studies: Sequence[str] | None, progress: bool) -> Analysis:
    """:func:`analyze_run`, of a model that is open already."""
    stages = Stages(model.folder, show=progress, owner=model.owner)
    chosen = [s for s in STUDIES if (s.name in studies if studies else s.concerns(model))]
    unsaid = {study.name: "" for study in _check_studies(chosen, model)} if studies else {}
    others = [s for s in STUDIES if not studies and not s.concerns(model)]
    left_out = {study.name: study.unsaid(model) for study in others}
    done = Analysis(results={}, files={}, unsaid={}, left_out=left_out)
    for study in chosen:
        if reason := unsaid[study.name] if study.name in unsaid else study.unsaid(model):
            if studies:
                raise _unsaid(study, reason)
            stages.unsaid(study.name, reason)
            done.unsaid[study.name] = reason
            continue
        with stages.stage(study.name, study.about):
            result = study.run(model)
            done.files[study.name] = model.save(result, study.name)
            done.results[study.name] = result
    return done


def _check_studies(chosen: Sequence[Study], model: StudiedModel) -> list[Study]:
    """Refuse studies that cannot be run before the first one begins.

    Returns:
        Those that can whatever the others find: what is asked of them need not be asked again.
    """
    names = {study.name for study in chosen}
    for study in chosen:
        if reason := study.unsaid(model):
            raise _unsaid(study, reason)
        needed = study.needs
        if needed is None or needed in names:
            continue
        if (model.results / f"{needed}{SUFFIX}").is_file():
            model.own_file(needed)  # refused if it is of other weights
        else:
            raise InputError(
                f"study {study.name!r}",
                expected=f"a run with the result of the study {needed!r}",
                given="one without it",
                fix=f"Add --study {needed}.",
            )
    return [study for study in chosen if study.needs not in names]


def _unsaid(study: Study, reason: str) -> InputError:
    return InputError(
        f"study {study.name!r}",
        expected="a run of which it can say something",
        given=f"one of which it cannot, because {reason}",
        fix="Leave the study out.",
    )


@dataclass(frozen=True, kw_only=True)
class DemoPages:
    """What :func:`demo` writes.

    Attributes:
        report: Of the model that it trains.
        finite: Of the zoo's finite-state model.
        comparison: Both side by side.
    """

    report: Path
    finite: Path
    comparison: Path


def demo(
    out: str | Path,
    *,
    seed: int | None = None,
    settings: Sequence[str] = (),
    threads: int | None = None,
    progress: bool = True,
) -> DemoPages:
    """Train the demo's model and study it, beside one that is a program; write the reports.

    Args:
        out: Folder of the run; one that was stopped is gone on with.
        seed: Seed of weights, data and studies; the recipe's if None.
        settings: Changes to the demo's recipe, ``key=value`` each.
        threads: CPU threads; the recipe's if None.
        progress: Whether to say what is being done.

    Returns:
        The pages.
    """
    from loopinterp.training.device import cpu_threads

    flags = {"seed": seed, "threads": threads}
    config = configure(recipe=DEMO_RECIPE, settings=settings, flags=flags)
    stages = Stages(show=progress)
    comparison, beside = Path(out) / "comparison.html", Path(out) / "finite-state"
    for page in (Path(out) / "report.html", beside / "report.html", comparison):
        report.need_page(page)  # refused before minutes are spent
    finite = zoo.load_pretrained(FINITE_MODEL, beside).folder
    with stages.stage("train", f"{config.steps} steps on {config.task}"):
        run = train_run(config, out, progress=progress)
    with cpu_threads(config.threads):
        evaluate_run(run.folder, samples=DEMO_SAMPLES, seed=config.seed, progress=progress)
        analyze_run(run.folder, seed=config.seed, progress=progress)
        _study_finite(finite, seed=config.seed, progress=progress)
    given = [f" --{name} {value}" for name, value in flags.items() if value is not None]
    given += [f" --set {shlex.quote(setting)}" for setting in settings]
    command = f"loopinterp demo --out {shlex.quote(str(out))}{''.join(given)}"
    record_how_it_was_made(run.folder, command=command)
    with stages.stage("report", "one HTML file each"):
        return DemoPages(
            report=report.write_report(run.folder),
            finite=report.write_report(finite),
            comparison=report.write_comparison([finite, run.folder], comparison),
        )


def _study_finite(folder: Path, **options: Any) -> None:
    """What the demo asks of the finite-state model, in a minute."""
    cutoff = training.Run.load(folder).cutoff
    lengths = [k * cutoff for k in FINITE_TIMES]
    evaluate_run(folder, lengths=lengths, samples=DEMO_SAMPLES, **options)
    analyze_run(folder, studies=FINITE_STUDIES, **options)
    analyze_run(folder, studies=["programs"], length=2 * cutoff, **options)


def in_reading_order(results: Iterable[Result]) -> list[Finding]:
    """What results say in plain words: verdicts first, then in the order of the report."""
    from loopinterp.report.sections import SECTIONS

    order = {kind: place for place, kind in enumerate(["verdict", *(s.key for s in SECTIONS)])}
    found = [finding for result in results for finding in result.findings()]
    return sorted(found, key=lambda finding: order.get(finding.kind, len(order)))


def list_task_facts() -> list[dict[str, Any]]:
    """What there is to know about each task, by name of the fact."""
    return [
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
        for name in tasks.list_tasks()
        for task in [tasks.get_task(name)]
    ]


def list_recipe_facts() -> list[dict[str, Any]]:
    """What there is to know about each recipe in short, by name of the fact."""
    facts = []
    for name in training.list_recipes():
        recipe = training.get_recipe(name)
        config, measured = recipe.config, recipe.measured
        weights = models.LoopedTransformer(config.model).parameters()
        facts.append(
            {
                "recipe": name,
                "task": config.task,
                "about": recipe.about,
                "weights": sum(p.numel() for p in weights),
                "minutes": measured.minutes,
                "trained to": config.curriculum.max_n,
                "exact match": {f"n={n}": round(p, 3) for n, p in measured.worst().items()},
                "seeds": list(measured.seeds),
            }
        )
    return facts
