"""A program read off a model, as a saved result."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch

from loopinterp.compiler.figures import draw_program
from loopinterp.core.errors import InputError, check_integer
from loopinterp.core.results import Result, study
from loopinterp.decompiler.decompilation import READ_AT, Decompiled, decompile
from loopinterp.decompiler.evidence import NONE, Claim, Refusal, judged_lengths
from loopinterp.decompiler.interchange_runs import n_loops_of
from loopinterp.decompiler.program_writing import Messages, response_times
from loopinterp.models.protocol import describe_model, need_model, need_one_map
from loopinterp.models.study_examples import need_loops, need_model_of
from loopinterp.tasks.sampling import need_task

if TYPE_CHECKING:
    import xarray as xr

    from loopinterp.tasks.task import Task

_EXAMPLES = 128
_TO_REST = 8


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class Decompilation(Result, kind="decompilation"):
    """The result of :func:`decompilation_study`.

    A *cell* is a token and one of its values, named as ``1+0: 2``; a *message* is the effect of a
    left neighbour on the cell beside it.

    Arrays:
        agreement: Share of held-out whole answers that the program predicts.
        judged: Of how many.
        becomes: The value of a cell after one loop beside a message; NaN where no run has both.
        answer: The answer read there; -1 where it is undecided.
        sends: Its message.

    Attributes:
        given: Whether a program was given, or only the closest one.
        refused: Why not, as the fields of a
            :class:`~loopinterp.decompiler.evidence.Refusal`; empty if it was.
        claimed: The claim about it, as the fields of a
            :class:`~loopinterp.decompiler.evidence.Claim`.
        identified: The registered program that it is, decided exactly, with its first guess where
            that is its own; "" where it is none of them or was not read whole.
        code: The program, or the closest one, as code; "" where no table could be made.
        sharp: Whether values are states that behave alike, or regions of states.
        read_at: Lengths of the inputs that it was read off.
        consistency: Share of the experiments that went as most of their kind.
        responses: How long a cell takes to follow its neighbour, as
            :func:`~loopinterp.decompiler.response_times` has it, with words for tokens.
        unexplained: Of regions: cell to the left, cell, runs that leave the table there,
            transitions of that kind, and the share that goes otherwise; the most frequent first.
        graph: The circuit of the program, as :class:`~loopinterp.figures.CircuitGraph` has it;
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
        """The claim about the program."""
        lists = {name: tuple(self.claimed.get(name, ())) for name in ("lengths", "read_at")}
        return Claim(**{"grade": NONE, **self.claimed, **lists})

    @property
    def reason(self) -> str:
        """Why none is given, as a clause; "" if one is."""
        return str(Refusal(**self.refused)) if self.refused else ""

    def worst(self, what: str = "whole trajectory") -> xr.DataArray:
        """The length at which the program predicts least, as an estimate."""
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
    states as values (:func:`decompile`).

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
    read_at = sorted({*([n] if isinstance(n, int) else n)})
    longest = max(check_integer("n", k, least=2) for k in read_at)
    judged_at = lengths or judged_lengths(model, task, read_at)
    about = {"study": "decompilation", "n": read_at, "n_exchanges": n_exchanges}
    with study(seed, **about, model=describe_model(model)) as watch:
        options: dict[str, Any] = {
            "n": read_at,
            "lengths": sorted({*judged_at}),
            "n_exchanges": n_exchanges,
            "seed": seed,
        }
        result = decompile(model, task, tolerances=(0.0,), **options)
        sharp = result.program is not None
        if not sharp:
            regions = decompile(model, task, sharp=False, **options)
            # The sharp reading is shown only where it alone has a table.
            sharp = regions.automaton is None and result.automaton is not None
            result = result if sharp else regions
        words = _words(result, task)
        return Decompilation.of(
            watch,
            **_arrays(result, words),
            given=result.program is not None,
            refused=dataclasses.asdict(result.refusal) if result.refusal else {},
            claimed=dataclasses.asdict(result.claim),
            identified=result.program.name if result.program and result.same_as else "",
            code="" if result.closest is None else str(result.closest),
            sharp=sharp,
            read_at=read_at,
            consistency=result.consistency,
            responses=_responses(model, result, task, longest, words),
            unexplained=_unexplained(result, words),
            graph=_graph(result),
        )


def _graph(result: Decompiled) -> dict[str, Any]:
    if result.closest is None:
        return {}
    try:
        return draw_program(result.closest).to_dict()
    except InputError:  # too large to be looked at
        return {}


def _words(result: Decompiled, task: Task) -> dict[int, str]:
    """The meaning of each token, and the edge; its number where a task has no words."""
    words = dict(enumerate(result.closest.inputs)) if result.closest is not None else {}
    known = {} if result.automaton is None else result.automaton.sizes
    return {token: str(token) for token in known} | words | {-1: "the edge"}


def _arrays(result: Decompiled, words: dict[int, str]) -> dict[str, Any]:
    """Evidence and transition table as arrays with their coordinates."""
    evidence = result.evidence
    whats = list(dict.fromkeys(evidence["what"])) if len(evidence) else []
    lengths = sorted({*evidence["n"]}) if len(evidence) else []
    agreement = np.full((len(whats), len(lengths), 3), np.nan)  # value, low and high
    judged = np.zeros((len(whats), len(lengths)))
    for row in evidence.to_dict("records"):
        at = whats.index(row["what"]), lengths.index(row["n"])
        agreement[at] = row["value"], row["low"], row["high"]
        judged[at] = row["of"]
    coords: dict[str, list] = {"what": whats, "n": lengths, "cell": [], "message": []}
    arrays = {"becomes": np.zeros((0, 0)), "answer": np.zeros(0), "sends": np.zeros(0)}
    if result.automaton is not None:
        cells, messages = result.automaton.cells, Messages.of(result.automaton)
        coords["cell"] = [f"{words[token]}: {value}" for token, value in cells]
        coords["message"] = list(range(messages.n))
        arrays["becomes"] = np.full((len(cells), messages.n), np.nan)
        for (cell, message), value in messages.becomes.items():
            arrays["becomes"][cells.index(cell), message] = value
        answers = [result.automaton.answer_of[cell] for cell in cells]
        arrays["answer"] = np.array(answers, dtype=float)
        arrays["sends"] = np.array([messages.sends[cell] for cell in cells], dtype=float)
    return {"coords": coords, "agreement": agreement, "judged": judged, **arrays}


def _responses(
    model: Any, result: Decompiled, task: Task, n: int, words: dict[int, str]
) -> list[list[Any]]:
    if result.automaton is None:
        return []
    generator = torch.Generator().manual_seed(0)
    inputs = task.sample(torch.full((_EXAMPLES,), n), generator=generator).inputs  # [input, pos]
    n_loops = n_loops_of(model, inputs.shape[1], task.n_loops(n)) + _TO_REST
    table = response_times(result.automaton, inputs, n_loops=n_loops)
    return [[words[token], *map(int, rest)] for token, *rest in table.itertuples(index=False)]


def _unexplained(result: Decompiled, words: dict[int, str], most: int = 20) -> list[list[Any]]:
    def cell(token: int, value: int) -> str:
        return words[token] + (f": {value}" if token >= 0 else "")

    return [
        [
            cell(row["left"], row["left_value"]), cell(row["token"], row["value"]),
            int(row["exits"]), int(row["steps"]), float(row["otherwise"]),
        ]
        for row in result.unexplained.head(most).to_dict("records")
    ]  # fmt: skip
