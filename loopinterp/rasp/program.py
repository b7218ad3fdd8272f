"""Loop programs: prepare once, step T(n) times, finish."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from types import MappingProxyType
from typing import TYPE_CHECKING

from loopinterp.errors import InputError, unknown_name
from loopinterp.rasp import graph
from loopinterp.rasp.expr import Select, Seq, need_seq
from loopinterp.rasp.expression_checks import MAX_TABLE
from loopinterp.rasp.node import Expr
from loopinterp.rasp.trace import Trace, run

if TYPE_CHECKING:
    from jaxtyping import Int
    from torch import Tensor

    from loopinterp.rasp.counts import LoopCount


@dataclass(frozen=True)
class LoopProgram:
    """A program with a loop, as data: v^(0) = prepare(x), v^(t+1) = step(x, v^(t)), y = finish.

    The assignments of ``step`` are simultaneous: each reads the variables as they were at the
    start of the loop. A variable that ``step`` does not set keeps its value. The tokens can be
    read at every loop, as a looped transformer reads its injected input.

    Args:
        name: What the program is called.
        task: Name of the task it solves.
        inputs: What each input token means; the tokens are 0 .. len(inputs) - 1.
        prepare: Variable -> its value before the first loop. Reads the tokens only.
        step: Variable -> its value after one loop.
        finish: The answer, which can be read at any loop; ``UNKNOWN`` where it is undecided.
        n_loops: T(n), the loops after which the answer is right for length n.
        doc: The idea, in a sentence or two.
        task_settings: Settings of that task, where they are not its defaults.

    Raises:
        InputError: a selector where a sequence belongs, an unknown variable, a variable that
            ``prepare`` does not set, or two selectors of one name.

    Example:
        >>> from loopinterp.rasp import Linear, full, shift_right, tokens, var
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
    prepare: Mapping[str, Seq]
    step: Mapping[str, Seq]
    finish: Seq
    n_loops: LoopCount
    doc: str = field(default="", compare=False)
    task_settings: Mapping[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for part in ("prepare", "step"):
            given = dict(getattr(self, part))
            for name, x in given.items():
                need_seq(x, f"{part} of program {self.name}, variable {name!r}")
            object.__setattr__(self, part, MappingProxyType(given))
        object.__setattr__(self, "task_settings", MappingProxyType(dict(self.task_settings)))
        need_seq(self.finish, f"finish of program {self.name}")
        object.__setattr__(self, "inputs", tuple(islice(self.inputs, MAX_TABLE + 1)))
        self._check_inputs()
        self._check_variables()
        self._check_selectors()
        if not callable(self.n_loops):
            raise InputError(
                f"n_loops of program {self.name}",
                expected="T(n) as a function of n, such as Linear(offset=1) for n + 1",
                given=repr(self.n_loops),
                fix="Pass Linear(...) or CeilLog2(...).",
            )

    def __hash__(self) -> int:
        steps = (tuple(self.prepare.items()), tuple(self.step.items()), self.finish)
        return hash((self.name, self.task, self.inputs, steps, self.n_loops))

    def __str__(self) -> str:
        from loopinterp.rasp.expression_code import program_code

        return program_code(self)

    @property
    def variables(self) -> tuple[str, ...]:
        """Names of all variables, in the order of ``prepare``."""
        return tuple(self.prepare)

    @property
    def selectors(self) -> dict[str, Select]:
        """The selectors of ``step`` by name."""
        return graph.selectors(self.step.values())

    @cached_property
    def orders(self) -> dict[str, list[Expr]]:
        """The nodes of each part, children before parents."""
        return {
            "prepare": graph.postorder(self.prepare.values()),
            "step": graph.postorder(self.step.values()),
            "finish": graph.postorder([self.finish]),
        }

    @property
    def expressions(self) -> list[Seq]:
        """All of them: those of ``prepare``, of ``step``, and the answer."""
        return [*self.prepare.values(), *self.step.values(), self.finish]

    def trace(self, tokens: Int[Tensor, "batch pos"], n_loops: int) -> Trace:
        """Run, and return every variable, selector and output at every loop.

        Raises:
            InputError: the tokens are not of this program, or ``n_loops`` is negative.
        """
        return self.run(tokens, n_loops=n_loops)

    run = run

    def _check_inputs(self) -> None:
        if not 0 < len(self.inputs) <= MAX_TABLE:
            raise InputError(
                f"inputs of program {self.name}",
                expected=f"1 to {MAX_TABLE:,} input tokens",
                given="more" if self.inputs else "none",
                fix="List what each token means, once.",
            )

    def _check_variables(self) -> None:
        if not self.prepare or not self.step:
            raise InputError(
                f"program {self.name}",
                expected="at least one variable in prepare and one in step",
                given="none",
                fix="Give prepare={'x': ...} and step={'x': ...}.",
            )
        for name, x in self.prepare.items():
            if x.variables:
                raise InputError(
                    f"prepare of program {self.name}, {name} = {x!r}",
                    expected="an expression of the tokens",
                    given=f"the variable {min(x.variables)!r}, which has no value yet",
                    fix="Use that variable's own expression.",
                )
        for name, x in self.step.items():
            if name not in self.prepare:
                raise InputError(
                    f"step of program {self.name}, {name} = {x!r}",
                    expected=f"a variable that prepare sets: {', '.join(self.prepare)}",
                    given=repr(name),
                    fix=f"Add {name!r} to prepare with its value before the first loop.",
                )
        for what, x in [*((f"step, {n} =", x) for n, x in self.step.items()), ("", self.finish)]:
            for name in sorted(x.variables):
                if name not in self.prepare:
                    where = f"{what or 'finish'} {x!r} of program {self.name}: variable"
                    raise unknown_name(where, name, self.prepare)

    def _check_selectors(self) -> None:
        named: dict[str, Select] = {}
        for select in graph.selects(self.expressions):
            name = select.name or repr(select)
            if named.setdefault(name, select) is not select:
                raise InputError(
                    f"selector {name!r} of program {self.name}",
                    expected="one selector of that name",
                    given=f"{named[name]!r} and {select!r}",
                    fix="Give one of them another name.",
                )
