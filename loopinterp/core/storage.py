"""Files written in one step (temporary name, flush, rename), and locks.

Arrays and weights are safetensors, the rest is JSON; never pickles. A safetensors file holds its
own SHA-256, except a large one; reading checks it.
"""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import json
import math
import os
import re
import secrets
import stat
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from loopinterp.core.errors import CheckpointError, InputError

if TYPE_CHECKING:
    from torch import Tensor


_SEAL = "loopinterp.seal"
_SEALED_BY = "loopinterp sha256 "
_OPEN_SEAL = _SEALED_BY + 64 * "0"


def write_bytes(path: str | Path, data: bytes) -> None:
    """Replace a file in one step, and remove temporary files of killed writes."""
    with _replacing(Path(path)) as (handle, _), os.fdopen(os.dup(handle), "wb") as file:
        file.write(data)


@contextmanager
def _replacing(path: Path) -> Iterator[tuple[int, Path]]:
    """A temporary file, open and locked, that replaces a file when the block succeeds."""
    prefix = _temporary_prefix(path.name)
    with _writing_to(path.parent, "folder"):
        path.parent.mkdir(parents=True, exist_ok=True)
        _sweep(path.parent, prefix)
        handle, temporary = _open_temporary(path.parent, prefix)
    try:
        with _writing_to(path, "file"):
            yield handle, temporary
            os.fsync(handle)
            os.replace(temporary, path)
    finally:
        os.close(handle)
        temporary.unlink(missing_ok=True)


def make_folder(folder: Path) -> None:
    """Make a folder, with those it lies in, if there is none."""
    with _writing_to(folder, "folder"):
        folder.mkdir(parents=True, exist_ok=True)


def _temporary_prefix(name: str) -> str:
    proof = hashlib.sha256(f"loopinterp {name}".encode(errors="surrogatepass")).hexdigest()
    return f".part-{proof[:16]}-"


def _open_temporary(folder: Path, prefix: str) -> tuple[int, Path]:
    while True:
        temporary = folder / (prefix + secrets.token_hex(8))
        # The umask decides who may read it, as for any file that a program makes.
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            # Another process may sweep it up between the two calls: then a new one is made.
            if lock(handle) and temporary.exists():
                return handle, temporary
        except OSError:  # no locks on this file system, so nothing is swept up either
            return handle, temporary
        os.close(handle)


def _sweep(folder: Path, prefix: str) -> None:
    for entry in os.listdir(folder):
        if not entry.startswith(prefix):
            continue
        with suppress(OSError):  # gone meanwhile, or no locks here: litter does no harm
            handle = os.open(folder / entry, os.O_WRONLY)
            try:
                if lock(handle):  # its writer is dead
                    os.unlink(folder / entry)
            finally:
                os.close(handle)


def check_file_name(name: str, what: str, error: type[InputError] = InputError) -> str:
    spelt = name.encode(errors="replace").decode() == name  # half a character is in no file's name
    if name in ("", ".", "..") or re.search(r"[/\\\x00]", name) or not spelt:
        fix = "Leave folders out of it."
        raise error(what, expected="the name of a file", given=repr(name), fix=fix)
    return name


def write_json(path: str | Path, document: Any) -> None:
    """Write JSON in one step; NumPy scalars and arrays become numbers and lists."""
    text = json.dumps(document, indent=1, default=json_default)
    write_bytes(path, (text + "\n").encode())


def read_json(path: str | Path) -> Any:
    data = read_bytes(path)
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:  # numbers of 5,000 digits are ValueErrors
        raise _damaged(path, "valid JSON", f"damaged content ({error})") from error


def read_json_object(path: str | Path) -> dict[str, Any]:
    document = read_json(path)
    if not isinstance(document, dict):
        got = f"JSON of another kind ({type(document).__name__})"
        raise _damaged(path, "a JSON object", got)
    return document


def parse_json_object(text: str | bytes) -> dict[str, Any] | None:
    """The JSON object in a text, if it is one."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return document if isinstance(document, dict) else None


def _damaged(path: str | Path, expected: str, got: str) -> CheckpointError:
    fix = "If it is truncated or damaged, restore it from a copy; else write it anew."
    return CheckpointError(f"file {path}", expected=expected, given=got, fix=fix)


def write_arrays(
    path: str | Path, arrays: Mapping[str, np.ndarray], metadata: Mapping[str, str] | None = None
) -> None:
    from safetensors.numpy import save

    contiguous = {k: np.asarray(v, order="C") for k, v in arrays.items()}
    write_bytes(path, _seal(save(contiguous), metadata or {}))


def read_arrays(path: str | Path) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    path = Path(path)
    tensors, texts = read_tensors_and_metadata(path)
    try:
        return {k: v.numpy() for k, v in tensors.items()}, texts
    except TypeError as error:
        raise _damaged(path, "arrays of types that NumPy has", f"others ({error})") from error


def write_tensors(
    path: str | Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    from safetensors.torch import save

    contiguous = {k: v.detach().cpu().contiguous() for k, v in tensors.items()}
    write_bytes(path, _seal(save(contiguous), metadata or {}))


def write_large_tensors(path: str | Path, tensors: Mapping[str, Tensor]) -> None:
    """As :func:`write_tensors`, without the digest: nothing is copied in memory."""
    from safetensors.torch import save_file

    with _replacing(Path(path)) as (_, temporary):
        save_file({k: v.detach().cpu().contiguous() for k, v in tensors.items()}, temporary)


def read_tensors(path: str | Path) -> dict[str, Tensor]:
    return read_tensors_and_metadata(path)[0]


def digest_tensors(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 of tensors with their names, types and shapes."""
    import torch

    digest = hashlib.sha256()
    for name in sorted(tensors):
        x = tensors[name]
        digest.update(f"{name} {x.dtype} {list(x.shape)}\n".encode())
        flat = x.detach().cpu().contiguous().reshape(-1)
        digest.update(flat.view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _seal(data: bytes, metadata: Mapping[str, str]) -> bytes:
    """A safetensors file with texts and its own SHA-256, taken with zeros in its place."""
    header, tensors = _split(data)
    # The order of the texts is fixed here: safetensors' own differs from process to process.
    texts = {_SEAL: _OPEN_SEAL, **metadata}
    document = {"__metadata__": texts, **{k: v for k, v in header.items() if k != "__metadata__"}}
    text = json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    data = len(text).to_bytes(8, "little") + text + tensors
    seal = _SEALED_BY + hashlib.sha256(data).hexdigest()
    return data.replace(_OPEN_SEAL.encode(), seal.encode(), 1)


def _split(data: bytes) -> tuple[dict[str, Any], bytes]:
    end = 8 + int.from_bytes(data[:8], "little")
    return json.loads(data[8:end]), data[end:]


def read_tensors_and_metadata(path: str | Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors and texts of a safetensors file; pickles are refused."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    path = Path(path)
    data = read_bytes(path)
    pickled = data[:1] == b"\x80" or data[:4] == b"PK\x03\x04"  # or torch.save's zip
    if (pickled and data[8:9] != b"{") or path.suffix in {".pkl", ".pickle"}:
        got = "a pickle (torch.save), which can run any code when it is loaded"
        expected = "a safetensors file"
        fix = "Load it in a place you trust and save it again with save_pretrained."
        raise CheckpointError(f"file {path}", expected=expected, given=got, fix=fix)
    try:
        tensors, texts = load(data), _split(data)[0].get("__metadata__", {})
    except (SafetensorError, ValueError, KeyError) as error:
        got = f"{len(data)} bytes that do not parse ({error})"
        raise _damaged(path, "a whole safetensors file", got) from error
    seal = texts.get(_SEAL, "")
    # A seal is known by its name or by its value: one byte cannot spoil both.
    if seal or any(text.startswith(_SEALED_BY) for text in texts.values()):
        opened = data.replace(seal.encode(), _OPEN_SEAL.encode(), 1)
        if seal != _SEALED_BY + hashlib.sha256(opened).hexdigest():
            raise _damaged(path, "the content that was written, by its SHA-256", "changed content")
    return tensors, {name: text for name, text in texts.items() if name != _SEAL}


def read_bytes(path: str | Path) -> bytes:
    """Read a plain file; folders, devices and pipes are refused unopened."""
    path = Path(path)
    try:
        if stat.S_ISREG(path.stat().st_mode):
            return path.read_bytes()
        got = "a folder" if path.is_dir() else "a device or a pipe"
    except (OSError, ValueError) as error:  # a name with a null byte is a ValueError
        got = getattr(error, "strerror", None) or str(error)
    fix = "Check the path."
    raise CheckpointError(f"file {path}", expected="a plain file", given=got, fix=fix)


def spell_json(document: Any, **layout: Any) -> str:
    """JSON that every parser reads: NaN and infinities are ``null``, unknown types text.

    ``layout`` holds options of :func:`json.dumps`.
    """
    return json.dumps(_finite(document), allow_nan=False, default=str, **layout)


def _finite(value: Any) -> Any:
    if isinstance(value, (np.ndarray, np.generic)) or dataclasses.is_dataclass(value):
        value = json_default(value)
    if isinstance(value, Mapping):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def json_default(value: Any) -> Any:
    """The ``default`` of :func:`json.dumps` for NumPy's values, paths and dataclasses."""
    if isinstance(value, (np.ndarray, np.generic)):
        return value.tolist()
    if isinstance(value, Path):
        return str(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    raise TypeError(f"{type(value).__name__} is not JSON-ready")


def lock(handle: int, *, wait: bool = False) -> bool:
    """Lock an open file until it is closed or its process ends; return whether the lock is held.

    ``OSError`` where files cannot be locked.
    """
    try:
        import fcntl
    except ImportError as error:
        raise OSError("this system has no file locks") from error
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    return True


@contextmanager
def only_writer(path: str | Path, what: str, *, fix: str) -> Iterator[None]:
    """Hold a lock file while one process writes ``what``; the file stays.

    Raise an ``InputError`` with ``fix`` if another process holds it.
    """
    path = Path(path)
    with _writing_to(path.parent, "folder"):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        try:
            locked = lock(handle)
        except OSError as error:  # some network file systems: better unlocked than not at all
            warnings.warn(f"{what} is not locked against a second writer: {error}", stacklevel=3)
            locked = True
        if not locked:
            got = "another one now"
            raise InputError(what, expected="one writer at a time", given=got, fix=fix)
        yield
    finally:
        os.close(handle)


@contextmanager
def in_turn(folder: str | Path) -> Iterator[None]:
    """Wait for a folder's lock and hold it, if the system has locks."""
    with ExitStack() as stack:
        with suppress(OSError):
            handle = os.open(folder, os.O_RDONLY)
            stack.callback(os.close, handle)
            lock(handle, wait=True)
        yield


def need_writable(path: str | Path) -> None:
    """Raise on a path inside the read-only package."""
    path = Path(path)
    try:
        inside = path.resolve().is_relative_to(Path(__file__).resolve().parent.parent)
    except (OSError, ValueError, RuntimeError):  # no path at all: opening it will say so
        return
    if inside:
        expected = "a place outside the package, which is only read"
        copy = "loopinterp zoo NAME --out FOLDER, or loopinterp.zoo.pretrained_run(NAME, FOLDER)"
        what, fix = f"output {path}", f"Copy the model first: {copy}."
        raise InputError(what, expected=expected, given="one inside it", fix=fix)


@contextmanager
def _writing_to(path: Path, kind: Literal["file", "folder"]) -> Iterator[None]:
    need_writable(path)
    try:
        yield
    except (OSError, ValueError) as error:  # a name may hold what no name can
        full = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT)
        fix = f"Choose another {kind}, or change its permissions."
        raise InputError(
            f"output {kind} {path}",
            expected=f"a {kind} that can be written",
            given=getattr(error, "strerror", None) or str(error),
            fix="Free some space, or choose another disk." if full else fix,
        ) from error
