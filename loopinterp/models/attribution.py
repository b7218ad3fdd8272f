r"""Direct logit attribution: which writers of the stream a logit is read from, at any loop.

With the scale of every norm and gate held where the run had it, everything between a writer and
the logit is a linear map of the stream, and its transpose carries the logit's direction back:

.. math::
    x \mapsto D x + b: \qquad d \cdot (D x + b) = (D^\top d) \cdot x + d \cdot b

So ``logit = direction . stream + the parts so far`` holds at every place, and the parts add up to
the logit. A model states its own backward steps, beside its loop and its readout
(:class:`Attributable`); the linear algebra of all steps is here.

TransformerLens' ``logit_attrs`` does this through one norm, the final one, without its weight.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch

from loopinterp.core.errors import InputError
from loopinterp.core.storage import digest_tensors
from loopinterp.models.run_inputs import TOKEN_TYPES
from loopinterp.models.taps import Recorder, Taps

if TYPE_CHECKING:
    import xarray as xr
    from jaxtyping import Float, Int, UInt8
    from torch import Tensor, nn

    from loopinterp.models.addresses import AddressBook, SiteMap
    from loopinterp.models.taps import RunReadout

    Read = Callable[[str], Tensor]
    """An activation of the run, by name or alias."""

# The loop, layer and head of a part that has none; NaN would fall out of groupby("loop").sum().
_NOWHERE = {"loop": -1, "layer": -1, "head": -1}
_READ = ("hook_scale", "hook_z", "gate", "hook_mlp_out", "hook_mix_out", "hook_injection")
_READ += ("hook_state_pre", "hook_state_post", "hook_code_pre")


def for_logit_attribution(name: str) -> bool:
    """Whether ``cache.logit_attribution`` reads an activation: a filter of names for its runs.

    Example:
        >>> [for_logit_attribution(f"blocks.0.{x}") for x in ("attn.hook_z", "attn.hook_pattern")]
        [True, False]
    """
    return name.endswith(_READ)


class AttributionPass:
    """The linear backward pass of direct logit attribution.

    It begins at the logits and ends at the state before a loop. It is at one place at a time, of
    which it reads activations by their component names and notes parts.

    Args:
        read: The run's activations.
        dtype: Type of the computation.
        plus: Class whose logit is attributed, at each place.
        minus: Class whose logit is subtracted; None for the logit itself.
    """

    direction: Float[Tensor, "*batch pos d_state"]
    """``direction . stream here + the parts so far`` is the logit."""

    def __init__(
        self,
        read: Read,
        dtype: torch.dtype,
        plus: Int[Tensor, "*batch pos"],
        minus: Int[Tensor, "*batch pos"] | None = None,
    ) -> None:
        self._read, self._dtype = read, dtype
        self._classes = (plus,) if minus is None else (plus, minus)
        self._place: dict[str, int] = {}
        self.parts: list[tuple[dict[str, Any], Float[Tensor, "*batch pos"]]] = []

    def at(self, **place: int) -> None:
        """Go to a loop, to a layer of one (``loop=``, ``layer=``), to a coda layer, or to the top.

        Args:
            place: ``loop``, ``layer``, both, or neither.
        """
        self._place = place

    def read(self, component: str) -> Tensor:
        """An activation at this place, in the type of the computation."""
        words = (("loop", "loops"), ("layer", "blocks" if "loop" in self._place else "coda"))
        steps = [f"{word}.{self._place[axis]}" for axis, word in words if axis in self._place]
        return self._read(".".join([*steps, component])).to(self._dtype)

    # Parts

    def add(self, name: str, logit: Tensor, part: str = "", *, head: int | None = None) -> None:
        """Note what a part adds to the logit; ``part`` is its kind, where not its name."""
        place = self._place if head is None else {**self._place, "head": head}
        words = {"loop": "loop", "layer": "layer" if "loop" in place else "coda layer"}
        where = [f"{word} {place[axis]}" for axis, word in words.items() if axis in place]
        label = ", ".join([*where, name])
        self.parts.append(({"component": label, "part": part or name, **_NOWHERE, **place}, logit))

    def write(self, name: str, x: Tensor, part: str = "") -> None:
        """Note what a vector written to the stream here adds to the logit."""
        self.add(name, (x.to(self._dtype) * self.direction).sum(-1), part)

    def write_heads(
        self,
        weight: Float[Tensor, "d_model width"],
        bias: Float[Tensor, " d_model"] | None,
        *,
        gate: str | None = None,
    ) -> None:
        """Note what each head writes, and the bias of them all: ``sum_h (gate z)_h W_O[h] + b``.

        Args:
            weight: Output weights of all heads side by side, as a linear map has them.
            bias: The bias after them.
            gate: The component that each head's ``z`` is multiplied with, where there is one.
        """
        z = self.read("attn.hook_z")  # [batch, pos, head, d_head]
        if gate is not None:
            z = z * self.read(gate)
        if bias is not None:
            self.write("attention bias", bias)
        # The direction as each head's z meets it: [batch, pos, head, d_head].
        per_head = (self.direction @ weight.to(self._dtype)).unflatten(-1, z.shape[-2:])
        heads = (z * per_head).sum(-1)  # [batch, pos, head]
        for head in reversed(range(z.shape[-2])):
            self.add(f"head {head}", heads[..., head], "head", head=head)

    # Maps of the stream

    def through_unembedding(self, weight: Tensor, bias: Tensor | None) -> None:
        """``logits = W x + b``: the pass begins with the rows of the classes."""
        if bias is not None:
            self.at()
            self.add("unembedding bias", self._of_classes(bias))
        self.direction = self._of_classes(weight)

    def _of_classes(self, rows: Tensor) -> Tensor:
        chosen = [rows[classes].to(self._dtype) for classes in self._classes]
        return chosen[0] if len(chosen) == 1 else chosen[0] - chosen[1]

    def through_norm(
        self,
        site: str,
        weight: Float[Tensor, " d_model"] | None = None,
        bias: Float[Tensor, " d_model"] | None = None,
        *,
        name: str = "",
    ) -> None:
        """``x -> (x - mean) / scale * weight + bias``, or ``x -> x / scale * weight``.

        Args:
            site: The norm, as hooks name it.
            weight: None where it has none.
            bias: None for a root mean square norm, which subtracts no mean.
            name: Of the part that its bias is; the site's if empty.
        """
        if bias is not None:
            self.write(f"{name or site} bias", bias, "norm bias")
        weighted = self.direction if weight is None else self.direction * weight.to(self._dtype)
        # The transpose of scaling is scaling; that of centring is centring.
        self.direction = weighted / self.read(f"{site}.hook_scale")
        if bias is not None:
            self.direction = self.direction - self.direction.mean(-1, keepdim=True)

    def through_scale(self, factor: Tensor) -> None:
        """``x -> factor * x``, feature by feature."""
        self.direction = self.direction * factor

    def through_linear(self, weight: Float[Tensor, "d_out d_in"]) -> None:
        """``x -> W x``."""
        self.direction = self.direction @ weight.to(self._dtype)

    @contextmanager
    def branch(self) -> Iterator[None]:
        """A branch that is added to the stream, whose own direction stays as it is."""
        stream = self.direction
        yield
        self.direction = stream


@runtime_checkable
class Attributable(Protocol):
    """A model that states the backward steps of attribution through its readout and a loop."""

    @property
    def site_map(self) -> SiteMap:
        """The sites of the model, and their sizes."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Type of the activations."""
        ...

    @property
    def device(self) -> torch.device:
        """Where the weights lie."""
        ...

    def addresses(self, n_loops: int | None = None) -> AddressBook:
        """All addresses of a run, and the ways to name them."""
        ...

    def run_readout(self, h: Tensor, taps: Taps = ...) -> Tensor:
        """Logits of a state, past the taps there."""
        ...

    def readout_digest(self) -> UInt8[Tensor, " byte"] | None:
        """A digest of the weights that logits are read with; None if it keeps none."""
        ...

    def attribute_readout(self, backward: AttributionPass) -> None:
        """From the logits to the state that they are read from."""

    def attribute_loop(self, backward: AttributionPass, loop: int) -> None:
        """From the state after a loop to the state before it."""


@torch.no_grad()
def attribute_logit(
    read: Read,
    model: Attributable,
    tokens: int | Tensor,
    incorrect_tokens: int | Tensor | None,
    *,
    loop: int,
    from_loop: int,
) -> xr.DataArray:
    """The work of :meth:`~loopinterp.models.LoopedCache.logit_attribution`, which documents it.

    The model is unrolled over the loops of the run.
    """
    if from_loop > loop:
        expected = f"a loop up to {loop}, after which the logits are read"
        fix = "Pass a smaller from_loop, or a later loop."
        raise InputError("from_loop", expected=expected, given=str(from_loop), fix=fix)
    read, logits = _reread(read, model, loop)
    right = _classes("tokens", tokens, logits)
    wrong = None
    if incorrect_tokens is not None:
        wrong = _classes("incorrect_tokens", incorrect_tokens, logits)
    # Of half precision the activations are rounded already; the products need not be.
    dtype = torch.promote_types(model.dtype, torch.float32)
    backward = AttributionPass(read, dtype, right, wrong)
    model.attribute_readout(backward)
    for t in range(loop, from_loop - 1, -1):
        model.attribute_loop(backward, t)
    backward.at()
    state = read(f"loops.{from_loop}.hook_state_pre")
    backward.write(f"state before loop {from_loop}", state, "state")
    return _named(backward.parts[::-1], right, wrong, logits)


@torch.no_grad()
def need_own_readout(run: RunReadout, model: Attributable, *, own_last_loop: bool) -> None:
    """Raise unless a model's plain readout is what the run's was, of one loop for all.

    Args:
        run: How the run ended.
        model: The model of the run, as it is now.
        own_last_loop: Whether the loop after which the run was read is the one attributed.

    Raises:
        InputError: If hooks changed what was read, or the weights have changed, or that cannot be
            told; if some positions are missing or moved that a coda looks at; if there is no such
            loop.
    """
    if own_last_loop and bool(run.by_example):
        raise InputError(
            "loop",
            expected="a loop to read every example after, as each made its own number of them",
            given="None",
            fix="Pass e.g. loop=0, or cache a run with one n_loops for all.",
        )
    every = torch.arange(run.state.shape[1], device=run.positions.device)
    if model.site_map.n_coda and not torch.equal(run.positions, every):
        raise InputError(
            "cache",
            expected="all positions in their order: the heads of the coda look at them",
            given=f"positions {run.positions.tolist()} of {len(every)}",
            fix="Cache without pos_slice=, and select positions of the result.",
        )
    if run.state.dtype != model.dtype:
        return  # activations in another type than the model's, refused as such
    changed = None
    if run.logits is not None:
        gap = _logit_gap(run.logits, run.state, model)
        if gap is not None:
            changed = f"logits that are off by up to {gap:.2g}"
    else:
        now = model.readout_digest()
        if run.weights is None or now is None:
            raise InputError(
                "cache",
                expected="that of a run that read its logits, which say what the readout was",
                given="one of a run that returned states alone",
                fix="Cache with return_type='logits'.",
            )
        if not torch.equal(run.weights.cpu(), now):
            changed = "other weights of its readout than those of the run"
    if changed is not None:
        raise InputError(
            "logit_attribution",
            expected="a model that reads the run's logits from its last state",
            given=changed,
            fix="Attribute a run whose coda and final norm no hook has changed, with the "
            "weights of that run.",
        )


def _logit_gap(logits: Tensor, state: Tensor, model: Attributable) -> float | None:
    """How far the model's logits of a state are off by now; None if by no more than rounding."""
    logits = logits.to(model.device)
    again = model.run_readout(state.to(model.device))
    if again.dtype != logits.dtype:
        raise _rounded("cache", logits, again.dtype)
    gap = (again - logits).abs()
    # Far above rounding, by whichever kernel.
    alike = gap <= torch.finfo(gap.dtype).eps ** 0.5 * logits.abs().max()
    return None if bool(alike.all()) else gap.max().item()


def digest_of_readout(model: nn.Module) -> UInt8[Tensor, " byte"]:
    """SHA-256 of the weights that logits are read with, those of a coda's positions too."""
    parts = ("coda.", "ln_final.", "unembedding.", "relative_bias.")
    tensors = {k: x for k, x in model.state_dict().items() if k.startswith(parts)}
    return torch.tensor(list(bytes.fromhex(digest_tensors(tensors))), dtype=torch.uint8)


def _rounded(what: str, values: Tensor, dtype: torch.dtype) -> InputError:
    return InputError(
        what,
        expected=f"a run in the precision of the weights, {dtype}",
        given=f"{values.dtype}, as under torch.autocast",
        fix="Run without autocast: parts that are rounded do not add up.",
    )


def _reread(read: Read, model: Attributable, loop: int) -> tuple[Read, Tensor]:
    """Logits of the state after a loop, and the run as if it had ended there.

    A run reads its last state only. For another loop coda and final norm are run again on its
    state; for the last loop that gives the same.
    """
    state = read(f"loops.{loop}.hook_state_post")
    if (state.dtype, state.device) != (model.dtype, model.device):
        raise InputError(
            "cache",
            expected=f"activations in {model.dtype} on {model.device}, as the weights are",
            given=f"{state.dtype} on {state.device}",
            fix="Cache without dtype= and device=: parts that are rounded do not add up.",
        )
    again = {a.name: a for a in model.addresses().addresses.values() if a.in_readout}
    recorder, no_batch = Recorder(), state.dim() == 2
    taps = Taps((), again.values(), recorder)
    logits = model.run_readout(state[None] if no_batch else state, taps)
    in_readout = {name: x[0] if no_batch else x for name, x in recorder.kept.items()}

    def reread(name: str) -> Tensor:
        x = in_readout.get(model.addresses().resolve(name))
        if x is not None:
            return x
        x = read(name)
        if torch.finfo(x.dtype).bits < torch.finfo(model.dtype).bits:
            raise _rounded(f"activation {name!r}", x, model.dtype)
        return x

    return reread, logits[0] if no_batch else logits


def _classes(name: str, tokens: Any, logits: Tensor) -> Int[Tensor, "*batch pos"]:
    """The class that is meant at each place."""
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
        several = isinstance(tokens, torch.Tensor) and tokens.dim()
        raise InputError(
            name,
            expected=f"output classes from 0 to {n_classes - 1}: one, one for each example, or "
            f"one for each place of {list(shape)}",
            given=f"{classes.dtype} {list(classes.shape)}" if several else reprlib.repr(tokens),
            fix="Pass the answers as integers, [batch] or [batch, pos].",
        )
    return wide.long().expand(shape)


def _named(
    parts: list[tuple[dict[str, Any], Tensor]],
    right: Tensor,
    wrong: Tensor | None,
    logits: Tensor,
) -> xr.DataArray:
    """The parts under their names; raise unless they add up."""
    import xarray as xr

    values = torch.stack([logit for _, logit in parts])
    # The logits that the parts have to add up to: [batch, pos].
    chosen = [logits.gather(-1, x[..., None]).squeeze(-1) for x in (right, wrong) if x is not None]
    expected = chosen[0] if wrong is None else chosen[0] - chosen[1]
    gap = (values.sum(0) - expected).abs()
    # Far above rounding, far below a part left out; a difference may be zero where logits are not.
    size = values.abs().sum(0).max() + logits.abs().max()
    if bool((gap > torch.finfo(logits.dtype).eps ** 0.5 * size).any()):
        raise InputError(
            "logit_attribution",
            expected="parts that add up to the logit",
            given=f"sums that are off by up to {gap.max().item():.2g}",
            fix="Attribute a run whose stream no hook has changed, with the weights of that run.",
        )
    names = {key: ("component", [name[key] for name, _ in parts]) for key in parts[0][0]}
    dims = ("component", "batch", "pos") if logits.dim() == 3 else ("component", "pos")
    return xr.DataArray(values.double().cpu().numpy(), names, dims, name="logit_attribution")
