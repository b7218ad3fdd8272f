"""What an adapter of a published model costs, against that model's own forward.

    python -m analyses.benchmarks.adapters
    python -m analyses.benchmarks.adapters --ouro PATH/modeling_ouro.py \\
        --huginn PATH/raven_modeling_minimal.py --hrm PATH/models/hrm/hrm_act_v1.py \\
        --trm PATH/models/recursive_reasoning/trm.py

HRM-Text is part of ``transformers``; of the others the file is a copy of your own, and is run. All
are random: tiny (about 1 million weights, 4 prompts of 32 tokens), and of some 100 million weights
(one prompt of 32 tokens). Four loops each; two slow cycles of HRM-Text, HRM and TRM.

Beside ours stands TransformerLens' bridge of the same model, where it has one, and with
``--peer-python``, the Python of an environment with nnsight and lazy-loader, nnsight on it.
It brings its own yardstick along, as in ``forward``.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from analyses.benchmarks.bridge_peer import bridge_residuals, published_bridge
from analyses.benchmarks.forward import nnsight
from analyses.benchmarks.published import BATCH, SIZES, random_model
from analyses.benchmarks.timing import compare, parser, settle, show
from analyses.published_code import KINDS
from loopinterp.adapters import adapt

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

PEERED = ("ouro", "huginn", "hrm_text")
"""Those that TransformerLens has a bridge for, and nnsight is tried on."""


def ways(kind: str, published: Any, tokens: Tensor) -> dict[str, Callable[[], Any]]:
    """Name -> one run: the model's own forward, ours, and where it can, TransformerLens' bridge."""
    model = adapt(published)
    n_loops, start = model.n_loops, model.initial_state(model.embed(tokens)).detach()
    state = {"state": start} if kind == "huginn" else {}
    cached = partial(model.run_with_cache, tokens, names_filter="hook_resid_post", **state)
    made = {
        "its own forward": partial(KINDS[kind].native, published, tokens, n_loops, start),
        "no hooks": partial(model, tokens, **state),
        "residuals of all (loop, layer)": cached,
    }
    if kind in PEERED:
        given = {"input_states": start, "num_steps": n_loops} if kind == "huginn" else {}
        made |= bridge_ways(
            published, tokens, given or {"use_cache": False}, [*cached()[1].values()]
        )
    expected = made["its own forward"]()
    for name in {"no hooks", "bridge, no hooks"} & made.keys():
        assert (made[name]() - expected).abs().max() < 1e-3, name
    return made


def bridge_ways(
    published: Any, tokens: Tensor, given: dict[str, Any], expected: list[Tensor]
) -> dict[str, Callable[[], Any]]:
    """The bridge without hooks, with its cache, and with a hook of one's own at every residual.

    Its cache keeps what each layer wrote last; the hook, written here, keeps all that is expected.
    """
    bridge, firings = published_bridge(published), len(expected)
    residuals = bridge_residuals(bridge)

    def by_hand() -> list[Tensor]:
        kept: list[Tensor] = []
        hooks: list[Any] = [(name, lambda at, hook: kept.append(at)) for name in residuals]
        bridge.run_with_hooks(tokens, fwd_hooks=hooks, **given)
        return kept

    torch.testing.assert_close(by_hand(), expected, atol=1e-3, rtol=1e-3)
    return {
        "bridge, no hooks": partial(bridge, tokens, **given),
        f"bridge, last loop cached ({len(residuals)} of {firings})": partial(
            bridge.run_with_cache, tokens, names_filter=residuals, **given
        ),
        f"bridge, hook by hand ({firings} of {firings})": by_hand,
    }


def main() -> None:
    made = parser(__doc__, rounds=10, device=True)
    made.add_argument("--ouro", type=Path, help="your own copy of modeling_ouro.py")
    made.add_argument("--huginn", type=Path, help="your own copy of raven_modeling_minimal.py")
    made.add_argument("--hrm", type=Path, help="your own copy of hrm_act_v1.py")
    made.add_argument("--trm", type=Path, help="your own copy of trm.py")
    made.add_argument("--sizes", nargs="+", default=list(BATCH), choices=list(BATCH))
    made.add_argument("--peer-python", type=Path, help="the Python that has nnsight")
    options = made.parse_args()
    settle(options)
    torch.set_grad_enabled(False)
    tables = {}
    for kind in SIZES:
        file = getattr(options, kind, None)
        if file is None and kind != "hrm_text":
            continue
        for size in options.sizes:
            published, tokens = random_model(kind, file, size, device=options.device)
            rows = compare(
                ways(kind, published, tokens),
                rounds=options.rounds,
                clock=options.clock,
                device=options.device,
            )
            if options.peer_python and kind in PEERED:
                told = ("--file", str(file)) if file else ()
                rows |= nnsight(options.peer_python, size, options, "--kind", kind, *told)
            weights = sum(weight.numel() for weight in published.parameters()) / 1e6
            tables[f"{kind}, {weights:.1f} million weights"] = rows
    target = {"no hooks": 1.05, "residuals of all (loop, layer)": 1.10}
    show(tables, targets=dict.fromkeys(tables, target), path=options.json)


if __name__ == "__main__":
    main()
