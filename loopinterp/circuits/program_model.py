"""A looped model that is a program: ground truth for everything that compares the two."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.nn.functional import one_hot

from loopinterp.errors import InputError, check_seed, unknown_name
from loopinterp.rasp.compiler.validate import validate
from loopinterp.rasp.compiler.value_domains import infer_domains
from loopinterp.rasp.expr import Tokens
from loopinterp.rasp.language import UNKNOWN
from loopinterp.rasp.node import postorder
from loopinterp.short_repr import ShortRepr

if TYPE_CHECKING:
    from jaxtyping import Float, Int
    from torch import Tensor

    from loopinterp.rasp.program import LoopProgram

_LOGIT = 4.0


class ProgramModel(ShortRepr):
    """A program behind the protocol of looped models.

    The state at each position holds the position's token and every variable of the program, each
    as a one-hot block, turned by a random rotation so that no variable lies along the axes. A
    step reads the variables back (the largest entry of each block) and runs one loop of the
    program on the injected tokens; the readout is the program's answer, and logits of 0 where it
    is undecided. So every probe, patch and verdict has a known right result on it.

    Args:
        program: A program that can be compiled: its variables have few values.
        max_length: Positions of the longest input.
        seed: Seed of the rotation.
        hold_tokens: Whether the state holds the token too; without it, only a program whose
            answer does not read its tokens can be run.

    Raises:
        InputError: the answer reads tokens that the state does not hold, or a variable has too
            many values.

    Example:
        >>> from loopinterp.rasp import get_program
        >>> tokens = torch.tensor([[4, 3, 1, 2, 0]])
        >>> model = ProgramModel(get_program("ripple"), max_length=5)
        >>> e = model.embed(tokens)
        >>> h = model.initial_state(e)
        >>> for _ in range(4):
        ...     h = model.step(h, e)
        >>> model.readout(h).argmax(-1)[0, 1:].tolist()     # 3 + 5 = 8
        [0, 0, 0, 1]
    """

    def __init__(
        self, program: LoopProgram, *, max_length: int, seed: int = 0, hold_tokens: bool = True
    ) -> None:
        if not hold_tokens and Tokens() in postorder([program.finish]):
            raise InputError(
                "hold_tokens",
                expected=f"True, as the answer of {program.name} reads its tokens",
                given="False",
                fix="Leave it out.",
            )
        self.program, self.hold_tokens = program, hold_tokens
        source = validate(program, max_length=max_length)
        domains = infer_domains(source)
        self._values = {
            name: torch.from_numpy(np.union1d(domains[source.prepare[name]], domains[stepped]))
            for name, stepped in source.step.items()
        }
        self._sizes = [len(program.inputs), *map(len, self._values.values())]
        self.d_model = sum(self._sizes)
        self.d_vocab_out = int(domains[source.finish].max()) + 1
        generator = torch.Generator().manual_seed(check_seed(seed))
        gauss = torch.randn(self.d_model, self.d_model, generator=generator, dtype=torch.float32)
        self._rotation = torch.linalg.qr(gauss).Q

    def embed(self, inputs: Int[Tensor, "batch pos"]) -> Float[Tensor, "batch pos d_model"]:
        """The tokens, one-hot, in the first directions."""
        return one_hot(inputs, self.d_model).float()

    def initial_state(
        self, e: Float[Tensor, "batch pos d_model"]
    ) -> Float[Tensor, "batch pos d_model"]:
        """What ``prepare`` sets."""
        tokens = e.argmax(-1)
        variables = self.program.run(tokens, n_loops=0).variables
        return self._write(tokens, {name: x[-1] for name, x in variables.items()})

    def step(
        self, h: Float[Tensor, "batch pos d_model"], e: Float[Tensor, "batch pos d_model"]
    ) -> Float[Tensor, "batch pos d_model"]:
        """One loop of the program on the variables in the state."""
        tokens = e.argmax(-1)
        variables = self.program.run(tokens, n_loops=1, variables=self._read(h)[1]).variables
        return self._write(tokens, {name: x[-1] for name, x in variables.items()})

    def readout(
        self, h: Float[Tensor, "batch pos d_model"]
    ) -> Float[Tensor, "batch pos d_vocab_out"]:
        """The program's answer; no preference where it is undecided."""
        tokens, variables = self._read(h)
        answer = self.program.run(tokens, n_loops=0, variables=variables).outputs[-1]
        known = answer != UNKNOWN
        return _LOGIT * one_hot(answer * known, self.d_vocab_out) * known[..., None]

    def direction(self, variable: str, value: int) -> Float[Tensor, " d_model"]:
        """The unit vector that says that a variable has a value.

        Raises:
            InputError: the program has no such variable, or it never takes that value.
        """
        values = self._values.get(variable, torch.empty(0)).tolist()
        if value not in values:
            raise InputError(
                f"direction of {variable!r} = {value}",
                expected="a variable and one of its values: "
                + "; ".join(f"{name} {known.tolist()}" for name, known in self._values.items()),
                given=f"{variable!r} = {value}",
                fix="See program.variables.",
            )
        return self.subspace(variable)[values.index(value)]

    def subspace(self, variable: str) -> Float[Tensor, "value d_model"]:
        """The directions of all values of a variable, one a row.

        Raises:
            InputError: the program has no such variable.
        """
        if variable not in self._values:
            raise unknown_name(f"variable of program {self.program.name}", variable, self._values)
        block = list(self._values).index(variable) + 1
        return self._rotation.split(self._sizes)[block]

    def _read(self, h: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        token, *blocks = (h @ self._rotation.mT).split(self._sizes, dim=-1)
        return token.argmax(-1), {
            name: values[block.argmax(-1)]
            for (name, values), block in zip(self._values.items(), blocks)
        }

    def _write(self, tokens: Tensor, variables: dict[str, Tensor]) -> Tensor:
        token = one_hot(tokens, self._sizes[0])
        blocks = [token if self.hold_tokens else torch.zeros_like(token)]
        for name, values in self._values.items():
            index = torch.searchsorted(values, variables[name]).clamp(max=len(values) - 1)
            if bool((values[index] != variables[name]).any()):
                raise InputError(
                    f"variable {name!r} of program {self.program.name}",
                    expected=f"one of its values on up to max_length positions: {values.tolist()}",
                    given="another value",
                    fix="Build the model for longer inputs.",
                )
            blocks.append(one_hot(index, len(values)))
        return torch.cat(blocks, -1).float() @ self._rotation
