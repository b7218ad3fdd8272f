r"""Direct logit attribution: which writers of the stream a logit is read from, at any loop.

With the scale of every norm held where the run had it, what reaches a logit straight through the
stream is linear in what was written to it. So a logit's direction is carried back from the
unembedding, through final norm, coda, loop norms and injections, and each writer met on the way
gives its output's product with the direction there (:mod:`loopinterp.models.way_back`). Nothing
else touches the stream: the parts add up to the logit.

TransformerLens' ``logit_attrs`` does this through one norm, the final one, without its weight.
"""

from __future__ import annotations

import reprlib
from typing import TYPE_CHECKING, Any

import torch

from loopinterp.errors import InputError
from loopinterp.models.run_inputs import TOKEN_TYPES
from loopinterp.models.taps import Recorder, Taps
from loopinterp.models.way_back import WayBack
from loopinterp.storage import digest_tensors

if TYPE_CHECKING:
    import xarray as xr
    from jaxtyping import Int, UInt8
    from torch import Tensor, nn

    from loopinterp.models.run_readout import RunReadout
    from loopinterp.models.way_back import Read, WalksBack


@torch.no_grad()
def attribute_logit(
    read: Read,
    model: WalksBack,
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
    right = _classes("tokens", tokens, logits)
    wrong = None
    if incorrect_tokens is not None:
        wrong = _classes("incorrect_tokens", incorrect_tokens, logits)
    # Of half precision the activations are rounded already; the products need not be.
    way = WayBack(read, torch.promote_types(model.dtype, torch.float32), right, wrong)
    model._readout_back(way)
    for t in range(loop, from_loop - 1, -1):
        model._loop_back(way, t)
    way.stand()
    state = read(f"loops.{from_loop}.hook_state_pre")
    way.write(f"state before loop {from_loop}", state, "state")
    return _named(way.parts[::-1], right, wrong, logits)


@torch.no_grad()
def need_own_readout(run: RunReadout, model: WalksBack, *, own_last_loop: bool) -> None:
    """Raise unless a model's plain readout is what the run's was, of one loop for all.

    Args:
        run: How the run ended.
        model: The model of the run, as it is now.
        own_last_loop: Whether the loop after which the run was read is asked for.

    Raises:
        InputError: If hooks changed what was read, or the weights have changed, or nobody can
            tell; if some positions are missing or moved that a coda looks at; if there is no such
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
    wrong = ""
    if run.logits is not None:
        logits = run.logits.to(model.device)
        again = model._readout(run.state.to(model.device))
        if again.dtype != logits.dtype:
            raise _rounded("cache", logits, again.dtype)
        gap = (again - logits).abs()
        # Far above rounding, by whichever kernel.
        if not bool((gap <= torch.finfo(gap.dtype).eps ** 0.5 * logits.abs().max()).all()):
            wrong = f"logits that are off by up to {gap.max().item():.2g}"
    else:
        now = model._digest_of_readout()
        if run.weights is None or now is None:
            raise InputError(
                "cache",
                expected="that of a run that read its logits, which say what the readout was",
                given="one of a run that returned states alone",
                fix="Cache with return_type='logits'.",
            )
        if not torch.equal(run.weights.cpu(), now):
            wrong = "other weights of its readout than those of the run"
    if wrong:
        raise InputError(
            "logit_attribution",
            expected="a model that reads the run's logits from its last state",
            given=wrong,
            fix="Attribute a run whose coda and final norm no hook has changed, with the "
            "weights of that run.",
        )


def digest_of_readout(model: nn.Module) -> UInt8[Tensor, " byte"]:
    """SHA-256 of the weights that logits are read with, those of a coda's positions too."""
    parts = ("coda.", "ln_final.", "unembedding.", "relative_bias.")
    tensors = {k: x for k, x in model.state_dict().items() if k.startswith(parts)}
    return torch.tensor(list(bytes.fromhex(digest_tensors(tensors))), dtype=torch.uint8)


def _rounded(what: str, given: Tensor, dtype: torch.dtype) -> InputError:
    return InputError(
        what,
        expected=f"a run in the precision of the weights, {dtype}",
        given=f"{given.dtype}, as under torch.autocast",
        fix="Run without autocast: parts that are rounded do not add up.",
    )


def _reread(read: Read, model: WalksBack, loop: int) -> tuple[Read, Tensor]:
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
        if found is not None:
            return found
        found = read(name)
        if torch.finfo(found.dtype).bits < torch.finfo(model.dtype).bits:
            raise _rounded(f"activation {name!r}", found, model.dtype)
        return found

    return reread, logits[0] if alone else logits


def _classes(name: str, tokens: Any, logits: Tensor) -> Int[Tensor, "*batch pos"]:
    """The class that is meant at each place."""
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
    data = values.double().cpu().numpy()
    dims = ("component", "batch", "pos") if logits.dim() == 3 else ("component", "pos")
    return xr.DataArray(data, names, dims, name="logit_attribution")
