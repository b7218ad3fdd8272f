from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from loopinterp.compiler import compile_program
from loopinterp.core.errors import InputError
from loopinterp.core.results import load_result
from loopinterp.lenses import FittedLens, LensResult, fit_tuned_lens, lens_study
from loopinterp.models import LoopedTransformer, LoopedTransformerConfig, iterate
from loopinterp.pages import Exploration, explore, write_results
from loopinterp.pages.exploration import NOT_SAID, Missing, spell_missing
from loopinterp.pages.explore_study import choose
from loopinterp.pages.explored_run import Chosen, ExampleReason, spell_choice
from loopinterp.tasks import Addition, Batch, TokenAddition
from loopinterp.tasks.task import IGNORE
from tests.adapters.kinds import KINDS, adapted, tokens_of
from tests.small_studies import fit_little


def inputs_of(exploration: Exploration, example: int) -> torch.Tensor:
    """The tokens of an example, from its words."""
    words = ["0+0", "1+0", "0+1", "1+1", "BOS", "PAD"]
    return torch.tensor([[words.index(word) for word in exploration.tokens[example]]])


@torch.no_grad()
@pytest.mark.parametrize("example", range(5))
def test_every_number_is_the_models(
    exploration: Exploration, model: LoopedTransformer, example: int
) -> None:
    one, inputs = exploration.data.isel(example=example), inputs_of(exploration, example)
    last, n_pos = int(one["n_loops"]), int(one["n_pos"])
    assert last == n_pos == inputs.shape[1]  # T(n) = n + 1, and a BOS
    target = Addition().targets(inputs)[0]
    assert (one["target"].values[:n_pos] == target.where(target != IGNORE, -1).numpy()).all()
    before = None
    for loop, h in iterate(model, inputs, last):
        shares = model.readout(h)[0].double().softmax(-1).numpy()
        here = one.isel(loop=loop, pos=slice(n_pos))
        best = np.sort(shares, -1)[:, ::-1]
        assert (shares[np.arange(n_pos), here["answer"][:, 0]] == best[:, 0]).all()
        np.testing.assert_allclose(here["probability"], best, atol=5e-4)
        np.testing.assert_allclose(here["entropy"], -(shares * np.log2(shares)).sum(-1), atol=1e-5)
        if before is not None:
            moved = (h - before).norm(dim=-1)[0] / h.norm(dim=-1)[0]
            np.testing.assert_allclose(here["moved"], moved, rtol=1e-4)
        before = h


def test_attention_is_that_of_the_run(exploration: Exploration, model: LoopedTransformer) -> None:
    one, inputs = exploration.data.isel(example=-1), inputs_of(exploration, -1)
    _, cache = model.run_with_cache(inputs, n_loops=int(one["n_loops"]))
    for loop in range(1, int(one["n_loops"]) + 1):
        for layer in (0, 1):
            pattern = cache[f"loops.{loop - 1}.blocks.{layer}.attn.hook_pattern"][0].numpy()
            here = one.isel(loop=loop, layer=layer)
            keys, weights = here["key"].values, here["attention"].values.astype(float)
            found = np.take_along_axis(pattern, keys.astype(int), -1)
            np.testing.assert_allclose(weights, found * (weights > 0), atol=5e-4)
            np.testing.assert_allclose(weights.sum(-1), 1, atol=3e-3)
            assert (np.diff(weights, axis=-1) <= 0).all()
    assert (one["attention"].isel(loop=0) == 0).all()


@torch.no_grad()
def test_within_a_loop_it_is_read_as_if_the_loop_ended_there(
    exploration: Exploration, model: LoopedTransformer
) -> None:
    one, inputs = exploration.data.isel(example=-1), inputs_of(exploration, -1)
    assert exploration.data.sizes["inner"] == 1  # of two layers
    last = int(one["n_loops"])
    _, cache = model.run_with_cache(inputs, n_loops=last)
    for loop in range(1, last + 1):
        x = cache[f"loops.{loop - 1}.blocks.0.hook_resid_post"]
        shares = model.readout(model.end_loop(x, model.embed(inputs)))[0].softmax(-1)
        here = one.isel(loop=loop, inner=0)
        assert (here["inner_answer"].values == shares.argmax(-1).numpy()).all()
        np.testing.assert_allclose(here["inner_probability"], shares.amax(-1), atol=1e-3)
    assert (one["inner_answer"].isel(loop=0) == -1).all()


def test_states_lie_in_their_principal_plane(
    exploration: Exploration, model: LoopedTransformer
) -> None:
    """Distances in the plane are the distances of states, but for what the other axes hold."""
    states, places = [], []
    for example in range(5):
        one, inputs = exploration.data.isel(example=example), inputs_of(exploration, example)
        with torch.no_grad():
            runs = [h[0] for _, h in iterate(model, inputs, int(one["n_loops"]))]
        states += [torch.stack(runs).flatten(0, 1)]
        shown = one["plane"].values[: len(runs), : inputs.shape[1]]
        places += [torch.from_numpy(shown).flatten(0, 1)]
    states, places = torch.cat(states).double(), torch.cat(places).double()
    centred = states - states.mean(0)
    energy = torch.linalg.eigvalsh(centred.T @ centred).flip(0)
    np.testing.assert_allclose(places.square().sum(0), energy[:2], rtol=1e-4)
    assert abs(float((places[:, 0] * places[:, 1]).sum())) < 1e-3 * float(energy[1])
    shares = [f"({float(x / energy.sum()):.0%})" for x in energy[:2]]
    assert [name.rpartition(" ")[2] for name in exploration.axes] == shares


def test_beyond_a_short_example_there_is_nothing(exploration: Exploration) -> None:
    short = exploration.data.isel(example=0)
    assert int(short["n_pos"]) == 4 and exploration.data.sizes["pos"] == 6
    assert (short["answer"][5:] == -1).all() and (short["answer"][:, 4:] == -1).all()
    assert short["entropy"][5:].isnull().all() and short["plane"][:, 4:].isnull().all()
    assert (short["variable"][:, 5:] == NOT_SAID).all() and (short["attention"][5:] == 0).all()


def test_a_compiled_model_has_what_its_program_has(batches: list[Batch]) -> None:
    model = compile_program("ripple", max_length=6).model
    found = explore(model, batches, programs=["lookahead", "ripple"], examples=4)
    names = found.data["name"].values.tolist()
    assert names[0] == "ripple.carry"  # which answers as the model does, so it comes first
    for example in range(4):
        n_pos, last = (int(found.data[k][example]) for k in ("n_pos", "n_loops"))
        one = found.data.isel(example=example, pos=slice(1, n_pos), loop=slice(1, last + 1))
        for name in ("ripple.carry", "ripple's answer"):
            assert (one["variable"].sel(name=name) == one["implied"].sel(name=name)).all()
        assert (one["answer"][-1, :, 0] == one["target"]).all()


def test_it_is_read_back_as_it_was(exploration: Exploration, tmp_path: Path) -> None:
    again = load_result(exploration.save(tmp_path))
    assert isinstance(again, Exploration) and again.data.identical(exploration.data)
    for name in ("tokens", "reasons", "symbols", "said", "axes", "missing"):
        assert getattr(again, name) == getattr(exploration, name)


@torch.no_grad()
def test_a_model_without_hooks_shows_all_but_attention(
    model: LoopedTransformer, batches: list[Batch], exploration: Exploration
) -> None:
    four: Any = SimpleNamespace(
        embed=model.embed, initial_state=model.initial_state, step=model.step, readout=model.readout
    )
    found = explore(four, batches, programs=["ripple", "lookahead"], examples=5)
    assert "attention" not in found.data
    assert found.missing == {Missing.NO_HOOKS.name: {"model": "SimpleNamespace"}}
    for name in ("answer", "moved", "implied"):
        assert found.data[name].equals(exploration.data[name])


def test_without_programs_or_targets_the_rest_is_there(model: LoopedTransformer) -> None:
    tokens = torch.tensor([[4, 3, 1], [4, 0, 2], [4, 1, 1]])
    found = explore(model, tokens, n_loops=2, examples=2, words=["a", "b", "c", "d", "e"])
    assert found.tokens == [["e", "d", "b"], ["e", "a", "c"]] and found.n_examples == 3
    assert (found.data["target"] == -1).all() and "variable" not in found.data
    (finding,) = found.findings()
    answer = found.data["answer"].isel(example=0, rank=0).values[:3]
    final = [next(t for t in range(3) if (answer[t:, k] == answer[2, k]).all()) for k in range(3)]
    half, last = sorted(final)[1], max(final)
    assert finding.section == "explorer"
    assert {int(k) for k in re.findall(r"loop (\d)", finding.text)} == {half, last}
    assert found.said == ["", ""]


def test_only_the_largest_weights_are_kept_where_there_are_many(
    model: LoopedTransformer, batches: list[Batch], monkeypatch: pytest.MonkeyPatch
) -> None:
    patterns = 4 * 6 * 2 * 2 * 6  # examples, loops, layers, heads, positions
    monkeypatch.setattr("loopinterp.pages.explore_study._MOST_WEIGHTS", 3 * patterns)
    found = explore(model, batches[1], examples=4)
    assert found.data.sizes["nth"] == 3 and found.missing["WEAK_ATTENTION"]["kept"] == 3
    every = explore(model, batches[1], examples=4).data
    assert found.data["attention"].equals(every["attention"].isel(nth=slice(3)))


def test_a_plane_that_is_given_is_looked_along(
    model: LoopedTransformer, batches: list[Batch]
) -> None:
    axes = torch.zeros(2, 16)
    axes[0, 3] = axes[1, 5] = 1
    found = explore(model, batches[0], examples=1, plane=axes)
    with torch.no_grad():
        *_, (_, h) = iterate(model, inputs_of(found, 0), 4)
    np.testing.assert_allclose(found.data["plane"][0, -1], h[0][:, [3, 5]], rtol=1e-5)
    with pytest.raises(InputError, match=r"^plane:.*\[2, 16\]"):
        explore(model, batches[0], plane=axes[:1])


def test_examples_of_several_lengths_in_one_batch_are_refused(model: LoopedTransformer) -> None:
    lengths = torch.tensor([3, 4])
    batch = Addition().sample(lengths, generator=torch.Generator().manual_seed(0))
    with pytest.raises(InputError, match=r"^data:"):
        explore(model, batch)


def test_findings_say_when_the_first_example_is_right(batches: list[Batch]) -> None:
    model = compile_program("ripple", max_length=6).model
    batch = Addition().encode([(2, 1), (7, 1)], n=4)
    found = explore(model, batch, examples=1, asks="Add.", explain=lambda one: f"{len(one)} sum.")
    task, right = found.findings()
    assert task.text == "Add. 1 sum."
    assert right.text == (
        "The model has 2 of the 4 symbols correct after 1 loop, and all from loop 3 on "
        "(scored after loop 5)."
    )
    short = explore(model, batch, examples=1, n_loops=3).findings()[-1].text
    assert short.endswith("from loop 3 to 3, the last that is shown (scored after loop 5).")
    easy = explore(model, Addition().encode([(0, 0)], n=4), examples=1).findings()[-1].text
    assert easy == "The model has all 4 symbols correct from loop 0 on (scored after loop 5)."


def test_words_are_those_of_the_task() -> None:
    model = compile_program("token_addition", max_length=12).model
    found = explore(model, TokenAddition(), n=2, batch_size=4, examples=1)
    assert found.tokens[0][0] == "BOS" and "=" in found.tokens[0]
    assert found.symbols["2"] == "EOS" and "=" in found.said[0]


@pytest.fixture(scope="module")
def with_coda() -> LoopedTransformer:
    """Two layers in the loop and one after it, so that all four lenses differ."""
    sizes: dict[str, Any] = {"d_model": 16, "n_heads": 2, "n_layers": 2, "n_coda": 1}
    sizes |= {"d_vocab": 6, "d_vocab_out": 2, "loop_norm": True}
    return LoopedTransformer(LoopedTransformerConfig(**sizes), seed=1)


@pytest.fixture(scope="module")
def batch() -> Batch:
    return Addition().sample(4, batch_size=3, generator=torch.Generator().manual_seed(0))


def same(found: Exploration, read: LensResult) -> None:
    """At every place: the answer, its probability, and the entropy."""
    rows, n_loops = found.data["row"].values, read.n_loops
    read_at = read.data.isel(batch=rows)
    state = read_at.sel(layer="state").transpose("batch", "loop", "pos", ...)
    np.testing.assert_array_equal(found.data["answer"][..., 0], state["answer"])
    bits = state["entropy"].values / np.log(2)
    np.testing.assert_allclose(found.data["entropy"], bits, atol=2e-5)
    asked = np.broadcast_to((state["wanted"] >= 0).values[:, None], state["answer"].shape)
    hit = (state["answer"] == state["wanted"]).values & asked
    p = state["probability"].values[hit]
    np.testing.assert_allclose(found.data["probability"].values[..., 0][hit], p, atol=1e-3)
    assert hit.any()
    layers = [str(layer) for layer in read_at["layer"].values if layer != "state"][:-1]
    if layers:
        inner = read_at.sel(layer=layers).transpose("batch", "loop", "layer", "pos", ...)
        np.testing.assert_array_equal(found.data["inner_answer"], inner["answer"])
    assert found.data.sizes["loop"] == n_loops + 1


@pytest.mark.parametrize("lens", ["logit", "coda", "tuned", "jacobian"])
def test_readings_are_those_of_the_lens_study(
    lens: Any, with_coda: LoopedTransformer, batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    fit_little(monkeypatch)
    found = explore(with_coda, batch, lens=lens, examples=2, seed=3)
    read = lens_study(with_coda, batch, lens=lens, inside=True, seed=3)
    same(found, read)
    assert found.lens == read.lens == lens
    own = explore(with_coda, batch, examples=2, seed=3)
    assert own.lens == "coda"
    differs = not np.allclose(own.data["entropy"], found.data["entropy"], atol=1e-4)
    assert differs == (lens != "coda")  # a fitted lens gives other answers


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("lens", ["logit", "coda"])
def test_every_published_model_is_read_as_the_lens_study_reads_it(name: str, lens: Any) -> None:
    model, tokens = adapted(name), tokens_of(name, batch=2, n_pos=4)
    found = explore(model, tokens, lens=lens, n_loops=3, examples=2)
    same(found, lens_study(model, tokens, lens=lens, n_loops=3, inside=True))


def test_a_fitted_lens_says_after_how_many_loops_and_whether_within_them(
    with_coda: LoopedTransformer, batch: Batch
) -> None:
    lens = fit_tuned_lens(with_coda, Addition(), n_loops=3, steps=5, n=4)
    found = explore(with_coda, batch, lens=lens, examples=2)
    same(found, lens_study(with_coda, batch, lens=lens))
    assert "inner_answer" not in found.data
    assert Missing.WHOLE_LOOP_LENS.name in found.missing
    with pytest.raises(InputError, match=r"^n_loops:"):
        explore(with_coda, batch, lens=lens, n_loops=4)
    elsewhere = explore(LoopedTransformer(with_coda.config, seed=2), batch, lens=lens, examples=1)
    assert elsewhere.of_other_weights and not found.of_other_weights
    assert "other weights" in elsewhere.findings()[-1].text
    assert "other weights" not in found.findings()[-1].text
    shared = fit_tuned_lens(with_coda, Addition(), n_loops=3, steps=5, n=4, shared=True)
    same(
        explore(with_coda, batch, lens=shared, examples=2),
        lens_study(with_coda, batch, lens=shared, inside=True),
    )
    other = FittedLens(
        kind="tuned",
        matrix=torch.eye(2)[None],
        offset=torch.zeros(1, 2),
        places=[(0, None)],
        n_loops=3,
    )
    with pytest.raises(InputError, match="width"):
        explore(with_coda, batch, lens=other)


def test_what_is_no_lens_or_cannot_be_fitted_is_refused(
    with_coda: LoopedTransformer, batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    fit_little(monkeypatch)
    with pytest.raises(InputError, match=r"^lens:.*logit"):
        explore(with_coda, batch, lens="logits")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="fit_on"):
        explore(with_coda, batch.inputs, n_loops=3, lens="tuned")
    found = explore(with_coda, batch.inputs, n_loops=3, lens="tuned", fit_on=batch.inputs[1:])
    assert found.lens == "tuned"


def test_the_page_says_through_which_lens(
    with_coda: LoopedTransformer, batch: Batch, tmp_path: Any
) -> None:
    for lens, words in (("logit", "The logit lens (final norm"), ("coda", "The model has ")):
        found = explore(with_coda, batch, lens=lens, examples=1)  # type: ignore[arg-type]
        page = write_results({"explorer": found}, tmp_path / "page.html", title="x").read_text()
        assert words in page
        assert Exploration.load(found.save(tmp_path, lens)).lens == lens


ASKED = torch.ones(6, 2, dtype=torch.bool)


def right(*runs: str) -> torch.Tensor:
    """[loop, example, pos] from a word for each example: how many of two are right, by loop."""
    rows = [[[int(k) > 0, int(k) > 1] for k in run] for run in runs]
    return torch.tensor(rows).transpose(0, 1)


RUNS = right("0222", "0001", "0021", "0002", "0222", "1111")


def chosen(most: int, **settled: list[int]) -> list[Chosen]:
    loops = {name: torch.tensor(values) for name, values in settled.items()}
    return choose(RUNS, ASKED, loops, most, torch.Generator().manual_seed(0))


def test_one_of_each_kind_is_chosen_and_says_why() -> None:
    found = chosen(6, quick=[1, 1, 1, 1, 1, 1], slow=[2, 1, 1, 1, 3, 1])
    assert found[:4] == [
        Chosen(2, ExampleReason.RELAPSED, {"loop": 2, "n": 1}),
        Chosen(1, ExampleReason.WRONG, {"n": 1, "asked": 2}),
        Chosen(3, ExampleReason.LAST, {"loop": 3}),
        Chosen(4, ExampleReason.LONG_CHAIN, {"program": "slow", "loop": 3}),
    ]


def test_every_reason_and_everything_missing_has_words() -> None:
    named: dict[str, Any] = {"loop": 2, "pos": 1, "asked": 4, "program": "slow", "source": 2}
    for reason in ExampleReason:
        for n in (1, 3):
            words, sentence = spell_choice(Chosen(0, reason, {"n": n, **named}))
            assert words and "{" not in sentence and (sentence.endswith(".") or not sentence)
    _, sentence = spell_choice(Chosen(0, ExampleReason.LOST, {"n": 1, "asked": 4}))
    assert re.search(r"\b1 of\D+4\b", sentence) and " was " in sentence and " were " not in sentence
    values = {"model": "Mine", "error": "none", "kept": 3, "seen": 9}
    for code in Missing:
        ((what, why),) = spell_missing({code.name: values}).items()
        assert what and why and "{" not in why
    before = {"attention": "Mine has no hooks inside its loops"}  # as earlier versions kept it
    assert spell_missing(before) == before == spell_missing({"NO_HOOKS": values})


def test_none_is_chosen_twice_and_a_quarter_is_drawn_at_random() -> None:
    for most in range(1, 7):
        found = chosen(most)
        assert len({one.row for one in found}) == len(found) == most
        if most >= 4:
            assert sum(one.reason is ExampleReason.RANDOM for one in found) >= most // 4


def test_where_nothing_is_interesting_all_are_drawn_and_no_more_than_there_are() -> None:
    plain = torch.ones(3, 2, 2, dtype=torch.bool)
    found = choose(plain, ASKED[:2], {}, 8, torch.Generator().manual_seed(0))
    assert sorted(one.row for one in found) == [0, 1]
    assert {one.reason for one in found} == {ExampleReason.RANDOM}


def test_what_is_as_late_as_another_is_not_called_later() -> None:
    generator = torch.Generator().manual_seed(0)
    alike = choose(right("002", "002", "022"), ASKED[:3], {}, 3, generator)
    assert [one.reason for one in alike[:2]] == [ExampleReason.LATE] * 2
    one = choose(right("002", "022", "022"), ASKED[:3], {}, 3, generator)[0]
    assert (one.row, one.reason) == (0, ExampleReason.LAST)
    equal = {"program": torch.tensor([2, 2, 2])}
    found = choose(right("222", "222", "222"), ASKED[:3], equal, 3, generator)
    assert {one.reason for one in found} == {ExampleReason.RANDOM}  # no chain is longer
