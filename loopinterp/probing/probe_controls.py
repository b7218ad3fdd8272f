"""Controls without which a probe's accuracy says little.

Selectivity (the same probe on random labels), a model with random weights, and the majority class.
The embedding-only control is the same probe on ``model.embed``.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, TypeVar

import torch

from loopinterp.errors import InputError, check_seed
from loopinterp.tasks.task import IGNORE

if TYPE_CHECKING:
    from jaxtyping import Float, Int
    from torch import Tensor

    Model = TypeVar("Model", bound=torch.nn.Module)


def with_random_weights(model: Model, *, seed: int) -> Model:
    """A copy of a model with the entries of each weight shuffled.

    Every weight keeps its distribution and loses its structure, so that the copy is as large in
    scale as the trained model. What a probe reads from it was in the input, and in the wiring.

    Raises:
        InputError: If the model is no ``torch.nn.Module``.
    """
    if not isinstance(model, torch.nn.Module) or next(model.parameters(), None) is None:
        raise InputError(
            "model",
            expected="a torch.nn.Module with weights, to be shuffled",
            given=type(model).__name__,
            fix="Pass random_model=, the same model with random weights.",
        )
    generator = torch.Generator().manual_seed(check_seed(seed))
    shuffled = copy.deepcopy(model)
    with torch.no_grad():
        for weight in shuffled.parameters():
            order = torch.randperm(weight.numel(), generator=generator).to(weight.device)
            weight.copy_(weight.flatten()[order].view_as(weight))
    return shuffled


def context_types(
    inputs: Int[Tensor, "batch pos"] | Float[Tensor, "batch pos feature"], *, width: int = 4
) -> Int[Tensor, "batch pos"]:
    """A number for each distinct local context: the input at a position and ``width - 1`` before.

    Contexts that reach before the first position count as their own kinds.

    Args:
        inputs: Tokens or feature vectors.
        width: Positions in a context.
    """
    n_places = inputs.shape[:2].numel()
    codes = torch.unique(inputs.reshape(n_places, -1), dim=0, return_inverse=True)[1]
    padded = torch.nn.functional.pad(codes.reshape(inputs.shape[:2]), (width - 1, 0), value=-1)
    windows = padded.unfold(1, width, 1).flatten(0, 1)
    return torch.unique(windows, dim=0, return_inverse=True)[1].reshape(inputs.shape[:2])


def control_labels(
    pool: Int[Tensor, " known"],
    types: Int[Tensor, "*place"],
    *,
    n_draws: int = 8,
    generator: torch.Generator,
) -> Int[Tensor, "draw *place"]:  # noqa: UP037
    """Random labels, the same wherever the same type of input occurs: a control task.

    Each type gets a class at random, with the frequencies of the true classes. A probe that does
    well on them can learn anything from these activations, and its accuracy on the true classes
    says little; selectivity is the difference. Source: Hewitt and Liang, arXiv 1909.03368.

    Args:
        pool: True classes, whose frequencies the control keeps.
        types: Type of the input at each place, such as :func:`context_types`.
        n_draws: Independent random labelings; average over them.
        generator: Source of randomness, on the CPU.
    """
    n_types = int(types.max()) + 1
    drawn = torch.randint(len(pool), (n_draws, n_types), generator=generator)
    return pool[drawn.to(pool.device)][:, types]


def majority_accuracy(
    train: Int[Tensor, "*cell train_sample"], test: Int[Tensor, "*cell test_sample"]
) -> Float[Tensor, "*cell"]:
    """Accuracy on ``test`` of always saying the most frequent class of ``train``.

    Places whose class is ``IGNORE`` do not count.
    """
    classes = torch.unique(train[train != IGNORE])
    count = torch.stack([(train == cls).sum(-1) for cls in classes])
    right = test == classes[count.argmax(0)][..., None]
    return right.sum(-1).double() / (test != IGNORE).sum(-1)
