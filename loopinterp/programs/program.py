"""Loop programs: prepare once, step T(n) times, finish."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from html import escape
from itertools import islice, product
from types import MappingProxyType
from typing import TypeAlias

import torch
from jaxtyping import Int
from torch import Tensor

from loopinterp.core.errors import InputError, check_choice, check_integer, need, unknown_name
from loopinterp.core.text import ShortRepr
from loopinterp.programs.expressions import (
    MAX_LENGTH,
    MAX_TABLE,
    Select,
    Seq,
    TokMap,
    code,
    need_seq,
    postorder,
    selectors,
    selects,
)
from loopinterp.programs.interpreter import (
    Interpreter,
    Intervention,
    LazySelectors,
    Plans,
    Trace,
    check_values,
)
from loopinterp.programs.language import UNKNOWN, full, var
from loopinterp.tasks.sampling import check_tokens

# T(n), the required number of loops for length n; it should print and compare
RequiredLoops: TypeAlias = Callable[[int], int]


@dataclass(frozen=True)
class Linear:
    """slope * n + offset, at least 0.

    Example:
        >>> Linear(offset=-1), Linear(offset=-1)(8)
        (n - 1, 7)
    """

    slope: int = 1
    offset: int = 0

    def __call__(self, n: int) -> int:
        return max(self.slope * n + self.offset, 0)

    def __repr__(self) -> str:
        if self.slope == 0:
            return str(max(self.offset, 0))
        return _shifted("n" if self.slope == 1 else f"{self.slope} n", self.offset)


@dataclass(frozen=True)
class CeilLog2:
    """log2(n + inside), rounded up; 0 where n + inside is below 2.

    Example:
        >>> CeilLog2(inside=-1), [CeilLog2(inside=-1)(n) for n in (1, 2, 3, 9, 10)]
        (ceil(log2(n - 1)), [0, 0, 1, 3, 4])
    """

    inside: int = 0

    def __call__(self, n: int) -> int:
        return max(n + self.inside - 1, 0).bit_length()

    def __repr__(self) -> str:
        return f"ceil(log2({_shifted('n', self.inside)}))"


def _shifted(text: str, by: int) -> str:
    return text if by == 0 else f"{text} {'+' if by > 0 else '-'} {abs(by)}"


@dataclass(frozen=True, repr=False)
class LoopProgram(ShortRepr):
    """A program with a loop, as data: v^(0) = prepare(x), v^(t+1) = step(x, v^(t)), y = finish.

    The assignments of ``step`` are simultaneous; a variable that it does not set keeps its value.
    The tokens can be read at every loop, like the injected input of a looped transformer.

    Args:
        task: Name of the task it solves.
        inputs: The meaning of each input token 0 .. len(inputs) - 1.
        prepare: Variable -> value before the first loop; may read only the tokens.
        step: Variable -> its value after one loop.
        finish: The answer, which can be read at any loop; ``UNKNOWN`` where undecided.
        n_loops: T(n), the required number of loops for length n.
        doc: The idea, in a sentence or two.
        task_settings: Settings of the task that are not its defaults.

    Raises:
        InputError: If ``prepare`` does not set a variable, or two selectors have one name.

    Example:
        >>> from loopinterp.programs import Linear, full, shift_right, tokens, var
        >>> program = LoopProgram(
        ...     name="running_xor", task="prefix_sum", inputs=("0", "1", "BOS", "PAD"),
        ...     prepare={"x": full(0)}, step={"x": (tokens & 1) ^ shift_right(var("x"), 1)},
        ...     finish=var("x"), n_loops=Linear(), doc="Each position adds its own bit.",
        ... )
        >>> program.step["x"]
        (tokens & 1) ^ shift_right(var('x'), 1, default=0)
    """

    name: str
    task: str
    inputs: tuple[str, ...]
    prepare: Mapping[str, Seq] = field(hash=False)
    step: Mapping[str, Seq] = field(hash=False)
    finish: Seq
    n_loops: RequiredLoops
    doc: str = field(default="", compare=False)
    task_settings: Mapping[str, object] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        for part in ("prepare", "step"):
            assignments = dict(getattr(self, part))
            for name, x in assignments.items():
                need_seq(x, f"{part}, {name}")
            object.__setattr__(self, part, MappingProxyType(assignments))
        object.__setattr__(self, "task_settings", MappingProxyType(dict(self.task_settings)))
        need_seq(self.finish, "finish")
        object.__setattr__(self, "inputs", tuple(islice(self.inputs, MAX_TABLE + 1)))
        fits = 0 < len(self.inputs) <= MAX_TABLE
        got, expected = "more" if self.inputs else "none", f"1 to {MAX_TABLE:,} input tokens"
        self._need(fits, "inputs", expected, got, "List what each token means, once.")
        expected, fix = "T(n) as a function of n", "Pass Linear(...) or CeilLog2(...)."
        self._need(callable(self.n_loops), "n_loops", expected, repr(self.n_loops), fix)
        fix = "Give prepare={'x': ...} and step={'x': ...}."
        for part in ("prepare", "step"):
            self._need(getattr(self, part), part, "at least one variable", "none", fix)
        expected, fix = "a function of the tokens", "Use that variable's own expression."
        for name, x in self.prepare.items():
            got = f"the variable {min(x.variables, default='')!r}, which has no value yet"
            self._need(not x.variables, f"prepare, {name}", expected, got, fix)
        read = [(f"step, {name} =", x, x.variables | {name}) for name, x in self.step.items()]
        for what, x, names in [*read, ("finish", self.finish, self.finish.variables)]:
            for name in sorted(names - {*self.prepare}):
                raise unknown_name(f"{what} {x!r}: variable", name, self.prepare)
        named: dict[str, Select] = {}
        for select in selects(self.expressions):
            name = select.name or repr(select)
            if (other := named.setdefault(name, select)) is not select:
                what, got = f"selector {name!r} of program {self.name}", f"{other!r} and {select!r}"
                fix = "Give one of them another name."
                raise InputError(what, expected="one selector of that name", given=got, fix=fix)

    def _need(self, holds: object, what: str, expected: str, got: str, fix: str) -> None:
        need(holds, f"{what} of program {self.name}", expected, got, fix)

    def _shown(self) -> list[tuple[str, object]]:
        return [(name, getattr(self, name)) for name in ("name", "task", "variables", "doc")]

    def _repr_html_(self) -> str:
        return f"<pre>{escape(str(self))}</pre>"

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        values = (getattr(self, field.name) for field in fields(self))
        return type(self), tuple(dict(x) if isinstance(x, Mapping) else x for x in values)

    def __str__(self) -> str:
        """Its tables, ``prepare``, ``loop`` and ``finish``."""
        lines = [f"program {self.name} for {self.task}: T(n) = {self.n_loops}"]
        for node in postorder(self.expressions):
            if isinstance(node, TokMap) and node.name:
                rest = "" if node.default is None else f", otherwise {node.default}"
                table = str(dict(node.table))
                if len(table) > MAX_LENGTH:
                    table = f"a table of {len(node.table):,} entries"
                lines.append(f"  {node.name}: {table}{rest}")
        for part, expressions in (("prepare", self.prepare), ("loop", self.step)):
            lines.append(f"  {part}")
            lines += [f"    {name} = {code(x, short=True)}" for name, x in expressions.items()]
        return "\n".join([*lines, "  finish", f"    {code(self.finish, short=True)}"])

    @property
    def variables(self) -> tuple[str, ...]:
        """Names of all variables."""
        return tuple(self.prepare)

    @property
    def selectors(self) -> dict[str, Select]:
        """The selectors of ``step`` by name."""
        return dict(self._selectors[1])

    @cached_property
    def _selectors(self) -> tuple[dict[str, Select], dict[str, Select]]:
        """Those of ``prepare`` and of ``step``, which every run asks for."""
        return selectors(self.prepare.values()), selectors(self.step.values())

    @cached_property
    def _plans(self) -> Plans:
        return {}

    @property
    def expressions(self) -> list[Seq]:
        """Those of ``prepare`` and ``step``, and the answer."""
        return [*self.prepare.values(), *self.step.values(), self.finish]

    def unused_name(self, name: str) -> str:
        """``name``, with underscores added until no variable has it."""
        while name in self.prepare:
            name += "_"
        return name

    def trace(self, tokens: Int[Tensor, "batch pos"], n_loops: int) -> Trace:
        """Run, and return every variable, selector and output at every loop."""
        return self.run(tokens, n_loops=n_loops)

    def run(
        self,
        tokens: Int[Tensor, "batch pos"],
        *,
        n_loops: int,
        interventions: Sequence[Intervention] = (),
        start_at_loop: int = 0,
        variables: Mapping[str, Int[Tensor, "batch pos"]] | None = None,
    ) -> Trace:
        """Run loops ``start_at_loop`` .. ``n_loops - 1``, with interventions, and trace.

        Args:
            n_loops: Loops done at the end, counted from ``prepare``.
            interventions: Values that replace computed ones; each must fall within the run.
            start_at_loop: Loops done before this run.
            variables: Values of variables after ``start_at_loop`` loops; others come from
                ``prepare``. With ``start_at_loop > 0`` all variables that ``step`` sets are
                required.
        """
        start = dict(variables or {})
        self._check_run(tokens, n_loops, start_at_loop, start)
        loops = range(start_at_loop, n_loops + 1)
        for change in interventions:
            check_choice(f"variable of program {self.name}", change.variable, self.prepare)
            check_integer("loop of intervention", change.loop, least=start_at_loop, most=n_loops)
            check_values("values of intervention", change.values, tokens, torch.int64)
            if change.mask is not None:
                check_values("mask of intervention", change.mask, tokens, torch.bool)
        interpreter = Interpreter(tokens, self._plans)
        # Values that are the same for all examples have a batch axis of 1.
        prepared = interpreter.run(self.prepare.values(), {})
        state = {name: prepared[x] for name, x in self.prepare.items()} | start
        shape = (len(loops), *tokens.shape)
        history = {name: tokens.new_empty(shape) for name in self.prepare}
        outputs = tokens.new_empty(shape)
        for entry, loop in enumerate(loops):
            if entry:  # entry 0 is the state at the start
                values = interpreter.run(self.step.values(), state)
                state |= {name: values[x] for name, x in self.step.items()}
            for change in interventions:
                if change.loop == loop:
                    old, new, mask = state[change.variable], change.values, change.mask
                    state[change.variable] = new if mask is None else new.where(mask, old)
            for name, value in state.items():
                history[name][entry] = value
            outputs[entry] = interpreter.run([self.finish], state)[self.finish]
        in_prepare, in_step = self._selectors
        return Trace(
            program=self.name,
            start=start_at_loop,
            variables=history,
            outputs=outputs,
            selectors=LazySelectors(in_step, interpreter, history, n_loops - start_at_loop),
            prepare_selectors=LazySelectors(in_prepare, interpreter, {}),
        )

    def _check_run(
        self, tokens: Tensor, n_loops: int, start_at_loop: int, start: Mapping[str, Tensor]
    ) -> None:
        check_tokens(tokens, len(self.inputs), "tokens")
        expected, got = "at least one example and one position", f"shape {list(tokens.shape)}"
        self._need(tokens.numel(), "tokens", expected, got, "Pass a batch that is not empty.")
        check_integer("n_loops", n_loops, least=0)
        fix = "n_loops counts from prepare: pass start_at_loop + the loops to run."
        check_integer("start_at_loop", start_at_loop, least=0, most=n_loops, fix=fix)
        size, most = (n_loops - start_at_loop + 1) * (len(self.prepare) + 1) * tokens.numel(), 2**30
        expected = f"at most {most:,} values (loops x variables x batch x positions)"  # 8 GiB
        fix = "Run fewer loops or examples at a time; start_at_loop continues a run."
        self._need(size <= most, "trace", expected, f"{size:,}", fix)
        for name, values in start.items():
            check_choice(f"variable of program {self.name}", name, self.prepare)
            check_values(f"values of variable {name!r}", values, tokens, torch.int64)
        missing = [name for name in self.step if name not in start]
        expected, got = f"values of {', '.join(self.step)}", f"none of {', '.join(missing)}"
        fix = "Take them from a trace: {name: trace.variables[name][t] for name in ...}."
        self._need(start_at_loop == 0 or not missing, "variables", expected, got, fix)


@dataclass(frozen=True)
class ProgramOffset:
    """The part of a program that the model's state at one position and loop corresponds to."""

    shift: int = 0  # the model's state after t loops stands for the program after t + shift
    offset: int = 0  # position p stands for variables at p - offset (1: carries OUT of positions)
    lag: int = 0  # the model's answers are the program's this many loops before

    def __str__(self) -> str:
        parts = []
        if self.shift:
            side = "ahead of" if self.shift > 0 else "behind"
            parts.append(f"program {spell_loops(abs(self.shift))} {side} the model")
        if self.offset:
            parts.append(f"variables {self.offset} position to the left")
        if self.lag:
            parts.append(f"answers {spell_loops(self.lag)} late")
        return ", ".join(parts) or "loop by loop, position by position"


def alignments() -> Iterator[ProgramOffset]:
    """All program offsets that a comparison tries, zeros first."""
    for lag, offset, shift in product((0, 1), (0, 1), (0, -1, 1)):
        yield ProgramOffset(shift, offset, lag)


def with_output_lag(program: LoopProgram, lag: int) -> LoopProgram:
    """The program with answers ``lag`` loops late.

    The pending answers become variables, so an interchange moves them with the state.
    """
    for _ in range(lag):
        name = program.unused_name("answer")
        program = replace(
            program,
            prepare={**program.prepare, name: full(UNKNOWN)},
            step={**program.step, name: program.finish},
            finish=var(name),
        )
    return program


def spell_loops(n: int) -> str:
    return "1 loop" if n == 1 else f"{n} loops"
