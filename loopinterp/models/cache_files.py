"""A cache on disk: a folder of safetensors shards, and an index of what is in which."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loopinterp.errors import CheckpointError
from loopinterp.storage import (
    check_file_name,
    read_json_object,
    read_tensors,
    write_json,
    write_tensors,
)

if TYPE_CHECKING:
    from torch import Tensor

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


def _are_names(found: Any) -> bool:
    return isinstance(found, list) and all(isinstance(name, str) for name in found)


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
