"""A run in which one state was changed, and what programs say of it, beside the run without it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import torch

from loopinterp.comparison import Prediction
from loopinterp.comparison.program_runs import SILENT
from loopinterp.core.errors import InputError, check_choice, check_integer
from loopinterp.core.results import study
from loopinterp.interventions import InterchangePairs, InterchangeRun
from loopinterp.models.iteration import bind
from loopinterp.models.protocol import describe_model
from loopinterp.pages.exploration import NOT_SAID, Exploration
from loopinterp.pages.explored_run import Chosen, ExploredRun, ShownPlane, assemble, program_values

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jaxtyping import Int
    from torch import Tensor

    from loopinterp.programs.program import LoopProgram
    from loopinterp.programs.trace import Trace
    from loopinterp.tasks.task import Batch


PutIn = Literal["interchange", "mean", "zero"]


class ChangedRun(NamedTuple):
    """The run of a model with a state put in, and by name each program's with the same exchange."""

    run: Exploration
    predicted: dict[str, Exploration]


@torch.no_grad()
def explore_change(
    model: Any,
    batch: Batch,
    *,
    loop: int,
    pos: int,
    put_in: PutIn = "interchange",
    source: int = 1,
    programs: Sequence[LoopProgram] = (),
    plane: ShownPlane | None = None,
    words: Sequence[str] | None = None,
    symbols: Sequence[str] | None = None,
    ranks: int = 3,
) -> ChangedRun:
    """The first example of a batch, with its state at a loop and position changed.

    Up to that loop it is the run without; from there on the interchange engine goes on.

    Args:
        model: Any looped model.
        batch: Examples of one length: the first is changed.
        loop: Loops done when the state is put in, from 0 on.
        pos: Where.
        put_in: The state of the example ``source`` there at that loop, the mean over all examples
            of the batch there, or zeros.
        source: Row of the batch.
        programs: Programs that read the same tokens. Each is run with the same exchange made in its
            own variables; of a mean or of zeros it says nothing.
        plane: The plane that states are shown in; that of the changed run by default.
        words: A word for each token; those of the task by default.
        symbols: A word for each class of the answer, likewise.
        ranks: Answers to keep of each readout.

    Raises:
        InputError: a loop, a position or an example that there is not, the mean over one example,
            or inputs that are no tokens.

    Example:
        >>> from loopinterp.compiler import compile_program
        >>> from loopinterp.programs import get_program
        >>> from loopinterp.tasks import Addition
        >>> model = compile_program("ripple", max_length=5).model
        >>> batch = Addition().encode([(1, 6), (1, 7)], n=4)    # a carry into bit 1, or none
        >>> run, predicted = explore_change(
        ...     model, batch, loop=3, pos=2, programs=[get_program("ripple")])
        >>> run.data["answer"][0, 3, :, 0].values.tolist()    # 1 + 6 = 7, its bit 1 exchanged
        [0, 1, 0, 1, 0]
        >>> predicted["ripple"].data["answer"][0, 3, 1:, 0].values.tolist()
        [1, 0, 1, 0]
    """
    check_choice("put_in", put_in, get_args(PutIn))
    n_loops = int(batch.n_loops.max())
    check_integer("loop", loop, least=0, most=n_loops)
    check_integer("pos", pos, least=0, most=batch.inputs.shape[1] - 1)
    source = source if put_in == "interchange" else 0
    check_integer("source", source, least=0, most=len(batch) - 1)
    if batch.inputs.ndim != 2:
        raise InputError(
            "batch",
            expected="tokens [batch, pos], as the interchange engine reads them",
            given=f"inputs of shape {list(batch.inputs.shape)}",
            fix="Use a task of tokens.",
        )
    if put_in == "mean" and len(batch) < 2:
        raise InputError(
            "put_in",
            expected="the mean over two examples or more",
            given="one example, whose own state that is",
            fix="Pass more examples, or put in zeros.",
        )
    described = {"loop": loop, "pos": pos, "put_in": put_in, "source": source}
    with study(0, model=describe_model(model), **described) as watch:
        pairs = _pairs(batch, loop, pos, source, n_loops)
        run = InterchangeRun(model, pairs)
        bound = bind(model, batch.inputs)
        undisturbed = [h for _, h in bound.run(loop)]
        state = run.source_state
        if put_in != "interchange":
            mean = undisturbed[loop][:, pos].mean(0)
            state = mean if put_in == "mean" else torch.zeros_like(mean)
            state = state.expand_as(run.source_state)
        after = run.states_after(state)[0]
        states = [*(h[:1] for h in undisturbed[:loop]), *(h[None] for h in after)]
        one, first = batch[:1], Chosen(0, _reason(put_in), _detail(described))
        changed = ExploredRun(
            one, [first], bind(model, one.inputs), enumerate(states), ranks=ranks, words=words
        )
        found = assemble(
            watch,
            [changed],
            plane or ShownPlane.of([changed], None),
            variables={},
            patterns=None,
            inner=None,
            symbols=symbols,
            asks="",
            by_hand="",
            missing={"attention": "it is shown of the run without the change alone"},
            n_examples=len(batch),
        )
    said_of = programs if put_in == "interchange" else ()
    predicted = {p.name: explore_prediction(p, run, changed, found.symbols) for p in said_of}
    return ChangedRun(found, predicted)


def _pairs(batch: Batch, loop: int, pos: int, source: int, n_loops: int) -> InterchangePairs:
    """The one pair: the first example, given the state of another at one place."""
    base, donor, when, where = torch.tensor([0, source, loop, pos], device=batch.inputs.device)
    return InterchangePairs.of(
        batch,
        base=base[None],
        source=donor[None],
        positions=where[None, None],
        loop=when[None],
        n_loops=n_loops,
    )


def _reason(put_in: str) -> str:
    return {"interchange": "with another's state", "mean": "with the mean", "zero": "with zeros"}[
        put_in
    ]


def _detail(change: dict[str, Any]) -> str:
    what = {
        "interchange": f"the state of example {change['source'] + 1}",
        "mean": "the mean state of all examples",
        "zero": "zeros",
    }[change["put_in"]]
    return f"After loop {change['loop']}, position {change['pos']} is given {what}."


def explore_prediction(
    program: LoopProgram, exchange: InterchangeRun, changed: ExploredRun, symbols: dict[str, str]
) -> Exploration:
    """The program's own run with the exchange that was made in the model.

    Its answers are what it answers itself, -1 where it leaves them open. Its variables stand beside
    what the answers of the changed model imply of them. Last is its claim, as the verdict takes it
    (:class:`~loopinterp.comparison.program_runs.Claims`), beside what the model answers.

    Args:
        program: The program; it must read these tokens.
        exchange: The exchange, of one pair.
        changed: The model's run with it.
        symbols: Words for classes.
    """
    n_loops, loop = changed.n_loops, int(exchange.pairs.loop[0])
    with study(0, program=program.name, n_loops=n_loops) as watch:
        prediction = Prediction(program, exchange.pairs.to("cpu"))
        run = _joined(prediction, loop)
        answers = torch.from_numpy(changed.answer[..., 0]).transpose(0, 1).long()
        asked = torch.from_numpy(changed.asked)
        inputs = changed.batch.inputs.cpu()
        values = {
            name: pair for name, *pair in program_values(program, inputs, answers, asked, run)
        }
        claim = _claim(prediction, exchange.base.cpu(), n_loops + 1)
        values[f"{program.name}'s claim"] = [claim, answers.where(asked & (claim >= 0), NOT_SAID)]
        variable, implied = (
            torch.stack([pair[which].transpose(0, 1) for pair in values.values()])
            for which in (0, 1)
        )
        return Exploration.of(
            watch,
            coords={"name": list(values)},
            row=[one.row for one in changed.rows],
            n_pos=[changed.n_pos],
            n_loops=[n_loops],
            asked_after=changed.batch.n_loops.tolist(),
            target=changed.target,
            answer=run.outputs.transpose(0, 1)[..., None],
            variable=variable.to(torch.int16),
            implied=implied.to(torch.int16),
            asks="",
            by_hand="",
            reasons=[program.name],
            details=[f"The run of {program.name} with the same exchange; ? is left open by it."],
            said=changed.said(),
            tokens=changed.tokens(),
            n_classes=changed.n_classes,
            symbols=symbols,
            axes=[],
            missing={},
            n_examples=1,
        )


def _joined(prediction: Prediction, loop: int) -> Trace:
    """The program's whole run of the one pair: without the exchange before it, with it after."""
    before, after = prediction.trace, prediction.after(slice(0, 1))
    base = prediction.pairs.base
    variables = {
        name: torch.cat([values[:loop, base], after.variables[name]])
        for name, values in before.variables.items()
    }
    outputs = torch.cat([before.outputs[:loop, base], after.outputs])
    return replace(after, start=0, variables=variables, outputs=outputs, selectors={})


def _claim(
    prediction: Prediction, natural: Int[Tensor, "pair delay pos"], n_loops: int
) -> Int[Tensor, "loop pair pos"]:
    """What it says that the model answers; nothing before the exchange."""
    expected = prediction.claims(natural).expected.transpose(0, 1).long()
    before = expected.new_full((n_loops - len(expected), *expected.shape[1:]), SILENT)
    claim = torch.cat([before, expected])
    return claim.masked_fill(claim == SILENT, NOT_SAID)
