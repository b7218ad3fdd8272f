"""The explorer in a notebook, with the model: examples can be typed and states replaced."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from pydantic import NonNegativeInt

from loopinterp.core.boundary import checked
from loopinterp.core.errors import InputError
from loopinterp.models.study_examples import examples_for
from loopinterp.pages.assets import read_asset, script
from loopinterp.pages.changed_run import PutIn, explore_change
from loopinterp.pages.exploration import page_data
from loopinterp.pages.explore_study import explore
from loopinterp.pages.explored_run import Chosen, ExampleReason, spell_choice
from loopinterp.programs.stock_programs import get_program
from loopinterp.tasks.typed_examples import typed_example

if TYPE_CHECKING:
    from collections.abc import Sequence

    from loopinterp.models import LoopedModel
    from loopinterp.programs.program import LoopProgram
    from loopinterp.tasks import Batch, Task


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
        chosen = [get_program(p) if isinstance(p, str) else p for p in programs]
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
        if example > last or (value == "interchange" and source > last):
            raise InputError(
                "example and source",
                expected=f"two of the {last + 1} that are shown, from 0 on",
                given=f"{example} and {source}",
                fix="An interchange takes two: draw more examples.",
            )
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
                if missing:
                    raise InputError(
                        "message",
                        expected=", ".join(names),
                        given=f"one without {', '.join(missing)}",
                        fix="Say where, and what.",
                    )
                self.put_in(**{name: content[name] for name in names})
            elif content.get("kind") == "back":
                self.changed = {}
            self.said = ""
        except InputError as error:
            self.said = str(error)
