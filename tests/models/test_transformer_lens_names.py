"""A looped run is TransformerLens' own untied model with the same weights in every layer.

Where TransformerLens has no such model (injection, loop norm, relative positions) a naive one,
written out loop by loop, stands in its place.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

from analyses.benchmarks.bridge_peer import untied_bridge
from loopinterp.core.errors import HookError, InputError
from loopinterp.models import LoopedTransformer, LoopedTransformerConfig
from tests.models import transformer_lens_table as table
from tests.models.peers.naive import NaiveLooped

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:transformer_lens")

SCORES, MIDDLE = "attn.hook_attn_scores", "hook_resid_mid"
SITES = [
    "hook_resid_pre",
    "ln1.hook_scale",
    "ln1.hook_normalized",
    "attn.hook_q",
    "attn.hook_k",
    "attn.hook_v",
    "attn.hook_pattern",
    "attn.hook_z",
    "hook_attn_out",
    MIDDLE,
    "ln2.hook_scale",
    "ln2.hook_normalized",
    "mlp.hook_pre",
    "mlp.hook_post",
    "hook_mlp_out",
    "hook_resid_post",
]
PLAIN = {
    "positions": "absolute",
    "n_ctx": 12,
    "unembed_bias": False,
}
INJECTED = {
    "positions": "relative",
    "relative_window": 1,
    "injection": "input",
    "initial_state": "zeros",
    "loop_norm": True,
}


def looped(generator: torch.Generator, **options: Any) -> LoopedTransformer:
    """A model whose every weight, norms and biases included, is off its initial value."""
    settings: dict[str, Any] = {
        "d_model": 16,
        "n_heads": 4,
        "d_vocab": 11,
        "d_vocab_out": 5,
    } | options
    model = LoopedTransformer(LoopedTransformerConfig(**settings), seed=0).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.2 * torch.randn(parameter.shape, generator=generator)
    return model


def close(given: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(given, expected, atol=1e-5, rtol=1e-5)


def compare_activations(ours: Any, theirs: Any, names: set[str]) -> None:
    for name in sorted(names):
        actual, expected = ours[name], theirs[name]
        if name.endswith(SCORES) and expected.isfinite().all():
            actual = actual.softmax(-1)  # the bridge gives the pattern under this name
        torch.testing.assert_close(
            actual, expected, atol=1e-5, rtol=1e-5, msg=lambda m, name=name: f"{name}: {m}"
        )


@pytest.mark.parametrize(
    ("n_loops", "options"),
    [
        (3, {"n_layers": 2}),
        (5, {"n_layers": 1, "act_fn": "relu"}),
        (3, {"n_layers": 3, "act_fn": "gelu_new"}),
        (4, {"n_layers": 2, "norm_type": "rmsnorm", "act_fn": "silu"}),
        (3, {"n_layers": 2, "n_prelude": 1, "n_coda": 2, "d_head": 6, "d_mlp": 20}),
    ],
    ids=lambda value: str(value),
)
@torch.no_grad()
def test_activation_by_activation_it_is_the_untied_model(
    n_loops: int, options: dict[str, Any], generator: torch.Generator
) -> None:
    model = looped(generator, **PLAIN, **options)
    bridge = untied_bridge(model, n_loops)
    tokens = torch.randint(0, 11, (3, 9), generator=generator)
    logits, cache = model.run_with_cache(tokens, n_loops=n_loops)
    expected, bridge_cache = bridge.run_with_cache(tokens)
    close(logits, expected)
    close(model(tokens, n_loops=n_loops), expected)
    n_layers = model.config.layers_total(n_loops)
    ours = {name for name in cache if not name.startswith("loops.")}
    assert {f"blocks.{k}.{site}" for k in range(n_layers) for site in [*SITES, SCORES]} < ours
    assert ours <= set(bridge_cache.keys())
    compare_activations(cache, bridge_cache, ours)


@pytest.mark.parametrize(
    ("n_loops", "options"),
    [
        (3, {"n_layers": 2}),
        (6, {"n_layers": 1, "attention_window": 1}),
        (4, {"n_layers": 2, "attention_window": 3, "relative_window": 4}),
        (4, {"n_layers": 2, "attention_window": 1, "windowed_heads": 1}),
    ],
    ids=lambda value: str(value),
)
@torch.no_grad()
def test_activation_by_activation_it_is_the_naive_looped_model(
    n_loops: int, options: dict[str, Any], generator: torch.Generator
) -> None:
    model = looped(generator, **INJECTED | options)
    tokens = torch.randint(0, 11, (3, 9), generator=generator)
    logits, cache = model.run_with_cache(tokens, n_loops=n_loops)
    expected, naive_cache = NaiveLooped(model, n_loops).run_with_cache(tokens)
    close(logits, expected)
    close(model(tokens, n_loops=n_loops), expected)
    assert set(cache) == set(naive_cache.keys())
    compare_activations(cache, naive_cache, set(cache))


def times_one_and_a_half(x: torch.Tensor, hook: Any) -> torch.Tensor:
    return x * 1.5


def times_one_and_a_half_in_place(x: torch.Tensor, hook: Any) -> torch.Tensor:
    return x.mul_(1.5)


@pytest.mark.parametrize("kind", table.COMPARED)
@pytest.mark.parametrize("edit", [times_one_and_a_half, times_one_and_a_half_in_place])
@pytest.mark.parametrize("site", SITES)
@torch.no_grad()
def test_an_edit_does_what_it_does_there(kind: str, edit: Callable[..., Any], site: str) -> None:
    ours, other = table.settings(kind)
    if kind == "plain" and site == MIDDLE and edit is times_one_and_a_half:
        pytest.xfail("the bridge changes what the MLP reads, but not the stream beside it")
    hooks = [(f"blocks.2.{site}", edit)]
    before = ours.model(ours.clean)
    actual = ours.model.run_with_hooks(ours.clean, fwd_hooks=hooks)
    close(actual, other.model.run_with_hooks(ours.clean, fwd_hooks=hooks))
    assert not torch.equal(actual, before)
    assert torch.equal(ours.model(ours.clean), before)  # the hook is removed afterwards


@pytest.mark.parametrize("kind", table.COMPARED)
def test_gradients_of_every_site_agree(kind: str) -> None:
    ours, other = table.settings(kind)
    names = [f"blocks.{k}.{site}" for k in range(4) for site in SITES]
    gradients: list[dict[str, torch.Tensor]] = []
    for setting in (ours, other):
        kept: dict[str, torch.Tensor] = {}

        def keeper(name: str, kept: dict[str, torch.Tensor] = kept) -> Callable[..., None]:
            return lambda gradient, hook: kept.update({name: gradient.detach().clone()})

        with warnings.catch_warnings():
            # PyTorch says that a hook on the first module sees no gradient of the tokens.
            warnings.simplefilter("ignore")
            with setting.model.hooks(bwd_hooks=[(name, keeper(name)) for name in names]):
                setting.metric(setting.model(setting.clean)).backward()
        gradients.append(kept)
    assert set(gradients[0]) == set(names)
    for name in names:
        if name.endswith(MIDDLE) and kind == "plain":
            continue  # the bridge's is the gradient of what the MLP reads
        close(gradients[0][name], gradients[1][name])


UNFOLDED = ("generic", "direct", "resid_pre", "pattern_by_pos", "block_every")
"""Patching functions that run with an unfolded final norm: it is read after every patch alike."""
ROWS = [
    (check, kind, index)
    for check in table.checks()
    for index, kind in enumerate(table.KINDS, start=1)
    if (check.section, kind) != ("patching", "unfolded")
    or any(part in check.name for part in UNFOLDED)
]


def page_rows() -> dict[tuple[str, str], list[str]]:
    """(section, function) -> cells of the table on the page."""
    text = table.PAGE.read_text().partition(table.START)[2].partition(table.END)[0]
    titles = {title: section for section, title in table.SECTIONS.items()}
    rows, section = {}, ""
    for line in text.splitlines():
        if line.startswith("### "):
            section = titles[line[4:]]
        elif line.startswith("| `"):
            cells = [cell.strip() for cell in line.strip("|").split(" | ")]
            rows[section, cells[0].strip("`")] = cells
    return rows


@pytest.mark.parametrize(
    ("check", "kind", "index"),
    ROWS,
    ids=[f"{check.section}-{check.name}-{kind}" for check, kind, _ in ROWS],
)
def test_the_table_says_what_happens(check: table.Check, kind: str, index: int) -> None:
    happens = table.outcome(check, kind)
    assert happens in ("yes", "no", "runs")
    cells = page_rows()[check.section, check.name]
    # The page is written by: python -m tests.models.transformer_lens_table
    assert cells[index] == happens
    assert cells[len(table.KINDS) + 1].rstrip("|").strip() == check.note


def test_the_table_has_every_function_and_no_other() -> None:
    assert set(page_rows()) == {(check.section, check.name) for check in table.checks()}


def test_a_no_says_why() -> None:
    for (_, name), cells in page_rows().items():
        where = [kind for kind, cell in zip(table.KINDS, cells[1:]) if cell == "no"]
        assert where in ([], ["adapter"]) or cells[len(table.KINDS) + 1].strip("| "), name


def test_all_of_patching_works() -> None:
    works, paths = ["yes", "yes", "runs", "yes", "runs"], ["yes", "yes", "no", "no", "no"]
    rows = {
        name: cells[1:6] for (section, name), cells in page_rows().items() if section == "patching"
    }
    assert {n for n, cells in rows.items() if cells != (paths if "direct" in n else works)} == set()
    assert len(rows) >= 12


def test_what_it_cannot_do_it_refuses_in_plain_words() -> None:
    model = table.settings("plain")[0].model
    model.set_use_attn_in(False)
    with pytest.raises(InputError, match="use_attn_in"):
        model.set_use_attn_in(True)


FLAGGED = {
    "use_split_qkv_input": [f"attn.hook_{part}_input" for part in "qkv"],
    "use_attn_result": ["attn.hook_result"],
    "use_hook_mlp_in": ["hook_mlp_in"],
}


@pytest.mark.parametrize("kind", table.COMPARED)
@pytest.mark.parametrize("flag", FLAGGED)
@torch.no_grad()
def test_what_heads_and_mlps_read_alone_is_what_they_read_there(kind: str, flag: str) -> None:
    ours, other = table.settings(kind)
    sites, before = FLAGGED[flag], ours.model(ours.clean)

    def push(x: torch.Tensor, hook: Any) -> torch.Tensor:
        x = x.clone()
        (x[:, :, 1] if x.dim() == 4 else x)[..., :3] += 1.5  # of one head
        return x

    with pytest.raises(HookError, match=rf"set_{flag}\(True\)"):
        ours.model.run_with_hooks(ours.clean, fwd_hooks=[(f"blocks.2.{sites[0]}", push)])
    for setting in (ours, other):
        getattr(setting.model, f"set_{flag}")(True)
    try:
        close(ours.model(ours.clean), before)
        mine, theirs = (s.model.run_with_cache(ours.clean)[1] for s in (ours, other))
        names = {f"blocks.{k}.{site}" for k in range(4) for site in sites}
        compare_activations(mine, theirs, names)
        for site in sites:
            hooks = [(f"blocks.2.{site}", push)]
            actual = ours.model.run_with_hooks(ours.clean, fwd_hooks=hooks)
            assert (actual - before).abs().max() > 1e-3
            close(actual, other.model.run_with_hooks(ours.clean, fwd_hooks=hooks))
    finally:
        for setting in (ours, other):
            getattr(setting.model, f"set_{flag}")(False)
    assert not set(FLAGGED[flag]) & set(ours.model.addresses().components)


@torch.no_grad()
def test_stacked_weights_are_those_of_the_bridge() -> None:
    ours, bridge = (setting.model for setting in table.settings("plain"))
    for name in ("Q", "K", "V", "O", "in", "out"):
        for kind in ("W", "b"):
            actual = getattr(ours, f"{kind}_{name}")
            assert len(actual) == ours.cfg.n_layers
            close(actual, getattr(bridge, f"{kind}_{name}"))
    for name in ("QK", "OV"):
        actual, expected = getattr(ours, name), getattr(bridge, name)
        close(actual.AB, expected.AB)
        assert actual.svd()[1].shape == (4, 2, 6)
    assert len(ours.unroll(1).W_Q) == 2


def test_patching_clean_into_clean_changes_nothing() -> None:
    ours, _ = table.settings("injected")
    with torch.no_grad():
        patched = table.patching.get_act_patch_resid_pre(
            ours.model, ours.clean, ours.clean_cache, ours.metric
        )
        close(patched, ours.metric(ours.model(ours.clean)).expand_as(patched))


@torch.no_grad()
def test_patching_the_stream_is_running_on_from_the_patched_state() -> None:
    ours, _ = table.settings("injected")
    patched = table.patching.get_act_patch_resid_pre(
        ours.model, ours.corrupted, ours.clean_cache, ours.metric
    )
    model, loop, position = ours.model, 1, 1
    clean, corrupted = (
        model(tokens, n_loops=table.N_LOOPS, stop_at_loop=loop, return_type="state")
        for tokens in (ours.clean, ours.corrupted)
    )
    # The block reads h + e: giving it the clean sum means giving the loop that sum less our e.
    difference = model.embed(ours.clean) - model.embed(ours.corrupted)
    state = corrupted.clone()
    state[:, position] = (clean + difference)[:, position]
    logits = model(ours.corrupted, n_loops=table.N_LOOPS, start_at_loop=loop, state=state)
    close(patched[loop * 2, position], ours.metric(logits))


def test_weights_have_transformer_lens_names() -> None:
    ours, bridge = table.settings("plain")
    named = ours.model.tl_parameters()
    theirs = bridge.model.tl_parameters()
    shared = [name for name in named if name in theirs]
    assert len(shared) > 4 * 12
    for name in shared:
        close(named[name], theirs[name])
    assert [number for number, _ in ours.model.blocks_with("attn")] == list(range(4))
    assert ours.model.blocks_with("ssm") == []
