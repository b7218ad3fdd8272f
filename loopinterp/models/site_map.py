"""Where a looped model has hooks, and how large what is there is: all that addresses ask of it.

A configuration of ours gives one (:mod:`loopinterp.models.component_sites`), and so does each
adapter for a published model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

Sites = Mapping[str, str]
"""Components, in the order they fire, with the kind of tensor each holds."""

Axes = tuple[int | str, ...]
"""Axes of an activation after the batch: sizes, and "pos" and "key" for its positions."""


@dataclass(frozen=True, kw_only=True, eq=False)
class SiteMap:
    """The sites of a run, and the axes of what each kind of them holds.

    Attributes:
        d_model: Width of the residual stream.
        n_heads: Heads of queries, of each layer.
        d_head: Width of each.
        d_mlp: Neurons of each MLP.
        n_kv_heads: Heads of keys and values; ``n_heads`` if None.
        d_state: Width of the state between loops, where it has several parts; ``d_model`` if None.
        embedding: What happens once per run, before the first layer.
        prelude: The sites of each layer before the loop.
        opening: What happens once per loop, before its layers.
        block: The sites of each layer of the loop.
        closing: What happens once per loop, after its layers.
        entry: What happens once per readout, before the coda.
        coda: The sites of each layer after the loop.
        final: What happens once per readout, after the coda.
        optional: Sites that are there only while a flag is on, by flag.
        layer_names: Other names of the layers of the block, as parts of a loop that has loops of
            its own: ``inner.0.blocks.1``.
        state_parts: Features of the state that are a part of their own, by name.
        more_axes: Axes of kinds that no other model has.
    """

    d_model: int
    n_heads: int
    d_head: int
    d_mlp: int
    n_kv_heads: int | None = None
    d_state: int | None = None
    embedding: Sites = field(default_factory=dict)
    prelude: tuple[Sites, ...] = ()
    opening: Sites = field(default_factory=dict)
    block: tuple[Sites, ...] = ()
    closing: Sites = field(default_factory=dict)
    entry: Sites = field(default_factory=dict)
    coda: tuple[Sites, ...] = ()
    final: Sites = field(default_factory=dict)
    optional: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    layer_names: tuple[str, ...] = ()
    state_parts: Mapping[str, slice] = field(default_factory=dict)
    more_axes: Mapping[str, Axes] = field(default_factory=dict)

    @property
    def n_prelude(self) -> int:
        """Layers before the loop."""
        return len(self.prelude)

    @property
    def n_layers(self) -> int:
        """Layers of the loop."""
        return len(self.block)

    @property
    def n_coda(self) -> int:
        """Layers after the loop."""
        return len(self.coda)

    def layers_total(self, n_loops: int) -> int:
        """Layers of a run, as TransformerLens counts them."""
        return self.n_prelude + n_loops * self.n_layers + self.n_coda

    @property
    def state_width(self) -> int:
        """Width of the state between loops."""
        return self.d_model if self.d_state is None else self.d_state

    def axes(self, kind: str) -> Axes:
        """The axes of a kind of activation, after the batch.

        Example:
            >>> sizes = SiteMap(d_model=8, n_heads=2, d_head=4, d_mlp=32)
            >>> sizes.axes("residual"), sizes.axes("pattern")
            (('pos', 8), (2, 'pos', 'key'))
        """
        known: dict[str, Axes] = {
            "residual": ("pos", self.d_model),
            "state": ("pos", self.state_width),
            "scale": ("pos", 1),
            "gate": ("pos", 1),
            "neuron": ("pos", self.d_mlp),
            "head": ("pos", self.n_heads, self.d_head),
            "kv_head": ("pos", self.n_kv_heads or self.n_heads, self.d_head),
            "fork": ("pos", self.n_heads, self.d_model),
            "pattern": (self.n_heads, "pos", "key"),
            **self.more_axes,
        }
        return known[kind]

    def heads(self, kind: str) -> int | None:
        """Heads of a kind of activation; None where it is none of heads."""
        n_heads = {"head": self.n_heads, "fork": self.n_heads, "pattern": self.n_heads}
        return (n_heads | {"kv_head": self.n_kv_heads or self.n_heads}).get(kind)


def norm_sites(name: str, *, present: bool = True) -> dict[str, str]:
    """What hooks see of a norm: its scale, and the normed vector before weight and bias."""
    return {f"{name}.hook_scale": "scale", f"{name}.hook_normalized": "residual"} if present else {}
