"""The components of a model of ours that have hooks, in the order they fire.

Each name stands beside the kind of tensor it holds
(see :meth:`loopinterp.models.site_map.SiteMap.axes`).
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from loopinterp.models.site_map import SiteMap, norm_sites

if TYPE_CHECKING:
    from loopinterp.models.model_config import LoopedTransformerConfig

FORKS = ("attn.hook_q_input", "attn.hook_k_input", "attn.hook_v_input")
"""Each head's own copy of the stream that queries, keys and values are made of."""

CODES = ("hook_code_pre", "hook_code")
"""What the bits of a state code are the signs of, and the bits."""

OPTIONAL_SITES = {
    "use_split_qkv_input": FORKS,
    "use_attn_result": ("attn.hook_result",),
    "use_hook_mlp_in": ("hook_mlp_in",),
}
"""Sites that are there only while a flag of TransformerLens is on."""


@lru_cache(maxsize=256)
def site_map_of(config: LoopedTransformerConfig, flags: frozenset[str] = frozenset()) -> SiteMap:
    """The sites of a model of ours, with those of the flags of TransformerLens that are on."""
    layer = layer_sites(config, flags)
    (opening, closing), (embedding, final) = loop_sites(config), top_sites(config)
    return SiteMap(
        d_model=config.d_model,
        n_heads=config.n_heads,
        d_head=config.head_width,
        d_mlp=config.mlp_width,
        embedding=embedding,
        prelude=(layer,) * config.n_prelude,
        opening=opening,
        block=(layer,) * config.n_layers,
        closing=closing,
        coda=(layer,) * config.n_coda,
        final=final,
        optional=OPTIONAL_SITES,
        more_axes={} if config.state_code is None else {"code": ("pos", config.state_code)},
    )


def layer_sites(
    config: LoopedTransformerConfig, flags: frozenset[str] = frozenset()
) -> dict[str, str]:
    """Component names of one layer, in the order they fire, with the kind of tensor each holds."""
    before = config.norm in ("pre", "sandwich", "gated")
    sandwich, after = config.norm == "sandwich", config.norm == "post"
    gate = ["residual"] if config.norm == "gated" else []
    projections = ["q", "k", "v", *(["rot_q", "rot_k"] if config.positions == "rotary" else [])]
    sites = {
        "hook_resid_pre": "residual",
        **dict.fromkeys(FORKS, "fork"),
        **norm_sites("ln1", present=before),
        **{f"attn.hook_{name}": "head" for name in projections},
        "attn.hook_attn_scores": "pattern",
        "attn.hook_pattern": "pattern",
        "attn.hook_z": "head",
        "attn.hook_result": "fork",
        **norm_sites("ln1_post", present=sandwich),
        **dict(zip(["hook_attn_gate"], gate)),
        "hook_attn_out": "residual",
        **norm_sites("ln1", present=after),
        "hook_resid_mid": "residual",
        "hook_mlp_in": "residual",
        **norm_sites("ln2", present=before),
        "mlp.hook_pre": "neuron",
        "mlp.hook_post": "neuron",
        **norm_sites("ln2_post", present=sandwich),
        **dict(zip(["hook_mlp_gate"], gate)),
        "hook_mlp_out": "residual",
        **norm_sites("ln2", present=after),
        "hook_resid_post": "residual",
    }
    absent = {site for flag, names in OPTIONAL_SITES.items() if flag not in flags for site in names}
    return {name: kind for name, kind in sites.items() if name not in absent}


def loop_sites(config: LoopedTransformerConfig) -> tuple[dict[str, str], dict[str, str]]:
    """What happens once per loop, before its layers and after them."""
    injected = {} if config.injection == "none" else {"hook_injection": "residual"}
    after = config.injection == "gated_output"
    return {"hook_state_pre": "residual", **({} if after else injected)}, {
        **(injected if after else {}),
        **norm_sites("ln_loop", present=config.loop_norm),
        **({} if config.state_code is None else dict.fromkeys(CODES, "code")),
        "hook_state_post": "residual",
    }


def top_sites(config: LoopedTransformerConfig) -> tuple[dict[str, str], dict[str, str]]:
    """What happens once per run, before the first layer and after the last."""
    added = config.positions == "absolute" or (
        config.positions == "abacus" and config.abacus_target == "input"
    )
    embedding = {"hook_embed": "residual", **({"hook_pos_embed": "residual"} if added else {})}
    return embedding, norm_sites("ln_final", present=config.final_norm)
