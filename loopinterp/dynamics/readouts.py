"""When the answer stops changing: what is read from successive loops, and whether it is right.

All functions take the logits of every loop, ``[loop+1, ..., d_vocab_out]`` (``return_type=
"all_logits"``); entry ``t`` is read after ``t`` loops.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from loopinterp.dynamics.measures import last_loop
from loopinterp.dynamics.state_checks import check_states
from loopinterp.errors import InputError, check_integer
from loopinterp.tasks.task import IGNORE

if TYPE_CHECKING:
    from jaxtyping import Float, Int
    from torch import Tensor


def readout_kl(
    logits: Float[Tensor, "readouts *lead d_vocab_out"], *, allow_nonfinite: bool = False
) -> Float[Tensor, "loop ..."]:
    r"""Change of the readout in each loop, :math:`\mathrm{KL}(p_t \| p_{t-1})`, in nats.

    Args:
        logits: Logits after 0..T loops.
        allow_nonfinite: Let NaN and infinity through.

    Returns:
        ``T`` entries, the first for loop 1.

    Raises:
        InputError: If there are fewer than two loops' logits, or they are not finite.
    """
    check_states(logits, name="logits", allow_nonfinite=allow_nonfinite)
    log_p = logits.log_softmax(dim=-1)
    kl = (log_p[1:].exp() * (log_p[1:] - log_p[:-1])).sum(dim=-1)
    return kl.clamp_min(0)


def readout_entropy(
    logits: Float[Tensor, "readouts *lead d_vocab_out"], *, allow_nonfinite: bool = False
) -> Float[Tensor, "readouts ..."]:
    """Entropy of each readout in nats.

    Example:
        >>> readout_entropy(torch.zeros(1, 4))
        tensor([1.3863])
    """
    check_states(logits, at_least=1, name="logits", allow_nonfinite=allow_nonfinite)
    log_p = logits.log_softmax(dim=-1)
    return -(log_p.exp() * log_p).sum(dim=-1)


def readout_margin(
    logits: Float[Tensor, "readouts *lead d_vocab_out"], *, allow_nonfinite: bool = False
) -> Float[Tensor, "readouts ..."]:
    """Largest logit minus the second largest.

    Raises:
        InputError: If there is only one class.
    """
    check_states(logits, at_least=1, name="logits", allow_nonfinite=allow_nonfinite)
    if logits.shape[-1] < 2:
        raise InputError(
            "logits",
            expected="at least two classes",
            given="one",
            fix="A margin needs a runner-up; this model has none.",
        )
    best = logits.topk(2, dim=-1).values
    return best[..., 0] - best[..., 1]


NO_ANSWER = -1
"""In place of an answer where a logit is NaN."""

ONE_NUMBER = -2
"""In place of an answer where the readout is one number: a regression has no classes."""


def likeliest(
    logits: Float[Tensor, "*lead d_vocab_out"],
) -> Int[Tensor, " *lead"]:
    """The class of the largest logit, -1 where a logit is NaN: a broken state answers nothing.

    Of a readout of one number it is :data:`ONE_NUMBER`.

    Example:
        >>> likeliest(torch.tensor([[0.0, 1.0], [2.0, torch.inf], [0.0, torch.nan]]))
        tensor([ 1,  1, -1])
    """
    if logits.shape[-1] == 1:
        return torch.full_like(logits[..., 0], ONE_NUMBER, dtype=torch.int64)
    return logits.argmax(dim=-1).masked_fill(logits.isnan().any(dim=-1), NO_ANSWER)


def stable_from(
    answers: Int[Tensor, "readouts ..."], *, hold: int | None = None
) -> Int[Tensor, "*lead"]:
    """First loop whose answer is kept.

    Args:
        answers: Answer (argmax) after 0..T loops.
        hold: Loops that must follow with the same answer; if ``None``, all up to the last.

    Returns:
        Loops from 0; -1 where no answer is held for ``hold`` loops. With ``hold=None`` the
        last loop always qualifies, so an answer that changed there gives ``T``.

    Raises:
        InputError: If ``hold`` is not in 1..T.

    Example:
        >>> answers = torch.tensor([0, 1, 1, 1, 0])
        >>> stable_from(answers, hold=2), stable_from(answers)
        (tensor(1), tensor(4))
    """
    n_loops = len(answers) - 1
    if n_loops < 1:
        raise InputError(
            "answers",
            expected="answers of at least two loops, [loop, ...]",
            given=f"shape {tuple(answers.shape)}",
            fix="Take the argmax of the logits of all loops.",
        )
    same = answers[1:] == answers[:-1]
    if hold is None:
        return last_loop(~same)
    check_integer("hold", hold, most=n_loops, least=1)
    held = same.unfold(0, hold, 1).all(dim=-1)
    return torch.where(held.any(dim=0), held.int().argmax(dim=0), -1)


def correctness(
    answers: Int[Tensor, "*loop batch pos"], targets: Int[Tensor, "batch pos"]
) -> Int[Tensor, "*loop batch pos"]:
    """1 where the answer is right, 0 where it is wrong, -1 where nothing is asked (int8).

    Of a readout of one number nothing is asked.

    Args:
        answers: Answers, at one loop or at all (:func:`likeliest`).
        targets: Right answers; ``IGNORE`` where nothing is asked.

    Raises:
        InputError: If batch or positions differ.
    """
    if answers.shape[-2:] != targets.shape:
        raise InputError(
            "answers",
            expected=f"[..., batch, pos] with batch and pos {tuple(targets.shape)}",
            given=f"shape {tuple(answers.shape)}",
            fix="Pass the likeliest classes of the readout of the same batch.",
        )
    right = (answers == targets).to(torch.int8)
    return right.masked_fill((targets == IGNORE) | (answers == ONE_NUMBER), -1)


def exact_match(right: Int[Tensor, "*loop batch pos"]) -> Float[Tensor, "*loop batch"]:
    """1.0 for an example whose every asked position is right, else 0.0.

    Args:
        right: What :func:`correctness` gives.

    Example:
        >>> exact_match(torch.tensor([[[1, 1, -1], [1, 0, -1]]], dtype=torch.int8))
        tensor([[1., 0.]])
    """
    return (right != 0).all(dim=-1).float()
