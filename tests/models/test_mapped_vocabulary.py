"""A model behind a task's vocabulary is the model, asked in its own words."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from loopinterp.errors import InputError
from loopinterp.models import (
    LoopedTransformer,
    LoopedTransformerConfig,
    LoopRule,
    WithVocabulary,
    bind,
    describe_model,
    device_of,
    iterate,
    reach,
)
from loopinterp.models.run_length import own_depth
from tests.models.looped_toys import Halving

CONFIG = LoopedTransformerConfig(
    d_model=8,
    n_heads=2,
    d_vocab=50,
    d_vocab_out=50,
    positions="abacus",
    n_ctx=60,
    abacus_target="qk",
    abacus_max_offset=0,
    digit_tokens=tuple(range(10)),
)
TOKENS, ANSWERS = [40, 41, 3, 7], [41, 40]
INPUTS = torch.tensor([[2, 0, 1, 3], [3, 3, 1, 0]])


def test_it_reads_and_answers_as_the_model_does_in_its_own_tokens() -> None:
    model = LoopedTransformer(CONFIG)
    mapped = WithVocabulary(model, tokens=TOKENS, answers=ANSWERS)
    own = torch.tensor(TOKENS)[INPUTS]
    for (_, theirs), (_, ours) in zip(iterate(model, own, 2), iterate(mapped, INPUTS, 2)):
        assert torch.equal(theirs, ours)
        assert torch.equal(model.readout(theirs)[..., [41, 40]], bind(mapped, INPUTS).readout(ours))
        assert torch.equal(mapped.readout(ours), model.readout(ours)[..., [41, 40]])


def test_what_the_model_says_of_itself_is_passed_on() -> None:
    windowed = LoopedTransformerConfig(
        d_model=8, n_heads=2, d_vocab=50, d_vocab_out=50, attention_window=2
    )
    assert reach(WithVocabulary(LoopedTransformer(windowed))) == 2
    assert WithVocabulary(LoopedTransformer(CONFIG)).n_ctx == 60
    assert next(WithVocabulary(LoopedTransformer(CONFIG)).parameters(), None) is not None
    once = LoopedTransformer(windowed)
    once.loop_rule = LoopRule(1)
    assert own_depth(WithVocabulary(once)) == 1 and own_depth(WithVocabulary(Halving())) is None


def test_its_sizes_are_those_of_the_task() -> None:
    def sizes(model: WithVocabulary) -> tuple[int | None, ...]:
        return model.d_vocab, model.d_features, model.d_vocab_out

    model = LoopedTransformer(CONFIG)
    assert sizes(WithVocabulary(model)) == (50, None, 50)
    assert sizes(WithVocabulary(model, tokens=TOKENS, answers=ANSWERS)) == (4, None, 2)
    assert sizes(WithVocabulary(Halving())) == (None, None, None)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int32])
def test_tokens_of_any_integer_type_are_the_same_tokens(dtype: torch.dtype) -> None:
    mapped = WithVocabulary(LoopedTransformer(CONFIG), tokens=TOKENS)
    assert torch.equal(mapped.embed(INPUTS.to(dtype)), mapped.embed(INPUTS))


@pytest.mark.usefixtures("no_type_checks")
@pytest.mark.parametrize(
    ("wrong", "message"),
    [(-INPUTS, "tokens from 0 to 3, got tokens from -3"), (INPUTS + 0.5, "integers")],
)
def test_what_is_no_token_of_the_task_is_refused(wrong: torch.Tensor, message: str) -> None:
    with pytest.raises(InputError, match=message):
        bind(WithVocabulary(LoopedTransformer(CONFIG), tokens=TOKENS), wrong)


def test_it_lies_where_the_model_does() -> None:
    mapped = WithVocabulary(LoopedTransformer(CONFIG).to("meta"), tokens=TOKENS)
    assert mapped.tokens is not None and mapped.tokens.device == torch.device("meta")
    toy = Halving()
    toy.device = torch.device("meta")  # type: ignore[attr-defined]
    assert device_of(WithVocabulary(toy)) == torch.device("meta")


def test_another_vocabulary_is_another_model() -> None:
    model = LoopedTransformer(CONFIG)
    descriptions = [describe_model(WithVocabulary(model, tokens=t)) for t in (TOKENS, TOKENS[::-1])]
    assert descriptions[0] != descriptions[1]


class Around(torch.nn.Module):
    """Somebody's wrapper."""

    def __init__(self, net: LoopedTransformer) -> None:
        super().__init__()
        self.net = net
        self.embed, self.initial_state = net.embed, net.initial_state
        self.step, self.readout = net.step, net.readout


@pytest.mark.parametrize("wrap", [lambda m: m, WithVocabulary, Around])
def test_what_is_wrapped_is_described_with_its_configuration_and_its_loops(wrap: Any) -> None:
    config = LoopedTransformerConfig(d_model=8, n_heads=2, d_vocab=6, d_vocab_out=6)
    models = [LoopedTransformer(config.replace(attention_window=w)) for w in (None, 1)]
    for rule in (LoopRule(2), LoopRule(9), LoopRule(9, of_length=lambda n: n)):
        models.append(LoopedTransformer(config))
        models[-1].loop_rule = rule
    descriptions: list[Any] = [describe_model(wrap(model)) for model in models]
    assert len({each["weights_sha256"] for each in descriptions}) == 1
    assert all(one != other for k, one in enumerate(descriptions) for other in descriptions[:k])
    assert json.loads(json.dumps(descriptions)) == descriptions


@pytest.mark.usefixtures("no_type_checks")
@pytest.mark.parametrize("name", ["tokens", "answers"])
@pytest.mark.parametrize(
    "wrong",
    [[0.5], [-1, 0], [[1, 2]], [None], [[1], [2, 3]], "abc", [], torch.empty(0).long(), 3, [2**70]],
)
def test_what_is_no_map_is_refused(wrong: Any, name: str) -> None:
    with pytest.raises(InputError, match=f"{name}: expected a list of . or more"):
        WithVocabulary(LoopedTransformer(CONFIG), **{name: wrong})


def test_one_answer_is_no_choice() -> None:
    with pytest.raises(InputError, match=r"answers: expected a list of 2 or more .* got \[3\]"):
        WithVocabulary(LoopedTransformer(CONFIG), answers=[3])


class Letters:
    """An embedding of 16 characters, and 16 outputs, which say nothing of how many they are."""

    def __init__(self) -> None:
        self.letters = torch.nn.Embedding(16, 16)

    def embed(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.letters(inputs)

    def initial_state(self, e: torch.Tensor) -> torch.Tensor:
        return e

    def step(self, h: torch.Tensor, e: torch.Tensor) -> torch.Tensor:
        return h + e

    def readout(self, h: torch.Tensor) -> torch.Tensor:
        return h


def test_a_map_to_what_the_model_has_not_is_named() -> None:
    for mapped in (
        WithVocabulary(Letters(), tokens=[1, 2, 3, 16]),
        WithVocabulary(LoopedTransformer(CONFIG), tokens=[1, 2, 3, 50]),
    ):
        for run in (bind, lambda model, x: model.embed(x)):
            with pytest.raises(InputError, match=r"tokens"):
                run(mapped, INPUTS)
    with pytest.raises(InputError, match=r"^tokens: .* own vocabulary, got \[1, 2, 3, 16\]"):
        bind(WithVocabulary(Letters(), tokens=[1, 2, 3, 16]), INPUTS)
    with pytest.raises(InputError, match=r"^tokens: .* got the task's as they are"):
        bind(WithVocabulary(Letters()), INPUTS + 16)
    mapped = WithVocabulary(Letters(), answers=[0, 16])
    bound = bind(mapped, INPUTS)
    for read in (bound.readout, mapped.readout):
        with pytest.raises(InputError, match=r"answers: .* from 0 to 15, got \[0, 16\]"):
            read(bound.h0)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32])
def test_tokens_that_are_not_mapped_are_read_in_any_integer_type(dtype: torch.dtype) -> None:
    mapped = WithVocabulary(Letters(), answers=[0, 1])
    assert torch.equal(bind(mapped, INPUTS.to(dtype)).h0, bind(mapped, INPUTS).h0)
