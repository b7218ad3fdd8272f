"""Which head computes which selector of a program."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch

from loopinterp.errors import InputError
from loopinterp.rasp.registry import get_program, list_programs
from loopinterp.results import Figure, Finding, Result, study

if TYPE_CHECKING:
    from jaxtyping import Bool, Float
    from torch import Tensor

    from loopinterp.models import LoopedTransformer
    from loopinterp.rasp.program import LoopProgram
    from loopinterp.tasks.task import Batch

_AXES = ("loop", "head", "selector")


@dataclass(frozen=True, kw_only=True)
class HeadMatch(Result):
    """What :func:`match_heads` returns.

    Attributes:
        mass: Mean attention of each head to the keys that the selector selects, over examples
            and over queries that select any.
        even: Control: the same if each query spread its attention evenly over the keys that it
            can see [loop, selector].
        by_position: Control: the same if the head looked in every example as it does on average;
            as high as ``mass`` where attention does not depend on the input.
        other_input: Control: mass on the keys selected in another example.
        heads: Name of each head.
        selectors: Name of each selector.
        loops: Index of each loop.
        assigned: Head of each selector under the best one-to-one assignment over all loops ("" if
            there are more selectors than heads).
        assigned_by_loop: The same, loop by loop.
    """

    AXES: ClassVar[dict[str, tuple[str, ...]]] = {
        "mass": _AXES,
        "even": ("loop", "selector"),
        "by_position": _AXES,
        "other_input": _AXES,
    }

    mass: np.ndarray
    even: np.ndarray
    by_position: np.ndarray
    other_input: np.ndarray
    heads: list[str]
    selectors: list[str]
    loops: list[int]
    assigned: list[str]
    assigned_by_loop: list[list[str]]

    def figures(self) -> list[Figure]:
        from loopinterp.circuits.figures import head_figures

        return head_figures(self)

    def summary(self) -> list[Finding]:
        """The best match of a head and a selector, against even attention."""
        gain = np.nanmean(self.mass - self.even[:, None], axis=0)
        head, selector = np.unravel_index(int(np.nanargmax(gain)), gain.shape)
        mass = float(np.nanmean(self.mass[:, head, selector]))
        even = float(np.nanmean(self.even[:, selector]))
        text = (
            f"Of {len(self.heads)} heads, {self.heads[head]} looks most where the selector "
            f"“{self.selectors[selector]}” points: {mass:.0%} of its attention over all loops, "
            f"against {even:.0%} if attention were spread evenly."
        )
        return [Finding(kind="program", text=text, value=f"{mass:.0%}")]


def match_heads(
    patterns: Float[Tensor, "loop batch head query key"],
    selectors: Mapping[str, Bool[Tensor, "loop batch query key"]],
    *,
    heads: Sequence[str] | None = None,
    seed: int = 0,
    config: Mapping[str, Any] | None = None,
) -> HeadMatch:
    r"""Attention mass on what each selector selects, and the best assignment of heads.

    .. math:: m_{t,h,s} = \operatorname{mean}_{b,q} \sum_k A_{t,b,h,q,k} S_{t,b,q,k}

    over queries q that select at least one key. Heads are assigned to selectors one to one so
    that the total of mass above even attention is largest (Hungarian algorithm).

    Args:
        patterns: Attention patterns.
        selectors: Name -> selector at the same loops, examples and positions.
        heads: Name of each head.
        seed: Written to the provenance; nothing is drawn.
        config: Written to the provenance.

    Raises:
        InputError: no selector, fewer than two examples, or shapes that do not fit.
    """
    loops, _, n_heads = patterns.shape[:3]
    _check(patterns, selectors)
    names = [f"head {h}" for h in range(n_heads)] if heads is None else list(heads)
    with study(seed, **{"study": "heads", **(config or {})}) as watch:
        reachable = (patterns.amax((0, 1, 2)) > 0).to(patterns)
        average = patterns.mean(1, keepdim=True)
        columns: dict[str, list[Tensor]] = {"mass": [], "even": [], "by": [], "other": []}
        for selector in selectors.values():
            chosen = selector.to(patterns)
            queries = chosen.any(-1).to(patterns)
            shifted = chosen.roll(1, 1)
            seen = chosen * reachable
            even = seen.sum(-1) / reachable.sum(-1).clamp(min=1)
            columns["mass"].append(_mean((patterns * chosen[:, :, None]).sum(-1), queries))
            columns["by"].append(_mean((average * chosen[:, :, None]).sum(-1), queries))
            columns["other"].append(
                _mean((patterns * shifted[:, :, None]).sum(-1), queries.roll(1, 1))
            )
            columns["even"].append(_mean(even[:, :, None], queries)[:, 0])
        table = {name: torch.stack(parts, -1).cpu().numpy() for name, parts in columns.items()}
        gain = table["mass"] - table["even"][:, None]
        return HeadMatch(
            provenance=watch.provenance(),
            mass=table["mass"],
            even=table["even"],
            by_position=table["by"],
            other_input=table["other"],
            heads=names,
            selectors=list(selectors),
            loops=list(range(loops)),
            assigned=_assign(np.nanmean(gain, axis=0), names),
            assigned_by_loop=[_assign(one, names) for one in gain],
        )


def head_study(
    model: LoopedTransformer,
    batch: Batch,
    programs: Sequence[str | LoopProgram] | None = None,
    *,
    seed: int = 0,
) -> HeadMatch:
    """:func:`match_heads` of a model, against every selector of the programs.

    Args:
        model: The model.
        batch: Examples of one length in the programs' token format, on the model's device.
        programs: The programs; by default all of addition. Selectors that programs share are
            listed once.
        seed: Written to the provenance.
    """
    from loopinterp.probing.states import describe_model

    named = list_programs("addition") if programs is None else programs
    chosen = [get_program(p) if isinstance(p, str) else p for p in named]
    n_loops = int(batch.n_loops.max())
    selectors: dict[str, Tensor] = {}
    for program in chosen:
        trace = program.trace(batch.inputs, n_loops=n_loops)
        for name in trace.selectors:
            values = trace.selectors[name]
            if not any(torch.equal(values, known) for known in selectors.values()):
                selectors[name if name not in selectors else f"{program.name}.{name}"] = values
    with torch.no_grad():
        _, cache = model.run_with_cache(
            batch.inputs, n_loops=n_loops, names_filter="attn.hook_pattern"
        )
    layers = range(model.config.n_layers)
    patterns = torch.cat([cache.stack("attn.hook_pattern", layer=k) for k in layers], dim=2)
    many = len(layers) > 1
    heads = [
        f"head {k}.{h}" if many else f"head {h}"
        for k in layers
        for h in range(patterns.shape[2] // len(layers))
    ]
    return match_heads(
        patterns, selectors, heads=heads, seed=seed, config={"model": describe_model(model)}
    )


def _mean(values: Float[Tensor, "loop batch head query"], queries: Tensor) -> Tensor:
    """Mean over examples and counted queries, [loop, head]; NaN where none counts."""
    count = queries.sum((1, 2))[:, None]
    total = (values * queries[:, :, None]).sum((1, 3))
    return torch.where(count > 0, total / count.clamp(min=1), torch.nan)


def _assign(gain: np.ndarray, heads: list[str]) -> list[str]:
    """The head of each selector, one to one, for the largest total gain [head, selector]."""
    from scipy.optimize import linear_sum_assignment

    rows, columns = linear_sum_assignment(np.nan_to_num(gain), maximize=True)
    found = dict(zip(columns.tolist(), rows.tolist()))
    return [heads[found[s]] if s in found else "" for s in range(gain.shape[1])]


def _check(patterns: Tensor, selectors: Mapping[str, Tensor]) -> None:
    loops, batch, _, query, key = patterns.shape
    if not selectors or batch < 2:
        raise InputError(
            "selectors and patterns",
            expected="at least one selector and two examples",
            given=f"{len(selectors)} selectors and {batch} examples",
            fix="Pass trace.selectors of a program, and more examples.",
        )
    for name, selector in selectors.items():
        if selector.shape != (loops, batch, query, key):
            raise InputError(
                f"selector {name!r}",
                expected=f"shape {[loops, batch, query, key]}, as the patterns have",
                given=str(list(selector.shape)),
                fix="Trace the program on the same inputs for the same number of loops.",
            )
