"""A folded vocabulary computes what the mapped one does, with hooks and weights of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loopinterp.errors import InputError
from loopinterp.models import LoopRule, WithVocabulary, fold_vocabulary, iterate
from loopinterp.tasks import Addition
from loopinterp.training import Run
from tests.models.variants import VARIANTS, build

LISTS = st.lists(st.integers(0, 11), min_size=2, max_size=5)
TOKENS = [name for name in VARIANTS if name != "features"]


@settings(deadline=None, max_examples=40)
@given(name=st.sampled_from(TOKENS), tokens=LISTS, answers=LISTS, data=st.data())
def test_it_computes_what_the_mapped_model_does(name, tokens, answers, data):
    digits: dict[str, Any] = {"digit_tokens": (1, 2, 3, *tokens[:1])} if "abacus" in name else {}
    model = build(name, d_vocab=12, d_vocab_out=12, **digits)
    folded = fold_vocabulary(model, tokens=tokens, answers=answers)
    mapped = WithVocabulary(model, tokens=tokens, answers=answers)
    row = st.lists(st.integers(0, len(tokens) - 1), min_size=4, max_size=4)
    inputs = torch.tensor([data.draw(row), data.draw(row)])
    for (_, ours), (_, theirs) in zip(iterate(folded, inputs, 3), iterate(mapped, inputs, 3)):
        torch.testing.assert_close(ours, theirs)
        torch.testing.assert_close(folded.readout(ours), mapped.readout(theirs))
    assert (folded.config.d_vocab, folded.config.d_vocab_out) == (len(tokens), len(answers))


def test_what_is_left_out_stays_and_the_model_itself_does_not_change():
    model = build("tied", d_vocab=6)
    before = {name: x.clone() for name, x in model.state_dict().items()}
    inputs = torch.tensor([[0, 5, 2]])
    said = model(inputs, n_loops=2)
    torch.testing.assert_close(fold_vocabulary(model)(inputs, n_loops=2), said)
    answered = fold_vocabulary(model, answers=[4, 1])(inputs, n_loops=2)
    torch.testing.assert_close(answered, said[..., [4, 1]])
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    model.loop_rule = LoopRule(3)
    assert fold_vocabulary(model, answers=[1, 2]).loop_rule == LoopRule(3)


@pytest.mark.usefixtures("no_type_checks")
def test_a_folded_model_is_kept_as_a_run_and_the_mapped_one_says_how(tmp_path: Path):
    theirs, words = build("plain", d_vocab=16, d_vocab_out=16), [2, 3, 4, 5, 14, 15]
    mapped = WithVocabulary(theirs, tokens=words, answers=[0, 1])
    given = {"task": Addition(), "max_n": 4, "origin": "written elsewhere"}
    with pytest.raises(InputError, match=r"got a WithVocabulary. Put .*fold_vocabulary"):
        Run.from_model(mapped, folder=tmp_path / "run", **given)  # type: ignore[arg-type]
    ours = fold_vocabulary(theirs, tokens=words, answers=[0, 1])
    run = Run.from_model(ours, folder=tmp_path / "run", **given)
    inputs = torch.tensor([[4, 3, 1, 0]])
    torch.testing.assert_close(run.model()(inputs, n_loops=2), ours(inputs, n_loops=2))


@pytest.mark.usefixtures("no_type_checks")
def test_what_cannot_be_folded_is_refused():
    model = build("plain", d_vocab=6, d_vocab_out=3)
    with pytest.raises(InputError, match="from 0 to 5"):
        fold_vocabulary(model, tokens=[0, 6])
    with pytest.raises(InputError, match="from 0 to 2"):
        fold_vocabulary(model, answers=[0, 3])
    with pytest.raises(InputError, match="tokens: expected none, as the model reads features"):
        fold_vocabulary(build("features"), tokens=[0, 1])
    with pytest.raises(InputError, match="got a WithVocabulary"):
        fold_vocabulary(WithVocabulary(model))  # type: ignore[arg-type]
