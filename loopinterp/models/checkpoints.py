"""Models and caches on disk: JSON and safetensors in a folder, no pickles."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub import ModelHubMixin, snapshot_download
from pydantic import TypeAdapter, ValidationError
from typing_extensions import TypedDict

from loopinterp.core.boundary import resolve_device
from loopinterp.core.errors import CheckpointError
from loopinterp.core.results import config_hash
from loopinterp.core.storage import (
    check_file_name,
    read_json_object,
    read_tensors,
    read_tensors_and_metadata,
    write_json,
    write_tensors,
)
from loopinterp.models.config import LoopedTransformerConfig
from loopinterp.models.protocol import check_dtype, every_tensor, refuse
from loopinterp.models.weights import need_plain

if TYPE_CHECKING:
    from torch import Tensor
    from typing_extensions import Self

_CONFIG_FILE, _WEIGHTS_FILE = "config.json", "model.safetensors"
HUB = "hf:"  # prefix of a hub's models


class PretrainedMixin(ModelHubMixin):
    """``save_pretrained``, ``from_pretrained`` and ``push_to_hub`` without pickles."""

    config: LoopedTransformerConfig

    def save_pretrained(  # type: ignore[override]
        self, save_directory: str | Path, *, push_to_hub: bool = False, **push_options: Any
    ) -> str | None:
        """Write a model with unchanged layers to a folder, and maybe push it to a hub."""
        if not push_to_hub:
            refuse(push_options, "none without a push", "Leave it out, or pass push_to_hub=True.")
        write_model(self, Path(save_directory))
        return self.push_to_hub(**push_options) if push_to_hub else None

    @classmethod
    def from_pretrained(  # type: ignore[override]
        cls,
        pretrained_model_name_or_path: str | Path,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | str | None = None,
        **hub_options: Any,
    ) -> Self:
        """Read a model from a folder or a hub.

        Args:
            pretrained_model_name_or_path: A folder, or ``hf:owner/name`` for a model on a hub.
            dtype: Type to cast the weights to; as saved if None.
            hub_options: ``revision``, ``token``, ``cache_dir`` … of a download.

        Raises:
            CheckpointError: If a file is damaged, a pickle, or does not fit the configuration.
        """
        kind, name = check_dtype(dtype), str(pretrained_model_name_or_path)
        device = resolve_device(device)
        folder = _folder(name, hub_options)
        path = folder / _WEIGHTS_FILE
        settings = read_json_object(folder / _CONFIG_FILE)
        config = LoopedTransformerConfig.from_dict(settings)
        weights, about = read_tensors_and_metadata(path)
        # Before a model of far more weights than there are bytes is made.
        n_bytes, digest = path.stat().st_size, config_hash(settings)
        if about.get("config", digest) != digest or config.about_weights > max(n_bytes, 2**26):
            got = f"another one, of about {config.about_weights:,} weights for {n_bytes:,} bytes"
            expected = f"the {_CONFIG_FILE} that its weights were saved with"
            fix = "The files do not belong together: restore them, or save the model again."
            raise CheckpointError(f"model {folder}", expected=expected, given=got, fix=fix)
        if config.tie_unembed and "embedding.weight" in weights:
            weights.setdefault("unembedding.weight", weights["embedding.weight"])
        model: Any = cls(config)  # type: ignore[call-arg]
        floats = {x.dtype for x in weights.values() if x.is_floating_point()}
        for saved in sorted(floats, key=str)[:1]:
            model.to(saved)  # of several types one does not fit
        check_tensors(weights, model.state_dict(), f"weights {path}", fix="Save the model again.")
        model.load_state_dict(weights)
        return model.to(device=device, dtype=kind)


def write_model(
    model: Any,
    folder: Path,
    texts: Mapping[str, str] = MappingProxyType({}),
    config: Mapping[str, Any] | None = None,
) -> None:
    """Write configuration (the model's own if None), and weights with ``texts`` as metadata."""
    need_plain(model, "a model to be saved", saved=True)
    described: Mapping[str, Any] = model.config.to_dict() if config is None else config
    about = {"config": config_hash(described), **texts}
    write_tensors(folder / _WEIGHTS_FILE, every_tensor(model), about)
    write_json(folder / _CONFIG_FILE, described)


def _folder(name: str, options: dict[str, Any]) -> Path:
    if not name.startswith(HUB):
        if not os.path.isdir(name):  # which, unlike Path's, takes any name
            expected = "a folder written by save_pretrained, or hf:owner/name on a hub"
            what, fix = f"model {name!r}", "Check the path; to ask a hub, write hf: before it."
            raise CheckpointError(what, expected=expected, given="no such folder", fix=fix)
        refuse(options, "none with a folder on this machine", "Leave it out.")
        return Path(name)
    try:
        files = [_CONFIG_FILE, _WEIGHTS_FILE]
        return Path(snapshot_download(name.removeprefix(HUB), allow_patterns=files, **options))
    except Exception as error:  # the hub raises many kinds of error
        what, got = f"model {name!r}", type(error).__name__
        expected, fix = "a model on a hub", "Check the name, and the connection."
        raise CheckpointError(what, expected=expected, given=got, fix=fix) from error


def check_tensors(
    tensors: Mapping[str, Tensor], expected: Mapping[str, Tensor], what: str, *, fix: str
) -> None:
    known, there = (
        {
            name: f"{tuple(x.shape)} of {x.dtype}" if hasattr(x, "dtype") else type(x).__name__
            for name, x in each.items()
        }
        for each in (expected, tensors)
    )
    # The first two of each kind of fault.
    faults = [f"{name} is missing" for name in sorted(known.keys() - there.keys())[:2]]
    faults += [f"{name} is not known" for name in sorted(there.keys() - known.keys())[:2]]
    both = sorted(known.keys() & there.keys())
    faults += [f"{k} is {there[k]}, not {known[k]}" for k in both if there[k] != known[k]][:2]
    if faults:
        described = f"the {len(expected)} tensors of the configuration"
        raise CheckpointError(what, expected=described, given="; ".join(faults), fix=fix)


_INDEX = "cache.json"


class _Index(TypedDict):
    n_loops: int
    has_batch_dim: bool
    config: dict[str, Any]
    files: dict[str, list[str]]
    names: dict[str, str]


def write_activations(
    folder: Path,
    activations: Mapping[str, Tensor],
    header: Mapping[str, Any],
    *,
    max_shard_bytes: int,
) -> None:
    """Write shards of at most ``max_shard_bytes``, and their index with ``header``.

    An activation with two names is written once.
    """
    shards: list[dict[str, Tensor]] = [{}]
    places: dict[tuple[Any, ...], str] = {}  # the first name of each tensor in memory
    where: dict[str, str] = {}  # that name, by every name of an activation
    size = 0
    for name, x in activations.items():
        key = (x.data_ptr(), x.shape, x.stride(), x.dtype)
        if x.numel() and key in places:
            where[name] = places[key]
            continue
        nbytes = x.numel() * x.element_size()
        if shards[-1] and size + nbytes > max_shard_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = x.clone() if x.is_contiguous() else x.contiguous()
        places[key] = where[name] = name
        size += nbytes
    files = {}
    for number, shard in enumerate(shards, start=1):
        file = f"cache-{number:05d}-of-{len(shards):05d}.safetensors"
        write_tensors(folder / file, shard)
        files[file] = list(shard)
    write_json(folder / _INDEX, {**header, "files": files, "names": where})


def read_index(folder: Path) -> dict[str, Any]:
    path = folder / _INDEX
    index = read_json_object(path)
    try:
        TypeAdapter(_Index).validate_python(index)
    except ValidationError as error:
        what, expected, fix = f"cache {path}", "an index of activations", "Save the cache again."
        raise CheckpointError(what, expected=expected, given="another", fix=fix) from error
    for file in index["files"]:
        check_file_name(file, f"file in cache {path}", CheckpointError)
    return index


def read_activations(folder: Path, index: Mapping[str, Any]) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for file in index["files"]:
        tensors |= read_tensors(folder / file)
    named = {name for names in index["files"].values() for name in names}
    if wrong := (tensors.keys() ^ named) | ({*index["names"].values()} - named):
        what, expected, fix = f"cache {folder}", "those of its index", "Save the cache again."
        raise CheckpointError(what, expected=expected, given=sorted(wrong)[0], fix=fix)
    return {name: tensors[source] for name, source in index["names"].items()}
