"""Programs compared with models: what is run is named, and nothing else ever is."""

from __future__ import annotations

import functools
import json
import operator
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from loopinterp.comparison import ProgramModel, SpreadPairs, compare_programs, statement
from loopinterp.comparison.counts import MANIFOLD, REACHED, UNREACHED, count_evidence
from loopinterp.comparison.evidence import gather_evidence
from loopinterp.comparison.rule import decide
from loopinterp.compiler import compile_program, rotate
from loopinterp.core.errors import InputError
from loopinterp.core.results import Result, load_result
from loopinterp.core.storage import read_arrays, write_arrays
from loopinterp.probing.probe_grid import with_random_weights
from loopinterp.programs import (
    UNKNOWN,
    Linear,
    LoopProgram,
    eq,
    full,
    get_program,
    indices,
    kqv,
    larger,
    list_programs,
    shift_right,
    tok_map,
    tokens,
    var,
    where,
)
from loopinterp.programs.mutations import changed
from loopinterp.tasks import IGNORE, Addition, Batch, get_task

N = 6
ADDITIONS = list_programs("addition")
TABLE = (
    "late_ripple",
    "ripple_held_2",
    "ripple_held_3",
    "ripple_held_by_token",
    "ripple_held_until_kill",
    "ripple_held_where_propagating",
)
"""Programs that an earlier comparison took for the ripple or the sticky ripple."""


# Most tests compare on half the pairs of a first look alone: a name by default takes many more.
FEW = SpreadPairs(pairs=384, same_value=64)
compare = functools.partial(compare_programs, pairs=FEW)


def drawn(task: str, n: int = N, batch_size: int = 96, seed: int = 0, **settings: Any) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    return get_task(task, **settings).sample(n, batch_size=batch_size, generator=generator)


@cache
def compiled(program: str, length: int = N + 1):
    return rotate(compile_program(program, max_length=length), seed=1).model


@cache
def among_all():
    """All programs of addition, with inputs and pairs that tell them apart; no model is run."""
    candidates, batch = [get_program(p) for p in ADDITIONS], drawn("addition")
    return candidates, batch, FEW(None, candidates, batch, torch.Generator().manual_seed(0))


@cache
def held_against(program: str, *rivals: str):
    """A model of one program compared with others, once for all tests that look at it."""
    return compare(compiled(program), list(rivals), drawn("addition"))


@cache
def compared_with_its_twin():
    """The ripple's model compared with the ripple twice, under two names."""
    ripple = get_program("ripple")
    twin = LoopProgram(
        "twin", "addition", ripple.inputs, ripple.prepare, ripple.step, ripple.finish, Linear()
    )
    return compare(compiled("ripple"), [ripple, twin], drawn("addition"))


@pytest.mark.parametrize("program", ADDITIONS)
def test_every_program_of_addition_is_named_where_it_is_listed_and_no_other_where_it_is_not(
    program,
):
    # The first look alone: what is asked of a name beyond it is tested on short lists, below.
    candidates, batch, pairs = among_all()
    model = compiled(program)
    evidence = gather_evidence(
        model, candidates, [batch], lambda model, programs, batch, generator: pairs, seed=0
    )
    counts = count_evidence([evidence]).sel(model=0)
    assert decide(counts).identified == program
    others = [p for p in ADDITIONS if p != program]
    left_out = decide(counts.sel(program=others, rival=others))
    assert left_out.identified is None
    assert left_out.reasons


@pytest.mark.parametrize("program", TABLE)
def test_a_carry_held_for_a_while_is_neither_a_ripple_nor_a_sticky_one(program):
    verdict = held_against(program, "ripple", "sticky_ripple").verdict
    assert verdict.identified is None
    assert verdict.followed_for < verdict.longest_delay


@pytest.mark.parametrize(
    ("program", "n"),
    [("parity", 6), ("copy", 4), ("binary_sum", 3), ("prefix_xor", 6), ("multiplication", 2)],
)
def test_the_programs_of_other_tasks_are_named(program, n):
    chosen = get_program(program)
    settings: dict[str, Any] = dict(chosen.task_settings)
    batch = drawn(chosen.task, n, **settings)
    model = compiled(program, batch.inputs.shape[1])
    verdict = compare(model, [program], batch).verdict
    assert verdict.identified == program, verdict


def test_a_name_is_given_on_more_pairs_than_the_first_look():
    of_all = {"model": "model 0", "program": "ripple", "stratum": "all"}
    rivals, first_look = ["ripple", "sticky_ripple"], SpreadPairs().pairs
    named = compare_programs(compiled("ripple"), rivals, drawn("addition"))
    assert int(named.data["pairs"].sel(of_all)) > 2 * first_look
    none = compare_programs(compiled("ripple_held_3"), rivals, drawn("addition"))
    assert int(none.data["pairs"].sel(of_all)) < first_look
    asked_for = compare(compiled("ripple"), rivals, drawn("addition"), pairs=SpreadPairs())
    assert int(asked_for.data["pairs"].sel(of_all)) < first_look


def test_the_heading_says_no_more_than_the_statement():
    assert compared_with_its_twin().findings()[0].value == "none identified"
    wrong = compare(compiled("one_shot"), ["ripple", "lookahead"], drawn("addition"))
    assert wrong.verdict.refuted
    assert wrong.findings()[0].value == "none of these"
    alone = compare(compiled("one_shot"), ["ripple"], drawn("addition"))
    assert alone.findings()[0].value == "not ripple"


def test_what_holds_is_said_when_nothing_is_named():
    result = held_against("ripple_held_3", "ripple", "sticky_ripple")
    verdict = result.verdict
    assert verdict.closest == "sticky_ripple"
    assert verdict.followed_for == 2  # a injected carry lives as long as three loops
    assert set(verdict.clean_fits) == {"ripple", "sticky_ripple"}
    alike = result.data["alike"].sel(model="model 0", program="ripple", rival="sticky_ripple")
    assert bool(alike)
    iia = result.data["iia"].sel(
        model="model 0", program="sticky_ripple", stratum="all", estimate="value"
    )
    assert float(iia.sel(delay="2")) == 1
    assert float(iia.sel(delay="4")) < 0.5


def test_programs_that_answer_alike_undisturbed_differ_only_in_states_that_no_run_reaches():
    result = held_against("ripple", "ripple", "sticky_ripple")
    run = result.data["whole_run"].sel(model="model 0", program="sticky_ripple", estimate="value")
    assert float(run.sel(stratum=f"{MANIFOLD}: {REACHED}")) == 1
    assert float(run.sel(stratum=f"{MANIFOLD}: {UNREACHED}")) < 0.9


def test_two_programs_that_no_pair_tells_apart_are_a_tie():
    verdict = compared_with_its_twin().verdict
    assert verdict.identified is None
    assert verdict.unseparated == verdict.indistinguishable == verdict.equivalent == ["twin"]
    assert "no_pair_separates" in [reason.code for reason in verdict.reasons]


def test_where_no_interchange_changes_an_answer_no_share_is_said():
    batch = drawn("addition")
    batch.targets[:, 2:] = IGNORE  # the first bit, into which no carry comes
    result = compare(compiled("ripple"), ["ripple"], batch)
    assert result.data["specific"].isnull().all() and result.verdict.identified is None
    assert not any("nan" in finding.text for finding in result.findings())


def test_what_was_not_tried_is_listed():
    result = compare(compiled("ripple"), ["ripple"], drawn("addition"))
    always = ["other_token", "third_interchange", "part_of_state"]
    assert set(result.verdict.untried) - {"several_positions"} == set(always)
    assert 0.5 < result.verdict.off_distribution < 1
    narrow = SpreadPairs(other_loops=0, repeated=0)
    blind = compare(compiled("ripple"), ["ripple"], drawn("addition"), pairs=narrow)
    assert set(blind.verdict.untried) == {
        *always,
        "initial_state",
        "from_initial_state",
        "several_positions",
        "other_loop",
        "repeated",
    }


def test_a_length_that_was_not_tuned_on_counts_too():
    """A model that runs another program on longer inputs is not named by the shorter ones."""

    class Changing:
        def __init__(self):
            self.short, self.long = (compiled(p, 10) for p in ("ripple", "ripple_held_2"))

        def __getattr__(self, name):
            def call(*args):
                of = self.short if args[0].shape[1] <= N + 1 else self.long
                return getattr(of, name)(*args)

            if name not in ("embed", "initial_state", "step", "readout"):
                raise AttributeError(name)
            return call

    rivals = ["ripple", "sticky_ripple"]
    short, both = drawn("addition"), [drawn("addition"), drawn("addition", 9)]
    assert compare(Changing(), rivals, short).verdict.identified == "ripple"
    verdict = compare(Changing(), rivals, both).verdict
    assert verdict.identified is None
    assert compare(compiled("ripple", 10), rivals, both).verdict.identified == "ripple"


def test_a_state_that_holds_more_than_the_program_is_not_the_program():
    """The same-value donor is a control that bites."""
    result = compare(
        compiled("carry_save"), ["ripple"], drawn("addition"), pairs=SpreadPairs(same_value=600)
    )
    assert float(result.data["same_value"].sel(estimate="high").item()) < 1


def test_random_weights_run_no_program(untrained):
    batch = drawn("addition")
    some = ["ripple", "sticky_ripple", "carry_save", "lookahead"]
    verdict = compare(untrained, some, batch).verdict
    assert verdict.identified is None
    shuffled = with_random_weights(compiled("ripple"), seed=0)
    assert compare(shuffled, some, batch).verdict.identified is None


def test_several_models_get_a_verdict_each():
    models = [compiled("ripple"), compiled("sticky_ripple")]
    result = compare(models, ["ripple", "sticky_ripple"], drawn("addition"), names=["a", "b"])
    assert {name: v.identified for name, v in result.verdicts.items()} == {
        "a": "ripple",
        "b": "sticky_ripple",
    }
    assert result.verdict.identified is None
    assert [reason.code for reason in result.verdict.reasons] == ["models_differ"]
    text, said = result.findings()[0].text, statement(result)
    assert all(f"{name}: {statement(result, name)}" in said for name in ("a", "b"))
    assert all(f"{name}: {statement(result, name).split('.')[0]}" in text for name in ("a", "b"))
    with pytest.raises(InputError) as refused:
        statement(result, "c")
    assert refused.value.given == "'c'"
    assert result.data.sizes["model"] == 2
    alike = compare([models[0]] * 2, ["ripple"], drawn("addition"), names=["a", "b"])
    assert alike.verdict.identified == "ripple"


def test_scores_count_only_pairs_on_which_something_happens():
    result = compare(compiled("ripple"), ["ripple", "latched_chain"], drawn("addition"))
    data = result.data.isel(model=0)
    assert (data["effective"] <= data["pairs"]).all()
    own = data.sel(program="ripple", stratum="all")
    # The program that is run says that something happens wherever something does.
    assert np.nanmax(own["no_interchange"]) == 0
    assert np.nanmin(own["iia"].sel(estimate="value")) == 1
    # What is predicted up to the end is the whole-run accuracy, as the figure of delays says.
    whole_run = data["whole_run"].sel(stratum="all").values
    np.testing.assert_array_equal(data["followed"].sel(delay="end").values, whole_run)


@pytest.mark.parametrize("program", ["ripple", "ripple_held_2"])
def test_several_positions_at_once(program):
    verdict = compare(
        compiled(program),
        ["ripple", "ripple_held_2", "sticky_ripple"],
        drawn("addition"),
        pairs=SpreadPairs(sites=2),
    ).verdict
    assert verdict.identified == program, verdict


DIGITS, BOS = 4, 4
digit = tok_map(tokens, {BOS: 0, **{d: d for d in range(DIGITS)}})


def running_max(name: str, step, prepare=None) -> LoopProgram:
    inputs = (*map(str, range(DIGITS)), "BOS")
    first = {"best": digit if prepare is None else prepare}
    return LoopProgram(name, "max", inputs, first, {"best": step}, var("best"), Linear())


def test_programs_of_a_task_of_ones_own():
    generator = torch.Generator().manual_seed(0)
    digits = torch.randint(DIGITS, (96, N), generator=generator)
    inputs = torch.cat([torch.full((96, 1), BOS), digits], 1)
    targets = torch.cat([torch.full((96, 1), IGNORE), digits.cummax(1).values], 1)
    each = torch.full((96,), N)
    batch = Batch(inputs, targets, each, each)
    rivals = [
        running_max("ripple", larger(digit, shift_right(var("best")))),
        running_max("keeper", larger(var("best"), shift_right(var("best")))),
        running_max("at once", kqv(digit, digit, digit, "true", mode="max"), full(UNKNOWN)),
    ]
    for program in rivals[:2]:
        model = ProgramModel(program, max_length=inputs.shape[1])
        assert compare(model, rivals, batch).verdict.identified == program.name


@pytest.mark.parametrize(
    ("programs", "given"),
    [
        ([], "none"),
        (["ripple", "ripple"], "ripple (addition), ripple (addition)"),
        (["ripple", "parity"], "ripple (addition), parity (parity)"),
        ("ripple", "'ripple'"),
        (["riple"], "'riple'"),
    ],
)
def test_wrong_programs_are_refused(programs, given):
    with pytest.raises(InputError) as refused:
        compare(compiled("ripple"), programs, drawn("addition"))
    assert refused.value.given == given


def test_wrong_arguments_are_named():
    generator = torch.Generator().manual_seed(0)
    mixed = Addition().sample(torch.tensor([4, 8, 6]), generator=generator)
    good = drawn("addition")
    cases: Any = (
        ("data", drawn("addition", batch_size=1), {}),
        ("data", mixed, {}),
        ("threshold", good, {"threshold": 95}),
        ("names", good, {"names": ["a", "b"]}),
        ("seed", good, {"seed": -1}),
    )
    for what, data, options in cases:
        with pytest.raises(InputError) as refused:
            compare(compiled("ripple"), ["ripple"], data, **options)
        assert refused.value.what == what


def test_a_saved_comparison_says_and_shows_the_same(tmp_path):
    result = compare(
        compiled("ripple"), ["ripple", "latched_chain"], drawn("addition", batch_size=48)
    )
    again: Result = load_result(result.save(tmp_path))
    assert again.findings() == result.findings()
    assert again.findings()[0].section == "verdict"
    for figure in again.figures():
        assert figure.section == "program"
        assert len(figure.caption) > 60
        assert figure.plot.to_json()
    titles = [figure.title for figure in again.figures()]
    assert len(set(titles)) == len(titles) >= 5
    # One candidate has no rival to be compared with.
    alone = compare(compiled("ripple"), ["ripple"], drawn("addition", batch_size=48))
    assert len(alone.figures()) == len(titles) - 1


def test_a_file_with_the_names_and_the_text_of_older_versions_is_read(tmp_path):
    result = compare(
        compiled("ripple"), ["latched_chain", "ripple_held_2"], drawn("addition", batch_size=48)
    )
    path = result.save(tmp_path)
    arrays, metadata = read_arrays(path)
    header = json.loads(metadata["loopinterp.result"])
    [verdict] = header["fields"]["verdicts"].values()
    older = {
        "identified": "winner",
        "closest": "nearest",
        "clean_fits": "undisturbed",
        "longest_delay": "longest",
        "unseparated": "tied",
    }
    for name, old in older.items():
        verdict[old] = verdict.pop(name)
    verdict["statement"] = "The words of an older version."
    offsets = [str(offset) for offset in result.alignments["model 0"]]
    header["fields"]["alignments"] = {"model 0": offsets}
    write_arrays(path, arrays, metadata={"loopinterp.result": json.dumps(header)})
    again: Any = load_result(path)
    assert again.verdict == result.verdict and again.verdict.reasons
    assert again.alignments == {"model 0": offsets}
    assert again.findings() == result.findings()


def test_a_program_that_one_input_in_a_hundred_does_not_follow_is_not_named():
    """The others show nothing of it, and many pairs of few inputs no more than few."""
    ripple, sticky = get_program("ripple"), get_program("sticky_ripple")
    here = [eq(shift_right(tokens, back), token) for back, token in enumerate((1, 2, 1, 1, 2))]
    flagged = kqv(indices, full(5), functools.reduce(operator.and_, here), "==", default=0)
    carry = where(flagged, sticky.step["carry"], ripple.step["carry"])
    mixed = compile_program(changed(ripple, "mixed", step={"carry": carry}), max_length=9).model
    found = compare_programs(mixed, ["ripple"], Addition(), n=8)
    assert found.verdict.identified is None
    _, low, high = found.data["whole_run"].sel(program="ripple", stratum="all").values[0]
    assert low < 0.993 < high  # the share of 4,096 inputs
