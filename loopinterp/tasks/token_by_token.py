"""Tasks with next-token prediction, and full-output tasks in that form."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from pydantic import NonNegativeInt
from torch.nn.functional import pad

from loopinterp.core.errors import ConfigError, need, unknown_name
from loopinterp.core.settings import settings
from loopinterp.tasks.addition import Multiplication, TokenAddition
from loopinterp.tasks.full_output import BinarySum, Copy, FullOutput, Parity, UniqueSet
from loopinterp.tasks.sampling import (
    Sampler,
    check_tokens,
    cut,
    inside,
    join,
    need_form,
    place_of_equals,
    put,
)
from loopinterp.tasks.task import IGNORE, Batch, or_text, until

if TYPE_CHECKING:
    from jaxtyping import Bool, Int
    from torch import Tensor


class TokenByToken(Sampler):
    """Base of tasks whose answers are tokens, which can be fed back as input.

    The last sign of the prompt and each token of the answer have the next token as target. A
    subclass defines ``_answer``.

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
        """Where the first token of each answer is predicted, the answers without ``end``, their
        lengths.

        They depend on the prompts [batch, pos] alone.
        """

    def targets(self, inputs: Batch | Tensor) -> Int[Tensor, "batch pos"]:
        """The next token from the last sign of the prompt to ``end``, else ``IGNORE``.

        Tokens after the prompt are not read.
        """
        tokens = check_tokens(inputs, self.d_vocab)
        return self._targets(*self._answer(tokens), width=tokens.shape[1])

    def _targets(self, start: Tensor, answer: Tensor, length: Tensor, *, width: int) -> Tensor:
        ignored = start.new_full((len(start), width), IGNORE)
        return put(ignored, self._with_end(answer, length), start, length + 1)

    def _with_end(self, answer: Tensor, length: Tensor) -> Tensor:
        width = int(length.max()) + 1
        return pad(answer, (0, 1))[:, :width].masked_fill(~inside(length, width), self.end)

    def prompt_of(
        self, inputs: Batch | Tensor
    ) -> tuple[Int[Tensor, "batch longest"], Bool[Tensor, "batch longest"]]:
        """The prompts, padded with ``end`` on the right, and their mask, False at the padding."""
        tokens = check_tokens(inputs, self.d_vocab)
        length = self._answer(tokens)[0] + 1
        width = int(length.max())
        mask = inside(length, width)
        return tokens[:, :width].masked_fill(~mask, self.end), mask

    def answers(
        self, inputs: Batch | Tensor
    ) -> tuple[Int[Tensor, "batch longest"], Int[Tensor, " batch"]]:
        """The right continuation of each prompt, with its ``end``, and its length."""
        _, answer, length = self._answer(check_tokens(inputs, self.d_vocab))
        return self._with_end(answer, length), length + 1

    def is_right(
        self, inputs: Batch | Tensor, generated: Int[Tensor, "batch step"]
    ) -> Bool[Tensor, " batch"]:
        """Whether generated tokens are the answer, up to their first ``end``.

        An answer that never ends is wrong.
        """
        answer, length = self.answers(inputs)
        # [batch, step]: cut, or filled up with what is no token
        missing = answer.shape[1] - generated.shape[1]
        tokens = pad(check_tokens(generated, self.d_vocab, "generated"), (0, missing), value=-1)
        return ((tokens == answer) | ~inside(length, answer.shape[1])).all(dim=1)

    def _batch(self, prompt: Tensor, n: Tensor, n_loops: Tensor | None = None) -> Batch:
        """Padded prompts with their answers; T(n) by default."""
        width = self.n_positions(int(n.max()))
        start, answer, length = self._answer(prompt)
        longest = int((start + length).max()) + 1
        expected, got = f"room for {longest} positions", f"n = {int(n.max())}, with {width}"
        need(longest <= width, "n", expected, got, "Pass the batch as the task made it.")
        # The answer's first token stands one position behind the one that asks for it.
        padded = pad(prompt, (0, width - prompt.shape[1]), value=self.end)
        tokens = put(padded, answer, start + 1, length)
        if n_loops is None:
            each, which = n.unique(return_inverse=True)
            n_loops = n.new_tensor([self.n_loops(k) for k in each.tolist()])[which]
        targets = self._targets(start, answer, length, width=width)
        return Batch(tokens, targets, n, n_loops, self)


@settings
class NextToken(TokenByToken):
    """A full-output task answered token by token: ``BOS prompt = PAUSE … answer EOS``.

    The last pause (or the ``=``) has the first token of the answer as target, each token of the
    answer the next one, and the last one EOS, also the padding. Tokens are the wrapped task's, then
    PAUSE.

    Args:
        of: Name of the wrapped :class:`FullOutput` task.
        n_pause: Pause tokens after the ``=``.

    Source: the baselines of arXiv 2409.15647.

    Example:
        >>> task = NextToken(of="copy", n_pause=2)
        >>> batch = task.sample(3, batch_size=1, generator=torch.Generator().manual_seed(0))
        >>> [task.symbols[t] for t in batch.inputs[0].tolist()]
        ['BOS', '1', '0', '1', '=', 'PAUSE', 'PAUSE', '1', '0', '1', 'EOS']
        >>> [task.symbols[t] if t >= 0 else '' for t in batch.targets[0].tolist()]
        ['', '', '', '', '', '', '1', '0', '1', 'EOS', '']
    """

    name = "next_token"
    goal = "write answers one token at a time"

    of: str = "copy"
    of_settings: dict[str, Any] = field(default_factory=dict)
    n_pause: NonNegativeInt = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.of not in _wrappable():
            raise unknown_name("of", self.of, _wrappable(), ConfigError)
        self.task  # noqa: B018  (which checks its settings)

    @cached_property
    def task(self) -> FullOutput:
        """The wrapped task."""
        return _wrappable()[self.of](**self.of_settings)

    @property
    def symbols(self) -> tuple[str, ...]:
        pause = ("PAUSE",) if self.n_pause else ()
        return (*self.task.symbols, "=", "EOS", "BOS", *pause)

    @property
    def end(self) -> int:
        return self.task.equals + 1

    @property
    def distributions(self) -> tuple[str, ...]:
        return self.task.distributions

    def _n_loops(self, n: int) -> int:
        return self.task.n_loops(n)

    def _n_positions(self, n: int) -> int:
        # Those of the wrapped task, one for each pause, and one more as EOS is in the inputs.
        return self.task.n_positions(n) + self.n_pause + 1

    def describe(self) -> str:
        after = f" after {self.n_pause} pause tokens" if self.n_pause else ""
        return f"Token by token{after}: {self.task.describe()}"

    def say(self, row: Sequence[int], answer: Sequence[int] | None) -> str:
        equals = row.index(self.task.equals)
        if answer is not None:
            classes = self.task.n_answer_symbols
            # As the wrapped task has them: from the "=" on, no token beyond its classes.
            tokens = until(answer[equals + self.n_pause :], self.end)
            answer = [t if t < classes else IGNORE for t in tokens]
            answer = [*[IGNORE] * equals, *answer, classes]
        return self.task.say(row[: equals + 1], answer)

    def from_batch(self, batch: Batch) -> Batch:
        """The wrapped task's examples in this form."""
        tokens = check_tokens(batch, self.task.d_vocab)
        equals = place_of_equals(self.task.equals, tokens, self.name)
        pauses = tokens.new_full((len(batch), self.n_pause), len(self.symbols) - 1)
        parts = [(tokens, equals + 1), (pauses, torch.full_like(equals, self.n_pause))]
        prompt = join(parts, width=tokens.shape[1] + self.n_pause, fill=self.end)
        return self._batch(prompt, batch.n, batch.n_loops)

    @or_text
    def encode(self, *operands: Any, **options: Any) -> Batch:
        """The wrapped task's ``encode``, in this form."""
        return self._rewritten("encode", *operands, **options)

    def sample_operands(self, *lengths: int, batch_size: int, generator: torch.Generator) -> Batch:
        """The wrapped task's ``sample_operands``, in this form."""
        options: dict[str, Any] = {"batch_size": batch_size, "generator": generator}
        return self._rewritten("sample_operands", *lengths, **options)

    def _rewritten(self, how: str, *args: Any, **options: Any) -> Batch:
        make: Any = getattr(self.task, how, None)
        expected, got = f"a wrapped task with {how}", f"{self.of!r}, which has none"
        fix = "Make a batch of the wrapped task, and pass it to from_batch."
        need(make is not None, "of", expected, got, fix)
        return self.from_batch(make(*args, **options))

    def _answer(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        equals, answer, length = self.task.solve(tokens)
        if self.n_pause:
            pauses = cut(tokens, equals + 1, torch.full_like(equals, self.n_pause))
            there = int(equals.max()) + self.n_pause < tokens.shape[1]
            fits = there and (pauses == len(self.symbols) - 1).all()
            need_form(fits, self.name, f"{self.n_pause} pause tokens after the '='")
        return equals + self.n_pause, answer, length

    def _draw(self, kind: str, n: Tensor, generator: torch.Generator) -> Batch:
        return self.from_batch(self.task._draw(kind, n, generator))


def _wrappable() -> dict[str, Callable[..., FullOutput]]:
    """The tasks that can be wrapped, the user's included."""
    classes: list[type[FullOutput]] = [FullOutput]
    for cls in classes:
        classes += cls.__subclasses__()
    known = {cls.name: cls for cls in classes if "name" in vars(cls)}
    library = (BinarySum, Copy, Multiplication, Parity, TokenAddition, UniqueSet)
    return known | {cls.name: cls for cls in library}  # their names cannot be taken
