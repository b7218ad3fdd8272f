"""What the tasks with next-token prediction share: a prompt, then its answer, and what closes it.

At the last sign of the prompt and at each token of the answer the next one is asked for.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch.nn.functional import pad

from loopinterp.errors import InputError
from loopinterp.tasks.rows import put
from loopinterp.tasks.sampling import Sampler, check_tokens, inside
from loopinterp.tasks.task import IGNORE, Batch

if TYPE_CHECKING:
    from jaxtyping import Bool, Int
    from torch import Tensor


class TokenByToken(Sampler):
    """Base of these tasks; outputs are tokens too, so that an answer can be fed back as input.

    A subclass says where an answer begins and what it is (:meth:`_answer`); from that follow the
    targets, the batches, what a decoder is given, and whether what it makes is right.

    Attributes:
        symbols: A word for each token.
        end: The token that closes an answer, and pads.
    """

    symbols: Sequence[str]
    end: int

    @property
    def d_vocab(self) -> int:
        return len(self.symbols)

    @property
    def d_vocab_out(self) -> int:
        return self.d_vocab

    @abstractmethod
    def _answer(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Where the first token of each answer is asked for, the answers, and their lengths.

        It follows from the prompts [batch, pos] alone. The answers [batch, longest] lack ``end``.
        """

    def targets(self, inputs: Batch | Tensor) -> Int[Tensor, "batch pos"]:
        """The exact next token from the last sign of the prompt to ``end``; else ``IGNORE``.

        It follows from the prompt alone: what stands after it is not read, and may be wrong or
        missing.

        Raises:
            InputError: the inputs are not tokens of this task, or a prompt is malformed.
        """
        tokens = check_tokens(inputs, self.d_vocab)
        return self._asked(*self._answer(tokens), width=tokens.shape[1])

    def _asked(self, start: Tensor, answer: Tensor, length: Tensor, *, width: int) -> Tensor:
        nothing = start.new_full((len(start), width), IGNORE)
        return put(nothing, self._closed(answer, length), start, length + 1)

    def _closed(self, answer: Tensor, length: Tensor) -> Tensor:
        """Answers with ``end`` after what counts of them."""
        width = int(length.max()) + 1
        return pad(answer, (0, 1))[:, :width].masked_fill(~inside(length, width), self.end)

    def prompt_of(
        self, inputs: Batch | Tensor
    ) -> tuple[Int[Tensor, "batch longest"], Int[Tensor, " batch"]]:
        """What a decoder is given: each prompt, padded with ``end`` on the right; its length.

        Raises:
            InputError: as :meth:`targets`.

        Example:
            >>> from loopinterp.tasks import AbacusAddition
            >>> AbacusAddition().prompt_of(AbacusAddition().encode([(95, 8), (1, 2)]))
            (tensor([[ 5,  9, 11,  8, 13],
                    [ 1, 11,  2, 13, 14]]), tensor([5, 4]))
        """
        tokens = check_tokens(inputs, self.d_vocab)
        length = self._answer(tokens)[0] + 1
        width = int(length.max())
        return tokens[:, :width].masked_fill(~inside(length, width), self.end), length

    def answers(
        self, inputs: Batch | Tensor
    ) -> tuple[Int[Tensor, "batch longest"], Int[Tensor, " batch"]]:
        """What a decoder should make of each prompt: the answer with its ``end``; its length.

        Raises:
            InputError: as :meth:`targets`.

        Example:
            >>> from loopinterp.tasks import AbacusAddition
            >>> AbacusAddition().answers(AbacusAddition().encode([(95, 8), (1, 2)]))
            (tensor([[ 3,  0,  1, 14],
                    [ 3, 14, 14, 14]]), tensor([4, 2]))
        """
        _, answer, length = self._answer(check_tokens(inputs, self.d_vocab))
        return self._closed(answer, length), length + 1

    def is_right(
        self, inputs: Batch | Tensor, generated: Int[Tensor, "batch step"]
    ) -> Bool[Tensor, " batch"]:
        """Whether generated tokens are the answer, up to and with the first ``end`` among them.

        What comes after that counts for nothing; what never ends is wrong.

        Raises:
            InputError: as :meth:`targets`, or ``generated`` are no tokens.

        Example:
            >>> import torch
            >>> from loopinterp.tasks import AbacusAddition
            >>> task, prompts = AbacusAddition(), torch.tensor([[9, 11, 8, 13]]).expand(3, -1)
            >>> task.is_right(prompts, torch.tensor([[7, 1, 14], [7, 1, 1], [7, 14, 14]])).tolist()
            [True, False, False]
        """
        answer, length = self.answers(inputs)
        missing = answer.shape[1] - generated.shape[1]
        given = pad(check_tokens(generated, self.d_vocab, "generated"), (0, missing), value=-1)
        return ((given == answer) | ~inside(length, answer.shape[1])).all(dim=1)

    def _batch(self, prompt: Tensor, n: Tensor, n_loops: Tensor | None = None) -> Batch:
        """The batch of prompts padded on the right, with their answers; T(n) by default."""
        width = self.n_positions(int(n.max()))
        start, answer, length = self._answer(prompt)
        longest = int((start + length).max()) + 1
        if longest > width:
            raise InputError(
                "n",
                expected=f"lengths of examples with room for {longest} positions",
                given=f"{int(n.max())} at most, which has {width}",
                fix="Pass the batch as the task made it.",
            )
        padded = pad(prompt, (0, width - prompt.shape[1]), value=self.end)
        tokens = put(padded, answer, start + 1, length)
        if n_loops is None:
            each, which = n.unique(return_inverse=True)
            n_loops = n.new_tensor([self.n_loops(k) for k in each.tolist()])[which]
        targets = self._asked(start, answer, length, width=width)
        return Batch(tokens, targets, n, n_loops, self)
