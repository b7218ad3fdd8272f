"""Running a loop program: its trace, interventions on its variables, and counterfactuals."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch

from loopinterp.errors import InputError, check_integer, unknown_name
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
        if variable not in self.variables:
            raise unknown_name(f"variable of program {self.program}", variable, self.variables)
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
    """Run a program and trace it; see :meth:`LoopProgram.run`."""
    check_tokens(tokens, len(program.inputs), f"tokens of program {program.name}")
    if tokens.numel() == 0:
        raise InputError(
            f"tokens of program {program.name}",
            expected="at least one example and one position",
            given=f"shape {list(tokens.shape)}",
            fix="Pass a non-empty batch.",
        )
    _check_loops(n_loops, start_at_loop)
    _check_size(program, tokens, n_loops - start_at_loop)
    planned = _plan(program, tokens, interventions, start_at_loop, n_loops)
    interpreter = Interpreter(tokens)
    prepared = interpreter.run(program.orders["prepare"], {}, program.prepare.values())
    state = {name: prepared[x] for name, x in program.prepare.items()}
    state.update(_starting_values(program, tokens, variables or {}, start_at_loop))

    record = _Record(program, interpreter, start_at_loop, n_loops)
    for loop in range(start_at_loop, n_loops + 1):
        if loop > start_at_loop:
            values = interpreter.run(program.orders["step"], state, program.step.values())
            state = {**state, **{name: values[x] for name, x in program.step.items()}}
        for change in planned.get(loop, ()):
            old = state[change.variable]
            mask = torch.ones_like(tokens, dtype=torch.bool) if change.mask is None else change.mask
            state[change.variable] = torch.where(mask, change.values, old)
        finished = interpreter.run(program.orders["finish"], state, [program.finish])
        record.add(loop, state, finished[program.finish])
    return record.trace()


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
    if variable not in program.prepare:
        raise unknown_name(f"variable of program {program.name}", variable, program.prepare)
    for t in loops:
        _check_within(f"loop of the counterfactual on {variable!r}", t, 0, n_loops)
    donor = program.run(source, n_loops=max(loops, default=0)).variables[variable]
    changes = [Intervention(variable, t, donor[t], mask) for t in loops]
    return program.run(base, n_loops=n_loops, interventions=changes)


class _Record:
    """Collects what a trace holds while the program runs."""

    def __init__(
        self, program: LoopProgram, interpreter: Interpreter, start_at_loop: int, n_loops: int
    ) -> None:
        self.program, self.interpreter, self.start = program, interpreter, start_at_loop
        self.n_steps = n_loops - start_at_loop
        tokens = interpreter.tokens
        shape = (self.n_steps + 1, *tokens.shape)
        self.variables = {name: tokens.new_empty(shape) for name in program.prepare}
        self.outputs = tokens.new_empty(shape)

    def add(self, loop: int, state: Mapping[str, Tensor], output: Tensor) -> None:
        for name, values in self.variables.items():
            values[loop - self.start] = state[name]
        self.outputs[loop - self.start] = output

    def trace(self) -> Trace:
        in_step, in_prepare = self.program.selectors, selectors(self.program.prepare.values())
        return Trace(
            program=self.program.name,
            start=self.start,
            variables=self.variables,
            outputs=self.outputs,
            selectors=_Lazy({name: partial(self._over_loops, s) for name, s in in_step.items()}),
            prepare_selectors=_Lazy(
                {name: partial(self._one, select) for name, select in in_prepare.items()}
            ),
        )

    def _one(self, select: Select, loop: int | None = None) -> Tensor:
        """A selector [batch, query, key], with the variables as they were after ``loop`` loops."""
        state = {} if loop is None else {name: x[loop] for name, x in self.variables.items()}
        value = self.interpreter.run(postorder([select]), state, [select])[select]
        batch, pos = self.interpreter.tokens.shape
        return value.expand(batch, pos, pos)

    def _over_loops(self, select: Select) -> Tensor:
        """A selector at every loop [loop, batch, query, key]."""
        batch, pos = self.interpreter.tokens.shape
        if not select.variables:
            return self._one(select).expand(self.n_steps, batch, pos, pos)
        out = torch.empty(
            (self.n_steps, batch, pos, pos),
            dtype=torch.bool,
            device=self.interpreter.tokens.device,
        )
        for loop in range(self.n_steps):
            out[loop] = self._one(select, loop)
        return out


class _Lazy(Mapping[str, "Tensor"]):
    """Selectors by name, computed from the variables when they are asked for.

    So a trace holds no [loop, batch, query, key] numbers; and a selector that is the same at
    every loop, or for every example, is one tensor seen through axes of stride 0.
    """

    def __init__(self, makers: Mapping[str, Callable[[], Tensor]]) -> None:
        self._makers = makers

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._makers:
            raise KeyError(str(unknown_name("selector", name, self._makers)))
        return self._makers[name]()

    def __contains__(self, name: object) -> bool:
        return name in self._makers

    def __iter__(self) -> Iterator[str]:
        return iter(self._makers)

    def __len__(self) -> int:
        return len(self._makers)


def _check_loops(n_loops: int, start_at_loop: int) -> None:
    check_integer("n_loops", n_loops, least=0)
    fix = "n_loops counts from prepare: pass start_at_loop + the loops to run."
    check_integer("start_at_loop", start_at_loop, least=0, most=n_loops, fix=fix)


def _check_size(program: LoopProgram, tokens: Tensor, n_steps: int) -> None:
    size = (n_steps + 1) * (len(program.prepare) + 1) * tokens.numel()
    if size > MAX_TRACE:
        raise InputError(
            f"trace of program {program.name}",
            expected=f"at most {MAX_TRACE:,} values (loops x variables x batch x positions)",
            given=f"{size:,}",
            fix="Run fewer loops or examples at a time; start_at_loop takes a run up again.",
        )


def _check_within(what: str, loop: int, first: int, last: int) -> None:
    fix = "t means after t loops; run more loops, or choose an earlier one."
    check_integer(what, loop, least=first, most=last, fix=fix)


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


def _plan(
    program: LoopProgram,
    tokens: Tensor,
    interventions: Sequence[Intervention],
    first: int,
    last: int,
) -> dict[int, list[Intervention]]:
    """The interventions by loop, checked."""
    planned: dict[int, list[Intervention]] = {}
    for change in interventions:
        if change.variable not in program.prepare:
            raise unknown_name(
                f"variable of program {program.name}", change.variable, program.prepare
            )
        what = f"intervention on {change.variable!r}"
        _check_within(f"loop of the {what}", change.loop, first, last)
        _check_values(f"values of the {what}", change.values, tokens, torch.int64)
        if change.mask is not None:
            _check_values(f"mask of the {what}", change.mask, tokens, torch.bool)
        planned.setdefault(change.loop, []).append(change)
    return planned


def _starting_values(
    program: LoopProgram,
    tokens: Tensor,
    variables: Mapping[str, Tensor],
    start_at_loop: int,
) -> dict[str, Tensor]:
    """The values to start from, checked."""
    for name, values in variables.items():
        if name not in program.prepare:
            raise unknown_name(f"variable of program {program.name}", name, program.prepare)
        _check_values(f"values of variable {name!r}", values, tokens, torch.int64)
    missing = [name for name in program.step if name not in variables]
    if start_at_loop > 0 and missing:
        raise InputError(
            f"variables at loop {start_at_loop} of program {program.name}",
            expected=f"values of {', '.join(program.step)}",
            given=f"none of {', '.join(missing)}",
            fix="Take them from a trace: {name: trace.variables[name][t] for name in ...}.",
        )
    return dict(variables)
