"""ALBERT at random initialisation: the modules of ``transformers`` themselves, tiny."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AlbertConfig, AlbertForMaskedLM, AlbertModel


def tiny(seed: int = 0, *, head: bool = True, **settings: Any) -> Any:
    """A random one; no norm or bias is at its neutral initial value, and no embedding is zero."""
    sizes: dict[str, Any] = {
        "vocab_size": 64,
        "embedding_size": 24,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "max_position_embeddings": 16,
        **settings,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = AlbertConfig(**sizes)
        model = AlbertForMaskedLM(config) if head else AlbertModel(config, add_pooling_layer=False)
        for name, weight in model.named_parameters():
            if weight.dim() == 1:
                norm = "norm.weight" in name.lower()
                nn.init.normal_(weight, mean=float(norm), std=0.2 if norm else 0.1)
            else:
                # Heads write little, so that positions stay apart.
                size = 0.4 if "dense" in name else 1.0
                std = 0.3 if "embeddings" in name else size * weight.shape[1] ** -0.5
                nn.init.normal_(weight, std=std)
    return model.eval()


def looped(model: Any, e: Tensor, n_loops: int) -> Tensor:
    """The state after so many loops of the published layers, from the projected embedding."""
    encoder = model.encoder
    groups, own = encoder.albert_layer_groups, encoder.config.num_hidden_layers
    for t in range(n_loops):
        e = groups[min(int(t / (own / len(groups))), len(groups) - 1)](e)
    return e


def native(model: Any, tokens: Tensor, n_loops: int) -> Tensor:
    """Logits of the published modules after so many loops; the state where there is no head."""
    inner = getattr(model, "albert", model)
    h = looped(inner, inner.encoder.embedding_hidden_mapping_in(inner.embeddings(tokens)), n_loops)
    return model.predictions(h) if hasattr(model, "predictions") else h
