"""What the studies of circuits are given, checked where it enters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from loopinterp.errors import InputError
from loopinterp.models.looped_model import need_model
from loopinterp.rasp.program import LoopProgram
from loopinterp.rasp.program_registry import get_program
from loopinterp.study_examples import fit_to_model
from loopinterp.tasks.sampling import check_tokens
from loopinterp.tasks.study_data import as_batch, as_batches, need_asked

if TYPE_CHECKING:
    from collections.abc import Iterable

    from loopinterp.models import LoopedModel
    from loopinterp.tasks.task import Batch


def check_program_list(programs: Sequence[str | LoopProgram]) -> list[LoopProgram]:
    """Programs out of a list of programs and names.

    Raises:
        InputError: a single name in place of a list, or what is no program.

    Example:
        >>> [program.name for program in check_program_list(["ripple", "copy"])]
        ['ripple', 'copy']
    """
    if isinstance(programs, (str, LoopProgram)) or not isinstance(programs, Sequence):
        raise InputError(
            "programs",
            expected="a list of programs or of their names",
            given=repr(programs) if isinstance(programs, str) else type(programs).__name__,
            fix=f"Pass [{programs!r}]." if isinstance(programs, str) else "Put it into a list.",
        )
    return [get_program(program) for program in programs]


def check_programs(programs: Sequence[str | LoopProgram]) -> list[LoopProgram]:
    """Rival programs of one task, each with its own name.

    Raises:
        InputError: none, two of one name, or of several tasks.
    """
    rivals = check_program_list(programs)
    names = [p.name for p in rivals]
    tasks = sorted({p.task for p in rivals})
    if not names or len(set(names)) < len(names) or len(tasks) > 1:
        raise InputError(
            "programs",
            expected="one program or more, all of one task, each with its own name",
            given=", ".join(f"{p.name} ({p.task})" for p in rivals) or "none",
            fix="Leave out the others: tokens of other tasks mean something else.",
        )
    return rivals


def check_batches(
    model: LoopedModel | Any, data: object, programs: Iterable[LoopProgram], **drawn: Any
) -> list[Batch]:
    """Batches of inputs, each of one length; see :func:`~loopinterp.tasks.study_data.as_batches`.

    Raises:
        InputError: none, an empty or a mixed one, or tokens that a program does not know.
    """
    return [check_batch(model, batch, programs) for batch in as_batches(data, **drawn)]


def check_batch(
    model: LoopedModel | Any,
    data: object,
    programs: Iterable[LoopProgram],
    *,
    needs_loops: bool = True,
    asked: bool = True,
    **drawn: Any,
) -> Batch:
    """A batch of at least two examples of one length, in tokens that all programs know.

    It ends where the model is asked; see :func:`~loopinterp.study_examples.fit_to_model`.

    Args:
        model: The model that is asked.
        data: A batch, or a task.
        programs: What it is held against.
        needs_loops: Whether the model is followed from loop to loop, as far as T(n).
        asked: Whether answers are judged, so that each example must have a target.
        drawn: What :func:`~loopinterp.tasks.as_batch` takes besides.

    Raises:
        InputError: it is none.
    """
    need_model(model)
    batch = as_batch(data, **drawn)
    if asked:
        need_asked(batch)
    if len(batch) < 2 or len(batch.n_loops.unique()) > 1:
        raise InputError(
            "data",
            expected="batches of at least two examples, all of one length",
            given=f"{len(batch)} examples with T(n) of {batch.n_loops.unique().tolist()}",
            fix="Draw them with task.sample(n, batch_size=..., generator=...), n an integer.",
        )
    for program in programs:
        check_tokens(batch.inputs, len(program.inputs), f"inputs for program {program.name}")
    return fit_to_model(model, batch, needs_loops=needs_loops).to("cpu")


def named_models(
    models: LoopedModel | Any | Sequence[LoopedModel | Any], names: Sequence[str] | None
) -> dict[str, LoopedModel | Any]:
    """One model or several, each under its name.

    Raises:
        InputError: no model, what is none, or names that do not fit.
    """
    several = list(models) if isinstance(models, (list, tuple)) else [models]
    count = len(several)
    labels = [f"model {k}" for k in range(count)] if names is None else list(names)
    if count < 1 or len(labels) != count or len(set(labels)) < count:
        raise InputError(
            "names",
            expected=f"one name for each of {count} models (at least one model)",
            given=repr(labels),
            fix="Pass as many different names as models.",
        )
    for model in several:
        need_model(model)
    return dict(zip(labels, several))
