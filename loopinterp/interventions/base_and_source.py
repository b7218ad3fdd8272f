"""Base and source of a patch: pairs of inputs, and the score of a patched run between them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from loopinterp.core.errors import (
    HookError,
    InputError,
    describe_tensor,
    need,
    need_distinct,
    unknown_name,
)
from loopinterp.models.addresses import resolve_index
from loopinterp.models.protocol import need_hooks, need_model
from loopinterp.models.study_examples import examples_for, fit_to_model, inputs_and_loops
from loopinterp.tasks.task import IGNORE, Batch, inputs_of

if TYPE_CHECKING:
    import numpy as np
    from jaxtyping import Bool, Float
    from torch import Tensor

    from loopinterp.models.addresses import Address, Index
    from loopinterp.models.run import HookedRun

STATE = "state"
"""The component that is no hook point: the state between loops."""

LOOP = "loop"
"""Coordinate on the axis of layers of components that occur once per loop."""

Metric = Callable[["Tensor"], "Tensor"]
"""Maps logits [batch, pos, d_vocab_out] to one number, or to one for each example [batch]."""


def metric_name(metric: Metric | None, default: str) -> str:
    return default if metric is None else getattr(metric, "__name__", type(metric).__name__)


def metric_values(
    metric: Metric, logits: Float[Tensor, "batch pos d_vocab_out"]
) -> Float[Tensor, "*batch"]:
    """What a caller's metric says of a run: a number, or one for each example."""
    values = metric(logits)
    try:
        numbers = torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError):  # None, or text
        numbers = torch.empty(0, 0)
    expected = f"a number, or one for each example [{len(logits)}]"
    fix = "Take a mean over positions, for instance, or the logits of one of them."
    fits = numbers.shape in ((), logits.shape[:1])
    need(fits, "metric", expected, describe_tensor(values), fix)
    return numbers.double()


class Comparison:
    """Answers and metrics of base and source run, which patched runs are scored against.

    ``differ`` marks the counted positions: ``scored`` (all if None), with different answers.
    """

    def __init__(
        self,
        base: Float[Tensor, "batch pos d_vocab_out"],
        source: Float[Tensor, "batch pos d_vocab_out"],
        scored: Bool[Tensor, "batch pos"] | None,
        metric: Metric | None,
    ) -> None:
        self._base, self._source, self._metric = base.argmax(-1), source.argmax(-1), metric
        self.name = metric_name(metric, "logit difference")
        self.differ = self._base != self._source
        if scored is not None:
            fits = scored.shape == self.differ.shape and scored.dtype == torch.bool
            expected = f"booleans of shape {list(self.differ.shape)}"
            fix = "Pass one boolean for each example and position."
            need(fits, "scored", expected, scored, fix)
            self.differ = self.differ & scored.to(self.differ.device)
        expected, got = "different answers at a scored position", "the same answers throughout"
        fix = "Pass other pairs, or more scored positions."
        need(self.differ.any(), "base and source", expected, got, fix)
        self.at_base, self.at_source = (float(self._metrics(x[None])[0]) for x in (base, source))
        fits = 0 < abs(self.at_source - self.at_base) < math.inf  # NaN is neither
        expected, fix = "different, finite values for base and source", "Pass another metric."
        need(fits, "metric", expected, f"{self.at_base} and {self.at_source}", fix)

    def scores(self, logits: Float[Tensor, "patch batch pos d_vocab_out"]) -> np.ndarray:
        """Recovered share and scaled metric of each patched run, ``[patch, 2]``."""
        source = self._source[self.differ]
        recovered = (logits[:, self.differ].argmax(-1) == source).double().mean(1)  # [patch]
        effect = (self._metrics(logits) - self.at_base) / (self.at_source - self.at_base)
        return torch.stack([recovered, effect.to(recovered)], -1).cpu().numpy()

    def by_example(self, logits: Float[Tensor, "batch pos d_vocab_out"]) -> Float[Tensor, "*batch"]:
        """The metric of each example, with gradients, weighted by the counted positions."""
        if self._metric is not None:
            return metric_values(self._metric, logits)
        # Classes of both answers [batch, pos, 2], and their logits.
        both = torch.stack([self._source, self._base], -1)
        pair = logits.double().gather(-1, both)
        difference = (pair[..., 0] - pair[..., 1]) * self.differ  # [batch, pos]
        return difference.sum(-1) * (len(logits) / int(self.differ.sum()))

    def _metrics(self, logits: Float[Tensor, "run batch pos d_vocab_out"]) -> Float[Tensor, " run"]:
        if self._metric is not None:
            return torch.stack([metric_values(self._metric, x).mean() for x in logits])
        # Logits of the positions that count, [run, answer, class].
        counted = logits[:, self.differ]
        source, base = (
            counted.gather(-1, x[self.differ].expand(len(logits), -1)[..., None])[..., 0].double()
            for x in (self._source, self._base)
        )
        return (source - base).mean(1)


@dataclass(frozen=True)
class Patched:
    name: str  # short
    full: str  # within a layer or loop
    kind: str  # of tensor, as of Address
    per_loop: bool  # occurs once per loop, not in a layer
    n_heads: int | None = None  # None for a component without heads


def patched_component(model: HookedRun, component: str) -> Patched:
    """The component of that name; an InputError if there is none."""
    if component == STATE:
        return Patched(STATE, STATE, "residual", per_loop=True)
    book = model.addresses()
    shorts = {book.short(full): full for full in book.components}
    try:
        full = book.component(component)
    except HookError:
        raise unknown_name("component", component, [*shorts, STATE]) from None
    kind = book.kinds[full]
    n_heads = book.site_map.heads(kind)
    return Patched(book.short(full), full, kind, full in book.per_loop, n_heads)


def hook_place(model: HookedRun, name: str, n_loops: int, **chosen: Index) -> Address | None:
    """The place in the loop of a hook's full name; None for a component's name.

    A full name says where it is, so nothing else of it may be ``chosen``.
    """
    if "." not in name or model.addresses().has(name):
        return None
    book = model.addresses(n_loops)
    place = book.addresses[book.resolve_name(name)]
    if place.section != "block":
        expected, fix = "a hook inside the loop", f"Pass the component, {place.component!r}."
        raise InputError("component", expected=expected, given=repr(name), fix=fix)
    for what, value in chosen.items():
        if value is not None:
            expected, fix = f"None, as {name!r} is one place", "Leave it out, or name a component."
            raise InputError(what, expected=expected, given=repr(value), fix=fix)
    return place


def scored_examples(
    model: Any, data: Any, n_loops: int | None, n: int | None, batch_size: int | None, seed: int
) -> tuple[Tensor, Bool[Tensor, "batch pos"], int]:
    if isinstance(data, torch.Tensor):
        inputs, n_loops = inputs_and_loops(model, data, n_loops)
        return inputs, torch.ones(inputs.shape[:2], dtype=torch.bool, device=inputs.device), n_loops
    batch = examples_for(model, data, n=n, batch_size=batch_size, seed=seed)
    n_loops = _one_end("data", [batch]) if n_loops is None else n_loops
    scored = batch.targets != IGNORE
    if not scored.any(1).all():
        fix = "Pass the inputs alone to count all positions."
        expected = "an asked position in each example"
        raise InputError("data", expected=expected, given="examples without any", fix=fix)
    return batch.inputs, scored, n_loops


def _one_end(what: str, batches: Sequence[Batch]) -> int:
    """The required number of loops of all examples."""
    ends = sorted({end for batch in batches for end in batch.n_loops.tolist()})
    if len(ends) > 1:
        expected = "examples with one required number of loops"
        got = f"numbers from {ends[0]} to {ends[-1]}"
        fix = "Draw them with one n, or pass n_loops=."
        raise InputError(what, expected=expected, given=got, fix=fix)
    return ends[0]


def hooks_by_loop(model: Any, component: str, layer: int | None, n_loops: int) -> list[str]:
    names = model.site(component, loop=slice(None), layer=layer, n_loops=n_loops)
    if len(names) != n_loops:
        most = model.site_map.n_layers - 1
        expected = f"a layer from 0 to {most}"
        fix = f"Pass layer={most}, or a component of the loop."
        raise InputError("layer", expected=expected, given=str(layer), fix=fix)
    return names


def given_pairs(
    model: Any,
    base: Batch | Tensor,
    source: Batch | Tensor,
    n_loops: int | None,
    scored: Bool[Tensor, "batch pos"] | None,
    *,
    component: str,
    other: Tensor | None = None,
) -> tuple[Tensor, Tensor, int, Bool[Tensor, "batch pos"] | None]:
    if not isinstance(base, torch.Tensor):
        base = examples_for(model, base)
    if isinstance(source, Batch):
        source = fit_to_model(model, source)
    batches = [x for x in (base, source) if isinstance(x, Batch)]
    if n_loops is None and batches:
        n_loops = _one_end("base and source", batches)
    inputs, n_loops = inputs_and_loops(model, inputs_of(base), n_loops)
    if scored is None and batches and len({batch.targets.shape for batch in batches}) == 1:
        scored = torch.stack([batch.targets != IGNORE for batch in batches]).all(0)
    need_model(model) if component == STATE else need_hooks(model)
    sources = inputs_of(source)
    for name, x in (("source", sources), ("other", sources if other is None else other)):
        fits = isinstance(x, torch.Tensor) and x.dtype == inputs.dtype and x.shape == inputs.shape
        expected = f"{inputs.dtype} of shape {list(inputs.shape)}, as base has"
        need(fits, name, expected, describe_tensor(x), "Pass pairs of inputs of equal length.")
    return inputs, sources, n_loops, scored


def chosen_loops(loops: Index, n_loops: int) -> list[int]:
    chosen = resolve_index(loops, n_loops, "loop")[0]
    need_distinct("loops", chosen, f"Leave loops out for all of 0 to {n_loops - 1}.")
    return chosen


def chosen_positions(
    positions: str | Tensor | None, base: Tensor
) -> tuple[Bool[Tensor, "place batch pos"], list[int | str]]:
    batch, n_pos = base.shape[:2]
    if positions is None or (isinstance(positions, str) and positions == "all"):
        return torch.ones(1, batch, n_pos, dtype=torch.bool, device=base.device), ["all"]
    each = torch.arange(n_pos, device=base.device)
    if isinstance(positions, str) and positions == "each":
        return (each[:, None] == each)[:, None].expand(-1, batch, -1), each.tolist()
    numbers = positions if isinstance(positions, torch.Tensor) else torch.empty(0)
    # One position of each example, [batch, pos].
    if numbers.dtype == torch.int64 and numbers.shape == (batch,):
        place = each == numbers.to(base.device)[:, None]
        if place.any(1).all():
            return place[None], ["chosen"]
    raise InputError(
        "positions",
        expected=f"'all', 'each', or {batch} integers from 0 to {n_pos - 1} (int64)",
        given=repr(positions) if isinstance(positions, str) else describe_tensor(positions),
        fix="Leave it out, or pass one position for each example.",
    )


def places_of(
    positions: Bool[Tensor, "#batch pos"] | None, x: Float[Tensor, "batch pos *feature"]
) -> Bool[Tensor, "batch pos"]:
    """The positions of an activation that a caller chose; all of them if None."""
    if positions is None:
        return torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
    batch, n_pos = x.shape[:2]
    if positions.dtype != torch.bool or positions.shape not in ((1, n_pos), (batch, n_pos)):
        expected = f"booleans [1 or {batch}, {n_pos}], as the activation has"
        fix = "Pass one boolean for each example and position."
        raise InputError("positions", expected=expected, given=describe_tensor(positions), fix=fix)
    return positions.to(x.device).expand(batch, n_pos)


def unrelated(source: Tensor) -> Tensor:
    """A third input for each pair: the sources, rolled until none meets itself."""
    for distance in range(1, len(source)):
        moved = source.roll(distance, 0)
        if not (moved == source).flatten(1).all(1).any():
            return moved
    raise InputError(
        "other",
        expected="a third input for each pair",
        given="None, and sources that are too few or too similar",
        fix="Pass other=, inputs unrelated to base and source.",
    )
