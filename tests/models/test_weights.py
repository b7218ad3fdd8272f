"""Layers are called, so that what others put around them counts; what reads weights refuses."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call
from torch.nn.utils import parametrizations, parametrize, prune

from loopinterp.core.errors import InputError
from loopinterp.edges import path_patching
from loopinterp.models import LoopedTransformer, LoopedTransformerConfig, fold_vocabulary
from loopinterp.models.weights import LinearMap, _changed_layers, apply_norm, need_plain
from loopinterp.tasks import Addition
from loopinterp.training import Run
from tests.models.variants import VARIANTS, build

LAYERS = ["block.0.attn.qkv", "block.0.attn.out", "block.0.mlp.fc_in", "block.0.mlp.fc_out"]


EVERYWHERE = [*LAYERS, "unembedding", "recall.state", "recall.input"]


N_LOOPS = 3


class LowRank(nn.Module):
    """An adapter of somebody's: ``layer(x) + B A x``."""

    def __init__(self, layer: nn.Linear, *, seed: int = 0) -> None:
        super().__init__()
        self.base_layer = layer
        generator = torch.Generator().manual_seed(seed)
        d_out, d_in = layer.weight.shape
        self.a = nn.Parameter(torch.randn(2, d_in, generator=generator) / d_in)
        self.b = nn.Parameter(torch.randn(d_out, 2, generator=generator))

    @property
    def weight(self) -> torch.Tensor:
        return self.base_layer.weight  # as PEFT has it: without the adapter

    @property
    def bias(self) -> torch.Tensor:
        return self.base_layer.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base_layer(x) + x @ self.a.T @ self.b.T


def model_of(**settings: Any) -> LoopedTransformer:
    config: dict[str, Any] = {"d_model": 8, "n_heads": 2, "d_vocab": 6, "d_vocab_out": 6}
    config |= {"n_layers": 2, "injection": "concat", "initial_state": "zeros"}
    return LoopedTransformer(LoopedTransformerConfig(**(config | settings)), seed=0)


def put(model: nn.Module, name: str, layer: nn.Module) -> None:
    parent, _, last = name.rpartition(".")
    setattr(model.get_submodule(parent), last, layer)


def adapted_and_merged(name: str) -> tuple[LoopedTransformer, LoopedTransformer]:
    """A model with an adapter on one layer, and one with its weights added by hand."""
    adapted, merged = model_of(), model_of()
    adapter = LowRank(adapted.get_submodule(name))  # type: ignore[arg-type]
    put(adapted, name, adapter)
    with torch.no_grad():
        merged.get_submodule(name).weight += adapter.b @ adapter.a  # type: ignore[operator]
    return adapted, merged


INPUTS = torch.tensor([[0, 1, 2, 3], [5, 4, 3, 3]])


@pytest.mark.parametrize("name", EVERYWHERE)
def test_an_adapter_counts(name: str) -> None:
    adapted, merged = adapted_and_merged(name)
    expected = merged(INPUTS, n_loops=N_LOOPS)
    assert not torch.allclose(model_of()(INPUTS, n_loops=N_LOOPS), expected, atol=1e-3)
    assert torch.allclose(adapted(INPUTS, n_loops=N_LOOPS), expected, atol=1e-5)
    cached, _ = adapted.run_with_cache(INPUTS, n_loops=N_LOOPS)  # the explicit path
    assert torch.allclose(cached, expected, atol=1e-5)


@pytest.mark.parametrize("name", EVERYWHERE)
def test_an_adapter_is_trained(name: str) -> None:
    adapted, _ = adapted_and_merged(name)
    adapted(INPUTS, n_loops=N_LOOPS).square().sum().backward()
    adapter: Any = adapted.get_submodule(name)
    assert adapter.a.grad.abs().sum() > 0 and adapter.b.grad.abs().sum() > 0


@pytest.mark.parametrize("site", ["hook_q_input", "hook_k_input", "hook_v_input"])
def test_forks_pass_through_an_adapter(site: str) -> None:
    result = []
    for model in adapted_and_merged("block.1.attn.qkv"):
        model.set_use_split_qkv_input(True)

        def halve(x: torch.Tensor, hook: Any) -> torch.Tensor:
            x[:, :, 1] = x[:, :, 1] / 2
            return x

        hooks = [(f"loops.1.blocks.1.attn.{site}", halve)]
        result.append(model.run_with_hooks(INPUTS, n_loops=N_LOOPS, fwd_hooks=hooks))
    assert torch.allclose(result[0], result[1], atol=1e-5)


@pytest.mark.parametrize("name", EVERYWHERE)
def test_a_hook_of_pytorch_fires_once_a_loop(name: str) -> None:
    model, seen = model_of(), []
    layer = model.get_submodule(name)
    layer.register_forward_hook(lambda module, inputs, output: seen.append(output.shape))
    model(INPUTS, n_loops=N_LOOPS)
    assert len(seen) == (1 if name == "unembedding" else N_LOOPS)


def test_a_hook_on_learned_positions_fires() -> None:
    model, seen = model_of(positions="absolute", n_ctx=5), []
    model.position_embedding.register_forward_hook(lambda *_: seen.append(1))  # type: ignore[union-attr]
    model(INPUTS, n_loops=N_LOOPS)
    assert seen == [1]


@pytest.mark.parametrize("name", EVERYWHERE)
def test_weight_norm_counts(name: str) -> None:
    model, other = model_of(), model_of()
    layer: Any = parametrizations.weight_norm(model.get_submodule(name))
    with torch.no_grad():
        layer.parametrizations.weight.original0.mul_(2.0)  # the length of each row
        other.get_submodule(name).weight.mul_(2.0)  # type: ignore[operator, union-attr]
    assert torch.allclose(model(INPUTS, n_loops=N_LOOPS), other(INPUTS, n_loops=N_LOOPS), atol=1e-5)


@pytest.mark.parametrize("name", EVERYWHERE)
def test_pruned_weights_are_those_of_now(name: str) -> None:
    model = model_of()
    layer: Any = model.get_submodule(name)
    prune.l1_unstructured(layer, "weight", amount=0.5)
    with torch.no_grad():
        layer.weight_orig.add_(0.25)  # as a step of training would
    other = model_of()
    with torch.no_grad():
        pruned: Any = other.get_submodule(name)
        pruned.weight.copy_(layer.weight_orig * layer.weight_mask)
    assert torch.allclose(model(INPUTS, n_loops=N_LOOPS), other(INPUTS, n_loops=N_LOOPS), atol=1e-6)


class Doubled(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return 2 * weight


class Other(nn.Module):
    """Another's layer, which bears no mark."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.inner = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * 2


def _forward_of_its_own(layer: Any) -> None:
    layer.forward = lambda x: nn.Linear.forward(layer, x) * 2


CHANGES = {
    "adapter": lambda m, n: put(m, n, LowRank(m.get_submodule(n))),
    "unknown": lambda m, n: put(m, n, Other(m.get_submodule(n))),
    "parametrised": lambda m, n: parametrize.register_parametrization(
        m.get_submodule(n), "weight", Doubled()
    ),
    "pruned": lambda m, n: prune.l1_unstructured(m.get_submodule(n), "weight", amount=0.5),
    "patched": lambda m, n: _forward_of_its_own(m.get_submodule(n)),
    "narrower": lambda m, n: put(m, n, nn.Linear(3, 3)),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", LAYERS)
def test_nothing_is_saved_that_cannot_be_read_back(change: str, name: str, tmp_path: Any) -> None:
    model = model_of(d_vocab_out=2)
    CHANGES[change](model, name)
    with pytest.raises(InputError):
        model.save_pretrained(tmp_path / "model")
    with pytest.raises(InputError):
        Run.from_model(model, Addition(), tmp_path / "run", max_n=4, origin="made")
    with pytest.raises(InputError):
        fold_vocabulary(model, answers=[0, 1])
    assert not any(tmp_path.rglob("*.safetensors"))


def test_an_added_weight_or_activation_is_not_saved(tmp_path: Any) -> None:
    more, another = model_of(), model_of()
    more.extra = nn.Parameter(torch.ones(1))
    another.block[0].mlp.act_fn = torch.tanh  # type: ignore[union-attr]
    for model in (more, another):
        with pytest.raises(InputError):
            model.save_pretrained(tmp_path / "model")


def test_a_hook_does_not_keep_a_model_from_disk(tmp_path: Any) -> None:
    model = model_of()
    model.get_submodule("block.0.mlp").register_forward_hook(lambda *_: None)
    model.save_pretrained(tmp_path)
    again = LoopedTransformer.from_pretrained(tmp_path)
    assert torch.equal(again(INPUTS, n_loops=2), model(INPUTS, n_loops=2))


@pytest.mark.parametrize("change", ["adapter", "unknown", "pruned", "patched"])
def test_what_reads_weights_refuses(change: str) -> None:
    model = model_of()
    clean = copy.deepcopy(model)
    CHANGES[change](model, "block.1.attn.out")
    _, cache = model.run_with_cache(INPUTS, n_loops=2)
    model.set_use_attn_result(True)
    reads = {
        "W_O": lambda m: m.W_O,
        "logit_attribution": lambda m: cache.logit_attribution(1),
        "hook_result": lambda m: m.run_with_cache(
            INPUTS, n_loops=2, names_filter="attn.hook_result"
        ),
        "edges": lambda m: path_patching(
            m, INPUTS, INPUTS, senders="input", receivers="1:block.0.mlp", n_loops=2
        ),
    }
    for name, read in reads.items():
        with pytest.raises(InputError):
            read(model)
        if name not in ("logit_attribution", "hook_result"):
            read(clean)


def test_parametrised_weights_are_read_as_they_are() -> None:
    model, doubled = model_of(), model_of()
    parametrize.register_parametrization(model.block[1].attn.out, "weight", Doubled())  # type: ignore[union-attr, arg-type]
    with torch.no_grad():
        doubled.block[1].attn.out.weight.mul_(2)  # type: ignore[union-attr]
    assert torch.equal(model.W_O, doubled.W_O)
    parts = [
        m.run_with_cache(INPUTS, n_loops=2)[1].logit_attribution(1).values for m in (model, doubled)
    ]
    assert abs(parts[0] - parts[1]).max() < 1e-5


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_model_as_it_is_made_is_plain(variant: str) -> None:
    model = build(variant)
    assert list(_changed_layers(model)) == []
    model.to(torch.float64)  # whose weights the comparison does not look at
    need_plain(model, "test", saved=True)


def _stack_of(n_models: int, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(n_models + sum(shape))
    return torch.randn(n_models, *shape, generator=generator, dtype=torch.float64)


def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    layer = LinearMap(weight.shape[-1], weight.shape[-2], bias=bias is not None)
    tensors = {"weight": weight} if bias is None else {"weight": weight, "bias": bias}
    return functional_call(layer, tensors, (x,))


@pytest.mark.parametrize("biased", [True, False])
def test_each_model_maps_and_norms_its_own_rows(biased: bool) -> None:
    x, weight, scale = _stack_of(3, 7, 4), _stack_of(3, 5, 4), _stack_of(3, 4)
    bias, shift = (_stack_of(3, 5), _stack_of(3, 4) + 1) if biased else (None, None)
    mapped, normed = _linear(x, weight, bias), apply_norm(x, scale, shift, 1e-5)
    for model in range(3):
        shift_of_model, moved = (None if b is None else b[model] for b in (bias, shift))
        torch.testing.assert_close(mapped[model], F.linear(x[model], weight[model], shift_of_model))
        if moved is None:
            single = F.rms_norm(x[model], (4,), scale[model], 1e-5)
        else:
            single = F.layer_norm(x[model], (4,), scale[model], moved, 1e-5)
        torch.testing.assert_close(normed[model], single)


def test_weights_of_one_model_give_the_numbers_of_pytorch() -> None:
    x, weight, bias = _stack_of(2, 3, 4), _stack_of(5, 4), _stack_of(5)
    assert torch.equal(_linear(x, weight, bias), F.linear(x, weight, bias))
    assert torch.equal(apply_norm(x, weight[0], None, 1e-5), F.rms_norm(x, (4,), weight[0], 1e-5))
