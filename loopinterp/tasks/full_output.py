"""What the tasks with full-output prediction share: ``BOS prompt = EOS …``, answered at the ``=``.

The whole answer is read at once. It starts AT the ``=``; after it comes EOS, which is asked for
up to the padded length. Source: arXiv 2409.15647.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from loopinterp.tasks.examples_in_words import spell, until
from loopinterp.tasks.prompt_reading import answer_from, malformed, place_of
from loopinterp.tasks.rows import cut, join, same
from loopinterp.tasks.sampling import Sampler, check_length, check_tokens
from loopinterp.tasks.task import Batch

if TYPE_CHECKING:
    from jaxtyping import Int
    from torch import Tensor


class FullOutput(Sampler):
    """Base of these tasks.

    Tokens: the prompt's symbols from 0 on, then ``=``, EOS (which is also the padding), BOS.
    Output classes: the answer's symbols from 0 on, then EOS.

    Attributes:
        symbols: What the prompt is written with.
        n_answer_symbols: What the answer is written with: so many of the first symbols.
        question: What is asked about the prompt, in words.
        least_first: Which of ``"prompt"`` and ``"answer"`` have the least significant digit first.
    """

    symbols: tuple[str, ...]
    n_answer_symbols = 2
    question = "{}"
    least_first: tuple[str, ...] = ()

    @property
    def equals(self) -> int:
        return len(self.symbols)

    def prompt_length(self, n: int) -> int:
        """Longest prompt of a problem of length n."""
        return n

    def answer_length(self, n: int) -> int:
        """Longest answer to a problem of length n."""
        return n

    def say(self, row: Sequence[int], answer: Sequence[int] | None) -> str:
        equals = row.index(self.equals)
        space = " " if max(map(len, self.symbols)) > 1 else ""
        turned = {part: part in self.least_first for part in ("prompt", "answer")}
        said = spell(row[1:equals], self.symbols, separator=space, turned=turned["prompt"])
        for operator in {"+", "*"} & {*self.symbols}:
            a, b = said.split(operator)[:: -1 if turned["prompt"] else 1]
            said = f"{a} {operator} {b}"
        said = f"{self.question.format(said)} ="
        if answer is None:
            return said
        words = self.symbols[: self.n_answer_symbols]
        answer = until(answer[equals:], self.n_answer_symbols)
        return f"{said} {spell(answer, words, separator=space, turned=turned['answer'])}"

    @abstractmethod
    def _solve(self, prompt: Tensor, n: Tensor) -> tuple[Tensor, Tensor]:
        """The answers [batch, width], and how many columns of each count.

        Of the prompts [batch, width] the first ``n`` symbols of each row count; the rest are 0.
        """

    @property
    def d_vocab(self) -> int:
        return len(self.symbols) + 3

    @property
    def d_vocab_out(self) -> int:
        return self.n_answer_symbols + 1

    def n_loops(self, n: int) -> int:
        return check_length(n)

    def n_positions(self, n: int) -> int:
        """BOS, the prompt, ``=``, and room for the answer and one EOS."""
        return self.prompt_length(check_length(n)) + self.answer_length(n) + 2

    def targets(self, inputs: Batch | Tensor) -> Int[Tensor, "batch pos"]:
        """The exact answer to given inputs: from ``=`` on, then EOS; ``IGNORE`` before ``=``.

        Raises:
            InputError: the inputs are not tokens of this task, or lack a prompt or their one ``=``.
        """
        tokens = check_tokens(inputs, self.d_vocab)
        end, width = self.n_answer_symbols, tokens.shape[1]
        return answer_from(*self.solve(tokens), width=width, end=end)[1]

    def solve(
        self, tokens: Int[Tensor, "batch pos"]
    ) -> tuple[Int[Tensor, " batch"], Int[Tensor, "batch longest"], Int[Tensor, " batch"]]:
        """Where each row has its ``=``, the answer to what is before it, and that one's length.

        Raises:
            InputError: a row lacks its one ``=``, or a prompt before it.
        """
        equals = place_of(self.equals, tokens, self.name, "'='")
        n = equals - 1
        if not bool((n > 0).all()):
            raise malformed(self.name, "a prompt between BOS and the '='")
        prompt = cut(tokens, torch.ones_like(n), n)
        if prompt.numel() and int(prompt.max()) >= self.equals:
            raise malformed(self.name, f"symbols 0..{self.equals - 1} alone before the '='")
        return equals, *self._solve(prompt, n)

    def _batch(
        self,
        parts: list[tuple[Tensor, Tensor]],
        n: Int[Tensor, " batch"],
        n_loops: Int[Tensor, " batch"],
    ) -> Batch:
        """The batch of prompts that are given as parts: values, and how many of them count."""
        eos, bos = self.equals + 1, self.equals + 2
        whole = [same(bos, n), *parts, same(self.equals, n)]
        tokens = join(whole, width=self.n_positions(int(n.max())), fill=eos)
        return Batch(tokens, self.targets(tokens), n, n_loops, self)
