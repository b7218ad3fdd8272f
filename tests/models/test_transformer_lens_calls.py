"""What notebooks of TransformerLens call on a model gives a value, or a refusal of ours."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch
import transformer_lens.tools.analysis as analysis
from transformer_lens import patching

from loopinterp.adapters import adapt
from loopinterp.core.errors import HookError, InputError
from loopinterp.models import LoopedTransformer, LoopedTransformerConfig, fold_final_norm
from tests.adapters.published import hrm_text

TOKENS = torch.tensor([[1, 2, 3, 4, 0]])
N_LOOPS = 3


def model_of(**settings: Any) -> LoopedTransformer:
    config: dict[str, Any] = {"d_model": 8, "n_heads": 2, "d_vocab": 6, "d_vocab_out": 6}
    config |= {"n_layers": 2, "init_std": 0.3}
    return LoopedTransformer(LoopedTransformerConfig(**(config | settings)), seed=0).unroll(N_LOOPS)


def test_the_loss_is_that_of_the_next_token() -> None:
    model = model_of()
    logits = model(TOKENS)
    expected = torch.nn.functional.cross_entropy(logits[0, :-1], TOKENS[0, 1:], reduction="none")
    assert torch.allclose(model.loss_fn(logits, TOKENS, per_token=True)[0], expected, atol=1e-6)
    assert torch.allclose(model(TOKENS, return_type="loss"), expected.mean(), atol=1e-6)
    both, loss = model(TOKENS, return_type="both")
    assert torch.equal(both, logits) and torch.allclose(loss, expected.mean(), atol=1e-6)
    assert model(TOKENS, return_type=None) is None
    ablated = model.run_with_hooks(
        TOKENS, return_type="loss", fwd_hooks=[("blocks.0.hook_mlp_out", lambda x, hook: x * 0)]
    )
    assert not torch.allclose(ablated, expected.mean())


@pytest.mark.parametrize("settings", [{"d_vocab_out": 2}, {"causal": False}])
def test_a_model_that_predicts_no_next_token_has_no_such_loss(settings: dict[str, Any]) -> None:
    model = model_of(**settings)
    with pytest.raises(InputError):
        model(TOKENS, return_type="loss")


@pytest.mark.parametrize("layer", range(-6, 6))
def test_a_run_ends_before_a_layer(layer: int) -> None:
    model = model_of()
    _, full = model.run_with_cache(TOKENS)
    expected = full["resid_pre", layer % 6]
    stream, cache = model.run_with_cache(TOKENS, stop_at_layer=layer, names_filter=_before(layer))
    for result in (stream, model(TOKENS, stop_at_layer=layer)):  # fused attention, and explicit
        assert torch.allclose(result, expected, atol=1e-5)
    assert all(torch.allclose(cache[name], full[name], atol=1e-5) for name in cache)
    with pytest.raises(InputError):
        cache.logit_attribution(1)  # it read no logits


def _before(layer: int) -> Any:
    last = layer % 6
    return lambda name: name == "hook_embed" or name.startswith(f"blocks.{last - 1}.")


def test_a_run_that_ends_too_early_for_all_of_a_cache_says_so() -> None:
    with pytest.raises(HookError):
        model_of().run_with_cache(TOKENS, stop_at_layer=1, names_filter="blocks.4.hook_resid_post")
    for stop in (6, -7):
        with pytest.raises(InputError):
            model_of()(TOKENS, stop_at_layer=stop)


def test_a_cache_can_be_a_dictionary_and_contexts_be_cleared() -> None:
    model = model_of()
    model.hook_dict["hook_embed"].ctx["seen"] = 1
    _, plain = model.run_with_cache(TOKENS, return_cache_object=False, clear_contexts=True)
    _, cache = model.run_with_cache(TOKENS)
    assert type(plain) is dict and plain.keys() == set(cache.keys())
    assert not model.hook_dict["hook_embed"].ctx


def test_weights_are_where_notebooks_look_for_them() -> None:
    model = model_of()
    embed: Any = model.embed
    assert torch.equal(embed.W_E, model.W_E)
    assert torch.equal(model.unembed.W_U, model.W_U) and torch.equal(model.unembed.b_U, model.b_U)
    assert torch.equal(model.unembed(model.embed(TOKENS)), model.unembedding(model.embed(TOKENS)))
    assert dict(model.tl_named_parameters()).keys() == model.tl_parameters().keys()
    assert model.all_head_labels[:3] == model.all_head_labels()[:3] == ["L0H0", "L0H1", "L1H0"]


@pytest.mark.parametrize("mode", ["Q", "K", "V"])
def test_composition_scores_are_norms_of_products(mode: Literal["Q", "K", "V"]) -> None:
    model = model_of()
    scores = model.all_composition_scores(mode).scores
    write = model.W_V[1, 0] @ model.W_O[1, 0]  # [d_model, d_model], of a row vector
    read = model.W_Q[4, 1] @ model.W_K[4, 1].T
    read = {"Q": read, "K": read.T, "V": model.W_V[4, 1] @ model.W_O[4, 1]}[mode]
    expected = (write @ read).norm() / write.norm() / read.norm()
    assert torch.allclose(scores[1, 0, 4, 1], expected, atol=1e-5)
    assert scores[4, 0, 1, 1] == 0 and scores[1, 0, 1, 1] == 0


def test_tokens_are_shown_as_their_numbers() -> None:
    model = model_of()
    assert model.to_str_tokens(TOKENS) == ["1", "2", "3", "4", "0"]
    assert model.to_string(TOKENS) == [" ".join("12340")] and model.to_string(4) == "4"
    assert model.get_token_position(3, TOKENS) == 2
    assert model.to_single_token(3) == 3


REFUSED = {
    "to_tokens": lambda m: m.to_tokens("Hello"),
    "to_single_token": lambda m: m.to_single_token(" Mary"),
    "to_str_tokens": lambda m: m.to_str_tokens("Hello"),
    "to_str_tokens of a batch": lambda m: m.to_str_tokens(torch.ones(2, 3, dtype=torch.int64)),
    "to_string": lambda m: m.to_string("Hello"),
    "get_token_position": lambda m: m.get_token_position(" cat", "The cat"),
    "absent": lambda m: m.get_token_position(5, TOKENS),
    "a mode": lambda m: m.get_token_position(int(TOKENS[0, 0]), TOKENS[:1], mode="lst"),
    "an option of generate": lambda m: m.generate(TOKENS, max_new_tokens=2, do_sample=True),
    "prepend_bos": lambda m: m(TOKENS, prepend_bos=True),
    "an option": lambda m: m.run_with_cache(TOKENS, something=1),
    "stop with state": lambda m: m(TOKENS, stop_at_layer=1, return_type="state"),
}


@pytest.mark.parametrize("call", REFUSED)
def test_what_cannot_mean_anything_here_is_refused_by_us(call: str) -> None:
    with pytest.raises(InputError):
        REFUSED[call](model_of())


def test_what_would_change_the_numbers_is_not_only_left_out() -> None:
    for option in ("attention_mask", "past_kv_cache", "start_at_layer"):
        with pytest.raises(InputError) as raised:
            model_of()(TOKENS, **{option: 1})
        assert raised.value.what == option and "Leave it out" not in raised.value.fix


def test_positions_that_are_not_learned_are_refused_by_us() -> None:
    with pytest.raises(InputError):
        model_of().W_pos  # noqa: B018
    assert model_of(positions="absolute", n_ctx=7).W_pos.shape == (7, 8)


# Tools on models that they were not made for


def metric(logits: torch.Tensor) -> torch.Tensor:
    return (logits[:, -1, 3] - logits[:, -1, 5]).mean()


PAIR = torch.tensor([[1, 2, 3, 4]]), torch.tensor([[4, 2, 0, 5]])
OTHERS: dict[str, dict[str, Any]] = {
    "post": {"norm": "post"},
    "sandwich": {"norm": "sandwich"},
    "gated": {"norm": "gated"},
    "loop norm": {"loop_norm": True},
    "injected": {"injection": "input", "initial_state": "zeros"},
    "concat": {"injection": "concat", "initial_state": "zeros"},
    "sublayer": {"injection": "sublayer"},
    "internal": {"injection": "internal"},
    "from zeros": {"initial_state": "zeros", "injection": "gated_output"},
    "abacus": {"positions": "abacus", "n_ctx": 9, "digit_tokens": (1, 2)},
}


def least_edge(model: LoopedTransformer) -> float:
    """The share that TransformerLens says one edge of next to no effect recovers."""
    config = analysis.EdgeAttributionConfig(granularity="edge", ig_steps=1)
    scores = analysis.attribution_patch(model, *PAIR, metric, config).edge_scores
    edge = min(scores, key=lambda each: abs(float(scores[each])))
    return analysis.faithfulness(model, *PAIR, metric, [edge]).recovered


def test_an_edge_without_effect_recovers_nothing() -> None:
    for settings in ({}, {"norm": "none"}, {"n_prelude": 1, "n_coda": 1}, {"positions": "rotary"}):
        assert abs(least_edge(model_of(**settings))) < 1e-4, settings


@pytest.mark.parametrize("name", OTHERS)
def test_edges_of_a_stream_that_is_no_plain_sum_are_refused(name: str) -> None:
    model = model_of(**OTHERS[name])
    with pytest.raises(InputError):
        least_edge(model)
    assert not model.cfg.use_hook_mlp_in  # the flags are as they were


@pytest.mark.parametrize("name", ["post", "sandwich", "gated", "loop norm", "concat"])
def test_paths_of_a_head_through_other_norms_are_refused(name: str) -> None:
    model = model_of(**OTHERS[name])
    caches = [model.run_with_cache(tokens)[1] for tokens in PAIR]
    with pytest.raises(InputError):
        patching.get_act_patch_direct_path(
            model, PAIR[1], caches[0], caches[1], metric, 1, 0, verbose=False
        )


def with_final_norm(**settings: Any) -> LoopedTransformer:
    model = model_of(**settings)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in model.ln_final.parameters():  # type: ignore[union-attr]
            weight += torch.randn(weight.shape, generator=generator)
    return model


FINAL: list[dict[str, Any]] = [
    {"unembed_bias": False},
    {},
    {"norm_type": "rmsnorm", "unembed_bias": False},
    {"tie_unembed": True, "unembed_bias": False},
]


@pytest.mark.parametrize("settings", FINAL)
def test_attribution_by_parts_adds_up_once_the_final_norm_is_folded(settings: Any) -> None:
    model = with_final_norm(**settings)
    with pytest.raises(InputError):
        analysis.direct_logit_attribution(model, TOKENS, answer_tokens=5, unit="component")
    _, cache = model.run_with_cache(TOKENS)
    with pytest.raises(InputError):
        cache.apply_ln_to_stack(cache.accumulated_resid(), layer=-1)
    folded = fold_final_norm(model).unroll(N_LOOPS)
    logits = model(TOKENS)
    assert torch.allclose(folded(TOKENS), logits, atol=1e-5)
    parts = analysis.direct_logit_attribution(folded, TOKENS, answer_tokens=5, unit="component")
    total = parts.attribution.sum(0)[0] + folded.b_U[5]
    assert torch.allclose(total, logits[0, -1, 5], atol=1e-4)


def test_folding_takes_a_looped_transformer_with_a_final_norm() -> None:
    with pytest.raises(InputError):
        fold_final_norm(model_of(final_norm=False))


def test_an_adapter_refuses_what_asks_for_weights_by_name() -> None:
    model = adapt(hrm_text.tiny()).unroll(2)
    caches = [model.run_with_cache(tokens)[1] for tokens in PAIR]
    with pytest.raises(InputError):
        patching.get_act_patch_direct_path(
            model, PAIR[1], caches[0], caches[1], metric, 1, 0, verbose=False
        )
    with pytest.raises(InputError):
        analysis.attribution_patch(
            model, *PAIR, metric, analysis.EdgeAttributionConfig(granularity="edge")
        )
    for name in ("blocks", "W_E", "W_U", "b_U", "W_Q", "QK", "OV", "unembed"):
        with pytest.raises(InputError):
            getattr(model, name)


# Gradients, and what is said of a run that has none


def test_gradients_are_stacked_over_loops() -> None:
    model = model_of()
    _, cache = model.run_with_cache(TOKENS, incl_bwd=True, loss_fn=lambda x: x[0, -1, 0])
    expected = torch.stack([cache[f"blocks.{2 * t + 1}.hook_resid_post_grad"] for t in range(3)])
    assert torch.equal(cache.stack("hook_resid_post_grad"), expected)
    assert torch.equal(cache.stack("resid_post_grad", loops=[0, 2]), expected[[0, 2]])
    assert torch.equal(cache["loops.1.blocks.1.hook_resid_post_grad"], expected[1])
    both = cache.stack("attn.hook_pattern_grad", layer=[0, 1])
    assert torch.equal(both[2, 0], cache["blocks.4.attn.hook_pattern_grad"])
    with pytest.raises(HookError):
        model.run_with_cache(TOKENS)[1].stack("resid_post_grad")


def _frozen(model: LoopedTransformer) -> Any:
    model.requires_grad_(False)
    return model.run_with_cache(TOKENS, incl_bwd=True, loss_fn=lambda x: x[0, -1, 0])


def _no_grad(model: LoopedTransformer) -> Any:
    with torch.no_grad():
        return model.run_with_cache(TOKENS, incl_bwd=True, loss_fn=lambda x: x[0, -1, 0])


def _detached(model: LoopedTransformer) -> Any:
    return model.run_with_cache(TOKENS, incl_bwd=True, loss_fn=lambda x: x.detach()[0, -1, 0])


def test_a_loss_without_a_gradient_is_refused() -> None:
    for run in (_frozen, _no_grad, _detached, lambda m: m.run_with_cache(TOKENS, incl_bwd=True)):
        with pytest.raises(InputError) as raised:
            run(model_of())
        assert raised.value.what == "loss"


@pytest.mark.parametrize("return_type", ["logits", "state"])
def test_a_run_under_autocast_is_refused_for_its_precision(return_type: Any) -> None:
    model = model_of()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        _, cache = model.run_with_cache(TOKENS, return_type=return_type)
    with pytest.raises(InputError) as raised:
        cache.logit_attribution(3, from_loop=0)
    assert raised.value.what == "logit_attribution"
