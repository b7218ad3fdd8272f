"""Models on disk: exact round trips, and files that are refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from loopinterp.core.errors import CheckpointError, ConfigError, InputError
from loopinterp.core.storage import read_tensors, write_tensors
from loopinterp.models import LoopedTransformer
from tests.models.variants import VARIANTS, build, some_inputs


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A folder with a saved model."""
    build("demo", seed=3).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize("name", VARIANTS)
def test_round_trip_is_exact(name: str, tmp_path: Path) -> None:
    model = build(name, seed=3)
    model.save_pretrained(tmp_path)
    again = LoopedTransformer.from_pretrained(tmp_path)
    assert again.config == model.config
    assert again.state_dict().keys() == model.state_dict().keys()
    x = some_inputs(model)
    assert torch.equal(again(x, n_loops=3), model(x, n_loops=3))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json", "model.safetensors"]


def test_tied_weights_stay_tied(tmp_path: Path) -> None:
    build("tied").save_pretrained(tmp_path)
    again = LoopedTransformer.from_pretrained(tmp_path)
    assert again.unembedding.weight is again.embedding.weight


def test_half_precision_is_kept(tmp_path: Path) -> None:
    build("demo").to(torch.bfloat16).save_pretrained(tmp_path)
    assert LoopedTransformer.from_pretrained(tmp_path).dtype == torch.bfloat16


def test_truncated_weights(saved: Path) -> None:
    weights = saved / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(CheckpointError, match="truncated"):
        LoopedTransformer.from_pretrained(saved)


def test_weights_of_another_model(saved: Path, tmp_path: Path) -> None:
    build("plain", d_model=32).save_pretrained(tmp_path / "other")
    (tmp_path / "other" / "model.safetensors").replace(saved / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"^model "):
        LoopedTransformer.from_pretrained(saved)


def test_weights_of_an_empty_file_are_named(saved: Path) -> None:
    weights = saved / "model.safetensors"
    first = min(read_tensors(weights))
    write_tensors(weights, {})
    with pytest.raises(CheckpointError, match=rf"^weights .*{first} is missing"):
        LoopedTransformer.from_pretrained(saved)


def test_weights_of_no_or_two_precisions(saved: Path) -> None:
    path = saved / "model.safetensors"
    weights = read_tensors(path)
    write_tensors(path, {name: x.long() for name, x in weights.items()})
    with pytest.raises(CheckpointError, match=r"^weights .*torch\.int64"):
        LoopedTransformer.from_pretrained(saved)
    first = next(iter(weights))
    write_tensors(path, {**weights, first: weights[first].half()})
    with pytest.raises(CheckpointError, match=r"^weights "):
        LoopedTransformer.from_pretrained(saved)


def test_a_configuration_changed_by_a_hair_is_noticed(saved: Path) -> None:
    path = saved / "config.json"
    text = path.read_text()
    for changed in (text.replace("1e-05", "1e-06"), text.replace('"d_mlp": null', '"d_mlp": 1e12')):
        assert changed != text
        path.write_text(changed.replace("1e12", str(10**7)))  # refused before it is built
        with pytest.raises(CheckpointError, match=r"^model "):
            LoopedTransformer.from_pretrained(saved)


def test_weights_that_were_written_elsewhere_are_read(saved: Path) -> None:
    weights = read_tensors(saved / "model.safetensors")
    save_file(weights, saved / "model.safetensors")
    again = LoopedTransformer.from_pretrained(saved)
    assert all(torch.equal(again.state_dict()[name], x) for name, x in weights.items())


def test_missing_files_and_folders(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (saved / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="such"):
        LoopedTransformer.from_pretrained(saved)
    (saved / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"config\.json"):
        LoopedTransformer.from_pretrained(saved)
    with pytest.raises(CheckpointError, match="hf:owner/name"):
        LoopedTransformer.from_pretrained(saved / "no" / "such")


def test_damaged_or_wrong_configuration(saved: Path) -> None:
    path = saved / "config.json"
    settings = json.loads(path.read_text())
    path.write_text("{")
    with pytest.raises(CheckpointError, match="valid JSON"):
        LoopedTransformer.from_pretrained(saved)
    path.write_text("[]")
    with pytest.raises(CheckpointError, match="JSON object"):
        LoopedTransformer.from_pretrained(saved)
    path.write_text(json.dumps({**settings, "n_head": 3}))
    with pytest.raises(ConfigError, match="n_head"):
        LoopedTransformer.from_pretrained(saved)


def test_a_pickle_is_refused_and_never_run(saved: Path) -> None:
    torch.save(build("demo").state_dict(), saved / "model.safetensors")
    with pytest.raises(CheckpointError, match="any code"):
        LoopedTransformer.from_pretrained(saved)


def test_unwritable_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="written"):
        build("demo").save_pretrained(tmp_path / "file")


def test_pushing_writes_the_same_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pushed: dict[str, list[str]] = {}

    class FakeApi:
        def __init__(self, *args: object, **options: object) -> None: ...

        def create_repo(self, repo_id: str, **options: object) -> object:
            return type("Url", (), {"repo_id": repo_id})()

        def upload_folder(self, *, repo_id: str, folder_path: str, **options: object) -> str:
            pushed[repo_id] = sorted(p.name for p in Path(folder_path).iterdir())
            return "commit"

    monkeypatch.setattr("huggingface_hub.hub_mixin.HfApi", FakeApi)
    assert build("demo").push_to_hub("someone/adder") == "commit"
    assert {"config.json", "model.safetensors"} <= set(pushed["someone/adder"])


def test_a_hub_is_asked_for_marked_names_only(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = []

    def download(name: str, **options: object) -> str:
        requests.append((name, options["revision"]))
        return str(saved)

    monkeypatch.setattr("loopinterp.models.checkpoints.snapshot_download", download)
    for mistyped in ("runs/dmo", "owner/name", saved.parent / "modle", "n" * 5000):
        with pytest.raises(CheckpointError, match=r"^model .*hf:owner/name"):
            LoopedTransformer.from_pretrained(mistyped)
    assert requests == []
    model = LoopedTransformer.from_pretrained("hf:owner/name", revision="main")
    assert requests == [("owner/name", "main")]
    assert model.config == build("demo").config


def test_options_of_a_download_do_not_go_with_a_folder(saved: Path) -> None:
    with pytest.raises(InputError, match=r"^revision:"):
        LoopedTransformer.from_pretrained(saved, revision="main")
    with pytest.raises(InputError, match=r"^repo_id:"):
        build("demo").save_pretrained(saved, repo_id="someone/adder")


def test_weights_can_be_read_in_another_type(saved: Path) -> None:
    assert LoopedTransformer.from_pretrained(saved, dtype="bfloat16").dtype == torch.bfloat16
    with pytest.raises(InputError, match="dtype"):
        LoopedTransformer.from_pretrained(saved, dtype="float31")
