r"""Direct logit attribution: what each writer to the stream adds to a logit, at any loop.

With the scale of norms and gates fixed to the run's, the path from a writer to the logit is a
linear map, whose transpose carries the logit's direction back:

.. math::
    d \cdot (D x + b) = (D^\top d) \cdot x + d \cdot b

At every place, ``logit = direction . stream + the parts so far``.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import reduce
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch

from loopinterp.core.errors import InputError
from loopinterp.models.protocol import TOKEN_TYPES
from loopinterp.models.taps import Recorder, Taps

if TYPE_CHECKING:
    import xarray as xr
    from jaxtyping import Float, Int
    from torch import Tensor

    from loopinterp.models.taps import RunReadout

    Read = Callable[[str], Tensor]  # an activation of the run, by name or alias


def for_logit_attribution(name: str) -> bool:
    """Whether ``cache.logit_attribution`` needs an activation: a ``names_filter`` for runs.

    Example:
        >>> [for_logit_attribution(f"blocks.0.{x}") for x in ("attn.hook_z", "attn.hook_pattern")]
        [True, False]
    """
    sublayers = ("hook_scale", "hook_z", "gate", "hook_mlp_out", "hook_mix_out", "hook_injection")
    return name.endswith((*sublayers, "hook_state_pre", "hook_state_post", "hook_code_pre"))


class AttributionPass:
    """The linear backward pass of direct logit attribution.

    It starts at the logits of the first ``classes`` minus those of the second, if any, and ends at
    the state before a loop. At each place it reads activations by component and records parts.
    """

    direction: Float[Tensor, "*batch pos d_state"]

    def __init__(
        self, read: Read, dtype: torch.dtype, classes: Sequence[Int[Tensor, "*batch pos"]]
    ) -> None:
        self._read, self._dtype, self._classes = read, dtype, classes
        self._place: dict[str, int] = {}
        self.parts: list[tuple[dict[str, Any], Float[Tensor, "*batch pos"]]] = []

    def at(self, **place: int) -> None:
        """Move to ``loop=``, ``layer=``, both, or neither; a layer alone is in the coda."""
        self._place = place

    def backwards(self, layers: Any, **place: int) -> Iterator[Any]:
        """The layers of a place, the last one first, with the pass at each; then at the place."""
        for k in reversed(range(len(layers))):
            self.at(**place, layer=k)
            yield layers[k]
        self.at(**place)

    def read(self, component: str) -> Tensor:
        words = (("loop", "loops"), ("layer", "blocks" if "loop" in self._place else "coda"))
        steps = [f"{word}.{self._place[axis]}" for axis, word in words if axis in self._place]
        return self._read(".".join([*steps, component])).to(self._dtype)

    # Parts

    def add(self, name: str, logit: Tensor, part: str = "", *, head: int | None = None) -> None:
        """Record a part of the logit; ``part`` is its kind if other than ``name``."""
        place = self._place if head is None else {**self._place, "head": head}
        words = {"loop": "loop", "layer": "layer" if "loop" in place else "coda layer"}
        where = [f"{word} {place[axis]}" for axis, word in words.items() if axis in place]
        # -1 where there is none: NaN would fall out of groupby("loop").sum().
        indices = {"loop": -1, "layer": -1, "head": -1, **place}
        label = ", ".join([*where, name])
        self.parts.append(({"component": label, "part": part or name, **indices}, logit))

    def write(self, name: str, x: Tensor, part: str = "") -> None:
        """Record what a vector written to the stream adds."""
        # [batch, pos]: the dot product of the vector with the direction of the logit.
        self.add(name, (self._here(x) * self.direction).sum(-1), part)

    def write_heads(
        self,
        weight: Float[Tensor, "d_model width"],
        bias: Float[Tensor, " d_model"] | None,
        *,
        gate: str | None = None,
    ) -> None:
        """Record the parts of ``sum_h (gate z)_h W_O[h] + b``."""
        z = self.read("attn.hook_z")  # [batch, pos, head, d_head]
        if gate is not None:
            z = z * self.read(gate)
        if bias is not None:
            self.write("attention bias", bias)
        # The direction as each head's z meets it: [batch, pos, head, d_head].
        per_head = (self.direction @ self._here(weight)).unflatten(-1, z.shape[-2:])
        heads = (z * per_head).sum(-1)  # [batch, pos, head]
        for head in reversed(range(z.shape[-2])):
            self.add(f"head {head}", heads[..., head], "head", head=head)

    def _here(self, x: Tensor) -> Tensor:
        return x.to(self.direction.device, self._dtype)

    # Maps of the stream

    def through_unembedding(self, weight: Tensor, bias: Tensor | None) -> None:
        """``logits = W x + b``: start with the rows of the classes."""
        if bias is not None:
            self.at()
            self.add("unembedding bias", self._of_classes(bias))
        self.direction = self._of_classes(weight)  # [batch, pos, d_model], a row for each place

    def _of_classes(self, rows: Tensor) -> Tensor:
        chosen = [
            rows[classes.to(rows.device)].to(classes.device, self._dtype)
            for classes in self._classes
        ]
        return reduce(torch.sub, chosen)

    def through_norm(
        self,
        site: str,
        weight: Float[Tensor, " d_model"] | None = None,
        bias: Float[Tensor, " d_model"] | None = None,
        *,
        name: str = "",
    ) -> None:
        """``x -> (x - mean) / scale * weight + bias``, or ``x -> x / scale * weight``.

        ``site`` is the norm's hook name, ``name`` the label of its bias if other than that.
        """
        if bias is not None:
            self.write(f"{name or site} bias", bias, "norm bias")
        weighted = self.direction if weight is None else self.direction * self._here(weight)
        # The transpose of scaling is scaling; that of centring is centring.
        self.direction = weighted / self.read(f"{site}.hook_scale")
        if bias is not None:
            self.direction = self.direction - self.direction.mean(-1, keepdim=True)

    def through_scale(self, factor: Tensor) -> None:
        """``x -> factor * x``, feature by feature."""
        self.direction = self.direction * factor

    def through_linear(self, weight: Float[Tensor, "d_out d_in"]) -> None:
        """``x -> W x``."""
        # [..., d_out] @ [d_out, d_in]: what a unit of each input adds to the logit.
        self.direction = self.direction @ self._here(weight)

    @contextmanager
    def branch(self) -> Iterator[None]:
        """A branch added to the stream, whose direction is restored afterwards."""
        stream = self.direction
        yield
        self.direction = stream


@runtime_checkable
class Attributable(Protocol):
    """A model with the backward steps of its readout and loop."""

    def attribute_readout(self, backward: AttributionPass) -> None:
        """From the logits to the last state."""

    def attribute_loop(self, backward: AttributionPass, loop: int) -> None:
        """From the state after a loop to the state before it."""


@torch.no_grad()
def attribute_logit(
    read: Read,
    model: Any,
    tokens: int | Tensor,
    incorrect_tokens: int | Tensor | None,
    *,
    loop: int,
    from_loop: int,
) -> xr.DataArray:
    state = read(f"loops.{loop}.hook_state_post").to(model.device, model.dtype)
    # Coda and final norm are run again on the state, as if the run had ended at this loop.
    again = [a for a in model.addresses().addresses.values() if a.in_readout]
    recorder, no_batch = Recorder(), state.dim() == 2
    taps = Taps((), again, recorder)
    logits = model.run_readout(state[None] if no_batch else state, taps)
    logits = logits[0] if no_batch else logits
    in_readout = {name: x[0] if no_batch else x for name, x in recorder.activations.items()}

    def reread(name: str) -> Tensor:
        x = in_readout.get(model.addresses().resolve_name(name))
        return read(name).to(model.device) if x is None else x

    classes = [_classes("tokens", tokens, logits)]
    if incorrect_tokens is not None:
        classes.append(_classes("incorrect_tokens", incorrect_tokens, logits))
    # Activations in half precision are rounded already; the products need not be.
    dtype = torch.promote_types(model.dtype, torch.float32)
    backward = AttributionPass(reread, dtype, classes)
    model.attribute_readout(backward)
    for t in range(loop, from_loop - 1, -1):
        model.attribute_loop(backward, t)
    backward.at()
    state = reread(f"loops.{from_loop}.hook_state_pre")
    backward.write(f"state before loop {from_loop}", state, "state")
    return _named(backward.parts[::-1], classes, logits)


@torch.no_grad()
def need_own_readout(run: RunReadout, model: Any, *, own_last_loop: bool) -> None:
    """Raise if hooks or new weights make the model's readout differ from the run's.

    ``own_last_loop``: whether the attributed loop is the one the run was read after.
    """
    if own_last_loop and bool(run.by_example):
        expected, fix = "one loop to read every example after", "Pass e.g. loop=0."
        raise InputError("loop", expected=expected, given="a loop for each", fix=fix)
    every = torch.arange(run.state.shape[1], device=run.positions.device)
    if model.site_map.n_coda and not torch.equal(run.positions, every):
        expected = f"all {len(every)} positions in order, as the coda reads them"
        fix = "Cache without pos_slice=, and select positions of the result."
        raise InputError("cache", expected=expected, given=f"{run.positions.tolist()}", fix=fix)
    if run.logits is None:
        return
    logits = run.logits.to(model.device)
    again = model.run_readout(run.state.to(model.device, model.dtype))
    # Far above rounding, by whichever kernel.
    limit = torch.finfo(again.dtype).eps ** 0.5 * logits.abs().max()
    if not bool(((again - logits).abs() <= limit).all()):
        expected = "a model that reads the run's logits from its last state"
        fix = "Attribute a run without hooks in coda and final norm, with the weights of that run; "
        fix += "if it is quantised, with activations in float."
        raise InputError("logit_attribution", expected=expected, given="other logits", fix=fix)


def _classes(name: str, tokens: Any, logits: Tensor) -> Int[Tensor, "*batch pos"]:
    shape, n_classes = logits.shape[:-1], logits.shape[-1]
    try:
        classes = torch.as_tensor(tokens, device=logits.device)
    except (TypeError, ValueError, RuntimeError):  # text, None, a list of lists of unequal length
        classes = torch.empty(0)
    # One class for each example stands for all its positions, as in TransformerLens.
    wide = classes[:, None] if classes.dim() == 1 and len(shape) == 2 else classes
    sizes = zip(wide.shape[::-1], shape[::-1])
    fits = wide.dim() <= len(shape) and all(n in (1, there) for n, there in sizes)
    inside = classes.dtype in TOKEN_TYPES and bool(((classes >= 0) & (classes < n_classes)).all())
    if not fits or not inside:
        expected = f"output classes from 0 to {n_classes - 1}: one, or [batch] or [batch, pos]"
        fix = f"Pass the answers as integers that fit {list(shape)}."
        raise InputError(name, expected=expected, given=reprlib.repr(tokens), fix=fix)
    return wide.long().expand(shape)


def _named(
    parts: list[tuple[dict[str, Any], Tensor]], classes: list[Tensor], logits: Tensor
) -> xr.DataArray:
    import xarray as xr

    values = torch.stack([logit for _, logit in parts])  # [component, batch, pos]
    # The logits, or their differences, that the parts have to add up to: [batch, pos].
    expected = reduce(torch.sub, [logits.gather(-1, x[..., None]).squeeze(-1) for x in classes])
    gap = (values.sum(0) - expected).abs()
    # Far above rounding, far below a part left out; a difference may be zero where logits are not.
    size = values.abs().sum(0).max() + logits.abs().max()
    if bool((gap > torch.finfo(logits.dtype).eps ** 0.5 * size).any()):
        got = f"sums that are off by up to {gap.max().item():.2g}"
        fix = "Attribute a run without hooks, with its weights and an uncast cache; if "
        fix += "it is quantised, with activations in float, as rounding them is no linear map."
        what, fits = "logit_attribution", "parts that add up to the logit"
        raise InputError(what, expected=fits, given=got, fix=fix)
    names = {key: ("component", [name[key] for name, _ in parts]) for key in parts[0][0]}
    dims = ("component", "batch", "pos") if logits.dim() == 3 else ("component", "pos")
    return xr.DataArray(values.double().cpu().numpy(), names, dims, name="logit_attribution")
