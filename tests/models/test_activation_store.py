"""Stored activations are those of each prompt run by itself, also if the writing is killed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import DataLoader

from loopinterp.adapters import adapt
from loopinterp.core.errors import CheckpointError, HookError, InputError
from loopinterp.models import ActivationStore, activation_store, store_activations
from tests.adapters.kinds import KINDS
from tests.models.variants import build
from tests.refusals import naming

PROMPTS = [[1, 2, 4, 0, 3], [5], [4, 4, 1], [0, 1, 2, 3, 4, 5], [2, 2, 2], [3]]
SITES = ("resid_post", "hook_state_post", "attn.hook_z")


def by_hand(model: Any, prompts: list[list[int]], name: str, n_loops: int) -> Tensor:
    rows = []
    for prompt in prompts:
        _, cache = model.run_with_cache(torch.tensor([prompt]), n_loops=n_loops)
        rows.append(cache[name][0])
    return torch.cat(rows)


@pytest.mark.parametrize("kind", ["sandwich rotary", "ouro", "huginn", "trm"])
def test_rows_are_those_of_each_prompt_run_by_itself(kind: str, tmp_path: Path) -> None:
    model: Any = adapt(KINDS[kind].build()) if kind in KINDS else build(kind)
    residual = next(a.name for a in model.addresses(3).addresses.values() if a.loop == 1)
    options: dict[str, Any] = {"names_filter": residual, "n_loops": 3, "batch_size": 2}
    store = store_activations(model, PROMPTS, tmp_path / "a", shard_bytes=3000, **options)
    assert len(store) == sum(map(len, PROMPTS)) and store.sites == [residual]
    expected = by_hand(model, PROMPTS, residual, 3)
    torch.testing.assert_close(store.read_tensor(residual), expected, atol=1e-5, rtol=1e-5)
    rows = store.rows()
    assert rows["token"].tolist() == [token for prompt in PROMPTS for token in prompt]
    assert rows["prompt"].tolist() == [k for k, prompt in enumerate(PROMPTS) for _ in prompt]
    assert rows["pos"].tolist() == [pos for prompt in PROMPTS for pos in range(len(prompt))]


@settings(deadline=None, max_examples=10)
@given(
    st.lists(st.lists(st.integers(0, 5), min_size=2, max_size=5), min_size=1, max_size=6),
    st.integers(1, 4000),
    st.integers(1, 3),
    st.sampled_from([None, -1, [0, -1], slice(1, None)]),
)
def test_shards_batches_and_positions_change_no_row(
    prompts: list[list[int]], shard_bytes: int, batch_size: int, positions: Any
) -> None:
    import tempfile

    model = build("plain").double()
    with tempfile.TemporaryDirectory() as folder:
        store = store_activations(
            model,
            prompts,
            folder,
            names_filter=SITES,
            loops=[0, 2],
            n_loops=3,
            positions=positions,
            batch_size=batch_size,
            shard_bytes=shard_bytes,
        )
        chosen = [positions] if isinstance(positions, int) else positions
        for name in store.sites:
            alone = [by_hand(model, [prompt], name, 3) for prompt in prompts]
            expected = torch.cat([x if chosen is None else x[chosen] for x in alone])
            torch.testing.assert_close(store.read_tensor(name), expected)
        assert store.stack("resid_post").shape[0] == 2 * model.config.n_layers


class Killed(BaseException):
    pass


def test_a_writing_that_is_killed_goes_on_and_ends_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, runs = build("plain"), []
    options: dict[str, Any] = {"names_filter": "resid_post", "n_loops": 3, "shard_bytes": 1500}
    whole = store_activations(model, PROMPTS, tmp_path / "whole", **options)
    n_shards = len(list((tmp_path / "whole").glob("*.safetensors")))
    assert n_shards >= 4
    write = activation_store.write_large_tensors

    def killed_after(n: int) -> None:
        def writing(*args: Any) -> None:
            if len(runs) == n:
                raise Killed
            runs.append(args[0])
            write(*args)

        monkeypatch.setattr(activation_store, "write_large_tensors", writing)

    for n in (1, 3):
        killed_after(n)
        with pytest.raises(Killed):
            store_activations(model, PROMPTS, tmp_path / "killed", **options)
        with pytest.raises(CheckpointError) as caught:
            ActivationStore(tmp_path / "killed")
        assert caught.value.expected == f"{n_shards} shards"
    killed_after(-1)
    again = store_activations(model, PROMPTS, tmp_path / "killed", **options)
    assert len(runs) == n_shards  # no shard was written twice
    for file in (tmp_path / "whole").iterdir():
        assert file.read_bytes() == (tmp_path / "killed" / file.name).read_bytes()
    assert len(again) == len(whole)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
def test_types(dtype: str, tmp_path: Path) -> None:
    model, name = build("plain"), "blocks.0.hook_resid_post"
    options: dict[str, Any] = {"names_filter": name, "n_loops": 2, "dtype": dtype}
    store = store_activations(model, PROMPTS, tmp_path, **options)
    expected = by_hand(model, PROMPTS, name, 2).to(getattr(torch, dtype))
    assert store.read_tensor(name).dtype == expected.dtype
    torch.testing.assert_close(
        store.read_tensor(name).float(), expected.float(), atol=1e-5, rtol=1e-2
    )
    array = store.read_array(name)
    assert array.dtype == np.dtype("float32" if dtype == "bfloat16" else dtype)
    np.testing.assert_array_equal(array, store.read_tensor(name).to(torch.float64).numpy())


def test_rows_are_asked_for_singly_in_slices_and_by_a_loader(tmp_path: Path) -> None:
    model, name = build("plain"), "blocks.0.hook_resid_post"
    options: dict[str, Any] = {"names_filter": "resid_post", "n_loops": 2, "shard_bytes": 1500}
    store = store_activations(model, PROMPTS, tmp_path, **options)
    whole = store.read_tensor(name)
    assert torch.equal(store.read_tensor(name, slice(3, 17, 4)), whole[3:17:4])
    assert torch.equal(store.read_tensor(name, [-1, 0, 5, 5]), whole[[-1, 0, 5, 5]])
    with pytest.raises(IndexError):
        store.read_tensor(name, [len(store)])
    data = store.dataset(name)
    assert torch.equal(data[7], whole[7]) and len(data) == len(whole)
    generator = torch.Generator().manual_seed(0)
    batches = [*DataLoader(data, batch_size=6, shuffle=True, generator=generator)]
    assert [len(batch) for batch in batches] == [6, 6, 6, 1]
    key = whole.double() @ torch.arange(1.0, 17.0, dtype=torch.float64)
    seen = torch.cat(batches).double() @ torch.arange(1.0, 17.0, dtype=torch.float64)
    torch.testing.assert_close(seen.sort().values, key.sort().values)
    # What a reader writes into its rows stays out of the file.
    store.read_tensor(name)[0] = 9.0
    assert torch.equal(ActivationStore(tmp_path).read_tensor(name), whole)


def test_rows_are_chosen_by_booleans_and_by_arrays_of_numbers(tmp_path: Path) -> None:
    model, name = build("plain"), "blocks.0.hook_resid_post"
    options: dict[str, Any] = {"names_filter": "resid_post", "n_loops": 2, "shard_bytes": 1500}
    store = store_activations(model, PROMPTS, tmp_path, **options)
    whole, first = store.read_tensor(name), store.rows().pos == 0
    mask = torch.tensor(first.tolist())
    assert 0 < mask.sum() < len(store)
    for rows in (first, first.to_numpy(), mask, first.tolist(), first[first].index):
        assert torch.equal(store.read_tensor(name, rows), whole[mask])
        assert torch.equal(store.stack("resid_post", rows)[0], whole[mask])
    assert torch.equal(store.read_tensor(name, ~mask & False), whole[:0])
    assert torch.equal(store.read_tensor(name, []), whole[:0])
    assert torch.equal(store.read_tensor(name, slice(9, 5)), whole[:0])
    assert torch.equal(store.read_tensor(name, slice(5, 9, -1)), whole[:0])
    assert torch.equal(store.read_tensor(name, slice(5, None, -2)), whole[[5, 3, 1]])
    for wrong in (mask[:-1], [0.0, 1.0], 3, torch.zeros(1, 2).long()):
        with naming("rows"):
            store.read_tensor(name, wrong)


def test_what_cannot_be_stored_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("plain")
    options: dict[str, Any] = {"names_filter": "resid_post", "n_loops": 2}
    with pytest.raises(HookError):
        store_activations(model, PROMPTS, tmp_path, names_filter="pattern", n_loops=2)
    with naming("positions"):
        store_activations(model, PROMPTS, tmp_path, positions=2, **options)
    with naming("dtype"):
        store_activations(model, PROMPTS, tmp_path, dtype="float8_e5m2", **options)
    with pytest.raises(CheckpointError):
        ActivationStore(tmp_path)
    (tmp_path / "a file").touch()
    for place in (tmp_path / "a file", tmp_path / "a file" / "inside"):
        with naming(f"output folder {place}"):
            store_activations(model, PROMPTS, place, **options)
    store = store_activations(model, PROMPTS, tmp_path, **options)
    with pytest.raises(InputError):
        store.read_tensor("blocks.0.hook_resid_pst")
    for name, value in (("n_loops", 3), ("dtype", "float64"), ("names_filter", "resid_pre")):
        other: dict[str, Any] = options | {name: value}
        with pytest.raises(InputError) as caught:
            store_activations(model, PROMPTS, tmp_path, **other)
        assert caught.value.what == f"folder {tmp_path}"
    with torch.no_grad():
        model.unembedding.weight.mul_(2)
    with pytest.raises(InputError):
        store_activations(model, PROMPTS, tmp_path, **options)
    full = type("Usage", (), {"free": 100})
    monkeypatch.setattr(activation_store.shutil, "disk_usage", lambda _: full)
    with naming("activations"):
        store_activations(model, PROMPTS, tmp_path / "b", **options)
