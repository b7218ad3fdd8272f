"""Streams of one seed are repeatable and unlike one another."""

from __future__ import annotations

import torch

from loopinterp.training.seeding import stream


def draw(seed: int, purpose: str) -> list[float]:
    return torch.rand(4, generator=stream(seed, purpose)).tolist()


def test_a_stream_is_repeatable() -> None:
    assert draw(3, "data") == draw(3, "data")


def test_seeds_and_purposes_give_different_streams() -> None:
    drawn = [draw(seed, purpose) for seed in (0, 1) for purpose in ("data", "noise")]
    assert len({tuple(values) for values in drawn}) == 4


def test_the_global_generator_is_left_alone() -> None:
    before = torch.random.get_rng_state()
    draw(0, "data")
    assert torch.equal(before, torch.random.get_rng_state())
