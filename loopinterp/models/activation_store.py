"""Activations of many prompts, written to disk in shards, and read without loading them.

A row is one position of one prompt. A shard has an array for each site, and ``prompt``, ``pos`` and
``token`` of each row.
"""

from __future__ import annotations

import shutil
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, SupportsIndex

import numpy as np
import torch
from pydantic import PositiveInt
from safetensors import safe_open
from torch import Tensor
from torch.utils.data import Dataset

from loopinterp.core.boundary import checked
from loopinterp.core.errors import CheckpointError, HookError, InputError, unknown_name
from loopinterp.core.results import config_hash
from loopinterp.core.storage import (
    digest_tensors,
    make_folder,
    read_json_object,
    write_json,
    write_large_tensors,
)
from loopinterp.core.text import track
from loopinterp.models.addresses import nbytes
from loopinterp.models.generation import padded_prompts
from loopinterp.models.protocol import check_dtype, describe_model, device_of
from loopinterp.models.run import HookedRun

if TYPE_CHECKING:
    import pandas as pd
    from jaxtyping import Int, Integer

    from loopinterp.models.addresses import Address, Index

_INDEX = "index.json"
_ABOUT_ROWS = ("prompt", "pos", "token")


@torch.no_grad()
@checked
def store_activations(
    model: HookedRun,
    prompts: Integer[Tensor, "prompt pos"] | Sequence[Sequence[int]],
    folder: str | Path,
    *,
    names_filter: str | Iterable[Any] | Callable[[str], bool],
    loops: Index = None,
    n_loops: PositiveInt | None = None,
    positions: int | slice | Sequence[int] | None = None,
    attention_mask: Tensor | None = None,
    dtype: torch.dtype | str | None = None,
    batch_size: PositiveInt = 64,
    shard_bytes: PositiveInt = 64 * 1024**2,
) -> ActivationStore:
    """Run prompts and write their activations to a folder, shard by shard.

    The same call resumes after a kill. Prompts of one length are run together.

    Args:
        prompts: Tokens ``[prompt, pos]``, or lists of tokens of any lengths.
        names_filter: The sites, as for ``model.run_with_cache``, with its ``loops``.
        n_loops: Loops of each run; ``model.n_loops`` if None.
        positions: Positions of each prompt to keep; all if None.
        attention_mask: 0 where a prompt is padded, and 1 elsewhere.
        dtype: Type to store; the model's if None.
        batch_size: Prompts in a run.
        shard_bytes: Bytes of a shard, at least one prompt.

    Raises:
        InputError: If the disk has no room, or the folder holds other activations.
        HookError: If the filter keeps nothing, or an activation has keys or no positions.

    Example:
        >>> import tempfile
        >>> from loopinterp.models import LoopedTransformer, LoopedTransformerConfig
        >>> config = LoopedTransformerConfig(d_model=16, n_heads=2, d_vocab=5, d_vocab_out=5)
        >>> model = LoopedTransformer(config.replace(n_loops=3))
        >>> folder = tempfile.mkdtemp()
        >>> store = store_activations(model, [[1, 2], [3, 0, 4]], folder, names_filter="resid_post")
        >>> store.stack("resid_post").shape  # loop, row, d_model
        torch.Size([3, 5, 16])
    """
    tokens, lengths = padded_prompts(prompts, attention_mask, device_of(model))
    n_loops = model.n_loops if n_loops is None else n_loops
    book = model.addresses(n_loops)
    sites = [book.addresses[name] for name in book.select(names_filter, loops)]
    for site in sites:
        if site.axes[0] != "pos" or "key" in site.axes:
            expected, fix = "activations [batch, pos, …]", "Leave patterns and scores out."
            raise HookError("names_filter", expected=expected, given=site.name, fix=fix)
    kept_as = check_dtype(dtype) or model.dtype
    if kept_as not in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        expected, fix = "bfloat16, float16, float32 or float64", "Pass dtype='float32'."
        raise InputError("dtype", expected=expected, given=str(kept_as), fix=fix)
    chosen = [positions] if isinstance(positions, int) else positions
    n_rows = [len(_positions_of(n, chosen)) for n in lengths.tolist()]
    row_bytes = 8 * len(_ABOUT_ROWS) + nbytes(sites, 1, 1, None, kept_as.itemsize)
    shards = _shards(n_rows, max(1, shard_bytes // row_bytes))
    # [prompt, pos]: False on padding.
    there = torch.arange(tokens.shape[1], device=tokens.device) < lengths[:, None]
    about = {
        "model": describe_model(model),
        "prompts": digest_tensors({"tokens": tokens[there], "n": lengths}),
        "sites": [site.name for site in sites],
        "positions": str(chosen),
        "n_loops": n_loops,
        "dtype": str(kept_as).removeprefix("torch."),
        "shards": shards,
    }
    folder = Path(folder)
    size = row_bytes * sum(n_rows)
    _begin(folder, about, size)
    todo = [k for k in range(len(shards)) if not (folder / _file(k)).exists()]
    for k in track(todo, f"activations ({size / 1e6:.0f} MB)"):
        first, last, _ = shards[k]
        rows = range(first, last)
        write_large_tensors(
            folder / _file(k),
            _run(model, tokens, lengths, rows, sites, chosen, kept_as, n_loops, batch_size),
        )
    return ActivationStore(folder)


def _positions_of(n: int, positions: slice | Sequence[int] | None) -> Int[Tensor, " kept"]:
    places = torch.arange(n)
    try:
        chosen = places if positions is None else places[positions]
    except (IndexError, ValueError):
        chosen = places[:0]
    if not chosen.numel():
        expected, fix = f"some of {n} positions", "Name positions that every prompt has."
        raise InputError("positions", expected=expected, given=str(positions), fix=fix)
    return chosen


def _shards(n_rows: Sequence[int], most: int) -> list[list[int]]:
    """First prompt, prompt after the last, and rows of each shard of at most ``most`` rows."""
    shards: list[list[int]] = []
    for prompt, n in enumerate(n_rows):
        if not shards or shards[-1][2] + n > most:
            shards.append([prompt, prompt, 0])
        shards[-1] = [shards[-1][0], prompt + 1, shards[-1][2] + n]
    return shards


def _file(k: int) -> str:
    return f"activations-{k:05d}.safetensors"


def _begin(folder: Path, about: dict[str, Any], size: int) -> None:
    index = folder / _INDEX
    if index.exists():
        if read_json_object(index).get("digest") != config_hash(about):
            expected, got = "an empty folder, or the same activations", "those of another call"
            raise InputError(f"folder {folder}", expected=expected, given=got, fix="Pass another.")
        return
    make_folder(folder)
    if size > (free := shutil.disk_usage(folder).free):
        expected = f"at most the {free / 1e6:.0f} MB that are free"
        fix = "Pass fewer sites, loops=, positions= or dtype=."
        got = f"{size / 1e6:.0f} MB"
        raise InputError("activations", expected=expected, given=got, fix=fix)
    write_json(index, {**about, "digest": config_hash(about)})


def _run(
    model: HookedRun,
    tokens: Tensor,
    lengths: Tensor,
    prompts: range,
    sites: Sequence[Address],
    positions: slice | Sequence[int] | None,
    dtype: torch.dtype,
    n_loops: int,
    batch_size: int,
) -> dict[str, Tensor]:
    names = [site.name for site in sites]
    reads = any(site.in_readout for site in sites)
    parts: list[dict[str, Tensor]] = []
    lengths_here = sorted({int(lengths[p]) for p in prompts})
    for n in lengths_here:
        alike = torch.tensor([p for p in prompts if int(lengths[p]) == n])
        places = _positions_of(n, positions)
        for some in alike.split(batch_size):
            inputs = tokens[some.to(tokens.device), :n]
            # No readout where nothing of it is stored.
            _, cached = model.run_with_cache(
                inputs,
                n_loops=n_loops,
                names_filter=names,
                pos_slice=None if positions is None else places.tolist(),
                device="cpu",
                dtype=dtype,
                return_type="logits" if reads else "state",
            )
            about = {
                "prompt": some[:, None].expand(-1, len(places)),
                "pos": places.expand(len(some), -1),
                "token": inputs.cpu().long()[:, places],
            }
            # [prompt, pos, …] -> [row, …]
            part = {**about, **{name: cached[name] for name in names}}
            parts.append({name: x.flatten(0, 1) for name, x in part.items()})
    arrays = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    if len(lengths_here) == 1:
        return arrays
    order = arrays["prompt"].argsort(stable=True)
    return {name: x[order] for name, x in arrays.items()}


class ActivationStore:
    """Stored activations, mapped into memory: only what is asked for is read.

    Attributes:
        n_loops: Loops of the runs.
        sites: The names of the stored sites.

    Raises:
        CheckpointError: If the folder holds none, or shards are missing.

    Example:
        >>> import tempfile
        >>> from loopinterp.models import LoopedTransformer, LoopedTransformerConfig
        >>> config = LoopedTransformerConfig(d_model=16, n_heads=2, d_vocab=5, d_vocab_out=5)
        >>> folder, model = tempfile.mkdtemp(), LoopedTransformer(config.replace(n_loops=3))
        >>> _ = store_activations(model, [[1, 2], [3, 0, 4]], folder, names_filter="resid_post")
        >>> store = ActivationStore(folder)
        >>> store.rows().query("pos == 0").token.tolist()
        [1, 3]
        >>> store.dataset("blocks.2.hook_resid_post")[4].shape
        torch.Size([16])
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        what = f"activations {self.folder}"
        if not (self.folder / _INDEX).exists():
            expected, fix = f"a folder with {_INDEX}", "Make it with models.store_activations."
            raise CheckpointError(what, expected=expected, given="none", fix=fix)
        index = read_json_object(self.folder / _INDEX)
        try:
            self.sites, self.n_loops = [str(x) for x in index["sites"]], int(index["n_loops"])
            self._files = [self.folder / _file(k) for k in range(len(index["shards"]))]
            self._ends = [*accumulate(int(rows) for _, _, rows in index["shards"])]
        except (KeyError, TypeError, ValueError) as error:
            fix = "Store the activations again."
            raise CheckpointError(what, expected="an index", given="another", fix=fix) from error
        if missing := [file.name for file in self._files if not file.exists()]:
            expected, fix = f"{len(self._files)} shards", "Repeat the call that was killed."
            got = f"{len(self._files) - len(missing)} ({missing[0]} is missing)"
            raise CheckpointError(what, expected=expected, given=got, fix=fix)

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __repr__(self) -> str:
        files = f"{len(self._files)} shards, {self.nbytes / 1e6:.1f} MB"
        return f"ActivationStore({len(self)} rows, {len(self.sites)} sites, {files})"

    @cached_property
    def nbytes(self) -> int:
        """Bytes on disk."""
        return sum(file.stat().st_size for file in self._files)

    def rows(self) -> pd.DataFrame:
        """The ``prompt``, position ``pos`` and ``token`` of each row."""
        import pandas as pd

        return pd.DataFrame({name: self.read_array(name) for name in _ABOUT_ROWS})

    def read_array(self, site: str, rows: slice | Sequence[int] | Any = None) -> np.ndarray:
        """A site's activations ``[row, …]``: a view of the file if there is one shard.

        bfloat16 becomes float32, which NumPy has. ``rows`` are as for :meth:`read_tensor`.
        """
        x = self.read_tensor(site, rows)
        return (x.float() if x.dtype == torch.bfloat16 else x).numpy()

    def read_tensor(self, site: str, rows: slice | Sequence[int] | Any = None) -> Tensor:
        """A site's activations ``[row, …]``, all of them or some rows.

        Args:
            rows: A slice, row numbers, or booleans, one for each row: ``store.rows().pos == 0``.

        Raises:
            InputError: If there is no such site, or rows are neither.
            IndexError: If there is no such row.
        """
        maps = [shard[site] for shard in self._maps(site)]
        if rows is None:
            return maps[0] if len(maps) == 1 else torch.cat(maps)
        places = self._places(rows)
        shard = torch.tensor([bisect_right(self._ends, int(k)) for k in places], dtype=torch.long)
        starts = torch.tensor([0, *self._ends[:-1]])
        out = torch.empty((len(places), *maps[0].shape[1:]), dtype=maps[0].dtype)
        for k in shard.unique().tolist():
            here = shard == k
            out[here] = maps[k][places[here] - starts[k]]
        return out

    def stack(self, component: str, rows: slice | Sequence[int] | Any = None) -> Tensor:
        """A component's activations at every stored loop and layer: ``[loop, row, …]``."""
        ends = (f".{component}", f".hook_{component}")
        names = [name for name in self.sites if name.endswith(ends)]
        if not names:
            raise unknown_name("component", component, self.sites)
        return torch.stack([self.read_tensor(name, rows) for name in names])

    def dataset(self, site: str) -> _StoredRows:
        """A site's rows as a torch ``Dataset``, for a ``DataLoader``."""
        self._maps(site)
        return _StoredRows(self, site)

    @cached_property
    def _mapped(self) -> list[dict[str, Tensor]]:
        # Tensors of safe_open are mapped copy-on-write.
        opened = [safe_open(file, framework="pt") for file in self._files]
        return [{name: x.get_tensor(name) for name in (*self.sites, *_ABOUT_ROWS)} for x in opened]

    def _places(self, rows: Any) -> Int[Tensor, " chosen"]:
        if isinstance(rows, slice):
            return torch.tensor(range(*rows.indices(len(self))), dtype=torch.long)
        chosen = np.asarray(rows)
        if chosen.dtype == bool and chosen.shape == (len(self),):
            chosen = chosen.nonzero()[0]
        if chosen.ndim != 1 or (chosen.size and chosen.dtype.kind not in "iu"):
            expected, fix = f"row numbers, or {len(self)} booleans", "Pass e.g. [0, 1] or slice(2)."
            got = f"{chosen.dtype} of shape {[*chosen.shape]}"
            raise InputError("rows", expected=expected, given=got, fix=fix)
        numbers = chosen.tolist()
        for k in numbers:
            if not -len(self) <= k < len(self):
                raise IndexError(f"row {k} of {len(self)}")
        return torch.tensor([k % len(self) for k in numbers], dtype=torch.long)

    def _maps(self, site: str) -> list[dict[str, Tensor]]:
        if site not in (*self.sites, *_ABOUT_ROWS):
            raise unknown_name("site", site, [*self.sites, *_ABOUT_ROWS])
        return self._mapped


@dataclass(eq=False, repr=False)
class _StoredRows(Dataset[Tensor]):
    store: ActivationStore
    site: str

    def __len__(self) -> int:
        return len(self.store)

    def __getitem__(self, k: SupportsIndex) -> Tensor:
        return self.store.read_tensor(self.site, [int(k)])[0]

    def __getitems__(self, rows: Sequence[int]) -> list[Tensor]:
        return [*self.store.read_tensor(self.site, rows)]
