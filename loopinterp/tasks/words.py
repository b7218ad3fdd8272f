"""Examples of a task in words, as people write them: ``1011 + 0110 = 10001``."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from loopinterp.core.errors import InputError, check_integer
from loopinterp.tasks.task import IGNORE, Batch, inputs_of

if TYPE_CHECKING:
    from jaxtyping import Int
    from torch import Tensor


class InWords:
    """Base of tasks that write their examples in words; a subclass writes one in :meth:`say`."""

    @abstractmethod
    def targets(self, inputs: Any) -> Int[Tensor, "batch pos"]:
        """The exact answer; see :meth:`Task.targets`."""

    @abstractmethod
    def n_positions(self, n: int) -> int:
        """Positions of an example of length n; see :meth:`Task.n_positions`."""

    def say(self, row: Sequence[Any], answer: Sequence[int] | None) -> str:
        """One example in words; by default the numbers themselves.

        Args:
            row: The inputs [pos] as plain numbers.
            answer: An answer at each position, if any.
        """
        words = " ".join(map(str, row))
        return words if answer is None else f"{words} = {spell(answer, separator=' ')}"

    def decode(
        self, inputs: Batch | Tensor, answers: Int[Tensor, "batch pos"] | None = None
    ) -> list[str]:
        """Examples in words, numbers with the most significant digit first.

        Args:
            inputs: A batch, shown with its right answers; or inputs alone, shown without.
            answers: Other answers, such as a model's ``logits.argmax(-1)``.

        Raises:
            InputError: inputs that are not of this task, or answers of another shape.

        Example:
            >>> from loopinterp.tasks import TokenAddition
            >>> task = TokenAddition()
            >>> batch = task.encode([(11, 6)], n=4)
            >>> task.decode(batch), task.decode(batch.inputs)
            (['1011 + 0110 = 10001'], ['1011 + 0110 ='])
        """
        batch = inputs if isinstance(inputs, Batch) else None
        rows = inputs_of(inputs)
        right = self.right_answers(inputs)  # refuses the inputs of another task
        if answers is None and batch is not None:
            answers = batch.targets
        if answers is not None and answers.shape != right.shape:
            raise InputError(
                "answers",
                expected=f"one for each position, of shape {list(right.shape)}",
                given=f"shape {list(answers.shape)}",
                fix="Pass e.g. logits.argmax(-1).",
            )
        # A batch knows where each example ends; padded features do not show it.
        lengths = batch.n.tolist() if batch else [None] * len(rows)
        answer_rows = [None] * len(rows) if answers is None else answers.tolist()
        return [
            self.say(self.unpadded(row, n), answer and self.unpadded(answer, n))
            for row, answer, n in zip(rows.tolist(), answer_rows, lengths)
        ]

    def right_answers(self, inputs: Batch | Tensor) -> Int[Tensor, "batch pos"]:
        """The exact answer to the inputs of :meth:`decode`, which it refuses if of another task."""
        return self.targets(inputs_of(inputs))

    def unpadded(self, row: Sequence[Any], n: int | None) -> Sequence[Any]:
        """An example of length n without the padding on its right."""
        return row if n is None else row[: self.n_positions(n)]

    def show(
        self, batch: Batch, answers: Int[Tensor, "batch pos"] | None = None, *, most: int = 8
    ) -> None:
        """Print examples with their right answers, and where other answers are wrong.

        Args:
            batch: The examples.
            answers: A model's answers, ``logits.argmax(-1)``.
            most: Number of examples to print.

        Raises:
            InputError: as :meth:`decode`.

        Example:
            >>> from loopinterp.tasks import TokenAddition
            >>> batch = TokenAddition().encode([(11, 6), (1, 2)], n=4)
            >>> answers = batch.targets.clone()
            >>> answers[1, -3] = 0
            >>> TokenAddition().show(batch, answers)
            1011 + 0110 = 10001
            0001 + 0010 = 00011, answered 00001
        """
        shown = batch[: check_integer("most", most, least=1)]
        lines = self.decode(shown)
        if answers is not None:
            answers = answers[:most]
            others = self.decode(shown, answers)
            right = ((answers == shown.targets) | (shown.targets == IGNORE)).all(1).tolist()
            for k, other in enumerate(others):
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
    """Values as one word each, ``?`` where there is none; ``turned`` puts the last one first.

    Example:
        >>> spell([0, 1, 1], turned=True), spell([0, -100, 2], ["a", "b"])
        ('110', 'a??')
    """

    def word(value: int) -> str:
        if words is None:
            return str(value) if value >= 0 else "?"
        return words[value] if 0 <= value < len(words) else "?"

    spelt = [word(int(value)) for value in values]
    return separator.join(reversed(spelt) if turned else spelt)


def until(values: Sequence[int], end: int) -> Sequence[int]:
    """The values before the first ``end``; all of them where there is none.

    Example:
        >>> until([1, 0, 2, 2], 2)
        [1, 0]
    """
    return values[: values.index(end)] if end in values else values
