"""Studies of ``loopinterp analyze``: definition, register, reasons to skip."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

from loopinterp.core.errors import check_new_name
from loopinterp.core.results import register_kind, registered_kinds

if TYPE_CHECKING:
    import pandas as pd

    from loopinterp.app.session import Session
    from loopinterp.core.results import Result


class SkipReason(Enum):
    """Why a study is skipped, and the clause that says so after "because"."""

    OTHER_TASK = "it asks about {asked} and not about {task}"
    NO_HOOKS = "it looks inside a loop, and {model} has no hooks there"
    ONE_LOOP = "the model makes one loop, whatever the length"
    NO_PROGRAM = "no stock program solves {task} with these settings and tokens"
    NO_EFFECT = "no interchange of a state changes an answer of the model"
    NOT_DIFFERENTIABLE = "its loop cannot be differentiated"
    NO_WEIGHTS = "its control shuffles weights, and the model has no torch parameters"
    NO_ROOM = "carries need {needed} bits to be followed, and its examples have {room}"
    NO_BIT_PAIRS = "the model does not read pairs of bits as tokens"
    STATE_CODE = "its state is a code of bits, which decompilation reads whole"
    NO_TOKENS = "its inputs are no tokens"


@dataclass(frozen=True)
class Skip:
    """The reason why a study is skipped, with the values that it names."""

    reason: SkipReason
    values: Mapping[str, Any] = field(default_factory=dict)


def spell_skip(skip: Skip) -> str:
    """The reason as a clause that follows "because".

    Example:
        >>> spell_skip(Skip(SkipReason.NO_ROOM, {"needed": 16, "room": 8}))
        'carries need 16 bits to be followed, and its examples have 8'
    """
    return skip.reason.value.format(**skip.values)


@dataclass(frozen=True, kw_only=True)
class Study:
    """A study that ``analyze`` can run.

    Attributes:
        name: Name on the command line and of its files.
        tasks: Tasks that it applies to; all if empty.
        of_programs: Whether it needs a task that a stock program solves.
        needs: The study whose saved result it uses.
        hooks: Whether it needs a model with hooks.
        loops: Whether it needs a model of several loops.
        skips: Further reason to skip it.
    """

    name: str
    about: str
    run: Callable[[Session], Result]
    kind: str
    tasks: tuple[str, ...] = ()
    of_programs: bool = False
    needs: str | None = None
    hooks: bool = False
    loops: bool = True
    skips: Callable[[Session], Skip | None] = lambda session: None

    def skipped(self, session: Session) -> Skip | None:
        """Why it does not apply to a model; None if it does."""
        from loopinterp.models.study_examples import makes_one_loop

        model, task = session.model, session.task.name
        if not self.serves(session):
            return Skip(SkipReason.OTHER_TASK, {"asked": " or ".join(self.tasks), "task": task})
        if self.hooks and not hasattr(model, "run_with_cache"):
            return Skip(SkipReason.NO_HOOKS, {"model": type(model).__name__})
        if self.loops and makes_one_loop(model):
            return Skip(SkipReason.ONE_LOOP)
        if self.of_programs and not session.programs():
            return Skip(SkipReason.NO_PROGRAM, {"task": task})
        return self.skips(session)

    def serves(self, session: Session) -> bool:
        """Whether it applies to models of that task."""
        return not self.tasks or session.task.name in self.tasks


STUDIES: list[Study] = []
"""All studies, in the order in which they run."""


def studies() -> pd.DataFrame:
    """The studies of ``loopinterp analyze``, with question, tasks and report section.

    Example:
        >>> studies().loc["convergence", "section"]
        'convergence'
    """
    import pandas as pd

    kinds = registered_kinds()  # imports the catalogue
    rows = [
        {
            "study": study.name,
            "about": study.about,
            "tasks": ", ".join(study.tasks) or "any",
            "section": kinds[study.kind].section,
        }
        for study in STUDIES
    ]
    return pd.DataFrame(rows).set_index("study")


def register_study(
    name: str, module: str, section: str, *, kind: str = "", **limits: Any
) -> Callable[[Callable[[Session], Result]], Callable[[Session], Result]]:
    """Register a function as a study of ``analyze``; its docstring is the study's question.

    Args:
        name: Name on the command line and of its files.
        module: Where the class of its result is.
        section: Section of the report.
        kind: Kind of its result; ``name`` by default.
        limits: Further fields of :class:`Study`.
    """
    check_new_name("study", name, [study.name for study in STUDIES])

    def add(run: Callable[[Session], Result]) -> Callable[[Session], Result]:
        asks = (run.__doc__ or "").strip()
        about = asks[:1].lower() + asks[1:]
        study = Study(name=name, about=about, run=run, kind=kind or name, **limits)
        served: Any = {"tasks": study.tasks, "of_programs": study.of_programs}
        register_kind(study.kind, module, section, study=name, **served)
        STUDIES.append(study)
        return run

    return add
