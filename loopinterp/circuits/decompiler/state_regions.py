"""Values of a token as regions of the space of its states, cut by half-spaces."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from loopinterp.short_repr import ShortRepr

if TYPE_CHECKING:
    from jaxtyping import Float, Int
    from torch import Tensor


@dataclass(frozen=True, eq=False)
class Cut(ShortRepr):
    """One value becomes two: states beyond a plane get a new one.

    Attributes:
        token: Of which token.
        value: Which value is cut.
        new: Number of the new one.
        normal: Direction of the plane's normal.
        offset: ``state @ normal + offset > 0`` is beyond it.
    """

    token: int
    value: int
    new: int
    normal: Float[Tensor, " d_model"] = field(repr=False)
    offset: float = field(repr=False)

    def __call__(
        self,
        values: Int[Tensor, "*place"],
        tokens: Int[Tensor, "*place"],
        states: Float[Tensor, "*place d_model"],
    ) -> Int[Tensor, "*place"]:
        """The values after one more cut."""
        here = ((tokens == self.token) & (values == self.value)).flatten().nonzero().squeeze(1)
        # Rows of a matrix are taken many times faster than places along several axes.
        rows = states.reshape(-1, states.shape[-1]).index_select(0, here)
        beyond = here[rows @ self.normal + self.offset > 0]
        return values.flatten().index_fill(0, beyond, self.new).view(values.shape)


@dataclass(frozen=True)
class StateRegions(ShortRepr):
    """Where the states of each value lie.

    A state's value is at first the answer that is read there; then the cuts are made in turn.

    Attributes:
        answers: Token -> the answers that its states give; their places are the first values.
        cuts: In the order in which they are made.
    """

    answers: Mapping[int, tuple[int, ...]]
    cuts: tuple[Cut, ...] = field(default=(), repr=False)

    @property
    def sizes(self) -> dict[int, int]:
        """Token -> how many values it has."""
        sizes = {token: len(of) for token, of in self.answers.items()}
        for cut in self.cuts:
            sizes[cut.token] += 1
        return sizes

    def and_cut(self, cut: Cut) -> StateRegions:
        """The same with one more cut."""
        return StateRegions(self.answers, (*self.cuts, cut))

    def values(
        self,
        tokens: Int[Tensor, "*place"],
        states: Float[Tensor, "*place d_model"],
        answers: Int[Tensor, "*place"],
    ) -> Int[Tensor, "*place"]:
        """The value of each state; 0 for an answer that the token never gave.

        Args:
            tokens: What stands there.
            states: The states.
            answers: What is read from them.
        """
        values = torch.zeros_like(tokens)
        for token, of in self.answers.items():
            for value, answer in enumerate(of):
                values[(tokens == token) & (answers == answer)] = value
        for cut in self.cuts:
            values = cut(values, tokens, states)
        return values
