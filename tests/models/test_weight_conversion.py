"""A conversion is exact or refused, and says where the two models part."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

from loopinterp.errors import InputError
from loopinterp.models import (
    LoopedTransformer,
    LoopedTransformerConfig,
    convert_model,
    first_difference,
)

D, HEADS, LOOPS = 8, 2, 3
CONFIG = LoopedTransformerConfig(
    d_model=D,
    n_heads=HEADS,
    d_vocab=5,
    d_vocab_out=3,
    norm="pre",
    injection="input",
    initial_state="zeros",
    act_fn="relu",
    d_mlp=16,
)
INPUTS = torch.randint(5, (4, 6), generator=torch.Generator().manual_seed(0))


class Original(nn.Module):
    """Written with PyTorch's own parts, behind the four methods."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.wte = nn.Embedding(5, D)
        self.block = nn.TransformerEncoderLayer(
            D, HEADS, 16, dropout=0.0, batch_first=True, norm_first=True
        )
        self.norm, self.head = nn.LayerNorm(D), nn.Linear(D, 3)
        for name, weight in self.named_parameters():  # PyTorch starts biases at 0 and norms at 1
            nn.init.normal_(weight, std=0.3) if weight.ndim == 1 else None
            assert name

    def embed(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.wte(inputs)

    def initial_state(self, e: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(e)

    def step(self, h: torch.Tensor, e: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(h.shape[1])
        return self.block(h + e, src_mask=mask)

    def readout(self, h: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(h))


def _original() -> Original:
    return Original().eval()


def _weights(model: Original) -> dict[str, torch.Tensor]:
    ours = {
        "wte": "embedding",
        "block.self_attn.in_proj_": "block.0.attn.qkv.",
        "block.self_attn.out_proj": "block.0.attn.out",
        "block.linear1": "block.0.mlp.fc_in",
        "block.linear2": "block.0.mlp.fc_out",
        "block.norm1": "block.0.ln1",
        "block.norm2": "block.0.ln2",
        "norm": "ln_final",
        "head": "unembedding",
    }
    renamed = {}
    for name, weight in model.state_dict().items():
        old = next(part for part in ours if name.startswith(part))
        renamed[name.replace(old, ours[old], 1)] = weight.clone()
    return renamed


def _converted(**changes: Any) -> LoopedTransformer:
    model = LoopedTransformer(CONFIG)
    model.load_state_dict(_weights(_original()) | changes)
    return model.eval()


def test_a_faithful_conversion_gives_the_model_with_the_same_logits() -> None:
    original = _original()
    model = convert_model(original, CONFIG, _weights(original), INPUTS, n_loops=LOOPS)
    h = original.initial_state(e := original.embed(INPUTS))
    for _ in range(LOOPS):
        h = original.step(h, e)
    torch.testing.assert_close(model(INPUTS, n_loops=LOOPS), original.readout(h))


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.bfloat16, 0.1), (torch.float16, 0.02)]
)
def test_the_model_has_the_type_of_the_weights(dtype: torch.dtype, tolerance: float) -> None:
    original = _original().to(dtype)
    weights = _weights(original)
    model = convert_model(original, CONFIG, weights, INPUTS, n_loops=LOOPS, tolerance=tolerance)
    assert model.dtype == dtype
    assert all(torch.equal(x, weights[name]) for name, x in model.state_dict().items())
    weights["embedding.weight"] = weights["embedding.weight"] * 1.5
    with pytest.raises(InputError, match="a difference, first in embed"):
        convert_model(original, CONFIG, weights, INPUTS, n_loops=LOOPS, tolerance=tolerance)


@pytest.mark.usefixtures("no_type_checks")
def test_what_are_no_weights_or_inputs_is_refused() -> None:
    original, weights = _original(), _weights(_original())
    name = "embedding.weight"
    for wrong, given in (
        (weights | {name: weights[name].double()}, "float64, .* of torch.float32"),
        (weights | {name: weights[name].numpy()}, f"{name} of ndarray"),
        ({k: x.long() for k, x in weights.items()}, f"{name} of torch.int64"),
        ({k: x.numpy() for k, x in weights.items()}, f"{name} of ndarray"),
        ([*weights.values()], "weights of list"),
        ({}, "none"),
    ):
        with pytest.raises(InputError, match=rf"weights: expected a mapping.* got .*{given}"):
            convert_model(original, CONFIG, wrong, INPUTS, n_loops=LOOPS)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"inputs: expected a tensor .* got a list"):
        convert_model(original, CONFIG, weights, INPUTS.tolist(), n_loops=LOOPS)  # type: ignore[arg-type]


def test_weights_that_do_not_fit_are_named() -> None:
    original, weights = _original(), _weights(_original())
    del weights["ln_final.bias"]
    weights["head.scale"] = torch.ones(1)
    weights["embedding.weight"] = weights["embedding.weight"].T
    said = "ln_final.bias is missing; head.scale is not known; "
    said += f"embedding.weight is [{D}, 5], not [5, {D}]"
    with pytest.raises(InputError, match=re.escape(said)):
        convert_model(original, CONFIG, weights, INPUTS, n_loops=LOOPS)


@pytest.mark.parametrize(
    ("weight", "where"),
    [
        ("embedding.weight", "embed"),
        ("block.0.attn.qkv.weight", "loop 0"),
        ("block.0.mlp.fc_out.bias", "loop 0"),
        ("unembedding.bias", "readout after 0 loops"),
    ],
)
def test_a_difference_is_said_where_it_arises(weight: str, where: str) -> None:
    changed = _weights(_original())[weight].clone()
    changed.view(-1)[1] += 0.1
    said = first_difference(_original(), _converted(**{weight: changed}), INPUTS, n_loops=LOOPS)
    assert said is not None and said.startswith(f"{where}: ")
    weights = _weights(_original()) | {weight: changed}
    with pytest.raises(InputError, match=f"a difference, first in {where}: "):
        convert_model(_original(), CONFIG, weights, INPUTS, n_loops=LOOPS)


class _LateBump(Original):
    """Does something else in its third loop only, which no weight could do."""

    def step(self, h: torch.Tensor, e: torch.Tensor) -> torch.Tensor:
        self.loops = 0 if not h.any() else self.loops + 1
        return super().step(h, e) + (self.loops == 2)


def test_a_later_loop_is_told_from_what_it_carries_on() -> None:
    late = _LateBump().eval()
    late.load_state_dict(_original().state_dict())
    said = first_difference(late, _converted(), INPUTS, n_loops=LOOPS)
    assert said is not None and said.startswith("loop 2: ")
    assert first_difference(late, _converted(), INPUTS, n_loops=2) is None


def test_activations_say_which_component_of_the_loop_it_is() -> None:
    right, site = _converted(), "loops.{}.blocks.0.{}"
    names = ("hook_resid_pre", "ln1.hook_normalized", "attn.hook_pattern", "mlp.hook_post")
    _, cache = right.run_with_cache(INPUTS, n_loops=LOOPS)
    theirs = {
        site.format(loop, name): cache[site.format(loop, name)]
        for loop in range(LOOPS)
        for name in names
    }
    changed = _weights(_original())["block.0.mlp.fc_in.bias"] + 0.5
    wrong = _converted(**{"block.0.mlp.fc_in.bias": changed})
    said = first_difference(_original(), wrong, INPUTS, n_loops=LOOPS, activations=theirs)
    assert said is not None and said.startswith("blocks.0.mlp.hook_post: ")
    outside = {"hook_embed": cache["hook_embed"]}
    with pytest.raises(InputError, match="inside a loop, got hook_embed"):
        first_difference(right, right, INPUTS, n_loops=LOOPS, activations=outside)
