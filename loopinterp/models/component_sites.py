"""The components that have hooks: of a layer, of a loop, of a run; in the order they fire.

Each name stands beside the kind of tensor it holds (see :class:`~loopinterp.models.sites.Address`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from loopinterp.models.model_config import LoopedTransformerConfig

FORKS = ("attn.hook_q_input", "attn.hook_k_input", "attn.hook_v_input")
"""Each head's own copy of the stream that queries, keys and values are made of."""

OPTIONAL_SITES = {
    "use_split_qkv_input": FORKS,
    "use_attn_result": ("attn.hook_result",),
    "use_hook_mlp_in": ("hook_mlp_in",),
}
"""Sites that are there only while a flag of TransformerLens is on."""


def _norm_sites(name: str, *, present: bool = True) -> dict[str, str]:
    return {f"{name}.hook_scale": "scale", f"{name}.hook_normalized": "residual"} if present else {}


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
        **_norm_sites("ln1", present=before),
        **{f"attn.hook_{name}": "head" for name in projections},
        "attn.hook_attn_scores": "pattern",
        "attn.hook_pattern": "pattern",
        "attn.hook_z": "head",
        "attn.hook_result": "fork",
        **_norm_sites("ln1_post", present=sandwich),
        **dict(zip(["hook_attn_gate"], gate)),
        "hook_attn_out": "residual",
        **_norm_sites("ln1", present=after),
        "hook_resid_mid": "residual",
        "hook_mlp_in": "residual",
        **_norm_sites("ln2", present=before),
        "mlp.hook_pre": "neuron",
        "mlp.hook_post": "neuron",
        **_norm_sites("ln2_post", present=sandwich),
        **dict(zip(["hook_mlp_gate"], gate)),
        "hook_mlp_out": "residual",
        **_norm_sites("ln2", present=after),
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
        **_norm_sites("ln_loop", present=config.loop_norm),
        "hook_state_post": "residual",
    }


def top_sites(config: LoopedTransformerConfig) -> tuple[dict[str, str], dict[str, str]]:
    """What happens once per run, before the first layer and after the last."""
    added = config.positions == "absolute" or (
        config.positions == "abacus" and config.abacus_target == "input"
    )
    embedding = {"hook_embed": "residual", **({"hook_pos_embed": "residual"} if added else {})}
    return embedding, _norm_sites("ln_final", present=config.final_norm)
