"""Which head computes which selector of a program."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch

from loopinterp.circuits.comparison_inputs import check_batch, check_programs
from loopinterp.errors import InputError
from loopinterp.models.looped_model import need_hooks
from loopinterp.models.model_description import describe_model, device_of
from loopinterp.rasp.expr import selectors as selectors_of
from loopinterp.rasp.interpreter import evaluate
from loopinterp.results import Result, study

if TYPE_CHECKING:
    import xarray as xr
    from jaxtyping import Bool, Float, Int
    from torch import Tensor

    from loopinterp.models import HookedRun
    from loopinterp.rasp.program import LoopProgram
    from loopinterp.tasks.task import Batch, Task

_PATTERN = "attn.hook_pattern"

TOLERANCE = 1e-3
"""A head computes a selector whose overlap with its attention falls short of 1 by no more."""


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class HeadMatch(Result, kind="head-match"):
    """What :func:`match_heads` returns. Values are NaN where a selector selects nothing.

    Arrays:
        overlap: Overlap (1 - total variation distance) of each head's attention with attention
            spread evenly over the keys that the selector selects, over examples and over queries
            that select any. 1 only for a head that looks at exactly those keys, evenly.
        overlap_even: Control: the same if each query spread its attention evenly over the keys
            that the head lets it see.
        overlap_by_position: Control: the same if the head looked in every example as it does on
            average; as high as ``overlap`` where attention does not depend on the input.
        overlap_other_input: Control: overlap with what is selected in another example.
        mass: Mean attention of each head to the keys that the selector selects. Near 1 also for
            a head that looks at some of those keys only.
        mass_even: The control ``overlap_even``, for ``mass``; and so on for the others.

    Attributes:
        names: All names of each selector: those that coincide on the whole sample are one.
        computes: The heads that compute each selector: overlap of at least 1 - 1e-3 at every loop
            at which it selects anything.
        assigned: Head of each selector under the best one-to-one assignment over all loops (""
            where there are more selectors than heads, or nothing is selected).
    """

    VARIABLES: ClassVar[Mapping[str, str]] = {
        name: "loop head selector"
        for measure in ("overlap", "mass")
        for name in (measure, *(f"{measure}_{c}" for c in ("even", "by_position", "other_input")))
    }

    names: list[list[str]]
    computes: list[list[str]]
    assigned: list[str]

    @property
    def heads(self) -> list[str]:
        """Name of each head."""
        return self.data["head"].values.tolist()

    @property
    def selectors(self) -> list[str]:
        """Name of each selector; of those that coincide on the whole sample, all names."""
        return self.data["selector"].values.tolist()

    @property
    def empty(self) -> list[str]:
        """The selectors that select nothing at any query of the sample."""
        return self._where(self.data["overlap_even"].isnull().all(("loop", "head")))

    @property
    def everything(self) -> list[str]:
        """The selectors that select all that a head can see: what it looks at when idle."""
        even = self.data["overlap_even"]
        everything = (even.fillna(1.0) >= 1 - TOLERANCE).all("loop") & even.notnull().any("loop")
        return self._where(everything.any("head"))

    def _where(self, chosen: xr.DataArray) -> list[str]:
        return chosen["selector"].values[chosen.values].tolist()


def match_heads(
    patterns: Float[Tensor, "loop batch head query key"],
    selectors: Mapping[str, Bool[Tensor, "loop batch query key"]],
    *,
    heads: Sequence[str] | None = None,
    visible: Bool[Tensor, "*head query key"] | None = None,
    seed: int = 0,
    config: Mapping[str, Any] | None = None,
) -> HeadMatch:
    r"""Overlap of attention with what each selector selects, and the best assignment of heads.

    .. math::
        U_{t,b,q,k} = \frac{S_{t,b,q,k}}{\sum_j S_{t,b,q,j}}, \qquad
        o_{t,h,s} = \operatorname{mean}_{b,q}
            \Bigl(1 - \tfrac12 \sum_k |A_{t,b,h,q,k} - U_{t,b,q,k}|\Bigr), \qquad
        m_{t,h,s} = \operatorname{mean}_{b,q} \sum_k A_{t,b,h,q,k} S_{t,b,q,k}

    over queries q that select at least one key. Heads are assigned to selectors one to one so
    that the most selectors get a head that computes them, and the total of overlap above that of
    even attention is largest (Hungarian algorithm).

    Args:
        patterns: Attention patterns.
        selectors: Name -> selector at the same loops, examples and positions.
        heads: Name of each head.
        visible: Keys that each query may see, for all heads or for each; by default those that
            any head ever looks at.
        seed: Written to the provenance; nothing is drawn.
        config: Written to the provenance.

    Raises:
        InputError: patterns without these five axes, no selector, fewer than two examples, or
            shapes that do not fit.

    Example:
        >>> keys = torch.tensor([[0, 0, 1], [0, 1, 0]])
        >>> selector = torch.nn.functional.one_hot(keys, 3).bool()[None]
        >>> found = match_heads(selector[:, :, None].float(), {"lookup": selector})
        >>> found.computes, found.data["overlap"].sel(loop=0).item()
        ([['head 0']], 1.0)
    """
    _check(patterns, selectors)
    patterns = patterns.to(torch.promote_types(patterns.dtype, torch.float32))
    groups = _merge(selectors)
    names = [f"head {h}" for h in range(patterns.shape[2])] if heads is None else list(heads)
    with study(seed, **{"study": "heads", **(config or {})}) as watch:
        if visible is None:
            visible = patterns.amax((0, 1, 2)) > 0
        even = (visible / visible.sum(-1, keepdim=True).clamp(min=1)).expand(patterns.shape[2:])
        cells = [
            [_measure(pattern, even, selector[loop]) for _, selector in groups]
            for loop, pattern in enumerate(patterns)
        ]
        table = {
            name: torch.stack([torch.stack([cell[name] for cell in row], -1) for row in cells])
            for name in HeadMatch.VARIABLES
        }
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


def head_study(
    model: HookedRun,
    data: Batch | Task,
    programs: Sequence[str | LoopProgram],
    *,
    n: int | None = None,
    batch_size: int | None = None,
    seed: int = 0,
) -> HeadMatch:
    """:func:`match_heads` of a model, against every selector of the programs.

    Heads of the prelude, the block and the coda are all matched with the selectors of
    ``prepare``, ``step`` and ``finish``: a selection of ``step`` that reads no variable may be
    made once for all loops. What is done once (heads of prelude and coda, selectors of
    ``prepare`` and of ``finish`` after the last loop) is compared at every loop.

    Args:
        model: The model.
        data: Examples of one length in the programs' token format, on the model's device, or the
            task to draw them from.
        programs: The programs, such as ``list_programs(task.name)``. Selectors that programs
            share are listed once.
        n: Problem length, where a task is given; see :func:`~loopinterp.tasks.as_batch`.
        batch_size: Examples, where a task is given.
        seed: Seed of what is drawn.

    Raises:
        InputError: what is no model, no batch or no list of programs, or tokens that a program
            does not know.
    """
    chosen = check_programs(programs)
    need_hooks(model)
    batch = check_batch(model, data, chosen, asked=False, n=n, batch_size=batch_size, seed=seed)
    batch = batch.to(device_of(model))
    n_loops = int(batch.n_loops.max())
    selectors: dict[str, Tensor] = {}
    for program in chosen:
        for name, values in _selectors(program, batch.inputs, n_loops):
            known = selectors.get(name)
            if known is None or not torch.equal(known, values):
                selectors[name if known is None else f"{program.name}.{name}"] = values
    patterns, heads = _patterns(model, batch.inputs, n_loops)
    n_pos, sizes = batch.inputs.shape[1], model.site_map
    # Layer by layer, as the patterns come.
    visible = model.visible(n_pos).expand(sizes.n_heads, n_pos, n_pos)
    visible = visible.repeat(sizes.layers_total(1), 1, 1)
    return match_heads(
        patterns,
        selectors,
        heads=heads,
        visible=visible,
        seed=seed,
        config={"model": describe_model(model)},
    )


def _selectors(
    program: LoopProgram, tokens: Tensor, n_loops: int
) -> Iterator[tuple[str, Bool[Tensor, "loop batch query key"]]]:
    """Every selector of a program at every loop, by name."""
    trace = program.trace(tokens, n_loops=n_loops)
    yield from trace.selectors.items()
    at_the_end = {name: values[-1] for name, values in trace.variables.items()}
    once = dict(trace.prepare_selectors)
    for name, select in selectors_of([program.finish]).items():
        # The same selection in ``step`` reads the variables as they were before each loop.
        own = f"finish.{name}" if select.variables and name in trace.selectors else name
        once[own] = evaluate(select, tokens, at_the_end)
    for name, values in once.items():
        yield name, values.expand(n_loops, *values.shape)


@torch.no_grad()
def _patterns(
    model: HookedRun, inputs: Int[Tensor, "batch pos"], n_loops: int
) -> tuple[Float[Tensor, "loop batch head query key"], list[str]]:
    """Patterns of all heads, those of prelude and coda at every loop; and the heads' names."""
    _, cache = model.run_with_cache(inputs, n_loops=n_loops, names_filter=_PATTERN)
    sizes, patterns, heads = model.site_map, [], []
    sections = {"prelude": sizes.n_prelude, "block": sizes.n_layers, "coda": sizes.n_coda}
    for section, n_layers in sections.items():
        for layer in range(n_layers):
            if section == "block":
                patterns.append(cache.stack(_PATTERN, layer=layer))
            else:
                once = cache[f"{section}.{layer}.{_PATTERN}"]
                patterns.append(once.expand(n_loops, *once.shape))
            heads += [
                head_name(section, layer, head, n_layers=sizes.n_layers)
                for head in range(sizes.n_heads)
            ]
    return torch.cat(patterns, dim=2), heads


def head_name(section: str, layer: int, head: int, *, n_layers: int) -> str:
    """What results call a head.

    Args:
        section: ``prelude``, ``block`` or ``coda``.
        layer: Its layer inside that section.
        head: Its index inside that layer.
        n_layers: Layers of the tied block; the layer is left out where there is but one.

    Example:
        >>> [head_name("block", 0, 3, n_layers=n) for n in (1, 2)]
        ['head 3', 'head 0.3']
        >>> head_name("coda", 0, 3, n_layers=1)
        'coda 0.3'
    """
    if section != "block":
        return f"{section} {layer}.{head}"
    return f"head {head}" if n_layers == 1 else f"head {layer}.{head}"


def _merge(selectors: Mapping[str, Tensor]) -> list[tuple[list[str], Tensor]]:
    """Selectors with all their names: those that coincide are one."""
    groups: list[tuple[list[str], Tensor]] = []
    for name, values in selectors.items():
        same = next((group for group, known in groups if torch.equal(known, values)), None)
        if same is None:
            groups.append(([name], values))
        else:
            same.append(name)
    return groups


def _measure(
    pattern: Float[Tensor, "batch head query key"],
    even: Float[Tensor, "head query key"],
    selector: Bool[Tensor, "batch query key"],
) -> dict[str, Tensor]:
    """Every array of the result, of one selector at one loop: [head]."""
    average, alike = pattern.mean(0, keepdim=True), even.to(pattern)[None]
    chosen = selector.to(pattern)
    count = chosen.sum(-1, keepdim=True)
    queries, uniform = count[..., 0] > 0, chosen / count.clamp(min=1)
    found = {}
    for what, score, target in (("mass", _mass, chosen), ("overlap", _overlap, uniform)):
        found |= {
            what: _mean(score(pattern, target), queries),
            f"{what}_even": _mean(score(alike, target), queries),
            f"{what}_by_position": _mean(score(average, target), queries),
            f"{what}_other_input": _mean(score(pattern, target.roll(1, 0)), queries.roll(1, 0)),
        }
    return found


def _mass(pattern: Tensor, chosen: Tensor) -> Float[Tensor, "batch head query"]:
    return (pattern * chosen[:, None]).sum(-1)


def _overlap(pattern: Tensor, uniform: Tensor) -> Float[Tensor, "batch head query"]:
    return 1 - (pattern - uniform[:, None]).abs().sum(-1) / 2


def _mean(
    values: Float[Tensor, "batch head query"], queries: Bool[Tensor, "batch query"]
) -> Float[Tensor, " head"]:
    """Mean over examples and counted queries; NaN where none counts."""
    total = torch.where(queries[:, None], values, 0).sum((0, 2))
    return total / queries.sum().to(total)


def _assign(gain: np.ndarray, exact: np.ndarray, heads: list[str]) -> list[str]:
    """The head of each selector, one to one, for the largest total gain [head, selector].

    A head that computes a selector goes before any gain that could be had instead: selectors that
    ask at different queries would else draw heads away from one another.
    """
    from scipy.optimize import linear_sum_assignment

    known = np.flatnonzero(~np.isnan(gain).any(0))
    before_all = 2 * min(gain.shape) + 1  # a gain lies between -1 and 1
    worth = (gain + before_all * exact)[:, known]
    rows, columns = linear_sum_assignment(worth, maximize=True)
    found = dict(zip(known[columns].tolist(), rows.tolist()))
    return [heads[found[s]] if s in found else "" for s in range(gain.shape[1])]


def _check(patterns: Tensor, selectors: Mapping[str, Tensor]) -> None:
    if not isinstance(patterns, torch.Tensor) or patterns.ndim != 5:
        tensor = isinstance(patterns, torch.Tensor)
        raise InputError(
            "patterns",
            expected="a tensor [loop, batch, head, query, key]",
            given=f"shape {list(patterns.shape)}" if tensor else type(patterns).__name__,
            fix="Pass cache.stack('attn.hook_pattern') of a run.",
        )
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
