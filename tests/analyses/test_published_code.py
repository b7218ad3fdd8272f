"""The published code beside our adapters, tried on modules of the same structure and names."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from analyses import published_code
from analyses.published_code import KINDS, LOOPS, compare, main
from loopinterp.adapters import adapt

FILES = Path(__file__).resolve().parent.parent / "adapters" / "published"


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_no_logit_differs(kind: str) -> None:
    differences = compare(kind, None if kind == "hrm_text" else FILES / f"{kind}.py")
    assert tuple(differences) == LOOPS
    assert all(each.largest <= 1e-5 and each.size > 0.02 for each in differences.values())


def test_what_differs_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(model: Any) -> Any:
        adapted = adapt(model)
        adapted.part = lambda state, name: state[..., :32]  # type: ignore[method-assign]
        return adapted

    monkeypatch.setattr(published_code.adapters, "adapt", wrong)
    assert all(each.largest > 1e-4 for each in compare("hrm_text", None).values())


def test_a_file_below_a_folder_that_it_imports_from(tmp_path: Path) -> None:
    for copy in ("one", "other"):  # two of one name do not meet
        folder = tmp_path / copy / "models"
        (folder / "hrm").mkdir(parents=True)
        code = f"from flash_attn_interface import flash_attn_func\nname = {copy!r}\n"
        (folder / "layers.py").write_text(code)
        (folder / "hrm" / "act.py").write_text("from models.layers import flash_attn_func, name\n")
        module = published_code.module_of(folder / "hrm" / "act.py")
        assert module.name == copy
    assert not {"models", "models.layers", "flash_attn_interface"} & {*sys.modules}
    q, k, v = torch.randn(3, 2, 5, 4, 8, generator=torch.Generator().manual_seed(0))
    for causal in (True, False):
        pattern = torch.einsum("bqhd,bkhd->bhqk", q, k) / 8**0.5
        if causal:
            pattern = pattern.masked_fill(torch.ones(5, 5).triu(1).bool(), -torch.inf)
        expected = torch.einsum("bhqk,bkhd->bqhd", pattern.softmax(-1), v)
        assert (module.flash_attn_func(q, k, v, causal=causal) - expected).abs().max() < 1e-5


def test_a_reasoners_own_tensors_are_made_where_the_tokens_are() -> None:
    class Model:
        """It makes its carry on the default device, as the published ones do."""

        inner = SimpleNamespace(config=SimpleNamespace(H_cycles=2))

        def initial_carry(self, batch: dict[str, Tensor]) -> set[torch.device]:
            return {torch.empty(1).device, batch["puzzle_identifiers"].device}

        def __call__(self, carry: Any, batch: dict[str, Tensor]) -> tuple[Any, dict[str, Any]]:
            return carry, {"logits": carry}

    tokens = torch.zeros(2, 6, dtype=torch.long, device="meta")
    assert KINDS["hrm"].native(Model(), tokens, 4, None) == {tokens.device}


def test_the_command_prints_every_number_of_loops(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["published_code", "--kind", "hrm_text"])
    main()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == [f"hrm_text, {n} loops" for n in LOOPS]
