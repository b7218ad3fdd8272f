"""Ablation over loops, layers, heads and positions: the answers without a part of the model."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, product
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple, get_args

import numpy as np
import torch
from pydantic import Field

from loopinterp.core.boundary import checked
from loopinterp.core.errors import InputError, check_integer, need_distinct
from loopinterp.core.intervals import mean_estimate, wilson_estimate
from loopinterp.core.results import Result, study
from loopinterp.core.settings import Seed
from loopinterp.core.text import track
from loopinterp.interventions.base_and_source import (
    chosen_loops,
    chosen_positions,
    patched_component,
)
from loopinterp.interventions.engine import random_change
from loopinterp.models.protocol import describe_model, need_hooks
from loopinterp.models.study_examples import examples_for, need_classes
from loopinterp.models.taps import ChangingTaps
from loopinterp.tasks.sampling import need_asked
from loopinterp.tasks.task import IGNORE

if TYPE_CHECKING:
    import pandas as pd
    import xarray as xr
    from jaxtyping import Bool, Float
    from torch import Tensor

    from loopinterp.models import HookedRun
    from loopinterp.models.addresses import Index
    from loopinterp.tasks.task import Batch, Task

MEASURES = ("exact_match", "agreement", "margin")

CONTROL, _REFERENCE = "control_", "reference_"

NEEDED, IDLE = "needed", "idle"
Role = Literal["information", "constant", "needed", "idle", "unclear"]

NEEDED_SHARE = 0.01
"""A part is needed if at least this share of examples surely change their answers without it."""

Kind = Literal["zero", "mean", "resample"]
KINDS: tuple[Kind, ...] = get_args(Kind)
When = Literal["all", "one", "from", "upto"]
_MeanOver = Literal["position", "token", "all"]


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class AblationStudy(Result, kind="ablation"):
    """The result of :func:`ablation_study`.

    ``part`` names heads ``head LAYER.HEAD``, ``when`` loops ("all loops", "loop 2", "from loop 2",
    "up to loop 2"). Intervals are over examples.

    Arrays:
        exact_match: Share of examples with every asked answer right, without the part.
        agreement: Share of examples whose asked answers all equal those of the clean run.
        margin: Logit of the right answer less the largest other, mean over the asked answers.
        control_exact_match: Control: under noise of equal norm; likewise the others.
        reference_exact_match: In the clean run; likewise the others.

    Attributes:
        spans: First and last loop of each entry of ``when``.
        mean_over: What means are over: "position", "token" or "all".
    """

    VARIABLES: ClassVar[Mapping[str, str]] = {
        **{c + name: "part ablation when pos estimate" for c in ("", CONTROL) for name in MEASURES},
        **{_REFERENCE + name: "estimate" for name in MEASURES},
    }

    spans: list[list[int]]
    mean_over: str
    n_examples: int

    def reference(self, measure: str = "exact_match") -> xr.DataArray:
        """A measure of the clean run."""
        return self.data[_REFERENCE + measure]

    def judged(self) -> pd.DataFrame:
        """Whether each part is needed, by kind of ablation, at the widest span of loops.

        The measure is the share of examples whose answers change (1 - agreement), at the worst
        position. The part is ``needed`` if the 95% interval begins at :data:`NEEDED_SHARE` or
        above, ``idle`` if the share is 0, else ``unclear``; ``specific`` if noise surely changes
        fewer answers.

        Returns:
            A row per part and kind: ``part``, ``ablation``, ``changed``, ``low``, ``high``,
            ``noise`` (the share that noise changes), ``need``, ``specific``.
        """
        import pandas as pd

        at = self.data.sel(when=self.widest)
        rows = []
        for part, kind in product(at["part"].values, at["ablation"].values):
            cell = at.sel(part=part, ablation=kind)
            cell = cell.isel(pos=int(cell["agreement"].sel(estimate="value").values.argmin()))
            agreement, low, high = cell["agreement"].values
            noise, noise_low, _ = cell[CONTROL + "agreement"].values
            need = IDLE if agreement == 1 else NEEDED if 1 - high >= NEEDED_SHARE else "unclear"
            rows.append({
                "part": str(part), "ablation": str(kind),
                "changed": 1 - agreement, "low": 1 - high, "high": 1 - low, "noise": 1 - noise,
                "need": need, "specific": bool(high < noise_low),
            })  # fmt: skip
        return pd.DataFrame(rows)

    def roles(self) -> dict[str, Role]:
        """The role of each part, by all kinds of ablation together.

        - ``information``: needed under ``resample`` (or, without it, the mean), whose values occur
          in clean runs: the answers depend on the part's input;
        - ``constant``: idle there and needed under another kind;
        - ``needed``: needed where it is set to zero, the only kind;
        - ``idle``: no kind changes any answer;
        - ``unclear``: anything else.
        """
        table = self.judged().pivot(index="part", columns="ablation", values="need")
        decisive = next(kind for kind in ("resample", "mean", "zero") if kind in table)

        def role(needs: pd.Series) -> Role:
            if needs[decisive] == NEEDED:
                return "information" if decisive != "zero" else "needed"
            if (needs == IDLE).all():
                return "idle"
            is_constant = needs[decisive] == IDLE and (needs == NEEDED).any()
            return "constant" if is_constant else "unclear"

        return {part: role(table.loc[part]) for part in map(str, self.data["part"].values)}

    @property
    def widest(self) -> str:
        """The entry of ``when`` with the most loops."""
        lengths = [last - first for first, last in self.spans]
        return str(self.data["when"].values[lengths.index(max(lengths))])


@torch.no_grad()
@checked
def ablation_study(
    model: Any,
    data: Batch | Task,
    *,
    components: Sequence[str] = ("z", "mlp_out"),
    neurons: Mapping[str, Sequence[int]] | None = None,
    together: bool = False,
    kinds: Annotated[Sequence[Kind], Field(min_length=1)] = KINDS,
    when: Annotated[Sequence[When], Field(min_length=1)] = ("all", "one"),
    loops: Index = None,
    positions: Literal["all", "each"] | None = None,
    mean_over: _MeanOver = "position",
    n: int | None = None,
    batch_size: int | None = None,
    seed: Seed = 0,
) -> AblationStudy:
    r"""Run a model without one part, at some loops, and measure which answers change.

    The activation x of the part becomes

    .. math::
        x' = 0, \qquad x' = \bar x_{t,p}, \qquad x' = x_{t,p}(\text{another example})

    (``zero``, ``mean``, ``resample``), of the clean run at the same loop t. The control is noise:
    ``x + r`` with a random r as long as ``x' - x``, at each position and head.

    Args:
        model: A ``LoopedTransformer``, or an adapter. Layers outside its loop are not ablated.
        data: A batch, or a task to draw one from. Each example is read after its own T(n).
        components: Hook points inside a layer: heads' (``z``, ``q`` …) head by head, others
            (``attn_out``, ``mlp_out``, ``post``) as a whole.
        neurons: Named groups of neurons of each layer's MLP, ablated in ``mlp.hook_post``.
        together: Whether to ablate all of these parts at once too.
        when: ``all`` loops; ``one`` loop at a time; ``from`` a loop on; ``upto`` and including one.
        loops: The loops that the last three refer to; all by default.
        positions: None or ``"all"`` at once, ``"each"`` one at a time.
        mean_over: Means are over the batch, padding included: at the same ``position``, of the same
            ``token`` anywhere, or over ``all`` positions.
        n, batch_size: Length and number (64 by default) of examples to draw.

    Raises:
        InputError: If an option has no effect, or the model has no hooks.

    Source: arXiv 2309.16042 and arXiv 2404.15255.

    Example:
        >>> from loopinterp.compiler import compile_program
        >>> from loopinterp.tasks import Addition
        >>> result = ablation_study(
        ...     compile_program("ripple", max_length=5).model, Addition(), n=4, when=("all",))
        >>> result.reference("exact_match").values.tolist()[0]
        1.0
    """
    need_hooks(model)
    batch = examples_for(model, data, n=n, batch_size=batch_size, seed=seed)
    need_asked(batch)
    need_classes(model, batch)
    last = int(batch.n_loops.max())
    check_integer("data, n_loops", last, least=1, fix="Ask after a loop.")
    if len(batch) < 2 and {*kinds} != {"zero"}:
        raise InputError(
            "data",
            expected="two examples or more, for means and other examples",
            given="one example",
            fix="Pass a larger batch, or kinds=('zero',).",
        )
    if mean_over == "token" and batch.inputs.is_floating_point():
        raise InputError(
            "mean_over",
            expected="position or all, as the model reads no tokens",
            given="'token'",
            fix="Leave it out.",
        )
    need_distinct("kinds", kinds, "Leave one out.")
    parts = _chosen_parts(model, components, neurons or {}, together=together)
    spans = _chosen_spans(when, loops, last)
    places, place_names = chosen_positions(positions, batch.inputs)
    about = {"study": "ablation", "components": list(components), "mean_over": mean_over}
    with study(seed, **about, model=describe_model(model), n_examples=len(batch)) as watch:
        runs = _Runs(model, batch, {site for part in parts for site in part.indices})
        generator = torch.Generator().manual_seed(seed)
        values = _reference_values(runs.activations, batch.inputs, kinds, mean_over, generator)
        shape = (len(parts), len(kinds), len(spans), len(places), 2)
        measured = {name: np.empty((*shape, len(batch))) for name in MEASURES}
        # Cells are [part, kind, span, place, control].
        for cell in track(list(np.ndindex(*shape)), "ablate"):
            part, kind, span, place, control = cell
            noise = generator if control else None
            changes = _changes(parts[part], values[kinds[int(kind)]], places[place, 0], noise)
            for name, by_example in runs.measure(spans[span][1], changes).items():
                measured[name][cell] = by_example
        estimates = {name: _estimate(name, x) for name, x in measured.items()}
        return AblationStudy.of(
            watch,
            coords={
                "part": [part.name for part in parts],
                "ablation": list(kinds),
                "when": [name for name, _ in spans],
                "pos": place_names,
            },
            **{name: x[..., 0, :] for name, x in estimates.items()},
            **{CONTROL + name: x[..., 1, :] for name, x in estimates.items()},
            **{_REFERENCE + name: _estimate(name, x) for name, x in runs.measure().items()},
            spans=[[span.start, span.stop - 1] for _, span in spans],
            mean_over=mean_over,
            n_examples=len(batch),
        )


_Site = tuple[str, int]  # full name of a component, and its layer in the block
_Changes = dict[_Site, Callable[["Tensor"], "Tensor"]]


class _Part(NamedTuple):
    """Activations ablated together: for each site, indices after the position axis."""

    name: str
    indices: Mapping[_Site, list[tuple[Any, ...]]]


def _chosen_parts(
    model: HookedRun,
    components: Sequence[str],
    neurons: Mapping[str, Sequence[int]],
    *,
    together: bool,
) -> list[_Part]:
    parts, sizes = [], model.site_map
    for component in components:
        target = patched_component(model, component)
        if target.per_loop or target.kind not in ("residual", "head", "neuron"):
            raise InputError(
                "components",
                expected="components inside a layer with a vector at each position",
                given=repr(component),
                fix="Pass for example z, attn_out, mlp_out or post.",
            )
        names = {"z": "head", "mlp_out": "MLP", "attn_out": "attention"}
        name = names.get(target.name, target.name)
        heads = [(f".{h}", (h,)) for h in range(sizes.n_heads)]
        parts += [
            _Part(f"{name} {layer}{suffix}", {(target.full, layer): [index]})
            for layer in range(sizes.n_layers)
            for suffix, index in (heads if target.kind == "head" else [("", ())])
        ]
    for name, group in neurons.items():
        for neuron in group:
            check_integer(f"neurons[{name!r}]", neuron, least=0, most=sizes.d_mlp - 1)
        for layer in range(sizes.n_layers):
            parts.append(_Part(f"{name} {layer}", {("mlp.hook_post", layer): [([*group],)]}))
    if not parts or any(not group for group in neurons.values()):
        raise InputError(
            "components",
            expected="a component or group of neurons, and neurons in each group",
            given="none",
            fix="Leave components out for the heads and the MLPs.",
        )
    names = [part.name for part in parts]
    need_distinct("components, neurons", names, "Leave one out, or rename it.")
    if together:
        union: dict[_Site, list[tuple[Any, ...]]] = defaultdict(list)
        for site, indices in chain.from_iterable(part.indices.items() for part in parts):
            union[site] += indices
        parts.append(_Part("all of them", union))
    return parts


def _chosen_spans(when: Sequence[str], loops: Index, n_loops: int) -> list[tuple[str, range]]:
    if loops is not None and set(when) == {"all"}:
        raise InputError(
            "loops",
            expected="None with when=('all',)",
            given=repr(loops),
            fix="Leave loops out, or add 'one', 'from' or 'upto'.",
        )
    spans: dict[str, range] = {}
    for choice in when:
        for t in [0] if choice == "all" else chosen_loops(loops, n_loops):
            spans |= {
                "all": {"all loops": range(n_loops)},
                "one": {f"loop {t}": range(t, t + 1)},
                "from": {f"from loop {t}": range(t, n_loops)},
                "upto": {f"up to loop {t}": range(t + 1)},
            }[choice]
    return list(spans.items())


def _reference_values(
    activations: Mapping[_Site, Float[Tensor, "loop batch pos ..."]],
    inputs: Tensor,
    kinds: Sequence[str],
    mean_over: _MeanOver,
    generator: torch.Generator,
) -> dict[str, dict[_Site, Float[Tensor, "loop batch pos ..."]]]:
    # One random cycle through all examples, so that none gets its own activation.
    order = torch.randperm(len(inputs), generator=generator)
    other = torch.empty_like(order)
    other[order] = order.roll(1)

    def mean(x: Float[Tensor, "loop batch pos ..."]) -> Float[Tensor, "loop batch pos ..."]:
        if mean_over != "token":
            over = (1,) if mean_over == "position" else (1, 2)
            return x.mean(over, keepdim=True).expand_as(x)
        tokens, number = inputs.unique(return_inverse=True)
        # Sums over examples and positions by token: [loop, token, ...].
        flat, number = x.flatten(1, 2), number.flatten()
        sums = flat.new_zeros(len(flat), len(tokens), *flat.shape[2:]).index_add(1, number, flat)
        counts = number.bincount(minlength=len(tokens)).view(1, -1, *[1] * (flat.ndim - 2))
        return (sums / counts)[:, number].view_as(x)

    new = {"zero": torch.zeros_like, "mean": mean, "resample": lambda x: x[:, other.to(x.device)]}
    return {kind: {site: new[kind](x) for site, x in activations.items()} for kind in kinds}


class _Runs:
    """The clean run of a batch with its ``activations`` at some sites, and changed runs."""

    def __init__(self, model: Any, batch: Batch, sites: Iterable[_Site]) -> None:
        self._iteration, self._batch = model.bind(batch.inputs), batch
        lists: dict[_Site, list[Tensor]] = {site: [] for site in sites}
        # Changes that keep what they get, and change nothing.
        record = {site: lambda x, to=to: [x, to.append(x)][0] for site, to in lists.items()}
        states = [self._iteration.h0]
        for loop in range(int(batch.n_loops.max())):
            states.append(self._loop(states[-1], record, loop))
        self._states = torch.stack(states)  # h_0 .. h_T, [loop, batch, pos, d_model]
        self.activations = {site: torch.stack(values) for site, values in lists.items()}
        self._is_asked, self._right = batch.targets != IGNORE, batch.targets.clamp(min=0).long()
        self._clean_answers = self._logits().argmax(-1)

    def measure(
        self, span: range = range(0), changes: Callable[[int], _Changes] | None = None
    ) -> dict[str, Float[np.ndarray, " batch"]]:
        logits = self._logits(span, changes)  # [batch, pos, class]
        answers, right = logits.argmax(-1), self._right[..., None]
        # Margin of each answer [batch, pos]: the right logit less the largest other one.
        others = logits.scatter(-1, right, float("-inf")).amax(-1)
        margin = (logits.gather(-1, right)[..., 0] - others).double() * self._is_asked
        by_example = {
            "exact_match": ((answers == self._right) | ~self._is_asked).all(1),
            "agreement": ((answers == self._clean_answers) | ~self._is_asked).all(1),
            "margin": margin.sum(1) / self._is_asked.sum(1).clamp(min=1),
        }
        return {name: x.double().cpu().numpy() for name, x in by_example.items()}

    def _loop(self, h: Tensor, changes: _Changes, loop: int) -> Tensor:
        places: dict[Any, dict[str, Callable[[Tensor], Tensor]]] = defaultdict(dict)
        for (component, layer), change in changes.items():
            places["block", layer][component] = change
        run = self._iteration
        return run.advance(h, run.e, run.context, ChangingTaps(places), **run.loop_argument(loop))

    def _logits(
        self, span: range = range(0), changes: Callable[[int], _Changes] | None = None
    ) -> Tensor:
        """Logits of each example after its own T(n), by default those of the clean run."""
        ends, rows = self._batch.n_loops, torch.arange(len(self._batch))
        first = span.start if span else len(self._states) - 1
        h = self._states[first]
        # The state after each example's own T(n), as far as the run has come.
        read = self._states[ends.clamp(max=first), rows.to(ends.device)]
        for loop in range(first, len(self._states) - 1):
            h = self._loop(h, changes(loop) if changes and loop in span else {}, loop)
            read = torch.where((ends > loop)[:, None, None], h, read)
        return self._iteration.readout(read)


def _changes(
    part: _Part,
    values: Mapping[_Site, Float[Tensor, "loop batch ..."]],
    place: Bool[Tensor, " pos"],
    noise: torch.Generator | None,
) -> Callable[[int], _Changes]:
    """The changes of one part at each loop: to the values, or by noise of equal norm."""

    def change(x: Tensor, site: _Site, loop: int) -> Tensor:
        # Where the part is, [pos, head, feature] or [pos, feature].
        inside = torch.zeros(x.shape[1:], dtype=torch.bool, device=x.device)
        for index in part.indices[site]:
            inside[(slice(None), *index)] = True
        inside &= place.view(-1, *[1] * (x.ndim - 2))
        new = values[site][loop]
        if noise is not None:
            new = x + random_change(torch.where(inside, new - x, 0), noise, within=inside)
        return torch.where(inside, new, x)

    return lambda loop: {s: partial(change, site=s, loop=loop) for s in part.indices}


def _estimate(name: str, values: Float[np.ndarray, "*cell batch"]) -> np.ndarray:
    if name == "margin":
        return mean_estimate(values)
    return wilson_estimate(values.sum(-1), np.full(values.shape[:-1], values.shape[-1]))
