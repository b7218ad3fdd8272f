"""What writes to the residual stream of a model, in which order: read off its site map.

A layer whose stream can be read as nodes and edges has heads (``attn.hook_z``) and an MLP
(``hook_mlp_out``), and passes ``hook_attn_in`` and ``hook_mlp_in`` where they read. A norm between
the two is

- of the reader, if it comes before (``ln1``, ``ln2``);
- of the writer, if it comes before its addition (``ln1_post`` before ``hook_attn_out``);
- of the stream, if it comes after an addition, or between layers and loops.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from loopinterp.core.errors import InputError
from loopinterp.models.addresses import Sections, SiteMap, Sites

if TYPE_CHECKING:
    from loopinterp.models.config import LoopedTransformerConfig

HEADS, MLP = "heads", "mlp"
"""Parts of a layer that write to the stream; other parts are names of norms."""

SLOTS = ("q", "k", "v", "gate")
"""What a head reads the stream for; a gate, where it has one."""

StreamNorms = Literal["edges", "nodes"]
"""Whether edges lead through norms of the stream, or end at them."""

_NORMED = ".hook_normalized"


@dataclass(frozen=True, kw_only=True)
class GraphLayout(Sections):
    """The parts of each layer in the order of writing, and the sizes of a graph.

    ``n_neurons`` is None where MLPs cannot be taken apart.
    """

    d_model: int
    n_heads: int
    prelude: tuple[tuple[str, ...], ...] = ()
    block: tuple[tuple[str, ...], ...]
    coda: tuple[tuple[str, ...], ...] = ()
    slots: tuple[str, ...] = SLOTS[:3]
    n_neurons: int | None = None
    n_ctx: int | None = None


def layout_of(
    model: LoopedTransformerConfig | SiteMap, stream_norms: StreamNorms = "edges"
) -> GraphLayout:
    """The layout of a configuration or a site map.

    Raises:
        InputError: If a layer has no separate heads and MLP.
    """
    if not isinstance(model, SiteMap):
        return GraphLayout(
            d_model=model.d_model,
            n_heads=model.n_heads,
            prelude=((HEADS, MLP),) * model.n_prelude,
            block=((HEADS, MLP),) * model.n_layers,
            coda=((HEADS, MLP),) * model.n_coda,
            n_neurons=model.mlp_width,
            n_ctx=model.n_ctx,
        )
    sections = {"prelude": model.prelude, "block": model.block, "coda": model.coda}
    for section, layers in sections.items():
        for k, sites in enumerate(layers):
            _need_parts(f"{section}.{k}", sites)
    if not model.block:
        raise _unplaced("a loop without layers")
    prelude, block, coda = (
        [[*_written(sites)] if stream_norms == "nodes" else [HEADS, MLP] for sites in layers]
        for layers in sections.values()
    )
    if stream_norms == "nodes":
        block[0][:0] = norms_in(model.opening)
        block[-1] += norms_in(model.closing)
        if coda:  # else they belong to the readout
            coda[0][:0] = norms_in(model.entry)
    return GraphLayout(
        d_model=model.d_model,
        n_heads=model.n_heads,
        slots=SLOTS if "attn.hook_gate" in model.block[0] else SLOTS[:3],
        prelude=tuple(map(tuple, prelude)),
        block=tuple(map(tuple, block)),
        coda=tuple(map(tuple, coda)),
    )


def norms_in(sites: Iterable[str]) -> list[str]:
    return [name.removesuffix(_NORMED) for name in sites if name.endswith(_NORMED)]


def _written(sites: Sites) -> Iterator[str]:
    """Heads, MLP, and the norms that follow an addition, in their order."""
    added = False
    for name in sites:
        if name == "attn.hook_z":
            yield HEADS
        elif name == "hook_mlp_out":
            yield MLP
        if name.endswith(_NORMED) and added:
            yield name.removesuffix(_NORMED)
        # The stream has been added to until the next reading of it.
        added = name in ("hook_attn_out", "hook_mlp_out", "hook_resid_post") or (
            added and name.endswith(".hook_scale")
        )


def _need_parts(place: str, sites: Sites) -> None:
    for part, name in (("heads", "attn.hook_z"), ("an MLP", "hook_mlp_out")):
        if name not in sites:
            raise _unplaced(f"{place} without {part} (no {name!r})")
    if sites.get("attn.hook_gate", "head") != "head":
        raise _unplaced(f"{place} with a gate that is not of each head")


def _unplaced(got: str) -> InputError:
    expected = "one whose layers write to the stream by separate heads and MLPs"
    fix = "Patch whole activations (patching_sweep), or write an adapter with these hooks."
    return InputError("model", expected=expected, given=got, fix=fix)
