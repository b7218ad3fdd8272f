"""What is recorded at a tap, and its gradient."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from loopinterp import comparison, compiler, dynamics, edges, lenses, training
from loopinterp.core.errors import HookError, InputError
from loopinterp.models import LoopedTransformer, LoopedTransformerConfig, taps
from loopinterp.models.taps import _free_bytes
from loopinterp.tasks import Addition, as_batch
from loopinterp.training import RECIPES, CurriculumConfig, Trainer, train, train_seeds
from tests.adapters.kinds import adapted, tokens_of
from tests.models.variants import build, some_inputs


def test_the_gradient_of_what_the_loss_does_not_depend_on_is_zero() -> None:
    model = build("plain", n_loops=3)
    x = some_inputs(model)
    cut = model.site("resid_post", loop=1, layer=0)
    with model.hooks(fwd_hooks=[(cut, lambda a, hook: torch.zeros_like(a))]):
        _, cache = model.run_with_cache(x, incl_bwd=True, loss_fn=lambda y: y.sum())
    before = [cache.cache_dict[f"blocks.{loop}.attn.hook_z_grad"] for loop in range(3)]
    assert [bool(g.any()) for g in before] == [False, False, True]
    assert before[0].shape == cache["blocks.0.attn.hook_z"].shape


TINY = RECIPES["addition"].replace(
    steps=2, log_every=1, device="cpu", curriculum=CurriculumConfig(max_n=3)
)


BATCH = as_batch(Addition(), n=3, batch_size=16)


OTHER = as_batch(Addition(), n=3, batch_size=16, seed=1)


def _model() -> LoopedTransformer:
    config = LoopedTransformerConfig(d_model=16, n_heads=2, d_vocab=6, d_vocab_out=2)
    return LoopedTransformer(config, seed=0).eval()


def _ripple() -> LoopedTransformer:
    return compiler.compile_program("ripple", max_length=4).model


CALLS: dict[str, Callable[[Path], Any]] = {
    "train": lambda out: train(TINY, out / "run", progress=False),
    "train_seeds": lambda out: train_seeds(TINY, [0, 1], out / "seeds", progress=False),
    "trainer": lambda out: Trainer(TINY).step(),
    "tuned lens": lambda out: lenses.fit_tuned_lens(_model(), BATCH, n_loops=3, steps=2),
    "jacobian lens": lambda out: lenses.fit_jacobian_lens(_model(), BATCH, n_loops=2),
    "subspaces": lambda out: comparison.search_subspaces(
        _ripple(), BATCH, "ripple", ranks=(1,), steps=1
    ),
    "edges": lambda out: edges.edge_study(
        _model(), BATCH, OTHER, n_loops=1, methods=["eap"], curve_points=1
    ),
    "vjp": lambda out: dynamics.vjp(lambda h: h * h, torch.ones(1, 2, 3), torch.ones(1, 2, 3)),
}


@pytest.mark.parametrize("name", CALLS)
def test_gradients_are_recorded_where_they_were_switched_off(name: str, tmp_path: Path) -> None:
    with torch.no_grad():
        assert CALLS[name](tmp_path) is not None
        assert not torch.is_grad_enabled()


def test_a_training_without_gradients_around_it_has_the_same_numbers(tmp_path: Path) -> None:
    train(TINY, tmp_path / "plain", progress=False)
    torch.set_grad_enabled(False)
    try:
        train(TINY, tmp_path / "off", progress=False)
    finally:
        torch.set_grad_enabled(True)
    plain, off = (training.Run.load(tmp_path / name) for name in ("plain", "off"))
    assert off.metrics()["loss"].tolist() == plain.metrics()["loss"].tolist()
    for a, b in zip(off.model().parameters(), plain.model().parameters()):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", CALLS)
def test_inference_mode_is_what_is_refused(name: str, tmp_path: Path) -> None:
    with torch.inference_mode(), pytest.raises(InputError) as refused:
        CALLS[name](tmp_path)
    assert refused.value.what == "gradients"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["tuned lens", "jacobian lens", "edges"])
def test_weights_made_in_inference_mode_are_what_is_refused(name: str) -> None:
    with torch.inference_mode():
        made_there = _model()
    fits: dict[str, Callable[[Any], Any]] = {
        "tuned lens": lambda model: lenses.fit_tuned_lens(model, BATCH, n_loops=2, steps=1),
        "jacobian lens": lambda model: lenses.fit_jacobian_lens(model, BATCH, n_loops=2),
        "edges": lambda model: edges.edge_study(
            model, BATCH, OTHER, n_loops=1, methods=["eap"], curve_points=1
        ),
    }
    with pytest.raises(InputError) as refused:
        fits[name](made_there)
    assert refused.value.what == "model"
    fits[name](copy.deepcopy(made_there))  # as the message says


TOKENS = torch.zeros(2, 6, dtype=torch.long)


@pytest.fixture
def model() -> LoopedTransformer:
    config = LoopedTransformerConfig(d_model=16, n_heads=2, d_vocab=5, d_vocab_out=2)
    return LoopedTransformer(config, seed=0)


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes so many bytes free, and asks about every cache."""

    def make(free: int | None) -> None:
        monkeypatch.setattr(taps, "_ALWAYS_FITS", 0)
        monkeypatch.setattr(taps, "_free_bytes", lambda device: free)

    return make


def no_run(*_: Any, **__: Any) -> Tensor:
    raise AssertionError("the run has begun")


WAYS: list[dict[str, Any]] = [
    {},
    {"names_filter": "resid_post", "loops": [0, -1]},
    {"names_filter": ["pattern", "z"], "dtype": torch.bfloat16},
]


@pytest.mark.parametrize("options", WAYS)
@pytest.mark.parametrize("published", [False, True])
def test_a_cache_of_exactly_what_is_free_is_made_and_one_byte_less_refuses_it(
    options: dict[str, Any], published: bool, room: Any, model: Any, monkeypatch: Any
) -> None:
    run, x = (adapted("hrm_text"), tokens_of("hrm_text")) if published else (model, TOKENS)
    size = run.cache_nbytes(*x.shape, n_loops=3, **options)
    room(size)
    assert run.run_with_cache(x, n_loops=3, **options)[1].nbytes == size
    room(size - 1)
    monkeypatch.setattr(type(run), "_run", no_run)
    with pytest.raises(InputError, match=r"^cache: .*names_filter="):
        run.run_with_cache(x, n_loops=3, **options)


def test_positions_and_gradients_count(room: Any, model: Any) -> None:
    some = {"n_loops": 3, "names_filter": "resid_post"}
    half = model.cache_nbytes(2, 6, n_kept=3, **some)
    room(half)
    for positions in ([0, 2, 5], slice(0, 3)):
        model.run_with_cache(TOKENS, pos_slice=positions, **some)
    with pytest.raises(InputError, match=r"^cache:"):
        model.run_with_cache(TOKENS, pos_slice=slice(0, 4), **some)
    backwards = {"incl_bwd": True, "loss_fn": lambda logits: logits.sum()}
    with pytest.raises(InputError, match=r"^cache:"):
        model.run_with_cache(TOKENS, pos_slice=slice(0, 3), **some, **backwards)
    room(2 * half)
    _, cache = model.run_with_cache(TOKENS, pos_slice=slice(0, 3), **some, **backwards)
    assert cache.nbytes == 2 * half
    with pytest.raises(HookError, match="pos_slice"):
        model.run_with_cache(TOKENS, pos_slice=slice(9, 12), **some)


def test_a_cache_beyond_any_machine_is_refused_at_once(model: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(LoopedTransformer, "_run", no_run)
    tokens = torch.zeros(1, 1_000_000, dtype=torch.long)
    with pytest.raises(InputError, match=r"16000\.0 GB"):
        model.run_with_cache(tokens, n_loops=2, names_filter="pattern")


def test_where_nobody_knows_what_is_free_and_below_the_bound_nothing_is_refused(
    room: Any, model: Any, monkeypatch: Any
) -> None:
    room(None)
    assert len(model.run_with_cache(TOKENS, n_loops=2)[1])
    monkeypatch.undo()
    monkeypatch.setattr(taps, "_free_bytes", no_run)
    assert len(model.run_with_cache(TOKENS, n_loops=2)[1])


def test_what_is_free_is_what_the_system_or_the_group_leaves(tmp_path: Path) -> None:
    free = _free_bytes(torch.device("cpu"))
    assert free is not None and 0 < free < 2**50
    assert _free_bytes(torch.device("meta")) is None
    member, mounted = tmp_path / "cgroup", tmp_path / "mounted"
    member.write_text("5:cpu:/a\n4:memory:/a/b\n0::/job/step\n")

    def group(path: str, **files: str) -> None:
        (mounted / path).mkdir(parents=True)
        for name, text in files.items():
            (mounted / path / name.replace("__", ".")).write_text(text)

    group("job/step", memory__max="max\n", memory__current="10\n", memory__stat="inactive_file 1\n")
    (mounted / "job" / "memory.max").write_text("1000\n")
    (mounted / "job" / "memory.current").write_text("700\n")
    (mounted / "job" / "memory.stat").write_text("anon 400\ninactive_file 250\n")
    old = {"memory__limit_in_bytes": "500\n", "memory__usage_in_bytes": "600\n"}
    group("memory/a/b", **old, memory__stat="inactive_file 7\ntotal_inactive_file 50\n")
    free_by_group = list(taps._left_in_groups(member, mounted))
    # The first group is over its limit.
    assert free_by_group == [0, 1000 - 700 + 250]
    assert list(taps._left_in_groups(tmp_path / "none", mounted)) == []


@pytest.mark.gpu
def test_on_a_gpu_what_pytorch_holds_for_reuse_is_free() -> None:
    device = torch.device("cuda")
    before = _free_bytes(device)
    allocated = torch.empty(256 * 1024**2, dtype=torch.uint8, device=device)
    during = _free_bytes(device)
    assert before is not None and during is not None
    assert before - during >= allocated.numel() * 0.99
    del allocated
    assert abs(before - (_free_bytes(device) or 0)) < 64 * 1024**2
