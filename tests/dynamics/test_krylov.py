from __future__ import annotations

import numpy as np
import pytest
import torch

from loopinterp.dynamics.jacobian import JacobianOperator
from loopinterp.dynamics.krylov import KrylovSchur, _leading_schur, golub_kahan, orthogonalise
from tests.dynamics.toys import linear, random_state


def test_what_a_restart_holds_is_still_a_krylov_relation() -> None:
    matrix = random_state(30, 30)
    operator = JacobianOperator(linear(matrix), torch.zeros(2, 30, dtype=torch.float64))
    generator = torch.Generator().manual_seed(0)
    start = operator.random_vector(generator)
    krylov = KrylovSchur(operator, k=2, max_vectors=9, start=start, generator=generator)
    lengths = []
    for _ in range(25):
        krylov.grow()
        lengths.append(int(krylov.length[0]))
        for row in range(2):
            m = int(krylov.length[row])
            basis = krylov.basis[row, : m + 1]
            eye = torch.eye(m + 1, dtype=torch.float64)
            torch.testing.assert_close(basis @ basis.T, eye, atol=1e-12, rtol=0)
            projected = krylov.projected[row, : m + 1, :m]
            torch.testing.assert_close(matrix @ basis[:m].T, basis.T @ projected)
    assert max(lengths) == 9 and lengths != sorted(lengths)


def test_the_leading_schur_vectors_are_the_largest_and_no_pair_is_split() -> None:
    square = random_state(12, 12).numpy()
    size, form, turn = _leading_schur(square, k=3)
    np.testing.assert_allclose(turn @ form @ turn.T, square, atol=1e-12)
    moduli = np.sort(np.abs(np.linalg.eigvals(square)))[::-1]
    leading = np.sort(np.abs(np.linalg.eigvals(form[:size, :size])))[::-1]
    np.testing.assert_allclose(leading, moduli[:size])
    assert 3 < size < 12 and form[size, size - 1] == 0
    same = np.roll(np.eye(10), 1, axis=0)  # all on the unit circle: any part is as good
    size, form, turn = _leading_schur(same, k=2)
    np.testing.assert_allclose(turn @ form @ turn.T, same, atol=1e-12)
    assert form[size, size - 1] == 0


def test_golub_kahan_keeps_its_relation_where_the_space_is_exhausted() -> None:
    matrix = torch.diag(torch.tensor([3.0, 3.0, 2.0, 0.0, 0.0], dtype=torch.float64))
    operator = JacobianOperator(linear(matrix), torch.zeros(1, 5, dtype=torch.float64))
    *_, last = golub_kahan(operator, max_vectors=9)
    assert last.upper.shape[1] == 5 and last.lengths.tolist() == [5]
    values, _ = last.extremes(4)  # the four largest, and the smallest
    assert values[0].tolist() == pytest.approx([3, 3, 2, 0, 0])
    right = last.right[0]
    torch.testing.assert_close(right @ right.T, torch.eye(5, dtype=torch.float64))


def test_orthogonalising_leaves_nothing_of_what_is_spanned() -> None:
    basis = torch.linalg.qr(random_state(2, 8, 3))[0].mT
    w = random_state(2, 8)
    unit, coefficients, norm = orthogonalise(basis, w)
    rebuilt = torch.einsum("bk,bks->bs", coefficients, basis) + norm[:, None] * unit
    torch.testing.assert_close(rebuilt, w)
    torch.testing.assert_close(
        (basis @ unit[..., None]).abs().max().item(), 0.0, atol=1e-14, rtol=0
    )
    unit, _, norm = orthogonalise(basis, basis[:, 0] + 2 * basis[:, 1])
    assert norm.tolist() == [0, 0] and not unit.any()
