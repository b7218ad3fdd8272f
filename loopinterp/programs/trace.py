"""Traces of loop programs, and interventions on their variables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int, Shaped
from torch import Tensor

from loopinterp.core.errors import UnknownKeyError, check_choice, unknown_name
from loopinterp.core.text import ShortRepr
from loopinterp.programs.expressions import Select
from loopinterp.programs.interpreter import Interpreter


@dataclass(frozen=True, eq=False, repr=False)
class Intervention(ShortRepr):
    """Set a variable after ``loop`` loops, before the next one and before the output is read."""

    variable: str
    loop: int  # 0 is after ``prepare``, t after t steps
    values: Int[Tensor, "batch pos"]  # int64
    mask: Bool[Tensor, "batch pos"] | None = None  # where to set them; None is everywhere


@dataclass(frozen=True, eq=False, repr=False)
class Trace(ShortRepr):
    """The run of a program. Entry k of a loop axis is after ``start + k`` loops."""

    program: str
    start: int  # loops done before the first entry
    variables: Mapping[str, Int[Tensor, "loops batch pos"]]
    outputs: Int[Tensor, "loops batch pos"]  # the answer at every loop; -1 where undecided
    # By name. Entry k leads from entry k of the variables to entry k + 1.
    selectors: Mapping[str, Bool[Tensor, "loop batch query key"]]
    prepare_selectors: Mapping[str, Bool[Tensor, "batch query key"]]

    @property
    def n_loops(self) -> int:
        """Loops done at the end, counted from ``prepare``."""
        return self.start + len(self.outputs) - 1

    def converged(self, variable: str) -> Int[Tensor, "batch pos"]:
        """The first entry from which the variable keeps its final value."""
        check_choice(f"variable of program {self.program}", variable, self.variables)
        return constant_from(self.variables[variable])


def constant_from(values: Shaped[Tensor, "entry ..."]) -> Int[Tensor, ...]:
    # Reversed, the first difference from the end, and every entry before it, count.
    return (values != values[-1]).flip(0).cummax(dim=0).values.sum(dim=0)


class LazySelectors(Mapping[str, "Tensor"]):
    """Selectors by name, computed on access; by loop if ``n_loops`` is given."""

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
            raise unknown_name("selector", name, self._selects, UnknownKeyError)
        select = self._selects[name]
        if not select.variables:
            once = self._interpreter.value(select, {})  # [batch, query, key], of stride 0 by loop
            return once if self._n_loops is None else once.expand(self._n_loops, *once.shape)
        assert self._n_loops is not None  # what prepare selects reads no variable
        batch, pos = self._interpreter.tokens.shape
        out = self._interpreter.tokens.new_empty((self._n_loops, batch, pos, pos), dtype=torch.bool)
        for loop, selected in enumerate(out):
            state = {name: x[loop] for name, x in self._variables.items()}
            selected[:] = self._interpreter.value(select, state)
        return out

    def __contains__(self, name: object) -> bool:
        return name in self._selects

    def __iter__(self) -> Iterator[str]:
        return iter(self._selects)

    def __len__(self) -> int:
        return len(self._selects)
