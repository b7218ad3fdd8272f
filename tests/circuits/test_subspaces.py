from __future__ import annotations

import pytest
import torch

from loopinterp.circuits.subspaces import (
    energy_rank,
    principal_subspace,
    project,
    random_subspaces,
)
from loopinterp.errors import InputError


def test_random_subspaces_are_orthonormal_and_different(generator):
    rows = random_subspaces(5, 3, 8, generator)
    assert torch.allclose(rows @ rows.mT, torch.eye(3).expand(5, 3, 3), atol=1e-5)
    assert not torch.allclose(rows[0], rows[1])


def test_random_subspaces_favour_no_axis(generator):
    rows = random_subspaces(4000, 2, 6, generator)
    held = rows.square().sum(1).mean(0)
    assert torch.allclose(held, torch.full((6,), 2 / 6), atol=0.02)


def test_energy_rank_by_hand():
    difference = torch.diag(torch.tensor([3.0, 2.0, 1.0]))  # energies 9, 4, 1 of 14
    ranks = [energy_rank(difference, share) for share in (0.5, 0.64, 0.65, 0.92, 0.93, 1.0)]
    assert ranks == [1, 1, 2, 2, 3, 3]
    assert energy_rank(torch.zeros(4, 3), 0.9) == 3


def test_principal_directions_span_what_changes(generator):
    basis = torch.linalg.qr(torch.randn(8, 2, generator=generator)).Q.mT
    difference = torch.randn(50, 2, generator=generator) @ basis
    rows = principal_subspace(difference, 2)
    assert torch.allclose(difference @ rows.mT @ rows, difference, atol=1e-5)


def test_a_projection_keeps_the_part_that_lies_in_the_subspace(generator):
    rows = random_subspaces(20, 3, 8, generator)
    change = torch.randn(20, 8, generator=generator)
    part = project(change, rows)
    assert torch.allclose(project(part, rows), part, atol=1e-5)
    for k in range(20):
        assert torch.allclose(rows[k] @ part[k], rows[k] @ change[k], atol=1e-5)
        assert torch.allclose(project(change, rows[k])[k], part[k], atol=1e-5)


@pytest.mark.parametrize("rank", [0, 9])
def test_impossible_ranks_are_refused(rank, generator):
    with pytest.raises(InputError, match="rank"):
        random_subspaces(1, rank, 8, generator)
    with pytest.raises(InputError, match="rank"):
        principal_subspace(torch.randn(20, 8, generator=generator), rank)
