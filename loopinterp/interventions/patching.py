"""Activation patching: which activation carries the answer, at which loop."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from einops import rearrange

from loopinterp.core.boundary import Loops, checked
from loopinterp.core.errors import InputError, check_integer
from loopinterp.core.results import Result, study, tidy
from loopinterp.core.settings import Seed
from loopinterp.core.text import track
from loopinterp.interventions.base_and_source import (
    LOOP,
    STATE,
    Comparison,
    Metric,
    Patched,
    chosen_loops,
    chosen_positions,
    given_pairs,
    hook_place,
    patched_component,
    unrelated,
)
from loopinterp.interventions.light_cone import Change, LightCone
from loopinterp.models.iteration import bind
from loopinterp.models.protocol import describe_model, reach
from loopinterp.models.taps import ChangingTaps, Taps

if TYPE_CHECKING:
    import pandas as pd
    import xarray as xr
    from jaxtyping import Bool, Float, Int
    from torch import Tensor

    from loopinterp.models.addresses import Index
    from loopinterp.tasks.task import Batch


_PRELUDE, BLOCK, _CODA = "prelude", "block", "coda"

MEASURES = ("recovered", "effect", "control_recovered", "control_effect")

_AT_A_TIME = 128  # examples in a batch: more do not fit into the processor's cache


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class PatchingSweep(Result, kind="activation-patching"):
    """The result of :func:`patching_sweep`.

    Axes that the sweep does not vary have length 1. ``loop`` is the index of a loop; for the state,
    the number of loops done.

    Arrays:
        recovered: Share of the counted answers that equal the source's after the patch.
        effect: The metric after the patch, scaled to 0 in the base's run and 1 in the source's.
        control_recovered: Control: ``recovered`` after the same patch from a third input.
        control_effect: Control: ``effect`` after that patch.
        prelude_recovered: Of the layers before the loop, without a loop axis; likewise the other
            measures, and the coda.

    Attributes:
        metric: Name of the metric; ``metric_base`` and ``metric_source`` are of the clean runs.
        n_examples: Pairs of inputs.
        n_scored: Counted answers: scored, and different in the two clean runs.
    """

    VARIABLES: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(MEASURES, "loop layer head pos"),
        **{f"{s}_{m}": f"{s}_layer head pos" for s in (_PRELUDE, _CODA) for m in MEASURES},
    }
    OPTIONAL: ClassVar[frozenset[str]] = frozenset(VARIABLES) - frozenset(MEASURES)

    component: str
    metric: str
    metric_base: float
    metric_source: float
    n_examples: int
    n_scored: int

    @property
    def by_head(self) -> bool:
        """Whether heads were patched one by one."""
        return self.data["head"].values.tolist() != ["all"]

    @property
    def by_layer(self) -> bool:
        """Whether the component is in layers; otherwise it occurs once per loop."""
        return self.data["layer"].values.tolist() not in ([LOOP], [STATE])

    def to_dataframe(self, *names: str) -> pd.DataFrame:
        """Some arrays; by default a row for each patch, with its section."""
        import pandas as pd

        if names:
            return super().to_dataframe(*names)
        around = self.around()
        sections = {_PRELUDE: around.get(_PRELUDE), BLOCK: self.data, _CODA: around.get(_CODA)}
        frames = []
        for section, measures in sections.items():
            if measures is not None:
                frame = tidy({name: measures[name] for name in MEASURES})
                frames.append(frame.assign(section=section))
        order = ["section", "loop", "layer", "head", "pos", *MEASURES]
        table = pd.concat(frames, ignore_index=True).astype({"loop": "Int64"})
        return table.reindex(columns=order)

    def around(self) -> dict[str, xr.Dataset]:
        """The measures of the layers outside the loop, by section."""
        return {
            section: self.data[[f"{section}_{name}" for name in MEASURES]].rename(
                {f"{section}_layer": "layer"} | {f"{section}_{name}": name for name in MEASURES}
            )
            for section in (_PRELUDE, _CODA)
            if f"{section}_{MEASURES[0]}" in self.data
        }


@torch.no_grad()
@checked
def patching_sweep(
    model: Any,
    base: Batch | Tensor,
    source: Batch | Tensor,
    *,
    n_loops: Loops | None = None,
    component: str = "resid_pre",
    positions: str | Int[Tensor, " _"] | None = None,
    scored: Bool[Tensor, "_ _"] | None = None,
    metric: Metric | None = None,
    other: Tensor | None = None,
    loops: Index = None,
    heads: Sequence[int] | None = None,
    seed: Seed = 0,
) -> PatchingSweep:
    r"""Put one activation of the source's run into the base's run, place by place (denoising).

    With answers :math:`y = \mathrm{argmax}` of the logits, and P the scored positions with
    different answers in the two runs,

    .. math::
        \text{recovered} = \operatorname{mean}_P [y_\text{patched} = y_\text{source}], \qquad
        \text{effect} = \frac{M_\text{patched} - M_\text{base}}{M_\text{source} - M_\text{base}}

    where the metric M is by default the logit of the source's answer less that of the base's, mean
    over P. The control is the same patch from a third input.

    Args:
        model: A ``LoopedTransformer``, or an adapter; for ``state``, any looped model.
        base: A batch, or inputs alone: tokens ``[batch, pos]``, or features.
        source: As many inputs of the same length.
        n_loops: Loops of the whole run; T(n) by default, required for inputs alone.
        component: A hook point of a layer or loop (``resid_pre``, ``attn_out``, ``state_pre`` …),
            of heads (``z``, ``q``, ``pattern`` …) head by head; or ``state``, after t = 0 ..
            n_loops loops. A full name (``loops.3.blocks.0.attn.hook_z``) patches that place alone.
        positions: None or ``"all"`` at once, ``"each"`` one at a time, integers ``[batch]`` one of
            each example. For patterns and scores: query positions.
        scored: Positions ``[batch, pos]`` whose answers count; by default the asked ones, or all of
            inputs alone.
        metric: Another metric, from logits of all positions to a number or ``[batch]``.
        other: The third inputs; by default the sources, rolled until none meets itself.
        loops: Loops to patch; all by default. Layers outside the loop are always patched.
        heads: Heads to patch at once, of a component of heads; by default each by itself.
        seed: Recorded in the provenance; nothing is drawn.

    Raises:
        InputError: If base and source have equal answers, or a name or place is unknown.

    Source: the normalised metric of arXiv 2211.00593 and of TransformerLens.

    Example:
        >>> from loopinterp.models import LoopedTransformer, LoopedTransformerConfig
        >>> config = LoopedTransformerConfig(d_model=16, n_heads=2, d_vocab=5, d_vocab_out=2)
        >>> base, source = torch.randint(5, (2, 8, 4), generator=torch.Generator().manual_seed(0))
        >>> sweep = patching_sweep(LoopedTransformer(config), base, source, n_loops=3)
        >>> sweep.data["recovered"].sel(layer=0, head="all", pos="all").values.tolist()
        [1.0, 1.0, 1.0]
    """
    base, source, n_loops, scored = given_pairs(
        model, base, source, n_loops, scored, component=component, other=other
    )
    place = hook_place(model, component, n_loops, loops=loops)
    if place is not None:
        component, loops = place.component, [place.loop or 0]
    target = patched_component(model, component)
    groups, head_names = _head_groups(target, heads, base.device)
    third = unrelated(source) if other is None else other
    places, place_names = chosen_positions(positions, base)
    of_state = target.name == STATE
    chosen = chosen_loops(loops, check_integer("n_loops", n_loops, least=1) + of_state)
    about = {"study": "patching", "component": target.name, "n_loops": n_loops}
    with study(seed, **about, model=describe_model(model), n_examples=len(base)) as watch:
        inputs = (base, source, third)
        # Patterns are those of all pairs of positions.
        bound = [bind(model, x) if of_state else model.bind(x, all_pairs=True) for x in inputs]
        runs = [torch.stack([h for _, h in iteration.run(n_loops)]) for iteration in bound]
        ends = [iteration.read(run[-1], n_loops) for iteration, run in zip(bound, runs)]
        comparison = Comparison(ends[0], ends[1], scored, metric)
        keep_keys = target.kind != "pattern" or reach(model) is None
        sweep = _Sweep(
            model=model,
            inputs=inputs,
            states=torch.stack(runs),
            cone=LightCone(model, bound[0], runs[0], keep_keys=keep_keys),
            logits=ends[0],
            places=places,
            comparison=comparison,
            target=target,
            groups=groups,
        )
        layers = range(0 if target.per_loop else model.site_map.n_layers)
        layers = [place.layer] if place is not None and layers else [*layers]
        block = sweep.block(chosen, layers or [None])
        around = {} if target.per_loop or place is not None else sweep.around()
        no_layer = STATE if of_state else LOOP
        return PatchingSweep.of(
            watch,
            coords={
                "loop": chosen,
                "layer": layers or [no_layer],
                "head": head_names,
                "pos": place_names,
                **{f"{section}_layer": range(x.shape[1]) for section, x in around.items()},
            },
            **dict(zip(MEASURES, block)),
            **{f"{section}_{m}": v for section, x in around.items() for m, v in zip(MEASURES, x)},
            component=target.name,
            metric=comparison.name,
            metric_base=comparison.at_base,
            metric_source=comparison.at_source,
            n_examples=len(base),
            n_scored=int(comparison.differ.sum()),
        )


def _head_groups(
    target: Patched, heads: Sequence[int] | None, device: torch.device
) -> tuple[Bool[Tensor, "group head"], Sequence[int | str]]:
    """The heads that are patched together, and a name for each group."""
    n_heads = target.n_heads
    if heads is None:
        each = torch.eye(n_heads or 1, dtype=torch.bool, device=device)
        return each, ["all"] if n_heads is None else range(n_heads)
    if n_heads is None or not heads:
        raise InputError(
            "heads",
            expected="at least one head of a component of heads",
            given=f"{list(heads)} of {target.name!r}",
            fix="Leave it out, or patch z, q, k, v or pattern.",
        )
    chosen = {check_integer("heads", h, least=-n_heads, most=n_heads - 1) % n_heads for h in heads}
    group = torch.zeros(1, n_heads, dtype=torch.bool, device=device)
    group[0, sorted(chosen)] = True
    return group, ["+".join(map(str, sorted(chosen)))]


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class _Sweep:
    """The runs of a sweep; makes and scores its patches."""

    model: Any
    inputs: tuple[Tensor, Tensor, Tensor]  # of the base, the source, and the control's third run
    states: Float[Tensor, "input loops batch pos d_model"]
    cone: LightCone  # of the base's runs
    logits: Float[Tensor, "batch pos d_vocab_out"]  # at their end
    places: Bool[Tensor, "place batch pos"]
    comparison: Comparison
    target: Patched
    groups: Bool[Tensor, "group head"]  # the heads of each patch; one of a component without heads

    def block(
        self, loops: list[int], layers: Sequence[int | None]
    ) -> Float[np.ndarray, "measure loop layer head place"]:
        """Patches of the state or inside the loop, with 256 MiB of activations at a time."""
        if self.target.name == STATE:
            patched = self._side_by_side(loops, self.states[:, loops].transpose(0, 1))
            return patched[:, :, None]
        key = BLOCK, 0, None if self.target.per_loop else 0, self.target.full
        size = 3 * math.prod(self.model.addresses(1).at[key].shape(*self.places.shape[1:]))
        at_a_time, by_part = max(1, 2**26 // size), []
        for first in range(0, len(loops), at_a_time):
            part, by_layer = loops[first : first + at_a_time], []
            for layer in layers:
                names = [self._name(BLOCK, t, layer) for t in part]
                values = self._activations(names, min(part), max(part) + 1)
                by_layer.append(self._side_by_side(part, values, (BLOCK, layer)))
            by_part.append(np.stack(by_layer, axis=2))
        return np.concatenate(by_part, axis=1)

    def around(self) -> dict[str, Float[np.ndarray, "measure layer head place"]]:
        n_loops, sections = self.states.shape[1] - 1, {}
        for section, start, n_layers in (
            (_PRELUDE, 0, self.model.site_map.n_prelude),
            (_CODA, n_loops, self.model.site_map.n_coda),
        ):
            names = [self._name(section, None, k) for k in range(n_layers)]
            if names:
                values = self._activations(names, start, None if start else 0)
                patched = [self._with_hook(*each, start) for each in zip(names, values[:, 1:])]
                sections[section] = np.stack(patched, axis=1)
        return sections

    def _name(self, section: str, loop: int | None, layer: int | None) -> str:
        n_loops = self.states.shape[1] - 1
        return self.model.site(
            self.target.name, section=section, loop=loop, layer=layer, n_loops=n_loops
        )

    def _activations(
        self, names: list[str], start: int, stop: int | None
    ) -> Float[Tensor, "name input batch ..."]:
        caches = [
            self.model.run_with_cache(
                inputs,
                n_loops=self.states.shape[1] - 1,
                names_filter=names,
                start_at_loop=start,
                stop_at_loop=stop,
                state=states[start] if start else None,
                return_type="logits" if stop is None else "state",
            )[1]
            for inputs, states in zip(self.inputs, self.states)
        ]
        return torch.stack([torch.stack([cache[name] for cache in caches]) for name in names])

    def _with_hook(
        self, name: str, sources: Float[Tensor, "source batch ..."], start: int
    ) -> Float[np.ndarray, "measure head place"]:
        """Patches of a layer outside the loop, with full runs."""
        n_loops, masks = self.states.shape[1] - 1, self.places[..., None]  # [place, batch, pos, 1]
        if self.target.n_heads is not None:
            # [group patched, place, batch, pos, head]; of patterns [..., head, query].
            masks = masks & self.groups[:, None, None, None]
            masks = masks.mT if self.target.kind == "pattern" else masks
            masks = masks.flatten(0, 1)[..., None]  # groups in order, and the places of each
        scores = []
        parts = torch.arange(2 * len(masks)).split(max(1, _AT_A_TIME // len(self.inputs[0])))
        for part in track(parts, "patch"):
            mask = masks[part % len(masks)].flatten(0, 1)
            source = sources[part // len(masks)].flatten(0, 1)

            def put(x: Tensor, hook: object, m: Tensor = mask, s: Tensor = source) -> Tensor:
                return torch.where(m, s, x)

            logits = self.model.run_with_hooks(
                self.inputs[0].repeat(len(part), *[1] * (self.inputs[0].ndim - 1)),
                n_loops=n_loops,
                start_at_loop=start,
                state=self.states[0, start].repeat(len(part), 1, 1) if start else None,
                fwd_hooks=[(name, put)],
            )
            scores.append(self.comparison.scores(logits.unflatten(0, (len(part), -1))))
        axes = "(source head place) measure -> (source measure) head place"
        return rearrange(np.concatenate(scores), axes, source=2, place=len(self.places))

    def _side_by_side(
        self,
        loops: list[int],
        values: Float[Tensor, "loop input batch ..."],
        layer_key: tuple[str, int | None] | None = None,
    ) -> Float[np.ndarray, "measure loop head place"]:
        """Patches of one site (None: the state), similar positions together."""
        places = self.places
        # Where a source differs from the clean activation, [loop, source, batch, pos, head].
        differs = (values[:, 1:] != values[:, :1]).any(-1)
        if self.target.kind == "pattern":
            differs = differs.mT  # by query
        elif self.target.n_heads is None:
            differs = differs[..., None]
        # [loop, source, batch, pos, group]
        differs = (differs[..., None, :] & self.groups).any(-1)
        shape = len(loops), 2, len(self.groups), len(places)
        patches = torch.cartesian_prod(*map(torch.arange, shape))
        order = (patches[:, 3] * len(loops) + patches[:, 0]).argsort(stable=True)
        # A cone holds about a third of the positions that are held without one.
        n_rows = _AT_A_TIME if self.cone.reach is None else 3 * _AT_A_TIME
        batch, device = places.shape[1], places.device
        scores = np.empty((len(patches), 2))
        for part in track(order.split(max(1, n_rows // batch)), "patch"):
            part = part[patches[part, 0].argsort(stable=True)]  # in the order of their loops
            # One row per patch and run of the batch.
            row = torch.arange(batch).repeat(len(part)).to(device)
            loop, source, head, place = (
                x.repeat_interleave(batch).to(device) for x in patches[part].unbind(1)
            )
            positions = places[place, row]
            # A patch with the clean activation is not run.
            active = (differs[loop, source, row, :, head] & positions).any(1)
            logits = self.logits.repeat(len(part), 1, 1)
            if bool(active.any()):
                chosen = (x[active] for x in (loop, source, head, row, positions))
                logits[active] = self._patched(loops, values[:, 1:], layer_key, *chosen)
            logits = logits.unflatten(0, (len(part), batch))
            scores[part.numpy()] = self.comparison.scores(logits)
        axes = "loop source head place measure -> (source measure) loop head place"
        return rearrange(scores.reshape(*shape, 2), axes)

    def _patched(
        self,
        loops: list[int],
        sources: Float[Tensor, "loop source batch ..."],
        layer_key: tuple[str, int | None] | None,
        loop: Int[Tensor, " row"],
        source: Int[Tensor, " row"],
        head: Int[Tensor, " row"],
        row: Int[Tensor, " row"],
        positions: Bool[Tensor, "row pos"],
    ) -> Float[Tensor, "row pos d_vocab_out"]:
        device, n_pos = positions.device, positions.shape[1]
        has_heads, is_attention = self.target.n_heads is not None, self.target.kind == "pattern"
        first, back = positions.int().argmax(1), positions.flip(1).int().argmax(1)

        def put(new: slice, place: Int[Tensor, "row place"], x: Tensor) -> Tensor:
            inside = place.clamp(max=n_pos - 1)
            here = positions[new].gather(1, inside) & (place < n_pos)
            index = loop[new, None], source[new, None], row[new, None]
            heads = self.groups[head[new]]  # [row, head]
            if is_attention:  # x is [row, head, query, key]
                square = x.shape[-1] == x.shape[-2]
                keys = inside if square else torch.arange(n_pos, device=device)[None]
                index = tuple(each[:, :, None] for each in index)
                values = sources[(*index, slice(None), inside[:, :, None], keys[:, None])]
                values, here = values.movedim(-1, 1), here[:, None, :, None]
                if square:  # keys past the end are none
                    here = here & (place < n_pos)[:, None, None]
                here = here & heads[:, :, None, None]
            else:  # x is [row, pos, feature] or [row, pos, head, feature]
                values, here = sources[(*index, inside)], here[:, :, None]
                here = here[..., None] & heads[:, None, :, None] if has_heads else here
            return torch.where(here, values, x)

        def within(new: slice, place: Tensor) -> Taps:
            def change(x: Tensor) -> Tensor:  # rows that begin are the last ones
                patched = put(new, place, x[new])
                return torch.cat([x[: new.start], patched]) if new.start else patched

            assert layer_key is not None
            return ChangingTaps({layer_key: {self.target.full: change}})

        change = Change(state=put) if layer_key is None else Change(within=within)
        done = torch.tensor(loops, device=device)[loop]
        front = self.cone.finish(row, done, first, n_pos - 1 - back, change)
        return self.cone.read(front, row, self.logits)
