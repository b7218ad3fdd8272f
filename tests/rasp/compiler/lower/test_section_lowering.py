"""Expressions of one section: what they become, and what must be held on the way."""

from __future__ import annotations

import functools
import operator

import pytest

from loopinterp.errors import InputError
from loopinterp.rasp import aggregate, indices, select, shift_right, tok_map, tokens, var
from loopinterp.rasp.compiler import compile_program
from loopinterp.rasp.compiler.lower.feature_functions import of_feature
from loopinterp.rasp.compiler.lower.lowered_features import Feature
from loopinterp.rasp.compiler.lower.section_lowering import SectionLowering
from loopinterp.rasp.compiler.validate import validate
from loopinterp.rasp.compiler.value_domains import infer_domains
from loopinterp.rasp.expr import Indices, Tokens
from tests.rasp.compiler.compiled_properties import agrees
from tests.rasp.compiler.small_programs import every_input, program

pytestmark = pytest.mark.usefixtures("quick")

u = var("u")


def lowered(x, *, n_tokens=3, max_length=6):
    """A section after it has gone through one expression, and its function."""
    source = validate(program({"u": x}, {"u": u}, n_tokens=n_tokens), max_length)
    places = Feature("indices", tuple(range(max_length)), "indices")
    read = Feature("tokens", tuple(range(n_tokens)), "tokens")
    known = {Tokens(): of_feature(read), Indices(): of_feature(places)}
    section = SectionLowering("prelude", source, infer_domains(source), known, places)
    return section, section.function(source.prepare["u"])


def test_operations_need_no_feature_of_their_own():
    section, function = lowered((tokens * 2 + indices) % 3)
    assert section.writer.written == []
    assert [f.name for f in function.features] == ["tokens", "indices"]


def test_what_a_head_reads_is_held_if_it_is_no_function_of_one_feature():
    section, _ = lowered(aggregate(select(indices, tokens % 2, "=="), indices))
    assert all(feature.head is not None for feature in section.writer.written)
    section, _ = lowered(aggregate(select(tokens + indices, indices, "=="), indices))
    first = section.writer.written[0]
    assert first.name == "tokens + indices" and first.writes is not None and first.layer == 0


def test_a_head_reads_what_an_mlp_wrote_one_layer_later():
    section, _ = lowered(shift_right(shift_right(tokens)))
    heads = [feature for feature in section.writer.written if feature.head is not None]
    assert [feature.layer for feature in heads] == [0, 1]


def test_values_that_never_occur_are_left_out_of_tables():
    # tokens - tokens // 2 * 2 is 0 or 1, though apart they could give -4.
    _, function = lowered(tokens - tokens // 2 * 2, n_tokens=5)
    assert function.values == (0, 1)


def test_what_would_take_many_rules_is_held_on_the_way():
    terms = [shift_right(tokens, k) for k in range(1, 9)]
    parity = functools.reduce(operator.xor, (term % 2 for term in terms))
    compiled = compile_program(program({"u": parity}, {"u": u}, n_tokens=2), max_length=9)
    assert max(len(group.neurons) for group in compiled.circuit.neurons) < 2 * 256
    agrees(compiled, every_input(compiled.program, 9), n_loops=1)


def test_arguments_of_too_many_values_are_refused_by_name():
    tables = [tok_map(tokens, {k: k * p % 997 for k in range(900)}, default=0) for p in (3, 7)]
    left, right = (shift_right(table, n) for n, table in enumerate(tables, start=1))
    product = (left * right) % 5
    with pytest.raises(InputError, match=r"at most 1,024 values.*smaller max_length"):
        lowered(product, n_tokens=900)
