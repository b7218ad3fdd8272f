"""What the tasks with full-output prediction share: ``BOS prompt = EOS …``, answered at the ``=``.

The whole answer is read at once. It starts AT the ``=``; after it comes EOS, which is asked for
up to the padded length. Source: arXiv 2409.15647.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING

import torch

from loopinterp.errors import InputError
from loopinterp.tasks.rows import join, same
from loopinterp.tasks.sampling import Sampler, check_length, check_tokens
from loopinterp.tasks.task import IGNORE, Batch

if TYPE_CHECKING:
    from jaxtyping import Int
    from torch import Tensor


class FullOutput(Sampler):
    """Base of these tasks.

    Tokens: the prompt's symbols from 0 on, then ``=``, EOS (which is also the padding), BOS.
    Output classes: the answer's symbols from 0 on, then EOS.
    """

    @property
    @abstractmethod
    def symbols(self) -> tuple[str, ...]:
        """What the prompt is written with."""

    @property
    def n_answer_symbols(self) -> int:
        """What the answer is written with: so many of the first symbols."""
        return 2

    @abstractmethod
    def prompt_length(self, n: int) -> int:
        """Longest prompt of a problem of length n."""

    @abstractmethod
    def answer_length(self, n: int) -> int:
        """Longest answer to a problem of length n."""

    @abstractmethod
    def describe(self) -> str: ...

    @abstractmethod
    def _solve(self, tokens: Tensor, equals: Tensor) -> tuple[Tensor, Tensor]:
        """The answers [batch, width], and how many columns of each count."""

    @property
    def equals(self) -> int:
        return len(self.symbols)

    @property
    def eos(self) -> int:
        return len(self.symbols) + 1

    @property
    def bos(self) -> int:
        return len(self.symbols) + 2

    @property
    def d_vocab(self) -> int | None:
        return len(self.symbols) + 3

    @property
    def d_vocab_out(self) -> int:
        return self.n_answer_symbols + 1

    def n_loops(self, n: int) -> int:
        """T(n) = n."""
        return check_length(n)

    def n_positions(self, n: int) -> int:
        """BOS, the prompt, ``=``, and room for the answer and one EOS."""
        return self.prompt_length(check_length(n)) + self.answer_length(n) + 2

    def targets(self, inputs: Batch | Tensor) -> Int[Tensor, "batch pos"]:
        """The exact answer to given inputs: from ``=`` on, then EOS; ``IGNORE`` before ``=``.

        Raises:
            InputError: the inputs are not tokens of this task, or lack their one ``=``.
        """
        tokens = inputs.inputs if isinstance(inputs, Batch) else inputs
        tokens = check_tokens(tokens, len(self.symbols) + 3)
        is_equals = tokens == self.equals
        if not bool((is_equals.sum(dim=1) == 1).all()):
            raise InputError(
                f"inputs of task {self.name}",
                expected=f"one '=' (token {self.equals}) in every row",
                given="a row with none or several",
                fix="Pass the tokens of a batch of this task.",
            )
        equals = is_equals.long().argmax(dim=1)
        answer, length = self._solve(tokens, equals)
        place = torch.arange(tokens.shape[1], device=tokens.device) - equals[:, None]
        out = answer.gather(1, place.clamp(0, answer.shape[1] - 1))
        out = out.masked_fill(place >= length[:, None], self.n_answer_symbols)
        return out.masked_fill(place < 0, IGNORE)

    def _batch(
        self,
        parts: list[tuple[Tensor, Tensor]],
        n: Int[Tensor, " batch"],
        n_loops: Int[Tensor, " batch"],
    ) -> Batch:
        """The batch of prompts that are given as parts: values, and how many of them count."""
        whole = [same(self.bos, n), *parts, same(self.equals, n)]
        tokens = join(whole, width=self.n_positions(int(n.max())), fill=self.eos)
        return Batch(tokens, self.targets(tokens), n, n_loops)


def place_of(symbol: int, tokens: Int[Tensor, "batch pos"], task: str) -> Int[Tensor, " batch"]:
    """Where each row has its one ``symbol``.

    Raises:
        InputError: a row has none, or several.
    """
    found = tokens == symbol
    if not bool((found.sum(dim=1) == 1).all()):
        raise InputError(
            f"inputs of task {task}",
            expected=f"the operator (token {symbol}) once in every row",
            given="a row with none or several",
            fix="Pass the tokens of a batch of this task.",
        )
    return found.long().argmax(dim=1)
