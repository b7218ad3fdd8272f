"""Activation patching over the loop axis: which activation carries the answer, at which loop."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from einops import rearrange

from loopinterp.circuits.activation_patching_inputs import (
    Comparison,
    Metric,
    Patched,
    check_run,
    chosen_loops,
    chosen_positions,
    given_pairs,
    patched_component,
    unrelated,
)
from loopinterp.circuits.activation_patching_result import (
    BLOCK,
    CODA,
    MEASURES,
    PRELUDE,
    STATE,
    PatchingSweep,
)
from loopinterp.circuits.causal_cone import CausalCone
from loopinterp.circuits.side_by_side_patches import SideBySide
from loopinterp.errors import check_integer
from loopinterp.models.looped_model import bind
from loopinterp.models.model_description import describe_model, reach
from loopinterp.progress import track
from loopinterp.results import study

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int
    from torch import Tensor

    from loopinterp.models.sites import Index
    from loopinterp.tasks.task import Batch

_AT_A_TIME = 128
"""Examples in one run of the model, over which patches are run side by side.

More of them at once stay in no cache.
"""

_KEPT = 2**26
"""Numbers of donors that are kept at a time: 256 MiB."""


@torch.no_grad()
def patching_sweep(
    model: Any,
    base: Batch | Tensor,
    source: Batch | Tensor,
    *,
    n_loops: int | None = None,
    component: str = "resid_pre",
    positions: str | Int[Tensor, " _"] | None = None,
    scored: Bool[Tensor, "_ _"] | None = None,
    metric: Metric | None = None,
    other: Tensor | None = None,
    loops: Index = None,
    seed: int = 0,
) -> PatchingSweep:
    r"""Put one activation of the source's run into the base's run, place by place.

    Patching as it is done for denoising: the run of ``base`` goes on with the source's activation
    at one (loop, layer, head, position). With answers :math:`y = \mathrm{argmax}` of the logits,
    and P the positions that are scored and that the two runs answer differently,

    .. math::
        \text{recovered} = \operatorname{mean}_P [y_\text{patched} = y_\text{source}], \qquad
        \text{effect} = \frac{M_\text{patched} - M_\text{base}}{M_\text{source} - M_\text{base}}

    where M is the metric: by default the logit of the source's answer less that of the base's,
    mean over P. The control is the same patch out of the run of a third input: how much of this
    any disturbance does. What a patch cannot change is not run again: loops before it, and
    positions that it does not reach (:mod:`loopinterp.circuits.causal_cone`).

    Args:
        model: A ``LoopedTransformer``, or an adapter; for ``state``, any looped model.
        base: A batch, or inputs alone: tokens ``[batch, pos]``, or features.
        source: As many inputs of the same length, pair by pair.
        n_loops: Loops of the whole run; T(n) by default, to be given with inputs alone, or where
            examples are of several lengths.
        component: Any hook point of a layer or of a loop, by its short or full name: ``resid_pre``,
            ``attn_out``, ``ln2.hook_normalized``, ``state_pre`` …; those of heads (``z``, ``q``,
            ``pattern`` …) head by head. Or ``state``: the state after t loops, t = 0 .. n_loops.
        positions: None patches all positions at once, ``"each"`` one at a time, a tensor
            ``[batch]`` one position of each example. Of patterns and scores, those of queries.
        scored: Positions ``[batch, pos]`` whose answers count; by default those at which the
            batches ask for something, or all of inputs alone.
        metric: Another metric, from the logits of all positions to a number or ``[batch]``.
        other: The third inputs; by default the sources moved by one example (or by more, if one
            of them would meet itself).
        loops: Loops to patch; all by default. Layers around the loop are patched in any case.
        seed: Written to the provenance; nothing is drawn.

    Raises:
        InputError: inputs that do not fit each other, an unknown component, a loop or a position
            out of range, or pairs that the model does not tell apart.

    Source: the normalised metric is that of arXiv 2211.00593 and of TransformerLens' patching.

    Example:
        >>> from loopinterp.models import LoopedTransformer, LoopedTransformerConfig
        >>> config = LoopedTransformerConfig(d_model=16, n_heads=2, d_vocab=5, d_vocab_out=2)
        >>> base, source = torch.randint(5, (2, 8, 4), generator=torch.Generator().manual_seed(0))
        >>> found = patching_sweep(LoopedTransformer(config), base, source, n_loops=3)
        >>> found.data["recovered"].sel(layer=0, head="all", pos="all").values.tolist()
        [1.0, 1.0, 1.0]
    """
    base, source, n_loops, scored = given_pairs(model, base, source, n_loops, scored)
    check_run(model, base, source, other, component)
    what = patched_component(model, component)
    third = unrelated(source) if other is None else other
    chosen, places = chosen_positions(positions, base)
    of_state = what.name == STATE
    wanted = chosen_loops(loops, check_integer("n_loops", n_loops, least=1) + of_state)
    about = {"study": "patching", "component": what.name, "n_loops": n_loops}
    with study(seed, **about, model=describe_model(model), n_examples=len(base)) as watch:
        inputs = (base, source, third)
        # Patterns are those of all pairs of positions.
        whole = {} if of_state else {"whole": True}
        bound = [model.bind(x, **whole) if whole else bind(model, x) for x in inputs]
        runs = [torch.stack([h for _, h in own.run(n_loops)]) for own in bound]
        ends = [own.read(run[-1], n_loops) for own, run in zip(bound, runs)]
        compared = Comparison(ends[0], ends[1], scored, metric)
        keep = what.kind != "pattern" or reach(model) is None
        cone = CausalCone(model, bound[0], runs[0], keep_keys=keep)
        sweep = _Sweep(model, inputs, torch.stack(runs), cone, ends[0], chosen, compared, what)
        block = sweep.block(wanted)
        around = {} if what.per_loop else sweep.around()
        return PatchingSweep.of(
            watch,
            coords={
                "loop": wanted,
                "layer": [what.axis] if what.per_loop else range(model.site_map.n_layers),
                "head": range(what.n_heads) if what.n_heads else ["all"],
                "pos": places,
                **{f"{section}_layer": range(x.shape[1]) for section, x in around.items()},
            },
            **dict(zip(MEASURES, block)),
            **{f"{section}_{m}": v for section, x in around.items() for m, v in zip(MEASURES, x)},
            component=what.name,
            metric=compared.name,
            metric_base=compared.at_base,
            metric_source=compared.at_source,
            n_examples=len(base),
            n_scored=int(compared.differ.sum()),
        )


@dataclass(frozen=True, eq=False, repr=False)
class _Sweep:
    """Everything that the patches of one sweep share.

    Attributes:
        model: The model.
        inputs: Those of the run that is patched, of the source, and the control's third ones.
        states: The states of their runs [input, loop, batch, pos, d_model].
        cone: The runs that are patched.
        logits: What is read at their end.
        chosen: Where each patch is made.
        compared: Scores a patched run.
        what: What is patched.
    """

    model: Any
    inputs: tuple[Tensor, Tensor, Tensor]
    states: Tensor
    cone: CausalCone
    logits: Float[Tensor, "batch pos d_vocab_out"]
    chosen: Bool[Tensor, "place batch pos"]
    compared: Comparison
    what: Patched

    def block(self, wanted: list[int]) -> np.ndarray:
        """Patches of the state, or inside the loop [measure, loop, layer, head, place]."""
        layers = [None] if self.what.per_loop else range(self.model.site_map.n_layers)
        at_a_time = max(1, _KEPT // self._size())
        parts = [wanted[k : k + at_a_time] for k in range(0, len(wanted), at_a_time)]
        found = [np.stack([self._site(some, k) for k in layers], axis=2) for some in parts]
        return np.concatenate(found, axis=1)

    def around(self) -> dict[str, np.ndarray]:
        """Patches before and after the loop [measure, layer, head, place], where there are any."""
        n_loops, found = self.states.shape[1] - 1, {}
        for section, start, layers in (
            (PRELUDE, 0, self.model.site_map.n_prelude),
            (CODA, n_loops, self.model.site_map.n_coda),
        ):
            names = [self._name(section, None, k) for k in range(layers)]
            if names:
                held = self._held(names, start, None if start else 0)
                patched = [self._hooked(*one, start) for one in zip(names, held[:, 1:])]
                found[section] = np.stack(patched, axis=1)
        return found

    def _name(self, section: str, loop: int | None, layer: int | None) -> str:
        n_loops = self.states.shape[1] - 1
        site = self.model.site
        return site(self.what.name, section=section, loop=loop, layer=layer, n_loops=n_loops)

    def _size(self) -> int:
        """Numbers of one loop that are held of the run and both donors."""
        if self.what.name == STATE:
            return 1  # they are there in any case
        address = self.model.addresses(1).at[
            BLOCK, 0, None if self.what.per_loop else 0, self.what.full
        ]
        return 3 * math.prod(address.shape(*self.chosen.shape[1:]))

    def _held(self, names: list[str], start: int, stop: int | None) -> Tensor:
        """Activations [name, run, batch, ...] of a part of the run, and of those of the donors."""
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

    def _site(self, loops: list[int], layer: int | None) -> np.ndarray:
        """Patches of one site [measure, loop, head, place]."""
        if self.what.name == STATE:
            site, held = None, self.states[:, loops].transpose(0, 1)
        else:
            site = self.what.full, (BLOCK, 0, layer)
            names = [self._name(BLOCK, t, layer) for t in loops]
            held = self._held(names, min(loops), max(loops) + 1)
        patches = SideBySide(
            cone=self.cone,
            own=held[:, 0],
            donors=held[:, 1:],
            loops=loops,
            chosen=self.chosen,
            n_heads=self.what.n_heads,
            site=site,
            attention=self.what.kind == "pattern",
        )
        found = np.empty((math.prod(patches.shape), 2))
        for some, logits in track(patches.logits(self.logits, _AT_A_TIME), "patch"):
            found[some.numpy()] = self.compared.scores(logits)
        axes = "loop donor head place measure -> (donor measure) loop head place"
        return rearrange(found.reshape(*patches.shape, 2), axes)

    def _hooked(self, name: str, donors: Tensor, start: int) -> np.ndarray:
        """Patches of a layer before the loop or after it [measure, head, place], run in full."""
        masks, n_loops = self._masks(), self.states.shape[1] - 1
        found = []
        parts = torch.arange(2 * len(masks)).split(max(1, _AT_A_TIME // len(self.inputs[0])))
        for part in track(parts, "patch"):
            mask = masks[part % len(masks)].flatten(0, 1)
            donor = donors[part // len(masks)].flatten(0, 1)

            def put(
                activation: Tensor, hook: object, m: Tensor = mask, d: Tensor = donor
            ) -> Tensor:
                return torch.where(m, d, activation)

            logits = self.model.run_with_hooks(
                self.inputs[0].repeat(len(part), *[1] * (self.inputs[0].ndim - 1)),
                n_loops=n_loops,
                start_at_loop=start,
                state=self.states[0, start].repeat(len(part), 1, 1) if start else None,
                fwd_hooks=[(name, put)],
            )
            found.append(self.compared.scores(logits.unflatten(0, (len(part), -1))))
        axes = "(donor head place) measure -> (donor measure) head place"
        return rearrange(np.concatenate(found), axes, donor=2, place=len(self.chosen))

    def _masks(self) -> Bool[Tensor, "patch batch pos ..."]:
        """What each patch replaces; heads in order, and positions of each head."""
        if self.what.n_heads is None:
            return self.chosen[..., None]
        head = torch.eye(self.what.n_heads, dtype=torch.bool, device=self.chosen.device)
        masks = self.chosen[..., None] & head[:, None, None, None]  # [patched, place, …, pos, head]
        masks = masks.mT if self.what.kind == "pattern" else masks
        return masks.flatten(0, 1)[..., None]
