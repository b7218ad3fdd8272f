"""The requests of lm-eval against sums over tokens, one text at a time."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from loopinterp.core.errors import InputError
from loopinterp.models import LoopedTransformer, LoopedTransformerConfig, generate
from loopinterp.training.lm_eval_model import LanguageScores

LETTERS = "<>abcd "
N_LOOPS = 3


class Letters:
    """A token for each letter; the first two begin and end a text."""

    bos_token_id, eos_token_id = 0, 1

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        assert not add_special_tokens
        return [LETTERS.index(letter) for letter in text]

    def decode(self, tokens: list[int]) -> str:
        return "".join(LETTERS[token] for token in tokens)


def model(**changes: Any) -> LoopedTransformer:
    config = LoopedTransformerConfig(
        **{
            "d_model": 16, "n_heads": 2, "d_vocab": 7, "d_vocab_out": 7, "causal": True,
            "init_std": 0.6, "positions": "rotary", **changes,
        }
    )  # fmt: skip
    return LoopedTransformer(config, seed=0)


def scores(of: LoopedTransformer, **changes: Any) -> LanguageScores:
    options = {"n_loops": N_LOOPS, "batch_size": 3, "max_length": None, "max_new_tokens": 9}
    return LanguageScores(of, Letters(), **{**options, **changes})


def asked(*args: Any) -> SimpleNamespace:
    return SimpleNamespace(args=args)


def log_p(of: LoopedTransformer, read: list[int], token: int) -> tuple[float, bool]:
    """Of one token after others."""
    logits = of(torch.tensor([read]), n_loops=N_LOOPS)[0, -1].detach()
    return float(logits.log_softmax(-1)[token]), int(logits.argmax()) == token


def test_log_likelihoods_of_continuations() -> None:
    of = model()
    first = Letters().decode(generate(of, [[2, 3]], max_new_tokens=3, n_loops=N_LOOPS)[0].tolist())
    texts = [
        ("ab", "c d"),
        ("ab", first),
        ("", "abc"),
        ("dcb  ", "a"),
        ("d" * 9, "a b c"),
        ("a", ""),
    ]
    given = scores(of).loglikelihood([asked(*text) for text in texts])
    for (context, continuation), (total, greedy) in zip(texts, given, strict=True):
        bare = context.rstrip()
        read = [LETTERS.index(letter) for letter in bare] or [0]
        expected, best = 0.0, True
        for letter in context[len(bare) :] + continuation:
            one, likeliest = log_p(of, read, LETTERS.index(letter))
            expected, best, read = (
                expected + one,
                best and likeliest,
                [*read, LETTERS.index(letter)],
            )
        assert total == pytest.approx(expected, abs=1e-4) and greedy == best
    assert given[1][1] and not given[0][1]


def test_long_texts_are_scored_in_the_parts_that_lm_eval_names() -> None:
    """The table of its LM.loglikelihood_rolling: ten tokens, a context of four."""
    of = model()
    parts = [*scores(of, max_length=4)._parts([*range(10, 20)])]
    assert parts == [
        ([0], [10, 11, 12, 13]),
        ([13], [14, 15, 16, 17]),
        ([15, 16, 17], [18, 19]),
    ]
    text = "abcd dcba "
    tokens = [0, *(LETTERS.index(letter) for letter in text)]
    windows = [(0, 1), (0, 2), (0, 3), (0, 4), (4, 5), (4, 6), (4, 7), (4, 8), (6, 9), (6, 10)]
    expected = sum(log_p(of, tokens[a:b], tokens[b])[0] for a, b in windows)
    whole = sum(log_p(of, tokens[:b], tokens[b])[0] for b in range(1, 11))
    requests = [asked(text), asked("")]
    assert scores(of, max_length=4).loglikelihood_rolling(requests) == [
        pytest.approx(expected, abs=1e-4), 0
    ]  # fmt: skip
    assert scores(of).loglikelihood_rolling(requests)[0] == pytest.approx(whole, abs=1e-4)


def test_generation_ends_where_it_should() -> None:
    of = model()
    new = generate(of, [[2, 3]], max_new_tokens=9, n_loops=N_LOOPS)[0].tolist()
    whole = Letters().decode(new).split(">")[0]
    settings: list[dict[str, Any]] = [
        {"until": []}, {"until": ["?"]}, {"until": [whole[2:4], "?"]}, {"until": whole[1]},
        {"until": [""], "max_gen_toks": 2}, {"until": [], "do_sample": True, "temperature": 2.0},
    ]  # fmt: skip
    texts = scores(of).generate_until([asked("ab", each) for each in settings])
    assert len(whole) >= 4
    assert texts[:2] == [whole, whole]
    assert texts[2] == whole.split(whole[2:4])[0] and texts[3] == whole.split(whole[1])[0]
    assert texts[4] == whole[:2]
    options: dict[str, Any] = {"max_new_tokens": 9, "n_loops": N_LOOPS, "temperature": 2.0}
    drawn = generate(of, [[2, 3]], **options)[0].tolist()
    assert texts[5] == Letters().decode(drawn).split(">")[0]


def test_a_context_keeps_its_end() -> None:
    of = model(positions="absolute", n_ctx=6)
    (text,) = scores(of).generate_until([asked("abcdabcd", {"until": [], "max_gen_toks": 3})])
    expected = generate(of, [[LETTERS.index(x) for x in "bcd"]], max_new_tokens=3, n_loops=N_LOOPS)
    assert text == Letters().decode(expected[0].tolist()).split(">")[0]


@pytest.mark.parametrize(
    ("what", "call"),
    [
        ("max_length", lambda: scores(model(positions="absolute", n_ctx=6), max_length=7)),
        ("max_gen_toks", lambda: scores(model(), max_length=9).generate_until([asked("a", {})])),
        ("requests", lambda: scores(model(), max_length=3).loglikelihood([asked("a", "abcd")])),
    ],
)
def test_what_does_not_fit_is_refused(what: str, call: Any) -> None:
    with pytest.raises(InputError) as caught:
        call()
    assert caught.value.what == what


def test_a_tokenizer_without_ends_and_a_model_that_looks_ahead_are_refused() -> None:
    bare = SimpleNamespace(encode=Letters().encode, bos_token_id=None)
    for of, tokenizer in ((model(), bare), (model(causal=False), Letters())):
        with pytest.raises(InputError):
            LanguageScores(of, tokenizer, N_LOOPS, 3, None, 9)
