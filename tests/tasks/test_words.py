"""Examples in words."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import pytest
import torch

from loopinterp.core.errors import InputError
from loopinterp.tasks import (
    IGNORE,
    AbacusMultiplication,
    AbacusSorting,
    Addition,
    Batch,
    ChessPuzzles,
    DecimalOperands,
    Maze,
    Multiplication,
    NextToken,
    PHop,
    PrefixSum,
    RegularLanguage,
    Sudoku,
    TokenAddition,
    get_task,
)
from loopinterp.tasks.chess import SYMBOLS
from tests.tasks.answers import IN_LANGUAGE, SETTINGS, hop_back, maze_path, small_solutions


def _column(numbers: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
    """Decimal numbers in words as digits [number, width], and how many each has."""
    wide = max(map(len, numbers))
    digits = [[int(d) for d in x[::-1].ljust(wide, "0")] for x in numbers]
    return torch.tensor(digits), torch.tensor([len(x) for x in numbers])


def _bits(text: str) -> tuple[torch.Tensor, torch.Tensor]:
    symbols = [int(word.removeprefix("s")) for word in (text.split() if "s" in text else text)]
    return torch.tensor([symbols]), torch.tensor([len(symbols)])


def _pair(question: str) -> tuple[str, str]:
    a, b = re.split(r" [+*] ", question)
    return a, b


def _encoded(task: Any, question: str) -> Batch:
    """The batch of a question in words, made from Python's numbers."""
    if isinstance(task, (Addition, TokenAddition)):
        a, b = _pair(question)
        assert len(a) == len(b)
        return task.encode([(int(a, 2), int(b, 2))], n=len(a))
    if isinstance(task, Multiplication):
        a, b = _pair(question)
        return task.encode([(int(a, 2), int(b, 2))], n=len(b), m=len(a))
    if isinstance(task, DecimalOperands):
        # Not encode: the operands of a chain may begin with zeros.
        digits, n_digits = _column(re.split(r" [+*] ", question))
        return task.from_digits(digits[None], n_digits[None])
    if isinstance(task, AbacusSorting):
        letters, numbers = zip(*(part.split(":") for part in question.split(", ")))
        return task.encode([[int(x) for x in numbers]], "".join(letters))
    if isinstance(task, NextToken):
        return task.from_batch(_encoded(task.task, question))
    if isinstance(task, (Sudoku, Maze)):
        return task.encode([question])
    if isinstance(task, ChessPuzzles):
        tokens = torch.tensor([[SYMBOLS.index(x) for x in question.replace("/", "")]])
        return Batch(tokens, task.targets(tokens), n := torch.tensor([1]), n, task)
    if isinstance(task, RegularLanguage):
        return task.encode([question.rpartition(" of ")[2]])
    if isinstance(task, PHop):
        hops, letters = question.split("-hop from each of ")
        return task.encode([letters], hops=int(hops))
    prompt = question.rpartition(" of " if " of " in question else " in ")[2]
    symbols, n = _bits(prompt)
    make = getattr(task, "from_symbols", None) or task.from_bits
    return make(symbols, n)


ORACLES: dict[str, Callable[[str, Any], str]] = {
    "copy": lambda prompt, task: prompt,
    "parity": lambda prompt, task: str(prompt.count("1") % 2),
    "binary_sum": lambda prompt, task: format(prompt.count("1"), "b"),
    "unique_set": lambda prompt, task: " ".join(dict.fromkeys(prompt.split())),
    "prefix_sum": lambda prompt, task: "".join(
        str(x % task.modulus) for x in accumulate(map(int, prompt))
    ),
    "regular_language": lambda prompt, task: "".join(
        str(int(IN_LANGUAGE[task.language](prompt[: k + 1]))) for k in range(len(prompt))
    ),
}


def _right(task: Any, question: str) -> str:
    if task.name in ORACLES:
        prompt = question.rpartition(" of " if " of " in question else " in ")[2]
        return ORACLES[task.name](prompt, task)
    if isinstance(task, PHop):
        hops, letters = question.split("-hop from each of ")
        return hop_back(letters, int(hops))
    if isinstance(task, NextToken):
        return _right(task.task, question)
    if isinstance(task, AbacusSorting):
        numbered = [part.split(":") for part in question.split(", ")]
        return ", ".join(letter for letter, x in sorted(numbered, key=lambda pair: int(pair[1])))
    if isinstance(task, DecimalOperands):
        numbers = re.split(r" [+*] ", question)
        if isinstance(task, AbacusMultiplication):
            return str(math.prod(map(int, numbers)))
        return str(sum(map(int, numbers))).zfill(max(map(len, numbers)))
    if isinstance(task, Sudoku):
        puzzle = [int(x) for x in question.replace("/", "").replace(".", "0")]
        (cells,) = small_solutions(puzzle)
        return re.sub("(....)(?=.)", r"\1/", "".join(map(str, cells)))
    if isinstance(task, Maze):
        path, n = maze_path(question), question.count("/") // 2
        return "/".join("".join(str(int((i, j) in path)) for j in range(n)) for i in range(n))
    if isinstance(task, ChessPuzzles):  # the rook mates
        (file,) = (row.index("R") for row in question.split("/") if "R" in row)
        return "{0}1{0}8".format("abcdefgh"[file])
    a, b = _pair(question)
    x, y = int(a, 2), int(b, 2)
    if isinstance(task, Multiplication):
        return format(x * y, f"0{len(a) + len(b)}b")
    if isinstance(task, TokenAddition):
        return format(x + y, f"0{len(a) + 1}b")
    n = len(a)
    return f"{(x + y) % 2**n:0{n}b} mod 2^{n}"


def _unpadded(batch: Batch, task: Any, row: int) -> torch.Tensor:
    return torch.tensor(task.unpadded(batch.inputs[row].tolist(), int(batch.n[row])))


@pytest.mark.parametrize(("name", "settings"), SETTINGS)
def test_the_words_give_back_the_tokens_and_the_answer_of_plain_python(
    name: str, settings: dict[str, object]
) -> None:
    task = get_task(name, **settings)
    generator = torch.Generator().manual_seed(0)
    for distribution in task.distributions:
        n = torch.randint(1, 7, (6,), generator=generator)
        batch = task.sample(n, generator=generator, distribution=distribution)
        for row, line in enumerate(task.decode(batch)):
            question, answer = line.split(" = ")
            again = _encoded(task, question)
            unpadded = _unpadded(batch, task, row)
            common = min(len(unpadded), again.inputs.shape[1])
            assert torch.equal(again.inputs[0, :common], unpadded[:common])
            # Shorter operands than there might be leave more padding.
            assert set(unpadded[common:].tolist()) <= {getattr(task, "end", None)}
            assert answer == _right(task, question)


@pytest.mark.parametrize(("name", "settings"), SETTINGS)
def test_inputs_alone_are_said_without_an_answer(name: str, settings: dict[str, object]) -> None:
    task = get_task(name, **settings)
    batch = task.sample(4, batch_size=3, generator=torch.Generator().manual_seed(1))
    lines, questions = task.decode(batch), task.decode(batch.inputs)
    assert all(
        line.startswith(question) and question.endswith("=")
        for line, question in zip(lines, questions)
    )


def test_other_answers_are_shown_where_they_are_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    task = Addition()
    batch = task.encode([(3, 5), (1, 1), (2, 2)], n=4)
    answers = batch.targets.masked_fill(batch.targets == IGNORE, 1)
    answers[0, 1] = 1
    task.show(batch, answers, most=2)
    shown = capsys.readouterr().out.splitlines()
    lines = [
        "0011 + 0101 = 1000 mod 2^4, answered 1001",
        "0001 + 0001 = 0010 mod 2^4",
        "… and 1 more",
    ]
    assert shown == lines


def test_a_class_that_is_no_symbol_of_an_answer_is_a_question_mark() -> None:
    batch = TokenAddition().encode([(1, 1)], n=2)
    text = "01 + 01 = ????"
    assert TokenAddition().decode(batch, torch.full_like(batch.targets, 9)) == [text]


def test_what_is_not_of_the_task_is_refused() -> None:
    batch = Addition().encode([(3, 5)], n=4)
    with pytest.raises(InputError) as caught:
        Addition().decode(batch, batch.targets[:, 1:])
    assert caught.value.what == "answers"
    with pytest.raises(InputError, match="inputs"):
        Addition().decode(torch.tensor([[4, 3, 1], [4, 5, 5]]))
    with pytest.raises(InputError, match="inputs"):
        PrefixSum().decode(batch.inputs + 2)
