"""Trained models by name.

An entry is the folder of a run with a card, ``card.json``. Its model is a ``LoopedTransformer``, or
one that :class:`~loopinterp.adapters.AdaptedModelConfig` can rebuild. To add an adapted one:

1. Train the module of :mod:`loopinterp.adapters.plain` (or ``AlbertForMaskedLM``) on a registered
   task with ``vocab_size = task.d_vocab``. If the task has fewer classes than tokens, call
   ``keep_outputs(published, task.d_vocab_out)`` after training.
2. Add its name to ``ADAPTED`` in ``analyses/make_zoo.py``, with a function that returns the trained
   model, its baselines and its note, and run ``python -m analyses.make_zoo --name NAME``. The
   script calls ``Run.from_model(adapt(published), task, …)`` and :func:`make_entry`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from loopinterp.core.boundary import checked
from loopinterp.core.errors import InputError, check_choice
from loopinterp.core.run_files import CONFIG, Owner, record_how_it_was_made
from loopinterp.core.storage import need_writable, read_bytes, read_json_object, write_bytes
from loopinterp.training import Run
from loopinterp.training.run import need_free_folder
from loopinterp.zoo.model_card import CARD, TIMES_THE_CUTOFF, Card

if TYPE_CHECKING:
    import pandas as pd
    import torch

_ZOO = Path(__file__).parent


def list_names() -> list[str]:
    """The names of the models of the zoo."""
    return sorted(path.parent.name for path in _ZOO.glob(f"*/{CARD}"))


@checked
def load_pretrained(name: str, *, device: str | torch.device = "cpu") -> Any:
    """A trained model of the zoo, with its task as ``model.task``, offline.

    It is a :class:`~loopinterp.models.LoopedTransformer`, or a
    :class:`~loopinterp.adapters.PublishedModel` with the same addresses, hooks and calls.

    Raises:
        InputError: If there is no such model or device.

    Example:
        >>> model = load_pretrained("addition")
        >>> batch = model.task.encode([(27, 90)], n=8)
        >>> right = model(batch.inputs).argmax(-1) == batch.targets
        >>> bool(right[batch.targets >= 0].all())
        True
    """
    return pretrained_run(name).model(device)


@checked
def pretrained_run(name: str, folder: str | Path | None = None) -> Run:
    """The run of a model of the zoo.

    Args:
        folder: Where to copy it, for studies that save results; an existing copy is used. None
            opens the zoo's own folder, to be read only.

    Raises:
        InputError: If there is no such model, or the folder holds another run.

    Example:
        >>> pretrained_run("addition").cutoff
        12
    """
    entry = _ZOO / check_choice("pretrained model", name, list_names())
    if folder is None:
        return Run.load(entry)
    folder = Path(folder)
    need_writable(folder)
    # A copy that is there already is taken, if it is one of this entry.
    if (folder / CONFIG).exists():
        if Owner.of_run(folder) != Owner.of_run(entry):
            need_free_folder(folder)
        return Run.load(folder)
    for file in sorted(entry.rglob("*")):
        name_there = file.relative_to(entry)
        target = folder / name_there
        if file == entry / CONFIG or not file.is_file():
            continue
        if target.exists() and read_bytes(target) != read_bytes(file):
            what, got = f"output folder {folder}", f"one with another {name_there}"
            expected, fix = "a new folder, or a copy of this model", "Choose another folder."
            raise InputError(what, expected=expected, given=got, fix=fix)
        write_bytes(target, read_bytes(file))
    minutes = get_card(name).minutes
    record_how_it_was_made(
        folder,
        command=f"loopinterp zoo {name} --out NEW",
        seconds={} if minutes is None else {"train": minutes * 60},
        owner=Owner.of_run(entry),
    )
    # What makes the folder a run comes last: a kill before leaves it free.
    write_bytes(folder / CONFIG, read_bytes(entry / CONFIG))
    return Run.load(folder)


def get_card(name: str) -> Card:
    """The card of a model of the zoo.

    Example:
        >>> get_card("addition").recipe
        'addition'
    """
    known = check_choice("pretrained model", name, list_names())
    return Card.from_dict(read_json_object(_ZOO / known / CARD))


def list_pretrained() -> pd.DataFrame:
    """The models of the zoo, a row each, by name.

    Columns: task; number of weights; greatest length in training; exact match at 1, 2, 4 and 8
    times that, on the worst distribution (NaN without enough positions); that distribution at the
    first length below 1; and a note. Printed, it fits into 80 columns.

    Example:
        >>> list_pretrained()["task"]["parity"]
        'parity'
    """
    import pandas as pd

    class Listing(pd.DataFrame):
        def __repr__(self) -> str:
            shown = pd.DataFrame(self).drop(columns=["weights", "lowest_on", "note"])
            shown.columns = shown.columns.str.removeprefix("exact_")
            return shown.to_string(na_rep="")

    rows = {}
    for name in list_names():
        run, card = pretrained_run(name), get_card(name)
        worst = card.worst()
        imperfect = next((n for n, share in worst.items() if share < 1), None)
        lowest = () if imperfect is None else card.lowest(imperfect).distributions
        exact = {f"exact_{k}x": worst.get(k * run.cutoff) for k in TIMES_THE_CUTOFF}
        rows[name] = {"task": run.config.task, "weights": card.weights, "trained_to": run.cutoff}
        rows[name] |= exact | {"lowest_on": lowest[0] if len(lowest) == 1 else ""}
        rows[name]["note"] = card.note
    return Listing(pd.DataFrame.from_dict(rows, orient="index").rename_axis("name"))
