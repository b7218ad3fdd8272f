"""What the explorer shows through a lens is what the lens study reads."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from loopinterp.errors import InputError
from loopinterp.explorer import Exploration, explore
from loopinterp.lenses import FittedLens, LensResult, fit_tuned_lens, lens_study
from loopinterp.models import LoopedTransformer, LoopedTransformerConfig
from loopinterp.report import write_results
from loopinterp.tasks import Addition, Batch
from tests.adapters.kinds import KINDS, adapted, tokens_of


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
    lens: Any, with_coda: LoopedTransformer, batch: Batch
) -> None:
    found = explore(with_coda, batch, lens=lens, examples=2, seed=3)
    read = lens_study(with_coda, batch, lens=lens, inside=True, seed=3)
    same(found, read)
    assert found.lens == read.lens == lens
    own = explore(with_coda, batch, examples=2, seed=3)
    assert own.lens == "coda"
    differs = not np.allclose(own.data["entropy"], found.data["entropy"], atol=1e-4)
    assert differs == (lens != "coda"), "a lens of its own reads otherwise"


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
    assert found.missing["readings within the loop"].startswith("the lens was fitted")
    with pytest.raises(InputError, match="3 loops of the lens"):
        explore(with_coda, batch, lens=lens, n_loops=4)
    elsewhere = explore(LoopedTransformer(with_coda.config, seed=2), batch, lens=lens, examples=1)
    assert elsewhere.of_other_weights and not found.of_other_weights
    assert "fitted to other weights" in elsewhere.findings()[-1].text
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
    with_coda: LoopedTransformer, batch: Batch
) -> None:
    with pytest.raises(InputError, match="Did you mean 'logit'"):
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
