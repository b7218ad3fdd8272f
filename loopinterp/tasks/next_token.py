"""The tasks with full-output prediction in another form: token by token, with pauses if wanted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from pydantic import NonNegativeInt

from loopinterp.errors import ConfigError, InputError, unknown_name
from loopinterp.settings import settings
from loopinterp.tasks.bit_prompts import BinarySum, Copy, Parity
from loopinterp.tasks.examples_in_words import until
from loopinterp.tasks.full_output import FullOutput
from loopinterp.tasks.prompt_reading import malformed, place_of
from loopinterp.tasks.rows import cut, join
from loopinterp.tasks.sampling import check_tokens
from loopinterp.tasks.task import IGNORE, Batch
from loopinterp.tasks.token_arithmetic import Multiplication, TokenAddition
from loopinterp.tasks.token_by_token import TokenByToken
from loopinterp.tasks.unique_set import UniqueSet

if TYPE_CHECKING:
    from torch import Tensor


@settings
class NextToken(TokenByToken):
    """A full-output task answered token by token: ``BOS prompt = PAUSE … answer EOS``.

    The prompt is the wrapped task's, and so are its sampler, its answers, its distributions and
    T(n). Nothing is asked for at the ``=`` if pauses come after it: the last of them asks for the
    first token of the answer, each token of the answer for the next one, and the last one for EOS,
    which is in the inputs too.

    Tokens: those of the wrapped task, and PAUSE after them if there are pauses; in and out, so
    that answers are written with the prompt's symbols and EOS is the same in both. Padding is EOS.

    Args:
        of: Name of the wrapped task: any subclass of :class:`FullOutput` that has been defined.
        of_settings: Its settings.
        n_pause: Pause tokens between the ``=`` and the answer.

    Raises:
        ConfigError: the wrapped task is unknown, or none with full-output prediction.

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

    def n_loops(self, n: int) -> int:
        return self.task.n_loops(n)

    def n_positions(self, n: int) -> int:
        """Those of the wrapped task, one for each pause, and one more as EOS is in the inputs."""
        return self.task.n_positions(n) + self.n_pause + 1

    def describe(self) -> str:
        after = f" after {self.n_pause} pause tokens" if self.n_pause else ""
        return f"Token by token{after}: {self.task.describe()}"

    def say(self, row: Sequence[int], answer: Sequence[int] | None) -> str:
        equals = row.index(self.task.equals)
        if answer is not None:
            classes = self.task.n_answer_symbols
            given = until(answer[equals + self.n_pause :], self.end)
            answer = [t if t < classes else IGNORE for t in given]
            answer = [*[IGNORE] * equals, *answer, classes]
        return self.task.say(row[: equals + 1], answer)

    def from_batch(self, batch: Batch) -> Batch:
        """The wrapped task's examples in this form.

        Raises:
            InputError: the batch is not one of the wrapped task.

        Example:
            >>> from loopinterp.tasks import TokenAddition
            >>> task = NextToken(of="token_addition")
            >>> task.decode(task.from_batch(TokenAddition().encode([(11, 6)], n=4)))
            ['1011 + 0110 = 10001']
        """
        tokens = check_tokens(batch, self.task.d_vocab)
        equals = place_of(self.task.equals, tokens, self.name, "'='")
        pauses = tokens.new_full((len(batch), self.n_pause), len(self.symbols) - 1)
        parts = [(tokens, equals + 1), (pauses, torch.full_like(equals, self.n_pause))]
        prompt = join(parts, width=tokens.shape[1] + self.n_pause, fill=self.end)
        return self._batch(prompt, batch.n, batch.n_loops)

    def encode(self, *operands: Any, **options: Any) -> Batch:
        """What the wrapped task's own ``encode`` makes of its arguments, in this form.

        Raises:
            InputError: as there, or the wrapped task has none.
        """
        return self._made("encode", *operands, **options)

    def sample_operands(self, *lengths: int, batch_size: int, generator: torch.Generator) -> Batch:
        """Operands of given lengths, as the wrapped task draws them, in this form.

        Raises:
            InputError: as there, or the wrapped task has no such sampler.
        """
        return self._made("sample_operands", *lengths, batch_size=batch_size, generator=generator)

    def _made(self, how: str, *args: Any, **options: Any) -> Batch:
        make = getattr(self.task, how, None)
        if make is None:
            raise InputError(
                f"{how} of task {self.name}",
                expected=f"a wrapped task that has {how}",
                given=f"{self.of!r}, which has none",
                fix="Make a batch of the wrapped task, and pass it to from_batch.",
            )
        return self.from_batch(make(*args, **options))

    def _answer(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        equals, answer, length = self.task.solve(tokens)
        if self.n_pause:
            pauses = cut(tokens, equals + 1, torch.full_like(equals, self.n_pause))
            there = int(equals.max()) + self.n_pause < tokens.shape[1]
            if not (there and bool((pauses == len(self.symbols) - 1).all())):
                raise malformed(self.name, f"{self.n_pause} pause tokens after the '='")
        return equals + self.n_pause, answer, length

    def _draw(self, kind: str, n: Tensor, generator: torch.Generator) -> Batch:
        return self.from_batch(self.task._draw(kind, n, generator))


_OWN = (BinarySum, Copy, Multiplication, Parity, TokenAddition, UniqueSet)


def _wrappable() -> dict[str, Callable[..., FullOutput]]:
    """What makes each task that can be wrapped: the library's own, and others of their base."""
    classes: list[type[FullOutput]] = [FullOutput]
    for cls in classes:
        classes += cls.__subclasses__()
    others = {cls.name: cls for cls in classes if "name" in vars(cls)}
    return others | {cls.name: cls for cls in _OWN}
