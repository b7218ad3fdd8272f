"""Ablation over loops, layers, heads and positions: what a model answers without a part of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from loopinterp.circuits.ablated_parts import (
    Part,
    Site,
    check_kinds,
    chosen_parts,
    chosen_places,
    chosen_spans,
)
from loopinterp.circuits.ablation_result import MEASURES, AblationStudy
from loopinterp.circuits.ablation_values import MeanOver, reference_values
from loopinterp.circuits.activation_patching_result import BLOCK
from loopinterp.circuits.subspaces import random_change
from loopinterp.errors import check_integer
from loopinterp.intervals import mean_estimate, wilson_estimate
from loopinterp.models.looped_model import need_hooks
from loopinterp.models.model_description import describe_model
from loopinterp.models.taps import Taps
from loopinterp.progress import track
from loopinterp.results import study
from loopinterp.study_examples import examples_for, need_classes
from loopinterp.tasks.study_data import need_asked
from loopinterp.tasks.task import IGNORE

if TYPE_CHECKING:
    from jaxtyping import Bool, Float
    from torch import Tensor

    from loopinterp.models.sites import Index
    from loopinterp.tasks.task import Batch, Task

Changes = dict[Site, Callable[["Tensor"], "Tensor"]]


def _nothing(loop: int) -> Changes:
    """No change at any loop."""
    return {}


@torch.no_grad()
def ablation_study(
    model: Any,
    data: Batch | Task,
    *,
    components: Sequence[str] = ("z", "mlp_out"),
    neurons: Mapping[str, Sequence[int]] | None = None,
    together: bool = False,
    kinds: Sequence[str] = ("zero", "mean", "resample"),
    when: Sequence[str] = ("all", "one"),
    loops: Index = None,
    positions: Literal["each"] | None = None,
    mean_over: MeanOver = "position",
    n: int | None = None,
    batch_size: int | None = None,
    seed: int = 0,
) -> AblationStudy:
    r"""Run a model without one part of it, at some loops, and see what is still right.

    The activation x of the part becomes

    .. math::
        x' = 0, \qquad x' = \bar x_{t,p}, \qquad x' = x_{t,p}(\text{another example})

    (``zero``, ``mean``, ``resample``), where the mean and the other example are of the undisturbed
    run at the same loop t. The control of each is noise of equal norm: ``x + r`` with a random r as
    long as ``x' - x``, at each position and of each head. It says what any disturbance of that size
    does there, whatever it takes away.

    Args:
        model: A ``LoopedTransformer``, or an adapter. Layers around its loop are left as they are.
        data: A batch, or a task to draw one from. Each example is read after its own T(n).
        components: Hook points inside a layer: those of heads (``z``, ``q`` …) head by head, those
            of the stream (``attn_out``, ``mlp_out``) and of the MLP (``post``) as a whole.
        neurons: Groups of neurons of each layer's MLP by name, ablated in ``mlp.hook_post``.
        together: Ablate all of these parts at once too.
        kinds: Some of ``zero``, ``mean`` and ``resample``.
        when: ``all`` loops; ``one`` loop at a time; ``from`` a loop on; ``upto`` a loop, which is
            the last.
        loops: The loops that the last three speak of; all by default.
        positions: None ablates all positions at once, ``"each"`` one at a time.
        mean_over: Means are over the examples of the batch, padding included: at the same
            ``position``, of the same input ``token`` at any position, or over ``all`` positions.
        n: Length of examples to draw.
        batch_size: How many; 64 by default.
        seed: Seed of the examples, of the pairing of ``resample``, and of the noise.

    Raises:
        InputError: an unknown component, kind or loop, one without effect, or no model with hooks.

    Source: on zero, mean and resample ablation, arXiv 2309.16042 and arXiv 2404.15255.

    Example:
        >>> from loopinterp.rasp import compile_program
        >>> from loopinterp.tasks import Addition
        >>> found = ablation_study(
        ...     compile_program("ripple", max_length=5).model, Addition(), n=4, when=("all",))
        >>> found.reference("exact_match").values.tolist()[0]
        1.0
    """
    need_hooks(model)
    batch = examples_for(model, data, n=n, batch_size=batch_size, seed=seed)
    need_asked(batch)
    need_classes(model, batch)
    check_integer("data, n_loops", int(batch.n_loops.max()), least=1, fix="Ask after a loop.")
    check_kinds(kinds, len(batch))
    parts = chosen_parts(model, components, neurons, together=together)
    spans = chosen_spans(when, loops, int(batch.n_loops.max()))
    places, named = chosen_places(positions, batch.inputs)
    about = {"study": "ablation", "components": list(components), "mean_over": mean_over}
    with study(seed, **about, model=describe_model(model), n_examples=len(batch)) as watch:
        runs = _Runs(model, batch, {site for part in parts for site in part.where})
        generator = torch.Generator().manual_seed(seed)
        given = reference_values(runs.kept, batch.inputs, kinds, mean_over, generator)
        shape = (len(parts), len(kinds), len(spans), len(places), 2)
        found = {name: np.empty((*shape, len(batch))) for name in MEASURES}
        for cell in track(list(np.ndindex(*shape)), "ablate"):
            part, kind, span, place, control = cell
            noise = generator if control else None
            changes = _changes_of(parts[part], given[kinds[int(kind)]], places[place], noise)
            for name, values in runs.measure(spans[span][1], changes).items():
                found[name][cell] = values
        measured = {name: _estimate(name, values) for name, values in found.items()}
        return AblationStudy.of(
            watch,
            coords={
                "part": [part.name for part in parts],
                "ablation": list(kinds),
                "when": [name for name, _ in spans],
                "pos": named,
            },
            **{name: values[..., 0, :] for name, values in measured.items()},
            **{f"control_{name}": values[..., 1, :] for name, values in measured.items()},
            **{f"reference_{name}": _estimate(name, x) for name, x in runs.measure().items()},
            spans=[[span.start, span.stop - 1] for _, span in spans],
            mean_over=mean_over,
            n_examples=len(batch),
        )


class _Runs:
    """The undisturbed run of a batch, and runs that go on from it with changes.

    Args:
        model: The model.
        batch: Examples.
        sites: Components and layers whose activations are kept.

    Attributes:
        kept: They, at each loop of the undisturbed run, ``[loop, batch, ...]``.
    """

    def __init__(self, model: Any, batch: Batch, sites: Iterable[Site]) -> None:
        self._own, self._batch = model.bind(batch.inputs), batch
        lists: dict[Site, list[Tensor]] = {site: [] for site in sites}

        def keep(kept: list[Tensor]) -> Callable[[Tensor], Tensor]:
            return lambda x: [x, kept.append(x)][0]

        states = [self._own.h0]
        for _ in range(int(batch.n_loops.max())):
            states.append(self._loop(states[-1], {site: keep(x) for site, x in lists.items()}))
        self._states = torch.stack(states)
        self.kept = {site: torch.stack(kept) for site, kept in lists.items()}
        self._asked, self._right = batch.targets != IGNORE, batch.targets.clamp(min=0).long()
        self._answers = self._logits(range(len(states), 0), _nothing).argmax(-1)

    def _loop(self, h: Tensor, changes: Changes) -> Tensor:
        places: dict[Any, dict[str, Callable[[Tensor], Tensor]]] = {}
        for (component, layer), change in changes.items():
            places.setdefault((BLOCK, 0, layer), {})[component] = change
        return self._own.advance(h, self._own.e, self._own.context, Taps.changing(places))

    def _logits(self, span: range, changes: Callable[[int], Changes]) -> Tensor:
        """What each example answers after its own T(n), after changes at the loops of a span."""
        ends, rows = self._batch.n_loops, torch.arange(len(self._batch))
        first = min(span.start, len(self._states) - 1)
        h = self._states[first]
        read = self._states[ends.clamp(max=first), rows.to(ends.device)]
        for loop in range(first, len(self._states) - 1):
            h = self._loop(h, changes(loop) if loop in span else {})
            read = torch.where((ends > loop)[:, None, None], h, read)
        return self._own.readout(read)

    def measure(
        self, span: range = range(0), changes: Callable[[int], Changes] = _nothing
    ) -> dict[str, Float[np.ndarray, " batch"]]:
        """Measures of each example, of a run with changes at the loops of a span."""
        logits = self._logits(span if span else range(len(self._states), 0), changes)
        answers, right = logits.argmax(-1), self._right[..., None]
        others = logits.scatter(-1, right, float("-inf")).amax(-1)
        margin = (logits.gather(-1, right)[..., 0] - others).double() * self._asked
        by_example = {
            "exact_match": ((answers == self._right) | ~self._asked).all(1),
            "agreement": ((answers == self._answers) | ~self._asked).all(1),
            "margin": margin.sum(1) / self._asked.sum(1).clamp(min=1),
        }
        return {name: x.double().cpu().numpy() for name, x in by_example.items()}


def _changes_of(
    part: Part,
    given: Mapping[Site, Float[Tensor, "loop batch ..."]],
    place: Bool[Tensor, " pos"],
    noise: torch.Generator | None,
) -> Callable[[int], Changes]:
    """What becomes of one part at each loop: what is given, or noise that moves it as far."""

    def change(x: Tensor, site: Site, loop: int) -> Tensor:
        inside = torch.zeros(x.shape[1:], dtype=torch.bool, device=x.device)
        for index in part.where[site]:
            inside[(slice(None), *index)] = True
        inside &= place.view(-1, *[1] * (x.ndim - 2))
        new = given[site][loop]
        if noise is not None:
            new = x + random_change(torch.where(inside, new - x, 0), noise, within=inside)
        return torch.where(inside, new, x)

    return lambda loop: {site: partial(change, site=site, loop=loop) for site in part.where}


def _estimate(name: str, values: Float[np.ndarray, "*cell batch"]) -> np.ndarray:
    """Over examples: of shares with Wilson's interval, of margins with that of a mean."""
    if name == "margin":
        return mean_estimate(values)
    return wilson_estimate(values.sum(-1), np.full(values.shape[:-1], values.shape[-1]))
