"""What studies are given to look at: a batch, or a task that one is drawn from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeGuard

import torch

from loopinterp.errors import InputError, check_integer, check_seed
from loopinterp.tasks.batch_checks import check_values, is_task
from loopinterp.tasks.sampling import check_length, check_size, describe_tensor
from loopinterp.tasks.task import IGNORE, Batch

if TYPE_CHECKING:
    from jaxtyping import Int
    from torch import Tensor


LENGTH, EXAMPLES = 8, 64
"""Problem length and number of the examples that are drawn where nothing is said of them."""


def as_batch(
    data: object,
    *,
    n: int | None = None,
    batch_size: int | None = None,
    examples: int = EXAMPLES,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> Batch:
    """The batch that a study is given, or one drawn from a task; T(n) is then the task's.

    Args:
        data: A batch, which is taken as it is, or a task.
        n: Problem length of what is drawn from a task; 8 by default.
        batch_size: Examples that are drawn from a task; ``examples`` by default.
        examples: How many a study draws that is not told.
        seed: Seed of what is drawn.
        device: Where what is drawn is put.

    Raises:
        InputError: neither a batch nor a task, a batch with ``n`` or ``batch_size``, or more than
            can be drawn at once.

    Example:
        >>> from loopinterp.tasks import Addition
        >>> as_batch(Addition(), n=5, batch_size=2)
        Batch(examples=2, n=5, n_loops=6, inputs=int64[2, 6])
    """
    if _is_task(data):
        generator = torch.Generator().manual_seed(check_seed(seed))
        size = check_integer("batch_size", examples if batch_size is None else batch_size, least=1)
        length = check_length(LENGTH if n is None else n)
        check_size(data, length, size, "n, batch_size")
        batch = data.sample(length, batch_size=size, generator=generator)
        return replace(batch, task=data).to(device)  # which a task of a user's own need not say
    if not isinstance(data, Batch):
        expected = "a Batch, or a task to draw one from"
        raise InputError("data", expected=expected, given=_kind(data), fix=_fix(data))
    for name, value in (("n", n), ("batch_size", batch_size)):
        if value is not None:
            raise InputError(
                name,
                expected=f"no {name} beside a batch, whose examples are there already",
                given=repr(value),
                fix=f"Leave {name} out, or pass the task instead of the batch.",
            )
    check_values(data, ignore=IGNORE)
    if data.inputs.numel() == 0:
        raise InputError(
            "data",
            expected="a batch of at least one example and position",
            given=f"inputs of shape {list(data.inputs.shape)}",
            fix="Draw it with task.sample(n, batch_size=..., generator=...).",
        )
    return data


def as_batches(
    data: object,
    *,
    n: int | Sequence[int] | None = None,
    batch_size: int | None = None,
    examples: int = EXAMPLES,
    seed: int = 0,
) -> list[Batch]:
    """One batch or several; from each task, one of each length in ``n``. See :func:`as_batch`.

    Raises:
        InputError: as :func:`as_batch`, or an empty list of batches or of lengths.
    """
    several = data if isinstance(data, (list, tuple)) else [data]
    each = n if isinstance(n, (list, tuple, range)) else [n]
    if not several or not each:
        expected = "a Batch or a task, or a list of them; with a task, a length n or a list of them"
        raise InputError("data", expected=expected, given="an empty list", fix=_fix(data))
    drawn: Any = {"batch_size": batch_size, "examples": examples, "seed": seed}
    options: Any = [{"n": k, **drawn} for k in each]
    return [as_batch(one, **chosen) for one in several for chosen in options]


def as_prompts(tokens: Int[Tensor, "batch pos"], *, n_loops: int) -> Batch:
    """Prompts of a language model as a batch: the right output of each token is the next one.

    Args:
        tokens: What a tokenizer gives, all of one length.
        n_loops: Loops after which the answer is read.

    Raises:
        InputError: no integers ``[batch, pos]`` of two positions or more.

    Example:
        >>> as_prompts(torch.tensor([[5, 3, 8]]), n_loops=4).targets
        tensor([[   3,    8, -100]])
    """
    check_integer("n_loops", n_loops, least=0)
    numbers = isinstance(tokens, torch.Tensor) and tokens.dtype in (torch.int32, torch.int64)
    if not numbers or tokens.dim() != 2 or tokens.shape[1] < 2:
        expected = "integers [batch, pos], of two positions or more"
        fix = "Pass tokenizer(texts, return_tensors='pt')['input_ids']."
        raise InputError("tokens", expected=expected, given=_kind(tokens), fix=fix)
    targets = tokens.long().roll(-1, dims=1)
    targets[:, -1] = IGNORE
    each = torch.ones(len(tokens), dtype=torch.int64, device=tokens.device)
    return Batch(tokens, targets, each * tokens.shape[1], each * n_loops)


def need_asked(batch: Batch) -> None:
    """Raise unless something is asked of each example: an answer to nothing would count as right.

    Raises:
        InputError: no examples, or one whose targets are all ``IGNORE``.
    """
    missing = (batch.targets == IGNORE).all(dim=1).nonzero().flatten().tolist()
    if len(batch) == 0 or missing:
        raise InputError(
            "batch",
            expected="examples that each have a position with a target",
            given="no examples" if len(batch) == 0 else f"none in examples {missing[:8]}",
            fix="Leave those examples out, or sample the batch from a task.",
        )


def need_task(task: object) -> None:
    """Raise unless something is a task."""
    if not _is_task(task):
        raise InputError("task", expected="a task", given=_kind(task), fix=_fix(task))


def _is_task(data: object) -> TypeGuard[Task]:
    return is_task(data)


def _kind(data: object) -> str:
    if isinstance(data, type):
        return f"the class {data.__name__} itself"
    if isinstance(data, torch.Tensor):
        return f"a tensor, {describe_tensor(data)}"
    return repr(data) if isinstance(data, str) else f"a {type(data).__name__}"


def _fix(data: object) -> str:
    if isinstance(data, str):
        return f"Pass get_task({data!r}), or a batch drawn from it."
    if isinstance(data, type):
        return f"Pass {data.__name__}()."
    return "Draw one with task.sample(n, batch_size=..., generator=...), or pass the task itself."
