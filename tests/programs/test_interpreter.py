"""The batched interpreter against a reading of one sequence at a time in Python integers."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loopinterp.core.errors import InputError
from loopinterp.programs import (
    Selector,
    aggregate,
    evaluate,
    full,
    indices,
    kqv,
    sel_width,
    select,
    seq_map,
    shift_right,
    tok_map,
    tokens,
    var,
    where,
)
from loopinterp.programs.expressions import Select, ShiftRight, postorder
from tests.programs.reference import SELECTORS, SEQUENCES, read

pytestmark = pytest.mark.usefixtures("quick")

VALUES = st.integers(-4, 4)


@st.composite
def sequences(draw: st.DrawFn) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Tokens and two variables of one shape."""
    batch, pos = draw(st.integers(1, 4)), draw(st.integers(1, 8))
    row = st.lists(VALUES, min_size=pos, max_size=pos)
    rows = st.lists(row, min_size=batch, max_size=batch)
    x, u, v = (torch.tensor(draw(rows)) for _ in range(3))
    return x, {"u": u, "v": v}


def reference(expr, x, variables) -> list:
    return [
        read(expr, row.tolist(), {name: values[i].tolist() for name, values in variables.items()})
        for i, row in enumerate(x)
    ]


@settings(max_examples=60, deadline=None)
@given(SEQUENCES | SELECTORS, sequences())
def test_every_expression_agrees_with_the_reference(expr, data):
    x, variables = data
    assert evaluate(expr, x, variables).tolist() == reference(expr, x, variables)


@settings(max_examples=40, deadline=None)
@given(SEQUENCES, sequences())
def test_a_batch_gives_what_its_examples_give_alone(expr, data):
    x, variables = data
    batched = evaluate(expr, x, variables)
    for i in range(len(x)):
        single = evaluate(expr, x[i : i + 1], {n: v[i : i + 1] for n, v in variables.items()})
        assert torch.equal(batched[i], single[0])


@settings(max_examples=40, deadline=None)
@given(SEQUENCES, sequences(), st.integers(1, 4), VALUES)
def test_padding_on_the_right_changes_nothing_when_all_selection_is_causal(expr, data, more, value):
    if any(isinstance(node, Select) and not node.causal for node in postorder([expr])):
        return
    x, variables = data

    def pad(y: torch.Tensor) -> torch.Tensor:
        return torch.cat([y, torch.full((len(y), more), value)], dim=1)

    longer = evaluate(expr, pad(x), {name: pad(v) for name, v in variables.items()})
    assert torch.equal(longer[:, : x.shape[1]], evaluate(expr, x, variables))


@given(sequences(), st.integers(1, 9), VALUES)
def test_a_shift_equals_the_selection_it_stands_for(data, n, default):
    x, variables = data
    shift = shift_right(var("u"), n, default=default)
    assert isinstance(shift, ShiftRight)
    assert torch.equal(evaluate(shift, x, variables), evaluate(shift.expanded, x, variables))


def test_means_of_numbers_too_large_for_floats_are_exact():
    big = 2**61 + 1
    x = torch.tensor([[big, big, big]])
    mean = aggregate(select(indices, indices, "true"), tokens - 2**60)
    assert evaluate(mean, x).tolist() == [[big - 2**60] * 3]
    below = aggregate(select(indices, indices, "true"), tokens)
    odd = torch.tensor([[2**51 + 1, 2**51 + 1]])
    assert evaluate(below, odd).tolist() == [[2**51 + 1] * 2]


@pytest.mark.parametrize("edge", [2**31 - 1, 2**63 - 1])
def test_extremes_at_the_edges_of_the_integers_are_told_from_nothing(edge):
    x = torch.tensor([[-edge - 1, edge, 0]])
    for mode, value in (("max", -edge - 1), ("min", edge)):
        one = aggregate(select(tokens, value, "=="), tokens, mode, default=7)
        seen = x == value
        expected = torch.where(seen.cumsum(dim=1) > 0, value, 7)
        assert torch.equal(evaluate(one, x), expected)


def test_a_mean_is_truncated_towards_zero():
    everything = select(indices, indices, "true", causal=False)
    assert evaluate(aggregate(everything, tokens), torch.tensor([[-3, 0]])).tolist() == [[-1, -1]]
    assert evaluate(aggregate(everything, tokens), torch.tensor([[3, 0]])).tolist() == [[1, 1]]


def test_kqv_is_one_attention_head():
    x = torch.tensor([[3, 1, 3, 2]])
    last_same = kqv(tokens, tokens, indices, "==", mode="max")
    assert evaluate(last_same, x).tolist() == [[0, 1, 2, 3]]
    earlier = kqv(tokens, tokens, indices, "==", mode="min", default=-1)
    assert evaluate(earlier, x).tolist() == [[0, 1, 0, 3]]
    nothing = kqv(tokens, full(9), tokens, "==", default=-5)
    assert evaluate(nothing, x).tolist() == [[-5] * 4]
    assert evaluate(sel_width(select(tokens, full(9), "==")), x).tolist() == [[0] * 4]


def test_a_result_has_the_batch_of_the_tokens_even_if_it_does_not_depend_on_them():
    x = torch.zeros(3, 2, dtype=torch.int64)
    assert evaluate(indices, x).shape == (3, 2)
    assert evaluate(select(indices, indices, "=="), x).shape == (3, 2, 2)
    assert isinstance(select(indices, indices, "=="), Selector)


def test_a_common_subexpression_is_computed_once():
    x = tokens
    for _ in range(60):  # written out, 2^60 nodes
        x = seq_map("larger", x, x)
    assert evaluate(x, torch.tensor([[4, 2]])).tolist() == [[4, 2]]


def test_a_value_missing_from_a_table_is_named():
    table = tok_map(tokens, {0: 1})
    with pytest.raises(InputError) as caught:
        evaluate(table, torch.tensor([[0, 5]]))
    assert caught.value.what == f"table of {table!r}" and "5" in caught.value.given
    with pytest.raises(InputError):
        evaluate(tok_map(tokens, {}), torch.tensor([[0]]))


@pytest.mark.parametrize("op", ["floordiv", "mod"])
def test_a_division_by_zero_is_named(op):
    with pytest.raises(InputError) as caught:
        evaluate(seq_map(op, indices, tokens), torch.tensor([[1, 0]]))
    assert caught.value.given.startswith("tokens")


@pytest.mark.parametrize("op", ["floordiv", "mod"])
def test_the_advice_against_a_division_by_zero_changes_no_other_result(op):
    inputs = torch.tensor([[-2, 0, 3, -3]])
    with pytest.raises(InputError) as caught:
        evaluate(seq_map(op, indices, tokens), inputs)
    assert "where(x," in caught.value.fix
    values = evaluate(seq_map(op, indices, where(tokens, tokens, 1)), inputs)
    python = {"floordiv": int.__floordiv__, "mod": int.__mod__}[op]
    assert values[inputs != 0].tolist() == [python(i, x) for i, x in ((0, -2), (2, 3), (3, -3))]


def test_an_unknown_variable_is_named():
    with pytest.raises(InputError, match="'carry'"):
        evaluate(var("carry"), torch.tensor([[1, 0]]), {"carri": torch.tensor([[1, 0]])})


@pytest.mark.parametrize("x", [torch.zeros(3).long(), torch.zeros(3, 2), torch.zeros(3, 0).long()])
def test_bad_tokens_are_refused(x):
    with pytest.raises(InputError, match=r"^tokens:"):
        evaluate(tokens, x)


@pytest.mark.usefixtures("no_type_checks")
@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        ((tokens, [[1, 0]]), "tokens"),
        ((3, torch.tensor([[1, 0]])), "expression"),
        (
            (var("x"), torch.tensor([[1, 0]]), {"x": torch.tensor([[1, 2, 3]])}),
            "values of variable 'x'",
        ),
        ((var("x"), torch.tensor([[1, 0]]), {"x": torch.tensor([[1]])}), "values of variable 'x'"),
        ((var("x"), torch.tensor([[1, 0]]), {"x": [[1, 0]]}), "values of variable 'x'"),
    ],
)
def test_what_is_no_expression_no_tokens_or_no_values_of_them_is_refused(arguments, what):
    with pytest.raises(InputError) as caught:
        evaluate(*arguments)
    assert caught.value.what == what


@pytest.mark.gpu
@settings(max_examples=40, deadline=None)
@given(SEQUENCES | SELECTORS, sequences())
def test_a_gpu_gives_the_same_integers(expr, data):
    x, variables = data
    there = evaluate(expr, x.cuda(), {name: v.cuda() for name, v in variables.items()})
    assert there.device.type == "cuda"
    assert torch.equal(there.cpu(), evaluate(expr, x, variables))
