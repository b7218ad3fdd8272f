"""Heads in figures: a head has one name and one colour in all of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from loopinterp.plotting.axes import Series
from loopinterp.plotting.look import PALETTE, colour, ramp

if TYPE_CHECKING:
    import xarray as xr


def by_head(values: xr.DataArray) -> xr.DataArray:
    """Values with one axis of named heads in place of layer and head.

    Example:
        >>> import xarray as xr
        >>> by_head(xr.DataArray(np.zeros((2, 1)), dims=("layer", "head")))["head"].values.tolist()
        ['head 0.0', 'head 1.0']
    """
    n_layers, n_heads = values.sizes["layer"], values.sizes["head"]
    places = np.ndindex(n_layers, n_heads)
    names = [f"head {head}" if n_layers == 1 else f"head {layer}.{head}" for layer, head in places]
    one = values.stack(by_head=("layer", "head"), create_index=False)
    one = one.drop_vars(("layer", "head"), errors="ignore")
    return one.rename(by_head="head").assign_coords(head=names)


def head_lines(values: xr.DataArray) -> list[Series]:
    """A line for each head along the remaining axis; colours follow from a head's place alone.

    Args:
        values: With axes layer and head, one more, and that of an estimate if it is one.
    """
    heads = by_head(values)
    n = heads.sizes["head"]
    shades = map(colour, range(n)) if n < len(PALETTE) else ramp(n)  # grey is a control's
    return [
        Series.of(str(name), heads.sel(head=name), colour=shade)
        for name, shade in zip(heads["head"].values, shades)
    ]
