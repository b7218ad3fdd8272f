"""Muon: the orthogonalised step beside singular value decomposition and PyTorch's own Muon."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from loopinterp.core.errors import ConfigError
from loopinterp.training import OptimiserConfig, Trainer
from loopinterp.training.muon import Muon, matrices_of_layers, orthogonalise
from tests.training.tiny_run import TINY

MUON = TINY.replace(optimiser=OptimiserConfig(kind="muon", warmup_steps=4))


@given(
    shape=st.sampled_from([(4, 4), (3, 7), (9, 2), (1, 5), (16, 64)]),
    scale=st.sampled_from([1e-6, 1.0, 1e6]),
    seed=st.integers(0, 100),
)
def test_singular_vectors_stay_and_singular_values_become_one(
    shape: tuple[int, int], scale: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(2, *shape, generator=generator, dtype=torch.float64)
    u, s, v = torch.linalg.svd(x, full_matrices=False)
    found = u.mT @ orthogonalise(scale * x) @ v.mT
    values = found.diagonal(dim1=-2, dim2=-1)
    torch.testing.assert_close(torch.diag_embed(values), found, rtol=0, atol=1e-9)
    large = s > 0.01 * s.norm(dim=-1, keepdim=True)
    assert (values[large] > 0.65).all() and (values < 1.25).all()


def test_the_zero_matrix_stays_zero() -> None:
    assert (orthogonalise(torch.zeros(1, 3, 2)) == 0).all()


def test_steps_are_those_of_pytorch_up_to_its_bfloat16() -> None:
    torch.manual_seed(0)
    start = {"a.weight": torch.randn(6, 8), "b.weight": torch.randn(8, 6)}
    ours = {name: torch.nn.Parameter(x.clone()) for name, x in start.items()}
    theirs = {name: torch.nn.Parameter(x.clone()) for name, x in start.items()}
    mine = Muon(ours, lr=0.1, weight_decay=0.05)
    peer = torch.optim.Muon(
        theirs.values(), lr=0.1, weight_decay=0.05, momentum=0.95, adjust_lr_fn="match_rms_adamw"
    )
    for _ in range(4):
        for one, other in zip(ours.values(), theirs.values()):
            one.grad = torch.randn_like(one)
            other.grad = one.grad.clone()
        mine.step()
        peer.step()
    for name, x in start.items():
        moved = (theirs[name] - x).norm()
        assert (ours[name] - theirs[name]).norm() < 0.02 * moved


def test_queries_keys_and_values_are_three_matrices() -> None:
    torch.manual_seed(0)
    packed = torch.nn.Parameter(torch.randn(12, 4))
    parts = [torch.nn.Parameter(x.clone()) for x in packed.detach().chunk(3)]
    packed.grad = torch.randn_like(packed)
    for part, gradient in zip(parts, packed.grad.chunk(3)):
        part.grad = gradient.clone()
    Muon({"block.0.attn.qkv.weight": packed}, lr=0.1, weight_decay=0.1).step()
    Muon({str(i): part for i, part in enumerate(parts)}, lr=0.1, weight_decay=0.1).step()
    torch.testing.assert_close(packed, torch.cat(parts))  # type: ignore[arg-type]


def test_a_matrix_without_a_gradient_stays() -> None:
    moved, still = (torch.nn.Parameter(torch.ones(2, 2)) for _ in range(2))
    moved.grad = torch.eye(2)
    Muon({"moved": moved, "still": still}, lr=0.1, weight_decay=0.1).step()
    assert (still == 1).all() and (moved != 1).any()


def test_a_spoiled_step_changes_neither_weights_nor_momentum() -> None:
    matrix = torch.nn.Parameter(torch.ones(2, 2))
    muon = Muon({"fc_in.weight": matrix}, lr=0.1, weight_decay=0.1)
    matrix.grad = torch.tensor([[1.0, 2.0], [0.0, 1.0]])
    muon.step()
    before, momentum = matrix.detach().clone(), muon.state[matrix]["momentum"].clone()
    matrix.grad = torch.full((2, 2), math.nan)
    muon.found_inf = torch.tensor(1.0)
    muon.step()
    assert torch.equal(matrix, before) and torch.equal(muon.state[matrix]["momentum"], momentum)
    muon.found_inf = torch.tensor(0.0)
    matrix.grad = torch.eye(2)
    muon.step()
    assert not torch.equal(matrix, before)


def test_matrices_of_layers_get_muon_and_all_other_weights_adamw() -> None:
    trainer = Trainer(MUON)
    trainer.step()
    saved, _ = trainer.state()
    of_muon = {name.partition("/")[2] for name in saved if name.startswith("momentum/")}
    of_adamw = {name.partition("/")[2] for name in saved if name.startswith("exp_avg/")}
    names = dict(trainer.model.named_parameters())
    assert of_muon == {*matrices_of_layers(trainer.model)}
    assert of_muon == {n for n, p in names.items() if p.dim() == 2 and n.startswith("block.")}
    assert of_adamw == {*names} - of_muon


def test_each_rate_moves_its_own_weights() -> None:
    """By ``0.2 sqrt(max(rows, columns))`` times the singular values, in the first step."""
    rate, slow = 0.5, 1e-12
    settings = OptimiserConfig(
        kind="muon", lr=slow, matrix_lr=rate, warmup_steps=0, schedule="constant", weight_decay=0
    )
    trainer = Trainer(TINY.replace(optimiser=settings))
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    trainer.step()
    for name, weight in trainer.model.named_parameters():
        moved = (weight - before[name]).norm()
        if name == "block.0.mlp.fc_in.weight":
            values = torch.linalg.svdvals(weight - before[name]) / (
                rate * 0.2 * max(weight.shape) ** 0.5
            )
            assert 0.6 < values.max() < 1.3
        if name not in matrices_of_layers(trainer.model):
            assert moved < 1e-6


def test_a_rate_of_matrices_without_muon_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        OptimiserConfig(matrix_lr=0.1)
    assert caught.value.what == "matrix_lr"
