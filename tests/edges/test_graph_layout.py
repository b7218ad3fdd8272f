"""What writes to the stream, read off site maps."""

from __future__ import annotations

import pytest

from loopinterp.adapters.published_model import layer_sites
from loopinterp.edges.unrolled_graph import HEADS, MLP, GraphLayout, UnrolledGraph, layout_of
from loopinterp.models import LoopedTransformer, LoopedTransformerConfig
from loopinterp.models.addresses import SiteMap, Sites, norm_sites
from tests.adapters.kinds import adapted
from tests.refusals import naming


def site_map(*layers: Sites, **sites: Sites) -> SiteMap:
    sizes = {"d_model": 8, "n_heads": 2, "d_head": 4, "d_mlp": 16}
    return SiteMap(block=layers, **sizes, **sites)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("before", "after", "of_sum", "norms"),
    [
        (True, False, False, ()),  # pre-norm
        (True, True, False, ()),  # sandwich: of what is written
        (True, True, True, ("ln1_post", "ln2_post")),  # of the stream
        (False, True, True, ("ln1_post", "ln2_post")),  # post-norm
    ],
)
def test_norms_after_an_addition_are_of_the_stream(
    before: bool, after: bool, of_sum: bool, norms: tuple[str, ...]
) -> None:
    layer = layer_sites(before=before, after=after, of_sum=of_sum)
    closing = norm_sites("ln_loop")
    (parts,) = layout_of(site_map(layer, closing=closing), "nodes").block
    between = (HEADS, norms[0], MLP, norms[1]) if norms else (HEADS, MLP)
    assert parts == (*between, "ln_loop")
    assert layout_of(site_map(layer, closing=closing)).block == ((HEADS, MLP),)


def test_a_norm_after_a_stack_is_of_the_stream() -> None:
    block = layout_of(adapted("hrm_text").site_map, "nodes").block
    names = [part for parts in block for part in parts if part not in (HEADS, MLP)]
    assert names == ["ln_cycle"] * (len(block) // 2)
    assert "gate" in layout_of(adapted("hrm_text").site_map).slots


def test_of_a_looped_transformer_site_map_and_configuration_agree() -> None:
    config = LoopedTransformerConfig(
        d_model=8, n_heads=2, d_vocab=5, d_vocab_out=2, n_layers=2, n_prelude=1, n_coda=1
    )
    graphs = [UnrolledGraph(x, 3) for x in (config, LoopedTransformer(config).site_map)]
    assert graphs[0].edge_names == graphs[1].edge_names
    assert graphs[0].tied_edges == graphs[1].tied_edges


@pytest.mark.parametrize("without", ["attn.hook_z", "hook_mlp_out"])
def test_a_layer_without_heads_or_mlp_is_refused(without: str) -> None:
    layer = layer_sites(before=True, after=False)
    partial = {name: kind for name, kind in layer.items() if name != without}
    with naming("model"):
        layout_of(site_map(layer, partial))
    with naming("model"):
        UnrolledGraph(site_map(), 2)


def test_neurons_of_a_layout_without_them_are_refused() -> None:
    layout = GraphLayout(d_model=8, n_heads=1, block=((HEADS, MLP),))
    with naming("neurons"):
        UnrolledGraph(layout, 2, neurons={"block.0.some": [0]})
