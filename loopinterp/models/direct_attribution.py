r"""Direct logit attribution: which writers of the stream a logit is read from, at any loop.

With the scale of every norm held where the run had it, what reaches a logit straight through the
stream is linear in what was written to it. So a logit's direction is carried back from the
unembedding, through final norm, coda, loop norms and injections, and each writer met on the way
gives its output's product with the direction there. Nothing else touches the stream: the parts
add up to the logit.

TransformerLens' ``logit_attrs`` does this through one norm, the final one, without its weight.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from einops import einsum

from loopinterp.errors import InputError
from loopinterp.models.run_inputs import TOKEN_TYPES
from loopinterp.models.taps import Recorder, Taps
from loopinterp.storage import digest_tensors

if TYPE_CHECKING:
    import xarray as xr
    from jaxtyping import Float, UInt8
    from torch import Tensor

    from loopinterp.models.run_readout import RunReadout
    from loopinterp.models.transformer_layer import Layer, Norm
    from loopinterp.models.transformer_lens_names import TransformerLensNames

    Read = Callable[[str], Tensor]
    """An activation of the run, by name or alias."""

# The loop, layer and head of a part that has none; NaN would fall out of groupby("loop").sum().
_NOWHERE = {"loop": -1, "layer": -1, "head": -1}


@torch.no_grad()
def attribute_logit(
    read: Read,
    model: TransformerLensNames,
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
        raise InputError(
            "from_loop",
            expected=f"a loop up to {loop}, after which the logits are read",
            given=str(from_loop),
            fix="Pass a smaller from_loop, or a later loop.",
        )
    read, logits = _reread(read, model, loop)
    choice = _one_hot("tokens", tokens, logits)
    if incorrect_tokens is not None:
        choice = choice - _one_hot("incorrect_tokens", incorrect_tokens, logits)
    way = _WayBack(read, model, choice @ model.W_U.T)
    if model.unembedding.bias is not None:
        way.add("unembedding bias", choice @ model.b_U)
    way.through_readout()
    for t in range(loop, from_loop - 1, -1):
        way.through_loop(t)
    state = read(f"loops.{from_loop}.hook_state_pre")
    way.write(f"state before loop {from_loop}", state, "state")
    return _named(way.parts[::-1], choice, logits)


@torch.no_grad()
def need_own_readout(run: RunReadout, model: TransformerLensNames, *, own_last_loop: bool) -> None:
    """Raise unless a model's plain readout is what the run's was, of one loop for all.

    Args:
        run: How the run ended.
        model: The model of the run, as it is now.
        own_last_loop: Whether the loop after which the run was read is asked for.

    Raises:
        InputError: If hooks changed what was read, or the weights have changed; if some
            positions are missing or moved that a coda looks at; if there is no such loop.
    """
    if own_last_loop and bool(run.by_example):
        raise InputError(
            "loop",
            expected="a loop to read every example after, as each made its own number of them",
            given="None",
            fix="Pass e.g. loop=0, or cache a run with one n_loops for all.",
        )
    every = torch.arange(run.state.shape[1], device=run.positions.device)
    if model.coda and not torch.equal(run.positions, every):
        raise InputError(
            "cache",
            expected="all positions in their order: the heads of the coda look at them",
            given=f"positions {run.positions.tolist()} of {len(every)}",
            fix="Cache without pos_slice=, and select positions of the result.",
        )
    if run.state.dtype != model.dtype:
        return  # activations in another type than the model's, refused as such
    wrong = ""
    if run.logits is not None:
        logits = run.logits.to(model.device)
        gap = (model._readout(run.state.to(model.device)) - logits).abs()
        # Far above rounding, by whichever kernel.
        if not bool((gap <= torch.finfo(gap.dtype).eps ** 0.5 * logits.abs().max()).all()):
            wrong = f"logits that are off by up to {gap.max().item():.2g}"
    elif run.weights is not None and not torch.equal(run.weights.cpu(), digest_of_readout(model)):
        wrong = "other weights of its readout than those of the run"
    if wrong:
        raise InputError(
            "logit_attribution",
            expected="a model that reads the run's logits from its last state",
            given=wrong,
            fix="Attribute a run whose coda and final norm no hook has changed, with the "
            "weights of that run.",
        )


def digest_of_readout(model: TransformerLensNames) -> UInt8[Tensor, " byte"]:
    """SHA-256 of the weights that logits are read with, those of a coda's positions too."""
    parts = ("coda.", "ln_final.", "unembedding.", "relative_bias.")
    tensors = {k: x for k, x in model.state_dict().items() if k.startswith(parts)}
    return torch.tensor(list(bytes.fromhex(digest_tensors(tensors))), dtype=torch.uint8)


class _WayBack:
    """A logit's direction, on its way back through the run, and the parts met so far.

    At any place on it, ``logit = direction . stream there + the parts met so far``.
    """

    def __init__(self, read: Read, model: TransformerLensNames, direction: Tensor) -> None:
        self.read, self.model, self.direction = read, model, direction
        self.parts: list[tuple[dict[str, Any], Float[Tensor, "*batch pos"]]] = []

    def add(self, name: str, logit: Tensor, part: str = "", /, **place: int) -> None:
        """Note what a part adds to the logit; ``part`` is its kind, where not its name."""
        indices = {**_NOWHERE, **place}
        words = {"loop": "loop", "layer": "layer" if "loop" in place else "coda layer"}
        where = [f"{word} {place[axis]}" for axis, word in words.items() if axis in place]
        component = ", ".join([*where, name])
        self.parts.append(({"component": component, "part": part or name, **indices}, logit))

    def write(self, name: str, x: Tensor, part: str = "", /, **place: int) -> None:
        """Note what a vector written to the stream here adds to the logit."""
        self.add(name, (x * self.direction).sum(-1), part, **place)

    def through_norm(self, norm: Norm | Any, site: str, name: str, **place: int) -> None:
        """``x -> (x - mean) / scale * weight + bias``, or ``x -> x / scale * weight``."""
        if norm.bias is not None:
            self.write(f"{name} bias", norm.bias, "norm bias", **place)
        direction = self.direction * norm.weight / self.read(f"{site}.hook_scale")
        if norm.bias is not None:
            direction = direction - direction.mean(-1, keepdim=True)
        self.direction = direction

    def through_readout(self) -> None:
        """Final norm and coda."""
        if self.model.ln_final is not None:
            self.through_norm(self.model.ln_final, "ln_final", "final norm")
        for k in reversed(range(len(self.model.coda))):
            self.through_layer(self.model.coda[k], f"coda.{k}", layer=k)

    def through_loop(self, loop: int) -> None:
        """Loop norm, layers, and the injection, wherever it stands."""
        model, here = self.model, f"loops.{loop}"
        injection = model.config.injection
        if model.ln_loop is not None:
            self.through_norm(model.ln_loop, f"{here}.ln_loop", "loop norm", loop=loop)
        if injection == "gated_output":
            self._inject(loop)
        for k in reversed(range(len(model.block))):
            self.through_layer(model.block[k], f"{here}.blocks.{k}", loop=loop, layer=k)
        # Injected into sublayers, the input reaches the stream through what they write alone.
        if injection in ("input", "concat"):
            self._inject(loop)
        if model.recall is not None:
            self.direction = self.direction @ model.recall.state.weight

    def _inject(self, loop: int) -> None:
        self.write("injection", self.read(f"loops.{loop}.hook_injection"), loop=loop)

    def through_layer(self, weights: Layer | Any, at: str, **place: int) -> None:
        """MLP, then attention: each writes to the stream, through a norm of its own or not."""
        if weights.norms_sum:
            self.through_norm(weights.ln2, f"{at}.ln2", "ln2", **place)
        self.write("mlp", self.read(f"{at}.hook_mlp_out"), **place)
        if weights.norms_sum:
            self.through_norm(weights.ln1, f"{at}.ln1", "ln1", **place)
        stream = self.direction
        if weights.ln1_post is not None:
            self.through_norm(weights.ln1_post, f"{at}.ln1_post", "ln1_post", **place)
        if weights.attn_gate is not None:
            self.direction = self.direction * self.read(f"{at}.hook_attn_gate")
        self.write("attention bias", weights.attn.b_O, **place)
        read_along = "... d_model, head d_head d_model -> ... head d_head"
        wanted = einsum(self.direction, weights.attn.W_O, read_along)
        heads = (self.read(f"{at}.attn.hook_z") * wanted).sum(-1)  # [batch, pos, head]
        for head in reversed(range(weights.attn.n_heads)):
            self.add(f"head {head}", heads[..., head], "head", head=head, **place)
        self.direction = stream


def _reread(read: Read, model: TransformerLensNames, loop: int) -> tuple[Read, Tensor]:
    """Logits of the state after a loop, and the run as if it had ended there.

    A run reads its last state only. What coda and final norm do with another one is had by running
    them again; for the last it comes to the same.
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
    recorder, alone = Recorder(), state.dim() == 2
    logits = model._readout(state[None] if alone else state, Taps((), again.values(), recorder))
    kept = {name: x[0] if alone else x for name, x in recorder.kept.items()}

    def reread(name: str) -> Tensor:
        found = kept.get(model.addresses().resolve(name))
        return read(name) if found is None else found

    return reread, logits[0] if alone else logits


def _one_hot(name: str, tokens: Any, logits: Tensor) -> Float[Tensor, "*batch pos vocab"]:
    """1 where the logits of these classes are, 0 elsewhere."""
    shape, n_classes = logits.shape[:-1], logits.shape[-1]
    try:
        given = torch.as_tensor(tokens, device=logits.device)
    except (TypeError, ValueError, RuntimeError):  # text, None, a list of lists of unequal length
        given = torch.empty(0)
    # One class for each example stands for all its positions, as in TransformerLens.
    wide = given[:, None] if given.dim() == 1 and len(shape) == 2 else given
    sizes = zip(wide.shape[::-1], shape[::-1])
    fits = wide.dim() <= len(shape) and all(n in (1, there) for n, there in sizes)
    inside = given.dtype in TOKEN_TYPES and bool(((given >= 0) & (given < n_classes)).all())
    if not fits or not inside:
        several = isinstance(tokens, torch.Tensor) and tokens.dim()
        raise InputError(
            name,
            expected=f"output classes from 0 to {n_classes - 1}: one, one for each example, or "
            f"one for each place of {list(shape)}",
            given=f"{given.dtype} {list(given.shape)}" if several else reprlib.repr(tokens),
            fix="Pass the answers as integers, [batch] or [batch, pos].",
        )
    return F.one_hot(wide.long().expand(shape), n_classes).to(logits)


def _named(
    parts: list[tuple[dict[str, Any], Tensor]], choice: Tensor, logits: Tensor
) -> xr.DataArray:
    """The parts under their names; raise unless they add up."""
    import xarray as xr

    values = torch.stack([logit for _, logit in parts])
    gap = (values.sum(0) - (choice * logits).sum(-1)).abs()
    # Far above rounding, far below a part left out; a difference may be zero where logits are not.
    size = values.abs().sum(0).max() + logits.abs().max()
    if bool((gap > torch.finfo(values.dtype).eps ** 0.5 * size).any()):
        raise InputError(
            "logit_attribution",
            expected="parts that add up to the logit",
            given=f"sums that are off by up to {gap.max().item():.2g}",
            fix="Attribute a run whose stream no hook has changed, with the weights of that run.",
        )
    names = {key: ("component", [name[key] for name, _ in parts]) for key in parts[0][0]}
    data = values.double().cpu().numpy()
    dims = ("component", "batch", "pos") if logits.dim() == 3 else ("component", "pos")
    return xr.DataArray(data, names, dims, name="logit_attribution")
