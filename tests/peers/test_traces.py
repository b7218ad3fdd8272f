"""nnsight and nnterp trace an adapted model: what they see in loop t has our address of loop t."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.peers.asking import ask

pytestmark = [pytest.mark.peers, pytest.mark.slow]


@torch.no_grad()
def answer(folder: Path, tool: str) -> dict[str, Any]:
    """States after a layer in each loop, and the logits where loop 1 of it writes zeros."""
    model, inputs = traced_model(tool)
    options = {} if tool == "nnsight" else {"use_cache": False}
    if tool == "nnsight":
        from nnsight import NNsight  # type: ignore[import-not-found]

        traced = NNsight(model.published)
        layer = traced.model.layers[0]
    else:
        from nnterp import StandardizedTransformer  # type: ignore[import-not-found]
        from nnterp.rename_utils import RenameConfig  # type: ignore[import-not-found]

        traced = StandardizedTransformer(
            model.published,
            tokenizer=object(),
            rename_config=RenameConfig(layers_name="H_module.layers"),
            check_renaming=False,
        )
        layer = traced.layers[0]
    with traced.trace(inputs, **options) as tracer:
        states: Any = list().save()  # type: ignore  # noqa: C408 (the trace saves it)
        for _ in tracer.iter[0 : model.n_loops]:
            states.append(layer.output)
    with traced.trace(inputs, **options) as tracer:
        for _ in tracer.iter[1]:
            layer.output[:] = 0
        logits = traced.output.logits.save()
    return {"states": list(states), "logits": logits}


def traced_model(tool: str) -> tuple[Any, torch.Tensor]:
    """The zoo's Ouro; HRM-Text for nnterp, which takes models of transformers alone."""
    import loopinterp
    from loopinterp.adapters import adapt
    from tests.adapters.published import hrm_text

    if tool == "nnsight":
        model = loopinterp.load_pretrained("ouro-small")
        return model, model.task.sample(4, batch_size=2, seed=0).inputs
    tokens = torch.randint(64, (2, 6), generator=torch.Generator().manual_seed(0))
    return adapt(hrm_text.tiny()), tokens


@torch.no_grad()
@pytest.mark.parametrize(
    ("tool", "environment", "layer"), [("nnsight", "current", 0), ("nnterp", "nnterp", 6)]
)
def test_traced_states_are_those_of_our_addresses(
    tool: str, environment: str, layer: int, tmp_path: Path
) -> None:
    seen = ask(environment, __name__, tmp_path, tool)
    model, inputs = traced_model(tool)
    logits, cache = model.run_with_cache(inputs)
    name = "loops.{}.blocks.{}.hook_resid_post"
    assert len(seen["states"]) == model.n_loops > 1
    for loop, state in enumerate(seen["states"]):
        expected = cache[name.format(loop, layer)]
        torch.testing.assert_close(state, expected, atol=1e-5, rtol=0)
    hook = (name.format(1, layer), lambda h, hook: torch.zeros_like(h))
    changed = model.run_with_hooks(inputs, fwd_hooks=[hook])
    torch.testing.assert_close(seen["logits"], changed, atol=1e-4, rtol=0)
    assert (changed - logits).abs().max() > 0.1
