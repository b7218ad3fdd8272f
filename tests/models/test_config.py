"""The configuration refuses what makes no sense, and says how to mend it."""

from __future__ import annotations

from typing import Any

import pytest

from loopinterp.core.errors import ConfigError
from loopinterp.models import LoopedTransformerConfig
from tests.models.variants import VARIANTS

BASE: dict[str, Any] = {"d_model": 16, "n_heads": 2, "d_vocab": 6, "d_vocab_out": 3}


@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_survives_a_round_trip_through_its_dict(name: str) -> None:
    config = LoopedTransformerConfig(**{**BASE, **VARIANTS[name]})
    assert LoopedTransformerConfig.from_dict(config.to_dict()) == config


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"d_vocab": None}, "^d_vocab:"),
        ({"d_features": 2}, "^d_vocab:"),
        ({"n_heads": 3}, "^n_heads: .*d_model=16"),
        ({"n_heads": 0}, "^n_heads: .*>= 1,"),
        ({"n_loops": 0}, r"^n_loops: .* 1\.\.100000,"),
        ({"n_layers": 1.5}, r"^n_layers: .* 1\.\.1000,"),
        ({"n_prelude": -1}, r"^n_prelude: .* 0\.\.1000,"),
        ({"d_mlp": 0}, "^d_mlp: .*>= 1 "),
        ({"norm_eps": 0.0}, "^norm_eps: .*> 0,"),
        ({"positions": "absolut"}, "^positions: .* 'absolute'"),
        ({"positions": "absolute"}, "Set n_ctx"),
        ({"positions": "relative"}, "Set relative_window"),
        ({"positions": "rotary", "d_head": 3}, "^d_head:"),
        ({"positions": "abacus", "n_ctx": 10}, "Set digit_tokens"),
        (
            {
                "positions": "abacus",
                "n_ctx": 9,
                "digit_tokens": (1,),
                "abacus_target": "qk",
                "d_head": 4,
            },
            "^abacus_target:",
        ),
        ({"n_ctx": 10}, "no effect"),
        ({"position_std": 1.0}, "no effect"),
        ({"relative_window": 1}, "no effect"),
        ({"injection_gate": 0.5}, "no effect"),
        ({"noise_seed": 3}, "no effect"),
        ({"rotary_base": 5.0}, "no effect"),
        ({"fire_threshold": 5.0}, "no effect"),
        ({"digit_tokens": (1, 2)}, "no effect"),
        ({"initial_state": "zeros"}, "^injection:"),
        ({"tie_unembed": True}, "^tie_unembed:"),
        ({"attention_window": -1}, "^attention_window: .*>= 0 "),
        ({"windowed_heads": 1}, "^windowed_heads:"),
        ({"windowed_heads": 0, "attention_window": 1}, "^windowed_heads: .*>= 1 "),
        ({"windowed_heads": 5, "attention_window": 1}, "^windowed_heads: .*n_heads=2"),
        ({"windowed_surround": False, "attention_window": 1}, "^windowed_surround:"),
        ({"windowed_surround": False, "n_prelude": 1}, "^windowed_surround:"),
        ({"causal": "yes"}, "^causal: .*'yes'"),
        ({"norm_eps": "small"}, "^norm_eps: .*'small'"),
        ({"init_std": True}, "^init_std: .*True"),
    ],
)
def test_bad_values_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LoopedTransformerConfig(**{**BASE, **changes})


def test_unknown_and_missing_settings_are_named() -> None:
    with pytest.raises(ConfigError, match="n_heads"):
        LoopedTransformerConfig.from_dict({**BASE, "n_head": 2})
    with pytest.raises(ConfigError, match=r"^d_vocab_out:"):
        LoopedTransformerConfig.from_dict({"d_model": 16, "n_heads": 2, "d_vocab": 6})


def test_replace_validates_again() -> None:
    with pytest.raises(ConfigError, match="Set n_ctx"):
        LoopedTransformerConfig(**BASE).replace(positions="absolute")


def test_layers_are_counted_over_loops() -> None:
    config = LoopedTransformerConfig(**BASE, n_layers=3, n_prelude=1, n_coda=2)
    assert config.layers_total(4) == 1 + 4 * 3 + 2
