"""Trained models by name, each with a card beside its weights.

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

import platform
import shutil
from dataclasses import field
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from pydantic import NonNegativeFloat, PositiveInt

from loopinterp import __version__
from loopinterp.core.boundary import checked
from loopinterp.core.errors import InputError, check_choice
from loopinterp.core.results import config_hash
from loopinterp.core.run_files import CONFIG, Owner, record_how_it_was_made
from loopinterp.core.settings import Seed, Settings, flatten_settings, settings
from loopinterp.core.storage import (
    digest_tensors,
    need_writable,
    read_bytes,
    read_json,
    read_json_object,
    read_tensors,
    write_bytes,
    write_json,
)
from loopinterp.models.protocol import own_depth
from loopinterp.training import Run, evaluate, get_recipe
from loopinterp.training.answer_scores import Lowest, lowest_of
from loopinterp.training.config import Share
from loopinterp.training.recipes import Line
from loopinterp.training.run import METRICS, MODEL, WEIGHTS, need_free_folder

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import pandas as pd


CARD = "card.json"
THIS = "this model"
"""The card's own model among its baselines."""
TIMES_THE_CUTOFF = (1, 2, 4, 8)  # lengths of a card


class Failure(NamedTuple):
    """A place where exact match is low."""

    distribution: str
    length: int
    extra_loop: int
    exact_match: float

    def __str__(self) -> str:
        later = f", {self.extra_loop} loops after T(n)" if self.extra_loop else ""
        where = f"exact match {self.exact_match:.2f} at length {self.length}"
        return f"{self.distribution}: {where}{later}"


@settings
class Card(Settings):
    """A model of the zoo: its training and its accuracy.

    Attributes:
        note: What it is an example of.
        recipe: None if it was trained elsewhere.
        changes: Settings that differ from the recipe, by dotted name.
        weights: Number of weights.
        minutes: Duration of its training.
        samples: Examples behind each share, at least.
        exact_match: By input distribution, length, and loops beyond its own (negative: fewer).
        baselines: Exact match and share of right answers at the training length, of this model
            (:data:`THIS`) and of others; by model, distribution, measure.
        origin: Where a model without a recipe comes from; continues "The model was".
        licence: Licence of the weights.
        command: The command that makes a model without a recipe anew.
    """

    note: Line
    recipe: str | None
    changes: dict[str, Any]
    weights: PositiveInt
    minutes: NonNegativeFloat | None
    made_with: Line
    samples: PositiveInt
    seed: Seed
    exact_match: dict[str, dict[int, dict[int, Share]]]
    baselines: dict[str, dict[str, dict[str, Share]]] = field(default_factory=dict)
    origin: str | None = None
    licence: str | None = None
    command: str | None = None
    weights_sha256: str
    config_sha256: str

    def lowest(self, length: int, extra_loop: int = 0) -> Lowest:
        """The lowest exact match over the distributions at a length."""
        return lowest_of({d: by_n[length][extra_loop] for d, by_n in self.exact_match.items()})

    def worst(self, extra_loop: int = 0) -> dict[int, float]:
        """The share of :meth:`lowest` by length."""
        lengths = next(iter(self.exact_match.values()))
        return {n: self.lowest(n, extra_loop).share for n in lengths}

    def table(self) -> pd.DataFrame:
        """Exact match: a row for each distribution and length, a column for each extra loop."""
        import pandas as pd

        rows = {  # (distribution, length) with shares by extra loop
            (d, n): shares
            for d, by_length in self.exact_match.items()
            for n, shares in by_length.items()
        }
        table = pd.DataFrame.from_dict(rows, orient="index")
        return table.rename_axis(index=["distribution", "length"], columns="extra_loop")

    def lowest_table(self) -> pd.DataFrame:
        """For each length, the lowest exact match after T(n) loops, and on which distributions."""
        import pandas as pd

        rows = {n: self.lowest(n) for n in self.worst()}
        rows = {n: [low.share, ", ".join(low.distributions)] for n, low in rows.items()}
        table = pd.DataFrame(rows, index=["exact_match", "on"]).T
        return table.rename_axis(index="length")

    def baseline_table(self) -> pd.DataFrame:
        """:attr:`baselines`: a row for each model, a column for each distribution and measure."""
        import pandas as pd

        rows = {
            name: {(d, measure): share for d, by in shares.items() for measure, share in by.items()}
            for name, shares in self.baselines.items()
        }
        return pd.DataFrame.from_dict(rows, orient="index").rename_axis("model")

    def fails_at(self) -> list[Failure]:
        """The first lengths with exact match under .9, and at which a right answer is lost."""
        failures, least = [], 0.9  # least: exact match that does not count as a failure
        for distribution, by_length in self.exact_match.items():
            # Lengths at which T(n) loops do not suffice.
            wrong = [n for n, shares in by_length.items() if shares[0] < least]
            if wrong:
                n = wrong[0]
                failures.append(Failure(distribution, n, 0, by_length[n][0]))
            # By loops after T(n): a length at which the answer was right and no longer is.
            lost = {
                k: n
                for n, shares in by_length.items()
                for k, share in shares.items()
                if k > 0 and share < least <= shares[0]
            }
            if lost:
                k, n = min(lost.items())
                failures.append(Failure(distribution, n, k, by_length[n][k]))
        return failures


@checked
def make_entry(
    run: Run,
    folder: str | Path,
    *,
    recipe: str | None,
    note: str,
    samples: PositiveInt = 200,
    seed: Seed = 0,
    baselines: Mapping[str, Any] = MappingProxyType({}),
    licence: str | None = None,
    command: str | None = None,
) -> Card:
    """Make a zoo entry of a finished run: configuration, weights, metrics, and a card.

    Args:
        run: Trained to its end; or, without a recipe, of a model trained elsewhere.
        recipe: None if it was trained elsewhere.
        note: What it is an example of, in a line.
        samples: Examples for each length and distribution.
        baselines: Other models of the task by name, measured beside it.
        licence: Licence of the weights.
        command: The command that makes it anew, without a recipe.
    """
    folder = Path(folder)
    need_writable(folder)
    need_free_folder(folder)
    if recipe is None and run.is_trained:
        fix = "Name its recipe."
        raise InputError("recipe", expected="that of the run", given="none", fix=fix)
    if recipe is not None and not (run.is_trained and run.finished):
        what, got = f"run {run.folder}", f"one of {run.steps_done} steps"
        fix = "Go on with its training; or pass recipe=None, if it was trained elsewhere."
        raise InputError(what, expected="one that was trained to its end", given=got, fix=fix)
    changes: dict[str, Any] = {}  # dotted names with values that are not the recipe's
    if recipe is not None:  # the device is no setting of the recipe
        usual, changed = (
            flatten_settings(c.to_dict()) for c in (get_recipe(recipe).config, run.config)
        )
        changes = {k: v for k, v in changed.items() if k != "device" and usual.get(k, ...) != v}
    card = Card(
        note=note,
        recipe=recipe,
        changes=changes,
        weights=sum(p.numel() for p in run.model().parameters()),
        minutes=None if recipe is None else round(run.seconds / 60, 1),
        made_with=f"loopinterp {__version__}, torch {version('torch')}, {platform.machine()}",
        samples=samples,
        seed=seed,
        exact_match=measure_card(run, samples=samples, seed=seed),
        baselines=_measure_baselines(run, baselines, samples, seed),
        origin=getattr(run.config, "origin", None),
        licence=licence,
        command=command,
        weights_sha256=digest_tensors(read_tensors(run.folder / WEIGHTS)),
        config_sha256=config_hash(read_json(run.folder / CONFIG)),
    )
    # The configuration makes the folder a run, and so comes last.
    shutil.copytree(run.folder / MODEL, folder / MODEL)
    if run.is_trained:
        shutil.copyfile(run.folder / METRICS, folder / METRICS)
    write_json(folder / CARD, card.to_dict())
    write_json(folder / CONFIG, read_json(run.folder / CONFIG))
    return card


def measure_card(
    run: Run, *, samples: int, seed: int, distributions: Sequence[str] | None = None
) -> dict[str, dict[int, dict[int, float]]]:
    """A card's :attr:`Card.exact_match`; on all distributions of the task if None."""
    model, task = run.model(), run.task

    def fits(n: int) -> bool:
        generator = torch.Generator().manual_seed(0)
        try:  # some tasks have a longest length, some models a number of positions
            model.bind(task.sample(n, batch_size=1, generator=generator).inputs)
        except InputError:
            return False
        return True

    least = own_depth(model) or task.n_loops(run.cutoff)
    result = evaluate(
        model,
        task,
        [n for k in TIMES_THE_CUTOFF if fits(n := run.cutoff * k)],
        distributions=distributions,
        extra_loops=[k for k in (-2, -1, 0, 6, 12, 24, 48) if k >= -least],
        n_samples=samples,
        trained_up_to=run.cutoff,
        seed=seed,
    )
    exact = result.data["exact_match"].sel(estimate="value")
    return {
        str(d): {
            int(n): {
                int(k): round(float(exact.sel(distribution=d, length=n, extra_loop=k)), 4)
                for k in exact["extra_loop"].values
            }
            for n in exact["length"].values
        }
        for d in exact["distribution"].values
    }


def _measure_baselines(
    run: Run, baselines: Mapping[str, Any], samples: int, seed: int
) -> dict[str, dict[str, dict[str, float]]]:
    """A card's :attr:`Card.baselines`; empty without any."""
    measured: dict[str, dict[str, dict[str, float]]] = {}
    for name, model in {THIS: run.model(), **baselines}.items() if baselines else ():
        options: Any = {"n_samples": samples, "trained_up_to": run.cutoff, "seed": seed}
        data = evaluate(model, run.task, [run.cutoff], **options).data.squeeze("length")
        shares = {"exact match": data["exact_match"], "answers right": data["bit_accuracy"]}
        measured[name] = {
            str(d): {
                measure: round(float(share.sel(distribution=d, estimate="value").squeeze()), 4)
                for measure, share in shares.items()
            }
            for d in data["distribution"].values
        }
    return measured


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
