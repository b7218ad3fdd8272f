from __future__ import annotations

from dataclasses import replace

import pytest

from loopinterp.core.errors import InputError
from loopinterp.models import LoopedTransformer
from loopinterp.pages import ExplorerWidget, explore
from loopinterp.pages.exploration import page_data
from loopinterp.pages.explored_run import Chosen, ExampleReason, spell_choice
from loopinterp.tasks import Addition, Batch


@pytest.fixture
def widget(model: LoopedTransformer, batches: list[Batch]) -> ExplorerWidget:
    return ExplorerWidget(model, batches[1], programs=["ripple"], examples=3)


def test_it_shows_what_the_report_shows(
    widget: ExplorerWidget, model: LoopedTransformer, batches: list[Batch]
) -> None:
    same = explore(model, batches[1], programs=["ripple"], examples=3)
    assert widget.payload == page_data(same) and widget.changed == {}


def test_messages_type_and_put_in_and_take_out(widget: ExplorerWidget) -> None:
    ask = widget._heard
    ask(None, {"kind": "put in", "value": "interchange", "example": 1, "source": 2}, None)
    assert "loop" in widget.said  # what was forgotten is said
    change = {"kind": "put in", "value": "interchange", "loop": 2, "pos": 3}
    ask(None, {**change, "example": 1, "source": 2}, None)
    assert widget.said == ""
    assert widget.changed["examples"][0]["tokens"] == widget.payload["examples"][1]["tokens"]
    detail = widget.changed["examples"][0]["detail"]
    values = {"loop": 2, "pos": 3, "source": 3}
    assert detail == spell_choice(Chosen(1, ExampleReason.INTERCHANGE, values))[1]
    said = widget.changed["predicted"]["ripple"]
    assert said["names"] == ["ripple.carry", "ripple's answer", "ripple's claim"]
    assert said["examples"][0]["tokens"] == widget.payload["examples"][1]["tokens"]
    ask(None, {**change, "value": "zero", "example": 1, "source": 0}, None)
    assert widget.changed["predicted"] == {"ripple": None}
    ask(None, {"kind": "back"}, None)
    assert widget.changed == {}
    ask(None, {"kind": "type", "text": "5 + 6"}, None)
    (one,) = widget.payload["examples"]
    assert one["tokens"] == ["BOS", "1+0", "0+1", "1+1", "0+0"]
    ask(None, {"kind": "type", "text": "five"}, None)
    assert widget.said.startswith("example: ") and "five" in widget.said
    ask(None, {**change, "example": 0, "source": 1}, None)
    assert widget.said.startswith("example and source: ") and "0 and 1" in widget.said
    ask(None, {**change, "value": "mean", "example": 0, "source": 0}, None)
    assert widget.said.startswith("put_in: ") and widget.changed == {}
    ask(None, {**change, "value": "zero", "example": -1, "source": 0}, None)
    assert widget.said.startswith("example: ") and "-1" in widget.said


def test_examples_of_no_task_cannot_be_typed(model: LoopedTransformer) -> None:
    batch = Addition().encode([(1, 2), (2, 1)], n=3)
    widget = ExplorerWidget(model, replace(batch, task=None))
    with pytest.raises(InputError, match=r"^example:"):
        widget.type_example("1 + 1")
