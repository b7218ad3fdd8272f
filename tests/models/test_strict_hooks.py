"""Hooks that stay while the number of loops, and with it the numbers of the layers, changes."""

from __future__ import annotations

from typing import Any

import pytest

from loopinterp.errors import HookError
from loopinterp.models import WithVocabulary, bind, iterate
from tests.models.test_run_length import in_another_thread
from tests.models.variants import build, some_inputs


def test_hooks_stay_when_the_number_of_loops_changes() -> None:
    model = build("surround", n_loops=2)
    hits: list[str] = []
    model.add_hook("blocks.5.hook_resid_post", lambda a, hook: hits.append(hook.name))
    model(some_inputs(model))
    model(some_inputs(model), n_loops=4)
    # blocks.5 is the first coda layer of a run of 2 loops, and blocks.9 that of a run of 4.
    assert hits == ["blocks.5.hook_resid_post", "blocks.9.hook_resid_post"]


def test_a_hook_beyond_the_run_does_not_fall_on_the_coda() -> None:
    model = build("surround", n_loops=4)  # blocks.5 is a loop's layer here, and the coda of 2 loops
    hits: list[str] = []
    model.add_hook("blocks.5.hook_resid_post", lambda a, hook: hits.append(hook.name))
    model(some_inputs(model), n_loops=2)
    assert hits == []
    model(some_inputs(model))
    assert hits == ["blocks.5.hook_resid_post"]


def test_hooks_for_another_number_of_loops_leave_those_that_are_on() -> None:
    model = build("plain", n_loops=2)
    unrolled, x, outer, inner = model.unroll(3), some_inputs(model), [], []
    with model.hooks(fwd_hooks=[("blocks.1.hook_resid_post", lambda a, hook: outer.append(0))]):
        unrolled.run_with_hooks(
            x, fwd_hooks=[("blocks.2.hook_resid_post", lambda a, hook: inner.append(0))]
        )
        model(x, n_loops=3)
    assert (len(outer), len(inner)) == (2, 1)
    assert model.n_loops == 2 and unrolled.cfg.n_layers == 3


def test_a_model_with_hooks_is_not_stepped_past_them() -> None:
    model = build("demo", n_loops=3)
    x, twin = some_inputs(model), model.unroll(5)
    whole = list(iterate(model, x, 2))[-1][1]

    def refused() -> None:
        for other in (model, twin, WithVocabulary(model)):
            with pytest.raises(HookError, match=r"no hooks .*, got one on 'blocks\.1\.attn"):
                bind(other, x)

    with model.hooks([("loops.1.blocks.0.attn.hook_z", lambda z, hook: z * 0)]):
        refused()
        assert in_another_thread(lambda: bind(model, x).h0.shape) == (3, 7, 16)
        model(x)  # fires
    model.add_hook("loops.1.blocks.0.attn.hook_z", lambda z, hook: z * 0)
    refused()
    model.reset_hooks()
    assert (list(iterate(model, x, 2))[-1][1] == whole).all()


@pytest.mark.usefixtures("no_type_checks")
@pytest.mark.parametrize(
    "hooks",
    ["hook_embed", ["hook_embed"], [("hook_embed",)], [("hook_embed", 3)], lambda x, hook: x, [7]],
)
@pytest.mark.parametrize("way", ["fwd_hooks", "bwd_hooks"])
def test_hooks_that_are_no_pairs_are_refused(way: str, hooks: Any) -> None:
    model = build("plain")
    with pytest.raises(HookError) as refused:
        model.run_with_hooks(some_inputs(model), n_loops=2, **{way: hooks})
    assert refused.value.what == way
    with pytest.raises(HookError), model.hooks(**{way: hooks}):
        pass
