"""The published models that have an adapter, tiny and random, each with its own native forward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from loopinterp.adapters import (
    AlbertAdapter,
    HRMAdapter,
    HRMTextAdapter,
    HuginnAdapter,
    NanbeigeAdapter,
    OuroAdapter,
    PublishedModel,
    RetrofittedAdapter,
    TRMAdapter,
    adapt,
)
from tests.adapters.published import albert, hrm, hrm_text, huginn, nanbeige, ouro, retrofitted, trm


@dataclass(frozen=True)
class Kind:
    """A kind of published model.

    Attributes:
        adapter: What ``adapt`` should find.
        build: A tiny random one.
        native: Its own forward: logits of tokens after so many loops, from a start.
        written: A module whose output the native forward writes to the stream of some layer:
            its dotted name, the site, the layer, how often it has run before in a loop, and how
            often it runs in one.
        halts: The component of its gate or head; None where it has none.
        runs: The number of first loops that run that module; None: all.
    """

    adapter: type[PublishedModel]
    build: Callable[[], Any]
    native: Callable[[Any, Tensor, int, Tensor], Tensor]
    written: tuple[str, str, int, int, int]
    halts: str | None = None
    runs: int | None = None


def _plain(module: Any) -> Callable[[Any, Tensor, int, Tensor], Tensor]:
    return lambda model, tokens, n_loops, start: module.native(model, tokens, n_loops)


_GROUP = "encoder.albert_layer_groups.0.albert_layers"

KINDS: dict[str, Kind] = {
    "ouro": Kind(
        OuroAdapter,
        ouro.tiny,
        _plain(ouro),
        ("model.layers.1.input_layernorm_2", "hook_attn_out", 1, 0, 1),
        "hook_exit_gate",
    ),
    "ouro-grouped": Kind(
        OuroAdapter,
        lambda: ouro.tiny(num_attention_heads=4, num_key_value_heads=2),
        _plain(ouro),
        ("model.layers.0.post_attention_layernorm_2", "hook_mlp_out", 0, 0, 1),
        "hook_exit_gate",
    ),
    "nanbeige": Kind(
        NanbeigeAdapter,
        lambda: nanbeige.tiny(attention_bias=True, mlp_bias=True),
        _plain(nanbeige),
        ("model.layers.1.self_attn.o_proj", "hook_attn_out", 1, 0, 1),
    ),
    "huginn": Kind(
        HuginnAdapter,
        huginn.tiny,
        lambda model, tokens, n_loops, start: huginn.native(model, tokens, n_loops, start=start),
        ("transformer.core_block.2.attn.proj", "hook_attn_out", 2, 0, 1),
    ),
    "retrofitted": Kind(
        RetrofittedAdapter,
        retrofitted.tiny,
        lambda model, tokens, n_loops, start: huginn.native(model, tokens, n_loops, start=start),
        ("transformer.core_block.1.attn.proj", "hook_attn_out", 1, 0, 1),
    ),
    "hrm_text": Kind(
        HRMTextAdapter,
        lambda: hrm_text.tiny(L_cycles=2),
        _plain(hrm_text),
        ("model.H_module.layers.0.self_attn.o_proj", "hook_attn_out", -2, 0, 1),
    ),
    "hrm": Kind(
        HRMAdapter,
        hrm.tiny,
        _plain(hrm),
        ("inner.H_level.layers.1.self_attn.o_proj", "hook_attn_out", -1, 0, 1),
        "hook_halt",
    ),
    "trm": Kind(
        TRMAdapter,
        trm.tiny,
        _plain(trm),
        ("inner.L_level.layers.0.mlp.down_proj", "hook_mlp_out", 2, 1, 3),
        "hook_halt",
    ),
    "albert": Kind(
        AlbertAdapter,
        albert.tiny,
        _plain(albert),
        (f"albert.{_GROUP}.0.attention.dense", "hook_attn_out", 0, 0, 1),
    ),
    "albert-groups": Kind(
        AlbertAdapter,
        lambda: albert.tiny(num_hidden_groups=2, inner_group_num=2),
        _plain(albert),
        (f"albert.{_GROUP}.1.ffn_output", "hook_mlp_out", 1, 0, 1),
        runs=2,
    ),
    "albert-states": Kind(
        AlbertAdapter,
        lambda: albert.tiny(head=False, inner_group_num=2),
        _plain(albert),
        (f"{_GROUP}.1.attention.dense", "hook_attn_out", 1, 0, 1),
    ),
}


@cache
def adapted(name: str) -> PublishedModel:
    """The adapter of a tiny model, shared by tests that change nothing."""
    return adapt(KINDS[name].build())


def tokens_of(name: str, batch: int = 3, n_pos: int = 6, seed: int = 0) -> Tensor:
    """Random tokens."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(adapted(name).config.d_vocab, (batch, n_pos), generator=generator)


def native(name: str, tokens: Tensor, n_loops: int) -> Tensor:
    """The native forward, from the start that the adapter makes."""
    model = adapted(name)
    start = model.initial_state(model.embed(tokens))
    return KINDS[name].native(model.published, tokens, n_loops, start)


FAMILIES = [
    ("ouro", "nanbeige"),
    ("huginn", "retrofitted"),
    ("hrm", "trm"),
    ("hrm_text",),
    ("albert-groups", "albert", "albert-states"),
]
"""Adapters that differ in sizes and in which of a family's parts they have."""

every = pytest.mark.parametrize("name", [name for name in KINDS if name != "ouro-grouped"])
"""Every adapter, but for a second model of the same one."""
