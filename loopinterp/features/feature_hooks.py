"""Features at a site of chosen loops: read, spliced into the run, ablated and steered."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from loopinterp.core.boundary import Loops, checked
from loopinterp.core.errors import InputError, describe_tensor
from loopinterp.interventions.base_and_source import (
    chosen_loops,
    hooks_by_loop,
    patched_component,
    places_of,
)
from loopinterp.models.protocol import need_hooks

if TYPE_CHECKING:
    import xarray as xr
    from jaxtyping import Bool
    from torch import Tensor

    from loopinterp.features.autoencoder import SparseAutoencoder
    from loopinterp.models.addresses import AddressBook, Index

Hook = Callable[["Tensor", Any], "Tensor | None"]


@torch.no_grad()
@checked
def read_features(
    model: Any,
    inputs: Tensor,
    autoencoder: SparseAutoencoder,
    *,
    component: str = "state_post",
    layer: int | None = None,
    loops: Index = None,
    n_loops: Loops | None = None,
) -> xr.DataArray:
    """The features of an activation, ``[loop, batch, pos, feature]``.

    Args:
        inputs: ``[batch, pos]``, or features ``[batch, pos, d_features]``.
        component: A hook point of a loop or layer (``state_post``, ``resid_post``, ``z`` …). Heads
            are put side by side.
        layer: The layer inside the block; needed if it has several.
        loops: Loops to read; all by default.
        n_loops: Loops of the run; ``model.n_loops`` by default.

    Raises:
        InputError: If a name is unknown, or the activation has another width.

    Example:
        >>> from loopinterp.features import AutoencoderConfig, SparseAutoencoder
        >>> from loopinterp.models import LoopedTransformer, LoopedTransformerConfig
        >>> config = LoopedTransformerConfig(d_model=16, n_heads=2, d_vocab=5, d_vocab_out=2)
        >>> autoencoder = SparseAutoencoder(AutoencoderConfig(d_in=16, n_features=32))
        >>> tokens = torch.tensor([[1, 2, 0]])
        >>> features = read_features(LoopedTransformer(config), tokens, autoencoder, n_loops=3)
        >>> dict(features.sizes)
        {'loop': 3, 'batch': 1, 'pos': 3, 'feature': 32}
    """
    import xarray as xr

    chosen, names = site_names(model, component, layer, loops, n_loops)
    n_loops = model.n_loops if n_loops is None else n_loops
    _, cache = model.run_with_cache(inputs, n_loops=n_loops, names_filter=names)
    features = torch.stack([autoencoder.encode(cache[name].flatten(2)) for name in names])
    axes = ("loop", "batch", "pos", "feature")
    return xr.DataArray(features.cpu().float().numpy(), dims=axes, coords={"loop": chosen})


@checked
def splice_hooks(
    model: Any,
    autoencoder: SparseAutoencoder,
    *,
    component: str = "state_post",
    output: str | None = None,
    layer: int | None = None,
    loops: Index = None,
    n_loops: Loops | None = None,
    error: bool = False,
    ablate: Sequence[int] = (),
    steer: Mapping[int, float] | None = None,
    positions: Bool[Tensor, "#batch pos"] | None = None,
) -> list[tuple[str, Hook]]:
    r"""Hooks that replace an activation by its reconstruction, at chosen loops.

    With features f of the activation x and changed features f', the activation becomes

    .. math::
        \hat x(f') \qquad \text{or, with the error kept,} \qquad x + \hat x(f') - \hat x(f)

    Pass the hooks to ``model.run_with_hooks(inputs, n_loops=n_loops, fwd_hooks=...)``. Without
    changed features and with the error kept, the run is the clean run.

    Args:
        component, layer, loops, n_loops: As for :func:`read_features`.
        output: Of a transcoder: the hook point that it writes, later in the same layer.
        error: Whether the part that the autoencoder does not reconstruct is kept.
        ablate: Features that are set to 0.
        steer: Added to the activation of each named feature.
        positions: Positions that are replaced; all by default.

    Raises:
        InputError: If a feature or name is unknown, ``output`` comes before ``component``, or (when
            a hook fires) a width or the shape of ``positions`` differs.

    Example:
        >>> from loopinterp.features import AutoencoderConfig, SparseAutoencoder
        >>> from loopinterp.models import LoopedTransformer, LoopedTransformerConfig
        >>> config = LoopedTransformerConfig(d_model=16, n_heads=2, d_vocab=5, d_vocab_out=2)
        >>> model, tokens = LoopedTransformer(config), torch.tensor([[1, 2, 0]])
        >>> autoencoder = SparseAutoencoder(AutoencoderConfig(d_in=16, n_features=32))
        >>> hooks = splice_hooks(model, autoencoder, loops=[1], n_loops=3, error=True, ablate=[7])
        >>> model.run_with_hooks(tokens, n_loops=3, fwd_hooks=hooks).shape
        torch.Size([1, 3, 2])
    """
    _check_kind(autoencoder, output)
    changes = _changes(autoencoder.config.n_features, ablate, steer or {})
    names = site_names(model, component, layer, loops, n_loops)[1]
    splices = [_Splice(autoencoder, changes, error, positions) for _ in names]
    if output is None:
        return [(name, splice.replace) for name, splice in zip(names, splices)]
    targets = site_names(model, output, layer, loops, n_loops)[1]
    _check_order(model.addresses(n_loops), names[0], targets[0])
    hooks: list[tuple[str, Hook]] = []
    for name, target, splice in zip(names, targets, splices):
        hooks += [(name, splice.read), (target, splice.replace)]
    return hooks


def _check_kind(autoencoder: SparseAutoencoder, output: str | None) -> None:
    if autoencoder.is_transcoder != (output is not None):
        kind = "a transcoder" if autoencoder.is_transcoder else "an autoencoder"
        expected = "the hook point that a transcoder writes, and none of an autoencoder"
        got, fix = f"{output!r} of {kind}", "Pass output='mlp_out', or leave it out."
        raise InputError("output", expected=expected, given=got, fix=fix)


def _check_order(book: AddressBook, read: str, written: str) -> None:
    order = [*book.addresses]
    if order.index(written) < order.index(read):
        expected, fix = f"a hook point after {read}", "Read an earlier one."
        raise InputError("output", expected=expected, given=written, fix=fix)


def site_names(
    model: Any, component: str, layer: int | None, loops: Index, n_loops: int | None
) -> tuple[list[int], list[str]]:
    """Chosen loops, and the name of the site at each."""
    need_hooks(model)
    depth: int = model.n_loops if n_loops is None else n_loops
    chosen = chosen_loops(loops, depth)
    names = hooks_by_loop(model, patched_component(model, component).full, layer, depth)
    return chosen, [names[loop] for loop in chosen]


def _changes(
    n_features: int, ablate: Sequence[int], steer: Mapping[int, float]
) -> tuple[Tensor, Tensor]:
    """A factor of each feature, and what is added to it."""
    for name, features in (("ablate", ablate), ("steer", steer)):
        if wrong := [x for x in features if not 0 <= x < n_features]:
            expected, fix = f"features 0 to {n_features - 1}", f"Change {name}."
            raise InputError(name, expected=expected, given=str(wrong[0]), fix=fix)
    factor, added = torch.ones(n_features), torch.zeros(n_features)
    factor[[*ablate]] = 0
    added[[*steer]] = torch.tensor([*steer.values()], dtype=added.dtype)
    return factor, added


class _Splice:
    """The two hooks of one loop, on the site that is read and the one that is replaced."""

    def __init__(
        self,
        autoencoder: SparseAutoencoder,
        changes: tuple[Tensor, Tensor],
        error: bool,
        positions: Bool[Tensor, "#batch pos"] | None,
    ) -> None:
        self._autoencoder, self._changes = autoencoder, changes
        self._error, self._positions = error, positions
        self._read: Tensor | None = None  # of a transcoder

    def read(self, x: Tensor, hook: Any = None) -> None:
        self._read = x

    def replace(self, y: Tensor, hook: Any = None) -> Tensor:
        autoencoder, x = self._autoencoder, y if self._read is None else self._read
        self._read = None
        flat = x.flatten(2)  # [batch, pos, d_in], heads side by side
        features = autoencoder.encode(flat)
        factor, added = (x.to(features) for x in self._changes)
        reconstruction = autoencoder.decode(features * factor + added, flat)  # [batch, pos, d_out]
        if reconstruction.shape != y.flatten(2).shape:
            expected, fix = f"an activation of width {autoencoder.d_out}", "Change output."
            raise InputError("output", expected=expected, given=describe_tensor(y), fix=fix)
        if self._error:  # exactly the clean activation where no feature is changed
            reconstruction = y.flatten(2) + (
                reconstruction - autoencoder.decode(features, flat)
            ).to(y.dtype)
        new = reconstruction.to(y.dtype).reshape(y.shape)
        if self._positions is None:
            return new
        inside = places_of(self._positions, y)
        return torch.where(inside.reshape(*inside.shape, *[1] * (y.ndim - 2)), new, y)
