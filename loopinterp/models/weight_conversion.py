"""Weights of somebody else's looped model in a ``LoopedTransformer``, and where the two differ."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from loopinterp.errors import InputError, check_integer, check_number
from loopinterp.models.looped_model import bind, need_model
from loopinterp.models.looped_transformer import LoopedTransformer
from loopinterp.models.pretrained import misfits

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from loopinterp.models.looped_model import LoopedModel
    from loopinterp.models.model_config import LoopedTransformerConfig


def convert_model(
    original: LoopedModel | Any,
    config: LoopedTransformerConfig,
    weights: Mapping[str, Tensor],
    inputs: Tensor,
    *,
    n_loops: int,
    activations: Mapping[str, Tensor] | None = None,
    tolerance: float = 1e-5,
) -> LoopedTransformer:
    """A ``LoopedTransformer`` with given weights, if it computes what the original does.

    Args:
        original: The model that the weights come from, behind the four methods.
        config: The architecture that it has in our words.
        weights: The weights by our names, those of ``LoopedTransformer(config).state_dict()``;
            matrices of linear maps are ``[out, in]``, as ``torch.nn.Linear`` has them. The model
            has their floating-point type.
        inputs: Inputs on which the two must agree.
        n_loops: Loops for which they must.
        activations: The original's activations on these inputs by our names (``site``, or
            aliases such as ``loops.0.blocks.0.attn.hook_pattern``), to find a difference inside
            a loop.
        tolerance: Largest difference of any number, relative to the largest one there, or to 1
            where that is smaller.

    Raises:
        InputError: A weight is missing, unknown or of another shape (it is named); they are no
            tensors of one floating-point type; or the two differ, it says where first (see
            :func:`first_difference`).
    """
    dtype = _dtype_of(weights)
    if not isinstance(inputs, torch.Tensor):
        raise InputError(
            "inputs",
            expected="a tensor [batch, pos], on which the two must agree",
            given=f"a {type(inputs).__name__}",
            fix="Pass torch.tensor(...) of it.",
        )
    model = LoopedTransformer(config).to(inputs.device, dtype).eval()
    own = model.state_dict()
    if wrong := misfits(weights, own, lambda x: list(x.shape)):
        raise InputError(
            "weights",
            expected="those of LoopedTransformer(config).state_dict()",
            given=wrong,
            fix="Rename, transpose or split the original's, or change the configuration.",
        )
    model.load_state_dict(dict(weights))
    where = first_difference(
        original, model, inputs, n_loops=n_loops, activations=activations, tolerance=tolerance
    )
    if where is not None:
        raise InputError(
            "converted model",
            expected=f"the original's numbers to {tolerance:g}",
            given=f"a difference, first in {where}",
            fix="Compare the weights and settings that enter there, or pass activations= to look "
            "inside the loop.",
        )
    return model


def _dtype_of(weights: Mapping[str, Tensor]) -> torch.dtype:
    """The one floating-point type of some weights; raise unless they have one."""
    named = weights.items() if isinstance(weights, Mapping) else [("weights", weights)]
    kinds: dict[object, str] = {}  # and the first weight of each
    for name, x in named:
        kinds.setdefault(x.dtype if isinstance(x, torch.Tensor) else type(x).__name__, name)
    dtype = next(iter(kinds), None)
    if len(kinds) == 1 and isinstance(dtype, torch.dtype) and dtype.is_floating_point:
        return dtype
    raise InputError(
        "weights",
        expected="a mapping from names to tensors, all of one floating-point type",
        given=", ".join(f"{name} of {kind}" for kind, name in kinds.items()) or "none",
        fix="Pass e.g. {name: torch.as_tensor(x).float() for name, x in weights.items()}, and "
        "original.float().",
    )


@torch.no_grad()
def first_difference(
    original: LoopedModel | Any,
    converted: LoopedTransformer,
    inputs: Tensor,
    *,
    n_loops: int,
    activations: Mapping[str, Tensor] | None = None,
    tolerance: float = 1e-5,
) -> str | None:
    """Where a converted model first computes something else than the original, in words.

    Each loop of both starts from the original's state, so a difference is said where it arises
    and not where it is carried to.

    Returns:
        ``embed``, ``initial_state``, ``loop t`` (or one of ``activations``), or ``readout after t
        loops``, with the difference (of shapes, or of numbers and their place); None if there is
        none.

    Raises:
        InputError: If the original is no looped model, or an activation is not of a loop.
    """
    need_model(original)
    check_integer("n_loops", n_loops, least=1)
    check_number("tolerance", tolerance, above=0)
    book = converted.addresses(n_loops)
    given = {book.resolve(name): x for name, x in (activations or {}).items()}
    if outside := [name for name in given if book.addresses[name].loop is None]:
        raise InputError(
            "activations",
            expected="activations inside a loop",
            given=outside[0],
            fix="Leave it out: embedding, prelude and readout are compared as a whole.",
        )
    theirs, ours = bind(original, inputs), bind(converted, inputs)

    def inside(loop: int, state: Tensor) -> str | None:
        """The first of the activations of a loop that differs, from the same state on."""
        names = [name for name in given if book.addresses[name].loop == loop]
        if not names:
            return None
        span = {"start_at_loop": loop, "stop_at_loop": loop + 1, "state": state}
        _, cache = converted.run_with_cache(
            inputs, n_loops=n_loops, names_filter=names, return_type="state", **span
        )
        # A cache is in the order of the computation.
        said = (_difference(name, given[name], cache[name], tolerance) for name in cache)
        return next(filter(None, said), None)

    for name, a, b in (("embed", theirs.e, ours.e), ("initial_state", theirs.h0, ours.h0)):
        if said := _difference(name, a, b, tolerance):
            return said
    before = theirs.h0
    for loop, h in theirs.run(n_loops):
        if loop and (said := _difference(f"loop {loop - 1}", h, ours.step(before), tolerance)):
            return inside(loop - 1, before) or said
        name = f"readout after {loop} loops"
        if said := _difference(name, theirs.readout(h), ours.readout(h), tolerance):
            return said
        before = h
    return None


def _difference(
    name: str, theirs: Float[Tensor, "*shape"], ours: Float[Tensor, "*own_shape"], tolerance: float
) -> str | None:
    if theirs.shape != ours.shape:
        return f"{name}: shape {list(theirs.shape)} there and {list(ours.shape)} here"
    finite = theirs.isfinite() & ours.isfinite()  # scores are minus infinity where barred
    off = torch.where(finite, (theirs - ours).abs(), 0.0)
    off = torch.where(~finite & (theirs != ours), torch.inf, off)
    scale = float(theirs[finite].abs().max()) if bool(finite.any()) else 1.0
    if not off.numel() or float(off.max()) <= tolerance * max(scale, 1.0):
        return None
    place = tuple(int(k) for k in torch.unravel_index(off.argmax(), off.shape))
    there, here = float(theirs[place]), float(ours[place])
    return f"{name}: {there:.6g} there and {here:.6g} here at {list(place)}"
