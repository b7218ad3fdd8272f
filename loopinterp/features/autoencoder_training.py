"""Training a small top-k autoencoder on stored activations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from pydantic import PositiveFloat, PositiveInt

from loopinterp.core.boundary import checked
from loopinterp.core.errors import InputError
from loopinterp.core.progress import track
from loopinterp.core.settings import Seed
from loopinterp.features.autoencoder import AutoencoderConfig, SparseAutoencoder
from loopinterp.tasks.task import describe_tensor

if TYPE_CHECKING:
    from jaxtyping import Bool, Float
    from torch import Tensor

_AUXILIARY = 1 / 32  # weight of the loss that revives dead features
_ROWS_OF_MEAN = 2**16


@checked
def train_autoencoder(
    activations: Float[Tensor, "row d_in"],
    *,
    n_features: PositiveInt,
    k: PositiveInt,
    steps: PositiveInt = 2000,
    batch_size: PositiveInt = 512,
    learning_rate: PositiveFloat = 2e-3,
    dead_after: PositiveInt = 100,
    about: Mapping[str, Any] | None = None,
    seed: Seed = 0,
) -> SparseAutoencoder:
    r"""Train a top-k autoencoder on rows of activations.

    Adam minimises :math:`\|x - \hat x\|^2 + \tfrac{1}{32} \|x - \hat x - \hat e\|^2`, where
    :math:`\hat e` is what the features that were silent for ``dead_after`` steps make of the error.
    Decoder directions keep the norm 1. The learning rate falls to 0 in the last fifth of the steps.
    Maintained trainers take no plain tensors on a CPU, or need other versions of TransformerLens;
    :func:`load_autoencoder` reads what SAELens trained.

    Args:
        activations: Such as ``store.tensor(site)`` of one loop of an
            :class:`~loopinterp.models.ActivationStore`, or ``store.stack("state_post")`` with loops
            and rows flattened, for an autoencoder that all loops share.
        n_features: Number of features.
        k: Features that are active at once.
        batch_size: Rows of a step, drawn at random.
        learning_rate: For activations scaled to a mean square of 1.
        about: Where the activations are from; saved with the autoencoder.

    Raises:
        InputError: If activations are no floats, too few, or all equal.

    Source: Gao et al., arXiv 2406.04093, sections 2.3 and A.2.

    Example:
        >>> signs = torch.eye(4)[torch.arange(256) % 4]  # four features, one active at a time
        >>> trained = train_autoencoder(signs, n_features=8, k=1, steps=300, learning_rate=0.01)
        >>> bool(((trained(signs) - signs) ** 2).mean() < 1e-3)
        True
    """
    rows = activations
    if rows.ndim != 2 or not rows.is_floating_point() or len(rows) < 2:
        expected, fix = "floats [row, d_in]", "Flatten loops, prompts and positions to rows."
        raise InputError("activations", expected=expected, given=describe_tensor(rows), fix=fix)
    generator = torch.Generator().manual_seed(seed)
    config = AutoencoderConfig(d_in=rows.shape[1], n_features=n_features, activation="topk", k=k)
    trained = SparseAutoencoder(config, seed=seed, about=about).to(rows.device)
    some = rows[torch.randint(len(rows), (min(len(rows), _ROWS_OF_MEAN),), generator=generator)]
    mean = some.float().mean(0)
    scale = (some.float() - mean).square().mean().sqrt()
    if not 0 < float(scale) < float("inf"):
        expected, fix = "finite activations that differ", "Look at the site and its rows."
        raise InputError("activations", expected=expected, given="others", fix=fix)
    optimiser = torch.optim.Adam(trained.parameters(), lr=learning_rate, betas=(0.9, 0.999))
    decay = torch.optim.lr_scheduler.LambdaLR(
        optimiser, lambda step: min(1.0, 5 * (steps - step) / steps)
    )
    silent = torch.zeros(n_features, dtype=torch.long, device=rows.device)  # steps
    for _ in track(range(steps), "autoencoder"):
        drawn = torch.randint(len(rows), (min(batch_size, len(rows)),), generator=generator)
        x = (rows[drawn].to(mean) - mean) / scale
        features = trained.encode(x)
        error = x - trained.decode(features, x)
        dead = silent >= dead_after
        loss = error.square().mean() + _AUXILIARY * _dead_loss(trained, x, error.detach(), dead)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        decay.step()
        with torch.no_grad():
            trained.W_dec /= trained.W_dec.norm(dim=1, keepdim=True)
        silent = torch.where((features > 0).any(0), 0, silent + 1)
    with torch.no_grad():  # the scale of the activations goes into the biases
        trained.b_enc *= scale
        trained.b_dec.copy_(mean + scale * trained.b_dec)
    return trained


def _dead_loss(
    autoencoder: SparseAutoencoder,
    x: Float[Tensor, "row d_in"],
    error: Float[Tensor, "row d_in"],
    dead: Bool[Tensor, " feature"],
) -> Tensor:
    """How badly the dead features reconstruct the error, by half as many as the input is wide."""
    n_active = min(int(dead.sum()), max(1, x.shape[1] // 2))
    if not n_active:
        return error.new_zeros(())
    pre = autoencoder._before_activation(autoencoder._centred(x)).masked_fill(~dead, -torch.inf)
    values, places = pre.topk(n_active, dim=1)
    features = torch.zeros_like(pre).scatter(1, places, values.relu())
    return (error - features @ autoencoder.W_dec).square().mean()
