"""HRM and TRM from files as the published training code saves them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor, nn

from loopinterp.adapters import HRMAdapter, TRMAdapter, adapt, load_published
from loopinterp.adapters.architectures import AdaptedModelConfig
from loopinterp.core.errors import CheckpointError, InputError
from tests.adapters.published import hrm, trm
from tests.refusals import naming

NAMES = {
    "hrm": "hrm.hrm_act_v1@HierarchicalReasoningModel_ACTV1",
    "trm": "recursive_reasoning.trm@TinyRecursiveReasoningModel_ACTV1",
}
SIZES: dict[str, Any] = {
    "H_cycles": 2,
    "L_cycles": 3,
    "H_layers": 2,
    "L_layers": 1,
    "hidden_size": 32,
    "num_heads": 2,
    "expansion": 2,
    "puzzle_emb_ndim": 40,
    "pos_encodings": "rope",
    "halt_max_steps": 2,
    "halt_exploration_prob": 0.1,
}
DATA = {"seq_len": 6, "vocab_size": 11, "num_puzzle_identifiers": 5, "batch_size": 3}
PUZZLES = torch.tensor([4, 0, 4])
BUILD: dict[str, Callable[..., hrm.ACTWrapper]] = {"hrm": hrm.tiny, "trm": trm.tiny}


def _tokens() -> Tensor:
    return torch.randint(11, (3, 6), generator=torch.Generator().manual_seed(1))


def _save(
    folder: Path, kind: str, *, prefix: str = "_orig_mod.model.", **arch: Any
) -> tuple[Path, hrm.ACTWrapper]:
    """A run's folder with one saved step, and the model that was saved."""
    arch = {"forward_dtype": "float32", **SIZES, **arch}
    lengths = {"puzzle_emb_len": 16} if kind == "trm" else {}  # as published, if not written down
    module = BUILD[kind](**{**lengths, **arch}, **DATA)
    folder.mkdir(exist_ok=True)
    loss = {"name": "losses@ACTLossHead", "loss_type": "stablemax_cross_entropy"}
    settings = {"arch": {"name": NAMES[kind], "loss": loss, **arch}, "lr": 1e-4, "seed": 0}
    (folder / "all_config.yaml").write_text(yaml.dump(settings))
    state = {prefix + name: x for name, x in module.state_dict().items()}
    torch.save(state, folder / "step_1000")
    return folder, module


def _load(path: Path, **options: Any) -> HRMAdapter:
    model = load_published(str(path), **options)
    assert isinstance(model, HRMAdapter)
    return model


def _edit(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change the settings under ``arch``."""
    path = folder / "all_config.yaml"
    settings = yaml.safe_load(path.read_text())
    change(settings["arch"])
    path.write_text(yaml.dump(settings))


@pytest.mark.parametrize("prefix", ["_orig_mod.model.", "model.", ""])
@pytest.mark.parametrize("kind", ["hrm", "trm"])
def test_logits_are_those_of_the_module_that_was_saved(
    kind: str, prefix: str, tmp_path: Path
) -> None:
    folder, module = _save(tmp_path, kind, prefix=prefix)
    model, tokens = _load(folder, seq_len=6), _tokens()
    assert type(model) is {"hrm": HRMAdapter, "trm": TRMAdapter}[kind]
    assert not model.training and model.n_loops == 4
    inputs = model.with_puzzle(tokens, PUZZLES)
    expected = hrm.native(module, tokens, 4, puzzles=PUZZLES)
    places = {"hrm": 2, "trm": 16}[kind]
    assert model.n_puzzle_positions == places
    assert (model(inputs)[:, places:] - expected).abs().max() <= 1e-5
    by_file = _load(folder / "step_1000", seq_len=6)
    assert torch.equal(by_file(inputs), model(inputs))


@pytest.mark.parametrize(
    ("kind", "arch"),
    [
        ("hrm", {"pos_encodings": "learned"}),
        ("trm", {"pos_encodings": "none", "mlp_t": True, "puzzle_emb_len": 4}),
        ("trm", {"pos_encodings": "learned", "puzzle_emb_ndim": 0, "puzzle_emb_len": 0}),
    ],
)
def test_the_length_is_read_from_weights_that_tell_it(
    kind: str, arch: dict[str, Any], tmp_path: Path
) -> None:
    folder, module = _save(tmp_path, kind, **arch)
    model, tokens = _load(folder), _tokens()
    assert model.config.n_ctx == 6 + model.n_puzzle_positions
    same, inputs = adapt(module), model.with_puzzle(tokens, PUZZLES)
    assert torch.equal(model(inputs), same(inputs))
    with naming("seq_len"):
        _load(folder, seq_len=7)


def test_activations_are_of_the_type_as_trained_or_of_float32(tmp_path: Path) -> None:
    folder, module = _save(tmp_path, "hrm", forward_dtype="bfloat16")
    _edit(folder, lambda arch: arch.pop("forward_dtype"))  # HRM's own settings lack it
    model = _load(folder, seq_len=6)
    inputs = model.with_puzzle(_tokens(), PUZZLES)
    assert model.dtype == torch.bfloat16
    assert torch.equal(model(inputs), adapt(module)(inputs))
    wide = _load(folder, seq_len=6, dtype="float32")
    assert wide.dtype == torch.float32
    assert torch.equal(wide(inputs), adapt(module).float()(inputs))
    with naming("dtype"):
        _load(folder, seq_len=6, dtype="float16")
    for each in (model, wide):  # both can be rebuilt from their configuration
        built = AdaptedModelConfig.of(each).build()
        built.load_state_dict(each.state_dict())
        assert torch.equal(built(inputs), each(inputs))


def test_of_several_files_one_must_be_named(tmp_path: Path) -> None:
    folder, _ = _save(tmp_path, "hrm")
    torch.save({}, folder / "step_1000_all_preds.0")
    (folder / "hrm_act_v1.py").write_text("raise RuntimeError  # the code beside is not run")
    _load(folder, seq_len=6)
    torch.save({}, folder / "step_2000")
    with naming(f"model {folder}"):
        _load(folder, seq_len=6)
    _load(folder / "step_1000", seq_len=6)


def test_the_length_is_asked_for_where_weights_do_not_tell_it(tmp_path: Path) -> None:
    folder, _ = _save(tmp_path, "hrm")
    with naming("seq_len"):
        _load(folder)
    with naming("option of this checkpoint"):
        _load(folder, seq_len=6, pad=0)
    with pytest.raises(InputError):
        _load(folder, seq_len=0)


WRONG_WEIGHTS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "missing": lambda state: state.pop("_orig_mod.model.inner.L_init"),
    "not known": lambda state: state.update({"_orig_mod.model.inner.M_init": torch.zeros(32)}),
    r"\(7,\)": lambda state: state.update({"_orig_mod.model.inner.L_init": torch.zeros(7)}),
    "float64": lambda state: state.update(
        {"_orig_mod.model.inner.L_init": torch.zeros(32).double()}
    ),
    "embed_tokens": lambda state: state.pop("_orig_mod.model.inner.embed_tokens.embedding_weight"),
    "outer.x": lambda state: state.update({"_orig_mod.model.outer.x": torch.zeros(1)}),
    "int": lambda state: state.update({"_orig_mod.model.inner.L_init": 3}),
}


@pytest.mark.parametrize("why", list(WRONG_WEIGHTS))
def test_other_tensors_than_those_of_the_settings_are_refused(why: str, tmp_path: Path) -> None:
    folder, _ = _save(tmp_path, "hrm")
    state = torch.load(folder / "step_1000", weights_only=True)
    WRONG_WEIGHTS[why](state)
    torch.save(state, folder / "step_1000")
    with pytest.raises(CheckpointError, match=why):
        _load(folder, seq_len=6)


@pytest.mark.parametrize("content", [b"", b"no pickle", [1, 2], {}, nn.Linear(2, 2)])
def test_a_file_that_is_no_state_dict_is_refused(content: Any, tmp_path: Path) -> None:
    folder, _ = _save(tmp_path, "trm")
    if isinstance(content, bytes):
        (folder / "step_1000").write_bytes(content)
    else:
        torch.save(content, folder / "step_1000")  # a module is a pickle that runs code
    with pytest.raises(CheckpointError):
        _load(folder, seq_len=6)


WRONG_SETTINGS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "trm_hier6": lambda arch: arch.update(name=NAMES["trm"].replace("trm@", "trm_hier6@")),
    "mlp_t": lambda arch: arch.update(
        name="recursive_reasoning.hrm@HierarchicalReasoningModel_ACTV1", mlp_t=True
    ),
    "loop_gate": lambda arch: arch.update(loop_gate=True),  # a fork's, of unknown meaning
    "hidden_size": lambda arch: arch.update(hidden_size="wide"),
    "hidden_size = 0": lambda arch: arch.update(hidden_size=0),
    "num_heads = -1": lambda arch: arch.update(num_heads=-1),
    "forward_dtype": lambda arch: arch.update(forward_dtype="Tensor"),
    "H_cycles": lambda arch: arch.pop("H_cycles"),
    "num_heads": lambda arch: arch.pop("num_heads"),  # no weight tells it
    "arch.name": lambda arch: arch.clear(),
    "L_level.layers.1": lambda arch: arch.update(L_layers=2),
}


@pytest.mark.parametrize("why", list(WRONG_SETTINGS))
def test_settings_that_cannot_be_rebuilt_are_refused(why: str, tmp_path: Path) -> None:
    folder, _ = _save(tmp_path, "hrm")
    _edit(folder, WRONG_SETTINGS[why])
    with pytest.raises(CheckpointError, match=why):
        _load(folder, seq_len=6)


def test_hrm_of_trms_repository_is_hrm(tmp_path: Path) -> None:
    folder, module = _save(tmp_path, "hrm")
    name = "recursive_reasoning.hrm@HierarchicalReasoningModel_ACTV1"
    _edit(folder, lambda arch: arch.update(name=name, mlp_t=False))
    model = _load(folder, seq_len=6)
    inputs = model.with_puzzle(_tokens(), PUZZLES)
    assert torch.equal(model(inputs), adapt(module)(inputs))


@pytest.mark.parametrize("content", ["arch: [", "- 1", "arch: 3", "\x00"])
def test_damaged_settings_are_refused(content: str, tmp_path: Path) -> None:
    folder, _ = _save(tmp_path, "hrm")
    (folder / "all_config.yaml").write_text(content)
    with pytest.raises(CheckpointError):
        _load(folder, seq_len=6)


def test_relatives_of_another_structure_are_no_trm() -> None:
    """Ablations in TRM's repository share its class name."""
    two_stacks = trm.tiny(mlp_t=True)  # its HRM with mlp_t has a slow stack and no attention
    two_stacks.inner.H_level = nn.ModuleList()
    many_parts = trm.tiny()  # trm_hier6 has L1_init to L6_init
    del many_parts.inner.L_init
    for module in (two_stacks, many_parts):
        with pytest.raises(InputError):
            adapt(module)
