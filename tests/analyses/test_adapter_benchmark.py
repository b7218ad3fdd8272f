"""What the adapters' benchmark times is one and the same work: values beside those of the peers."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from analyses import published_code
from analyses.benchmarks import adapters, published
from analyses.benchmarks.adapters import main, ways
from analyses.benchmarks.forward import nnsight
from analyses.benchmarks.nnsight_peer import FIRINGS, by_pytorch
from analyses.benchmarks.published import SIZES, random_model
from loopinterp.adapters import adapt
from tests.adapters.kinds import KINDS
from tests.pretend_gpu import DEVICE, pretend_gpu

FILES = Path(__file__).resolve().parent.parent / "adapters" / "published"

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:transformer_lens")


@pytest.fixture(autouse=True)
def _without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture
def _no_bridge(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bridge is of the published files, not of modules of the same structure."""
    monkeypatch.setattr(adapters, "PEERED", ("hrm_text",))


def tiny(kind: str) -> tuple[Any, torch.Tensor]:
    return random_model(kind, None if kind == "hrm_text" else FILES / f"{kind}.py", "tiny")


def test_the_bridge_keeps_by_hand_what_our_cache_keeps() -> None:
    model, tokens = tiny("hrm_text")
    forwards = ways("hrm_text", model, tokens)
    logits, ours = forwards["residuals of all (loop, layer)"]()
    by_hand = forwards["bridge, hook by hand (16 of 16)"]()
    for actual, expected in zip(by_hand, ours.values(), strict=True):
        torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)
    _, last = forwards["bridge, last loop cached (4 of 16)"]()
    assert len({at.data_ptr() for at in last.values()}) == 4  # tensors, of which each has two names
    torch.testing.assert_close(last["L_blocks.1.hook_resid_post"], by_hand[13])
    for name in ("its own forward", "no hooks", "bridge, no hooks"):
        torch.testing.assert_close(forwards[name](), logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", sorted({*SIZES} - {"hrm_text"}))
@pytest.mark.usefixtures("_no_bridge")
def test_our_ways_are_the_native_forward(kind: str) -> None:
    forwards = ways(kind, *tiny(kind))
    residuals = "residuals of all (loop, layer)"
    assert [*forwards] == ["its own forward", "no hooks", residuals]
    expected = forwards["its own forward"]()
    torch.testing.assert_close(forwards["no hooks"](), expected, atol=1e-4, rtol=0)
    torch.testing.assert_close(forwards[residuals]()[0], expected)


def test_the_bridge_takes_a_copy() -> None:
    model, tokens = tiny("hrm_text")
    before = {name: type(module) for name, module in model.named_modules()}
    ways("hrm_text", model, tokens)
    assert before == {name: type(module) for name, module in model.named_modules()}


@pytest.mark.parametrize("kind", sorted(FIRINGS))
def test_what_nnsight_must_keep_is_what_our_cache_keeps(kind: str) -> None:
    model, tokens = tiny(kind)
    ours = adapt(model)
    start = ours.initial_state(ours.embed(tokens))
    _, cache = ours.run_with_cache(tokens, state=start, names_filter="hook_resid_post")
    loops, order = FIRINGS[kind](model)
    layers = [layer for stack, _ in order for layer in stack]
    assert loops == ours.n_loops and len(layers) == len(cache)
    recorded = by_pytorch(
        layers, lambda: published_code.KINDS[kind].native(model, tokens, loops, start)
    )
    for actual, expected in zip(recorded, cache.values(), strict=True):
        torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)
    seen: Counter[Any] = Counter()
    for stack, firing in order:
        assert firing == seen[stack]
        seen[stack] += 1
    assert not any(module._forward_hooks for module in model.modules())


def test_another_python_is_asked_with_the_same_options(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(
        f"#!{sys.executable}\nimport json, sys\nprint('chatter')\nprint(json.dumps(sys.argv[1:]))\n"
    )
    python.chmod(0o755)
    options = {"rounds": 3, "threads": 2, "clock": "wall", "allocator": "keep", "device": "cuda"}
    measured: Any = nnsight(python, "tiny", Namespace(**options), "--kind", "ouro")
    assert measured[:3] == ["-m", "analyses.benchmarks.nnsight_peer", "tiny"]
    assert measured[3:5] == ["--kind", "ouro"]
    assert dict(zip(measured[5::2], measured[6::2])) == {
        f"--{k}": str(v) for k, v in options.items()
    }


@pytest.mark.usefixtures("_no_bridge")
def test_the_command_writes_its_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(adapters, "settle", lambda _: None)
    row = {"milliseconds": 2.0, "ratio": 1.5, "ratio_quartile_1": 1.0, "ratio_quartile_3": 2.0}
    monkeypatch.setattr(adapters, "compare", lambda ways, **_: dict.fromkeys(ways, row))
    monkeypatch.setattr(
        adapters, "nnsight", lambda python, size, _, *more: {f"{python}, {size}, {more[1]}": row}
    )
    arguments = ["--sizes", "tiny", "--ouro", str(FILES / "ouro.py"), "--peer-python", "peer"]
    monkeypatch.setattr(
        sys, "argv", ["adapters", *arguments, "--json", str(tmp_path / "rows.json")]
    )
    main()
    written = json.loads((tmp_path / "rows.json").read_text())
    assert [title.split(",")[0] for title in written["tables"]] == ["ouro", "hrm_text"]
    ouro, hrm_text = written["tables"].values()
    assert "peer, tiny, hrm_text" in hrm_text
    assert {*ouro} < {*hrm_text} and "bridge, no hooks" in hrm_text
    assert capsys.readouterr().out.count("target 1.05") == 2


@pytest.mark.parametrize("kind", ["hrm", "hrm_text"])
def test_every_way_runs_on_a_card(kind: str) -> None:
    """The tests' own smaller models, as each operation takes long on a pretended one."""
    with pretend_gpu():
        model = KINDS[kind].build().to(DEVICE.type)
        tokens = torch.zeros(1, 6, dtype=torch.long).to(DEVICE.type)
        for run in ways(kind, model, tokens).values():
            run()


def test_a_hundred_million_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(published.torch.nn.init, "normal_", lambda *_, **__: None)
    for kind in SIZES:
        file = None if kind == "hrm_text" else FILES / f"{kind}.py"
        with torch.device("meta"):
            model, _ = random_model(kind, file, "100M", device="meta")
        assert 1e8 < sum(weight.numel() for weight in model.parameters()) < 1.2e8
