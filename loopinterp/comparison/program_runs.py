"""A program's predictions of interchanges, and a looped model that runs it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from pydantic import PositiveInt
from torch.nn.functional import one_hot

from loopinterp.compiler.validation import validate
from loopinterp.core.boundary import checked
from loopinterp.core.errors import check_choice, need
from loopinterp.core.settings import Seed
from loopinterp.core.text import ShortRepr
from loopinterp.programs.expressions import Tokens, postorder
from loopinterp.programs.interpreter import Intervention
from loopinterp.programs.language import UNKNOWN
from loopinterp.programs.program import ProgramOffset, with_output_lag

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int
    from torch import Tensor

    from loopinterp.interventions.pairs import InterchangePairs
    from loopinterp.programs.interpreter import Trace
    from loopinterp.programs.program import LoopProgram

_AT_A_TIME = 2**16  # positions of all pairs that run together

SILENT = -2  # in place of an answer: the program predicts nothing


class Prediction(ShortRepr):
    """A program's answers on pairs, with and without the interchange; -1 where undecided.

    Args:
        program_offset: Loop and position of the program that stand for the model's.
        names: The variables that are interchanged; by default all, as for a whole state.
        trace: The program's clean runs (with the offset's lag) on the inputs, if available.
        steps: Delays to predict; those of the pairs' longest horizon by default.
    """

    def __init__(
        self,
        program: LoopProgram,
        pairs: InterchangePairs,
        program_offset: ProgramOffset | None = None,
        *,
        names: Sequence[str] | None = None,
        trace: Trace | None = None,
        steps: int | None = None,
    ) -> None:
        self.pairs, self.program_offset = pairs, program_offset or ProgramOffset()
        self.steps = pairs.longest if steps is None else min(steps, pairs.longest)
        shift = self.program_offset.shift
        self.program = with_output_lag(program, self.program_offset.lag)
        n_loops = pairs.n_loops + max(shift, 0)
        self.trace = trace or self.program.trace(pairs.inputs, n_loops=n_loops)
        self._names = self.program.variables if names is None else names
        loops = pairs.sites.loop, pairs.sites.source_loop
        latest = min(int(x.max()) for x in loops) if len(pairs) else 0
        expected = f"at least {-latest}, for the last loop of the pairs"
        fix = "Pass a larger shift, or pairs of later loops."
        need(latest + shift >= 0, "shift", expected, str(shift), fix)

    @cached_property
    def base(self) -> Int[Tensor, "pair delay pos"]:
        """Answers without the interchange."""
        pairs = self.pairs
        delays = torch.arange(self.steps + 1, device=pairs.loop.device)
        # [pair, delay]: the loop of the program at which each answer is read, the last one kept.
        loops = self._program_loop((pairs.loop[:, None] + delays).clamp(max=pairs.n_loops))
        return self.trace.outputs[loops, pairs.base[:, None]].to(torch.int32)

    @cached_property
    def interchanged(self) -> Int[Tensor, "pair delay pos"]:
        """Answers with the interchange."""
        n_pos = self.pairs.inputs.shape[1]
        answers = self.base.new_empty(len(self.pairs), self.steps + 1, n_pos)
        # Traces have the delay first, [delay, pair, pos]; a few pairs at a time bound memory.
        at_a_time = max(_AT_A_TIME // n_pos, 1)
        for start in range(0, len(self.pairs), at_a_time):
            rows = slice(start, start + at_a_time)
            answers[rows] = self.after(rows).outputs.transpose(0, 1)
        return answers

    def claims(self, natural: Int[Tensor, "pair delay pos"]) -> Claims:
        """Its predictions for a model with these clean answers."""
        natural = natural[:, : self.steps + 1]
        # [pair, delay, pos]: an undecided answer counts as a value, so that it may change too.
        changed = self.base != self.interchanged
        silent = changed & (self.interchanged == UNKNOWN)
        expected = torch.where(changed, self.interchanged.to(natural), natural)
        scored = self.pairs.scored[:, None]
        return Claims(
            expected=expected.masked_fill(silent | ~scored, SILENT),
            changes=(changed & ~silent & scored).any(-1),
        )

    def after(self, rows: Any) -> Trace:
        """The program's runs after some interchanges; entry k is k loops later."""
        pairs, interventions = self.pairs[rows], []
        if (second := pairs.second) is not None:
            delay = second.loop - pairs.loop
            position = (second.position - self.program_offset.offset).clamp(min=0)
            at = self._program_loop(second.source_loop), second.source, position
            values = {name: self.trace.variables[name][at] for name in self._names}
            happens, n_pos = second.made & (delay <= self.steps), pairs.inputs.shape[1]
            interventions = Intervention.of_rows(values, position, delay, happens, n_pos)
        # A step does not know its loop, so pairs of different loops run together.
        return self.program.run(
            pairs.inputs[pairs.base],
            n_loops=self.steps,
            variables=self.state(rows),
            interventions=interventions,
        )

    def state(self, rows: Any) -> dict[str, Int[Tensor, "pair pos"]]:
        """The program's variables right after some interchanges."""
        pairs = self.pairs[rows]
        # [pair, site]: positions in the program, and the loops at which both runs are read there.
        at = (pairs.positions - self.program_offset.offset).clamp(min=0)
        loop, source_loop = map(self._program_loop, (pairs.loop, pairs.source_loop[:, None]))
        variables = self.trace.variables
        state = {name: values[loop, pairs.base] for name, values in variables.items()}
        for name in self._names:
            # [pair, site]: the source's value at each position that is interchanged.
            source = variables[name][source_loop, pairs.source[:, None], at]
            state[name] = state[name].scatter(1, at, source)
        return state

    def _program_loop(self, loop: Int[Tensor, "*shape"]) -> Int[Tensor, "*shape"]:
        # The program is at its first loop before that.
        return (loop + self.program_offset.shift).clamp(min=0)


@dataclass(frozen=True, eq=False, repr=False)
class Claims(ShortRepr):
    """A program's predictions of a model's answers after an interchange, position by position.

    If the interchange changes the program's answer, that answer (nothing, if undecided); else the
    model's clean answer.

    Attributes:
        expected: The answers; :data:`SILENT` without a prediction or a scored answer.
    """

    expected: Int[Tensor, "pair delay pos"]
    changes: Bool[Tensor, "pair delay"]

    def __getitem__(self, rows: Any) -> Claims:
        return Claims(self.expected[rows], self.changes[rows])

    def agree(self, answers: Int[Tensor, "pair delay pos"]) -> Bool[Tensor, "pair delay"]:
        """Whether the whole answer is the predicted one, at each delay."""
        return ((answers == self.expected) | (self.expected == SILENT)).all(-1)

    def differ(self, other: Claims) -> Bool[Tensor, "pair delay"]:
        # [pair, delay, pos]: a position counts where both predict something.
        both = (self.expected != SILENT) & (other.expected != SILENT)
        return (both & (self.expected != other.expected)).any(-1)


def separations(claims: Sequence[Claims]) -> Bool[Tensor, "program rival pair delay"]:
    """Whether two programs predict different whole answers, for every two."""
    shape = (len(claims), len(claims), *claims[0].changes.shape)
    separated = claims[0].changes.new_zeros(shape)
    for (a, first), (b, second) in combinations(enumerate(claims), 2):
        separated[a, b] = separated[b, a] = first.differ(second)
    return separated


class ProgramModel(ShortRepr):
    """A looped model that runs a program, with known results for every tool.

    The state at each position holds its token and every variable of the program as one-hot blocks,
    under a random rotation. A step reads the variables (the largest entry of each block) and runs
    one loop of the program on the injected tokens.

    Args:
        program: A program that can be compiled: its variables have few values.
        max_length: Positions of the longest input.
        seed: Seed of the rotation.
        hold_tokens: Whether the state holds the token; without it, the program's answer must not
            read tokens.

    Example:
        >>> from loopinterp.programs import get_program
        >>> tokens = torch.tensor([[4, 3, 1, 2, 0]])
        >>> model = ProgramModel(get_program("ripple"), max_length=5)
        >>> e = model.embed(tokens)
        >>> h = model.initial_state(e)
        >>> for _ in range(4):
        ...     h = model.step(h, e)
        >>> model.readout(h).argmax(-1)[0, 1:].tolist()     # 3 + 5 = 8
        [0, 0, 0, 1]
    """

    @checked
    def __init__(
        self,
        program: LoopProgram,
        *,
        max_length: PositiveInt,
        seed: Seed = 0,
        hold_tokens: bool = True,
    ) -> None:
        reads = Tokens() in postorder([program.finish])
        expected = f"True, as the answer of {program.name} reads its tokens"
        need(hold_tokens or not reads, "hold_tokens", expected, "False", "Leave it out.")
        self.program, self.hold_tokens = program, hold_tokens
        source = validate(program, max_length=max_length)
        domains = source.domains
        # Every value that a variable takes, at the start or after a step, in order.
        self._values = {
            name: torch.from_numpy(np.union1d(domains[source.prepare[name]], domains[stepped]))
            for name, stepped in source.step.items()
        }
        self._sizes = [len(program.inputs), *map(len, self._values.values())]
        self.d_model = sum(self._sizes)
        self.d_vocab_out = int(domains[source.finish].max()) + 1
        generator = torch.Generator().manual_seed(seed)
        # A random orthogonal basis; its dtype is given, so that draws are the same everywhere.
        gauss = torch.randn(self.d_model, self.d_model, generator=generator, dtype=torch.float32)
        self._rotation = torch.linalg.qr(gauss).Q

    def embed(self, inputs: Int[Tensor, "batch pos"]) -> Float[Tensor, "batch pos d_model"]:
        """One-hot tokens, in the first directions."""
        return one_hot(inputs, self.d_model).float()

    def initial_state(
        self, e: Float[Tensor, "batch pos d_model"]
    ) -> Float[Tensor, "batch pos d_model"]:
        """The values that ``prepare`` sets."""
        return self._after(e, n_loops=0)

    def step(
        self, h: Float[Tensor, "batch pos d_model"], e: Float[Tensor, "batch pos d_model"]
    ) -> Float[Tensor, "batch pos d_model"]:
        """One loop of the program."""
        return self._after(e, n_loops=1, variables=self._read(h)[1])

    def readout(
        self, h: Float[Tensor, "batch pos d_model"]
    ) -> Float[Tensor, "batch pos d_vocab_out"]:
        """The program's answer as logits; all 0 where it is undecided."""
        tokens, variables = self._read(h)
        answer = self.program.run(tokens, n_loops=0, variables=variables).outputs[-1]
        known = answer != UNKNOWN
        return 4.0 * one_hot(answer * known, self.d_vocab_out) * known[..., None]

    def direction(self, variable: str, value: int) -> Float[Tensor, " d_model"]:
        """The unit vector of one value of a variable."""
        rows, values = self.subspace(variable), self._values[variable].tolist()
        what, expected = f"value of {variable!r}", f"one of {values}"
        need(value in values, what, expected, repr(value), "Take one of them.")
        return rows[values.index(value)]

    def subspace(self, variable: str) -> Float[Tensor, "value d_model"]:
        """The directions of all values of a variable, one a row."""
        check_choice(f"variable of program {self.program.name}", variable, self._values)
        block = list(self._values).index(variable) + 1
        return self._rotation.split(self._sizes)[block]

    def _read(self, h: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        # Back from the rotated basis: one block of one-hot coordinates each [batch, pos, value].
        token, *blocks = (h @ self._rotation.mT).split(self._sizes, dim=-1)
        return token.argmax(-1), {
            name: values[block.argmax(-1)]
            for (name, values), block in zip(self._values.items(), blocks)
        }

    def _after(self, e: Tensor, **run: Any) -> Tensor:
        tokens = e.argmax(-1)
        variables = self.program.run(tokens, **run).variables
        token = one_hot(tokens, self._sizes[0])
        blocks = [token if self.hold_tokens else torch.zeros_like(token)]
        for name, values in self._values.items():
            value = variables[name][-1]
            # [batch, pos]: values are sorted; one that is not among them is found out below.
            index = torch.searchsorted(values, value).clamp(max=len(values) - 1)
            what = f"variable {name!r} of program {self.program.name}"
            expected = f"one of its values on up to max_length positions: {values.tolist()}"
            fix = "Build the model for longer inputs."
            need((values[index] == value).all(), what, expected, "another value", fix)
            blocks.append(one_hot(index, len(values)))
        return torch.cat(blocks, -1).float() @ self._rotation
