"""What an exploration holds, against the model's own runs."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from loopinterp.errors import InputError
from loopinterp.explorer import Exploration, explore
from loopinterp.explorer.exploration import NOT_SAID
from loopinterp.models import LoopedTransformer, iterate
from loopinterp.rasp import compile_program
from loopinterp.saved_results import load_result
from loopinterp.tasks import Addition, Batch, TokenAddition
from loopinterp.tasks.task import IGNORE


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
    assert "attention" not in found.data and "no hooks" in found.missing["attention"]
    for name in ("answer", "moved", "implied"):
        assert found.data[name].equals(exploration.data[name])


def test_without_programs_or_targets_the_rest_is_there(model: LoopedTransformer) -> None:
    tokens = torch.tensor([[4, 3, 1], [4, 0, 2], [4, 1, 1]])
    found = explore(model, tokens, n_loops=2, examples=2, words=["a", "b", "c", "d", "e"])
    assert found.tokens == [["e", "d", "b"], ["e", "a", "c"]] and found.n_examples == 3
    assert (found.data["target"] == -1).all() and "variable" not in found.data
    (finding,) = found.findings()
    assert finding.text == "The model reads the state after each loop."
    assert found.said == ["", ""]


def test_only_the_largest_weights_are_kept_where_there_are_many(
    model: LoopedTransformer, batches: list[Batch], monkeypatch: pytest.MonkeyPatch
) -> None:
    patterns = 4 * 6 * 2 * 2 * 6  # examples, loops, layers, heads, positions
    monkeypatch.setattr("loopinterp.explorer.exploration_study._MOST_WEIGHTS", 3 * patterns)
    found = explore(model, batches[1], examples=4)
    assert found.data.sizes["nth"] == 3 and "3 largest" in "".join(found.missing.values())
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
    with pytest.raises(InputError, match=r"plane: expected two directions, of shape \[2, 16\]"):
        explore(model, batches[0], plane=axes[:1])


def test_examples_of_several_lengths_in_one_batch_are_refused(model: LoopedTransformer) -> None:
    lengths = torch.tensor([3, 4])
    batch = Addition().sample(lengths, generator=torch.Generator().manual_seed(0))
    with pytest.raises(InputError, match="expected examples of one length"):
        explore(model, batch)


def test_findings_say_when_the_first_example_is_right(batches: list[Batch]) -> None:
    model = compile_program("ripple", max_length=6).model
    batch = Addition().encode([(2, 1), (7, 1)], n=4)
    found = explore(model, batch, examples=1, asks="Add.", explain=lambda one: f"{len(one)} sum.")
    task, right = found.findings()
    assert task.text == "Add. 1 sum."
    assert right.text == (
        "The model has 2 of the 4 symbols right after 1 loop, and all of them from loop 3 on "
        "(it is asked after 5)."
    )
    short = explore(model, batch, examples=1, n_loops=3).findings()[-1].text
    assert short.endswith("from loop 3 to 3, the last that is shown (it is asked after 5).")


def test_words_are_those_of_the_task() -> None:
    model = compile_program("token_addition", max_length=12).model
    found = explore(model, TokenAddition(), n=2, batch_size=4, examples=1)
    assert found.tokens[0][0] == "BOS" and "=" in found.tokens[0]
    assert found.symbols["2"] == "EOS" and "=" in found.said[0]
