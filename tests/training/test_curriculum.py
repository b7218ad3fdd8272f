"""When the greatest length grows, and which lengths are drawn."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from loopinterp.training.config import CurriculumConfig
from loopinterp.training.curriculum import Curriculum


def feed(curriculum: Curriculum, exact_match: float, n_steps: int) -> list[int]:
    """M before each step."""
    seen = []
    for _ in range(n_steps):
        seen.append(curriculum.longest)
        curriculum.update(exact_match)
    return seen


def test_perfect_steps_grow_it_every_min_steps_once_the_average_has_risen() -> None:
    curriculum = Curriculum(CurriculumConfig(max_n=4, threshold=0.97, min_steps=40))
    seen = feed(curriculum, 1.0, 200)
    # 1 - 0.9^k > 0.97 from k = 34 on, so 40 steps are enough at every length.
    assert seen == [1] * 40 + [2] * 40 + [3] * 40 + [4] * 80
    assert curriculum.done_at == 120


def test_it_waits_for_the_running_accuracy() -> None:
    curriculum = Curriculum(CurriculumConfig(max_n=4, threshold=0.97, min_steps=2))
    seen = feed(curriculum, 1.0, 60)
    # 1 - 0.9^33 = 0.9691, 1 - 0.9^34 = 0.9722
    assert seen.index(2) == 34
    assert seen.index(3) == 36


def test_it_never_grows_below_the_threshold() -> None:
    curriculum = Curriculum(CurriculumConfig(max_n=4, min_steps=1))
    assert set(feed(curriculum, 0.96, 300)) == {1}
    assert curriculum.done_at is None


def test_interval_grows_however_badly_it_goes() -> None:
    curriculum = Curriculum(CurriculumConfig(kind="interval", max_n=3, interval=7))
    assert feed(curriculum, 0.0, 21) == [1] * 7 + [2] * 7 + [3] * 7
    assert curriculum.done_at == 14


def test_no_curriculum_draws_every_length_from_the_start() -> None:
    curriculum = Curriculum(CurriculumConfig(kind="none", min_n=2, max_n=5))
    drawn = curriculum.lengths(500, torch.Generator().manual_seed(0))
    assert sorted(set(drawn.tolist())) == [2, 3, 4, 5]
    assert curriculum.done_at == 0


def test_lengths_are_uniform_up_to_the_present_greatest() -> None:
    curriculum = Curriculum(CurriculumConfig(max_n=9, start_n=3))
    drawn = curriculum.lengths(6000, torch.Generator().manual_seed(0))
    counts = torch.bincount(drawn)
    assert counts[0] == 0
    assert len(counts) == 4
    assert (counts[1:] - 2000).abs().max() < 200


def test_state_goes_through_json_and_back() -> None:
    import json

    config = CurriculumConfig(max_n=6, min_steps=2)
    one, other = Curriculum(config), Curriculum(config)
    feed(one, 0.99, 77)
    other.load(json.loads(json.dumps(one.state())))
    assert feed(one, 0.983, 50) == feed(other, 0.983, 50)
    assert one.state() == other.state()


@given(
    settings=st.one_of(
        st.builds(
            CurriculumConfig,
            max_n=st.just(3),
            threshold=st.sampled_from([0.0, 0.5, 0.97]),
            min_steps=st.integers(1, 9),
        ),
        st.builds(
            CurriculumConfig,
            kind=st.just("interval"),
            max_n=st.just(3),
            interval=st.integers(1, 9),
        ),
    ),
    heard=st.lists(st.floats(0, 1) | st.just(1.0), min_size=1, max_size=60),
)
def test_it_never_grows_where_it_may_not(settings: CurriculumConfig, heard: list[float]) -> None:
    """Steps taken in late, when they may matter, leave what they leave when taken in at once."""
    at_once, late = Curriculum(settings), Curriculum(settings)
    waiting: list[float] = []
    for exact_match in heard:
        at_once.update(exact_match)
        waiting.append(exact_match)
        if late.may_grow(len(waiting)):
            for one in waiting:
                late.update(one)
            waiting.clear()
        assert late.longest == at_once.longest
    for one in waiting:
        late.update(one)
    assert late.state() == at_once.state()


def test_most_steps_need_not_be_heard_of() -> None:
    curriculum = Curriculum(CurriculumConfig(max_n=2, min_steps=30))
    # 1 - 0.9^k passes 0.97 with k = 34.
    assert [curriculum.may_grow(n) for n in (1, 30, 33, 34)] == [False, False, False, True]
    feed(curriculum, 1.0, 34)
    assert curriculum.done_at == 34 and not curriculum.may_grow(10**6)
