"""Tasks answered at every prefix."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loopinterp.core.errors import ConfigError, InputError
from loopinterp.tasks import (
    IGNORE,
    Automaton,
    Batch,
    PrefixSum,
    RegularLanguage,
    get_automaton,
    get_task,
    list_languages,
    prefixes,
    register_language,
)
from tests.tasks.answers import IN_LANGUAGE


def running_xor(bits: list[int]) -> list[int]:
    return [x % 2 for x in itertools.accumulate(bits)]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=500), min_size=1, max_size=4))
def test_mixed_lengths_are_padded_on_the_right(rows):
    width = max(map(len, rows))
    bits = torch.tensor([row + [1] * (width - len(row)) for row in rows])
    batch = PrefixSum().from_bits(bits, torch.tensor([len(row) for row in rows]))
    for k, row in enumerate(rows):
        pad = width - len(row)
        assert batch.inputs[k].tolist() == [2, *row, *[3] * pad]
        assert batch.targets[k].tolist() == [IGNORE, *running_xor(row), *[IGNORE] * pad]
    assert batch.n_loops.tolist() == [len(row) + 1 for row in rows]


@pytest.mark.parametrize(
    ("modulus", "n"), [*((2, n) for n in range(1, 9)), (3, 6), (5, 4), (10, 3)]
)
def test_all_short_sequences_of_digits(modulus, n):
    task = PrefixSum(modulus=modulus)
    every = [list(digits) for digits in itertools.product(range(modulus), repeat=n)]
    batch = task.from_bits(torch.tensor(every), torch.full((len(every),), n))
    for row, digits in enumerate(every):
        assert batch.inputs[row].tolist() == [modulus, *digits]
        running = [total % modulus for total in itertools.accumulate(digits)]
        assert batch.targets[row].tolist() == [IGNORE, *running]


@pytest.mark.parametrize("distribution", ["uniform", "biased"])
def test_sampled_digits_take_every_value(distribution):
    batch = PrefixSum(modulus=6).sample(
        50, batch_size=60, generator=torch.Generator().manual_seed(0), distribution=distribution
    )
    counts = torch.bincount(batch.inputs[:, 1:].flatten(), minlength=6)
    assert len(counts) == 6 and counts[1:].min() > 200
    running = batch.inputs[:, 1:].cumsum(dim=1) % 6
    assert torch.equal(batch.targets[:, 1:], running)


@pytest.mark.parametrize("modulus", [1, 0, 2.5, "2", True])
def test_a_bad_modulus_is_refused(modulus):
    with pytest.raises(ConfigError) as caught:
        PrefixSum(modulus=modulus)
    assert caught.value.what == "modulus"


def test_bad_bits_and_tokens_are_refused():
    with pytest.raises(InputError, match="bits"):
        PrefixSum().from_bits(torch.tensor([[2]]), torch.tensor([1]))
    with pytest.raises(InputError, match=r"^n:"):
        PrefixSum().from_bits(torch.tensor([[1]]), torch.tensor([2]))
    with pytest.raises(InputError, match=r"^inputs:"):
        PrefixSum().targets(torch.tensor([[4]]))


LANGUAGES = list_languages()
WITH_DEAD = sorted({*IN_LANGUAGE} - {"tomita5", "tomita6"})
PAGE = Path(__file__).parents[2] / "docs" / "tasks.md"


def drawn(language: str, n: int, distribution: str) -> Batch:
    generator = torch.Generator().manual_seed(0)
    task = RegularLanguage(language=language)
    return task.sample(n, batch_size=4000, generator=generator, distribution=distribution)


def equivalent_states(automaton: Automaton) -> list[int]:
    """The class of each state in Moore's coarsest partition: one class for what acts alike."""
    classes = [int(state in automaton.accepting) for state in range(len(automaton.transitions))]
    while True:
        table = enumerate(automaton.transitions)
        signatures = [(classes[state], *(classes[t] for t in row)) for state, row in table]
        refined = [sorted({*signatures}).index(signature) for signature in signatures]
        if len({*refined}) == len({*classes}):
            return refined
        classes = refined


def test_every_language_has_a_definition_to_be_checked_against():
    assert {*LANGUAGES} == {*IN_LANGUAGE}


@pytest.mark.parametrize("language", IN_LANGUAGE)
def test_all_strings_up_to_length_10_are_answered_by_the_definition(language):
    task, belongs = RegularLanguage(language=language), IN_LANGUAGE[language]
    words = ["".join(word) for word in itertools.product(task.automaton.alphabet, repeat=10)]
    batch = task.encode(words)  # whose prefixes are all shorter strings
    for word, answer in zip(words, batch.targets.tolist()):
        assert answer == [IGNORE, *(int(belongs(word[: k + 1])) for k in range(10))]
    assert (0 in task.automaton.accepting) == belongs("")


@pytest.mark.parametrize("language", IN_LANGUAGE)
def test_every_automaton_is_minimal(language):
    automaton = get_automaton(language)
    reached = [0]
    for state in reached:
        reached += [t for t in dict.fromkeys(automaton.transitions[state]) if t not in reached]
    assert sorted(reached) == list(range(len(automaton.transitions)))
    assert len({*equivalent_states(automaton)}) == len(automaton.transitions)


@pytest.mark.parametrize("language", IN_LANGUAGE)
def test_only_the_last_state_of_a_language_that_strings_can_leave_is_dead(language):
    automaton = get_automaton(language)
    last = len(automaton.transitions) - 1
    assert automaton.dead == ((last,) if language in WITH_DEAD else ())


def test_moore_finds_states_that_act_alike():
    assert equivalent_states(Automaton("01", ((1, 2), (1, 2), (2, 1)), (0, 1))) == [1, 1, 0]


def test_words_of_mixed_lengths_are_padded_on_the_right():
    batch = RegularLanguage(language="dyck_2").encode(["()", "(())("])
    assert batch.inputs.tolist() == [[2, 0, 1, 3, 3, 3], [2, 0, 0, 1, 1, 0]]
    no = IGNORE
    assert batch.targets.tolist() == [[no, 0, 1, no, no, no], [no, 0, 0, 0, 1, 0]]
    assert batch.n.tolist() == [2, 5] and batch.n_loops.tolist() == [3, 6]


@pytest.mark.parametrize("language", WITH_DEAD)
@pytest.mark.parametrize("n", [12, 48])
def test_half_of_steered_strings_stay_alive_and_the_others_die_late(language, n):
    batch = drawn(language, n, "steered")
    task = RegularLanguage(language=language)
    alive = (task.states(batch)[:, 1:] != task.automaton.dead[0]).double().mean(dim=0)
    # 4,000 examples: a standard error of 0.008. Some strings end before their chance to die.
    assert 0.46 < alive[-1] < 0.72
    assert alive[n // 4 - 1] > 0.82


def test_a_steered_string_of_ones_dies_at_a_step_drawn_uniformly():
    symbols = drawn("tomita1", 10, "steered").inputs[:, 1:]
    death = torch.where((symbols == 0).any(1), (symbols == 0).long().argmax(1), 10)
    share = torch.bincount(death, minlength=11) / len(death)
    assert (share[:10] - 0.05).abs().max() < 0.018 and abs(share[10] - 0.5) < 0.04
    after = symbols[death < 9, -1].double().mean()  # dead, so that all symbols are as likely
    assert abs(after - 0.5) < 0.06


def test_mixed_lengths_die_by_their_own_length():
    task = RegularLanguage(language="tomita1")
    n = torch.tensor([4, 40]).repeat(2000)
    batch = task.sample(n, generator=torch.Generator().manual_seed(0), distribution="steered")
    ends = batch.targets.gather(1, n[:, None])[:, 0].double()
    assert abs(ends[n == 4].mean() - 0.5) < 0.06 and abs(ends[n == 40].mean() - 0.5) < 0.06


@pytest.mark.parametrize("language", ["tomita5", "tomita6"])
def test_without_a_dead_state_both_distributions_are_the_same(language):
    uniform, steered = (drawn(language, 9, kind).inputs for kind in ("uniform", "steered"))
    assert torch.equal(uniform, steered)


def test_the_page_has_the_share_of_positive_answers():
    row = r"^\| `(\w+)` \|.*" + 4 * r"\| (\d\.\d\d) " + r"\|$"
    rows = re.findall(row, PAGE.read_text(), flags=re.MULTILINE)
    assert {language for language, *_ in rows} == {*IN_LANGUAGE}
    cases = list(itertools.product(("uniform", "steered"), (12, 48)))
    for language, *shares in rows:
        for (kind, n), share in zip(cases, shares):
            positive = drawn(language, n, kind).targets[:, 1:].double().mean()
            assert abs(positive - float(share)) < 0.02


def test_what_is_not_of_the_language_is_refused():
    task = RegularLanguage(language="dyck_2")
    for words in ([], ["()", ""], ["()", "01"], ["( )"]):
        with pytest.raises(InputError, match=r"^words"):
            task.encode(words)
    assert torch.equal(task.encode("()").inputs, task.encode(["()"]).inputs)
    with pytest.raises(InputError, match=r"^symbols"):
        task.from_symbols(torch.tensor([[2]]), torch.tensor([1]))
    with pytest.raises(InputError, match=r"^inputs"):
        task.targets(torch.tensor([[4]]))
    with pytest.raises(ConfigError, match="'tomita3'"):
        RegularLanguage(language="tomita33")


def test_a_language_of_ones_own_is_a_task_and_its_name_is_protected(monkeypatch):
    monkeypatch.setattr(prefixes, "_LANGUAGES", {**prefixes._LANGUAGES})
    cycle = Automaton("abc", ((1, 3, 3), (3, 2, 3), (3, 3, 0), (3, 3, 3)), (0,))
    register_language("abc_star", cycle)
    task = RegularLanguage(language="abc_star")
    assert get_task(task.name, **task.config()) == task
    assert task.d_vocab == 5 and task.symbols == ("a", "b", "c", "BOS", "PAD")
    batch = task.encode(["abcabc", "abca"])
    text = "in abc_star, prefixes of abcabc = 001001"
    assert task.decode(batch)[0] == text
    for kind in task.distributions:
        batch = task.sample(6, batch_size=9, generator=torch.Generator(), distribution=kind)
        for row, answer in zip(batch.inputs.tolist(), batch.targets[:, -1].tolist()):
            assert answer == int("".join("abc"[t] for t in row[1:]) == "abcabc")
    with pytest.raises(InputError, match=r"^language"):
        register_language("abc_star", cycle)
    register_language("abc_star", get_automaton("tomita1"), replace=True)
    assert get_task("regular_language", language="abc_star").d_vocab == 4


@pytest.mark.parametrize(
    "parts",
    [
        ("01", ((0, 1), (1,)), (0,)),
        ("01", ((0, 2), (1, 0)), (0,)),
        ("01", ((0, 1), (1, 0)), (2,)),
        ("01", (), ()),
        ("00", ((0, 0),), (0,)),
        ("0", ((0,),), (0,)),
    ],
)
def test_a_table_that_is_no_automaton_is_refused(parts):
    with pytest.raises(InputError, match=r"^automaton"):
        Automaton(*parts)
