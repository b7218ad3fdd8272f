"""Generation with kept keys equals running the whole again, one example at a time."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from loopinterp.core.errors import HookError, InputError
from loopinterp.models import (
    AccelerationBelow,
    ConfidenceAbove,
    LengthLine,
    LoopedTransformer,
    MaxConfidence,
    Oracle,
    ReadoutKL,
    ResidualBelow,
    WithVocabulary,
    generate,
    generate_with_cache,
    generation,
    iterate,
    run_until,
    token_runs,
)
from loopinterp.models.protocol import LoopRule
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
        "abacus_target": "attention",
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


ONES = torch.ones(2, 3, dtype=torch.long)
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
    logits = token_runs.CachedRun.logits

    def spy(self: Any, *args: Any) -> Tensor:
        seen.append(logits(self, *args))
        return seen[-1]

    monkeypatch.setattr(token_runs.CachedRun, "logits", spy)
    options: dict[str, Any] = {"n_loops": 3, "max_new_tokens": 5}
    new = generate(model, PROMPTS, **options)
    assert len(seen) == 5 and new.shape == (4, 5)
    for row, prompt in enumerate(PROMPTS):
        tokens = torch.tensor([prompt + new[row].tolist()])
        for k, cached_logits in enumerate(seen):
            full_logits = model(tokens[:, : len(prompt) + k], n_loops=3)[0, -1]
            torch.testing.assert_close(cached_logits[row], full_logits, atol=1e-9, rtol=1e-9)
            assert new[row, k] == full_logits.argmax()
    assert torch.equal(generate(model, PROMPTS, use_cache=False, **options), new)
    assert len(seen) == 5


def test_a_long_prompt_within_a_window_goes_on() -> None:
    model = decoder("demo")
    prompt = torch.randint(6, (90,), generator=torch.Generator().manual_seed(0)).tolist()
    assert (
        model.input_context(torch.tensor([prompt]), 0).window == 1
    )  # block by block, in a plain run
    answer = generate(model, [prompt], n_loops=3, max_new_tokens=5)
    assert answer[0].tolist() == by_hand(model, prompt, 3, 5)


@settings(deadline=None, max_examples=12)
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
    new = generate(model, prompts, n_loops=2, max_new_tokens=n_new, stop_token=stop)
    answers = [by_hand(model, prompt, 2, n_new, stop_token=stop) for prompt in prompts]
    assert new.tolist() == filled(answers, stop).tolist()


@pytest.mark.parametrize("use_cache", [True, False])
def test_an_answer_that_is_no_number_is_no_token(use_cache: bool) -> None:
    model = build("plain")
    with torch.no_grad():
        model.unembedding.weight[1] = torch.nan
    with pytest.raises(InputError) as refused:
        generate(model, [[1, 2], [3]], n_loops=2, max_new_tokens=2, use_cache=use_cache)
    assert refused.value.what.startswith("logits")


@pytest.mark.parametrize("name", ["sandwich rotary", "surround", "post rms"])
def test_each_example_has_its_own_loops(name: str) -> None:
    model, loops = decoder(name), [4, 1, 6, 2]
    answers = [by_hand(model, prompt, n, 5) for prompt, n in zip(PROMPTS, loops)]
    for use_cache in (True, False):
        options: dict[str, Any] = {"max_new_tokens": 5, "use_cache": use_cache}
        new = generate(model, PROMPTS, n_loops=torch.tensor(loops), **options)
        assert new.tolist() == answers


@pytest.mark.parametrize("name", ["abacus on q and k", "abacus on input"])
def test_each_example_has_its_own_offset(name: str) -> None:
    model, offsets = decoder(name, injection="sublayer", std=0.8, seed=5), [0, 9, 3, 20]
    answers = [by_hand(model, p, 3, 5, position_offset=k) for p, k in zip(PROMPTS, offsets)]
    new = generate(
        model, PROMPTS, n_loops=3, max_new_tokens=5, position_offset=torch.tensor(offsets)
    )
    assert new.tolist() == answers
    same = generate(model, PROMPTS, n_loops=3, max_new_tokens=5, position_offset=9)
    assert same[1].tolist() == answers[1] and same.tolist() != answers


@pytest.mark.parametrize("use_cache", [True, False])
def test_loops_of_each_token_leave_the_offset_as_it_is(use_cache: bool) -> None:
    model, offset = decoder("abacus on input", injection="sublayer", std=0.8, seed=5), 9
    answers = [by_hand(model, p, 3, 5, position_offset=offset) for p in PROMPTS]
    new, _ = generation.generate_by_rule(
        model, PROMPTS, [3] * 5, n_loops=3, max_new_tokens=5, position_offset=offset,
        use_cache=use_cache,
    )  # fmt: skip
    assert new.tolist() == answers
    assert answers != [by_hand(model, p, 3, 5) for p in PROMPTS]


def padded_to(n: int, padding: int, *, left: bool) -> tuple[Tensor, Tensor]:
    """The prompts padded on one side, and their mask."""
    rows = [([padding] * (n - len(p)), p) for p in PROMPTS]
    masks = [([0] * len(pad), [1] * len(p)) for pad, p in rows]
    turn = 1 if left else -1
    return tuple(
        torch.tensor([[*pair[::turn][0], *pair[::turn][1]] for pair in x]) for x in (rows, masks)
    )  # type: ignore[return-value]


def test_padding_beside_a_prompt_changes_nothing() -> None:
    model = decoder("abacus on input")
    options: dict[str, Any] = {"n_loops": 3, "max_new_tokens": 5}
    expected = generate(model, PROMPTS, **options)
    for padding in (1, 5):  # a digit, and none
        for left in (False, True):
            padded, mask = padded_to(11, padding, left=left)
            before = padded.clone()
            for dtype in (torch.uint8, torch.int64):
                answers = generate(model, padded.to(dtype), attention_mask=mask, **options)
                assert torch.equal(answers, expected)
            assert torch.equal(padded, before)


def test_digits_that_nobody_has_said_do_not_run_out_of_positions() -> None:
    model = build("abacus on input", d_vocab_out=6, digit_tokens=(0, 1, 2), n_ctx=9)
    prompts = [[5] * 20, [5]]
    with torch.no_grad():
        model.unembedding.weight.zero_()
        model.unembedding.bias[5] = 1
    assert (generate(model, prompts, n_loops=1, max_new_tokens=3) == 5).all()
    with torch.no_grad():
        model.unembedding.bias[1] = 2
    with naming("abacus positions") as caught:
        generate(model, prompts, n_loops=1, max_new_tokens=20)
    assert "n_ctx=9" in caught.value.expected


def test_a_noise_start_is_that_of_the_prompt_with_all_new_tokens() -> None:
    model = decoder("post rms", d_model=18, n_heads=3)
    start = model.initial_state(torch.empty(1, 9, 18, dtype=torch.float64))
    tokens = [3, 1, 4]
    while len(tokens) < 9:
        state = start[:, : len(tokens)]
        logits = model(torch.tensor([tokens]), n_loops=2, state=state)
        tokens.append(int(logits[0, -1].argmax()))
    assert generate(model, [[3, 1, 4]], n_loops=2, max_new_tokens=6).tolist() == [tokens[3:]]


def double(x: Tensor, hook: object) -> Tensor:
    return 2 * x


def with_logits(model: Any, **options: Any) -> tuple[Tensor, Tensor]:
    """New tokens, and the logits behind them: a token may be the same by luck."""
    options = {"n_loops": 3, "max_new_tokens": 5, **options}
    tokens, cache = generate_with_cache(model, PROMPTS, names_filter="hook_state_post", **options)
    assert torch.equal(tokens, generate(model, PROMPTS, **options))
    assert cache.readout is not None and cache.readout.logits is not None
    return tokens, cache.readout.logits


@pytest.mark.parametrize("name", ["demo", "surround", "abacus on q and k", "sandwich rotary"])
def test_hooks_on_new_positions_are_those_of_the_whole(name: str) -> None:
    """A hook that changes each position alike gives the same where positions are run once."""
    model = decoder(name)
    hooks = [("loops.1.blocks.0.attn.hook_z", double), ("loops.0.hook_state_post", double)]
    tokens, logits = with_logits(model, fwd_hooks=hooks)
    whole = with_logits(model, fwd_hooks=hooks, use_cache=False)
    assert torch.equal(tokens, whole[0])
    torch.testing.assert_close(logits, whole[1], atol=1e-9, rtol=1e-9)
    with model.hooks(hooks, n_loops=3):
        torch.testing.assert_close(with_logits(model)[1], logits)
        assert tokens.tolist() == [by_hand(model, prompt, 3, 5) for prompt in PROMPTS]
    assert not torch.allclose(with_logits(model)[1][:, 0], logits[:, 0])


@pytest.mark.parametrize("use_cache", [True, False])
def test_hooks_see_the_prompt_and_then_each_new_position(use_cache: bool) -> None:
    shapes: list[tuple[int, ...]] = []
    look = [("loops.0.blocks.0.attn.hook_pattern", lambda x, hook: shapes.append((*x.shape,)))]
    options: dict[str, Any] = {"max_new_tokens": 3, "fwd_hooks": look, "use_cache": use_cache}
    generate(decoder("plain"), PROMPTS[:1], n_loops=2, **options)
    queries = [5, 1, 1] if use_cache else [5, 6, 7]
    assert [shape[-2:] for shape in shapes] == [*zip(queries, (5, 6, 7))]


@pytest.mark.parametrize(
    ("name", "number"),
    [("demo", 1), ("surround", 4), *(("abacus on input", number) for number in (0, 1, 4))],
)
def test_a_hook_of_one_new_token_changes_its_position_alone(name: str, number: int) -> None:
    model, site = decoder(name), "loops.1.hook_state_post"
    seen: list[tuple[int, ...]] = []

    def shift(x: Tensor, hook: object = None) -> Tensor:
        seen.append((*x.shape[:2],))
        return x + torch.linspace(-9, 9, x.shape[-1], dtype=x.dtype)

    hooks = [(f"tokens.{number}.{site}", shift)]
    tokens, logits = with_logits(model, fwd_hooks=hooks)
    assert seen == [(4, 1)] * 2  # once in each of the two runs
    whole = with_logits(model, fwd_hooks=hooks, use_cache=False)
    torch.testing.assert_close(whole[1], logits, atol=1e-9, rtol=1e-9)
    # By hand: each rerun changes the position before the new token, if it is there already.
    for row, prompt in enumerate(PROMPTS):
        place = len(prompt) - 1 + number

        def at_place(x: Tensor, hook: object, place: int = place) -> Tensor:
            if x.shape[1] > place:
                x[:, place] = shift(x[:, place : place + 1])[:, 0]
            return x

        with model.hooks([(site, at_place)], n_loops=3):
            assert by_hand(model, prompt, 3, 5) == tokens[row].tolist()
    plain = with_logits(model)[1]
    torch.testing.assert_close(plain[:, :number], logits[:, :number])
    assert not torch.allclose(plain[:, number], logits[:, number])


def test_a_hook_of_a_token_beyond_or_of_another_shape_is_refused() -> None:
    options: dict[str, Any] = {"n_loops": 2, "max_new_tokens": 3}
    for name, function in (
        ("tokens.3.loops.0.hook_state_post", double),
        ("tokens.1.loops.2.hook_state_post", double),
        ("tokens.1.loops.0.hook_state_post", lambda x, hook: x[:, 0]),
    ):
        with pytest.raises(HookError):
            generate(decoder("plain"), PROMPTS, fwd_hooks=[(name, function)], **options)
    other = WithVocabulary(decoder("plain"))
    with pytest.raises(InputError) as caught:
        generate(other, PROMPTS, fwd_hooks=[("loops.0.hook_state_post", double)], **options)
    assert caught.value.what == "fwd_hooks"


@pytest.mark.parametrize("name", ["demo", "surround", "abacus on q and k", "window and fire"])
@pytest.mark.parametrize("use_cache", [True, False])
def test_the_cache_of_a_generation_is_that_of_the_whole_sequence(
    name: str, use_cache: bool
) -> None:
    model = decoder(name)
    options: dict[str, Any] = {"n_loops": 3, "max_new_tokens": 4}
    new, cache = generate_with_cache(model, PROMPTS, use_cache=use_cache, **options)
    assert torch.equal(new, generate(model, PROMPTS, **options))
    assert cache.stack("resid_post").shape == (3, 4, 4, model.config.d_model)
    for row, prompt in enumerate(PROMPTS):
        tokens = torch.tensor([prompt + new[row].tolist()])
        start, n_keys = len(prompt) - 1, len(prompt) + 3
        whole = model.run_with_cache(tokens[:, :n_keys], n_loops=3)[1]
        assert set(cache) == set(whole)
        for address in model.addresses(3).addresses.values():
            if address.component == "attn.hook_attn_scores":
                continue  # of keys that were not there yet, which a mask bars as well
            theirs, ours = whole[address.name][0], cache[address.name][row]
            theirs = theirs.narrow(address.pos_axis, start, 4)
            if address.axes[-1] == "key":
                assert not ours[..., n_keys:].any()
                ours = ours[..., :n_keys]
            torch.testing.assert_close(ours, theirs, atol=1e-9, rtol=1e-9)
        # The readout of the cache is that of the whole, at these positions.
        if model.config.n_coda:
            continue
        parts = cache.logit_attribution(1).values[:, row]
        theirs = whole.logit_attribution(1).values[:, 0, start:]
        np.testing.assert_allclose(parts, theirs, atol=1e-9)
    if model.config.n_coda:
        with pytest.raises(InputError):
            cache.logit_attribution(1)


def test_a_filter_keeps_some_sites_and_loops() -> None:
    model = decoder("plain")
    _, cache = generate_with_cache(
        model,
        PROMPTS,
        n_loops=3,
        max_new_tokens=2,
        names_filter="resid_post",
        loops=[2],
        dtype="float32",
    )
    assert (
        list(cache) == ["blocks.2.hook_resid_post"]
        and cache[next(iter(cache))].dtype == torch.float32
    )
    with pytest.raises(HookError):
        generate_with_cache(model, PROMPTS, n_loops=3, max_new_tokens=2, names_filter="resid")
    with pytest.raises(InputError) as caught:
        generate_with_cache(WithVocabulary(model), PROMPTS, n_loops=3, max_new_tokens=2)
    assert caught.value.what == "model"


# Sampling


def test_samples_are_those_of_transformers() -> None:
    """The same warpers in the same order, after the same seed, on a small GPT-2 of one layer."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=31, n_positions=40, n_embd=16, n_layer=1, n_head=2)
    theirs: Any = GPT2LMHeadModel(config).eval()
    ours = SimpleNamespace(
        embed=lambda tokens: torch.nn.functional.one_hot(tokens, 31).float(),
        initial_state=lambda e: e,
        step=lambda h, e: h,
        readout=lambda h: theirs(h.argmax(-1)).logits,
    )
    prompts = torch.randint(31, (3, 5), generator=torch.Generator().manual_seed(0))
    for chosen in ({}, {"top_k": 5}, {"top_p": 0.6}, {"top_k": 9, "top_p": 0.8}):
        options: dict[str, Any] = {"temperature": 1.7, "max_new_tokens": 12, **chosen}
        torch.manual_seed(3)
        expected = theirs.generate(
            prompts, do_sample=True, pad_token_id=0, eos_token_id=None, **{"top_k": 0, **options}
        )
        got = generate(ours, prompts, n_loops=1, seed=3, **options)
        assert torch.equal(got, expected[:, 5:])
        assert not torch.equal(got, generate(ours, prompts, n_loops=1, seed=4, **options))


def test_samples_are_drawn_from_the_distribution() -> None:
    """Frequencies of the first new token against the softmax, within four standard errors."""
    model, n = decoder("plain"), 4000
    logits = model(torch.tensor([[1, 2]]), n_loops=2)[0, -1].float()
    prompts = torch.tensor([[1, 2]]).expand(n, -1)
    for temperature in (0.5, 2.0):
        p = (logits / temperature).softmax(-1).detach()
        new = generate(model, prompts, n_loops=2, max_new_tokens=1, temperature=temperature)
        share = new[:, 0].bincount(minlength=6) / n
        assert (share - p).abs().max() < 4 * (p * (1 - p) / n).sqrt().max()


def test_several_tokens_stop() -> None:
    model = decoder("plain")
    first = generate(model, PROMPTS, n_loops=2, max_new_tokens=9)
    stops = [int(first[0, 2]), int(first[1, 1])]
    new = generate(model, PROMPTS, n_loops=2, max_new_tokens=9, stop_token=stops)
    for row, whole in zip(new.tolist(), first.tolist()):
        end = next((k for k, token in enumerate(whole) if token in stops), len(whole))
        shown = (whole[: end + 1] + [stops[0]] * 9)[: new.shape[1]]
        assert row == shown


def test_tokens_are_told_as_they_come() -> None:
    told: list[Tensor] = []
    new = generate(decoder("plain"), PROMPTS, n_loops=2, max_new_tokens=5, on_token=told.append)
    assert torch.equal(torch.stack(told, 1), new)


def test_the_method_of_a_model_is_the_function() -> None:
    model = decoder("plain")
    expected = generate(model, PROMPTS, n_loops=model.n_loops, max_new_tokens=3)
    assert torch.equal(model.generate(PROMPTS, max_new_tokens=3), expected)
    model.loop_rule = LoopRule(3, of_length=lambda n_pos: n_pos)
    with pytest.raises(InputError) as caught:
        model.generate(PROMPTS, max_new_tokens=3)
    assert caught.value.what == "n_loops"


def test_other_models_are_run_on_the_whole_again() -> None:
    inside = decoder("demo")
    model = WithVocabulary(inside)
    for n_loops in (3, torch.tensor([3, 1, 2, 3])):
        options: dict[str, Any] = {"n_loops": n_loops, "max_new_tokens": 6, "stop_token": 2}
        answers = generate(model, PROMPTS, **options)
        assert torch.equal(answers, generate(inside, PROMPTS, **options))


def test_a_counting_model_counts() -> None:
    """Plain Python knows the answer: the next token is the last plus the loops, modulo 7."""
    one_hot = torch.eye(7)
    model = SimpleNamespace(
        embed=lambda tokens: one_hot[tokens],
        initial_state=lambda e: e,
        step=lambda h, e: h.roll(1, -1),
        readout=lambda h: h,
    )
    answers = generate(model, [[3], [1, 6]], n_loops=2, max_new_tokens=4, stop_token=1)
    assert answers.tolist() == [[5, 0, 2, 4], [1, 1, 1, 1]]
    assert generate(model, [[6, 6]], n_loops=2, max_new_tokens=9, stop_token=1).tolist() == [[1]]


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
            generate(wrapped, [[1, 2, 3, 4, 5]], n_loops=2, max_new_tokens=5)
    if name == "surround":
        assert generate(model, [[1, 2, 3, 4, 5]], n_loops=2, max_new_tokens=4).shape == (1, 4)


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        ([], {}, "^inputs:"),
        ([[1], []], {}, "^inputs:"),
        ([[1], [6]], {}, "^inputs:"),
        ([[1]], {"attention_mask": torch.ones(1, 1)}, "^attention_mask:"),
        (torch.ones(2, 3, dtype=torch.long), {"attention_mask": torch.ones(2, 3)}, "^attention_m"),
        (ONES, {"attention_mask": torch.tensor([[1, 1, 1], [1, 0, 1]])}, "^attention_mask:.*row 1"),
        (ONES, {"attention_mask": torch.tensor([[0, 0, 0], [1, 1, 1]])}, "^attention_mask:.*row 0"),
        ([[1]], {"top_k": 3}, "^top_k"),
        ([[1]], {"temperature": -1.0}, "temperature"),
        ([[1]], {"temperature": 1.0, "top_p": 0.0}, "top_p"),
        ([[1]], {"stop_token": [0, 6]}, "stop_token"),
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
        generate(decoder("plain"), prompts, **{"n_loops": 2, "max_new_tokens": 3, **options})


def test_what_is_no_prompt_is_refused() -> None:
    for prompts in ([[1], [2.0]], ONES.float()):
        with pytest.raises(InputError, match=r"^inputs:"):
            generation.padded_prompts(prompts, None, torch.device("cpu"))
    other = WithVocabulary(decoder("plain"))
    with pytest.raises(InputError, match="position_offset"):
        generate(other, [[1]], n_loops=2, max_new_tokens=3, position_offset=2)


@pytest.mark.parametrize("options", [{}, {"temperature": 1.0, "top_k": 4, "seed": 3}])
def test_a_stream_gives_the_tokens_one_by_one(options: dict[str, Any]) -> None:
    model = decoder("plain")
    options = {"n_loops": 3, "max_new_tokens": 6, **options}
    whole = generate(model, PROMPTS, **options)
    stream = generation.stream_tokens(model, PROMPTS, **options)
    assert torch.equal(torch.stack([*stream], 1), whole)
    stops = [int(whole[0, 2]), int(whole[1, 4])]
    stopped = generate(model, PROMPTS, stop_token=stops, **options)
    stream = generation.stream_tokens(model, PROMPTS, stop_token=stops, **options)
    assert torch.equal(torch.stack([*stream], 1), stopped)


def test_a_stream_left_early_leaves_the_model_free() -> None:
    """A hook that is on between two tokens acts on the second; other runs go on as ever."""
    model, fired = decoder("plain"), []
    stream = generation.stream_tokens(model, [[1, 2]], n_loops=2, max_new_tokens=4)
    assert not next(stream).requires_grad
    assert torch.is_grad_enabled()
    with model.hooks(
        [("loops.1.hook_state_post", lambda x, hook: fired.append(x.shape))], n_loops=2
    ):
        next(stream)
    assert len(fired) == 1
    alone = generate(model, [[3]], n_loops=2, max_new_tokens=2)
    stream.close()
    assert torch.equal(generate(model, [[3]], n_loops=2, max_new_tokens=2), alone)
    with pytest.raises(InputError):
        generation.stream_tokens(model, [[1, 2]], n_loops=2, max_new_tokens=0)


def test_the_stop_token_that_came_is_kept() -> None:
    """Behind it stands the first stop token."""
    model = decoder("plain")
    whole = generate(model, PROMPTS[:2], n_loops=3, max_new_tokens=6)
    row = next(r for r in (0, 1) if whole[r, 0] != whole[1 - r, 0])
    stops = [next(t for t in range(6) if t not in whole.unique()), int(whole[row, 0])]
    stopped = generate(model, PROMPTS[:2], n_loops=3, max_new_tokens=6, stop_token=stops)
    assert stopped[row].tolist() == [stops[1], *[stops[0]] * (stopped.shape[1] - 1)]


@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("name", ["plain", "zeros, surround, abacus"])
def test_each_token_is_read_after_loops_of_its_own(name: str, use_cache: bool) -> None:
    """By hand: states of all loops, and for the coda every position's own last state."""
    model, loops = decoder(name), [4, 1, 3, 0, 2, 4]
    options: dict[str, Any] = {"n_loops": 4, "max_new_tokens": 6, "use_cache": use_cache}
    new, read_after = generation.generate_by_rule(model, PROMPTS, loops, **options)
    assert read_after.tolist() == [loops] * 4
    for row, prompt in enumerate(PROMPTS):
        for k in range(6):
            tokens = torch.tensor([[*prompt, *new[row, :k].tolist()]])
            states = dict(iterate(model, tokens, 4))
            ends = [4] * (len(prompt) - 1) + loops[: k + 1]
            state = torch.stack([states[end][0, pos] for pos, end in enumerate(ends)])[None]
            logits = model(tokens, n_loops=4, start_at_loop=4, state=state)
            assert new[row, k] == logits[0, -1].argmax()
    whole, _ = generation.generate_by_rule(model, PROMPTS, [4] * 6, **options)
    assert torch.equal(whole, generate(model, PROMPTS, **options))


@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("name", ["plain", "zeros, surround, abacus"])
def test_hooks_change_tokens_read_by_a_rule_as_all_others(name: str, use_cache: bool) -> None:
    model = decoder(name)
    options: dict[str, Any] = {"n_loops": 4, "max_new_tokens": 6, "use_cache": use_cache}
    noise = torch.randn(model.config.d_model, generator=torch.Generator().manual_seed(0))
    hooks = [(f"loops.{t}.hook_state_post", lambda x, hook: x + 3 * noise) for t in (1, 3)]
    with model.hooks(hooks, n_loops=4):
        new, _ = generation.generate_by_rule(model, PROMPTS, [4] * 6, **options)
    assert torch.equal(new, generate(model, PROMPTS, fwd_hooks=hooks, **options))
    assert not torch.equal(new, generate(model, PROMPTS, **options))


@pytest.mark.parametrize("use_cache", [True, False])
def test_a_rule_stops_each_token_where_it_stops_its_last_position(use_cache: bool) -> None:
    model = decoder("plain")
    rules = [ResidualBelow(0.4), ReadoutKL(0.05), AccelerationBelow(0.3), ConfidenceAbove(0.9)]
    several: set[int] = set()
    for rule in rules:
        new, loops = generation.generate_by_rule(
            model, PROMPTS, rule, n_loops=6, max_new_tokens=5, use_cache=use_cache
        )
        several |= {*loops.flatten().tolist()}
        for row, prompt in enumerate(PROMPTS):
            for k in range(5):
                tokens = torch.tensor([[*prompt, *new[row, :k].tolist()]])
                last = torch.zeros_like(tokens, dtype=torch.bool)
                last[:, -1] = True
                stopped = run_until(model, tokens, rule, max_loops=6, mask=last)
                assert stopped.loop.item() == loops[row, k]
                assert stopped.logits[0, -1].argmax() == new[row, k]
    assert len(several) > 2


@pytest.mark.parametrize(
    "rule", [[1, 2], [9, 1, 1], MaxConfidence(), Oracle(), LengthLine(1.0, 0.0)]
)
def test_rules_that_say_nothing_of_a_token_are_refused(rule: Any) -> None:
    with pytest.raises(InputError):
        generation.generate_by_rule(decoder("plain"), PROMPTS, rule, n_loops=4, max_new_tokens=3)


def test_a_coda_reads_several_positions_so_that_no_rule_sees_logits() -> None:
    model = decoder("zeros, surround, abacus")
    options: dict[str, Any] = {"n_loops": 4, "max_new_tokens": 2}
    with pytest.raises(InputError) as caught:
        generation.generate_by_rule(model, PROMPTS, ConfidenceAbove(0.9), **options)
    assert caught.value.what == "rule"
    assert generation.generate_by_rule(model, PROMPTS, ResidualBelow(0.3), **options)[0].any()
