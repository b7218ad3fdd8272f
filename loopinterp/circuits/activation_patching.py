"""Activation patching over the loop axis: which activation carries the answer, at which loop."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from einops import rearrange, repeat

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
from loopinterp.errors import check_integer
from loopinterp.models.iteration import iterate
from loopinterp.models.looped_model import bind
from loopinterp.models.model_description import describe_model
from loopinterp.progress import track
from loopinterp.results import study

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int
    from torch import Tensor

    from loopinterp.models.sites import Index
    from loopinterp.tasks.task import Batch

_AT_A_TIME = 1024
"""Examples in one run of the model, over which patches are run side by side."""


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
    any disturbance does. Loops before the patch are not run again.

    Args:
        model: A ``LoopedTransformer``; for ``state``, any looped model.
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
        bound = [bind(model, x) for x in inputs]
        runs = [torch.stack([h for _, h in own.run(n_loops)]) for own in bound]
        ends = [own.read(run[-1], n_loops) for own, run in zip(bound, runs)]
        compared = Comparison(ends[0], ends[1], scored, metric)
        sweep = _Sweep(model, inputs, torch.stack(runs), chosen, compared, n_loops, what)
        block = sweep.states_after(wanted) if of_state else sweep.block(wanted)
        around = {} if what.per_loop else sweep.around()
        return PatchingSweep.of(
            watch,
            coords={
                "loop": wanted,
                "layer": [what.axis] if what.per_loop else range(model.config.n_layers),
                "head": range(model.config.n_heads) if what.by_head else ["all"],
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
        chosen: Where each patch is made.
        compared: Scores a patched run.
        n_loops: Loops of a run.
        what: What is patched.
    """

    model: Any
    inputs: tuple[Tensor, Tensor, Tensor]
    states: Tensor
    chosen: Bool[Tensor, "place batch pos"]
    compared: Comparison
    n_loops: int
    what: Patched

    def states_after(self, wanted: list[int]) -> np.ndarray:
        """Patches of the state [measure, loop, 1, 1, place]."""
        found = [self._patch(None, t, self.states[1:, t]) for t in wanted]
        return np.stack(found, axis=1)[:, :, None]

    def block(self, wanted: list[int]) -> np.ndarray:
        """Patches inside the loop [measure, loop, layer, head, place]."""
        return np.stack([self._patches(BLOCK, t, t + 1) for t in wanted], axis=1)

    def around(self) -> dict[str, np.ndarray]:
        """Patches before and after the loop [measure, layer, head, place], where there are any."""
        found = {}
        if self.model.config.n_prelude:
            found[PRELUDE] = self._patches(PRELUDE, None, 0)
        if self.model.config.n_coda:
            found[CODA] = self._patches(CODA, self.n_loops, None)
        return found

    def _patches(self, section: str, start: int | None, stop: int | None) -> np.ndarray:
        """Every patch in the layers of a section [measure, layer, head, place].

        Args:
            section: The prelude, the coda, or the block at loop ``start``.
            start: First loop that has to be run; None to start from the input.
            stop: The loop before which all layers have run; None for the readout.
        """
        found = self.model.site(
            self.what.name,
            section=section,
            loop=start if section == BLOCK else None,
            layer=None if self.what.per_loop else slice(None),
            n_loops=self.n_loops,
        )
        names = [found] if isinstance(found, str) else found
        caches = [
            self.model.run_with_cache(
                inputs,
                n_loops=self.n_loops,
                names_filter=names,
                start_at_loop=start or 0,
                stop_at_loop=stop,
                state=None if start is None else states[start],
                return_type="logits" if stop is None else "state",
            )[1]
            for inputs, states in zip(self.inputs[1:], self.states[1:])
        ]
        patched = [
            self._patch(name, start, torch.stack([cache[name] for cache in caches]))
            for name in names
        ]
        return np.stack(patched, axis=1)

    def _patch(self, name: str | None, start: int | None, donors: Tensor) -> np.ndarray:
        """Every patch at one site [measure, head, place].

        Args:
            name: The hook; None for the state that the run starts from.
            start: First loop that has to be run again; None to start from the input.
            donors: Activations of the two donors [donor, batch, ...].
        """
        masks = self._masks()
        scores: list[tuple[float, float]] = []
        parts = torch.arange(2 * len(masks)).split(max(1, _AT_A_TIME // len(self.inputs[0])))
        for part in track(parts, "patch"):
            mask = masks[part % len(masks)].flatten(0, 1)
            donor = donors[part // len(masks)].flatten(0, 1)
            logits = self._run(name, start, mask, donor, len(part))
            scores += [self.compared.score(one) for one in logits.chunk(len(part))]
        return rearrange(
            np.array(scores),
            "(donor head place) measure -> (donor measure) head place",
            donor=2,
            place=len(self.chosen),
        )

    def _masks(self) -> Bool[Tensor, "patch batch pos ..."]:
        """What each patch replaces; heads in order, and positions of each head."""
        if not self.what.by_head:
            return self.chosen[..., None]
        n_heads = self.model.config.n_heads
        head = torch.eye(n_heads, dtype=torch.bool, device=self.chosen.device)
        masks = self.chosen[..., None] & head[:, None, None, None]  # [patched, place, …, pos, head]
        masks = masks.mT if self.what.kind == "pattern" else masks
        return masks.flatten(0, 1)[..., None]

    def _run(
        self, name: str | None, start: int | None, mask: Tensor, donor: Tensor, copies: int
    ) -> Float[Tensor, "row pos d_vocab_out"]:
        """Logits of as many copies of the base's run, each with its patch."""

        def put(activation: Tensor, hook: object = None) -> Tensor:
            return torch.where(mask, donor, activation)

        def copied(x: Tensor) -> Tensor:
            return repeat(x, "batch ... -> (copy batch) ...", copy=copies)

        inputs, state = copied(self.inputs[0]), None
        if start is not None:
            state = copied(self.states[0, start])
            if name is None:
                *_, (_, last) = iterate(self.model, inputs, self.n_loops - start, state=put(state))
                return self.model.readout(last)
        return self.model.run_with_hooks(
            inputs,
            n_loops=self.n_loops,
            start_at_loop=start or 0,
            state=state,
            fwd_hooks=[(name, put)],
        )
