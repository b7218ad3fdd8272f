"""Damage to the files of a run: bytes, JSON values, tensors, and things that are no files."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FILES = (
    "config.json", "model/config.json", "model/model.safetensors", "made.json", "metrics.jsonl",
    "state/checkpoint.safetensors", "results/generalisation.safetensors",
    "results/attention.safetensors", "model/circuit.json",
)  # fmt: skip
ODD_JSON = [
    "null", "true", "-1", "0", "1e308", "1e400", "NaN", "-Infinity", '""', '"x"', "[]", "{}",
    "[[]]", '{"a": {}}', '"\\ud800"', "1" * 5000, "[" * 100_000, '"' + "n" * 10_000 + '"', "1.5",
    '"../../x"', '"=1+1"', '"cuda:²"', "[1, 2, 3]", str(10**20), '"\\u0000"',
]  # fmt: skip


def damage(rng: random.Random, run: Path) -> str:
    """Damage one file of a run; says what was done."""
    path = run / rng.choice([name for name in FILES if (run / name).is_file()])
    kinds = [_flip, _flip, _flip, _truncate, _append, _zero, _remove, _replace, _other_file]
    kinds += [_odd_value] * 6 if path.suffix == ".json" else []
    kinds += [_odd_line] * 3 if path.suffix == ".jsonl" else []
    kinds += [_odd_header] * 2 + [_odd_tensor] if path.suffix == ".safetensors" else []
    kind = rng.choice(kinds)
    return f"{path.relative_to(run)}: {kind.__name__.strip('_')} {kind(rng, path, run) or ''}"


def _flip(rng: random.Random, path: Path, run: Path) -> str:
    data = bytearray(path.read_bytes())
    places = [rng.randrange(len(data)) for _ in range(rng.choice([1, 1, 1, 5, 50]))]
    for at in places:
        data[at] ^= 1 << rng.randrange(8)
    path.write_bytes(data)
    return str(places[:3])


def _truncate(rng: random.Random, path: Path, run: Path) -> None:
    path.write_bytes(path.read_bytes()[: rng.randrange(path.stat().st_size)])


def _append(rng: random.Random, path: Path, run: Path) -> None:
    path.write_bytes(path.read_bytes() + rng.randbytes(rng.choice([1, 8, 5000])))


def _zero(rng: random.Random, path: Path, run: Path) -> None:
    path.write_bytes(bytes(rng.choice([0, path.stat().st_size])))


def _remove(rng: random.Random, path: Path, run: Path) -> None:
    path.unlink()


def _replace(rng: random.Random, path: Path, run: Path) -> str:
    """Put what is no plain file in its place."""
    path.unlink()
    kind = rng.choice(["folder", "link to itself", "dangling", "pipe", "unreadable link"])
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        to = {"link to itself": path, "dangling": run / "nowhere", "unreadable link": run.parent}
        path.symlink_to(to[kind])
    return kind


def _other_file(rng: random.Random, path: Path, run: Path) -> str:
    other = run / rng.choice([name for name in FILES if (run / name).is_file()])
    if other != path:
        shutil.copyfile(other, path)
    return str(other.relative_to(run))


def _leaves(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if at:
        yield at
    items = value.items() if isinstance(value, dict) else ()
    items = enumerate(value) if isinstance(value, list) else items
    for key, inner in items:
        yield from _leaves(inner, (*at, key))


def _odd_json(rng: random.Random, text: str) -> tuple[str, str]:
    """A document with one of its values changed, taken away or added; and what was done."""
    document = json.loads(text)
    at = rng.choice(list(_leaves(document)))
    odd, mark = rng.choice(ODD_JSON), "\ue000"
    place = document
    for key in at[:-1]:
        place = place[key]
    what = rng.choice(["change", "change", "change", "take away", "add"])
    if what == "take away":
        del place[at[-1]]
    elif what == "change" or isinstance(place, list):
        place[at[-1]] = mark
    else:
        place[rng.choice(["", "x", "origin", "\ud800", "__class__"])] = mark
    return json.dumps(document).replace(json.dumps(mark), odd), f"{what} {at} {odd[:20]}"


def _odd_value(rng: random.Random, path: Path, run: Path) -> str:
    text, done = _odd_json(rng, path.read_text())
    path.write_text(text)
    return done


def _odd_line(rng: random.Random, path: Path, run: Path) -> str:
    lines = path.read_text().splitlines()
    number = rng.randrange(len(lines))
    lines[number], done = _odd_json(rng, lines[number])
    path.write_text("\n".join(lines) + "\n")
    return f"line {number} {done}"


def _odd_header(rng: random.Random, path: Path, run: Path) -> str:
    data = path.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    text, done = _odd_json(rng, data[8:end].decode())
    header = text.encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + data[end:])
    return done


def _odd_tensor(rng: random.Random, path: Path, run: Path) -> str:
    """Written as the package writes it, whole and wrong: numbers that are none, another shape."""
    import torch
    from safetensors import safe_open

    from loopinterp.core.storage import read_tensors, write_tensors

    with safe_open(str(path), framework="pt") as file:
        metadata = file.metadata()
    tensors = read_tensors(path)
    name = rng.choice(sorted(tensors))
    kind = rng.choice(["nan", "inf", "int", "half", "empty", "renamed", "gone"])
    x = tensors.pop(name)
    if kind in ("nan", "inf") and x.numel() and x.is_floating_point():
        x = x.clone()
        x.view(-1)[rng.randrange(x.numel())] = float(kind)
    x = {"int": x.long, "half": x.half, "empty": lambda: torch.empty(0)}.get(kind, lambda: x)()
    if kind != "gone":
        tensors[f"{name}.x" if kind == "renamed" else name] = x
    write_tensors(path, tensors, metadata)
    return f"{name} {kind}"
