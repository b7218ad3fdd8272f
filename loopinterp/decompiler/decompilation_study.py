"""A decompilation as a saved result."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import numpy as np
import torch
from pydantic import Field

from loopinterp.compiler.figures import draw_program
from loopinterp.core.boundary import checked
from loopinterp.core.errors import InputError
from loopinterp.core.results import Result, study
from loopinterp.core.settings import Seed
from loopinterp.decompiler.decompilation import READ_AT, Decompiled, Length, Lengths, decompile
from loopinterp.decompiler.evidence import NONE, Claim, Refusal
from loopinterp.decompiler.program_writing import Messages, response_times
from loopinterp.decompiler.transition_table import EDGE
from loopinterp.models.protocol import describe_model, need_model, need_one_map
from loopinterp.models.study_examples import loops_at, need_loops, need_model_of
from loopinterp.tasks.sampling import need_task

if TYPE_CHECKING:
    import xarray as xr

    from loopinterp.tasks.task import Task


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class Decompilation(Result, kind="decompilation"):
    """The result of :func:`decompilation_study`.

    A *cell* is a token and one of its values, written ``1+0: 2``. A *message* is the effect of a
    left neighbour on the cell beside it.

    Arrays:
        agreement: Share of held-out whole answers that the program predicts.
        judged: Number of these answers.
        becomes: The value of a cell after one loop beside a message; NaN where they never meet.
        answer: The answer of the cell; -1 where undecided.
        sends: The cell's message.

    Attributes:
        given: Whether a program was given, or only the closest one.
        refused: Fields of the :class:`~loopinterp.decompiler.evidence.Refusal`, if any.
        claimed: Fields of the :class:`~loopinterp.decompiler.evidence.Claim`.
        identified: The registered program that it equals, decided exactly; else "".
        code: The program, or the closest one, as code; "" without a table.
        sharp: Whether values are states that behave alike, or regions of states.
        consistency: As in :class:`~loopinterp.decompiler.Decompiled`.
        responses: :func:`~loopinterp.decompiler.response_times`, with words for tokens.
        unexplained: Of regions: left cell, cell, runs that leave the table there, transitions of
            that kind, and the share that deviates; the most frequent first.
        graph: The program's :class:`~loopinterp.figures.CircuitGraph` as JSON; empty without a
            table or if too large.
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
        """The refusal as a clause; "" if a program is given."""
        return str(Refusal(**self.refused)) if self.refused else ""

    @property
    def registered(self) -> tuple[str, str]:
        """Of ``identified``: the registered program, and the initial values if they differ."""
        name, _, initial = self.identified.partition(" from ")
        return name, initial

    def worst(self, what: str = "whole trajectory") -> xr.DataArray:
        """The estimate at the length at which the program predicts least."""
        agreement = self.data["agreement"].sel(what=what)
        low = agreement.sel(estimate="low").fillna(np.inf)  # NaN where nothing was tried
        return agreement.isel(n=int(low.values.argmin()))


@checked
def decompilation_study(
    model: Any,
    task: Task,
    *,
    n: Length | Lengths = READ_AT,
    lengths: Lengths | None = None,
    n_exchanges: Annotated[int, Field(ge=100)] = 6000,
    seed: Seed = 0,
) -> Decompilation:
    """Recover a model's program from its states, and save it with its evidence.

    Sharp values, which compiled models have, are tried first; if they give no program, regions of
    states. Arguments are those of :func:`decompile`.

    Raises:
        InputError: If the model does not loop or has other tokens, or T(n) is not linear in n.
    """
    need_model(model)
    need_one_map(model)
    need_task(task)
    need_model_of(task, model)
    need_loops(model)
    read_at = sorted({n} if isinstance(n, int) else {*n})
    options: dict[str, Any] = {"n": read_at, "n_exchanges": n_exchanges}
    with study(seed, study="decompilation", **options, model=describe_model(model)) as watch:
        options |= {"lengths": lengths, "seed": seed}
        result = decompile(model, task, tolerances=(0.0,), **options)
        sharp = result.program is not None
        if not sharp:
            regions = decompile(model, task, sharp=False, **options)
            # The sharp reading is shown only where it alone has a table.
            sharp = regions.automaton is None and result.automaton is not None
            result = result if sharp else regions
        closest, automaton = result.closest, result.automaton
        words, responses, graph = {EDGE[0]: "the edge"}, [], {}  # words: the meaning of each token
        if closest is not None and automaton is not None:  # one comes with the other
            words.update(enumerate(closest.inputs))
            generator = torch.Generator().manual_seed(0)
            inputs = task.sample(torch.full((128,), read_at[-1]), generator=generator).inputs
            # Eight loops more than the model makes, so that runs converge.
            n_loops = loops_at(model, task, read_at[-1]) + 8
            times = response_times(automaton, inputs, n_loops=n_loops).itertuples(index=False)
            responses = [[words[token], *map(int, rest)] for token, *rest in times]
            with contextlib.suppress(InputError):  # too large to be looked at
                graph = draw_program(closest).to_dict()
        return Decompilation.of(
            watch,
            **_arrays(result, words),
            given=result.program is not None,
            refused=dataclasses.asdict(result.refusal) if result.refusal else {},
            claimed=dataclasses.asdict(result.claim),
            identified=result.program.name if result.program and result.same_as else "",
            code="" if closest is None else str(closest),
            sharp=sharp,
            read_at=read_at,
            consistency=result.consistency,
            responses=responses,
            unexplained=_unexplained(result, words),
            graph=graph,
        )


def _arrays(result: Decompiled, words: dict[int, str]) -> dict[str, Any]:
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


def _unexplained(result: Decompiled, words: dict[int, str]) -> list[list[Any]]:
    def cell(token: int, value: int) -> str:
        return words[token] + (f": {value}" if token >= 0 else "")

    return [
        [
            cell(row["left"], row["left_value"]), cell(row["token"], row["value"]),
            int(row["exits"]), int(row["steps"]), float(row["otherwise"]),
        ]
        for row in result.unexplained.head(20).to_dict("records")
    ]  # fmt: skip
