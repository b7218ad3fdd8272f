"""A user's model in the four methods: the modules inside its step, at every loop."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from loopinterp import dynamics, interventions
from loopinterp.adapters import FourMethodAdapter, adapt
from loopinterp.core.errors import InputError
from loopinterp.models import LoopRule, WithVocabulary, bind, iterate
from loopinterp.tasks import Batch

VOCAB, WIDTH = 11, 8


class Gated(nn.Module):
    """A block whose output enters the state through a GRU gate."""

    def __init__(self, causal_reach: int | None = None) -> None:
        super().__init__()
        self.chars, self.out = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.mix = nn.TransformerEncoderLayer(WIDTH, 2, 12, dropout=0.0, batch_first=True)
        self.gate = nn.GRUCell(WIDTH, WIDTH)
        self.reach = causal_reach

    def embed(self, inputs: Tensor) -> Tensor:
        return self.chars(inputs)

    def initial_state(self, e: Tensor) -> Tensor:
        return torch.zeros_like(e)

    def step(self, h: Tensor, e: Tensor) -> Tensor:
        x = self.mix(h + e) if self.reach is None else h + e
        return self.gate(x.flatten(0, 1), h.flatten(0, 1)).view_as(h)

    def readout(self, h: Tensor) -> Tensor:
        return self.out(h)


class Timed(Gated):
    """A signal of the loop's index."""

    def step(self, h: Tensor, e: Tensor, loop: int = 0) -> Tensor:  # type: ignore[override]
        return super().step(h + 0.1 * loop, e)


def gated(kind: type[Gated] = Gated) -> Any:
    torch.manual_seed(0)
    model = kind().eval()
    for x in model.parameters():
        nn.init.normal_(x, std=0.7)
    return model


def tokens_of(batch: int = 3, n_pos: int = 5, seed: int = 0) -> Tensor:
    return torch.randint(VOCAB, (batch, n_pos), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("kind", [Gated, Timed])
def test_it_is_the_model_with_hooks(kind: type[Gated]) -> None:
    theirs, tokens = gated(kind), tokens_of(2, 7)
    model = adapt(theirs, inputs=tokens_of(), n_loops=4)
    assert isinstance(model, FourMethodAdapter)
    states = model(tokens, return_type="states")
    for bound in (iterate(theirs, tokens, 4), iterate(model, tokens, 4)):
        for loop, h in bound:
            assert torch.allclose(h, states[loop], atol=1e-6)
    assert torch.allclose(model(tokens), theirs.readout(states[-1]), atol=1e-6)
    assert {id(x) for x in model.parameters()} == {id(x) for x in theirs.parameters()}


def test_its_gate_and_its_layer_have_addresses() -> None:
    theirs, tokens = gated(), tokens_of(2, 7)
    model = adapt(theirs, inputs=tokens_of(), n_loops=3)
    _, cache = model.run_with_cache(tokens)
    assert cache["loops.2.blocks.0.hook_resid_post"].shape == (2, 7, WIDTH)
    assert cache.stack("mix.linear1.hook_out").shape == (3, 2, 7, 12)
    with torch.no_grad():
        e = theirs.embed(tokens)
        h = theirs.step(theirs.step(theirs.initial_state(e), e), e)
        expected = theirs.mix(h + e)
    assert torch.allclose(cache["loops.2.blocks.0.hook_resid_post"], expected, atol=1e-6)
    # The gate computes [batch * pos, width]; its output is the state.
    assert torch.equal(cache.stack("gate.hook_out"), cache.stack("hook_state_post"))


@pytest.mark.parametrize("loop", [0, 1, 2])
def test_a_change_at_one_loop_is_that_of_a_plain_hook_at_that_call(loop: int) -> None:
    theirs, tokens = gated(), tokens_of()
    model = adapt(theirs, inputs=tokens, n_loops=3)
    clean = model(tokens, return_type="states")
    for site, path in (
        ("blocks.0.hook_resid_post", "mix"),
        ("mix.norm1.hook_out", "mix.norm1"),
        ("gate.hook_out", "gate"),
    ):
        calls = 0

        def edit(module: Any, args: Any, output: Tensor) -> Tensor:
            nonlocal calls
            calls += 1
            return output * 2 if calls - 1 == loop else output

        handle = theirs.get_submodule(path).register_forward_hook(edit)
        *_, (_, expected) = iterate(theirs, tokens, 3)
        handle.remove()
        hooks = [(f"loops.{loop}.{site}", lambda x, hook: x * 2)]
        states = model.run_with_hooks(tokens, fwd_hooks=hooks, return_type="states")
        assert torch.allclose(states[-1], expected, atol=1e-5)
        same = [torch.equal(a, b) for a, b in zip(states, clean)]
        assert same == [True] * (loop + 1) + [False] * (3 - loop)


def test_its_declarations_stay() -> None:
    torch.manual_seed(0)
    theirs = Gated(causal_reach=0).eval()
    theirs.loop_rule, theirs.n_ctx = LoopRule(6, of_length=lambda n_pos: n_pos + 1), 9  # type: ignore[assignment]
    model = adapt(theirs, inputs=tokens_of())
    assert model.reach == 0 and model.config.n_ctx == 9 and model.n_loops == 6
    tokens = tokens_of(2, 4)
    assert torch.equal(model(tokens), model(tokens, n_loops=5))
    assert model.repeatable is False


def test_a_step_that_takes_the_loop_is_given_it() -> None:
    model = adapt(gated(Timed), inputs=tokens_of(), n_loops=3)
    bound = bind(model, tokens_of())
    assert bound.takes_loop
    assert not torch.allclose(bound.step(bound.h0, 0), bound.step(bound.h0, 5))


class Indifferent(Gated):
    """It takes the loop's index, and computes the same in every loop."""

    def step(self, h: Tensor, e: Tensor, loop: int) -> Tensor:  # type: ignore[override]
        return super().step(h, e)


def test_patches_inside_a_loop_do_not_depend_on_whether_a_step_takes_its_index() -> None:
    sweeps = []
    for kind in (Gated, Indifferent):
        model = adapt(gated(kind), inputs=tokens_of(), n_loops=3)
        sweeps.append(
            interventions.patching_sweep(
                model, tokens_of(2), tokens_of(2, seed=1), component="mix.linear1.hook_out"
            )
        )
    without, taking = (sweep.data["effect"].values for sweep in sweeps)
    assert (without == taking).all() and (without != 0).all()


def _metric(logits: Tensor) -> Tensor:
    return logits[..., 0].mean(-1)


def test_studies_run_on_it_within_a_vocabulary() -> None:
    theirs = WithVocabulary(gated(), tokens=[2, 3, 4])
    tokens = torch.tensor([[0, 1, 2, 1], [2, 1, 1, 0], [0, 0, 1, 2]])
    model = adapt(theirs, inputs=tokens, n_loops=4)
    each = torch.full((3,), 4)
    batch = Batch(tokens, model(tokens).argmax(-1), each, each)
    result = dynamics.convergence_study(model, batch, n_loops=12, limit_steps=4, n_spectral=0)
    assert result.data.sizes
    sweep = interventions.patching_sweep(
        model, tokens, (tokens + 1) % 3, n_loops=3, component="resid_post", metric=_metric
    )
    assert sweep.data["effect"].sizes["loop"] == 3


def test_what_breaks_the_rules_is_refused() -> None:
    with pytest.raises(InputError, match="n_loops"):
        adapt(gated(), inputs=tokens_of())

    class InPlace(Gated):
        def step(self, h: Tensor, e: Tensor) -> Tensor:
            h += e
            return h

    with pytest.raises(InputError, match="written into"):
        adapt(gated(InPlace), inputs=tokens_of(), n_loops=2)
    with pytest.raises(InputError, match="evaluation mode"):
        adapt(Dropping(), inputs=tokens_of(), n_loops=2)


class Dropping(Gated):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)
