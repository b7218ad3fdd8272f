"""The explorer in a notebook, with the model: examples can be typed and states replaced.

After a state is replaced, the model and the programs run on from it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from pydantic import NonNegativeInt

from loopinterp.comparison import Prediction
from loopinterp.comparison.program_runs import SILENT
from loopinterp.core.boundary import checked
from loopinterp.core.errors import InputError, check_integer, need
from loopinterp.core.results import study
from loopinterp.interventions import InterchangePairs, InterchangeRun
from loopinterp.models.iteration import bind
from loopinterp.models.protocol import describe_model
from loopinterp.models.study_examples import examples_for
from loopinterp.pages.assets import read_asset, script
from loopinterp.pages.exploration import NOT_SAID, Exploration, Missing, page_data
from loopinterp.pages.explore_study import explore
from loopinterp.pages.explored_run import (
    Chosen,
    ExampleReason,
    ExploredRun,
    assemble,
    program_values,
    spell_choice,
)
from loopinterp.programs.stock_programs import get_program
from loopinterp.tasks.task_registry import typed_example

if TYPE_CHECKING:
    from collections.abc import Sequence

    from loopinterp.models import LoopedModel
    from loopinterp.programs.program import LoopProgram
    from loopinterp.tasks import Batch, Task


PutIn = Literal["interchange", "mean", "zero"]


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
) -> tuple[Exploration, dict[str, Exploration]]:
    """Explore the first example of a batch with its state at one loop and position replaced.

    Args:
        loop: Loops done before the state is replaced.
        put_in: The new state: that of the example ``source`` (a row), the batch mean, or zeros.
        programs: Programs that read the same tokens; each runs with the same interchange of its own
            variables.

    Returns:
        The model's run after the intervention, and each program's after the same interchange.
    """
    n_loops, n_pos = int(batch.n_loops.max()), batch.inputs.shape[1]
    check_integer("loop", loop, least=0, most=n_loops)
    check_integer("pos", pos, least=0, most=n_pos - 1)
    source = source if put_in == "interchange" else 0
    check_integer("source", source, least=0, most=len(batch) - 1)
    expected = "tokens [batch, pos], as the interchange engine reads them"
    got = f"inputs of shape {list(batch.inputs.shape)}"
    need(batch.inputs.ndim == 2, "batch", expected, got, "Use a task of tokens.")
    expected, got = "the mean over two examples or more", "one example, whose own state that is"
    fix = "Pass more examples, or put in zeros."
    need(put_in != "mean" or len(batch) > 1, "put_in", expected, got, fix)
    described = {"loop": loop, "pos": pos, "put_in": put_in, "source": source}
    with study(0, model=describe_model(model), **described) as watch:
        # One pair: the first example, given the state of another at one place.
        one, other, at, where = torch.tensor([0, source, loop, pos], device=batch.inputs.device)
        places: Any = {"loop": at[None], "positions": where[None, None], "n_loops": n_loops}
        pairs = InterchangePairs.of(batch, base=one[None], source=other[None], **places)
        run = InterchangeRun(model, pairs)
        clean = [h for _, h in bind(model, batch.inputs).run(loop)]  # [batch, pos, d_model] each
        state = run.source_state
        if put_in != "interchange":
            mean = clean[loop][:, pos].mean(0)
            state = (mean if put_in == "mean" else torch.zeros_like(mean)).expand_as(state)
        states = [*(h[:1] for h in clean[:loop]), *(h[None] for h in run.states_after(state)[0])]
        why = Chosen(0, ExampleReason[put_in.upper()], described | {"source": source + 1})
        reader = bind(model, batch[:1].inputs)
        changed = ExploredRun(batch[:1], [why], reader, enumerate(states), ranks=3)
        result = assemble(
            watch,
            [changed],
            symbols=None,
            missing={Missing.CHANGED_RUN.name: {}},
            n_examples=len(batch),
        )
    predicting = programs if put_in == "interchange" else ()
    predicted = {p.name: _explore_prediction(p, run, changed, result.symbols) for p in predicting}
    return result, predicted


def _explore_prediction(
    program: LoopProgram, exchange: InterchangeRun, changed: ExploredRun, symbols: dict[str, str]
) -> Exploration:
    """The program's run of one pair, with the interchange made in the model.

    Each variable is shown beside the value that the changed model's answers imply. The last
    row is the program's claim (:class:`~loopinterp.comparison.program_runs.Claims`) beside the
    model's answer. An answer that the program leaves open is -1.
    """
    n_loops, loop = changed.n_loops, int(exchange.pairs.loop[0])
    with study(0, program=program.name, n_loops=n_loops) as watch:
        prediction = Prediction(program, exchange.pairs.to("cpu"))
        # The whole run of the pair [loop, 1, pos]: clean before the exchange, changed after it.
        before, after = prediction.trace, prediction.after(slice(0, 1))
        base = prediction.pairs.base
        variables = {
            name: torch.cat([values[:loop, base], after.variables[name]])
            for name, values in before.variables.items()
        }
        outputs = torch.cat([before.outputs[:loop, base], after.outputs])
        run = replace(after, start=0, variables=variables, outputs=outputs, selectors={})
        answers = torch.from_numpy(changed.answer[..., 0]).transpose(0, 1).long()
        is_asked = torch.from_numpy(changed.asked)
        inputs = changed.batch.inputs.cpu()
        values = {
            name: pair for name, *pair in program_values(program, inputs, answers, is_asked, run)
        }
        # What it says that the model answers [loop, pair, pos]; nothing before the exchange.
        expected = prediction.claims(exchange.base.cpu()).expected.transpose(0, 1).long()
        silent = expected.new_full((n_loops + 1 - len(expected), *expected.shape[1:]), SILENT)
        claim = torch.cat([silent, expected])
        claim = claim.masked_fill(claim == SILENT, NOT_SAID)
        claimed = answers.where(is_asked & (claim >= 0), NOT_SAID)
        values[f"{program.name}'s claim"] = [claim, claimed]
        variable, implied = (
            torch.stack([pair[which].transpose(0, 1) for pair in values.values()]).to(torch.int32)
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
            variable=variable,
            implied=implied,
            reasons=[program.name],
            details=[f"The run of {program.name} with the same interchange; ? is left open by it."],
            said=changed.decoded(),
            tokens=changed.tokens(),
            n_classes=changed.n_classes,
            symbols=symbols,
            n_examples=1,
        )


try:
    import anywidget
    import traitlets
except ImportError as missing:
    raise InputError(
        "ExplorerWidget",
        expected="anywidget, which shows it in a notebook",
        given="an environment without",
        fix="pip install 'loopinterp[notebook]'",
    ) from missing


class ExplorerWidget(anywidget.AnyWidget):
    """The report's explorer, with the model behind it.

    An example can be typed. The state at the chosen loop and position can be replaced; the new run
    is shown beside the clean run, and the same interchange in one of the programs.

    The arguments are those of :func:`explore`.

    Raises:
        InputError: As :func:`explore`; on import, without anywidget.

    Example:
        >>> from loopinterp.compiler import compile_program
        >>> from loopinterp.tasks import Addition
        >>> model = compile_program("ripple", max_length=6).model
        >>> widget = ExplorerWidget(model, Addition(), programs=["ripple"], n=5, examples=2)
        >>> widget.type_example("13 + 9")
        >>> widget.put_in(loop=2, pos=3, value="zero")
        >>> widget.changed["examples"][0]["detail"]
        'After loop 2, position 3 is given zeros.'
    """

    _esm = traitlets.Unicode().tag(sync=True)
    _css = traitlets.Unicode().tag(sync=True)
    payload = traitlets.Dict().tag(sync=True)
    changed = traitlets.Dict().tag(sync=True)
    said = traitlets.Unicode("").tag(sync=True)

    def __init__(
        self,
        model: LoopedModel | Any,
        data: Batch | Task,
        *,
        programs: Sequence[str | LoopProgram] = (),
        examples: int = 8,
        n: int | None = None,
        batch_size: int | None = None,
        seed: int = 0,
    ) -> None:
        chosen = [get_program(p) for p in programs]
        self._model, self._programs = model, chosen
        self._options: dict[str, Any] = {"programs": chosen, "examples": examples, "seed": seed}
        batch = examples_for(model, data, n=n, batch_size=batch_size, seed=seed)
        self._task = batch.task
        module = script() + read_asset("explorer/explorer_widget.js")
        super().__init__(_esm=module, _css=read_asset("explorer/explorer.css"))
        self._show(batch)
        self.on_msg(self._heard)

    def type_example(self, text: str) -> None:
        """Show only an example given as text (:func:`typed_example`)."""
        if self._task is None:
            raise InputError(
                "example",
                expected="examples of a task, in whose words it can be typed",
                given="examples of none",
                fix="Pass a task, or a batch drawn from one.",
            )
        self._show(examples_for(self._model, typed_example(self._task, text)))

    @checked
    def put_in(
        self,
        *,
        loop: int,
        pos: int,
        value: PutIn = "interchange",
        example: NonNegativeInt = 0,
        source: NonNegativeInt = 1,
    ) -> None:
        """Show the run of an example with one state replaced, and the programs' predictions.

        Args:
            loop, pos, value: As for :func:`explore_change`, with ``value`` as ``put_in``.
            example: Its number among those shown.
            source: Number of the example whose state an interchange takes.
        """
        last = len(self._batch) - 1
        shown = example <= last and (value != "interchange" or source <= last)
        expected = f"two of the {last + 1} that are shown, from 0 on"
        fix = "An interchange takes two: draw more examples."
        need(shown, "example and source", expected, f"{example} and {source}", fix)
        # The mean is over all shown; an interchange needs the source alone.
        others = [k for k in range(last + 1) if k != example]
        rows = [example, *(others if value == "mean" else [min(source, last)])]
        batch = self._batch[torch.tensor(rows, device=self._batch.inputs.device)]
        run, predicted = explore_change(
            self._model, batch, loop=loop, pos=pos, put_in=value, programs=self._programs
        )
        data, named = page_data(run), {"loop": loop, "pos": pos, "source": source + 1}
        why = Chosen(example, ExampleReason[value.upper()], named)
        data["examples"][0]["detail"] = spell_choice(why)[1]
        # A program of which nothing is there has nothing to say.
        data["predicted"] = {
            p.name: page_data(predicted[p.name]) if p.name in predicted else None
            for p in self._programs
        }
        self.changed = data

    def _show(self, batch: Batch) -> None:
        self.result = explore(self._model, batch, **self._options)
        # Rows of the batch that are shown, [example].
        rows = torch.from_numpy(self.result.data["row"].values).to(batch.inputs.device)
        self._batch = batch[rows]
        self.changed, self.said = {}, ""
        self.payload = page_data(self.result)

    def _heard(self, _: Any, content: dict[str, Any], __: Any) -> None:
        try:
            if content.get("kind") == "type":
                self.type_example(str(content["text"]))
            elif content.get("kind") == "put in":
                names = ("loop", "pos", "value", "example", "source")
                missing = [name for name in names if name not in content]
                got = f"one without {', '.join(missing)}"
                need(not missing, "message", ", ".join(names), got, "Say where, and what.")
                self.put_in(**{name: content[name] for name in names})
            elif content.get("kind") == "back":
                self.changed = {}
            self.said = ""
        except InputError as error:
            self.said = str(error)
