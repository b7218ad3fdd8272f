"""Heads matched with the selectors of a program."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from pydantic import PositiveInt

from loopinterp.comparison.pair_strategies import check_batch, check_programs
from loopinterp.core.boundary import checked
from loopinterp.core.errors import need
from loopinterp.core.results import Result, study
from loopinterp.core.settings import Seed
from loopinterp.models.protocol import describe_model, device_of, need_hooks
from loopinterp.programs.expressions import selectors as selectors_of
from loopinterp.programs.interpreter import evaluate

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int
    from torch import Tensor

    from loopinterp.models import HookedRun
    from loopinterp.programs.program import LoopProgram
    from loopinterp.tasks.task import Batch, Task

TOLERANCE = 1e-3
"""A head computes a selector from an overlap of 1 minus this."""


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class HeadMatch(Result, kind="head-match"):
    """The result of :func:`match_heads`; NaN where a selector selects nothing.

    Arrays:
        overlap: 1 - total variation distance of a head's attention from even attention to the
            selected keys, mean over examples and selecting queries.
        overlap_even: Control: even attention to all visible keys.
        overlap_by_position: Control: the head's mean attention over examples.
        overlap_other_input: Control: the keys that are selected in another example.
        mass: Mean attention to the selected keys, with the same controls.

    Attributes:
        names: All names of each selector; selectors that coincide on the whole sample are merged.
        computes: The heads that compute each selector: overlap of at least 1 - 1e-3 at every
            selecting loop.
        assigned: Head of each selector in the best one-to-one assignment; "" without one.
    """

    VARIABLES: ClassVar = {
        name: "loop head selector"
        for measure in ("overlap", "mass")
        for name in (measure, *(f"{measure}_{c}" for c in ("even", "by_position", "other_input")))
    }

    names: list[list[str]]
    computes: list[list[str]]
    assigned: list[str]

    @property
    def heads(self) -> list[str]:
        return self.data["head"].values.tolist()

    @property
    def selectors(self) -> list[str]:
        return self.data["selector"].values.tolist()

    @property
    def nothing(self) -> list[str]:
        """Selectors that select nothing."""
        empty = self.data["overlap_even"].isnull().all(("loop", "head"))
        return empty["selector"].values[empty.values].tolist()

    @property
    def everything(self) -> list[str]:
        """Selectors that select all that a head can see."""
        even = self.data["overlap_even"]
        by_head = (even.fillna(1.0) >= 1 - TOLERANCE).all("loop") & even.notnull().any("loop")
        return even["selector"].values[by_head.any("head").values].tolist()


@checked
def match_heads(
    patterns: Float[Tensor, "loop batch head query key"],
    selectors: Mapping[str, Bool[Tensor, "loop batch query key"]],
    *,
    heads: Sequence[str] | None = None,
    visible: Bool[Tensor, "*head query key"] | None = None,
    seed: Seed = 0,
    config: Mapping[str, Any] | None = None,
) -> HeadMatch:
    r"""Overlap of attention with each selector, and the best assignment of heads.

    .. math::
        U_{t,b,q,k} = \frac{S_{t,b,q,k}}{\sum_j S_{t,b,q,j}}, \qquad
        o_{t,h,s} = \operatorname{mean}_{b,q}
            \Bigl(1 - \tfrac12 \sum_k |A_{t,b,h,q,k} - U_{t,b,q,k}|\Bigr), \qquad
        m_{t,h,s} = \operatorname{mean}_{b,q} \sum_k A_{t,b,h,q,k} S_{t,b,q,k}

    over queries q that select a key. Heads are assigned one to one (Hungarian algorithm): first
    those that compute their selector, then for the largest total overlap above even attention.

    Args:
        heads: Name of each head.
        visible: Keys that each query may see; by default those that any head attends to.
        seed, config: Only written to the provenance.

    Example:
        >>> keys = torch.tensor([[0, 0, 1], [0, 1, 0]])
        >>> selector = torch.nn.functional.one_hot(keys, 3).bool()[None]
        >>> match = match_heads(selector[:, :, None].float(), {"lookup": selector})
        >>> match.computes, match.data["overlap"].sel(loop=0).item()
        ([['head 0']], 1.0)
    """
    _check(patterns, selectors)
    patterns = patterns.to(torch.promote_types(patterns.dtype, torch.float32))
    groups: list[tuple[list[str], Tensor]] = []  # selectors that coincide are one
    for name, values in selectors.items():
        same = next((group for group, known in groups if torch.equal(known, values)), None)
        if same is None:
            groups.append(([name], values))
        else:
            same.append(name)
    names = [f"head {h}" for h in range(patterns.shape[2])] if heads is None else list(heads)
    with study(seed, **{"study": "heads", **(config or {})}) as watch:
        if visible is None:
            visible = patterns.amax((0, 1, 2)) > 0
        even = (visible / visible.sum(-1, keepdim=True).clamp(min=1)).expand(patterns.shape[2:])
        cells = [
            [_measure(pattern, even, selector[loop]) for _, selector in groups]
            for loop, pattern in enumerate(patterns)
        ]
        table = {  # [loop, head, selector]
            name: torch.stack([torch.stack([cell[name] for cell in row], -1) for row in cells])
            for name in HeadMatch.VARIABLES
        }
        # A head computes a selector that it matches at every loop at which anything is selected.
        exact = table["overlap"] >= 1 - TOLERANCE
        always = (exact | table["overlap"].isnan()).all(0) & exact.any(0)
        gain = (table["overlap"] - table["overlap_even"]).nanmean(0)
        return HeadMatch.of(
            watch,
            coords={
                "loop": range(len(patterns)),
                "head": names,
                "selector": [" = ".join(group) for group, _ in groups],
            },
            **table,
            names=[group for group, _ in groups],
            computes=[[names[h] for h in column.nonzero().flatten()] for column in always.T],
            assigned=_assign(gain.cpu().numpy(), always.cpu().numpy(), names),
        )


@checked
def head_study(
    model: HookedRun,
    data: Batch | Task,
    programs: Sequence[str | LoopProgram],
    *,
    n: PositiveInt | None = None,
    batch_size: PositiveInt | None = None,
    seed: Seed = 0,
) -> HeadMatch:
    """Match a model's heads with every selector of some programs, by :func:`match_heads`.

    Heads outside the loop, and selectors of ``prepare`` and ``finish``, are compared at every loop.

    Args:
        data: Examples of one length in the programs' tokens, or the task (``batch_size`` of length
            ``n``).
        programs: Such as ``list_programs(task.name)``. Shared selectors are listed once.
    """
    chosen = check_programs(programs)
    need_hooks(model)
    drawn = {"n": n, "batch_size": batch_size, "seed": seed}
    batch = check_batch(model, data, chosen, needs_targets=False, **drawn).to(device_of(model))
    inputs, n_loops = batch.inputs, int(batch.n_loops.max())
    selectors: dict[str, Bool[Tensor, "loop batch query key"]] = {}
    for program in chosen:
        trace = program.trace(inputs, n_loops=n_loops)
        at_the_end = {name: values[-1] for name, values in trace.variables.items()}
        once = dict(trace.prepare_selectors)
        for name, select in selectors_of([program.finish]).items():
            # The same selection in ``step`` reads the variables as they were before each loop.
            unique = f"finish.{name}" if select.variables and name in trace.selectors else name
            once[unique] = evaluate(select, inputs, at_the_end)
        every = {name: values.expand(n_loops, *values.shape) for name, values in once.items()}
        for name, values in [*trace.selectors.items(), *every.items()]:
            known = selectors.get(name)
            if known is None or not torch.equal(known, values):
                selectors[name if known is None else f"{program.name}.{name}"] = values
    patterns, heads = _patterns(model, inputs, n_loops)
    n_pos, sizes = inputs.shape[1], model.site_map
    visible = model.visible(n_pos).expand(sizes.n_heads, n_pos, n_pos)
    visible = visible.repeat(sizes.layers_total(1), 1, 1)  # [layer head, query, key]
    about = {"seed": seed, "config": {"model": describe_model(model)}}
    return match_heads(patterns, selectors, heads=heads, visible=visible, **about)


@torch.no_grad()
def _patterns(
    model: HookedRun, inputs: Int[Tensor, "batch pos"], n_loops: int
) -> tuple[Float[Tensor, "loop batch head query key"], list[str]]:
    pattern = "attn.hook_pattern"
    _, cache = model.run_with_cache(inputs, n_loops=n_loops, names_filter=pattern)
    sizes, patterns, heads = model.site_map, [], []
    sections = {"prelude": sizes.n_prelude, "block": sizes.n_layers, "coda": sizes.n_coda}
    for section, layer in ((name, k) for name, count in sections.items() for k in range(count)):
        if section == "block":
            patterns.append(cache.stack(pattern, layer=layer))
        else:
            once = cache[f"{section}.{layer}.{pattern}"]  # [batch, head, query, key]
            patterns.append(once.expand(n_loops, *once.shape))
        heads += [
            head_name(section, layer, head, n_layers=sizes.n_layers)
            for head in range(sizes.n_heads)
        ]
    return torch.cat(patterns, dim=2), heads


def head_name(section: str, layer: int, head: int, *, n_layers: int) -> str:
    """A head's name in results; without its layer if the block has one.

    Example:
        >>> [head_name("block", 0, 3, n_layers=n) for n in (1, 2)]
        ['head 3', 'head 0.3']
    """
    if section != "block":
        return f"{section} {layer}.{head}"
    return f"head {head}" if n_layers == 1 else f"head {layer}.{head}"


def _measure(
    pattern: Float[Tensor, "batch head query key"],
    even: Float[Tensor, "head query key"],
    selector: Bool[Tensor, "batch query key"],
) -> dict[str, Float[Tensor, " head"]]:
    average, even = pattern.mean(0, keepdim=True), even.to(pattern)[None]  # [1, head, query, key]
    selected = selector.to(pattern)[:, None]  # [batch, 1, query, key]
    count = selected.sum(-1, keepdim=True)
    uniform, queries = selected / count.clamp(min=1), count[..., 0] > 0  # and [batch, 1, query]

    def mean(name: str, attention: Tensor, shift: int = 0) -> Float[Tensor, " head"]:
        target = (selected if name == "mass" else uniform).roll(shift, 0)
        if name == "mass":
            score = (attention * target).sum(-1)
        else:
            score = 1 - (attention - target).abs().sum(-1) / 2
        here = queries.roll(shift, 0)
        return torch.where(here, score, 0).sum((0, 2)) / here.sum().to(score)

    means = {}
    for name in ("mass", "overlap"):
        means |= {
            name: mean(name, pattern),
            f"{name}_even": mean(name, even),
            f"{name}_by_position": mean(name, average),
            f"{name}_other_input": mean(name, pattern, shift=1),
        }
    return means


def _assign(gain: np.ndarray, exact: np.ndarray, heads: list[str]) -> list[str]:
    """The head of each selector, one to one, for the largest total gain [head, selector].

    Heads that compute a selector go first.
    """
    from scipy.optimize import linear_sum_assignment

    known = np.flatnonzero(~np.isnan(gain).any(0))
    bonus = 2 * min(gain.shape) + 1  # a gain lies between -1 and 1
    rows, columns = linear_sum_assignment((gain + bonus * exact)[:, known], maximize=True)
    head_of = dict(zip(known[columns].tolist(), rows.tolist()))
    return [heads[head_of[s]] if s in head_of else "" for s in range(gain.shape[1])]


def _check(patterns: Tensor, selectors: Mapping[str, Tensor]) -> None:
    expected, fix = "a tensor [loop, batch, head, query, key]", "Pass cache.stack(hook) of a run."
    is_tensor = isinstance(patterns, torch.Tensor)
    need(is_tensor and patterns.ndim == 5, "patterns", expected, patterns, fix)
    loops, batch, _, query, key = patterns.shape
    expected = "at least one selector and two examples"
    got = f"{len(selectors)} selectors and {batch} examples"
    fix = "Pass trace.selectors of a program, and more examples."
    need(selectors and batch >= 2, "selectors and patterns", expected, got, fix)
    shape = [loops, batch, query, key]
    fix = "Trace the program on the same inputs for the same number of loops."
    for name, selector in selectors.items():
        expected, got = f"shape {shape}, as the patterns have", list(selector.shape)
        need(got == shape, f"selector {name!r}", expected, str(got), fix)
