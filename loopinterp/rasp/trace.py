"""Running a loop program: its trace, interventions on its variables, and counterfactuals."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from loopinterp.errors import InputError, check_choice, check_integer, unknown_name
from loopinterp.rasp.expr import Select
from loopinterp.rasp.graph import postorder, selectors
from loopinterp.rasp.interpreter import Interpreter
from loopinterp.tasks.sampling import check_tokens

if TYPE_CHECKING:
    from jaxtyping import Bool, Int
    from torch import Tensor

    from loopinterp.rasp.program import LoopProgram


MAX_TRACE = 2**30
"""Most values that a trace may hold: 8 GiB of them."""


@dataclass(frozen=True, eq=False)
class Intervention:
    """Set a variable after ``loop`` loops, before the next one and before the output is read.

    Attributes:
        variable: Name of the variable.
        loop: 0 is after ``prepare``, t after t steps.
        values: New values [batch, pos], int64.
        mask: Where to set them [batch, pos]; everywhere if omitted.
    """

    variable: str
    loop: int
    values: Int[Tensor, "batch pos"]
    mask: Bool[Tensor, "batch pos"] | None = None


@dataclass(frozen=True, eq=False)
class Trace:
    """What a program did. Entry k of a loop axis is after ``start + k`` loops.

    Attributes:
        program: Name of the program.
        start: Loops done before the first entry; 0 unless the run started later.
        variables: Variable -> values [loop + 1, batch, pos].
        outputs: The answer read at every loop [loop + 1, batch, pos]; -1 where undecided.
        selectors: Name -> selector of each loop [loop, batch, query, key]. Entry k was used in
            the loop that leads from entry k of the variables to entry k + 1.
        prepare_selectors: Name -> selector of ``prepare`` [batch, query, key].
    """

    program: str
    start: int
    variables: Mapping[str, Int[Tensor, "loops batch pos"]]
    outputs: Int[Tensor, "loops batch pos"]
    selectors: Mapping[str, Bool[Tensor, "loop batch query key"]]
    prepare_selectors: Mapping[str, Bool[Tensor, "batch query key"]]

    @property
    def n_loops(self) -> int:
        """Loops done at the end, counted from ``prepare``."""
        return self.start + len(self.outputs) - 1

    def settled(self, variable: str) -> Int[Tensor, "batch pos"]:
        """The first entry from which the variable keeps the value it has at the end.

        Raises:
            InputError: the program has no such variable.
        """
        check_choice(f"variable of program {self.program}", variable, self.variables)
        values = self.variables[variable]
        still_moving = (values != values[-1]).flip(0).cummax(dim=0).values
        return still_moving.sum(dim=0)


def run(
    program: LoopProgram,
    tokens: Int[Tensor, "batch pos"],
    *,
    n_loops: int,
    interventions: Sequence[Intervention] = (),
    start_at_loop: int = 0,
    variables: Mapping[str, Int[Tensor, "batch pos"]] | None = None,
) -> Trace:
    """Run loops ``start_at_loop`` .. ``n_loops - 1``, with interventions, and trace.

    Args:
        program: The program.
        tokens: Input tokens [batch, pos], int64.
        n_loops: Loops done at the end, counted from ``prepare``.
        interventions: Values to put in place of computed ones; each must fall within the run.
        start_at_loop: Loops done before the first one that is run here.
        variables: Values [batch, pos] of the variables after ``start_at_loop`` loops. Those that
            are not given come from ``prepare``; with ``start_at_loop > 0`` every variable that
            ``step`` sets must be given.

    Raises:
        InputError: wrong tokens, loops out of range, an unknown or missing variable, or values of
            a wrong shape, dtype or device.
    """
    given = dict(variables or {})
    _check_run(program, tokens, n_loops, start_at_loop)
    _check_start(program, tokens, given, start_at_loop)
    for change in interventions:
        _check_intervention(program, tokens, change, range(start_at_loop, n_loops + 1))
    interpreter = Interpreter(tokens)
    prepared = interpreter.run(program.orders["prepare"], {}, program.prepare.values())
    state = {name: prepared[x] for name, x in program.prepare.items()} | given
    shape = (n_loops - start_at_loop + 1, *tokens.shape)
    kept = {name: tokens.new_empty(shape) for name in program.prepare}
    outputs = tokens.new_empty(shape)
    for entry, loop in enumerate(range(start_at_loop, n_loops + 1)):
        if entry:
            values = interpreter.run(program.orders["step"], state, program.step.values())
            state |= {name: values[x] for name, x in program.step.items()}
        for change in interventions:
            if change.loop == loop:
                old, new = state[change.variable], change.values
                state[change.variable] = new if change.mask is None else new.where(change.mask, old)
        for name, value in state.items():
            kept[name][entry] = value
        finished = interpreter.run(program.orders["finish"], state, [program.finish])
        outputs[entry] = finished[program.finish]
    in_prepare = selectors(program.prepare.values())
    return Trace(
        program=program.name,
        start=start_at_loop,
        variables=kept,
        outputs=outputs,
        selectors=_LazySelectors(program.selectors, interpreter, kept, n_loops - start_at_loop),
        prepare_selectors=_LazySelectors(in_prepare, interpreter, {}),
    )


def counterfactual(
    program: LoopProgram,
    base: Int[Tensor, "batch pos"],
    source: Int[Tensor, "batch pos"],
    variable: str,
    loop: int | Sequence[int],
    mask: Bool[Tensor, "batch pos"] | None = None,
    *,
    n_loops: int,
) -> Trace:
    """The run of ``base`` with one variable taken from the run of ``source``.

    Args:
        program: The program.
        base: Tokens [batch, pos] of the run that is changed.
        source: Tokens of the run whose values are put in, pair by pair.
        variable: The variable.
        loop: After how many loops it is replaced (0 is after ``prepare``), or several such.
        mask: Where it is replaced [batch, pos]; everywhere if omitted.
        n_loops: Loops of the whole run.

    Raises:
        InputError: an unknown variable, a loop beyond the run, or inputs of different shapes.
    """
    if base.shape != source.shape:
        raise InputError(
            "source",
            expected=f"the shape of base, {list(base.shape)}",
            given=str(list(source.shape)),
            fix="Pass pairs of inputs of equal length.",
        )
    loops = [loop] if isinstance(loop, int) else list(loop)
    check_choice(f"variable of program {program.name}", variable, program.prepare)
    for t in loops:
        _check_within(f"loop of the counterfactual on {variable!r}", t, range(n_loops + 1))
    donor = program.run(source, n_loops=max(loops, default=0)).variables[variable]
    changes = [Intervention(variable, t, donor[t], mask) for t in loops]
    return program.run(base, n_loops=n_loops, interventions=changes)


class _LazySelectors(Mapping[str, "Tensor"]):
    """Selectors by name, computed from the variables of a run when they are asked for.

    So a trace holds no [loop, batch, query, key] numbers; and a selector that is the same at
    every loop, or for every example, is one tensor seen through axes of stride 0. With no
    ``n_loops``, selectors have no loop axis.
    """

    def __init__(
        self,
        selects: Mapping[str, Select],
        interpreter: Interpreter,
        variables: Mapping[str, Tensor],
        n_loops: int | None = None,
    ) -> None:
        self._selects, self._interpreter = selects, interpreter
        self._variables, self._n_loops = variables, n_loops

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._selects:
            raise KeyError(str(unknown_name("selector", name, self._selects)))
        select = self._selects[name]
        if self._n_loops is None:
            return self._at(select, {})
        if not select.variables:
            once = self._at(select, {})
            return once.expand(self._n_loops, *once.shape)
        batch, pos = self._interpreter.tokens.shape
        out = self._interpreter.tokens.new_empty((self._n_loops, batch, pos, pos), dtype=torch.bool)
        for loop, selected in enumerate(out):
            selected[:] = self._at(select, {n: x[loop] for n, x in self._variables.items()})
        return out

    def _at(self, select: Select, state: Mapping[str, Tensor]) -> Tensor:
        value = self._interpreter.run(postorder([select]), state, [select])[select]
        return value.expand(len(self._interpreter.tokens), *value.shape[1:])

    def __contains__(self, name: object) -> bool:
        return name in self._selects

    def __iter__(self) -> Iterator[str]:
        return iter(self._selects)

    def __len__(self) -> int:
        return len(self._selects)


def _check_run(program: LoopProgram, tokens: Tensor, n_loops: int, start_at_loop: int) -> None:
    check_tokens(tokens, len(program.inputs), f"tokens of program {program.name}")
    if tokens.numel() == 0:
        raise InputError(
            f"tokens of program {program.name}",
            expected="at least one example and one position",
            given=f"shape {list(tokens.shape)}",
            fix="Pass a non-empty batch.",
        )
    check_integer("n_loops", n_loops, least=0)
    fix = "n_loops counts from prepare: pass start_at_loop + the loops to run."
    check_integer("start_at_loop", start_at_loop, least=0, most=n_loops, fix=fix)
    size = (n_loops - start_at_loop + 1) * (len(program.prepare) + 1) * tokens.numel()
    if size > MAX_TRACE:
        raise InputError(
            f"trace of program {program.name}",
            expected=f"at most {MAX_TRACE:,} values (loops x variables x batch x positions)",
            given=f"{size:,}",
            fix="Run fewer loops or examples at a time; start_at_loop takes a run up again.",
        )


def _check_start(
    program: LoopProgram, tokens: Tensor, given: Mapping[str, Tensor], start_at_loop: int
) -> None:
    for name, values in given.items():
        check_choice(f"variable of program {program.name}", name, program.prepare)
        _check_values(f"values of variable {name!r}", values, tokens, torch.int64)
    missing = [name for name in program.step if name not in given]
    if start_at_loop > 0 and missing:
        raise InputError(
            f"variables at loop {start_at_loop} of program {program.name}",
            expected=f"values of {', '.join(program.step)}",
            given=f"none of {', '.join(missing)}",
            fix="Take them from a trace: {name: trace.variables[name][t] for name in ...}.",
        )


def _check_intervention(
    program: LoopProgram, tokens: Tensor, change: Intervention, loops: range
) -> None:
    check_choice(f"variable of program {program.name}", change.variable, program.prepare)
    what = f"intervention on {change.variable!r}"
    _check_within(f"loop of the {what}", change.loop, loops)
    _check_values(f"values of the {what}", change.values, tokens, torch.int64)
    if change.mask is not None:
        _check_values(f"mask of the {what}", change.mask, tokens, torch.bool)


def _check_within(what: str, loop: int, loops: range) -> None:
    fix = "t means after t loops; run more loops, or choose an earlier one."
    check_integer(what, loop, least=loops.start, most=loops.stop - 1, fix=fix)


def _check_values(what: str, values: Tensor, tokens: Tensor, dtype: torch.dtype) -> None:
    given = (values.dtype, tuple(values.shape), values.device)
    wanted = (dtype, tuple(tokens.shape), tokens.device)
    if given != wanted:
        raise InputError(
            what,
            expected=f"{dtype} of shape {list(tokens.shape)} on {tokens.device}",
            given=f"{values.dtype} of shape {list(values.shape)} on {values.device}",
            fix="Pass one value per example and position, as the tokens have.",
        )
