"""Path patching against runs by hand in which everything else is frozen."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from loopinterp.core.errors import InputError
from loopinterp.edges import path_patching
from loopinterp.edges.edge_runs import EdgeRuns
from loopinterp.edges.unrolled_graph import UnrolledGraph
from loopinterp.models import LoopedTransformer, LoopedTransformerConfig
from tests.edges.by_hand import run_by_hand
from tests.models.variants import VARIANTS, build, some_inputs
from tests.refusals import naming

LOOPS = 3
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "pre": {},
    "no norm, recall": {"norm": "none", "injection": "concat", "final_norm": False},
    "post, loop norm, input": {"norm": "post", "loop_norm": True, "injection": "input"},
    "sandwich, sublayer": {"norm": "sandwich", "injection": "sublayer", "n_heads": 1},
    "rms, gated output, zeros": {
        "norm_type": "rmsnorm", "injection": "gated_output", "loop_norm": True,
        "initial_state": "zeros", "injection_gate": 0.7,
    },
    "post, internal": {"norm": "post", "injection": "internal", "initial_state": "zeros"},
    "window, one layer": {
        "attention_window": 1, "n_layers": 1, "loop_norm": True, "injection": "input",
        "initial_state": "zeros",
    },
    "surround": {"n_prelude": 1, "n_coda": 1, "n_layers": 1, "injection": "concat"},
}  # fmt: skip


def model_with(**changes: Any) -> LoopedTransformer:
    small = {"d_model": 8, "n_heads": 2, "d_vocab": 5, "d_vocab_out": 3, "n_layers": 2, "d_mlp": 6}
    config = LoopedTransformerConfig(
        **{**small, "init_std": 0.4, "positions": "absolute", "n_ctx": 4, **changes}
    )
    model = LoopedTransformer(config).double()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():  # biases and norms that do something
        for weight in model.parameters():
            weight += 0.2 * torch.randn(weight.shape, generator=generator, dtype=weight.dtype)
    return model


def tokens() -> torch.Tensor:
    return torch.randint(5, (2, 6, 4), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("of_graph", "hooks"),
    [
        (["input"], ["hook_embed"]),
        (["0:block.1.mlp"], ["loops.0.blocks.1.hook_mlp_out"]),
        (["1:block.0.mlp"], ["blocks.3.mlp.hook_post"]),
        (["0:block.1.head.0", "0:block.1.head.1"], ["loops.0.blocks.1.attn.hook_z"]),
        (["prelude.0.head.0", "prelude.0.head.1"], ["prelude.0.hook_attn_out"]),
        (["block.0.mlp", "block.1.mlp", "prelude.0.mlp", "coda.0.mlp"], ["hook_mlp_out"]),
    ],
)
def test_senders_go_by_the_names_of_hooks_too(of_graph: list[str], hooks: list[str]) -> None:
    graph = UnrolledGraph(model_with(n_prelude=1, n_coda=1).config, LOOPS)
    assert graph.senders_named(hooks) == graph.senders_named(of_graph)


def test_receivers_go_by_the_names_of_hooks_too() -> None:
    graph = UnrolledGraph(model_with().config, LOOPS, split=True)
    queries = ["2:block.1.head.0.q", "2:block.1.head.1.q"]
    assert graph.receivers_named("loops.2.blocks.1.attn.hook_q") == graph.receivers_named(queries)
    heads = ["2:block.1.head.0", "2:block.1.head.1"]
    assert graph.receivers_named("blocks.5.hook_attn_in") == graph.receivers_named(heads)
    assert graph.receivers_named("hook_mlp_in") == graph.receivers_named(
        ["block.0.mlp", "block.1.mlp"]
    )


def test_a_path_between_hooks_is_that_between_their_components() -> None:
    model, (base, source) = model_with(), tokens()
    by_hook: dict[str, Any] = {
        "senders": "loops.0.blocks.0.attn.hook_z", "receivers": "loops.1.blocks.1.hook_mlp_in",
    }  # fmt: skip
    by_name: dict[str, Any] = {
        "senders": ["0:block.0.head.0", "0:block.0.head.1"], "receivers": "1:block.1.mlp",
    }  # fmt: skip
    runs = [path_patching(model, base, source, n_loops=LOOPS, **x) for x in (by_hook, by_name)]
    assert torch.equal(*runs)


def test_an_unknown_hook_gets_the_nearest_name() -> None:
    model, (base, source) = model_with(), tokens()
    ends: dict[str, Any] = {"senders": "loops.0.blocks.0.attn.hook_y", "receivers": "readout"}
    with naming("senders") as caught:
        path_patching(model, base, source, n_loops=LOOPS, **ends)
    assert "loops.0.blocks.0.attn.hook_" in caught.value.fix


def some_paths(model: LoopedTransformer) -> list[tuple[str, str, tuple[str, ...]]]:
    """Within a loop, to the next one, over several, from the input, to the readout."""
    last = model.config.n_layers - 1
    paths = [
        ("0:block.0.head.0", "0:block.0.mlp", ()),
        ("0:block.0.mlp", "1:block.0.head.0.q", ()),
        (f"0:block.{last}.mlp", "2:block.0.head.0.k", ()),
        ("1:block.0.head.0", f"2:block.{last}.mlp", ()),
        ("input", "1:block.0.head.0.v", ()),
        ("input", "2:block.0.mlp", ()),
        ("0:block.0.mlp", "readout", ()),
        ("0:block.0.mlp", "readout", ("1:block.0.head.0", f"1:block.{last}.mlp")),
        ("input", "2:block.0.head.0.k", ("0:block.0.mlp",)),
    ]
    if model.config.n_coda:
        paths += [("input", "prelude.0.mlp", ()), ("prelude.0.head.1", "0:block.0.mlp", ())]
        paths += [("1:block.0.mlp", "coda.0.head.1.v", ()), ("coda.0.head.0", "readout", ())]
    return paths


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_path_patching_is_that_of_a_run_by_hand(name: str) -> None:
    model = model_with(**ARCHITECTURES[name])
    base, source = tokens()
    plain, updates = run_by_hand(model, base, LOOPS)
    _, donated = run_by_hand(model, source, LOOPS)
    torch.testing.assert_close(plain, model(base, n_loops=LOOPS), atol=1e-9, rtol=0)
    moved = 0
    for sender, receiver, through in some_paths(model):
        into = [receiver, *through, *(f"{m}.{slot}" for m in through for slot in "qkv")]

        def sees(a, b, output, sender=sender, into=into, through=through):
            if a == sender:
                return donated[a] if b in into else output
            return updates[a] if a in through and b not in into else output

        expected, _ = run_by_hand(model, base, LOOPS, sees)
        got = path_patching(
            model, base, source, senders=sender, receivers=receiver, through=through, n_loops=LOOPS
        )
        torch.testing.assert_close(got, expected, atol=1e-6, rtol=0)
        moved += bool((got - plain).abs().max() > 1e-4)
    # From zeros, the first loop that reads the input is the one before which it is injected.
    assert moved >= (4 if "zeros" in name else len(some_paths(model)) - 1)


@pytest.mark.parametrize("name", sorted(set(VARIANTS) - {"gated"}))
def test_a_run_without_weights_is_the_model_s_own_and_one_with_all_of_them_the_donor_s(name):
    model = build(name).double()
    base, source = some_inputs(model, seed=0), some_inputs(model, seed=1)
    base, source = (x.double() if x.is_floating_point() else x for x in (base, source))
    if "abacus" in name:  # the same digits are at the same places
        source = torch.where(torch.isin(base, torch.tensor([1, 2, 3])), 4 - base, base)
    graph = UnrolledGraph(model.config, LOOPS, split=True)
    runs, donors = EdgeRuns(model, graph, base), EdgeRuns(model, graph, source)
    logits, _ = runs()
    torch.testing.assert_close(logits, model(base, n_loops=LOOPS))
    drawn_edges, values = donors()
    ones = torch.ones(graph.edges.shape, dtype=torch.float64)
    torch.testing.assert_close(runs(ones, values)[0], drawn_edges)
    # Weights that all differ, so that no stream is shared, and by example.
    drawn = torch.rand(*graph.edges.shape, generator=torch.Generator().manual_seed(0)).double()
    separate = runs(drawn, values)[0]
    one_by_one = runs(drawn[..., None].expand(*drawn.shape, len(base)), values)[0]
    torch.testing.assert_close(separate, one_by_one)
    torch.testing.assert_close(separate, runs(drawn.requires_grad_(), values)[0])


def test_groups_of_neurons_send_their_part_of_the_mlp() -> None:
    model = model_with()
    base, source = tokens()
    groups = {"block.1.first": [0, 3], "block.1.second": [1, 2, 4, 5]}
    both = path_patching(
        model, base, source, senders=list(groups), receivers="2:block.0.mlp", neurons=groups,
        n_loops=LOOPS,
    )  # fmt: skip
    patched = path_patching(
        model, base, source, senders="block.1.mlp", receivers="2:block.0.mlp", n_loops=LOOPS
    )
    torch.testing.assert_close(both, patched)
    one = path_patching(
        model, base, source, senders="1:block.1.first", receivers="2:block.0.mlp", neurons=groups,
        n_loops=LOOPS,
    )  # fmt: skip
    _, updates = run_by_hand(model, base, LOOPS)
    # By hand: the MLP's output changed by what two neurons write in the source's run.
    inside = ["blocks.3.mlp.hook_post"]
    neurons = [
        model.run_with_cache(x, n_loops=LOOPS, names_filter=inside)[1] for x in (base, source)
    ]
    change = (neurons[1][inside[0]] - neurons[0][inside[0]])[..., [0, 3]]
    outwards = model.get_parameter("block.1.mlp.fc_out.weight")
    changed = updates["1:block.1.mlp"] + change @ outwards[:, [0, 3]].T
    expected, _ = run_by_hand(
        model, base, LOOPS,
        lambda a, b, x: changed if (a, b) == ("1:block.1.mlp", "2:block.0.mlp") else x,
    )  # fmt: skip
    torch.testing.assert_close(one, expected)


def test_all_paths_from_the_input_together_are_the_source_s_run() -> None:
    model, (base, source) = model_with(), tokens()
    graph = UnrolledGraph(model.config, LOOPS)
    got = path_patching(
        model, base, source, senders="input", receivers=graph.receiver_names, n_loops=LOOPS
    )
    torch.testing.assert_close(got, model(source, n_loops=LOOPS))


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"senders": "block.7.mlp"}, "senders"),
        ({"receivers": "0:block.0.head.0"}, "receivers"),
        ({"receivers": []}, "receivers"),
        ({"through": "readout"}, "through"),
        ({"through": "2:block.1.mlp"}, "through"),
        ({"through": "0:block.0.mlp"}, "through"),
        ({"neurons": {"carry": [0]}}, "name of a group of neurons"),
        ({"neurons": {"block.0.a": [0], "block.0.b": [0]}}, "neurons of 'block.0.b'"),
        ({"neurons": {"block.0.a": [6]}}, "block.0.a"),
        ({"n_loops": 0}, "n_loops"),
    ],
)
def test_what_is_no_path_is_refused(changes: dict[str, Any], what: str) -> None:
    base, source = tokens()
    arguments = {
        "senders": "0:block.0.mlp",
        "receivers": "2:block.0.mlp",
        "n_loops": LOOPS,
        **changes,
    }
    with pytest.raises(InputError) as caught:
        path_patching(model_with(), base, source, **arguments)
    assert caught.value.what == what


def test_gates_are_refused_as_they_read_the_stream_themselves() -> None:
    base, source = tokens()
    with pytest.raises(InputError) as caught:
        path_patching(
            model_with(norm="gated"), base, source, senders="input", receivers="readout", n_loops=2
        )
    assert caught.value.what == "model"
