"""Training a small top-k autoencoder on stored activations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from pydantic import PositiveFloat, PositiveInt

from loopinterp.core.boundary import checked
from loopinterp.core.errors import InputError, describe_tensor
from loopinterp.core.progress import track
from loopinterp.core.settings import Seed
from loopinterp.features.autoencoder import AutoencoderConfig, SparseAutoencoder
from loopinterp.models.taps import recording_gradients

if TYPE_CHECKING:
    from jaxtyping import Bool, Float
    from torch import Tensor


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

    Adam minimises :math:`\|x - \hat x\|^2`; decoder directions keep the norm 1. In the first three
    quarters, features that were silent for ``dead_after`` steps start again in the direction of a
    large error. The learning rate falls to 0 in the last fifth.

    Args:
        activations: Such as ``store.read_tensor(site)`` of one loop of an
            :class:`~loopinterp.models.ActivationStore`, or ``store.stack("state_post")`` with loops
            and rows flattened, for an autoencoder that all loops share.
        k: Features that are active at once.
        batch_size: Rows of a step, drawn at random.
        dead_after: Steps after which silent features start again.
        learning_rate: For activations scaled to a mean square of 1.
        about: Where the activations are from; saved with the autoencoder.

    Raises:
        InputError: If activations are no floats, too few, or all equal; or under
            ``torch.inference_mode()``.

    Source: top-k, arXiv 2406.04093, section 2.3; silent features, Bricken et al. (2023), Towards
    Monosemanticity, "Neuron resampling".

    Example:
        >>> signs = torch.eye(4)[torch.arange(256) % 4]  # four features, one active at a time
        >>> trained = train_autoencoder(signs, n_features=8, k=1, steps=300, learning_rate=0.01)
        >>> bool(((trained(signs) - signs) ** 2).mean() < 1e-3)
        True
    """
    rows = activations.detach()
    if rows.ndim != 2 or not rows.is_floating_point() or len(rows) < 2:
        expected, fix = "floats [row, d_in]", "Flatten loops, prompts and positions to rows."
        raise InputError("activations", expected=expected, given=describe_tensor(rows), fix=fix)
    generator = torch.Generator().manual_seed(seed)
    config = AutoencoderConfig(d_in=rows.shape[1], n_features=n_features, activation="topk", k=k)
    trained = SparseAutoencoder(config, seed=seed, about=about).to(rows.device)
    # Mean and scale of at most 65,536 rows.
    some = rows[torch.randint(len(rows), (min(len(rows), 2**16),), generator=generator)]
    mean = some.float().mean(0)
    scale = (some.float() - mean).square().mean().sqrt()
    if not 0 < float(scale) < float("inf"):
        expected, fix = "finite activations that differ", "Look at the site and its rows."
        raise InputError("activations", expected=expected, given="others", fix=fix)
    optimiser = torch.optim.Adam(trained.parameters(), lr=learning_rate, betas=(0.9, 0.999))
    decay = torch.optim.lr_scheduler.LambdaLR(
        optimiser, lambda step: min(1.0, 5 * (steps - step) / steps)
    )
    silent = torch.ones(n_features, dtype=torch.bool, device=rows.device)
    for step in track(range(steps), "autoencoder"):
        drawn = torch.randint(len(rows), (min(batch_size, len(rows)),), generator=generator)
        x = (rows[drawn].to(mean) - mean) / scale
        with recording_gradients():
            features = trained.encode(x)
            error = x - trained.decode(features, x)
            loss = error.square().mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        decay.step()
        with torch.no_grad():
            trained.W_dec.div_(trained.W_dec.norm(dim=1, keepdim=True))
            silent &= ~(features > 0).any(0)
            if (step + 1) % dead_after == 0:
                if step < 0.75 * steps:
                    _revive(trained, optimiser, silent, error, generator)
                silent.fill_(True)
    with torch.no_grad():  # the scale of the activations goes into the biases
        trained.b_enc.mul_(scale)
        trained.b_dec.copy_(mean + scale * trained.b_dec)
    return trained


def _revive(
    trained: SparseAutoencoder,
    optimiser: torch.optim.Adam,
    silent: Bool[Tensor, " feature"],
    error: Float[Tensor, "row d_in"],
    generator: torch.Generator,
) -> None:
    """Give silent features the directions of large errors, and forget their gradients."""
    n_silent = int(silent.sum())
    if not n_silent:
        return
    chances = error.square().sum(1).cpu()
    rows = torch.multinomial(chances, n_silent, replacement=True, generator=generator)
    directions = torch.nn.functional.normalize(error[rows.to(error.device)], dim=1)
    places = ((trained.W_dec, (silent,)), (trained.W_enc, (slice(None), silent)))
    trained.W_dec[silent], trained.W_enc[:, silent] = directions, directions.T
    trained.b_enc[silent] = 0
    for weight, place in (*places, (trained.b_enc, (silent,))):
        for moment in ("exp_avg", "exp_avg_sq"):
            optimiser.state[weight][moment][place] = 0
