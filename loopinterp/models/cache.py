"""The cache of a looped run: TransformerLens' ActivationCache with a loop axis."""

from __future__ import annotations

import re
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformer_lens.ActivationCache import ActivationCache
from transformer_lens.utilities import get_act_name

from loopinterp.core.boundary import resolve_device
from loopinterp.core.errors import (
    CheckpointError,
    HookError,
    InputError,
    UnknownKeyError,
    check_integer,
    unknown_name,
)
from loopinterp.core.text import as_table, brief
from loopinterp.models.addresses import Index, resolve_index
from loopinterp.models.attribution import Attributable, attribute_logit, need_own_readout
from loopinterp.models.checkpoints import read_activations, read_index, write_activations
from loopinterp.models.hooks import LoopHooks
from loopinterp.models.protocol import check_dtype
from loopinterp.models.taps import RunReadout
from loopinterp.models.transformer_lens_calls import DIRECT_WRITES, Needs
from loopinterp.models.weights import need_plain

if TYPE_CHECKING:
    import xarray as xr
    from jaxtyping import Float
    from torch import Tensor


class MissingActivationError(HookError, UnknownKeyError):
    """An activation is not in the cache; TransformerLens expects a KeyError."""


def _without_files(config: dict[str, Any]) -> dict[str, Any]:
    published = config.get("published")
    if not isinstance(published, dict):
        return config
    of_files = ("_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version")
    return {**config, "published": {k: v for k, v in published.items() if k not in of_files}}


_SUM_IN_LOOP = Needs(
    "a residual stream that is a plain sum of sublayer outputs",
    "Use cache.decompose_loop(loop) where norm is not 'post', or accumulated_resid().",
    {"norm": ("none", "pre", "sandwich", "gated")},
)
_SUM = _SUM_IN_LOOP.also(
    injection=("none", "sublayer", "internal"),
    initial_state=("embedding",),
    loop_norm=(False,),
    state_code=(None,),
)
_UNWEIGHTED = "a final norm of weight 1 and bias 0, so that W_U alone reads its output"


def _split_gradient(name: str) -> tuple[str, str]:
    site = name.removesuffix("_grad")
    return site, name[len(site) :]


def _need_folded(model: Any, method: str) -> None:
    norm = getattr(model, "ln_final", None)
    weighted = norm is not None and not bool((norm.weight == 1).all())
    if weighted or (norm is not None and norm.bias is not None and bool(norm.bias.any())):
        fix = "Cache a run of fold_final_norm(model), or use cache.logit_attribution(tokens)."
        raise InputError(method, expected=_UNWEIGHTED, given="weights of its own", fix=fix)


def _only_if(name: str, *needs: Needs, folded: bool = False) -> Any:
    """A method of TransformerLens' cache that raises where its result would mislead.

    With ``folded``, also if the final norm has weights.
    """

    def method(self: LoopedCache, *args: Any, **options: Any) -> Any:
        for need in needs:
            need.check(self.model.config, name)
        if folded:
            _need_folded(self.model, name)
        return getattr(ActivationCache, name)(self, *args, **options)

    method.__name__ = name
    expected = [need.expected for need in needs] + [_UNWEIGHTED] * folded
    method.__doc__ = f"TransformerLens' ``{name}``; it needs {', and '.join(expected)}."
    return method


class LoopedCache(ActivationCache):
    """Activations of every loop of one run.

    Any TransformerLens name returns ``[batch, …]``; :meth:`stack` adds the loop axis. ``model`` is
    ``model.unroll(n_loops)``; ``readout`` is the end of the run.

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
        size = f"{self.nbytes / 1e6:.1f} MB"
        return f"LoopedCache({len(self)} activations of {self.n_loops} loops, {size})"

    def _repr_html_(self) -> str:
        # A row for each kind of activation, with the number of its layers.
        kinds: dict[tuple[str, str], list[Tensor]] = {}
        for name, x in self.items():
            kinds.setdefault((re.sub(r"\.\d+(?=\.)", ".*", name), brief(x)), []).append(x)
        rows = [
            (f"{kind} × {len(same)}" if len(same) > 1 else kind, same[0])
            for (kind, _), same in kinds.items()
        ]
        return as_table(repr(self), rows)

    n_loops = property(lambda self: self.model.n_loops, doc="Loops of the run.")

    @property
    def nbytes(self) -> int:
        """Bytes of all activations; those with two names count twice."""
        return sum(x.numel() * x.element_size() for x in self.cache_dict.values())

    def __getitem__(self, key: Any) -> Tensor:
        """By full name, alias (``loops.{t}.blocks.{l}.…``), or a component with its indices.

        ``cache["z", loop, layer]`` has the layer of the block, ``cache["z", n]`` that of the whole
        run, as in TransformerLens; ``cache["state_post", loop]`` fires once per loop.

        Raises:
            HookError: If there is no such activation, or it was not cached; a KeyError too.
        """
        try:
            full = key if isinstance(key, str) and key in self.cache_dict else self._full_name(key)
        except HookError as error:  # an index out of range, or no such hook
            fields = {"expected": error.expected, "given": error.given, "fix": error.fix}
            raise MissingActivationError(error.what, **fields) from error
        try:
            return super().__getitem__(full)
        except (KeyError, TypeError) as error:
            raise self._missing(key) from error

    def _full_name(self, key: Any) -> Any:
        book = self.model.addresses()
        if isinstance(key, str) and key.startswith(("loops.", "prelude.", "coda.")):
            site, gradient = _split_gradient(key)
            return book.resolve_name(site) + gradient
        if not (isinstance(key, tuple) and len(key) in (2, 3) and isinstance(key[0], str)):
            return key
        name, *indices = key
        site, gradient = _split_gradient(name)
        if not (book.has(site) and all(isinstance(index, Integral) for index in indices)):
            return key  # one of TransformerLens' other short forms, as ("scale", 0, "ln1")
        return f"{book.at_indices(site, *map(int, indices))}{gradient}"

    def stack(
        self, component: str, *, layer: Index = -1, loops: Index = None
    ) -> Float[Tensor, "loop *layer batch *site"]:
        """One component at several loops, stacked.

        Args:
            component: "resid_post", "attn.hook_pattern", "hook_state_post", …; with the suffix
                "_grad", gradients of a run with ``incl_bwd=True``.
            layer: Layer of the tied block; a slice or list adds a layer axis after the loop axis.
            loops: Loops to stack; all cached ones if None.
        """
        book = self.model.addresses()
        site, gradient = _split_gradient(component)
        site = book.component(site)
        layers, one = [None], True
        if site not in book.per_loop:
            layers, one = resolve_index(layer, book.site_map.n_layers, "layer")
        if not layers or (layers == [None] and layer not in (-1, None)):
            expected, fix = "a layer, if it fires in layers", "Leave layer out."
            raise HookError(f"layer of {site!r}", expected=expected, given=repr(layer), fix=fix)
        indices = resolve_index(loops, self.n_loops, "loop")[0]
        names = [[f"{book.site(site, loop=t, layer=k)}{gradient}" for k in layers] for t in indices]
        if loops is None:
            names = [row for row in names if row[0] in self.cache_dict]
        if not names:
            raise self._missing(component)
        # [loop * layer, batch, …], with the layer axis apart if several were named.
        stacked = torch.stack([self[name] for row in names for name in row])
        return stacked if one else stacked.unflatten(0, (len(names), len(layers)))

    def decompose_loop(
        self, loop: int
    ) -> tuple[Float[Tensor, "part batch pos d_model"], list[str]]:
        """The summands of one loop's stream before its loop norm, with labels.

        The labels are ``state``, ``injection``, ``{layer}_attn_out`` and ``{layer}_mlp_out``. A
        block with ``norm="post"`` raises an ``InputError``.
        """
        config = self.model.config
        _SUM_IN_LOOP.check(config, "decompose_loop")
        loop = resolve_index(loop, self.n_loops, "loop")[0][0]
        before = config.injection in ("input", "concat")  # else after the layers, or inside them
        state = self[f"loops.{loop}.blocks.0.hook_resid_pre"]
        # The input of the first layer is the state with the injected input already added.
        parts, labels = [state], ["state"]
        if before or config.injection == "gated_output":
            injected = self[f"loops.{loop}.hook_injection"]
            parts = [state - injected if before else state, injected]
            labels.append("injection")
        for layer in range(config.n_layers):
            for part in ("attn_out", "mlp_out"):
                parts.append(self[f"loops.{loop}.blocks.{layer}.hook_{part}"])
                labels.append(f"{layer}_{part}")
        return torch.stack(parts), labels  # [part, batch, pos, d_model]

    def logit_attribution(
        self,
        tokens: int | Tensor,
        *,
        incorrect_tokens: int | Tensor | None = None,
        loop: int | None = None,
        from_loop: int | None = None,
    ) -> xr.DataArray:
        """Direct logit attribution: what each writer adds to the logit read after a loop.

        With the scale of every norm fixed to this run's, the logit is a sum over heads, attention
        biases, MLPs, injections, norm biases, and the state before ``from_loop``. Effects through
        later heads and MLPs count as theirs.

        Args:
            tokens: Output classes: one, ``[batch]`` or ``[batch, pos]``.
            incorrect_tokens: Classes whose logits are subtracted, for a logit difference.
            loop: The loop after which the logits are read; the last if None.
            from_loop: The first loop to decompose; only ``loop`` if None. With 0,
                ``groupby("loop").sum()`` is the part of each loop.

        Returns:
            ``[component, batch, pos]`` in the order of writing. A component has the coordinates
            ``part`` ("state", "injection", "head", "attention bias", "mlp", "norm bias",
            "unembedding bias"), ``loop``, ``layer`` and ``head``; -1 where it has none.

        Raises:
            InputError: If the parts do not sum to the run's logits, as after hooks, a coarse cast
                or a change of weights. (Changed readout weights need cached logits to be noticed.)
            HookError: If a needed activation was not cached.

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
        if self.readout is None or not isinstance(model, Attributable):
            expected = "a run_with_cache of a model with attribute_loop and attribute_readout"
            fix = "Call model.run_with_cache again, or patch the parts instead."
            raise InputError("cache", expected=expected, given=type(model).__name__, fix=fix)
        need_plain(model, "logit_attribution")
        need_own_readout(self.readout, model, own_last_loop=loop is None)
        end = -1 if loop is None else loop
        ends = (end, end if from_loop is None else from_loop)
        last, first = (resolve_index(t, self.n_loops, "loop")[0][0] for t in ends)
        check_integer("from_loop", first, most=last)
        return attribute_logit(
            self.__getitem__, model, tokens, incorrect_tokens, loop=last, from_loop=first
        )

    decompose_resid = _only_if("decompose_resid", _SUM)
    get_full_resid_decomposition = _only_if("get_full_resid_decomposition", _SUM, DIRECT_WRITES)
    compute_head_results = _only_if("compute_head_results", DIRECT_WRITES)
    stack_head_results = _only_if("stack_head_results", DIRECT_WRITES)
    get_neuron_results = _only_if("get_neuron_results", DIRECT_WRITES)
    logit_attrs = _only_if(
        "logit_attrs",
        Needs(
            "parts that reach the final norm through no other norm",
            "Use cache.logit_attribution(tokens), which goes through every norm.",
            {"loop_norm": (False,), "state_code": (None,), **_SUM_IN_LOOP.settings},
        ),
        folded=True,
    )
    logit_lens = _only_if(
        "logit_lens",
        Needs(
            "a model that reads logits from a layer's output by its final norm",
            "Use model(inputs, return_type='all_logits'): the readout of every loop.",
            {"loop_norm": (False,), "state_code": (None,), "n_coda": (0,), "final_norm": (True,)},
        ),
    )

    def apply_ln_to_stack(self, residual_stack: Any, layer: Any = None, **options: Any) -> Any:
        """TransformerLens' ``apply_ln_to_stack``: parts of a stream, divided by a norm's scale."""
        needed = Needs(
            "a model with a pre-norm and a final norm",
            "Multiply with model.W_U directly, or use cache.logit_attribution(tokens).",
            {"norm": ("pre", "sandwich", "gated"), "final_norm": (True,)},
        )
        needed.check(self.model.config, "apply_ln_to_stack")
        model: Any = self.model
        if layer in (None, -1, model.cfg.n_layers):
            _need_folded(self.model, "apply_ln_to_stack")
        return super().apply_ln_to_stack(residual_stack, layer, **options)

    def apply_slice_to_batch_dim(self, batch_slice: Any) -> LoopedCache:
        sliced = super().apply_slice_to_batch_dim(batch_slice)
        parts = sliced.cache_dict, self.model, sliced.has_batch_dim
        return LoopedCache(*parts, readout=self.readout)

    def to(self, device: Any = None, dtype: torch.dtype | str | None = None) -> LoopedCache:  # type: ignore[override]
        """Move and cast in place; return the cache."""
        kind, cached = check_dtype(dtype), self.cache_dict.items()
        device = None if device is None else resolve_device(device)
        self.cache_dict = {name: x.to(device=device, dtype=kind) for name, x in cached}
        return self

    def save(self, folder: str | Path, *, max_shard_bytes: int = 512 * 1024**2) -> Path:
        """Write safetensors shards and an index."""
        folder, config = Path(folder), self.model.config.to_dict()
        header = {"n_loops": self.n_loops, "has_batch_dim": self.has_batch_dim, "config": config}
        tensors = self.cache_dict | ({} if self.readout is None else self.readout.tensors())
        write_activations(folder, tensors, header, max_shard_bytes=max_shard_bytes)
        return folder

    @classmethod
    def load(cls, folder: str | Path, model: LoopHooks) -> LoopedCache:
        """Read a cache for the model it was made with; else a ``CheckpointError``."""
        folder = Path(folder)
        index = read_index(folder)
        if _without_files(index["config"]) != _without_files(model.config.to_dict()):
            fix = "Load the cache with the model that it was made with."
            what, expected = f"cache {folder}", "the configuration of the model given"
            raise CheckpointError(what, expected=expected, given="another one", fix=fix)
        view = model.unroll(index["n_loops"])
        # Optional sites of TransformerLens' flags may be in the cache.
        sites = tuple(name.removesuffix("_grad") for name in index["names"])
        for flag, ends in view.site_map.optional.items():
            if any(site.endswith(ends) for site in sites):
                view._flags |= {flag}
        tensors = read_activations(folder, index)
        readout = RunReadout.pop_from(tensors)
        unknown = {name.removesuffix("_grad") for name in tensors} - {*view.addresses().addresses}
        if unknown:
            expected = f"activations of a run of {index['n_loops']} loops"
            what, got, fix = f"cache {folder}", sorted(unknown)[0], "Save the cache again."
            raise CheckpointError(what, expected=expected, given=got, fix=fix)
        return cls(tensors, view, index["has_batch_dim"], readout=readout)

    def _missing(self, key: Any) -> InputError:
        book, parts = self.model.addresses(), key if isinstance(key, tuple) else (key,)
        name = str(next(iter(parts), ""))
        site = _split_gradient(name)[0]
        try:
            full = _split_gradient(str(self._full_name(key)))[0]
            if full not in book.addresses:
                full = _split_gradient(get_act_name(*parts))[0]
        except TypeError:  # no short form of TransformerLens' either
            full = None
        if full in book.addresses or (book.has(site) and full is not None):
            what, got = f"activation {key!r}", f"a cache of {len(self)} others"
            fix = "Run again with a names_filter that keeps it."
            return MissingActivationError(what, expected="a cached one", given=got, fix=fix)
        known = [*book.addresses] if "." in site else [*map(book.short, book.components)]
        return unknown_name("activation", name, known, MissingActivationError)
