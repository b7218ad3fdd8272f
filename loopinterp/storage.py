"""Files that a kill cannot spoil: written under a temporary name, flushed, then renamed.

No pickle is ever written or read; arrays and weights are safetensors, the rest is JSON.
"""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from loopinterp.errors import CheckpointError, InputError

if TYPE_CHECKING:
    from torch import Tensor


def write_bytes(path: str | Path, data: bytes) -> None:
    """Replace a file in one step: readers see the old content or the new, never a part.

    Raises:
        InputError: If the folder cannot be made or written, or the disk is full.
    """
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    except (OSError, ValueError) as error:  # a name may hold what no name can
        raise InputError(
            f"output folder {path.parent}",
            expected="a folder that can be written",
            given=getattr(error, "strerror", None) or str(error),
            fix="Choose another folder, or change its permissions.",
        ) from error
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except OSError as error:
        Path(temporary).unlink(missing_ok=True)
        raise InputError(
            f"output file {path}",
            expected="a file that can be written",
            given=error.strerror or str(error),
            fix="Free some space, or choose another disk."
            if error.errno in (errno.ENOSPC, errno.EDQUOT)
            else "Choose another name, or change the permissions.",
        ) from error
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def write_json(path: str | Path, document: Any) -> None:
    """Write JSON in one step; NumPy scalars and arrays become numbers and lists."""
    text = json.dumps(document, indent=1, default=json_default)
    write_bytes(path, (text + "\n").encode())


def read_json(path: str | Path) -> Any:
    """Read JSON.

    Raises:
        CheckpointError: If the file is missing or damaged.
    """
    path = Path(path)
    try:
        return json.loads(_read(path))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(
            f"file {path}",
            expected="valid JSON",
            given=f"damaged content ({error})",
            fix="Restore the file from a copy, or write it anew.",
        ) from error


def read_json_object(path: str | Path) -> dict[str, Any]:
    """Read JSON that is an object (names with values).

    Raises:
        CheckpointError: If the file is missing or damaged, or holds JSON of another kind.
    """
    document = read_json(path)
    if not isinstance(document, dict):
        raise CheckpointError(
            f"file {path}",
            expected="a JSON object",
            given=f"JSON of another kind ({type(document).__name__})",
            fix="Restore the file from a copy, or write it anew.",
        )
    return document


def write_arrays(
    path: str | Path, arrays: Mapping[str, np.ndarray], metadata: Mapping[str, str] | None = None
) -> None:
    """Write NumPy arrays, and texts that go with them, as one safetensors file, in one step."""
    from safetensors.numpy import save

    contiguous = {k: np.ascontiguousarray(v) for k, v in arrays.items()}
    write_bytes(path, save(contiguous, dict(metadata) if metadata else None))


def read_arrays(path: str | Path) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Read the arrays of a safetensors file, and its texts.

    Raises:
        CheckpointError: as :func:`read_tensors` does.
    """
    path = Path(path)
    data = _read(path)
    arrays = {k: v.numpy() for k, v in _parse_tensors(path, data).items()}
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return arrays, header.get("__metadata__", {})


def write_tensors(
    path: str | Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Write tensors as one safetensors file, in one step."""
    from safetensors.torch import save

    contiguous = {k: v.detach().cpu().contiguous() for k, v in tensors.items()}
    write_bytes(path, save(contiguous, dict(metadata) if metadata else None))


def read_tensors(path: str | Path) -> dict[str, Tensor]:
    """Read a safetensors file.

    Raises:
        CheckpointError: If it is missing, truncated or damaged, or is a pickle.
    """
    path = Path(path)
    return _parse_tensors(path, _read(path))


def _parse_tensors(path: Path, data: bytes) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load

    refuse_pickle(path, data[:9])
    try:
        return load(data)
    except (SafetensorError, ValueError, KeyError) as error:
        raise CheckpointError(
            f"file {path}",
            expected="a whole safetensors file",
            given=f"{len(data)} bytes that do not parse ({error})",
            fix="The file is truncated or damaged: restore it from a copy, or write it anew.",
        ) from error


def refuse_pickle(path: Path, head: bytes) -> None:
    """Raise if a file starts like a pickle or like ``torch.save``'s zip of pickles.

    ``head`` is the first nine bytes. Those of a safetensors file are the length of its header,
    which can begin with any byte, and the header's brace.
    """
    pickled = head[:1] == b"\x80" or head[:4] == b"PK\x03\x04"
    if (pickled and head[8:9] != b"{") or path.suffix in {".pkl", ".pickle"}:
        raise CheckpointError(
            f"file {path}",
            expected="a safetensors file",
            given="a pickle (torch.save), which can run any code when it is loaded",
            fix="Load it in a place you trust and save it again with save_pretrained.",
        )


def _read(path: Path) -> bytes:
    try:
        if path.is_file() or not path.exists():
            return path.read_bytes()
        given = "a folder, device or pipe"  # reading a pipe might never end
    except (OSError, ValueError) as error:  # a name may hold what no name can
        given = getattr(error, "strerror", None) or str(error)
    raise CheckpointError(
        f"file {path}", expected="a readable file", given=given, fix="Check the path."
    )


def json_default(value: Any) -> Any:
    """JSON's form of what the json module has none of: NumPy's values, paths, dataclasses."""
    if isinstance(value, (np.ndarray, np.generic)):
        return value.tolist()
    if isinstance(value, Path):
        return str(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    raise TypeError(f"{type(value).__name__} is not JSON-ready")
