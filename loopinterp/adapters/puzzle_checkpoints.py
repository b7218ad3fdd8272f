"""Checkpoints of HRM and TRM, as the published training code saves them.

A run's folder has ``all_config.yaml`` and, for each saved step, a state dict of ``torch.save`` with
names such as ``_orig_mod.model.inner.H_init``.

Sources: ``pretrain.py`` of sapientinc/HRM and of SamsungSAILMontreal/TinyRecursiveModels.
"""

from __future__ import annotations

import dataclasses
import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from pydantic import PositiveInt, TypeAdapter, ValidationError

from loopinterp.adapters.plain import hrm
from loopinterp.core.boundary import checked
from loopinterp.core.errors import CheckpointError, InputError, unknown_name
from loopinterp.core.storage import read_bytes
from loopinterp.models.checkpoints import check_tensors

if TYPE_CHECKING:
    from torch import Tensor

SETTINGS = "all_config.yaml"


class _Code(NamedTuple):
    model: Callable[[dict[str, Any]], hrm.ACTWrapper]
    config: type[hrm.HRMConfig]
    defaults: dict[str, Any]


_HRM = _Code(hrm.HierarchicalReasoningModel_ACTV1, hrm.HRMConfig, {"forward_dtype": "bfloat16"})
_TRM = _Code(
    hrm.TinyRecursiveReasoningModel_ACTV1,
    hrm.TRMConfig,
    {"forward_dtype": "bfloat16", "puzzle_emb_len": 16},
)
_CODE = {
    "hrm.hrm_act_v1@HierarchicalReasoningModel_ACTV1": _HRM,
    "recursive_reasoning.hrm@HierarchicalReasoningModel_ACTV1": _HRM,
    "recursive_reasoning.trm@TinyRecursiveReasoningModel_ACTV1": _TRM,
}
_SIZES = (
    *("H_cycles", "L_cycles", "H_layers", "L_layers", "hidden_size", "num_heads"),
    *("halt_max_steps", "expansion"),
)
_NEEDED = (*_SIZES, "pos_encodings")  # no published default, and they decide the computation
_DTYPES = ("bfloat16", "float16", "float32")


def is_puzzle_checkpoint(path: str) -> bool:
    folder = path if os.path.isdir(path) else os.path.dirname(path)
    return os.path.exists(path) and os.path.isfile(os.path.join(folder, SETTINGS))


@checked
def read_puzzle_checkpoint(path: str, *, seq_len: PositiveInt | None = None) -> hrm.ACTWrapper:
    """HRM or TRM from a file of weights beside ``all_config.yaml``, in evaluation mode.

    Weights are read with ``weights_only``, which runs no code of the file.

    Args:
        path: The file of weights, or a folder with one such file.
        seq_len: Positions of the data set's puzzles, if the weights do not tell.

    Raises:
        CheckpointError: If a file is damaged, or the architecture or tensors are others.
        InputError: If ``seq_len`` is missing, or is not the weights' own.
    """
    file = Path(path)
    if file.is_dir():
        # Beside step_1000 there may be step_1000_all_preds.0, of the same format.
        files = sorted(
            x
            for x in file.iterdir()
            if x.is_file() and x.suffix in ("", ".pt", ".pth")
            if "_preds" not in x.name and not x.name.startswith(".")
        )
        if len(files) != 1:
            shown = ", ".join(x.name for x in files[-6:]) or "none"
            expected, fix = "one file of weights", "Pass the path of one, such as FOLDER/step_1000."
            raise InputError(f"model {file}", expected=expected, given=shown, fix=fix)
        (file,) = files
    code, sizes = _read_settings(file.parent / SETTINGS)
    weights = _read_weights(file)
    sizes["vocab_size"] = _rows(weights, "embed_tokens.embedding_weight", file)
    width = sizes.get("puzzle_emb_ndim", 0)
    if width:
        sizes["num_puzzle_identifiers"] = _rows(weights, "puzzle_emb.weights", file)
    prefix = sizes.get("puzzle_emb_len") or -(-width // sizes["hidden_size"])
    sizes["seq_len"] = _length(weights, seq_len, prefix)
    with torch.random.fork_rng(devices=[]):
        model = code.model(sizes).eval()
    fix = f"Restore the file, or the {SETTINGS} that it was saved with."
    check_tensors(weights, model.state_dict(), f"weights {file}", fix=fix)
    model.load_state_dict(weights)
    return model


def _read_settings(path: Path) -> tuple[_Code, dict[str, Any]]:
    import yaml

    fix = "Restore the file that the training code wrote."
    try:
        document = yaml.safe_load(read_bytes(path))
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        got = f"damaged content ({type(error).__name__})"
        raise CheckpointError(f"file {path}", expected="YAML", given=got, fix=fix) from error
    arch = document.get("arch") if isinstance(document, dict) else None
    if not isinstance(arch, dict) or not isinstance(arch.get("name"), str):
        expected, got = "settings with arch.name", "none"
        raise CheckpointError(f"file {path}", expected=expected, given=got, fix=fix)
    values = {k: x for k, x in arch.items() if k not in ("name", "loss")}
    code = _CODE.get(arch["name"])
    if code is _HRM and not values.get("mlp_t", False):
        values.pop("mlp_t", None)  # of the copy of HRM in TRM's repository
    if code is None or (code is _HRM and "mlp_t" in values):
        expected = f"an architecture that is rebuilt here: {', '.join(_CODE)}"
        got = f"{arch['name']}" + (" with mlp_t" if "mlp_t" in values else "")
        fix = "If its module computes as one of these, build it by its own code: adapt(module)."
        raise CheckpointError(f"arch.name of {path}", expected=expected, given=got, fix=fix)
    return code, _checked_settings(code, values, path)


def _checked_settings(code: _Code, values: dict[str, Any], path: Path) -> dict[str, Any]:
    """The settings, each of its type: an unknown one may change the computation."""
    what, fix = f"arch of {path}", "Restore the file that the training code wrote."
    fields = [field.name for field in dataclasses.fields(code.config)]
    for name in values:
        if name not in fields:
            raise unknown_name(what, str(name), fields, error=CheckpointError)
    for name in _NEEDED:
        if name not in values:
            raise CheckpointError(what, expected=name, given="none", fix=fix)
    try:
        config = TypeAdapter(code.config).validate_python({**code.defaults, **values})
    except ValidationError as error:
        first = error.errors()[0]
        expected, got = first["msg"], f"{'.'.join(map(str, first['loc']))} = {first['input']!r}"
        raise CheckpointError(what, expected=expected, given=got, fix=fix) from error
    for name in _SIZES:
        size = getattr(config, name)
        if size < 0 or (size == 0 and name != "H_layers"):  # TRM has no slow layers
            got = f"{name} = {size}"
            raise CheckpointError(what, expected="sizes of a model", given=got, fix=fix)
    if config.forward_dtype not in _DTYPES:
        expected, got = " or ".join(_DTYPES), f"forward_dtype = {config.forward_dtype!r}"
        raise CheckpointError(what, expected=expected, given=got, fix=fix)
    return {name: getattr(config, name) for name in {**code.defaults, **values}}


def _read_weights(path: Path) -> dict[str, Tensor]:
    expected, fix = "a state dict of HRM or TRM (torch.save)", "Restore the file from a copy."
    try:
        state = torch.load(io.BytesIO(read_bytes(path)), map_location="cpu", weights_only=True)
    except CheckpointError:
        raise
    except Exception as error:  # a damaged pickle raises errors of any type
        got = f"a file that does not load ({type(error).__name__})"
        raise CheckpointError(f"file {path}", expected=expected, given=got, fix=fix) from error
    names = list(state) if isinstance(state, dict) else []
    first = str(names[0]) if names else ""
    # torch.compile, the loss and data parallelism each put a name of theirs in front.
    prefix = first[: first.find("inner.")] if "inner." in first else None
    for name in names:
        if prefix is None or not isinstance(name, str) or not name.startswith(f"{prefix}inner."):
            got = f"a tensor {str(name)[:80]!r}"
            raise CheckpointError(f"file {path}", expected=expected, given=got, fix=fix)
    if not names:
        got = f"a {type(state).__name__} without tensors"
        raise CheckpointError(f"file {path}", expected=expected, given=got, fix=fix)
    return {name.removeprefix(prefix): x for name, x in state.items()}


def _rows(weights: dict[str, Tensor], name: str, path: Path) -> int:
    table = weights.get(f"inner.{name}")
    if table is None or table.dim() != 2:
        fix = f"Restore the file, or the {SETTINGS} that it was saved with."
        got = "none" if table is None else f"a tensor of {table.dim()} axes"
        raise CheckpointError(f"weights {path}", expected=f"inner.{name}", given=got, fix=fix)
    return len(table)


def _length(weights: dict[str, Tensor], seq_len: int | None, prefix: int) -> int:
    with_positions = (
        weights.get("inner.embed_pos.embedding_weight"),
        weights.get("inner.L_level.layers.0.mlp_t.down_proj.weight"),  # [pos, neuron]
    )
    known = next((len(x) - prefix for x in with_positions if x is not None and x.dim()), None)
    if known is None and seq_len is None:
        expected = "the positions of a puzzle, which these weights do not tell"
        fix = "Pass seq_len=, as in the data set's dataset.json (sudoku 81, ARC and mazes 900)."
        raise InputError("seq_len", expected=expected, given="None", fix=fix)
    if None not in (known, seq_len) and known != seq_len:
        expected, fix = f"{known}, as in the weights", "Leave it out."
        raise InputError("seq_len", expected=expected, given=str(seq_len), fix=fix)
    length = seq_len if known is None else known
    assert length is not None
    return length
