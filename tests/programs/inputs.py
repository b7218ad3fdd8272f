"""The inputs that programs are tried on, and the right answers in Python integers."""

from __future__ import annotations

import functools
import itertools

import torch
from jaxtyping import Int
from torch import Tensor

from loopinterp.programs import LoopProgram
from loopinterp.tasks import (
    IGNORE,
    AbacusAddition,
    Addition,
    Batch,
    BinarySum,
    Copy,
    FullOutput,
    Multiplication,
    Parity,
    PrefixSum,
    RegularLanguage,
    Task,
    TokenAddition,
    UniqueSet,
    get_task,
)
from loopinterp.tasks.abacus import ALPHABET
from loopinterp.tasks.addition import draw_bits
from loopinterp.tasks.sampling import coins
from tests.tasks.answers import ANSWERS, IN_LANGUAGE, spelled

MOST = 65_536
"""Inputs of one length that are tried; where there are more, as many random ones."""


def chains_through_bit_4(last: int) -> Int[Tensor, "batch pos"]:
    """Additions of 12 bits whose bit 2 generates or kills, and whose bits 3 .. last propagate.

    So the carry into bit 4, at position 5, has come through one bit and runs on.
    """
    generator = torch.Generator().manual_seed(0)
    a, b = draw_bits("uniform", 50, 12, generator)
    b[:, 3 : last + 1] = 1 - a[:, 3 : last + 1]
    a[:, 2] = b[:, 2] = coins(0.5, (50,), generator).long()
    return Addition().from_bits(a, b, torch.full((50,), 12)).inputs


def task_of(program: LoopProgram) -> Task:
    return get_task(program.task, **program.task_settings)


def answer(task: Task, tokens: list[int], n: int) -> list[int]:
    """The right outputs at the positions that are asked for, in Python integers."""
    if isinstance(task, FullOutput):
        spelling = spelled(task)
        prompt = "".join(spelling[t] for t in tokens[1 : tokens.index(spelling.index("="))])
        classes = [spelling.index(c) for c in ANSWERS[task.name](prompt)]
        end = [task.n_answer_symbols] * (len(tokens) - len(prompt) - 1 - len(classes))
        return classes + end
    body = tokens[1 : n + 1]
    if task.name == "parity":
        return [sum(body) % 2] + [2] * (len(tokens) - n - 2)
    if isinstance(task, PrefixSum):
        return [x % task.modulus for x in itertools.accumulate(body)]
    if isinstance(task, RegularLanguage):
        word = "".join(task.symbols[t] for t in body)
        return [int(IN_LANGUAGE[task.language](word[: k + 1])) for k in range(n)]
    if task.name == "abacus_addition":
        operands = "".join(ALPHABET[t] for t in tokens).split("=")[0].split("+")
        total = str(sum(int(x[::-1]) for x in operands)).rjust(max(map(len, operands)), "0")
        return [ALPHABET.index(c) for c in total[::-1] + "$"]
    x = sum((t & 1) << i for i, t in enumerate(body))
    y = sum((t >> 1) << i for i, t in enumerate(body))
    return [(x + y) >> i & 1 for i in range(n)]


@functools.cache
def every_input(task: Task, n: int) -> Batch:
    """All inputs of length n, or as many random ones; all answered right by the task itself."""
    batch = _every_input(task, n)
    pairs = zip(batch.inputs.tolist(), batch.targets.tolist())
    for tokens, targets in pairs:
        assert [t for t in targets if t != IGNORE] == answer(task, tokens, n)
    return batch


def _every_input(task: Task, n: int) -> Batch:
    if isinstance(task, Addition | TokenAddition):
        return task.encode([(x, y) for x in range(2**n) for y in range(2**n)], n=n)
    if isinstance(task, Multiplication):
        return task.encode([(x, y) for x in range(2**task.m) for y in range(2**n)], n=n)
    if isinstance(task, AbacusAddition) and n <= 2:
        numbers = range(10**n)
        batch = task.encode([(x, y) for x in numbers for y in numbers])
        return batch[batch.n == n]
    if isinstance(task, UniqueSet) and n <= 2:
        symbols = torch.tensor(list(itertools.product(range(task.n_symbols), repeat=n)))
        return task.from_symbols(symbols, torch.full((len(symbols),), n))
    base = task.modulus if isinstance(task, PrefixSum) else 2
    if isinstance(task, AbacusAddition | UniqueSet) or base**n > MOST:
        g = torch.Generator().manual_seed(n)
        each = (MOST if n >= 7 else MOST // 16) // len(task.distributions) + 1
        drawn = [
            task.sample(n, batch_size=each, generator=g, distribution=d) for d in task.distributions
        ]
        parts = zip(*((b.inputs, b.targets, b.n, b.n_loops) for b in drawn))
        inputs, targets, lengths, n_loops = (torch.cat(part) for part in parts)
        return Batch(inputs, targets, lengths, n_loops)
    bits = torch.tensor(list(itertools.product(range(base), repeat=n)))
    if isinstance(task, RegularLanguage):
        return task.from_symbols(bits, torch.full((len(bits),), n))
    assert isinstance(task, Parity | PrefixSum | Copy | BinarySum)
    return task.from_bits(bits, torch.full((len(bits),), n))
