"""Probes for a whole grid, loop x site x position group x target, with controls."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import product
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import numpy as np
import torch

from loopinterp.core.boundary import Loops, checked
from loopinterp.core.errors import InputError, check_integer, describe_tensor, need, need_distinct
from loopinterp.core.results import Result, study
from loopinterp.core.settings import Seed
from loopinterp.core.text import track
from loopinterp.models.iteration import finite_or_zero
from loopinterp.models.protocol import describe_model, need_hooks
from loopinterp.models.study_examples import inputs_and_loops
from loopinterp.probing.linear_probes import LinearProbe, RidgeProbe, online_code_length
from loopinterp.tasks.task import IGNORE

if TYPE_CHECKING:
    import xarray as xr
    from jaxtyping import Bool, Float, Int
    from torch import Tensor

    from loopinterp.models.run import HookedRun
    from loopinterp.tasks.task import Batch, Task

    Model = TypeVar("Model", bound=torch.nn.Module)


_GRID = "loop site group target"


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class ProbeResult(Result, kind="probes"):
    """Held-out accuracy of probes by loop, site, position group and target.

    Arrays:
        control_task: Control: on random labels fixed by the local input.
        random_model: Control: on the model with random weights.
        embedding: Control: on the embedding alone.
        majority: Control: always the most frequent class.
        code_length: Online code length in bits per label.
        n_train, n_test: Positions that probes were trained and scored on.
    """

    VARIABLES: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("accuracy", "control_task", "random_model", "code_length"), _GRID),
        **dict.fromkeys(("embedding", "majority"), "loop group target"),
        **dict.fromkeys(("n_train", "n_test"), "group"),
    }
    OPTIONAL: ClassVar[frozenset[str]] = frozenset({"code_length"})

    @property
    def selectivity(self) -> xr.DataArray:
        """Accuracy minus that of the same probe on random labels."""
        return self.data["accuracy"] - self.data["control_task"]

    @property
    def chance(self) -> xr.DataArray:
        """The best control of each cell, random labels left out."""
        rivals = ("random_model", "embedding", "majority")
        best: Any = reduce(np.maximum, (self.data[name] for name in rivals))
        return best.transpose(*_GRID.split())


@checked
def probe_study(
    model: Any,
    data: Batch | Task | Tensor,
    targets: Mapping[str, Int[Tensor, "*loop batch pos"] | Callable[[Tensor], Tensor]],
    *,
    n_loops: Loops | None = None,
    sites: Sequence[str] = ("hook_state_post",),
    groups: Mapping[str, Bool[Tensor, "batch pos"]] | None = None,
    train: Bool[Tensor, " batch"] | None = None,
    probe: LinearProbe | None = None,
    random_model: Any = None,
    code_lengths: bool = False,
    n: int | None = None,
    batch_size: int | None = None,
    seed: Seed = 0,
) -> ProbeResult:
    """Probe every target at every loop, site and position group of a hooked looped model.

    Accuracies are on the half of the examples that the probe has not seen. :class:`ProbeResult`
    lists the controls.

    Args:
        model: A model with ``run_with_cache`` and ``embed``.
        targets: Classes [batch, pos] or [loop, batch, pos], ``IGNORE`` for none; or a function of
            the inputs, such as ``task.carries``.
        n_loops: The longest T(n) by default.
        sites: Activations within a loop (of the last layer).
        groups: Position masks [batch, pos] by name; ``"all"`` if None.
        train: Examples to train on; a random half if None.
        probe: :class:`RidgeProbe` if None.
        random_model: The model with shuffled weights if None.
        code_lengths: Compute online code lengths too (slow).

    Raises:
        InputError: If shapes do not fit, a group has no class in some half, or a site has no
            features at each position (patterns).
    """
    need_hooks(model)
    if random_model is not None:
        need_hooks(random_model)
    probe = RidgeProbe() if probe is None else probe
    if not isinstance(probe, LinearProbe):
        fix = "Pass probe=RidgeProbe() or probe=LogisticProbe(), for instance."
        raise InputError("probe", expected="a LinearProbe", given=repr(probe), fix=fix)
    _check_sites(model, sites)
    drawn = {"n": n, "batch_size": batch_size, "seed": seed}
    inputs, n_loops = inputs_and_loops(model, data, n_loops, **drawn)
    generator = torch.Generator().manual_seed(seed)
    labels = _stack_targets(targets, n_loops, inputs)
    if train is None:
        place = torch.randperm(len(inputs), generator=generator).argsort()
        train = (place < (len(inputs) + 1) // 2).to(inputs.device)
    if groups is None:
        groups = {"all": torch.ones_like(labels[0, 0], dtype=torch.bool)}
    halves = _halves(groups, train, labels)
    always = (labels != IGNORE).all(1) if code_lengths else []  # the same places code every loop
    for (name, (fit, _)), (target, known) in product(zip(groups, halves), zip(targets, always)):
        if not bool((fit & known).any()):
            raise InputError(
                f"code length of target {target!r} in group {name!r}",
                expected="positions to train on that have a class at every loop",
                given="none",
                fix="Label some position at every loop, or leave code_lengths out.",
            )
    with study(
        seed, study="probe", model=describe_model(model), n_loops=n_loops, probe=repr(probe)
    ) as watch:
        if random_model is None:
            random_model = with_random_weights(model, seed=seed)
        # Random labels of each target [draw, target, batch, pos], where it has a class.
        types = context_types(inputs)
        known = [y[y != IGNORE] for y in labels]
        control = torch.stack([control_labels(y, types, generator=generator) for y in known], 1)
        control = torch.where(labels == IGNORE, IGNORE, control[:, :, None])
        with torch.no_grad():
            e = model.embed(inputs)
        trained = _activations(model, inputs, sites, n_loops)
        random = [finite_or_zero(x) for x in _activations(random_model, inputs, sites, n_loops)]
        with_control = torch.cat([labels[None], control])  # [draw, target, loop, batch, pos]
        scores = np.stack(
            [_scores(probe, x, with_control, halves) for x in track(trained, "probes")], 2
        )
        majority = [majority_accuracy(labels[..., fit], labels[..., test]) for fit, test in halves]
        coded = [_code_lengths(x, labels, halves) for x in trained] if code_lengths else None
        coords = {"loop": range(n_loops), "site": sites, "group": [*groups], "target": [*targets]}
        return ProbeResult.of(
            watch,
            coords=coords,
            accuracy=scores[0],
            control_task=scores[1:].mean(0),
            random_model=np.stack(
                [_scores(probe, x, labels[None], halves)[0] for x in track(random, "probes")], 1
            ),
            embedding=_scores(probe, e.expand(n_loops, *e.shape), labels[None], halves)[0],
            majority=torch.stack(majority).permute(2, 0, 1).cpu(),  # from [group, target, loop]
            code_length=None if coded is None else np.stack(coded, 1),
            n_train=[int(fit.sum()) for fit, _ in halves],
            n_test=[int(test.sum()) for _, test in halves],
        )


def _check_sites(model: HookedRun, sites: Sequence[str]) -> None:
    need_distinct("sites", sites, "Name each site once.")
    book = model.addresses()
    for site in sites:
        if book.site_map.axes(book.kinds[book.component(site)])[0] != "pos":
            fix = "Probe attn.hook_z or hook_state_post, for instance."
            expected = "activations with features at each position"
            raise InputError("sites", expected=expected, given=repr(site), fix=fix)


def _halves(
    groups: Mapping[str, Bool[Tensor, "batch pos"]],
    train: Bool[Tensor, " batch"],
    labels: Int[Tensor, "target loop batch pos"],
) -> list[tuple[Tensor, Tensor]]:
    if not groups:
        fix = "Name one, or leave groups out."
        raise InputError("groups", expected="at least one", given="none", fix=fix)
    n_examples, n_pos = labels.shape[2:]
    masks = {f"group {name!r}": (mask, (n_examples, n_pos)) for name, mask in groups.items()}
    for what, (mask, shape) in {"train": (train, (n_examples,)), **masks}.items():
        tensor = isinstance(mask, torch.Tensor)
        # Numbers would act as indices.
        if not tensor or tuple(mask.shape) != shape or mask.dtype != torch.bool:
            raise InputError(
                what,
                expected=f"a tensor of booleans, {list(shape)}",
                given=describe_tensor(mask),
                fix="Pass a comparison, such as batch.targets != IGNORE.",
            )
    halves = [(mask & train[:, None], mask & ~train[:, None]) for mask in groups.values()]
    for name, half in zip(groups, halves):
        fewest = [int((labels[..., places] != IGNORE).sum(-1).min()) for places in half]
        if min(fewest) == 0:
            raise InputError(
                f"group {name!r}",
                expected="positions with a class of every target, in both halves of the examples",
                given=f"{fewest[0]} to train on and {fewest[1]} to score on for some target",
                fix="Widen the group, or give more inputs.",
            )
    return halves


def _scores(
    probe: LinearProbe,
    activations: Float[Tensor, "loop batch pos d"],
    labels: Int[Tensor, "draw target loop batch pos"],
    halves: list[tuple[Tensor, Tensor]],
) -> np.ndarray:
    """Accuracy on the other half, [draw, loop, group, target]; one fit for all draws."""
    n_draws, n_targets, n_loops = labels.shape[:3]
    scores = np.empty((n_draws, n_loops, len(halves), n_targets))
    for loop, group, target in np.ndindex(*scores.shape[1:]):
        x, y = activations[loop], labels[:, target, loop]  # [batch, pos, d], [draw, batch, pos]
        fit, test = (places & (y[0] != IGNORE) for places in halves[group])
        predicted = y[:, fit][:, :1]  # where there is one class, there is nothing to fit
        if len(y[:, fit].unique()) > 1:
            predicted = probe.fresh().fit(x[fit], y[:, fit]).predict(x[test])
        scores[:, loop, group, target] = (predicted == y[:, test]).double().mean(-1).cpu()
    return scores


def _code_lengths(
    activations: Float[Tensor, "loop batch pos d"],
    labels: Int[Tensor, "target loop batch pos"],
    halves: list[tuple[Tensor, Tensor]],
) -> np.ndarray:
    """Bits per label [loop, group, target], on places that have a class at every loop."""
    lengths = np.empty((len(activations), len(halves), len(labels)))
    order = torch.Generator().manual_seed(0)
    for group, target in np.ndindex(*lengths.shape[1:]):
        y = labels[target]
        row, pos = (halves[group][0] & (y != IGNORE).all(0)).nonzero(as_tuple=True)
        some = torch.randperm(len(row), generator=order)[:2048].to(row.device)
        row, pos = row[some], pos[some]
        bits = online_code_length(activations[:, row, pos], y[:, row, pos])
        lengths[:, group, target] = bits.cpu()
    return lengths


def _stack_targets(
    targets: Mapping[str, Tensor | Callable[[Tensor], Tensor]], n_loops: int, inputs: Tensor
) -> Int[Tensor, "target loop batch pos"]:
    check_integer("n_loops", n_loops, least=1)
    if not targets:
        raise InputError("targets", expected="at least one", given="none", fix="Name a target.")
    batch, n_pos = inputs.shape[:2]
    stacked = []
    for name, target in targets.items():
        y: Any = target(inputs) if callable(target) else target
        fits = tuple(getattr(y, "shape", ())) in ((batch, n_pos), (n_loops, batch, n_pos))
        if not fits or y.is_floating_point():
            raise InputError(
                f"target {name!r}",
                expected=f"integer classes [{batch}, {n_pos}], or [{n_loops}, {batch}, {n_pos}] by "
                "loop",
                given=describe_tensor(y),
                fix="Give one class for each position, IGNORE where there is none.",
            )
        stacked.append(y.long().expand(n_loops, batch, n_pos))
    return torch.stack(stacked)  # [target, loop, batch, pos]


def _activations(
    model: Any, inputs: Tensor, sites: Sequence[str], n_loops: int
) -> list[Float[Tensor, "loop batch pos d"]]:
    """Each site at every loop; the features of all heads side by side."""
    with torch.no_grad():
        _, cache = model.run_with_cache(inputs, n_loops=n_loops, names_filter=list(sites))
    return [cache.stack(site).flatten(3) for site in sites]


@checked
def with_random_weights(model: Model, *, seed: Seed) -> Model:
    """A copy of a model with the entries of each weight shuffled.

    A probe of the copy reads only input and wiring.
    """
    weights = model.parameters() if isinstance(model, torch.nn.Module) else iter(())
    expected = "a torch.nn.Module with weights, to be shuffled"
    fix = "Pass random_model=, the same model with random weights."
    need(next(weights, None) is not None, "model", expected, model, fix)
    generator = torch.Generator().manual_seed(seed)
    shuffled = copy.deepcopy(model)
    with torch.no_grad():
        for weight in shuffled.parameters():
            order = torch.randperm(weight.numel(), generator=generator).to(weight.device)
            weight.copy_(weight.flatten()[order].view_as(weight))
    return shuffled


def context_types(
    inputs: Int[Tensor, "batch pos"] | Float[Tensor, "batch pos feature"], *, width: int = 4
) -> Int[Tensor, "batch pos"]:
    """A number for each local context: the input at a position and ``width - 1`` before.

    Contexts that reach before the first position count as their own kinds.
    """
    n_places = inputs.shape[:2].numel()
    need(n_places, "inputs", "an example and a position or more", inputs, "Pass some tokens.")
    check_integer("width", width, least=1)
    codes = torch.unique(inputs.reshape(n_places, -1), dim=0, return_inverse=True)[1]
    padded = torch.nn.functional.pad(codes.reshape(inputs.shape[:2]), (width - 1, 0), value=-1)
    windows = padded.unfold(1, width, 1).flatten(0, 1)  # [batch * pos, width]
    return torch.unique(windows, dim=0, return_inverse=True)[1].reshape(inputs.shape[:2])


def control_labels(
    pool: Int[Tensor, " known"],
    types: Int[Tensor, "*place"],
    *,
    n_draws: int = 8,
    generator: torch.Generator,
) -> Int[Tensor, "draw *place"]:  # noqa: F821, UP037
    """Random labels that are equal wherever the same type of input occurs: a control task.

    Each type gets a random class, with the frequencies of the true classes.

    Args:
        pool: True classes.
        types: Types of inputs, such as :func:`context_types`.
        n_draws: Independent labellings, to average over.

    Source: Hewitt and Liang, arXiv 1909.03368.
    """
    for name, values in (("pool", pool), ("types", types)):
        need(len(values), name, "one at least", values, "Leave out what has no labels.")
    n_types = int(types.max()) + 1
    drawn = torch.randint(len(pool), (n_draws, n_types), generator=generator)  # of each type
    return pool[drawn.to(pool.device)][:, types]


def majority_accuracy(
    train: Int[Tensor, "*cell train_sample"], test: Int[Tensor, "*cell test_sample"]
) -> Float[Tensor, "*cell"]:
    """Accuracy on ``test`` of the most frequent class of ``train``, without ``IGNORE``."""
    classes = torch.unique(train[train != IGNORE])
    need(len(classes), "train", "a label other than IGNORE", train, "Leave out what has no labels.")
    count = torch.stack([(train == cls).sum(-1) for cls in classes])  # [class, *cell]
    right = test == classes[count.argmax(0)][..., None]  # [*cell, sample]
    return right.sum(-1).double() / (test != IGNORE).sum(-1)
