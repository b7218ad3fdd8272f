from __future__ import annotations

import pytest
import torch

from loopinterp.core.errors import InputError
from loopinterp.interventions.subspaces import (
    check_orthonormal,
    principal_subspace,
    project,
    random_change,
)


def orthonormal(*shape: int, seed: int = 0) -> torch.Tensor:
    """Orthonormal rows [..., rank, d_model]."""
    gauss = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return torch.linalg.qr(gauss.mT).Q.mT


def test_principal_directions_span_what_changes(generator):
    basis = orthonormal(2, 8)
    difference = torch.randn(50, 2, generator=generator) @ basis
    rows = principal_subspace(difference, 2)
    assert torch.allclose(difference @ rows.mT @ rows, difference, atol=1e-5)


def test_a_projection_keeps_the_part_that_lies_in_the_subspace(generator):
    rows = orthonormal(20, 3, 8)
    change = torch.randn(20, 4, 8, generator=generator)
    part = project(change, rows)
    assert torch.allclose(project(part, rows), part, atol=1e-5)
    for k in range(20):
        assert torch.allclose(part[k] @ rows[k].mT, change[k] @ rows[k].mT, atol=1e-5)
        assert torch.allclose(project(change[k], rows[k]), part[k], atol=1e-5)
        for site in range(4):
            parts = [row * float(row @ change[k, site]) for row in rows[k]]
            assert torch.allclose(part[k, site], torch.stack(parts).sum(0), atol=1e-5)


def test_rows_that_are_not_orthonormal_are_refused():
    with pytest.raises(InputError, match="orthonormal"):
        check_orthonormal(2 * torch.eye(4)[:2])


def test_a_random_change_keeps_the_norm_and_favours_no_direction(generator):
    change = torch.zeros(4000, 1, 6)
    change[:, 0, 0] = torch.arange(4000) / 100
    found = random_change(change, generator)
    assert torch.allclose(found.norm(dim=-1), change.norm(dim=-1), atol=1e-4)
    directions = found[1:, 0] / found[1:, 0].norm(dim=-1, keepdim=True)
    assert torch.allclose(directions.square().mean(0), torch.full((6,), 1 / 6), atol=0.02)
    assert torch.allclose(directions.mean(0), torch.zeros(6), atol=0.03)


@pytest.mark.parametrize("rank", [0, 9])
def test_impossible_ranks_are_refused(rank, generator):
    with pytest.raises(InputError, match="rank"):
        principal_subspace(torch.randn(20, 8, generator=generator), rank)
