"""A GPT-2 in both of our forms is the GPT-2; the table; and what is no checkout is refused."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from analyses import decompiling_benchmark as benchmark
from analyses.tables_in_pages import PAGES, RESULTS, put
from loopinterp.models import bind, iterate
from loopinterp.tasks import IGNORE


def tiny() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=7, n_positions=12, n_embd=16, n_layer=3, n_head=2, initializer_range=0.5
    )
    config._attn_implementation = "sdpa"
    return GPT2LMHeadModel(config).eval().requires_grad_(False)


TOKENS = torch.randint(7, (5, 12), generator=torch.Generator().manual_seed(0))


def test_layers_as_loops_and_the_model_with_hooks_are_the_original() -> None:
    net = tiny()
    assert benchmark.difference(net, TOKENS) < 1e-10
    *_, (loops, h) = iterate(benchmark.LayersAsLoops(net), TOKENS, 3)
    assert loops == 3
    logits = benchmark.LayersAsLoops(net).readout(h)
    torch.testing.assert_close(logits, net(TOKENS).logits, atol=1e-5, rtol=0)
    torch.testing.assert_close(benchmark.with_hooks(net)(TOKENS), logits, atol=1e-4, rtol=1e-4)


def test_another_activation_is_a_difference() -> None:
    net = tiny()
    net.transformer.get_submodule("h.1.mlp").act = torch.nn.ReLU()
    assert benchmark.difference(net, TOKENS) > 1e-3


def test_a_set_of_tokens_is_one_class() -> None:
    net, sets = tiny(), benchmark.subsets(7)
    positive = (net(TOKENS).logits > 0).long() << torch.arange(7)
    for model in (benchmark.LayersAsLoops(net, sets), benchmark.with_hooks(net, sets)):
        loops = 3 if isinstance(model, benchmark.LayersAsLoops) else 1
        *_, (_, h) = iterate(model, TOKENS, loops)
        assert torch.equal(bind(model, TOKENS).readout(h).argmax(-1), positive.sum(-1))


class Words(list):
    pad_token_id = 3


@pytest.mark.parametrize(
    ("name", "label", "targets"),
    [
        ("copy", [3, 3, 1, 0], [IGNORE, 1, 0, IGNORE, IGNORE]),
        ("bce_copy", [[1, 0, 1, 0], [0, 1, 0, 0], [0] * 4], [5, 2, IGNORE, IGNORE, IGNORE]),
    ],
)
def test_their_labels_are_targets_at_the_position_that_answers(
    name: str, label: list, targets: list[int]
) -> None:
    long = ([2, 2, 2, 2, 2], None, [3, 3, 3, 3, 3] if name == "copy" else [[0] * 4] * 5)
    module = SimpleNamespace(
        get_tokenizer_for_task=lambda *_: Words(range(4)),
        get_dataset_for_task=lambda *_: [([0, 1, 2, 2][: len(label)], None, label), long],
    )
    batch = benchmark.TheirTask(name, 2, module).draw(3, 3, 2, seed=0)
    assert batch.targets[0].tolist() == targets
    assert batch.inputs[0].tolist() == [0, 1, 2, 2, 3][: len(label)] + [3] * (5 - len(label))
    assert batch.n_loops.tolist() == [2, 2]


def test_the_smallest_rank_counts_at_every_length() -> None:
    one = {
        "model": "a", "layers": 2, "d_model": 16, "their program": "no", "their 0-50": 1.0,
        "accuracy 0-50": 0.99, "parts": 4, "needed": 3, "decompile": "untied-layers",
    }  # fmt: skip
    measured = [(24, 4, 1.0, 0.96), (24, 8, 1.0, 1.0), (48, 4, 0.97, 0.94), (48, 8, 1.0, 0.95)]
    rows = [
        {**one, "n": n, "rank": rank, "clean": clean, "value": value, "inputs": 40}
        for n, rank, clean, value in measured
    ]
    [*_, row] = benchmark.as_table(pd.DataFrame(rows)).splitlines()
    assert [cell.strip() for cell in row.strip("|").split("|")] == [
        "`a`", "2 × 16", "no", "1.000", "0.990", "3 of 4", "4", "8", "untied layers"
    ]  # fmt: skip
    few = [{**row, "inputs": 10, "clean": 0.5, "parts": float("nan")} for row in rows]
    [*_, row] = benchmark.as_table(pd.DataFrame(few)).splitlines()
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[-4:] == ["–", "> 8", "–", "untied layers"]


def test_what_is_no_checkout_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["decompiling_benchmark", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        benchmark.main()
    assert ended.value.code == 2
    message = capsys.readouterr().err
    assert "expected a checkout" in message and str(tmp_path) in message and "Clone" in message


def test_the_page_says_what_the_file_says() -> None:
    stored = pd.read_csv(RESULTS / benchmark.FILE)
    text = (PAGES / benchmark.PAGE).read_text()
    assert put(text, {benchmark.NAME: benchmark.as_table(stored)}) == text
