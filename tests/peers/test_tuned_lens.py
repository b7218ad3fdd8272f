"""tuned-lens reads a lens of ours, and we read the one that it saves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.peers.asking import ask

pytestmark = [pytest.mark.peers, pytest.mark.slow]


@torch.no_grad()
def answer(folder: Path) -> dict[str, Any]:
    from transformers import GPT2Config, GPT2LMHeadModel
    from tuned_lens.nn.lenses import TunedLens  # type: ignore[import-not-found]
    from tuned_lens.nn.unembed import Unembed  # type: ignore[import-not-found]

    given = torch.load(folder / "given.pt", weights_only=True)
    vocab, width = given["unembedding"].shape
    model = GPT2LMHeadModel(GPT2Config(n_embd=width, n_layer=1, n_head=2, vocab_size=vocab))
    model.transformer.ln_f.load_state_dict(given["norm"])
    model.lm_head.weight.copy_(given["unembedding"])
    lens = TunedLens.from_unembed_and_pretrained(Unembed(model), str(folder / "ours"))
    states = [lens.transform_hidden(given["h"], k) for k in range(len(lens))]
    logits = [lens(given["h"], k) for k in range(len(lens))]
    for weight in lens.layer_translators.parameters():
        weight += torch.randn_like(weight)
    lens.save(folder / "theirs")
    saved = [lens.transform_hidden(given["h"], k) for k in range(len(lens))]
    return {"states": states, "logits": logits, "saved": saved}


@torch.no_grad()
def test_translators_and_logits_are_ours(tmp_path: Path) -> None:
    from loopinterp.lenses import fit_tuned_lens, read_tuned_lens, write_tuned_lens
    from tests.lenses.lens_toys import tokens, transformer

    model: Any = transformer(n_layers=2, unembed_bias=False)
    lens = fit_tuned_lens(model, tokens(), n_loops=3, steps=3, learning_rate=0.1)
    lens.offset.normal_(generator=torch.Generator().manual_seed(0))
    write_tuned_lens(lens, tmp_path / "ours")
    h = torch.randn(2, 5, model.config.d_model, generator=torch.Generator().manual_seed(1))
    norm, unembedding = model.ln_final.state_dict(), model.unembedding.weight
    torch.save({"h": h, "norm": norm, "unembedding": unembedding}, tmp_path / "given.pt")
    read = ask("older", __name__, tmp_path)
    again = read_tuned_lens(tmp_path / "theirs")
    assert len(read["states"]) == lens.n_loops == again.n_loops
    for loop in range(lens.n_loops):
        ours = lens.transport(h, loop)
        torch.testing.assert_close(read["states"][loop], ours, atol=1e-5, rtol=0)
        torch.testing.assert_close(read["logits"][loop], model.readout(ours), atol=1e-5, rtol=0)
        torch.testing.assert_close(again.transport(h, loop), read["saved"][loop], atol=1e-5, rtol=0)
        assert (read["saved"][loop] - ours).abs().max() > 1
