"""Spans of loops and numbers of loops; what runs refuse is tested with the model."""

from __future__ import annotations

import pytest
import torch

from loopinterp.errors import MOST_LOOPS, InputError
from loopinterp.models import bind, iterate, run_until
from loopinterp.models.run_inputs import check_dtype, check_ends, loop_span
from loopinterp.models.stopping_rules import Fixed
from tests.models.variants import build, some_inputs


def test_spans() -> None:
    assert loop_span(0, None, 4, None) == range(4)
    assert loop_span(2, 3, 4, torch.zeros(1, 1, 8)) == range(2, 3)
    assert loop_span(4, None, 4, torch.zeros(1, 1, 8)) == range(4, 4)


@pytest.mark.parametrize(("start", "stop"), [(-1, None), (3, 2), (0, 5), (5, None)])
def test_spans_outside_the_run(start: int, stop: int | None) -> None:
    with pytest.raises(InputError, match="loops inside the run"):
        loop_span(start, stop, 4, torch.zeros(1, 1, 8))


@pytest.mark.parametrize("given", [0, -1, True])
def test_numbers_of_loops_that_are_none(given: int) -> None:
    with pytest.raises(InputError, match="n_loops: expected an integer >= 1"):
        build("plain").n_loops = given


@pytest.mark.parametrize("wrong", [-1, MOST_LOOPS + 1, 10**9])
def test_no_example_makes_more_loops_than_a_run_can(wrong: int) -> None:
    x = some_inputs(build("plain"))
    ends = torch.tensor([1, wrong, 2])
    for run in (check_ends, lambda ends, x: build("plain")(x, n_loops=ends)):
        with pytest.raises(InputError, match=rf"n_loops: expected an integer .*, got {wrong}"):
            run(ends, x)
    assert torch.equal(check_ends(ends.clamp(0, MOST_LOOPS), x), ends.clamp(0, MOST_LOOPS))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32])
@pytest.mark.parametrize("name", ["demo", "abacus on q and k"])
@torch.no_grad()
def test_tokens_of_any_integer_type_are_the_same_tokens(name: str, dtype: torch.dtype) -> None:
    model = build(name)
    x = some_inputs(model)
    assert torch.equal(model(x.to(dtype), n_loops=3), model(x, n_loops=3))
    assert torch.equal(model.run_with_cache(x.to(dtype))[0], model.run_with_cache(x)[0])


@pytest.mark.usefixtures("no_type_checks")
@pytest.mark.parametrize("dtype", [torch.complex64, torch.bool, torch.float32, torch.uint16])
def test_other_types_are_no_tokens(dtype: torch.dtype) -> None:
    model = build("demo")
    with pytest.raises(InputError, match="integers"):
        model(some_inputs(model).to(dtype))


def test_empty_batches_are_refused_alike() -> None:
    model = build("demo")
    x = some_inputs(model)[:0]
    for run in (
        lambda: model(x),
        lambda: model.run_with_cache(x, pos_slice=0),
        lambda: model.run_with_hooks(x, fwd_hooks=[]),
        lambda: model(x, n_loops=x[:, 0]),
        lambda: bind(model, x),
        lambda: next(iterate(model, x, 2)),
        lambda: run_until(model, x, Fixed(2)),
    ):
        with pytest.raises(InputError, match="at least one example, got an empty batch"):
            run()


def test_types_by_name() -> None:
    model = build("demo")
    x = some_inputs(model)
    _, cache = model.run_with_cache(x, names_filter="resid_post", dtype="bfloat16")
    assert cache["resid_post", 0].dtype == torch.bfloat16
    size = model.cache_nbytes(3, 7, names_filter="resid_post", dtype="bfloat16")
    assert size == cache.nbytes
    assert cache.to(dtype="float64")["resid_post", 0].dtype == torch.float64
    for wrong in ("float31", "int64", "Tensor", torch.int64, 32):
        with pytest.raises(InputError, match="dtype: expected a floating-point type"):
            check_dtype(wrong)
