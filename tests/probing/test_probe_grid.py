"""Grids of probes on hooked models: against single fits, with targets known to be there."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from loopinterp.compiler import compile_program
from loopinterp.core.errors import InputError
from loopinterp.core.results import load_result
from loopinterp.models import LoopedTransformer, LoopedTransformerConfig
from loopinterp.probing import (
    LogisticProbe,
    ProbeResult,
    RidgeProbe,
    context_types,
    control_labels,
    majority_accuracy,
    probe_study,
    with_random_weights,
)
from loopinterp.tasks.addition import Addition
from loopinterp.tasks.task import IGNORE

N_LOOPS = 3
TASK = Addition()
MODEL = LoopedTransformer(
    LoopedTransformerConfig(
        d_model=16, n_heads=2, d_vocab=6, d_vocab_out=2, n_layers=2, injection="input"
    )
)
BATCH = TASK.sample(6, batch_size=120, generator=torch.Generator().manual_seed(0))
REAL = BATCH.targets != IGNORE


def masked(values: torch.Tensor) -> torch.Tensor:
    return torch.where(REAL, values.long(), IGNORE)


TARGETS = {
    "digit": masked(TASK.generate(BATCH).long() + 2 * TASK.propagate(BATCH).long()),
    "carry": masked(TASK.carry_in(BATCH)),
}
TRAIN = torch.arange(120) < 70
SITES = ("hook_state_post", "attn.hook_z")


@pytest.fixture(scope="module")
def result() -> ProbeResult:
    later = {f"bit {i}": REAL & (torch.arange(7) == i + 1) for i in (2, 4)}
    groups = {"all": REAL, **later}
    return probe_study(
        MODEL, BATCH.inputs, TARGETS, n_loops=N_LOOPS, sites=SITES, groups=groups, train=TRAIN
    )


def test_each_cell_is_the_fit_of_a_single_probe(result: ProbeResult) -> None:
    _, cache = MODEL.run_with_cache(BATCH.inputs, n_loops=N_LOOPS)
    accuracy, counts = result.data["accuracy"], result.data[["n_train", "n_test"]]
    assert accuracy.shape == (N_LOOPS, 2, 3, 2)
    for site in SITES:
        x = cache.stack(site).flatten(3).detach()
        for g, places in enumerate([REAL, *(torch.arange(7) == i + 1 for i in (2, 4))]):
            fit, held = (places & half[:, None] & REAL for half in (TRAIN, ~TRAIN))
            n = counts.isel(group=g)
            assert (n["n_train"], n["n_test"]) == (int(fit.sum()), int(held.sum()))
            for target, y in TARGETS.items():
                for loop in range(N_LOOPS):
                    one = RidgeProbe().fit(x[loop][fit], y[fit])
                    expected = float(one.score(x[loop][held], y[held]))
                    cell = accuracy.sel(loop=loop, site=site, target=target).isel(group=g)
                    assert float(cell) == pytest.approx(expected)


def test_controls_come_with_it(result: ProbeResult) -> None:
    for name in ("control_task", "random_model"):
        values = result.data[name]
        assert ((values >= 0) & (values <= 1)).all()
    everywhere = result.data.sel(group="all")
    # The position's own bits are in the embedding; what the others did is not.
    assert (everywhere["embedding"].sel(target="digit") == 1.0).all()
    held = TARGETS["carry"][~TRAIN][REAL[~TRAIN]]
    most = TARGETS["carry"][TRAIN][REAL[TRAIN]].mode().values
    majority = everywhere["majority"].sel(target="carry")
    np.testing.assert_allclose(majority, float((held == most).double().mean()))
    assert "code_length" not in result.data
    expected = result.data["accuracy"] - result.data["control_task"]
    assert result.selectivity.equals(expected)
    assert result.chance.dims == result.data["accuracy"].dims
    rivals = [result.data[name] for name in ("random_model", "embedding", "majority")]
    assert all((result.chance >= rival).all() for rival in rivals)
    assert any((result.chance == rival).any() for rival in rivals)
    assert "'carry' gains most" in result.findings()[0].text


def test_targets_may_differ_from_loop_to_loop_and_have_gaps() -> None:
    a, b = TASK.operands(BATCH)
    by_loop = torch.stack([masked(a), masked(b), torch.where(a == b, IGNORE, masked(a))])
    result = probe_study(
        MODEL, BATCH.inputs, {"bit": by_loop, "carry": TARGETS["carry"]}, n_loops=N_LOOPS
    )
    bit = result.data.sel(target="bit", group="all")
    np.testing.assert_array_equal(bit["accuracy"], 1.0)
    assert bit["majority"].sel(loop=2) != bit["majority"].sel(loop=0)


def test_code_lengths_need_a_place_that_has_a_class_at_every_loop() -> None:
    early, late = (REAL & (torch.arange(7) % 2 == k) for k in (0, 1))
    carry = TARGETS["carry"]
    by_turns = torch.stack([torch.where(places, carry, IGNORE) for places in (early, late)])
    targets = {"carry": carry, "by turns": by_turns}
    result = probe_study(MODEL, BATCH.inputs, targets, n_loops=2)  # accuracy asks for no such place
    assert result.data["accuracy"].notnull().all()
    with pytest.raises(InputError) as caught:
        probe_study(MODEL, BATCH.inputs, targets, n_loops=2, code_lengths=True)
    what = caught.value.what
    assert what.startswith("code length") and "'by turns'" in what and "'all'" in what


def test_code_lengths_on_demand() -> None:
    result = probe_study(
        MODEL,
        BATCH.inputs,
        TARGETS,
        n_loops=2,
        groups={"all": REAL},
        probe=LogisticProbe(),
        code_lengths=True,
    )
    lengths = result.data["code_length"].mean(["loop", "site", "group"])
    digit, carry = (float(lengths.sel(target=t)) for t in ("digit", "carry"))
    # A bit of two classes costs no more than 1 bit; the carry is harder than the own digit.
    assert 0.05 < digit / np.log2(3) < carry <= 1.1


def test_a_target_that_never_varies_is_known_without_code() -> None:
    targets = {"constant": masked(torch.ones_like(BATCH.targets)), "digit": TARGETS["digit"]}
    found = probe_study(MODEL, BATCH.inputs, targets, n_loops=N_LOOPS, code_lengths=True).data
    assert (found["accuracy"].sel(target="constant") == 1).all()
    assert (found["code_length"].sel(target="constant") == 0).all()
    assert (found["code_length"].sel(target="digit") > 0).all()


def test_it_comes_back_from_disk(result: ProbeResult, tmp_path) -> None:
    again = load_result(result.save(tmp_path))
    assert isinstance(again, ProbeResult)
    assert again.data.identical(result.data)
    assert len(again.to_dataframe()) == result.data["accuracy"].size


@pytest.mark.usefixtures("no_type_checks")
@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"targets": {}}, "targets"),
        ({"targets": {"x": torch.zeros(3, 3)}}, "target 'x'"),
        ({"targets": {"x": torch.full((120, 7), 0.5)}}, "target 'x'"),
        ({"groups": {"late": torch.ones(120, 6, dtype=torch.bool)}}, "group 'late'"),
        ({"groups": {"late": REAL.long()}}, "group 'late'"),
        ({"train": torch.arange(60)}, "train"),
        ({"groups": {"none": torch.zeros(120, 7, dtype=torch.bool)}}, "group 'none'"),
        ({"random_model": None, "n_loops": 0}, "n_loops"),
        ({"groups": {}}, "groups"),
        ({"sites": ("hook_state_post", "attn.hook_pattern")}, "sites"),
        ({"sites": ("hook_state_post", "hook_state_post")}, "sites"),
        ({"sites": ()}, "sites"),
        ({"probe": "ridge"}, "probe"),
        ({"random_model": torch.nn.Linear(1, 1)}, "model"),
    ],
)
def test_bad_arguments_are_named(options: dict, what: str) -> None:
    arguments = {"targets": TARGETS, "n_loops": N_LOOPS, **options}
    with pytest.raises(InputError) as caught:
        probe_study(MODEL, BATCH.inputs, **arguments)
    assert caught.value.what == what


def test_an_unknown_site_is_an_error_that_names_those_alike() -> None:
    with pytest.raises(InputError, match="hook_z"):
        probe_study(MODEL, BATCH.inputs, TARGETS, n_loops=N_LOOPS, sites=["attn.hook_zzz"])


def test_contexts_are_the_same_type_exactly_where_their_inputs_agree() -> None:
    inputs = torch.randint(3, (6, 9), generator=torch.Generator().manual_seed(0))
    for width in (1, 2, 4):
        types = context_types(inputs, width=width)
        seen: dict[tuple[int, ...], int] = {}
        for row in range(6):
            for pos in range(9):
                window = [
                    int(inputs[row, p]) if p >= 0 else -1 for p in range(pos - width + 1, pos + 1)
                ]
                assert seen.setdefault(tuple(window), int(types[row, pos])) == types[row, pos]
        assert len(set(seen.values())) == len(seen)


def test_contexts_of_features_are_those_of_the_tokens_they_stand_for() -> None:
    tokens = torch.randint(4, (5, 6), generator=torch.Generator().manual_seed(0))
    features = torch.stack([tokens % 2, tokens // 2], dim=-1).float()
    same = context_types(tokens, width=2)[:, :, None] == context_types(tokens, width=2).flatten()
    other = context_types(features, width=2)
    assert torch.equal(same, other[:, :, None] == other.flatten())


def test_random_labels_are_fixed_by_type_and_keep_the_frequencies(
    generator: torch.Generator,
) -> None:
    types = torch.randint(2000, (100, 200), generator=generator)
    pool = torch.tensor([7] * 3 + [2])
    labels = control_labels(pool, types, n_draws=3, generator=generator)
    assert labels.shape == (3, 100, 200)
    for draw in labels:
        table = torch.zeros(2000, dtype=torch.long)
        table[types.flatten()] = draw.flatten()
        assert torch.equal(table[types], draw)
    assert (labels == 7).float().mean() == pytest.approx(0.75, abs=0.03)
    assert not torch.equal(labels[0], labels[1])


def test_majority_is_that_of_training_and_skips_what_is_not_asked() -> None:
    train = torch.tensor([[0, 0, 1, IGNORE, IGNORE], [1, 1, 0, 1, IGNORE]])
    test = torch.tensor([[0, 1, 1, 1], [1, 1, IGNORE, 0]])
    torch.testing.assert_close(
        majority_accuracy(train, test), torch.tensor([0.25, 2 / 3], dtype=torch.float64)
    )


def test_shuffled_weights_keep_their_values_and_lose_their_places() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.LayerNorm(30))
    before = {k: v.clone() for k, v in model.state_dict().items()}
    shuffled = with_random_weights(model, seed=1)
    for name, weight in shuffled.state_dict().items():
        torch.testing.assert_close(
            weight.flatten().sort().values, before[name].flatten().sort().values
        )
        assert torch.equal(model.state_dict()[name], before[name])
    assert not torch.equal(shuffled.state_dict()["0.weight"], before["0.weight"])
    again = with_random_weights(model, seed=1).state_dict()
    assert torch.equal(again["0.weight"], shuffled.state_dict()["0.weight"])
    other = with_random_weights(model, seed=2).state_dict()
    assert not torch.equal(other["0.weight"], again["0.weight"])


@pytest.mark.usefixtures("no_type_checks")
def test_a_control_that_overflows_is_a_constant() -> None:
    """Shuffled, the weights of a compiled model may let its state grow without end."""
    model = compile_program("lookahead", max_length=24).model
    batch = Addition().sample(22, batch_size=16, seed=0)
    targets = {"answer": batch.targets}
    with torch.no_grad():
        _, cache = with_random_weights(model, seed=0).run_with_cache(batch.inputs, n_loops=12)
    assert not cache.stack("hook_state_post")[-1].isfinite().any()
    result = probe_study(model, batch.inputs, targets, n_loops=12)
    last = result.data.isel(loop=-1)
    np.testing.assert_allclose(last["random_model"].squeeze(), last["majority"].squeeze())
    assert bool((last["accuracy"] > last["majority"]).all())


def test_only_modules_have_weights_to_shuffle() -> None:
    with pytest.raises(InputError, match="random_model="):
        with_random_weights(object(), seed=0)  # type: ignore[type-var]


def test_labels_and_inputs_that_are_missing_are_refused() -> None:
    none, some = torch.zeros(0, dtype=torch.long), torch.tensor([0, 1])
    generator = torch.Generator().manual_seed(0)
    for what, call in {
        "train": lambda: majority_accuracy(none, some),
        "pool": lambda: control_labels(none, some, generator=generator),
        "types": lambda: control_labels(some, none, generator=generator),
        "inputs": lambda: context_types(none.reshape(3, 0)),
        "width": lambda: context_types(some[None], width=0),
    }.items():
        with pytest.raises(InputError) as error:
            call()
        assert error.value.what == what
    with pytest.raises(InputError):  # no label but IGNORE
        majority_accuracy(torch.full((3,), IGNORE), some)
