"""Greedy decoding with a cache equals running the whole again, one example at a time."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from loopinterp.core.errors import InputError
from loopinterp.models import LoopedTransformer, WithVocabulary, decoding, greedy_decode
from tests.models.variants import VARIANTS, build
from tests.refusals import naming

CAUSAL = [name for name in VARIANTS if name not in ("no norm, both ways", "features")]


MORE: dict[str, dict[str, Any]] = {
    "no norm": {"norm": "none", "final_norm": False},
    "window and fire": {"attention_window": 2, "positions": "fire", "fire_threshold": 3.0},
    "mixed windows, relative": {
        "attention_window": 1,
        "windowed_heads": 1,
        "positions": "relative",
        "relative_window": 3,
    },
    "zeros, surround, abacus": {
        "positions": "abacus",
        "abacus_target": "qk",
        "digit_tokens": (0, 1, 2, 3),
        "n_ctx": 30,
        "n_prelude": 2,
        "n_coda": 1,
        "injection": "sublayer",
        "initial_state": "zeros",
        "norm": "sandwich",
        "loop_norm": True,
    },
}


PROMPTS = [[1, 2, 4, 0, 3], [5], [4, 4, 1], [0, 1, 2, 3, 4, 5, 1]]


def decoder(name: str, *, seed: int = 1, std: float = 0.4, **changes: Any) -> LoopedTransformer:
    """A model whose answers depend on all that it reads."""
    changes = {"d_vocab_out": 6, **MORE.get(name, {}), **changes}
    changes |= {"n_ctx": 60} if "abacus" in name else {}
    model = build("plain" if name in MORE else name, **changes).double()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            weight += std * torch.randn(weight.shape, generator=generator, dtype=weight.dtype)
    return model


@torch.no_grad()
def by_hand(model: Any, prompt: list[int], n_loops: int, n_new: int, **options: Any) -> list[int]:
    """One example, the whole again for each token, until the token that stops it."""
    stop, tokens = options.pop("stop_token", None), list(prompt)
    while len(tokens) < len(prompt) + n_new and (tokens == prompt or tokens[-1] != stop):
        logits = model(torch.tensor([tokens]), n_loops=n_loops, **options)
        tokens.append(int(logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def filled(answers: list[list[int]], stop: int = -1) -> Tensor:
    longest = max(map(len, answers))
    return torch.tensor([one + [stop] * (longest - len(one)) for one in answers])


@pytest.mark.parametrize("name", [*CAUSAL, *MORE])
def test_token_by_token_it_is_running_the_whole_again(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logits too: a token may be the same by luck."""
    model, seen = decoder(name), []
    logits = decoding._Cached.logits

    def spy(self: Any, *args: Any) -> Tensor:
        seen.append(logits(self, *args))
        return seen[-1]

    monkeypatch.setattr(decoding._Cached, "logits", spy)
    options: dict[str, Any] = {"n_loops": 3, "max_new_tokens": 8}
    new = greedy_decode(model, PROMPTS, **options)
    assert len(seen) == 8 and new.shape == (4, 8)
    for row, prompt in enumerate(PROMPTS):
        tokens = torch.tensor([prompt + new[row].tolist()])
        for k, cached_logits in enumerate(seen):
            full_logits = model(tokens[:, : len(prompt) + k], n_loops=3)[0, -1]
            torch.testing.assert_close(cached_logits[row], full_logits, atol=1e-9, rtol=1e-9)
            assert new[row, k] == full_logits.argmax()
    assert torch.equal(greedy_decode(model, PROMPTS, use_cache=False, **options), new)
    assert len(seen) == 8


def test_a_long_prompt_within_a_window_goes_on() -> None:
    model = decoder("demo")
    prompt = torch.randint(6, (90,), generator=torch.Generator().manual_seed(0)).tolist()
    assert (
        model.input_context(torch.tensor([prompt]), 0).window == 1
    )  # block by block, in a plain run
    answer = greedy_decode(model, [prompt], n_loops=3, max_new_tokens=5)
    assert answer[0].tolist() == by_hand(model, prompt, 3, 5)


@settings(deadline=None, max_examples=25)
@given(
    st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=6), min_size=1, max_size=5),
    st.integers(1, 9),
    st.integers(0, 5),
    st.integers(0, 3),
)
def test_examples_stop_by_themselves(
    prompts: list[list[int]], n_new: int, stop: int, seed: int
) -> None:
    model = decoder("abacus on q and k", seed=seed)
    new = greedy_decode(model, prompts, n_loops=2, max_new_tokens=n_new, stop_token=stop)
    answers = [by_hand(model, prompt, 2, n_new, stop_token=stop) for prompt in prompts]
    assert new.tolist() == filled(answers, stop).tolist()


@pytest.mark.parametrize("use_cache", [True, False])
def test_an_answer_that_is_no_number_is_no_token(use_cache: bool) -> None:
    model = build("plain")
    with torch.no_grad():
        model.unembedding.weight[1] = torch.nan
    with pytest.raises(InputError) as refused:
        greedy_decode(model, [[1, 2], [3]], n_loops=2, max_new_tokens=2, use_cache=use_cache)
    assert refused.value.what.startswith("logits")


@pytest.mark.parametrize("name", ["sandwich rotary", "surround", "post rms"])
def test_each_example_has_its_own_loops(name: str) -> None:
    model, loops = decoder(name), [4, 1, 6, 2]
    answers = [by_hand(model, prompt, n, 8) for prompt, n in zip(PROMPTS, loops)]
    for use_cache in (True, False):
        options: dict[str, Any] = {"max_new_tokens": 8, "use_cache": use_cache}
        new = greedy_decode(model, PROMPTS, n_loops=torch.tensor(loops), **options)
        assert new.tolist() == answers


@pytest.mark.parametrize("name", ["abacus on q and k", "abacus on input"])
def test_each_example_has_its_own_offset(name: str) -> None:
    model, offsets = decoder(name, injection="sublayer", std=0.8, seed=5), [0, 9, 3, 20]
    answers = [by_hand(model, p, 3, 8, position_offset=k) for p, k in zip(PROMPTS, offsets)]
    new = greedy_decode(
        model, PROMPTS, n_loops=3, max_new_tokens=8, position_offset=torch.tensor(offsets)
    )
    assert new.tolist() == answers
    same = greedy_decode(model, PROMPTS, n_loops=3, max_new_tokens=8, position_offset=9)
    assert same[1].tolist() == answers[1] and same.tolist() != answers


def test_padding_after_a_prompt_changes_nothing() -> None:
    model = decoder("abacus on input")
    options: dict[str, Any] = {"n_loops": 3, "max_new_tokens": 5}
    expected = greedy_decode(model, PROMPTS, **options)
    lengths = torch.tensor([len(prompt) for prompt in PROMPTS])
    for padding in (1, 5):  # a digit, and none
        padded = torch.tensor([prompt + [padding] * (11 - len(prompt)) for prompt in PROMPTS])
        for dtype in (torch.uint8, torch.int64):
            answers = greedy_decode(model, padded.to(dtype), lengths=lengths, **options)
            assert torch.equal(answers, expected)
        assert padded[1].tolist() == [5] + [padding] * 10  # prompts are unchanged


def test_digits_that_nobody_has_said_do_not_run_out_of_positions() -> None:
    model = build("abacus on input", d_vocab_out=6, digit_tokens=(0, 1, 2), n_ctx=9)
    prompts = [[5] * 20, [5]]
    with torch.no_grad():
        model.unembedding.weight.zero_()
        model.unembedding.bias[5] = 1
    assert (greedy_decode(model, prompts, n_loops=1, max_new_tokens=3) == 5).all()
    with torch.no_grad():
        model.unembedding.bias[1] = 2
    with naming("abacus positions") as caught:
        greedy_decode(model, prompts, n_loops=1, max_new_tokens=20)
    assert "n_ctx=9" in caught.value.expected


def test_a_noise_start_is_that_of_the_prompt_with_all_new_tokens() -> None:
    model = decoder("post rms", d_model=18, n_heads=3)
    start = model.initial_state(torch.empty(1, 9, 18, dtype=torch.float64))
    tokens = [3, 1, 4]
    while len(tokens) < 9:
        state = start[:, : len(tokens)]
        logits = model(torch.tensor([tokens]), n_loops=2, state=state)
        tokens.append(int(logits[0, -1].argmax()))
    assert greedy_decode(model, [[3, 1, 4]], n_loops=2, max_new_tokens=6).tolist() == [tokens[3:]]


def test_hooks_are_fired_on_the_whole() -> None:
    model, shapes = decoder("demo"), []

    def shift(h: Tensor, hook: object) -> Tensor:
        shapes.append(tuple(h.shape[:2]))
        return h.roll(1, -1)

    without = greedy_decode(model, PROMPTS[:1], n_loops=2, max_new_tokens=6)
    with model.hooks(fwd_hooks=[("loops.0.hook_state_post", shift)]):
        answers = greedy_decode(model, PROMPTS[:1], n_loops=2, max_new_tokens=6)
        expected = by_hand(model, PROMPTS[0], 2, 6)
    assert answers[0].tolist() == expected and not torch.equal(answers, without)
    assert shapes[:6] == [(1, 5 + k) for k in range(6)]


def test_other_models_are_run_on_the_whole_again() -> None:
    inside = decoder("demo")
    model = WithVocabulary(inside)
    for n_loops in (3, torch.tensor([3, 1, 2, 3])):
        options: dict[str, Any] = {"n_loops": n_loops, "max_new_tokens": 6, "stop_token": 2}
        answers = greedy_decode(model, PROMPTS, **options)
        assert torch.equal(answers, greedy_decode(inside, PROMPTS, **options))


def test_a_counting_model_counts() -> None:
    """Plain Python knows the answer: the next token is the last plus the loops, modulo 7."""
    one_hot = torch.eye(7)
    model = SimpleNamespace(
        embed=lambda tokens: one_hot[tokens],
        initial_state=lambda e: e,
        step=lambda h, e: h.roll(1, -1),
        readout=lambda h: h,
    )
    answers = greedy_decode(model, [[3], [1, 6]], n_loops=2, max_new_tokens=4, stop_token=1)
    assert answers.tolist() == [[5, 0, 2, 4], [1, 1, 1, 1]]
    assert greedy_decode(model, [[6, 6]], n_loops=2, max_new_tokens=9, stop_token=1).tolist() == [
        [1]
    ]


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("no norm, both ways", {"d_vocab_out": 6}, "causal attention"),
        ("features", {}, "^d_vocab_out"),
        ("plain", {"d_vocab_out": 7}, "^d_vocab_out.*7"),
        ("surround", {"n_ctx": 8}, "^prompt and new tokens: .*n_ctx=8"),
    ],
)
def test_models_that_cannot_go_on_are_refused(
    name: str, changes: dict[str, Any], message: str
) -> None:
    model = build(name, **changes)
    for wrapped in (model, WithVocabulary(model)) if "causal" in message else (model,):
        with pytest.raises(InputError, match=message):
            greedy_decode(wrapped, [[1, 2, 3, 4, 5]], n_loops=2, max_new_tokens=5)
    if name == "surround":
        assert greedy_decode(model, [[1, 2, 3, 4, 5]], n_loops=2, max_new_tokens=4).shape == (1, 4)


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        ([], {}, "^inputs:"),
        ([[1], []], {}, "^inputs:"),
        ([[1], [6]], {}, "^inputs:"),
        ([[1]], {"lengths": torch.tensor([1])}, "^lengths:"),
        (torch.ones(2, 3, dtype=torch.long), {"lengths": torch.tensor([1, 4])}, "in 1..3"),
        (torch.ones(2, 3, dtype=torch.long), {"lengths": torch.tensor([0, 3])}, "got 0"),
        ([[1]], {"max_new_tokens": 0}, "max_new_tokens"),
        ([[1]], {"stop_token": 6}, "stop_token"),
        ([[1]], {"stop_token": -1}, "stop_token"),
        ([[1]], {"n_loops": 0}, "n_loops"),
        ([[1]], {"n_loops": torch.tensor([1, 2])}, "n_loops"),
        ([[1]], {"position_offset": 2}, "^position_offset:"),
    ],
)
def test_bad_input_is_refused(prompts: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        greedy_decode(decoder("plain"), prompts, **{"n_loops": 2, "max_new_tokens": 3, **options})


def test_what_is_no_prompt_is_refused() -> None:
    tokens = torch.ones(2, 3, dtype=torch.long)
    for prompts, lengths, text in (
        (tokens, torch.tensor([3]), "^lengths:"),
        ([[1], [2.0]], None, "^inputs:"),
        (tokens.float(), None, "^inputs:"),
    ):
        with pytest.raises(InputError, match=text):
            decoding._padded(prompts, lengths, tokens.device)
    other = WithVocabulary(decoder("plain"))
    with pytest.raises(InputError, match="position_offset"):
        greedy_decode(other, [[1]], n_loops=2, max_new_tokens=3, position_offset=2)
