"""Fixed points of the loop: a state that one more loop does not change."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from loopinterp.dynamics.model_maps import map_and_start
from loopinterp.dynamics.solvers.cycle_detection import CycleWatch
from loopinterp.dynamics.solvers.fixed_point_solver import Solver, Status, Termination
from loopinterp.dynamics.solvers.solver_registry import get_solver
from loopinterp.dynamics.state_checks import check_finite_state
from loopinterp.errors import InputError
from loopinterp.short_repr import ShortRepr

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int
    from torch import Tensor

    from loopinterp.models.looped_model import LoopedModel


@dataclass(frozen=True, repr=False)
class FixedPoint(ShortRepr):
    """Where a search for a fixed point ended.

    Attributes:
        state: The last iterate, shaped like ``x0``; of a diverged example the last one whose
            values are finite.
        status: :class:`Status` code of each example.
        residuals: Relative residual of each iterate, the first that of ``x0``. An example that
            is done keeps its last residual.
        n_steps: Steps each example made.
        evaluations: Evaluations of the map each example needed: one for its start and one a step,
            or more where a step takes Jacobian-vector products, of which each counts as one.
        period: Steps per turn of an example on a cycle, else 0.
    """

    state: Float[Tensor, "*shape"]
    status: Int[Tensor, " batch"]
    residuals: Float[Tensor, "step batch"]
    n_steps: Int[Tensor, " batch"]
    evaluations: Int[Tensor, " batch"]
    period: Int[Tensor, " batch"]

    @property
    def converged(self) -> Bool[Tensor, " batch"]:
        """Which examples reached a fixed point."""
        return self.status == Status.CONVERGED

    @property
    def statuses(self) -> list[Status]:
        """The status of each example by name."""
        return [Status(code) for code in self.status.tolist()]


def find_fixed_point(
    model: LoopedModel | Callable[[Tensor], Tensor] | Any,
    x0: Tensor | Any,
    tol: float = 1e-5,
    max_iter: int = 200,
    *,
    solver: str | Solver = "picard",
    atol: float = 1e-8,
    patience: int | None = 100,
    divergence: float = 1e6,
) -> FixedPoint:
    r"""Solve :math:`f(x^*) = x^*` for every example of a batch.

    The first dimension of ``x0`` is the batch (a scalar is one example); ``f`` must treat the
    examples independently of each other, as a looped model's step does. An example that is
    done stays where it is while the others go on. What ``f`` raises is raised.

    By plain iteration the search also finds cycles (:attr:`Status.CYCLE`). Which solver to take is
    the subject of a page of the guide, "Finding fixed points".

    Args:
        model: A map, such as ``bind(model, inputs).step``; same shape and dtype out as in. Or a
            looped model.
        x0: Starting states, ``[batch, ...]``.
            Of a looped model, its inputs or a batch; the state is then the
            initial state.
        tol: Relative tolerance of the residual, :math:`\|f(x) - x\| \le` ``tol``
            :math:`\|f(x)\|` + ``atol``, and of returns to a cycle.
        max_iter: Largest number of steps.
        solver: ``"picard"``, ``"anderson"``, ``"broyden"``, ``"newton-krylov"``, or a
            :class:`Solver`.
        atol: Absolute tolerance.
        patience: Steps without progress after which an example counts as stalled.
        divergence: Growth of the norm at which an example counts as diverged.

    Raises:
        InputError: If ``x0`` is not floating point, is empty or not finite, if ``f`` changes
            the shape or dtype, or if the solver or an option is unknown or out of range.

    Source: the fixed-point view of looped transformers, arXiv 2604.15259.

    Example:
        >>> point = find_fixed_point(lambda x: x / 2 + 1, torch.tensor(0.0))
        >>> round(point.state.item(), 3), point.statuses[0].name
        (2.0, 'CONVERGED')
        >>> logistic = find_fixed_point(lambda x: 3.2 * x * (1 - x), torch.tensor([0.3]))
        >>> logistic.statuses[0].name, logistic.period.item()
        ('CYCLE', 2)
    """
    f, x0 = map_and_start(model, x0)
    rule = Termination(
        tol=tol, atol=atol, max_iter=max_iter, divergence=divergence, patience=patience
    )
    method = get_solver(solver)
    if not x0.is_floating_point():
        raise InputError(
            "x0",
            expected="a floating-point tensor",
            given=str(x0.dtype),
            fix="Convert it with x0.float().",
        )
    check_finite_state(x0, "x0", fix="Check the embedding of the input.")
    flat = x0.detach().reshape(1, 1) if x0.ndim == 0 else x0.detach().reshape(len(x0), -1)

    def g(x: Tensor) -> Tensor:
        fx = f(x.reshape(x0.shape))
        if fx.shape != x0.shape or fx.dtype != x0.dtype:
            raise InputError(
                "f",
                expected=f"a map that keeps shape {tuple(x0.shape)} and {x0.dtype}",
                given=f"shape {tuple(fx.shape)} and {fx.dtype} out",
                fix="Solve for a map from states to states, such as bind(model, inputs).step.",
            )
        return fx.reshape(flat.shape)

    with torch.no_grad():
        state = method.init(g, flat)
        status = rule(state)
        residuals, n_steps = [state.residual], torch.zeros_like(status)
        finite, period = flat, torch.zeros_like(status)
        watch = CycleWatch(flat, tol, atol) if method.follows_the_map else None
        while (status == Status.RUNNING).any():
            done = status != Status.RUNNING
            state = replace(state, done=done)
            state = method.step(g, state).keep(state, done)
            n_steps = torch.where(done, n_steps, n_steps + 1)
            now = rule(state)
            if watch is not None:
                turns = watch.see(state.x)
                on_cycle = (
                    (turns > 0) & ~done & (now != Status.CONVERGED) & (now != Status.DIVERGED)
                )
                now[on_cycle], period[on_cycle] = int(Status.CYCLE), turns[on_cycle]
                if state.n_steps < max_iter:  # patience ends nothing that is coming round again
                    now[watch.checking & (now == Status.STALLED)] = int(Status.RUNNING)
            status = torch.where(done, status, now)
            finite = torch.where(state.x.isfinite().all(dim=-1, keepdim=True), state.x, finite)
            residuals.append(state.residual)
    return FixedPoint(
        finite.reshape(x0.shape),
        status,
        torch.stack(residuals),
        n_steps,
        state.evaluations,
        period,
    )
