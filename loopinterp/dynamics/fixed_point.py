"""Search for fixed points and cycles of the loop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from loopinterp.core.errors import InputError, unknown_name
from loopinterp.core.text import ShortRepr
from loopinterp.dynamics.measures import check_finite_state
from loopinterp.dynamics.solvers import (
    Anderson,
    Broyden,
    NewtonKrylov,
    Picard,
    Solver,
    Status,
    Termination,
    distance,
)
from loopinterp.models.iteration import (
    Iteration,
    bind,
    computing_dtype,
    in_float32,
    is_coarse,
    need_repeatable,
    rounding_of,
)
from loopinterp.models.protocol import LoopedModel, device_of, need_one_map

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int
    from torch import Tensor


_SOLVERS: dict[str, type[Solver]] = {
    "anderson": Anderson,
    "broyden": Broyden,
    "newton-krylov": NewtonKrylov,
    "picard": Picard,
}


@dataclass(frozen=True, repr=False)
class FixedPoint(ShortRepr):
    """Where a search for a fixed point ended.

    Attributes:
        state: The last finite iterate, shaped like ``x0``.
        residuals: Relative residual of each iterate, starting with ``x0``.
        evaluations: Runs of the map, or products with its Jacobian.
        period: Steps per turn of a cycle, else 0.
    """

    state: Float[Tensor, "*shape"]
    status: Int[Tensor, " batch"]
    residuals: Float[Tensor, "step batch"]
    n_steps: Int[Tensor, " batch"]
    evaluations: Int[Tensor, " batch"]
    period: Int[Tensor, " batch"]

    @property
    def converged(self) -> Bool[Tensor, " batch"]:
        return self.status == Status.CONVERGED

    @property
    def statuses(self) -> list[Status]:
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

    ``f`` treats examples independently. Plain iteration also finds cycles (:attr:`Status.CYCLE`).
    The guide's page "Finding fixed points" compares the solvers.

    Args:
        model: A map that keeps shape and dtype, such as ``bind(model, inputs).step``, or a looped
            model.
        x0: Starting states, ``[batch, ...]`` (a scalar is one example). For a looped model: inputs
            or a batch; the search starts from the initial state, in float32.
        tol: Relative tolerance of the residual, :math:`\|f(x) - x\| \le` ``tol`` :math:`\|f(x)\|` +
            ``atol``, and of returns to a cycle.
        solver: A name of :func:`list_solvers`, or a :class:`Solver`.
        patience: Steps without progress that end the search: no smaller residual, and no return to
            an earlier state. Longer periods than about a third of it need a greater one.
        divergence: Growth of the norm that counts as divergence.

    Source: arXiv 2604.15259.

    Example:
        >>> point = find_fixed_point(lambda x: x / 2 + 1, torch.tensor(0.0))
        >>> round(point.state.item(), 3), point.statuses[0].name
        (2.0, 'CONVERGED')
        >>> logistic = find_fixed_point(lambda x: 3.2 * x * (1 - x), torch.tensor([0.3]))
        >>> logistic.statuses[0].name, logistic.period.item()
        ('CYCLE', 2)
    """
    f, x0 = map_and_start(model, x0)
    limits = {"tol": tol, "atol": atol, "divergence": divergence}
    rule = Termination(**limits, max_iter=max_iter, patience=patience)
    method = get_solver(solver)
    check_finite_state(x0, "x0", fix="Pass x0.float(), or check the embedding of the input.")
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
        watch = _CycleWatch(flat, tol, atol) if method.follows_the_map else None
        while (status == Status.RUNNING).any():
            done = status != Status.RUNNING
            state = replace(state, done=done)
            state = method.step(g, state).keep(state, done)
            n_steps = torch.where(done, n_steps, n_steps + 1)
            now = rule(state)
            if watch is not None:
                turns = watch.see(state.x)
                ended = done | (now == Status.CONVERGED) | (now == Status.DIVERGED)  # [batch]
                on_cycle = (turns > 0) & ~ended
                now.masked_fill_(on_cycle, Status.CYCLE)
                period = torch.where(on_cycle, turns, period)
                if state.n_steps < max_iter:  # patience ends nothing that is coming round again
                    now.masked_fill_(watch.checking & (now == Status.STALLED), Status.RUNNING)
            status = torch.where(done, status, now)
            # The last finite iterate of each example, [batch, size]
            finite = torch.where(state.x.isfinite().all(dim=-1, keepdim=True), state.x, finite)
            residuals.append(state.residual)
        ended = (status == Status.STALLED) | (status == Status.OUT_OF_BUDGET)
        if is_coarse(flat.dtype) and ended.any():
            status[ended & _at_rounding(g, finite)] = int(Status.CONVERGED_TO_ROUNDING)
    residual = torch.stack(residuals)  # [step, batch]
    finite = finite.reshape(x0.shape)
    return FixedPoint(finite, status, residual, n_steps, state.evaluations, period)


def _at_rounding(g: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    limit, stays, moved = rounding_of(x.dtype) * distance(x), torch.ones_like(x[:, 0]) > 0, x
    for _ in range(8):
        moved = g(moved)
        stays &= distance(moved, x) <= limit
    return stays


def list_solvers() -> list[str]:
    """Names of the solvers: anderson, broyden, newton-krylov, picard."""
    return sorted(_SOLVERS)


def get_solver(solver: str | Solver) -> Solver:
    """A solver from its name, with default settings; a solver is returned unchanged."""
    if isinstance(solver, Solver):
        return solver
    if solver not in _SOLVERS:
        raise unknown_name("solver", solver, _SOLVERS)
    return _SOLVERS[solver]()


def iteration_of(model: LoopedModel | Callable[[Tensor], Tensor] | Any, h: Any) -> Iteration | None:
    """A looped model's iteration over inputs (in half precision: in float32); None for a map."""
    if not (isinstance(model, LoopedModel) or hasattr(model, "bind")):
        return None
    inputs = getattr(h, "inputs", h).to(device_of(model))
    need_one_map(model)
    need_repeatable(model, inputs)
    iteration = bind(model, inputs)
    if is_coarse(computing_dtype(iteration.h0)) and (fine := in_float32(model, inputs)) is not None:
        return bind(fine, inputs)
    return iteration


def map_and_start(model: Any, h: Any) -> tuple[Callable[[Tensor], Tensor], Tensor]:
    iteration = iteration_of(model, h)
    return (model, h) if iteration is None else (iteration.step, iteration.h0)


class _CycleWatch:
    r"""Periods of a batch of trajectories, in the memory of one state (Brent's algorithm).

    Iterates are compared with an anchor, which moves at steps 1, 2, 4, 8, ... The first lag at
    which one is back within the tolerance is the candidate period; the next anchor tries it again.
    Slow spirals and drifts also return, but their distance :math:`e_m` to the anchor after
    :math:`m` turns grows (:math:`e_4 = 2 e_2`). A candidate of extent :math:`A` above rounding
    :math:`\epsilon` is a cycle if

    - all future misses sum to less than a tenth of the extent:
      :math:`10\, e_2^2 \le A\,(2 e_2 - e_4 - \epsilon)`; or
    - it misses by no more than rounding, and a thousandth of its extent, for eight turns.

    Source: Brent, 1980 (doi 10.1007/BF01933190).
    """

    def __init__(self, x0: Float[Tensor, "batch size"], tol: float, atol: float) -> None:
        # A trajectory that has returned may miss by 64 rounding errors of the state.
        self.noise = 64 * torch.finfo(x0.dtype).eps
        self.tol, self.atol = max(tol, min(self.noise, 1e-5)), atol
        # In low precision all slow motion is rounded away, so that a wide return counts.
        self.least_extent = min(1000 * self.noise, 0.1)
        self.n_steps = 0
        # Of each example: the candidate period (0: none), [batch]
        self.period = torch.zeros(len(x0), dtype=torch.int64, device=x0.device)
        self._move_anchor(x0)

    def _move_anchor(self, x: Tensor) -> None:
        self.anchor, self.moved_at, self.anchor_norm = x, self.n_steps, distance(x)
        # Of each example: largest distance, distance after two turns, and the largest at a return
        self.extent, self.second, self.worst = (torch.zeros_like(self.anchor_norm) for _ in "123")

    @property
    def checking(self) -> Bool[Tensor, " batch"]:
        return self.period > 0

    def see(self, x: Float[Tensor, "batch size"]) -> Int[Tensor, " batch"]:
        """Add the next iterates; return the period of each cycle, else 0."""
        self.n_steps += 1
        lag = self.n_steps - self.moved_at
        miss = distance(x, self.anchor)  # [batch]
        first_turn = ~self.checking | (lag < self.period)
        self.extent = torch.where(first_turn, torch.maximum(self.extent, miss), self.extent)
        scale = torch.maximum(self.anchor_norm, self.extent)
        near = miss <= self.tol * scale + self.atol
        if lag > 1:  # after one step it would be a fixed point
            self.period = torch.where(near & first_turn, lag, self.period)
        cycles = torch.zeros_like(self.period)
        if self.checking.any():
            cycles = self._turned(miss, near, lag, scale)
        if self.n_steps & (self.n_steps - 1) == 0:
            self._move_anchor(x)
        return cycles

    def _turned(
        self,
        miss: Float[Tensor, " batch"],
        near: Bool[Tensor, " batch"],
        lag: int,
        scale: Float[Tensor, " batch"],
    ) -> Int[Tensor, " batch"]:
        """Judge the candidates that have made full turns; the period of each cycle, else 0."""
        period = self.period.clamp(min=1)
        # Full turns since the anchor, at multiples of the period, else 0, [batch]
        turns = torch.where(self.checking & (lag % period == 0), lag // period, 0)
        returned = turns > 0
        self.worst = torch.where(returned, torch.maximum(self.worst, miss), self.worst)
        self.second = torch.where(turns == 2, miss, self.second)
        shrink = 2 * self.second - miss - self.noise * scale
        arrives = (turns == 4) & (10 * self.second**2 <= self.extent * shrink)
        exact = self.worst <= torch.minimum(self.noise * scale, self.extent / 1000)
        wide = self.extent >= self.least_extent * scale
        last = turns == 8  # the turn after which an exact return counts, and no other does
        cycles = torch.where(near & wide & (arrives | (last & exact)), self.period, 0)
        refused = returned & (~near | last) & (cycles == 0)
        self.period = torch.where(refused, 0, self.period)
        self.worst = torch.where(refused, 0, self.worst)
        return cycles
