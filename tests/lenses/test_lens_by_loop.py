from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import loopinterp
from loopinterp.compiler import compile_program
from loopinterp.core.errors import InputError
from loopinterp.lenses import FittedLens, LensResult, fit_jacobian_lens, fit_tuned_lens, lens_study
from loopinterp.lenses.fitted_lens import places
from loopinterp.models import LoopedTransformer, iterate
from loopinterp.probing import carry_study, sample_chains
from loopinterp.programs import get_program
from loopinterp.tasks import Addition, Batch
from tests.lenses.lens_toys import KINDS, Affine, Scripted, inputs, tokens, transformer

FITTED = {
    "tuned": lambda m, x, **o: fit_tuned_lens(m, x, steps=2, **o),
    "jacobian": fit_jacobian_lens,
}


def logits_of(seed: int = 0, loops: int = 6, classes: int = 4) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 2 * torch.randn(loops, 5, 3, classes, generator=generator)


def test_measures_are_those_of_plain_python() -> None:
    logits = logits_of()
    model = Scripted(logits)
    data = lens_study(model, model.inputs, n_loops=5).data.sel(layer="state")
    p = logits.double().softmax(-1).tolist()
    for row in range(5):
        for pos in range(3):
            end = p[5][row][pos]
            wanted = max(range(4), key=end.__getitem__)
            answers = []
            for loop in range(6):
                q = p[loop][row][pos]
                at = data.sel(loop=loop).isel(batch=row, pos=pos)
                answers.append(max(range(4), key=q.__getitem__))
                assert at["answer"] == answers[-1]
                assert at["rank"] == 1 + sum(one > q[wanted] for one in q)
                assert float(at["probability"]) == pytest.approx(q[wanted], abs=1e-6)
                entropy = -sum(one * math.log(one) for one in q)
                assert float(at["entropy"]) == pytest.approx(entropy, abs=1e-5)
                kl = sum(a * math.log(a / b) for a, b in zip(end, q))
                assert float(at["kl"]) == pytest.approx(kl, abs=1e-5)
            at = data.isel(batch=row, pos=pos)
            assert at["wanted"] == wanted
            assert at["flips"] == sum(a != b for a, b in itertools.pairwise(answers[1:]))
            kept = [t for t in range(1, 6) if len({*answers[t:]}) == 1]
            assert at["settled"] == kept[0]


def test_baselines_are_those_of_plain_python() -> None:
    logits = logits_of(3)
    model = Scripted(logits)
    result = lens_study(model, model.inputs, n_loops=5)
    p = logits[-1].double().softmax(-1)
    mean = p.mean((0, 1))
    for row in range(5):
        gaps = (p[row] * (p[row] / mean).log()).sum(-1)
        assert float(result.data["unigram_kl"][row]) == pytest.approx(float(gaps.mean()), abs=1e-5)
    common = p.argmax(-1).flatten().bincount().argmax()
    share = (p.argmax(-1) == common).double().mean(1)
    np.testing.assert_allclose(result.data["majority_top"], share)
    assert float(result.data["unigram_kl"].mean()) > 0.1


@pytest.mark.parametrize("name", ["logit", "coda"])
@pytest.mark.parametrize("kind", KINDS)
def test_lenses_are_exact_at_the_last_loop_and_layer(kind: str, name: Any) -> None:
    model = transformer(kind)
    result = lens_study(model, tokens(), lens=name, n_loops=3, inside=True)
    end = result.data["kl"].sel(loop=3).isel(layer=[-2, -1])
    if name == "logit" and model.coda:
        assert float(end.min()) > 1e-4  # what a coda does is not in it
    else:
        assert float(end.max()) < 1e-6
    assert float(result.data["kl"].sel(loop=1).max()) > 1e-4


@pytest.mark.parametrize("name", FITTED)
@pytest.mark.parametrize("kind", ["plain", "loop norm", "prelude and coda"])
def test_fitted_lenses_are_exact_at_the_end(kind: str, name: str) -> None:
    model = transformer(kind)
    lens = FITTED[name](model, tokens(seed=4), n_loops=3, inside=True)
    result = lens_study(model, tokens(), lens=lens, inside=True)
    assert float(result.data["kl"].sel(loop=3, layer="state").max()) == 0
    assert result.n_fit > 0 and result.lens == name
    if name == "tuned":  # and at the last layer, which leaves the last state
        assert float(result.data["kl"].sel(loop=3).isel(layer=-2).max()) < 1e-6
    if name == "tuned":  # a fit by name makes more than two steps
        return
    named = lens_study(model, tokens(), lens=name, n_loops=3, inside=True, fit_on=tokens(seed=4))  # pyright: ignore
    assert float(named.data["kl"].sel(loop=3, layer="state").max()) == 0


def test_a_reading_is_the_readout_of_what_the_lens_makes_of_a_place() -> None:
    model, x = transformer("prelude and coda"), tokens()
    assert model.ln_final is not None
    g = torch.Generator().manual_seed(0)
    lens = FittedLens(
        kind="jacobian",
        matrix=torch.randn(6, 8, 8, generator=g),
        offset=torch.randn(6, 8, generator=g),
        places=[(0, None), (1, 0), (1, 1), (1, None), (2, 0), (2, 1)],
        n_loops=2,
    )
    result = lens_study(model, x, lens=lens, inside=True, seed=3)
    logit = lens_study(model, x, lens="logit", n_loops=2, inside=True)
    assert result.data["reading"].values.tolist() == ["lens", "plain", "shuffled"]
    np.testing.assert_allclose(
        result.data["reading_kl"].sel(reading="plain"),
        logit.data["reading_kl"].sel(reading="lens"),
        rtol=1e-5,
    )
    for place in places(model, x, 2, inside=True):
        read = model.readout(lens.transport(place.residual, place.loop, place.layer))
        label = "state" if place.layer is None else f"layer {place.layer}"
        answer = result.data["answer"].sel(loop=place.loop, layer=label)
        np.testing.assert_array_equal(answer, read.argmax(-1))
        plain = model.unembedding(model.ln_final(place.ended)).argmax(-1)
        np.testing.assert_array_equal(logit.data["answer"].sel(loop=place.loop, layer=label), plain)


def test_the_initial_state_has_no_layers() -> None:
    result = lens_study(transformer("loop norm"), tokens(), n_loops=2, inside=True)
    assert result.top.notnull().values.tolist() == [[False, False, True], [True] * 3, [True] * 3]
    first = result.data.sel(loop=0).isel(layer=0)
    assert (first["answer"] == -1).all() and (first["rank"] == -1).all()
    assert first["kl"].isnull().all() and first["reading_kl"].isnull().all()
    assert result.top.isnull().sum() == 2


def test_shuffled_components_are_read_by_the_same_lens() -> None:
    model = Affine()
    result = lens_study(model, inputs(), n_loops=2, seed=1)
    generator, orders = torch.Generator().manual_seed(1), []
    for _ in range(4):
        orders.append(torch.randperm(3, generator=generator))
    end = model.readout([h for _, h in iterate(model, inputs(), 2)][-1]).log_softmax(-1)
    for loop, h in iterate(model, inputs(), 2):
        gaps = []
        for order in orders:
            q = model.readout(h[..., order]).log_softmax(-1)
            gaps.append((end.exp() * (end - q)).sum(-1).mean(1))
        shuffled = result.data["reading_kl"].sel(loop=loop, layer="state", reading="shuffled")
        np.testing.assert_allclose(shuffled, torch.stack(gaps).mean(0), rtol=1e-4, atol=1e-6)


def test_the_diagonal_of_the_transfer_is_each_loops_own_reading() -> None:
    model = transformer("loop norm")
    lens = fit_jacobian_lens(model, tokens(seed=4), n_loops=4)
    data = lens_study(model, tokens(), lens=lens).data
    for loop in range(5):
        own_kl = data["reading_kl"].sel(loop=loop, layer="state", reading="lens")
        np.testing.assert_allclose(
            data["transfer_kl"].sel(translator=loop, applied=loop), own_kl, rtol=1e-4, atol=1e-6
        )
    identity = data["transfer_kl"].sel(translator=4)
    plain = data["reading_kl"].sel(reading="plain", layer="state")
    np.testing.assert_allclose(identity, plain, rtol=1e-4, atol=1e-6)
    shared = fit_tuned_lens(model, tokens(seed=4), n_loops=4, steps=2, shared=True)
    assert "transfer_kl" not in lens_study(model, tokens(), lens=shared).data


def test_some_positions_are_those_of_all() -> None:
    model = transformer("prelude and coda")
    full = lens_study(model, tokens(), lens="coda", n_loops=3, inside=True)
    some = lens_study(model, tokens(), lens="coda", n_loops=3, inside=True, positions=[-1, 1])
    assert some.data["pos"].values.tolist() == [3, 1]
    for name in ("answer", "rank", "kl", "probability", "settled", "flips"):
        np.testing.assert_allclose(some.data[name], full.data[name].sel(pos=[3, 1]), rtol=1e-6)


def test_right_answers_are_wanted_where_they_are_known() -> None:
    batch = Addition().encode([(2, 1), (3, 1), (7, 1)], n=3)
    model = compile_program("ripple", max_length=4).model
    result = lens_study(model, batch, lens="coda")
    assert result.targets and result.n_loops == int(batch.n_loops[0])
    np.testing.assert_array_equal(
        result.data["wanted"], batch.targets.where(batch.targets >= 0, torch.tensor(-1))
    )
    assert (result.data["rank"].where(result.asked, -1) == result.data["rank"]).all()
    assert float(result.top.sel(layer="state")[-1]) == 1
    assert not lens_study(model, batch.inputs, n_loops=4).targets


def test_it_does_not_depend_on_how_many_examples_are_held(monkeypatch: pytest.MonkeyPatch) -> None:
    full = lens_study(transformer("loop norm"), tokens(), n_loops=3, inside=True)
    monkeypatch.setattr("loopinterp.dynamics.measures.CHUNK_BYTES", 1)
    parts = lens_study(transformer("loop norm"), tokens(), n_loops=3, inside=True)
    for name, values in full.data.items():
        np.testing.assert_allclose(parts.data[name], values, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("lens", ["coda", "tuned", "jacobian"])
def test_a_lens_is_fitted_on_others_than_it_reads(lens: Any) -> None:
    model = compile_program("ripple", max_length=4).model
    data = Addition()
    if lens == "tuned":  # a step takes time, a compiled model having many components
        lens = fit_tuned_lens(model, data, n=3, steps=3, seed=9)
    result = lens_study(model, data, lens=lens, n=3, batch_size=4)
    assert float(result.data["kl"].sel(loop=result.n_loops).max()) < 1e-6
    if lens == "jacobian":
        assert result.n_fit == 32
        inputs_alone = data.encode([(1, 2)], n=3).inputs
        with pytest.raises(InputError) as caught:
            lens_study(model, inputs_alone, lens=lens, n_loops=2)
        assert caught.value.what == "fit_on"


def test_positions_keep_the_order_they_are_asked_in() -> None:
    full = lens_study(transformer(), tokens(), n_loops=2)
    turned = lens_study(transformer(), tokens(), n_loops=2, positions=[3, 2, 1, 0])
    assert turned.data["pos"].values.tolist() == [3, 2, 1, 0]
    np.testing.assert_array_equal(turned.data["kl"], full.data["kl"][..., ::-1])


def test_right_answers_are_classes_of_the_model() -> None:
    model = Scripted(logits_of())
    counts = torch.full((5,), 5)
    targets = torch.full((5, 3), 4)
    batch = Batch(inputs=model.inputs, targets=targets, n=counts, n_loops=counts)
    with pytest.raises(InputError) as caught:
        lens_study(model, batch)
    assert caught.value.what.startswith("targets") and "4" in caught.value.given


REFUSED: dict[str, dict[str, Any]] = {
    "no position": {"positions": []},
    "a position twice": {"positions": [1, -3]},
    "a name that is none": {"lens": "tune"},
    "a position that is not there": {"positions": [4]},
    "no loop": {"n_loops": 0},
    "inputs alone, without loops": {"n_loops": None},
}


@pytest.mark.usefixtures("no_type_checks")
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_read_is_refused(name: str) -> None:
    asked: dict[str, Any] = {"n_loops": 2} | REFUSED[name]
    with pytest.raises(InputError) as caught:
        lens_study(transformer(), tokens(), **asked)
    assert [caught.value.what] == [*REFUSED[name]]


def test_a_lens_leads_to_the_end_it_was_fitted_for() -> None:
    lens = fit_jacobian_lens(transformer(), tokens(), n_loops=2)
    with pytest.raises(InputError) as caught:
        lens_study(transformer(), tokens(), lens=lens, n_loops=3)
    assert caught.value.what == "n_loops"
    with pytest.raises(InputError) as caught:
        lens_study(transformer(), tokens(), lens=lens, inside=True)
    assert caught.value.what == "place"
    with pytest.raises(InputError, match="hooks"):
        lens_study(Affine(), inputs(), n_loops=2, inside=True)


def test_examples_end_together_and_are_asked_something() -> None:
    model = compile_program("ripple", max_length=6).model
    mixed = Addition().sample(torch.tensor([3, 5]), generator=torch.Generator().manual_seed(0))
    with pytest.raises(InputError) as caught:
        lens_study(model, mixed)
    assert caught.value.what == "data"
    batch = Addition().encode([(2, 1)], n=3)
    silent = [k for k, target in enumerate(batch.targets[0].tolist()) if target < 0]
    with pytest.raises(InputError) as caught:
        lens_study(model, batch, positions=silent)
    assert caught.value.what == "data"


@pytest.fixture(scope="module")
def trained() -> LoopedTransformer:
    return loopinterp.load_pretrained("addition")


def test_the_logit_lens_reads_a_bit_when_the_carry_study_says(trained: LoopedTransformer) -> None:
    """On the zoo's addition model: the loop at which a carry comes in, or the one after it.

    Pairs of additions differ in all carries, so that a state which has not seen the deciding bit
    says the same of both, and is right in one of them.
    """
    longest, n = 6, 12
    study = carry_study(
        trained, Addition(), n=n, max_chain=longest, loops=range(longest + 2), n_train=64, n_test=32
    )
    first = study.first_loop.values
    np.testing.assert_array_equal(first, range(1, longest + 1))
    generator = torch.Generator().manual_seed(1)
    sample = sample_chains(Addition(), n, max_chain=longest, n_pairs=32, generator=generator)
    right = Addition().targets(sample.inputs).numpy()
    result = lens_study(trained, sample.inputs, n_loops=n + 1)
    read = result.data["answer"].sel(layer="state").values == right
    row, pos = sample.row.numpy(), sample.pos.numpy()
    for chain, arrived in enumerate(first.astype(int)):
        accuracy = read[:, row[chain], pos[chain]].mean(1)
        assert (accuracy[1:arrived] == 0.5).all()  # at chance before the carry can be there
        assert accuracy[arrived] >= 0.6
        assert (accuracy[arrived + 1 :] == 1).all()  # from one loop later on
    shuffled = result.data["reading_top"].sel(layer="state", reading="shuffled").mean("batch")
    assert float(shuffled.max()) < 0.85  # on all positions, most of which have short chains


def test_where_two_lenses_are_one_the_findings_say_so() -> None:
    texts = {}
    for kind in ("plain", "prelude and coda"):
        for lens in ("logit", "coda"):
            result = lens_study(transformer(kind), tokens(), lens=lens, n_loops=2)
            texts[kind, lens] = result.findings()[0].text
            assert ("no coda" in texts[kind, lens]) == (kind == "plain")
            name = "logit lens" if lens == "logit" else "model's own readout"
            assert texts[kind, lens].startswith(f"The {name}")


@pytest.mark.parametrize("wrongly", [False, True])
def test_a_reading_that_is_further_off_than_nothing_is_said_to_be(wrongly: bool) -> None:
    """A model that is sure of wrong answers on the way, and one that is not."""
    right, wrong = torch.tensor([4.0, 0.0]), torch.tensor([0.0, 9.0])
    logits = right.expand(5, 6, 2, 2).clone()
    logits[:, ::2] = logits[:, ::2].flip(-1)  # so that one class for all is no reading
    if wrongly:
        logits[1:4, ::2], logits[1:4, 1::2] = wrong.flip(0), wrong
    model = Scripted(logits)
    result = lens_study(model, model.inputs, n_loops=4)
    beyond_chance = result.findings()[1]
    # An intermediate value is as far from the end as a misread state, so neither is bad.
    assert beyond_chance.good is None
    assert (" 1 to 3 " in beyond_chance.text) == wrongly


def test_exact_intermediate_values_are_no_fault_of_the_lens() -> None:
    """A compiled ripple answers its own value of each loop, however far that is from the end."""
    batch = Addition().encode([(2**12 - 1, 1), (0, 2**12 - 1), (0b0110, 0b1010)], n=12)
    compiled = compile_program("ripple", max_length=13)
    n_loops = int(batch.n_loops.max())
    expected = get_program("ripple").trace(batch.inputs, n_loops=n_loops).outputs
    result = lens_study(compiled.model, batch, lens="coda", n_loops=n_loops, expected=expected)
    assert (result.data["expected_top"].dropna("loop") == 1).all()
    kl = result.data["reading_kl"].sel(reading="lens", layer="state").mean("batch")
    assert float(kl.sel(loop=1)) > 1.1 * float(result.data["unigram_kl"].mean())
    assert [finding.good for finding in result.findings()] == [None] * len(result.findings())
    off = expected.where(expected < 0, 1 - expected)
    wrong = lens_study(compiled.model, batch, lens="coda", n_loops=n_loops, expected=off)
    assert (wrong.data["expected_top"].dropna("loop") == 0).all()
    with pytest.raises(InputError, match="expected"):
        lens_study(compiled.model, batch, n_loops=n_loops, expected=expected[1:])


def test_a_result_is_read_back_and_says_what_it_shows(tmp_path: Path) -> None:
    model = transformer("prelude and coda")
    for lens in ("logit", "coda", fit_jacobian_lens(model, tokens(seed=4), n_loops=4, inside=True)):
        result = lens_study(model, tokens(), lens=lens, n_loops=4, inside=True)
        again = LensResult.load(result.save(tmp_path))
        assert again.data.equals(result.data)
        assert [f.text for f in again.findings()] == [f.text for f in result.findings()]
        assert result.provenance.config["lens"] == result.lens
        figures = result.figures()
        assert len(figures) == (2 if isinstance(lens, str) else 3)
        assert all(figure.caption and figure.control for figure in figures)
        if not isinstance(lens, str):
            assert "plain" in result.data["reading"]
        lines = {trace.name for trace in figures[0].plot.data if trace.name}
        assert any("shuffled" in line for line in lines)
        assert any("layer 1" in line for line in lines)


def test_a_lens_that_was_fitted_on_other_weights_says_so() -> None:
    model, other = transformer(), transformer()
    with torch.no_grad():
        next(other.parameters()).mul_(2)
    lens = fit_jacobian_lens(model, tokens(), n_loops=2)
    same, foreign = (lens_study(x, tokens(seed=1), lens=lens) for x in (model, other))
    assert not same.of_other_weights and foreign.of_other_weights
    assert all(finding.good is None for finding in same.findings())
    warning = foreign.findings()[-1]
    assert warning.good is False and "other weights" in warning.text
