"""Direct logit attribution on every adapter, against gradients of the published modules' own code.

The oracle knows neither our addresses nor our way back. It runs the published layers with each
norm's scale taken as a constant, and with what heads and MLPs put out, the injected input and the
starting state as constants of which gradients are taken: the direct path is then all that is left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from loopinterp.adapters import OuroAdapter, PublishedModel, adapt
from loopinterp.adapters.plain import hrm as plain_hrm
from loopinterp.adapters.plain.language_models import OuroRMSNorm, RMSNorm
from loopinterp.core.errors import HookError, InputError
from loopinterp.models import LoopedCache, for_logit_attribution
from tests.adapters.kinds import KINDS, tokens_of
from tests.adapters.published import albert, huginn, ouro, trm

Leaf = Callable[[str, Tensor], Tensor]


def held(x: Tensor, eps: float, weight: Tensor | None = None) -> Tensor:
    """``x / rms(x) * weight``, of which only the numerator has a gradient."""
    normed = x * (x.square().mean(-1, keepdim=True) + eps).rsqrt().detach()
    return normed if weight is None else normed * weight


def from_ouro(model: Any, e: Tensor, start: Tensor, n_loops: int, leaf: Leaf) -> Tensor:
    h = leaf("state", start)
    turned = model.model.rotary_emb(h, torch.arange(h.shape[1])[None])
    for _ in range(n_loops):
        for layer in model.model.layers:
            h = layer(h, turned)
        h = model.model.norm(h)
    return model.lm_head(h)


def from_nanbeige(model: Any, e: Tensor, start: Tensor, n_loops: int, leaf: Leaf) -> Tensor:
    return model.lm_head(model.model.loops(leaf("state", start), n_loops))


def from_huginn(model: Any, e: Tensor, start: Tensor, n_loops: int, leaf: Leaf) -> Tensor:
    x = leaf("state", start)
    for _ in range(n_loops):
        x = model.core_block_forward(x, leaf("injection", e))
    return model.predict_from_latents(x)


def from_hrm_text(model: Any, e: Tensor, start: Tensor, n_loops: int, leaf: Leaf) -> Tensor:
    inner = model.model
    turned = inner.rotary_emb(e, torch.arange(e.shape[1])[None])
    z_H, z_L = leaf("state", start).chunk(2, -1)
    for _ in range(n_loops):
        for _ in range(model.config.L_cycles):
            z_L = inner.L_module(z_L + z_H, position_embeddings=turned)
        z_H = inner.H_module(z_H + z_L, position_embeddings=turned)
    return model.lm_head(z_H)


def from_hrm(model: Any, e: Tensor, start: Tensor, n_loops: int, leaf: Leaf) -> Tensor:
    inner = model.inner
    slow, turns = getattr(inner, "H_level", inner.L_level), inner._turns()
    z_H, z_L = leaf("state", start).chunk(2, -1)
    for _ in range(n_loops):
        injected = leaf("injection", e)
        for _ in range(inner.config.L_cycles):
            z_L = inner.L_level(z_L, z_H + injected, turns)
        z_H = slow(z_H, z_L, turns)
    return inner.lm_head(z_H)


def from_albert(model: Any, e: Tensor, start: Tensor, n_loops: int, leaf: Leaf) -> Tensor:
    # The layers of the first loops, which are those of one group.
    h = albert.looped(getattr(model, "albert", model), leaf("state", start), n_loops)
    return model.predictions(h) if hasattr(model, "predictions") else h


BUILD: dict[str, Callable[[], Any]] = {
    **{name: kind.build for name, kind in KINDS.items()},
    "huginn-bias": lambda: huginn.tiny(bias=True),
    "ouro-one-layer": lambda: ouro.tiny(num_hidden_layers=1),
    "trm-mixing": lambda: trm.tiny(mlp_t=True),
}
FORWARD = {
    "ouro": from_ouro,
    "nanbeige": from_nanbeige,
    "huginn": from_huginn,
    "retrofitted": from_huginn,
    "hrm_text": from_hrm_text,
    "hrm": from_hrm,
    "trm": from_hrm,
    "albert": from_albert,
}
HEADS = {"o_proj", "attn.proj", "attention.dense"}
OTHERS = {"mlp", "mlp_t", "ffn_output"}
BIASES = ["adapter bias", "norm bias", "attention bias", "head bias", "unembedding bias"]


def forward_of(name: str) -> Callable[[Any, Tensor, Tensor, int, Leaf], Tensor]:
    return FORWARD[name.partition("-")[0]]


@contextmanager
def constants(model: nn.Module, leaf: Leaf) -> Iterator[None]:
    """Run published layers with norms held, and with what heads and MLPs put out as leaves."""

    def norm(self: Any, x: Tensor) -> Tensor:
        return held(x, getattr(self, "eps", None) or self.variance_epsilon, self.weight)

    def bare(self: Any, x: Tensor) -> Tensor:
        return held(x, self.eps)

    def centred(self: Any, x: Tensor) -> Tensor:
        return held(x - x.mean(-1, keepdim=True), self.eps, self.weight) + self.bias

    def gate(module: Any, inputs: Any, output: Tensor) -> Tensor:
        return inputs[0] * (output / inputs[0]).detach()

    with ExitStack() as stack:
        text = "transformers.models.hrm_text.modeling_hrm_text.HrmTextRMSNorm.forward"
        for owner in (OuroRMSNorm, LlamaRMSNorm, RMSNorm):
            stack.enter_context(mock.patch.object(owner, "forward", norm))
        stack.enter_context(mock.patch(text, bare))
        stack.enter_context(mock.patch.object(nn.LayerNorm, "forward", centred))
        stack.enter_context(mock.patch.object(plain_hrm, "rms_norm", held))
        for path, module in model.named_modules():
            if any(path.endswith(end) for end in HEADS):
                handle = module.register_forward_pre_hook(
                    lambda module, inputs: (leaf("heads", inputs[0]),)
                )
                stack.callback(handle.remove)
            elif path.rpartition(".")[2] in OTHERS:
                # The MLP over positions works on the stream turned over.
                turned = path.endswith("mlp_t")
                handle = module.register_forward_hook(
                    lambda module, inputs, output, turned=turned: (
                        leaf("mixing", output.mT).mT if turned else leaf("mlp", output)
                    )
                )
                stack.callback(handle.remove)
            elif path == "predictions.activation":
                stack.callback(module.register_forward_hook(gate).remove)
        yield


def oracle(
    name: str,
    model: PublishedModel,
    tokens: Tensor,
    right: Tensor,
    wrong: Tensor,
    start: Tensor,
    n_loops: int,
) -> tuple[list[str], Tensor]:
    """The kind of each writer in the order of writing, and what it adds ``[part, batch, pos]``."""
    leaves: list[tuple[str, Tensor]] = []

    def leaf(kind: str, x: Tensor) -> Tensor:
        leaves.append((kind, x.detach().requires_grad_()))
        return leaves[-1][1]

    e = model.embed(tokens).detach()  # of whose making nothing is asked
    with constants(model.published, leaf):
        logits = forward_of(name)(model.published, e, start, n_loops, leaf)
    chosen = [logits.gather(-1, classes[..., None]) for classes in (right, wrong)]
    grads = torch.autograd.grad((chosen[0] - chosen[1]).sum(), [x for _, x in leaves])
    kinds, parts = [], []
    for (kind, x), grad in zip(leaves, grads):
        n_heads = model.site_map.n_heads if kind == "heads" else 1
        by_head = (x * grad).unflatten(-1, (n_heads, -1)).sum(-1)
        kinds += [kind] * n_heads
        parts += by_head.detach().unbind(-1)
    return kinds, torch.stack(parts)


def answers(tokens: Tensor, n_classes: int) -> tuple[Tensor, Tensor]:
    """A right and a wrong class for each place, never the same."""
    right = torch.randint(n_classes, tokens.shape, generator=torch.Generator().manual_seed(1))
    return right, (right + 7) % n_classes


@pytest.mark.parametrize("name", BUILD)
@pytest.mark.parametrize(("loop", "from_loop"), [(2, 0), (1, 1)])
def test_each_part_is_the_gradient_of_its_direct_path(name: str, loop: int, from_loop: int) -> None:
    model, tokens = adapt(BUILD[name]()), tokens_of(name.replace("-mixing", "").partition("-")[0])
    right, wrong = answers(tokens, model.config.d_vocab_out)
    logits = model(tokens, n_loops=3, return_type="all_logits").detach()[loop + 1]
    _, cache = model.run_with_cache(tokens, n_loops=3)
    result = cache.logit_attribution(right, incorrect_tokens=wrong, loop=loop, from_loop=from_loop)
    chosen = [logits.gather(-1, classes[..., None])[..., 0] for classes in (right, wrong)]
    assert abs(result.sum("component") - (chosen[0] - chosen[1]).numpy()).max() < 1e-5

    start = cache[f"loops.{from_loop}.hook_state_pre"].detach()
    kinds, expected = oracle(name, model, tokens, right, wrong, start, loop + 1 - from_loop)
    written = result[~result.part.isin(BIASES)]
    words = {"head": "heads"}
    assert [words.get(part, part) for part in written.part.values.tolist()] == kinds
    torch.testing.assert_close(
        torch.from_numpy(written.values).float(), expected, atol=2e-6, rtol=2e-5
    )
    # Every part says something.
    assert (expected.abs().amax((1, 2)) > 1e-6).all()


@pytest.mark.parametrize("name", KINDS)
def test_parts_stand_where_the_sites_do(name: str) -> None:
    model, tokens = adapt(KINDS[name].build()), tokens_of(name)
    _, cache = model.run_with_cache(tokens, n_loops=2)
    result, sizes = cache.logit_attribution(1, from_loop=0), model.site_map
    heads = result[result.part == "head"]
    places = [
        (loop, layer, head)
        for loop in range(2)
        for layer in range(sizes.n_layers)
        for head in range(sizes.n_heads)
    ]
    places += [(-1, k, head) for k in range(sizes.n_coda) for head in range(sizes.n_heads)]
    assert list(zip(*(heads[axis].values.tolist() for axis in ("loop", "layer", "head")))) == places
    assert len(set(result.component.values)) == len(result)
    by_loop = result.groupby("loop").sum()
    assert by_loop.loop.values.tolist() == [-1, 0, 1]
    # Taken apart from a later loop on, the parts of that loop are the same.
    later = cache.logit_attribution(1, from_loop=1)
    same = result[result.loop == 1]
    assert abs(later[later.loop == 1].values - same.values).max() < 1e-6


@pytest.mark.parametrize("name", [*KINDS, "trm-mixing"])
def test_a_cache_of_what_is_read_is_enough(name: str) -> None:
    model, tokens = adapt(BUILD[name]()), tokens_of(name.replace("-mixing", ""))
    _, full = model.run_with_cache(tokens, n_loops=2)
    _, cache = model.run_with_cache(tokens, n_loops=2, names_filter=for_logit_attribution)
    assert cache.nbytes < 0.6 * full.nbytes
    result, expected = (x.logit_attribution(1, from_loop=0) for x in (cache, full))
    # Attention is fused where nobody looks at patterns, and rounds otherwise.
    assert (result.component == expected.component).all() and abs(result - expected).max() < 1e-5


@pytest.mark.parametrize("name", KINDS)
def test_half_precision_is_attributed_to_its_rounding(name: str) -> None:
    model, tokens = adapt(KINDS[name].build().bfloat16()), tokens_of(name)
    logits, cache = model.run_with_cache(tokens)
    result = cache.logit_attribution(1, from_loop=0)
    gap = abs(result.sum("component") - logits[..., 1].detach().float().numpy()).max()
    assert gap < 0.05 * abs(result).sum("component").max()


@pytest.mark.parametrize("name", KINDS)
def test_what_is_no_longer_the_run_is_refused(name: str, tmp_path: Path) -> None:
    model, tokens = adapt(KINDS[name].build()), tokens_of(name)

    def louder(x: Tensor, hook: Any) -> Tensor:
        return x + torch.linspace(0, 10, x.shape[-1])

    with model.hooks([("loops.0.blocks.0.hook_resid_mid", louder)], n_loops=2):
        _, cache = model.run_with_cache(tokens, n_loops=2)
    # The last loop is as it was.
    assert len(cache.logit_attribution(1))
    with pytest.raises(InputError, match="without hooks"):
        cache.logit_attribution(1, from_loop=0)
    _, states = model.run_with_cache(tokens, n_loops=2, return_type="states")
    assert len(states.logit_attribution(1))
    _, few = model.run_with_cache(tokens, n_loops=2, names_filter=["z", "hook_state_post"])
    with pytest.raises(HookError, match="names_filter"):
        few.logit_attribution(1)
    cache = model.run_with_cache(tokens, n_loops=2)[1]
    cache.save(tmp_path)
    again = LoopedCache.load(tmp_path, model)
    assert again.logit_attribution(1).identical(cache.logit_attribution(1))
    heads = ("head", "wte", "predictions")
    weights = sorted(model.published.named_parameters(), key=lambda named: "wte" in named[0])
    head = [x for key, x in weights if any(part in key for part in heads) and x.dim() == 2]
    if not head:  # its readout is the state itself
        assert name == "albert-states"
        return
    with torch.no_grad():
        head[0].mul_(1.5)
    with pytest.raises(InputError, match="that run"):
        cache.logit_attribution(1)


def test_a_coda_needs_all_positions_and_a_readout_of_one_does_not() -> None:
    tokens = tokens_of("huginn")
    model = adapt(KINDS["huginn"].build())
    with pytest.raises(InputError, match="pos_slice"):
        model.run_with_cache(tokens, pos_slice=[-1])[1].logit_attribution(1)
    model = adapt(KINDS["hrm_text"].build())
    full = model.run_with_cache(tokens)[1].logit_attribution(1, from_loop=0)
    last = model.run_with_cache(tokens, pos_slice=[-1])[1].logit_attribution(1, from_loop=0)
    assert abs(last.values - full.values[..., [-1]]).max() < 1e-6


def test_an_adapter_that_does_not_say_its_way_back_is_refused_with_what_to_write() -> None:
    class Silent(OuroAdapter):
        attribute_loop = None  # type: ignore[assignment]

    model, tokens = Silent(KINDS["ouro"].build()), tokens_of("ouro")
    _, cache = model.run_with_cache(tokens, n_loops=1)
    with pytest.raises(InputError, match="attribute_loop"):
        cache.logit_attribution(1)
