"""All transitions of models with a state code and of programs, against runs and interchanges."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loopinterp.compiler import compile_program
from loopinterp.decompiler import decompile, finite_program
from loopinterp.decompiler.evidence import EXACT, agreement
from loopinterp.decompiler.exact_reading import (
    Surroundings,
    is_finite,
    is_local,
    same_algorithm,
    same_program,
    tabulate_code,
    tabulate_program,
    with_first_guess,
)
from loopinterp.interventions import InterchangePairs, InterchangeRun
from loopinterp.interventions.pairs import join
from loopinterp.models import LoopedTransformer
from loopinterp.programs import equivalence, get_program, list_programs, mutations
from loopinterp.programs.equivalence import every_input
from loopinterp.programs.language import UNKNOWN, eq, full, tok_map, tokens, var, where
from loopinterp.programs.program import ProgramOffset
from loopinterp.tasks import get_task
from loopinterp.zoo import load_pretrained
from tests.models.coded_model import coded

ADDITION = get_task("addition")
PAIRS = Surroundings.of(ADDITION, (1, 2, 3)).pairs


def random_inputs(n: int, generator: torch.Generator) -> torch.Tensor:
    return ADDITION.sample(n, batch_size=16, generator=generator).inputs


@given(n_bits=st.integers(1, 4), seed=st.integers(0, 100))
@settings(max_examples=10, deadline=None)
def test_the_table_runs_as_the_model_does_after_any_interchange(n_bits, seed):
    """Random weights: states of one run are put into another, at many positions at once."""
    model, generator = coded(n_bits, seed=seed), torch.Generator().manual_seed(seed)
    table = tabulate_code(model, PAIRS)
    number = {(cell[0], code): cell[1] for cell, code in table.codes.items()}
    tokens = random_inputs(9, generator)
    states = model(tokens, n_loops=6, return_type="states")
    code = model.code
    assert code is not None
    # Donors with the same token, of any run, position and loop.
    h, values = states[2].clone(), torch.empty_like(tokens)
    for row, position in torch.cartesian_prod(torch.arange(16), torch.arange(tokens.shape[1])):
        donors = (tokens == tokens[row, position]).nonzero()
        of, at = donors[int(torch.randint(len(donors), (), generator=generator))]
        h[row, position] = states[int(torch.randint(7, (), generator=generator)), of, at]
        bits = torch.linalg.lstsq(code.write.weight, h[row, position] - code.write.bias).solution
        as_code = sum(1 << k for k, bit in enumerate(bits.tolist()) if bit > 0)
        values[row, position] = number[int(tokens[row, position]), as_code]
    runs = model(tokens, n_loops=6, start_at_loop=2, state=h, return_type="all_logits")
    predicted = table.automaton.run(tokens, 4, values)
    for logits, now in zip(runs, predicted):
        asked = table.automaton.read(tokens, now)
        assert (asked != UNKNOWN).all()
        assert torch.equal(asked, logits.argmax(-1))


def test_the_smallest_table_answers_alike():
    model, tokens = coded(4, seed=3), random_inputs(12, torch.Generator().manual_seed(0))
    table = tabulate_code(model, PAIRS)
    small = table.automaton.merged()
    assert len(small.cells) < len(table.automaton.cells)
    logits = model(tokens, n_loops=12, return_type="all_logits")
    for now, seen in zip(small.run(tokens, 12), logits):
        assert torch.equal(small.read(tokens, now), seen.argmax(-1))


@pytest.mark.parametrize(
    "changes",
    [
        {"attention_window": 2},
        {"attention_window": None},
        {"n_layers": 2},
        {"n_prelude": 1},
        {"n_coda": 1},
        {"positions": "absolute", "relative_window": None, "n_ctx": 32},
        {"causal": False},
    ],
)
def test_a_loop_that_reads_farther_or_its_place_is_not_tabulated(changes):
    assert is_finite(coded(2))
    assert not is_finite(coded(2, **changes))


def test_a_bit_at_its_threshold_is_not_sure():
    model = coded(2, seed=1)
    assert tabulate_code(model, PAIRS).sure
    with torch.no_grad():  # one transition is put on the threshold, up to rounding
        _, cache = model.run_with_cache(torch.tensor([[4]]), n_loops=1)
        assert model.code is not None
        model.code.read.bias[0] -= cache.stack("hook_code_pre")[0, 0, 0, 0]
    table = tabulate_code(model, PAIRS)
    assert not table.sure
    assert table.margin < 1e-5


def test_a_model_with_a_code_is_read_whole():
    found = decompile(coded(2, seed=5), ADDITION, n=4, lengths=(4, 8), examples=16)
    assert found.table is not None
    assert found.program is not None
    assert found.claim.grade == EXACT
    assert found.claim.transitions == found.table.transitions
    assert "at any length" in str(found.claim)
    assert found.evidence["agree"].equals(found.evidence["of"])


def every_single_interchange(model: LoopedTransformer, n: int) -> InterchangePairs:
    """At every position and loop of every input, every state that its token has there."""
    batch, n_loops = every_input(ADDITION, n), ADDITION.n_loops(n)
    states = model(batch.inputs, n_loops=n_loops, return_type="states")
    parts = []
    for position in range(batch.inputs.shape[1]):
        of = states[:, :, position].flatten(0, 1)
        tokens = batch.inputs[:, position].repeat(n_loops + 1)
        kinds, kind = torch.cat([tokens[:, None], of], 1).unique(dim=0, return_inverse=True)
        one = torch.empty(len(kinds), dtype=torch.long)
        one[kind] = torch.arange(len(kind))  # a run and loop that comes to each
        alike = kinds[:, 0] == tokens[:, None]
        other = kind[:, None] != torch.arange(len(kinds))
        base, source = (alike & other).nonzero().T
        (loop, row), (source_loop, source_row) = (
            (at // len(batch), at % len(batch)) for at in (base, one[source])
        )
        parts.append(
            InterchangePairs.of(
                batch, base=row, source=source_row, loop=loop, source_loop=source_loop,
                positions=torch.full((len(row), 1), position), n_loops=n_loops,
            )
        )  # fmt: skip
    return join(parts, "position", tuple(map(str, range(len(parts)))))


def test_the_printed_program_is_the_model_under_every_single_interchange():
    """At every loop, of every input; and it compiles into weights that do the same."""
    model = load_pretrained("addition-finite")
    program = finite_program(model, ADDITION)
    assert program is not None
    again = compile_program(program, max_length=5).model
    for n in (1, 3):
        pairs = every_single_interchange(model, n)
        assert len(pairs) > 4**n
        seen = agreement(model, program, pairs)
        assert (seen["agree"] == seen["of"]).all()
        answers = InterchangeRun(model, pairs).interchange()
        compiled = InterchangeRun(again, pairs).interchange()
        asked = pairs.scored[:, None].expand_as(answers)
        assert torch.equal(answers[asked], compiled[asked])


INPUTS = Surroundings.of(get_task("addition"), (1, 2, 3))
LOCAL = [name for name in list_programs("addition") if is_local(get_program(name))]


def table_of(program):
    tabulated = tabulate_program(program, INPUTS.pairs)
    assert tabulated is not None
    return tabulated[0]


def test_which_programs_are_local():
    assert "ripple" in LOCAL and "carry_save" in LOCAL
    assert "lookahead" not in LOCAL  # reads farther in every loop
    assert not is_local(get_program("copy"))  # reads its place


@pytest.mark.parametrize("name", LOCAL)
def test_a_table_runs_as_its_program(name):
    program = get_program(name)
    table = table_of(program)
    inputs = (
        get_task("addition")
        .sample(8, batch_size=32, generator=torch.Generator().manual_seed(0))
        .inputs
    )
    trace = program.trace(inputs, n_loops=10)
    for loop, values in enumerate(table.run(inputs, 10)):
        said = table.read(inputs, values)
        outputs = trace.outputs[loop]
        assert torch.equal(said, outputs.where(outputs >= 0, UNKNOWN))


@pytest.mark.parametrize("name", LOCAL)
def test_a_stock_program_is_itself_and_no_other(name):
    table = table_of(get_program(name))
    found = [other for other in LOCAL if same_program(table, get_program(other), INPUTS)]
    assert found == [name]


def mutated(name):
    program, always = get_program(name), mutations.ALWAYS
    (read,) = mutations.reads_of_other_positions(program)
    yield mutations.negated(program, "carry")
    yield mutations.doubled(program, "carry")
    yield mutations.read_from_a_copy(program, read, trust="copy")
    if name == "ripple":
        yield mutations.answers_by_the_larger(program, "carry")
    else:
        yield mutations.kept_shorter(program, "carry", always, loops=2)


@pytest.mark.parametrize("name", ["ripple", "sticky_ripple"])
def test_it_agrees_with_every_interchange(name):
    """Mutations are the program exactly where no interchange at length 4 tells the two apart."""
    original, seen = get_program(name), set()
    for program in mutated(name):
        table = table_of(program)
        same = same_program(table, original, INPUTS)
        told = equivalence(original, program, lengths=(4,))
        # A program that lies a loop off is another table.
        plain = told.program_offset == ProgramOffset()
        assert (same is not None and same.starts_alike) == (told.equivalent and plain), program
        seen.add(told.equivalent and plain)
    assert seen == {True, False}


def test_a_first_guess_of_its_own_is_found():
    ripple = get_program("ripple")
    guess = tok_map(tokens, {1: 1, 2: 1}, default=0)
    other = replace(ripple, name="ripple from propagate", prepare={"carry": guess})
    table = table_of(other)
    same = same_program(table, ripple, INPUTS)
    assert same is not None and not same.starts_alike
    assert {own: values for (_, own), values in same.first_guess.items()} == {
        0: (0,), 1: (1,), 2: (1,), 3: (0,), 4: (0,),
    }  # fmt: skip
    named = with_first_guess(same)
    assert named is not None
    assert equivalence(named, other, lengths=(3,)).equivalent
    assert not equivalence(named, "ripple", lengths=(3,)).equivalent


def test_answers_before_the_first_loop_are_part_of_the_first_guess():
    """A value that answers otherwise and never recurs leaves the rest of the table what it is."""
    ripple = get_program("ripple")
    fresh = {**ripple.prepare, "fresh": full(1)}
    finish = where(eq(var("fresh"), 1), 0, ripple.finish)
    other = replace(ripple, prepare=fresh, step={**ripple.step, "fresh": full(0)}, finish=finish)
    table = table_of(other)
    same = same_program(table, ripple, INPUTS)
    assert same is not None and not same.starts_alike
    assert {*same.first_guess.values()} == {None} and with_first_guess(same) is None
    assert same_algorithm(table, table_of(ripple), INPUTS.asked)
    lasting = replace(other, step={**ripple.step, "fresh": var("fresh")})
    assert same_program(table_of(lasting), ripple, INPUTS) is None


def test_two_automata_are_one_up_to_their_first_guess():
    ripple = get_program("ripple")
    other = replace(ripple, prepare={"carry": full(1)})
    assert same_algorithm(table_of(ripple), table_of(other), INPUTS.asked)
    for name in ("sticky_ripple", "ripple_held_2"):
        assert not same_algorithm(table_of(ripple), table_of(get_program(name)), INPUTS.asked)


def test_a_program_that_keeps_its_start_is_another():
    """Where the first guess lasts, it is part of the algorithm."""
    ripple = get_program("ripple")
    stuck = replace(
        ripple,
        name="ripple with a switch",
        prepare={"carry": full(0), "switch": full(1)},
        step={**ripple.step, "carry": ripple.step["carry"] & full(1)},
    )
    table = table_of(stuck)
    assert same_program(table, ripple, INPUTS) is not None
    for name in ("sticky_ripple", "carry_save"):
        assert same_program(table, get_program(name), INPUTS) is None
