"""Models and caches on disk: JSON and safetensors in a folder, no pickles."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub import ModelHubMixin, snapshot_download

from loopinterp.core.errors import CheckpointError
from loopinterp.core.results import config_hash
from loopinterp.core.storage import (
    check_file_name,
    read_json_object,
    read_tensors,
    read_tensors_and_metadata,
    refuse_pickle,
    write_json,
    write_tensors,
)
from loopinterp.models.config import LoopedTransformerConfig
from loopinterp.models.protocol import own_weights
from loopinterp.models.run_inputs import check_dtype, refuse, spell
from loopinterp.models.weights import need_plain

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor
    from typing_extensions import Self

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"

HUB = "hf:"
"""Before the name of a model on a hub: a path with a typing mistake in it never asks one."""


class PretrainedMixin(ModelHubMixin):
    """``save_pretrained``, ``from_pretrained`` and ``push_to_hub`` without pickles."""

    config: LoopedTransformerConfig

    def save_pretrained(  # type: ignore[override]
        self, save_directory: str | Path, *, push_to_hub: bool = False, **push_options: Any
    ) -> str | None:
        """Write the model to a folder; with ``push_to_hub=True``, also to a hub.

        Raises:
            InputError: If the folder cannot be written, there are options of a hub without it,
                or a layer has been changed so that the folder could not be read back.
        """
        if not push_to_hub:
            expected = "none without a push; neither a card nor another config is written"
            refuse(push_options, expected, "Leave it out, or pass push_to_hub=True.")
        self._save_pretrained(Path(save_directory))
        return self.push_to_hub(**push_options) if push_to_hub else None

    def _save_pretrained(self, save_directory: Path) -> None:
        write_model(self, save_directory)

    @classmethod
    def from_pretrained(  # type: ignore[override]
        cls,
        pretrained_model_name_or_path: str | Path,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | str | None = None,
        **hub_options: Any,
    ) -> Self:
        """Read a model from a folder; or from a hub, which is asked for ``hf:owner/name`` only.

        Args:
            pretrained_model_name_or_path: A folder written by :meth:`save_pretrained`, or
                ``hf:owner/name`` for a model on a hub.
            device: Where to put it.
            dtype: Type to cast the weights to; as they are saved if None.
            hub_options: ``revision``, ``token``, ``cache_dir`` … of a download.

        Raises:
            InputError: If an option of a download is given with a folder.
            CheckpointError: If a file is missing, damaged, truncated, a pickle, or does not fit
                the configuration beside it.
        """
        kind, name = check_dtype(dtype), str(pretrained_model_name_or_path)
        folder = _folder(name, hub_options)
        if not (folder / WEIGHTS_FILE).exists():
            for other in sorted(folder.glob("*")):
                if other.suffix in {".pt", ".pth", ".bin", ".ckpt", ".pkl"} and other.is_file():
                    with other.open("rb") as file:
                        refuse_pickle(other, file.read(4))
        settings = read_json_object(folder / CONFIG_FILE)
        config = LoopedTransformerConfig.from_dict(settings)
        weights, about = read_tensors_and_metadata(folder / WEIGHTS_FILE)
        if about.get("config", config_hash(settings)) != config_hash(settings):
            raise CheckpointError(
                f"model {folder}",
                expected=f"the {CONFIG_FILE} that its weights were saved with",
                given="another one",
                fix="The files do not belong together: restore them, or save the model again.",
            )
        _check_size(config, folder)
        model = cls(config)  # type: ignore[call-arg]
        model._take_weights(weights, folder / WEIGHTS_FILE)
        return model.to(device=device, dtype=kind)  # type: ignore[attr-defined]

    def _take_weights(self, weights: dict[str, Tensor], path: Path) -> None:
        if self.config.tie_unembed and "embedding.weight" in weights:
            weights.setdefault("unembedding.weight", weights["embedding.weight"])
        dtypes = {x.dtype for x in weights.values()}
        if len(dtypes) > 1 or not all(dtype.is_floating_point for dtype in dtypes):
            raise CheckpointError(
                f"weights {path}",
                expected="weights of one floating-point type",
                given=", ".join(sorted(map(str, dtypes))),
                fix="Save the model again, in one precision.",
            )
        for dtype in dtypes:
            self.to(dtype)  # type: ignore[attr-defined]
        expected = self.state_dict()  # type: ignore[attr-defined]
        check_tensors(weights, expected, f"weights {path}", fix="Save the model again.")
        self.load_state_dict(weights)  # type: ignore[attr-defined]


def write_model(model: Any, folder: Path, texts: Mapping[str, str] = MappingProxyType({})) -> None:
    """Write configuration and weights, with what else is to be known of the weights.

    Args:
        model: A model with a :class:`LoopedTransformerConfig`.
        folder: The folder.
        texts: Kept in the file of the weights, by name.

    Raises:
        InputError: If a layer has been changed, so that the folder could not be read back.
    """
    need_plain(model, "a model to be saved", saved=True)
    config = model.config.to_dict()
    about = {"config": config_hash(config), **texts}
    write_tensors(folder / WEIGHTS_FILE, own_weights(model), about)
    write_json(folder / CONFIG_FILE, config)


_SOON_MADE = 2**26
"""Models of so many weights are made in a moment, and then compared tensor by tensor."""


def _check_size(config: LoopedTransformerConfig, folder: Path) -> None:
    """Refuse a configuration of far more weights than there are bytes, before they are made."""
    path = folder / WEIGHTS_FILE
    n_bytes = path.stat().st_size if path.is_file() else 0
    if n_bytes and config.about_weights > max(n_bytes, _SOON_MADE):
        raise CheckpointError(
            f"weights {path}",
            expected=f"about {config.about_weights:,} weights, as the configuration beside it has",
            given=f"a file of {n_bytes:,} bytes",
            fix="The files do not belong together, or one is damaged: save the model again.",
        )


def _folder(name: str, options: dict[str, Any]) -> Path:
    """The folder of that name, or the one that a model of a hub is downloaded to."""
    if not name.startswith(HUB):
        if not os.path.isdir(name):  # which, unlike Path's, takes any name
            raise CheckpointError(
                f"model {name!r}",
                expected=f"a folder written by save_pretrained, or {HUB}owner/name on a hub",
                given="no such folder",
                fix=f"Check the path; to ask a hub, write {HUB} before the name.",
            )
        refuse(options, "none with a folder on this machine", "Leave it out.")
        return Path(name)
    repository = name.removeprefix(HUB)
    try:
        files = [CONFIG_FILE, WEIGHTS_FILE]
        return Path(snapshot_download(repository, allow_patterns=files, **options))
    except Exception as error:  # the hub raises many kinds; all mean that it cannot be had
        raise CheckpointError(
            f"model {name!r}",
            expected="a model on a hub",
            given=f"none that can be had ({type(error).__name__})",
            fix="Check the name, and the connection.",
        ) from error


def check_tensors(
    tensors: Mapping[str, Tensor], expected: Mapping[str, Tensor], what: str, *, fix: str
) -> None:
    """Raise unless the tensors of a file have the names, shapes and types of those they are for."""
    if faults := misfits(tensors, expected, spell):
        raise CheckpointError(
            what,
            expected=f"the {len(expected)} tensors of the configuration beside them",
            given=faults,
            fix=f"The files do not belong together. {fix}",
        )


def misfits(
    tensors: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
    describe: Callable[[Tensor], object],
) -> str:
    """What is missing, what is not known, and what looks otherwise, the first two of each."""
    faults = [f"{name} is missing" for name in sorted(expected.keys() - tensors.keys())[:2]]
    faults += [f"{name} is not known" for name in sorted(tensors.keys() - expected.keys())[:2]]
    both = {
        k: (describe(tensors[k]), describe(expected[k]))
        for k in sorted(tensors.keys() & expected.keys())
    }
    faults += [f"{name} is {a}, not {b}" for name, (a, b) in both.items() if a != b][:2]
    return "; ".join(faults)


_INDEX = "cache.json"


def write_activations(
    folder: Path,
    activations: Mapping[str, Tensor],
    header: Mapping[str, Any],
    *,
    max_shard_bytes: int,
) -> None:
    """Write shards and their index, which also says ``header``: of which run these are.

    An activation with two names is written once; a new shard begins at ``max_shard_bytes``.
    """
    shards: list[dict[str, Tensor]] = [{}]
    places: dict[tuple[Any, ...], str] = {}
    where: dict[str, str] = {}
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
    """The index of a folder.

    Raises:
        CheckpointError: If it is missing or damaged, or names a file of another folder.
    """
    path = folder / _INDEX
    kinds = {"n_loops": int, "has_batch_dim": bool, "config": dict, "files": dict, "names": dict}
    index = read_json_object(path)
    if any(not isinstance(index.get(key), kind) for key, kind in kinds.items()) or not (
        all(map(_are_names, index["files"].values())) and _are_names([*index["names"].values()])
    ):
        raise CheckpointError(
            f"cache {path}",
            expected=f"the entries {', '.join(kinds)}",
            given="others",
            fix="The index is damaged; save the cache again.",
        )
    for file in index["files"]:
        check_file_name(file, f"file in cache {path}", CheckpointError)
    return index


def _are_names(names: Any) -> bool:
    return isinstance(names, list) and all(isinstance(name, str) for name in names)


def read_activations(
    folder: Path, index: Mapping[str, Any], *, known: Collection[str]
) -> dict[str, Tensor]:
    """The activations that an index names.

    Raises:
        CheckpointError: If a shard is missing or damaged, or does not fit the index, or not the
            names of all activations of such a run, ``known``.
    """
    tensors: dict[str, Tensor] = {}
    for file, names in index["files"].items():
        shard = read_tensors(folder / file)
        if sorted(shard) != sorted(names):
            raise CheckpointError(
                f"cache {folder / file}",
                expected=f"{len(names)} activations that the index names",
                given=f"{len(shard)} others",
                fix="The files do not belong together; save the cache again.",
            )
        tensors.update(shard)
    for name, source in index["names"].items():
        if source not in tensors or name.removesuffix("_grad") not in known:
            raise CheckpointError(
                f"cache {folder / _INDEX}",
                expected=f"activations of a run of {index['n_loops']} loops",
                given=f"{name!r}, kept as {source!r}",
                fix="The files do not belong together; save the cache again.",
            )
    return {name: tensors[source] for name, source in index["names"].items()}
