"""Checks of the models, programs and batches of a comparison."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from loopinterp.core.errors import InputError, need
from loopinterp.models.protocol import need_model
from loopinterp.models.study_examples import fit_to_model
from loopinterp.programs.program import LoopProgram
from loopinterp.programs.stock_programs import get_program
from loopinterp.tasks.sampling import as_batch, as_batches, check_tokens, need_asked

if TYPE_CHECKING:
    from collections.abc import Iterable

    from loopinterp.models import LoopedModel
    from loopinterp.tasks.task import Batch


def check_program_list(programs: Sequence[str | LoopProgram]) -> list[LoopProgram]:
    if isinstance(programs, (str, LoopProgram)) or not isinstance(programs, Sequence):
        raise InputError(
            "programs",
            expected="a list of programs or of their names",
            given=repr(programs) if isinstance(programs, str) else type(programs).__name__,
            fix=f"Pass [{programs!r}]." if isinstance(programs, str) else "Put it into a list.",
        )
    return [get_program(program) for program in programs]


def check_programs(programs: Sequence[str | LoopProgram]) -> list[LoopProgram]:
    candidates = check_program_list(programs)
    names = {p.name for p in candidates}
    fit = names and len(names) == len(candidates) and len({p.task for p in candidates}) == 1
    expected = "one program or more, all of one task, each with its own name"
    got = ", ".join(f"{p.name} ({p.task})" for p in candidates) or "none"
    fix = "Leave out the others: tokens of other tasks mean something else."
    need(fit, "programs", expected, got, fix)
    return candidates


def check_batches(
    model: LoopedModel | Any, data: object, programs: Iterable[LoopProgram], **drawn: Any
) -> list[Batch]:
    return [check_batch(model, batch, programs) for batch in as_batches(data, **drawn)]


def check_batch(
    model: LoopedModel | Any,
    data: object,
    programs: Iterable[LoopProgram],
    *,
    needs_loops: bool = True,
    needs_targets: bool = True,
    **drawn: Any,
) -> Batch:
    """A batch of at least two examples of one length, in tokens that all programs know.

    ``drawn`` goes to :func:`~loopinterp.tasks.as_batch`.

    Args:
        needs_loops: Whether the model is followed from loop to loop, up to T(n).
    """
    need_model(model)
    batch = as_batch(data, **drawn)
    if needs_targets:
        need_asked(batch)
    n_loops = batch.n_loops.unique().tolist()
    expected = "batches of at least two examples, all of one length"
    got = f"{len(batch)} examples with T(n) of {n_loops}"
    fix = "Draw them with task.sample(n, batch_size=..., generator=...), n an integer."
    need(len(batch) >= 2 and len(n_loops) == 1, "data", expected, got, fix)
    for program in programs:
        check_tokens(batch.inputs, len(program.inputs), f"inputs for program {program.name}")
    return fit_to_model(model, batch, needs_loops=needs_loops).to("cpu")


def need_inputs(enough: bool, expected: str, actual: str = "none", what: str = "data") -> None:
    need(enough, what, expected, actual, "Draw more, or longer, inputs.")


def named_models(
    models: LoopedModel | Any | Sequence[LoopedModel | Any], names: Sequence[str] | None
) -> dict[str, LoopedModel | Any]:
    several = list(models) if isinstance(models, (list, tuple)) else [models]
    labels = [f"model {k}" for k in range(len(several))] if names is None else list(names)
    labelled = dict(zip(labels, several))
    fit = several and len(several) == len(labels) == len(labelled)
    expected = f"one name for each of {len(several)} models (at least one model)"
    need(fit, "names", expected, repr(labels), "Pass as many different names as models.")
    return labelled
