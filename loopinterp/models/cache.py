"""The cache of a looped run: TransformerLens' ActivationCache, with the loop axis."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformer_lens.ActivationCache import ActivationCache

from loopinterp.core.errors import CheckpointError, HookError, InputError
from loopinterp.core.text import as_table
from loopinterp.models.addresses import AddressBook, Index, resolve_index
from loopinterp.models.attribution import Attributable, attribute_logit, need_own_readout
from loopinterp.models.checkpoints import read_activations, read_index, write_activations
from loopinterp.models.hooks import LoopHooks
from loopinterp.models.run_inputs import check_dtype
from loopinterp.models.taps import RunReadout
from loopinterp.models.transformer_lens_calls import DIRECT_WRITES, Needs
from loopinterp.models.weights import need_plain

if TYPE_CHECKING:
    import xarray as xr
    from jaxtyping import Float
    from torch import Tensor


class MissingActivationError(HookError, KeyError):
    """An activation is not in the cache; a KeyError too, as TransformerLens' own code expects."""

    def __str__(self) -> str:
        return str(self.args[0])


_HOW_IT_WAS_SAVED = frozenset(
    ("_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version")
)
"""What a published configuration says of the files that it was read from, and not of the model."""


def _what_it_is(config: dict[str, Any]) -> dict[str, Any]:
    """A configuration, wherever its model was read from."""
    published = config.get("published")
    if not isinstance(published, dict):
        return config
    about_model = {
        name: value for name, value in published.items() if name not in _HOW_IT_WAS_SAVED
    }
    return {**config, "published": about_model}


_NO_NORM_ON_STREAM = ("none", "pre", "sandwich", "gated")

_SUM = Needs(
    "a residual stream that is a plain sum of sublayer outputs",
    "Use cache.decompose_loop(loop) where norm is not 'post', or accumulated_resid().",
    {
        "injection": ("none", "sublayer", "internal"),
        "initial_state": ("embedding",),
        "loop_norm": (False,),
        "state_code": (None,),
        "norm": _NO_NORM_ON_STREAM,
    },
)

_SUM_IN_LOOP = replace(_SUM, settings={"norm": _NO_NORM_ON_STREAM})

_LAYER_READOUT = Needs(
    "a model that reads logits from a layer's output by its final norm",
    "Use model(inputs, return_type='all_logits'): the readout of every loop.",
    {"loop_norm": (False,), "state_code": (None,), "n_coda": (0,), "final_norm": (True,)},
)

_ONE_NORM = Needs(
    "parts that reach the final norm through no other norm",
    "Use cache.logit_attribution(tokens), which goes through every norm.",
    {"loop_norm": (False,), "state_code": (None,), "norm": _NO_NORM_ON_STREAM},
)

_NO_WEIGHTS = (
    "a final norm whose weight is 1 and whose bias is 0, so that W_U alone reads its output",
    "Cache a run of loopinterp.models.fold_final_norm(model), which computes the same, or use "
    "cache.logit_attribution(tokens), which goes through the norm.",
)

_NORMS = Needs(
    "a model with a pre-norm and a final norm",
    "Multiply with model.W_U directly, or use cache.logit_attribution(tokens).",
    {"norm": ("pre", "sandwich", "gated"), "final_norm": (True,)},
)

_GRADIENT = "_grad"


def _split_gradient(name: str) -> tuple[str, str]:
    """The name of a site, and what makes it the name of a gradient there: nothing, or "_grad"."""
    if isinstance(name, str) and name.endswith(_GRADIENT):
        return name.removesuffix(_GRADIENT), _GRADIENT
    return name, ""


def _need_folded(model: Any, method: str) -> None:
    """Raise unless the final norm of a model of ours leaves the stream as it has normed it."""
    norm = getattr(model, "ln_final", None)
    if norm is None:
        return
    bias = norm.bias
    if not bool((norm.weight == 1).all()) or (bias is not None and bool(bias.any())):
        expected, fix = _NO_WEIGHTS
        raise InputError(method, expected=expected, given="weights of its own", fix=fix)


def _only_if(name: str, *needs: Needs, folded: bool = False) -> Any:
    """A method of TransformerLens' cache that raises where its result would mislead.

    With ``folded``, also where it reads the final norm, which has weights.
    """

    def method(self: LoopedCache, *args: Any, **options: Any) -> Any:
        for need in needs:
            need.check(self.model.config, name)
        if folded:
            _need_folded(self.model, name)
        return getattr(ActivationCache, name)(self, *args, **options)

    method.__name__ = name
    expected = [need.expected for need in needs] + [_NO_WEIGHTS[0]] * folded
    reasons = "".join(f"\n    InputError: Without {each}." for each in expected)
    method.__doc__ = f"TransformerLens' ``{name}``.\n\nRaises:{reasons}"
    return method


class LoopedCache(ActivationCache):
    """Activations of every loop of one run.

    Any name of TransformerLens gives ``[batch, …]``; :meth:`stack` gives the loop axis. Axis
    order is always loop, layer, batch, head, pos, feature.

    Args:
        cache_dict: Activations by full hook name.
        model: The model unrolled over the loops of the run (``model.unroll(n_loops)``).
        has_batch_dim: Whether the batch axis is there.
        readout: How the run ended; :meth:`logit_attribution` asks for it.

    Example:
        >>> import torch
        >>> from loopinterp.models import LoopedTransformer, LoopedTransformerConfig
        >>> config = LoopedTransformerConfig(d_model=8, n_heads=2, d_vocab=5, d_vocab_out=2)
        >>> _, cache = LoopedTransformer(config).run_with_cache(torch.tensor([[0, 1]]), n_loops=3)
        >>> cache.stack("resid_post").shape
        torch.Size([3, 1, 2, 8])
        >>> bool((cache["loops.2.blocks.0.hook_resid_post"] == cache["resid_post", 2]).all())
        True
    """

    model: LoopHooks

    def __init__(
        self,
        cache_dict: dict[str, Tensor],
        model: LoopHooks,
        has_batch_dim: bool = True,
        *,
        readout: RunReadout | None = None,
    ) -> None:
        super().__init__(cache_dict, model, has_batch_dim)
        self.readout = readout

    def __repr__(self) -> str:
        return (
            f"LoopedCache({len(self)} activations of {self.n_loops} loops, "
            f"{self.nbytes / 1e6:.1f} MB)"
        )

    def _repr_html_(self) -> str:
        return as_table(repr(self), self.items())

    @property
    def n_loops(self) -> int:
        """Loops of the run."""
        return self.model.n_loops

    @property
    def nbytes(self) -> int:
        """Bytes of all activations; one that has two names counts twice."""
        return sum(x.numel() * x.element_size() for x in self.cache_dict.values())

    @property
    def _book(self) -> AddressBook:
        return self.model.addresses()

    def __getitem__(self, key: Any) -> Tensor:
        """By full name, alias (``loops.{t}.blocks.{l}.…``), or TransformerLens' short form."""
        alias = isinstance(key, str) and key.startswith(("loops.", "prelude.", "coda."))
        if alias and key not in self.cache_dict:
            site, gradient = _split_gradient(key)
            key = self._book.resolve(site) + gradient
        try:
            return super().__getitem__(key)
        except KeyError as error:
            raise self._missing(str(key)) from error

    def stack(
        self, component: str, *, layer: Index = -1, loops: Index = None
    ) -> Float[Tensor, "loop *layer batch *site"]:
        """One component at several loops, stacked.

        Args:
            component: "resid_post", "attn.hook_pattern", "hook_state_post", …; with "_grad" at its
                end the gradients there, which a run with ``incl_bwd=True`` keeps.
            layer: Layer of the tied block; a slice or list adds a layer axis after the loop
                axis. Without meaning for what happens once per loop.
            loops: Loops to stack; all that are in the cache if None.

        Raises:
            HookError: If the component is unknown, an index is out of range, or the activation
                was not cached.
        """
        book = self._book
        component, gradient = _split_gradient(component)
        component = book.component(component)
        per_loop = component in book.per_loop
        layers, one = (
            ([0], True) if per_loop else resolve_index(layer, book.site_map.n_layers, "layer")
        )
        if not layers or (per_loop and layer not in (-1, None)):
            raise HookError(
                f"layer of {component!r}",
                expected="no layer: it happens once per loop" if per_loop else "at least one layer",
                given=repr(layer),
                fix="Leave layer out.",
            )
        indices = resolve_index(loops, self.n_loops, "loop")[0]
        per_loop_names = [
            book.site(component, loop=t, layer=None if per_loop else layers) for t in indices
        ]
        rows = [[row] if isinstance(row, str) else row for row in per_loop_names]
        names = [[name + gradient for name in row] for row in rows]
        if loops is None:
            names = [row for row in names if row[0] in self.cache_dict]
        if not names:
            raise self._missing(component + gradient)
        # [loop * layer, batch, …], with the layer axis apart if several were named.
        stacked = torch.stack([self[name] for row in names for name in row])
        return stacked if one else stacked.unflatten(0, (len(names), len(layers)))

    def decompose_loop(
        self, loop: int
    ) -> tuple[Float[Tensor, "part batch pos d_model"], list[str]]:
        """What one loop adds up: state, injected input, and each sublayer's output.

        The parts sum to what the loop leaves before its loop norm. The labels are ``state``,
        ``injection``, ``{layer}_attn_out`` and ``{layer}_mlp_out``.

        Raises:
            InputError: If the block norms the residual stream itself (``norm="post"``).
        """
        config = self.model.config
        _SUM_IN_LOOP.check(config, "decompose_loop")
        loop = resolve_index(loop, self.n_loops, "loop")[0][0]
        before = config.injection in ("input", "concat")
        state = self[f"loops.{loop}.blocks.0.hook_resid_pre"]
        # What enters the first layer is the state with the injected input already added.
        parts, labels = [state], ["state"]
        if before or config.injection == "gated_output":
            injected = self[f"loops.{loop}.hook_injection"]
            parts = [state - injected if before else state, injected]
            labels.append("injection")
        for layer in range(config.n_layers):
            for part in ("attn_out", "mlp_out"):
                parts.append(self[f"loops.{loop}.blocks.{layer}.hook_{part}"])
                labels.append(f"{layer}_{part}")
        return torch.stack(parts), labels

    def logit_attribution(
        self,
        tokens: int | Tensor,
        *,
        incorrect_tokens: int | Tensor | None = None,
        loop: int | None = None,
        from_loop: int | None = None,
    ) -> xr.DataArray:
        """What each writer adds to the logit read after a loop: direct logit attribution.

        Every norm on the way (of a sublayer's output, of the loop, of the readout) is held at its
        scale in this run. What reaches the logit through the stream is then a plain sum, and the
        parts are its terms: each head, attention bias, MLP (its bias included), injection, norm
        bias, and the state before the first of the loops taken apart. They sum to the logit; what
        a part does by way of later heads and MLPs is in theirs.

        Args:
            tokens: Output classes whose logits to attribute: one, ``[batch]`` or ``[batch, pos]``.
            incorrect_tokens: Others, whose logits are taken off: a logit difference.
            loop: The loop after which the logits are read; the last if None, which a run with a
                number of loops for each example has not.
            from_loop: The first loop that is taken apart, up to ``loop``; ``loop`` alone if None.
                With 0 the whole run is, and ``groupby("loop").sum()`` says which loop wrote it.

        Returns:
            ``[component, batch, pos]`` in the order of writing. Beside its name a component has
            the coordinates ``part`` ("state", "injection", "head", "attention bias", "mlp",
            "norm bias", "unembedding bias"), ``loop``, ``layer`` and ``head``; -1 where it has
            none. Coda layers are in no loop.

        Raises:
            InputError: If a class or from_loop is out of range; if the cache was cast, moved, or
                lacks positions that a coda looks at; if hooks changed the stream between writers
                or the readout, or the weights have changed since.
            HookError: If the loop is out of range, or an activation needed was not cached.

        Example:
            >>> import torch
            >>> from loopinterp.models import LoopedTransformer, LoopedTransformerConfig
            >>> config = LoopedTransformerConfig(d_model=8, n_heads=2, d_vocab=5, d_vocab_out=2)
            >>> model, x = LoopedTransformer(config), torch.tensor([[0, 1, 2]])
            >>> logits, cache = model.run_with_cache(x, n_loops=3)
            >>> parts = cache.logit_attribution(1, incorrect_tokens=0, from_loop=0)
            >>> parts.component[:3].values.tolist()
            ['state before loop 0', 'loop 0, layer 0, head 0', 'loop 0, layer 0, head 1']
            >>> difference = (logits[..., 1] - logits[..., 0]).detach().numpy()
            >>> bool(abs(parts.sum("component") - difference).max() < 1e-5)
            True
        """
        model = self.model
        if not isinstance(model, Attributable):
            raise InputError(
                "logit_attribution",
                expected="a model that says how a logit's direction comes back through it",
                given=f"the cache of {type(model).__name__}, which does not",
                fix="Write attribute_loop and attribute_readout beside run_loop and run_readout, "
                "or patch and ablate the parts instead.",
            )
        if self.readout is None:
            raise InputError(
                "cache",
                expected="the cache of a run, which says what its logits were read from",
                given="one that does not, made by hand or saved by an earlier version",
                fix="Call model.run_with_cache again.",
            )
        need_plain(model, "logit_attribution")  # type: ignore[arg-type]
        need_own_readout(self.readout, model, own_last_loop=loop is None)
        end = -1 if loop is None else loop
        ends = (end, end if from_loop is None else from_loop)
        last, first = (resolve_index(t, self.n_loops, "loop")[0][0] for t in ends)
        return attribute_logit(
            self.__getitem__,
            model,
            tokens,
            incorrect_tokens,
            loop=last,
            from_loop=first,
        )

    decompose_resid = _only_if("decompose_resid", _SUM)
    get_full_resid_decomposition = _only_if("get_full_resid_decomposition", _SUM, DIRECT_WRITES)
    compute_head_results = _only_if("compute_head_results", DIRECT_WRITES)
    stack_head_results = _only_if("stack_head_results", DIRECT_WRITES)
    get_neuron_results = _only_if("get_neuron_results", DIRECT_WRITES)
    logit_attrs = _only_if("logit_attrs", _ONE_NORM, folded=True)
    logit_lens = _only_if("logit_lens", _LAYER_READOUT)

    def apply_ln_to_stack(self, residual_stack: Any, layer: Any = None, **options: Any) -> Any:
        """TransformerLens' ``apply_ln_to_stack``: parts of a stream over the scale of a norm.

        Raises:
            InputError: Without a pre-norm and a final norm; or at the final norm, if it has
                weights: what multiplies the result with ``W_U`` would leave them out.
        """
        _NORMS.check(self.model.config, "apply_ln_to_stack")
        model: Any = self.model
        if layer in (None, -1, model.cfg.n_layers):
            _need_folded(self.model, "apply_ln_to_stack")
        return super().apply_ln_to_stack(residual_stack, layer, **options)

    def apply_slice_to_batch_dim(self, batch_slice: Any) -> LoopedCache:
        """Some examples of the batch."""
        sliced = super().apply_slice_to_batch_dim(batch_slice)
        parts = sliced.cache_dict, self.model, sliced.has_batch_dim
        return LoopedCache(*parts, readout=self.readout)

    def to(self, device: Any = None, dtype: torch.dtype | str | None = None) -> LoopedCache:  # type: ignore[override]
        """Move and cast in place, and return the cache."""
        kind = check_dtype(dtype)
        self.cache_dict = {
            name: x.to(device=device, dtype=kind) for name, x in self.cache_dict.items()
        }
        return self

    def save(self, folder: str | Path, *, max_shard_bytes: int = 512 * 1024**2) -> Path:
        """Write safetensors shards and an index; an activation with two names is written once.

        Raises:
            InputError: If the folder cannot be written.
        """
        header = {
            "n_loops": self.n_loops,
            "has_batch_dim": self.has_batch_dim,
            "config": self.model.config.to_dict(),
        }
        folder = Path(folder)
        end = self.readout.tensors() if self.readout is not None else {}
        tensors = self.cache_dict | end
        write_activations(folder, tensors, header, max_shard_bytes=max_shard_bytes)
        return folder

    @classmethod
    def load(cls, folder: str | Path, model: LoopHooks) -> LoopedCache:
        """Read a cache back, for the model it was made with.

        Raises:
            CheckpointError: If a file is missing or damaged, or the model is another one.
        """
        folder = Path(folder)
        index = read_index(folder)
        if _what_it_is(index["config"]) != _what_it_is(model.config.to_dict()):
            raise CheckpointError(
                f"cache {folder}",
                expected="the configuration of the model given",
                given="another one",
                fix="Load the cache with the model that it was made with.",
            )
        view = model.unroll(index["n_loops"])
        view.flag_for(index["names"])
        known = {*view.addresses().addresses, *RunReadout.names()}
        tensors = read_activations(folder, index, known=known)
        readout = RunReadout.take(tensors)
        return cls(tensors, view, index["has_batch_dim"], readout=readout)

    def _missing(self, name: str) -> MissingActivationError:
        return MissingActivationError(
            f"activation {name!r}",
            expected="one that the run cached",
            given=f"a cache of {len(self)} others",
            fix="Run again with a names_filter that keeps it.",
        )
