"""What the commands do with a run: evaluate, analyse, report, and the demo."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import NonNegativeInt, PositiveInt

from loopinterp import pages, training, zoo
from loopinterp.app.catalogue import STUDIES
from loopinterp.app.runs import DEMO_RECIPE, configure, train_run
from loopinterp.app.session import (
    CALIBRATED,
    Session,
    calibrate_stopping,
    keep_in_memory,
    open_run,
    stopping_rules,
)
from loopinterp.app.study import spell_skip
from loopinterp.core.boundary import checked
from loopinterp.core.errors import InputError, check_choice, need, spell_error
from loopinterp.core.results import SUFFIX, load_result
from loopinterp.core.run_files import MADE, record_how_it_was_made
from loopinterp.core.settings import Seed
from loopinterp.core.storage import read_json
from loopinterp.core.text import Stages

if TYPE_CHECKING:
    from loopinterp.app.study import Skip, Study
    from loopinterp.core.results import Finding, Result
    from loopinterp.models import LoopedModel
    from loopinterp.tasks import Task
    from loopinterp.training.evaluation import EvaluationResult


@dataclass(frozen=True, kw_only=True)
class Analysis:
    """Results of :func:`analyze_run`, by study.

    Attributes:
        results: The results; ``files`` has their paths.
        skipped: Why studies do not apply to this model.
        left_out: Why studies do not apply to its task.
        failed: Errors of studies, where all were to be run.
    """

    results: dict[str, Result] = field(default_factory=dict)
    files: dict[str, Path] = field(default_factory=dict)
    skipped: dict[str, Skip] = field(default_factory=dict)
    left_out: dict[str, Skip] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)


@checked
def evaluate_run(
    run: str | Path | Session,
    *,
    lengths: Sequence[PositiveInt] | None = None,
    distributions: Sequence[str] | None = None,
    loops: Sequence[NonNegativeInt] = (),
    stop: Sequence[str] = (),
    stopping_reads: Literal["answer", "state"] = "answer",
    max_loops: NonNegativeInt | None = None,
    samples: PositiveInt = 300,
    seed: Seed = 0,
    device: str = "auto",
    progress: bool = True,
) -> EvaluationResult:
    """Exact match by length, saved in ``RUN/results``.

    Args:
        run: Folder of a run, or an open model, which decides seed and device.
        lengths: If None: 1, 2, 4, 8 and 12 times the training cutoff, as far as there is room.
        distributions: All of the task if None.
        loops: Read the answer also after these numbers of loops.
        stop: Stopping rules to compare with T(n): names of
            :data:`~loopinterp.models.STOPPING_RULES`, also with a number (``residual=0.01``), or
            :data:`~loopinterp.app.session.CALIBRATED`.
        stopping_reads, max_loops: What they read, and the loops at which they stop in any case:
            see :func:`~loopinterp.training.evaluate`.
        samples: Examples for each length and distribution.
    """
    from loopinterp.tasks.sampling import pick_distribution

    model = run if isinstance(run, Session) else open_run(run, seed=seed, device=device)
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
            stopping_reads=stopping_reads,
            max_loops=max_loops,
            n_samples=samples,
            trained_up_to=model.cutoff if model.trained else None,
            seed=model.seed,
        )
        model.save(result, "generalisation")
    return result


@checked
def grid_run(
    folder: str | Path,
    *,
    to: PositiveInt,
    loops: Sequence[NonNegativeInt] = (1, 2, 4, 8, 16, 32),
    samples: PositiveInt = 100,
    seed: Seed = 0,
    device: str = "auto",
    progress: bool = True,
) -> training.OperandGrid:
    """Exact match by both operand lengths, saved in ``RUN/results``; an interrupted one resumes.

    Args:
        to: Greatest length of each operand.
        loops: Numbers of loops to read the answer after.
        samples: Examples for each pair of lengths.
    """
    model = open_run(folder, seed=seed, device=device)
    unfinished = model.folder / "grid.unfinished.safetensors"
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
        # The grid is complete: nothing is left to go on with.
        unfinished.unlink(missing_ok=True)
    return result


def _lengths(model: Session, times: Sequence[int] = (1, 2, 4, 8, 12)) -> list[int]:
    """Lengths so many times the training cutoff, or as many as there is room for."""
    # Lengths without room collapse into the greatest that has.
    beyond = sorted({model.affordable(model.cutoff * k) for k in times})
    if len(beyond) > 1:
        return beyond
    return sorted({model.affordable(max(beyond[0] // k, 1)) for k in (1, 2, 4)})


@checked
def analyze_run(
    run: str | Path | Session,
    *,
    studies: Sequence[str] | None = None,
    exclude: Sequence[str] = (),
    length: int | None = None,
    seed: Seed = 0,
    device: str = "auto",
    progress: bool = True,
) -> Analysis:
    """Run studies on a run's model and save each result in ``RUN/results``.

    Args:
        run: Folder of a run, or an open model, which decides seed and device.
        studies: If None: all that apply to the task; those that do not apply to the model are
            skipped, and one that fails stops no other.
        exclude: Studies not to run.
        length: Length of the examples; each study's own if None.

    Raises:
        InputError: If a requested study is unknown, does not apply, or needs another one's result.
    """
    _check_names([*(studies or ()), *exclude])
    model = run if isinstance(run, Session) else open_run(run, seed=seed, device=device)
    model = model if length is None else model.at_length(length)
    stages = Stages(model.folder, show=progress, owner=model.owner)
    done = Analysis()
    chosen = [
        study
        for study in STUDIES
        if (study.name in studies if studies else study.serves(model)) and study.name not in exclude
    ]
    if studies:
        _check_studies(chosen, model)
    else:
        others = [s for s in STUDIES if not s.serves(model)]
        done.left_out.update({s.name: skip for s in others if (skip := s.skipped(model))})
    for study in chosen:
        # What was asked for was checked before, but for what the others' results decide.
        unchecked = not studies or study.needs in studies
        if unchecked and (skip := study.skipped(model)):
            if studies:
                raise _not_applicable(study, skip)
            stages.skip(study.name, spell_skip(skip))
            done.skipped[study.name] = skip
            continue
        try:
            with stages.stage(study.name, study.about):
                result = study.run(model)
                done.files[study.name] = model.save(result, study.name)
                done.results[study.name] = result
        except Exception as error:  # whatever it is, the other studies can do without this one
            if studies or isinstance(error, OSError):  # asked for, or of the folder
                raise
            done.failed[study.name] = spell_error(error)
            stages.skip(study.name, f"it failed ({done.failed[study.name]})")
    return done


def _check_names(studies: Sequence[str] | None) -> None:
    for name in studies or ():
        check_choice("study", name, [study.name for study in STUDIES])


def _check_studies(chosen: Sequence[Study], model: Session) -> None:
    names = {study.name for study in chosen}
    for study in chosen:
        if skip := study.skipped(model):
            raise _not_applicable(study, skip)
        if study.needs is None or study.needs in names:
            continue
        there = (model.results / f"{study.needs}{SUFFIX}").is_file()
        expected = f"a run with the result of the study {study.needs!r}"
        fix = f"Add --study {study.needs}."
        need(there, f"study {study.name!r}", expected, "one without it", fix)
        model.own_file(study.needs)  # refused if it is of other weights


def _not_applicable(study: Study, skip: Skip) -> InputError:
    return InputError(
        f"study {study.name!r}",
        expected="a run that it applies to",
        given=f"one that it does not apply to, because {spell_skip(skip)}",
        fix="Leave the study out.",
    )


@dataclass(frozen=True, kw_only=True)
class DemoPages:
    """Reports of the trained model, of a finite-state model, and of both together."""

    report: Path
    finite: Path
    comparison: Path


class _SecondProcess:
    """Calls public functions on runs in a second process, one after the other.

    If one fails there, :meth:`wait` calls them all again here, to raise the error.
    """

    _code = (
        "import json, sys; from pkgutil import resolve_name\n"
        "for line in sys.stdin:\n"
        "    name, run, options = json.loads(line); resolve_name(name)(run, **options)"
    )

    def __init__(self) -> None:
        self._calls: list[tuple[Callable[..., object], Path, dict[str, Any]]] = []
        self._process = subprocess.Popen(
            [sys.executable, "-c", self._code],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def call(self, function: Callable[..., object], run: Path, **options: Any) -> None:
        self._calls.append((function, run, options))
        name = f"{function.__module__}:{function.__qualname__}"
        with suppress(BrokenPipeError):  # it has ended with an error, which `wait` finds
            print(json.dumps([name, str(run), options]), file=self._process.stdin, flush=True)

    def wait(self) -> None:
        self._process.communicate()
        if self._process.returncode:
            for function, run, options in self._calls:
                function(run, **options)

    def __enter__(self) -> _SecondProcess:
        return self

    def __exit__(self, *_: object) -> None:
        # Its stream is closed, perhaps with calls that were never read, and its end waited for.
        with suppress(BrokenPipeError), self._process:
            self._process.kill()


def _share(study: str, run: Path, other: Path) -> None:
    """Save the result of a study that asks about the task alone for another run of the task."""
    open_run(other).save(load_result(open_run(run).own_file(study)), study)
    record_how_it_was_made(other, seconds={study: read_json(run / MADE)["stages"][study]})


def demo(
    out: str | Path,
    *,
    seed: int | None = None,
    settings: Sequence[str] = (),
    threads: int | None = None,
    progress: bool = True,
) -> DemoPages:
    """Train the demo's model, study it beside a finite-state model, and write the reports.

    Args:
        out: An interrupted run resumes.
        seed: Seed of weights, data and studies; the recipe's if None.
        settings: Changes to the demo's recipe, ``key=value`` each.
    """
    from loopinterp.training.device import cpu_threads

    flags = {"seed": seed, "threads": threads}
    config = configure(recipe=DEMO_RECIPE, settings=settings, flags=flags)
    stages = Stages(show=progress)
    comparison, finite_folder = Path(out) / "comparison.html", Path(out) / "finite-state"
    finite_page = finite_folder / "report.html"
    for page in (Path(out) / "report.html", finite_page, comparison):
        pages.need_page(page)  # refused before minutes are spent
    finite = zoo.pretrained_run("addition-finite", finite_folder).folder
    shared: dict[str, Any] = {"seed": config.seed, "progress": progress}
    # 64 examples for each length tell 1.0 from .94, in 20 seconds at 144 positions.
    samples = {"samples": 64}
    quiet = {"seed": config.seed, "progress": False}
    cutoff = training.Run.load(finite).cutoff
    # These need no other result of the run, and no other needs theirs.
    independent = ["decompilation", "reduction", "wavefront"]
    with cpu_threads(config.threads), _SecondProcess() as second:
        # Of the finite-state model what takes a minute: its answers, and at one length its program.
        short = [cutoff, 2 * cutoff, 4 * cutoff]
        studies = ["explorer", "convergence", "decompilation", "ground-truth"]
        second.call(evaluate_run, finite, lengths=short, **quiet, **samples)
        second.call(analyze_run, finite, studies=studies, **quiet)
        second.call(analyze_run, finite, studies=["programs"], length=cutoff, **quiet)
        second.call(pages.write_report, finite)
        with stages.stage("train", f"{config.steps} steps on {config.task}"):
            run = train_run(config, out, progress=progress)
        second.call(analyze_run, run.folder, studies=independent, **quiet)
        session = open_run(run.folder, seed=config.seed)
        lengths = _lengths(session, (1, 2, 4, 12))
        evaluate_run(session, lengths=lengths, **samples, **shared)
        analyze_run(session, exclude=[*independent, "ground-truth"], **shared)
        with stages.stage(", ".join(independent), "waiting for the second process"):
            second.wait()
        _share("ground-truth", finite, run.folder)
    # The command that gives this run again.
    flags_given = [f" --{name} {value}" for name, value in flags.items() if value is not None]
    flags_given += [f" --set {shlex.quote(setting)}" for setting in settings]
    command = f"loopinterp demo --out {shlex.quote(str(out))}{''.join(flags_given)}"
    record_how_it_was_made(run.folder, command=command)
    with stages.stage("report", "one HTML file each"):
        return DemoPages(
            report=pages.write_report(run.folder),
            finite=finite_page,
            comparison=pages.write_comparison([finite, run.folder], comparison),
        )


def in_reading_order(results: Iterable[Result]) -> list[Finding]:
    """Findings of results: verdicts first, then in the order of the report."""
    from loopinterp.pages.sections import SECTIONS

    order = {key: place for place, key in enumerate(["verdict", *(s.key for s in SECTIONS)])}
    findings = [finding for result in results for finding in result.findings()]
    return sorted(findings, key=lambda finding: order.get(finding.section, len(order)))


@checked
def analyze_model(
    model: LoopedModel | Any,
    task: Task,
    out: str | Path,
    *,
    max_n: PositiveInt,
    origin: str | None = None,
    distribution: str | None = None,
    studies: Sequence[str] | None = None,
    samples: PositiveInt = 300,
    seed: Seed = 0,
    progress: bool = True,
) -> Analysis:
    """Evaluate and study a model in memory, any :class:`~loopinterp.models.LoopedModel`.

    Results are saved in ``OUT/results``; weights are not
    (:meth:`loopinterp.training.Run.from_model` saves those of a ``LoopedTransformer``).

    Args:
        model: In evaluation mode. Its ``n_ctx`` (positions it has room for) and ``reach``
            (positions a loop reads to the left) are used.
        task: For a model of another vocabulary see :class:`~loopinterp.models.WithVocabulary`.
        out: A folder without a run, or an earlier one of the same model.
        max_n: Greatest length that it was trained on, or made for.
        origin: Continues "The model was".
        distribution: The task's first if None.
        studies: As for :func:`analyze_run`.
        samples: As for :func:`evaluate_run`.
    """
    _check_names(studies)
    studied = keep_in_memory(
        model,
        task,
        out,
        max_n=max_n,
        origin=origin or f"given in memory (class {type(model).__name__})",
        distribution=distribution,
        seed=seed,
    )
    analysis = analyze_run(studied, studies=studies, progress=progress)
    evaluate_run(studied, samples=samples, progress=progress)
    return analysis
