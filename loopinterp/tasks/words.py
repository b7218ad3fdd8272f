"""Examples of a task in words: ``1011 + 0110 = 10001``."""

from __future__ import annotations

import importlib
from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any, ParamSpec

from pydantic import PositiveInt

from loopinterp.core.boundary import checked
from loopinterp.core.errors import InputError, need
from loopinterp.tasks.task import IGNORE, Batch, inputs_of

if TYPE_CHECKING:
    from typing import Concatenate

    from jaxtyping import Int
    from torch import Tensor

P = ParamSpec("P")


def or_text(encode: Callable[Concatenate[Any, P], Batch]) -> Callable[..., Batch]:
    """A method ``encode``, checked, that also takes one example as text.

    Example:
        >>> from loopinterp.tasks import Addition
        >>> task = Addition()
        >>> task.decode(task.encode("13 + 9"))
        ['01101 + 01001 = 10110 mod 2^5']
    """
    of_values = checked(encode)

    @wraps(encode)
    def call(self: Any, *examples: Any, **options: Any) -> Batch:
        text = examples[0] if examples else None
        if not isinstance(text, str):
            return of_values(self, *examples, **options)
        if more := [*examples[1:], *options]:
            raise InputError(
                "encode",
                expected="the text alone, which says its length",
                given=f"{text!r}, and {more}",
                fix="Leave the rest out, or pass a list of examples.",
            )
        return InWords.encode(self, text)

    return call


class InWords:
    """Base of tasks that write examples in words; a subclass defines :meth:`say`."""

    @abstractmethod
    def targets(self, inputs: Any) -> Int[Tensor, "batch pos"]: ...

    @abstractmethod
    def n_positions(self, n: int) -> int: ...

    @checked
    def encode(self, text: str) -> Batch:
        """The batch of one example as text (:func:`~loopinterp.tasks.typed_example`)."""
        # By name, as it imports every task.
        typed_examples = importlib.import_module("loopinterp.tasks.typed_examples")
        return typed_examples.typed_example(self, text)

    def say(self, row: Sequence[Any], answer: Sequence[int] | None) -> str:
        """One example in words: its inputs [pos], and an answer at each position, if any."""
        words = " ".join(map(str, row))
        return words if answer is None else f"{words} = {spell(answer, separator=' ')}"

    def decode(
        self, inputs: Batch | Tensor, answers: Int[Tensor, "batch pos"] | None = None
    ) -> list[str]:
        """Examples in words, numbers with the most significant digit first.

        A batch is shown with its right answers, or with others (``logits.argmax(-1)``).

        Example:
            >>> from loopinterp.tasks import TokenAddition
            >>> task = TokenAddition()
            >>> batch = task.encode([(11, 6)], n=4)
            >>> task.decode(batch), task.decode(batch.inputs)
            (['1011 + 0110 = 10001'], ['1011 + 0110 ='])
        """
        right = self.right_answers(inputs)  # refuses the inputs of another task
        rows = inputs_of(inputs).tolist()
        lengths: list[int | None] = [None] * len(rows)
        if isinstance(inputs, Batch):
            # A batch knows where each example ends; padded features do not show it.
            lengths = inputs.n.tolist()
            answers = inputs.targets if answers is None else answers
        if answers is None:
            return [self.say(self.unpadded(row, n), None) for row, n in zip(rows, lengths)]
        expected, got = f"shape {list(right.shape)}", f"{list(answers.shape)}"
        need(answers.shape == right.shape, "answers", expected, got, "Pass e.g. logits.argmax(-1).")
        return [
            self.say(self.unpadded(row, n), self.unpadded(answer, n))
            for row, answer, n in zip(rows, answers.tolist(), lengths)
        ]

    def right_answers(self, inputs: Batch | Tensor) -> Int[Tensor, "batch pos"]:
        """The exact answer to inputs of :meth:`decode`."""
        return self.targets(inputs_of(inputs))

    def unpadded(self, row: Sequence[Any], n: int | None) -> Sequence[Any]:
        """An example of length n without padding."""
        return row if n is None else row[: self.n_positions(n)]

    @checked
    def show(
        self,
        batch: Batch,
        answers: Int[Tensor, "batch pos"] | None = None,
        *,
        most: PositiveInt = 8,
    ) -> None:
        """Print ``most`` examples with their right answers, and wrong ones of ``answers``.

        Example:
            >>> from loopinterp.tasks import TokenAddition
            >>> batch = TokenAddition().encode([(11, 6), (1, 2)], n=4)
            >>> answers = batch.targets.clone()
            >>> answers[1, -3] = 0
            >>> TokenAddition().show(batch, answers)
            1011 + 0110 = 10001
            0001 + 0010 = 00011, answered 00001
        """
        shown = batch[:most]
        lines = self.decode(shown)
        if answers is not None:
            answers = answers[:most]
            right = ((answers == shown.targets) | (shown.targets == IGNORE)).all(1).tolist()
            for k, other in enumerate(self.decode(shown, answers)):
                if not right[k]:
                    lines[k] += f", answered {other.rpartition('= ')[2].partition(' mod ')[0]}"
        if len(batch) > len(shown):
            lines.append(f"… and {len(batch) - len(shown)} more")
        print("\n".join(lines))  # noqa: T201


def spell(
    values: Sequence[float],
    words: Sequence[str] | None = None,
    *,
    separator: str = "",
    turned: bool = False,
) -> str:
    """Values as words, ``?`` where there is none, in reverse if ``turned``."""
    numbers = [int(value) for value in (reversed(values) if turned else values)]
    if words is None:
        return separator.join(str(x) if x >= 0 else "?" for x in numbers)
    return separator.join(words[x] if 0 <= x < len(words) else "?" for x in numbers)


def spell_grid(cells: Sequence[str], side: int) -> str:
    """Cells row by row, with a slash between rows."""
    return "/".join("".join(cells[k : k + side]) for k in range(0, len(cells), side))


def until(values: Sequence[int], end: int) -> Sequence[int]:
    """The values before the first ``end``, if any."""
    return values[: values.index(end)] if end in values else values
