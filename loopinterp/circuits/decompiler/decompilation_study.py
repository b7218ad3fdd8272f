"""A program read off a model, as a saved result."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch

from loopinterp.circuits.decompiler.automaton_program import Messages
from loopinterp.circuits.decompiler.claim import NONE, Claim, Refusal
from loopinterp.circuits.decompiler.decompilation import (
    READ_AT,
    Decompiled,
    decompile,
    judged_lengths,
    n_loops_of,
)
from loopinterp.circuits.decompiler.response_times import response_times
from loopinterp.errors import InputError, check_integer
from loopinterp.models.looped_model import need_model, need_one_map
from loopinterp.models.model_description import describe_model
from loopinterp.rasp.drawing import draw_program
from loopinterp.results import Result, study
from loopinterp.study_examples import need_loops, need_model_of
from loopinterp.tasks.study_data import need_task

if TYPE_CHECKING:
    import xarray as xr

    from loopinterp.circuits.decompiler.cell_automaton import CellAutomaton
    from loopinterp.tasks.task import Task

_EXAMPLES = 128
_TO_REST = 8


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class Decompilation(Result, kind="decompilation"):
    """What :func:`decompilation_study` returns.

    A *cell* is a token and one of its values, called as ``1+0: 2``; a *message* is what a left
    neighbour makes of the cell beside it.

    Arrays:
        agreement: Share of whole answers that are as the program says, held out.
        judged: Of how many.
        becomes: The value of a cell after one loop beside a message; NaN where no run has both.
        answer: What is read there; -1 where it is undecided.
        sends: Its message.

    Attributes:
        given: Whether a program was given, or only what comes closest.
        refused: Why not, as the fields of a
            :class:`~loopinterp.circuits.decompiler.claim.Refusal`; empty if it was.
        claimed: What is claimed of it, as the fields of a
            :class:`~loopinterp.circuits.decompiler.claim.Claim`.
        identified: The registered program that it is, decided exactly, with its first guess where
            that is its own; "" where it is none of them or was not read whole.
        code: The program, or what comes closest, as code; "" where no table could be made.
        sharp: Whether values are states that behave alike, or regions of states.
        read_at: Lengths of the inputs that it was read off.
        consistency: Share of the experiments that gave what most of their kind did.
        responses: How long a cell takes to follow its neighbour, as
            :func:`~loopinterp.circuits.decompiler.response_times.response_times` has it, with words
            for tokens.
        unexplained: Of regions: cell to the left, cell, runs that leave the table there, steps of
            that kind, and the share that goes otherwise; the most frequent first.
        graph: The circuit of the program, as :class:`~loopinterp.plotting.CircuitGraph` has it;
            empty where no table could be made, or it is too large to be looked at.
    """

    VARIABLES: ClassVar[Mapping[str, str]] = {
        "agreement": "what n estimate",
        "judged": "what n",
        "becomes": "cell message",
        "answer": "cell",
        "sends": "cell",
    }

    given: bool
    refused: dict[str, Any] = field(default_factory=dict)
    claimed: dict[str, Any] = field(default_factory=dict)
    code: str
    sharp: bool
    read_at: list[int]
    consistency: float
    responses: list[list[Any]]
    unexplained: list[list[Any]]
    graph: dict[str, Any] = field(default_factory=dict)
    identified: str = ""

    @property
    def claim(self) -> Claim:
        """What is claimed of the program."""
        lists = {name: tuple(self.claimed.get(name, ())) for name in ("lengths", "read_at")}
        return Claim(**{"grade": NONE, **self.claimed, **lists})

    @property
    def reason(self) -> str:
        """Why none is given, as a clause; "" if one is."""
        return str(Refusal(**self.refused)) if self.refused else ""

    def worst(self, what: str = "whole trajectory") -> xr.DataArray:
        """The length at which the program says least, as an estimate."""
        agreement = self.data["agreement"].sel(what=what)
        low = agreement.sel(estimate="low").fillna(np.inf)  # NaN where nothing was tried
        return agreement.isel(n=int(low.values.argmin()))


def decompilation_study(
    model: Any,
    task: Task,
    *,
    n: int | Sequence[int] = READ_AT,
    lengths: Sequence[int] | None = None,
    n_exchanges: int = 6000,
    seed: int = 0,
) -> Decompilation:
    """Read a model's program off its states, and keep it with its evidence.

    First with sharp values, as compiled models have; where that gives no program, with regions of
    states as values (:func:`~loopinterp.circuits.decompiler.decompilation.decompile`).

    Args:
        model: Any looped model.
        task: Its task.
        n: Length of the inputs that are looked at, one or more.
        lengths: Of those that the evidence is of; by default as :func:`decompile` has them.
        n_exchanges: From which regions are learnt.
        seed: Of all that is drawn.

    Raises:
        InputError: what is no model that loops, a model of other tokens, numbers out of range, or
            a task whose T(n) is not linear.
    """
    need_model(model)
    need_one_map(model)
    need_task(task)
    need_model_of(task, model)
    need_loops(model)
    looked_at = sorted({*([n] if isinstance(n, int) else n)})
    longest = max(check_integer("n", k, least=2) for k in looked_at)
    judged_at = lengths or judged_lengths(model, task, looked_at)
    about = {"study": "decompilation", "n": looked_at, "n_exchanges": n_exchanges}
    with study(seed, **about, model=describe_model(model)) as watch:
        options: dict[str, Any] = {
            "lengths": sorted({*judged_at}),
            "n_exchanges": n_exchanges,
            "seed": seed,
        }
        found = decompile(model, task, n=looked_at, tolerances=(0.0,), **options)
        sharp = found.program is not None
        if not sharp:
            regions = decompile(model, task, n=looked_at, sharp=False, **options)
            found = regions if regions.automaton is not None or found.automaton is None else found
            sharp = found is not regions
        return Decompilation.of(
            watch,
            **_tables(found, task),
            given=found.program is not None,
            refused=dataclasses.asdict(found.refusal) if found.refusal else {},
            claimed=dataclasses.asdict(found.claim),
            identified=found.program.name if found.program and found.same_as else "",
            code="" if found.closest is None else str(found.closest),
            sharp=sharp,
            read_at=looked_at,
            consistency=found.consistency,
            responses=_responses(model, found, task, longest),
            unexplained=_unexplained(found),
            graph=_graph(found),
        )


def _graph(found: Decompiled) -> dict[str, Any]:
    if found.closest is None:
        return {}
    try:
        return draw_program(found.closest).to_dict()
    except InputError:
        return {}


def _tables(found: Decompiled, task: Task) -> dict[str, Any]:
    """Evidence and automaton as arrays with their coordinates."""
    evidence = found.evidence
    whats = list(dict.fromkeys(evidence["what"])) if len(evidence) else []
    lengths = sorted({*evidence["n"]}) if len(evidence) else []
    agreement = np.full((len(whats), len(lengths), 3), np.nan)
    judged = np.zeros((len(whats), len(lengths)))
    for row in evidence.to_dict("records"):
        at = whats.index(row["what"]), lengths.index(row["n"])
        agreement[at] = row["value"], row["low"], row["high"]
        judged[at] = row["of"]
    automaton = found.automaton
    cells = [] if automaton is None else automaton.cells
    messages = None if automaton is None else Messages.of(automaton)
    becomes = np.full((len(cells), 0 if messages is None else messages.n), np.nan)
    if automaton is not None and messages is not None:
        for (cell, message), value in messages.becomes.items():
            becomes[cells.index(cell), message] = value
    words = _words(found, task)
    return {
        "coords": {
            "what": whats,
            "n": lengths,
            "cell": [f"{words[token]}: {value}" for token, value in cells],
            "message": list(range(becomes.shape[1])),
        },
        "agreement": agreement,
        "judged": judged,
        "becomes": becomes,
        "answer": np.array([_of(automaton, cell) for cell in cells], dtype=float),
        "sends": np.array([messages.sends[c] if messages else 0 for c in cells], dtype=float),
    }


def _of(automaton: CellAutomaton | None, cell: tuple[int, int]) -> int:
    return -1 if automaton is None else automaton.answers.get(cell, -1)


def _words(found: Decompiled, task: Task) -> dict[int, str]:
    """What each token means, and the edge; its number where a task has no words."""
    words = dict(enumerate(found.closest.inputs)) if found.closest is not None else {}
    known = {} if found.automaton is None else found.automaton.sizes
    return {token: str(token) for token in known} | words | {-1: "the edge"}


def _responses(model: Any, found: Decompiled, task: Task, n: int) -> list[list[Any]]:
    if found.automaton is None:
        return []
    generator = torch.Generator().manual_seed(0)
    inputs = task.sample(torch.full((_EXAMPLES,), n), generator=generator).inputs
    n_loops = n_loops_of(model, inputs.shape[1], task.n_loops(n)) + _TO_REST
    table = response_times(found.automaton, inputs, n_loops=n_loops)
    words = _words(found, task)
    return [[words[token], *map(int, rest)] for token, *rest in table.itertuples(index=False)]


def _unexplained(found: Decompiled, most: int = 20) -> list[list[Any]]:
    words = {-1: "the edge"} | dict(enumerate(found.closest.inputs if found.closest else ()))

    def cell(token: int, value: int) -> str:
        return words.get(token, str(token)) + (f": {value}" if token >= 0 else "")

    return [
        [
            cell(row["left"], row["left_value"]), cell(row["token"], row["value"]),
            int(row["exits"]), int(row["steps"]), float(row["otherwise"]),
        ]
        for row in found.unexplained.head(most).to_dict("records")
    ]  # fmt: skip
