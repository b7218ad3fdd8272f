"""Probes for a whole grid, loop x site x position group x target, each with its controls."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from einops import rearrange

from loopinterp.errors import InputError, check_integer
from loopinterp.models.model_description import describe_model
from loopinterp.probing.linear_probes import LinearProbe, RidgeProbe
from loopinterp.probing.prequential_code import online_code_length
from loopinterp.probing.probe_controls import (
    context_types,
    control_labels,
    majority_accuracy,
    with_random_weights,
)
from loopinterp.results import Result, study
from loopinterp.tasks.task import IGNORE

if TYPE_CHECKING:
    import xarray as xr
    from jaxtyping import Bool, Float, Int
    from torch import Tensor

_CONTROL_DRAWS = 8
_CODED_SAMPLES = 2048


_GRID = "loop site group target"


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class ProbeResult(Result, kind="probes"):
    """Held-out accuracy of probes by loop, site, position group and target, with controls.

    Arrays:
        accuracy: Accuracy of the probes.
        control_task: The same probes on random labels fixed by the local input (control).
        random_model: The same probes on the model with random weights (control).
        embedding: The same probes on the embedding alone (control; by loop only if the target
            differs from loop to loop).
        majority: Always saying the most frequent class (control).
        code_length: Online code length in bits per label, where it was asked for.
        n_train: Places each group was trained on.
        n_test: Other places it was scored on.
    """

    VARIABLES: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("accuracy", "control_task", "random_model", "code_length"), _GRID),
        **dict.fromkeys(("embedding", "majority"), "loop group target"),
        **dict.fromkeys(("n_train", "n_test"), "group"),
    }
    OPTIONAL: ClassVar[frozenset[str]] = frozenset({"code_length"})

    @property
    def selectivity(self) -> xr.DataArray:
        """Accuracy above that of the same probe on random labels, of each cell."""
        return self.data["accuracy"] - self.data["control_task"]

    @property
    def chance(self) -> xr.DataArray:
        """The best control of each cell but the random labels."""
        best = self.data["random_model"]
        for rival in ("embedding", "majority"):
            best = best.where(best > self.data[rival], self.data[rival])
        return best.transpose(*_GRID.split())


def probe_study(
    model: Any,
    inputs: Tensor,
    targets: Mapping[str, Int[Tensor, "*loop batch pos"]],
    *,
    n_loops: int,
    sites: Sequence[str] = ("hook_state_post",),
    groups: Mapping[str, Bool[Tensor, "batch pos"]] | None = None,
    train: Bool[Tensor, " batch"] | None = None,
    probe: LinearProbe | None = None,
    random_model: Any = None,
    code_lengths: bool = False,
    seed: int = 0,
) -> ProbeResult:
    """Probe every target at every loop, site and position group of a hooked looped model.

    All loops, targets and groups of like size are one batched solve. Examples are split in two;
    every number is accuracy on the half that the probe has not seen. Controls are always
    computed: the same probe on random labels fixed by the local input (selectivity), on the
    model with random weights, on the embedding alone, and the majority class.

    Args:
        model: A model with ``run_with_cache`` and ``embed``, such as ``LoopedTransformer``.
        inputs: Its inputs, on its device.
        targets: Classes [batch, pos] of each target, or [loop, batch, pos] where they differ
            from loop to loop (the variables of a program); ``IGNORE`` where there is none.
        n_loops: Loops to run. ``loop`` is the index of a loop: the state leaving loop t is
            ``hook_state_post``, the one entering it ``hook_state_pre``.
        sites: Activations within a loop, as ``LoopedCache.stack`` takes them (of the last layer).
        groups: Named sets of places, [batch, pos]; one group ``"all"`` if None.
        train: The examples to train on; a random half if None.
        probe: An unfitted probe; :class:`RidgeProbe` if None.
        random_model: The random-weights control; the model with shuffled weights if None.
        code_lengths: Whether to compute online code lengths too, which takes longer.
        seed: Seed of the split, of the random labels and of the random weights.

    Raises:
        InputError: If shapes do not fit, or a group has too few places.
    """
    probe = RidgeProbe() if probe is None else probe
    generator = torch.Generator().manual_seed(seed)
    labels = _stack_targets(targets, n_loops, inputs)
    if train is None:
        train = _random_half(len(inputs), generator).to(inputs.device)
    if groups is None:
        groups = {"all": torch.ones_like(labels[0, 0], dtype=torch.bool)}
    with study(
        seed, study="probe", model=describe_model(model), n_loops=n_loops, probe=repr(probe)
    ) as watch:
        if random_model is None:
            random_model = with_random_weights(model, seed=seed)
        control = _control_task(labels, context_types(inputs), generator)
        split = _Split(groups, train, torch.cat([labels, control.flatten(0, 1)]), len(labels))
        with torch.no_grad():
            e = model.embed(inputs)
        own = _activations(model, inputs, sites, n_loops)
        random = _activations(random_model, inputs, sites, n_loops)
        scores = np.stack([split.scores(probe, x) for x in own], axis=1)
        n_targets = len(labels)
        drawn = rearrange(
            scores[..., n_targets:], "... (draw target) -> draw ... target", target=n_targets
        )
        return ProbeResult.of(
            watch,
            coords={
                "loop": range(n_loops),
                "site": sites,
                "group": list(groups),
                "target": list(targets),
            },
            accuracy=scores[..., :n_targets],
            control_task=drawn.mean(0),
            random_model=np.stack([split.scores(probe, x, targets=True) for x in random], axis=1),
            embedding=split.scores(probe, e.expand(n_loops, *e.shape), targets=True),
            majority=split.majority(),
            code_length=np.stack([split.code_lengths(x) for x in own], 1) if code_lengths else None,
            n_train=split.n_train,
            n_test=split.n_test,
        )


@dataclass(frozen=True)
class _Places:
    """Places of groups of like size, padded to one size; labels are ``IGNORE`` at the padding."""

    row: Int[Tensor, "group sample"]
    pos: Int[Tensor, "group sample"]
    labels: Int[Tensor, "label loop group sample"]

    @classmethod
    def of(cls, groups: Sequence[Tensor], labels: Tensor) -> _Places:
        indices = [group.nonzero() for group in groups]
        size = max(len(index) for index in indices)
        padded = torch.stack(
            [torch.nn.functional.pad(i, (0, 0, 0, size - len(i)), value=-1) for i in indices]
        )
        row, pos = padded.unbind(-1)
        chosen = torch.where(row >= 0, labels[:, :, row, pos], IGNORE)
        return cls(row.clamp_min(0), pos.clamp_min(0), chosen)

    def weight(self, n_labels: int) -> Float[Tensor, "label loop group sample"]:
        """1 where there is a class; one row for all labels if it is the same for all."""
        weight = (self.labels[:n_labels] != IGNORE).double()
        return weight[:1] if bool((weight == weight[:1]).all()) else weight


class _Split:
    """Both halves of every group. Groups of like size are solved together, padded."""

    def __init__(
        self,
        groups: Mapping[str, Bool[Tensor, "batch pos"]],
        train: Bool[Tensor, " batch"],
        labels: Int[Tensor, "label loop batch pos"],
        n_targets: int,
    ) -> None:
        self.n_targets, self.n_loops = n_targets, labels.shape[1]
        self._n_labels = len(labels)
        masks = list(groups.values())
        members = {True: train[:, None], False: ~train[:, None]}
        self.n_train = [int((mask & members[True]).sum()) for mask in masks]
        self.n_test = [int((mask & members[False]).sum()) for mask in masks]
        for name, *sizes in zip(groups, self.n_train, self.n_test):
            if min(sizes) == 0:
                raise InputError(
                    f"group {name!r}",
                    expected="places in both halves of the examples",
                    given=f"{sizes[0]} to train on and {sizes[1]} to score on",
                    fix="Widen the group, or give more inputs.",
                )
        by_size: dict[int, list[int]] = {}
        for index, size in enumerate(self.n_train):
            by_size.setdefault(size.bit_length(), []).append(index)
        self._parts = [
            (
                chosen,
                _Places.of([masks[i] & members[True] for i in chosen], labels),
                _Places.of([masks[i] & members[False] for i in chosen], labels),
            )
            for chosen in by_size.values()
        ]

    def scores(
        self,
        probe: LinearProbe,
        activations: Float[Tensor, "loop batch pos d"],
        *,
        targets: bool = False,
    ) -> np.ndarray:
        """Accuracy [loop, group, label] on the other half; of the true targets only, or of all."""
        n = self.n_targets if targets else self._n_labels

        def score(fit: _Places, held: _Places) -> Tensor:
            x, unseen = (activations[:, half.row, half.pos] for half in (fit, held))
            fitted = probe.fresh().fit(x, fit.labels[:n], fit.weight(n))
            return fitted.score(unseen, held.labels[:n], held.weight(n))

        return self._by_group(score)

    def majority(self) -> np.ndarray:
        """[loop, group, target]."""
        n = self.n_targets
        return self._by_group(lambda fit, held: majority_accuracy(fit.labels[:n], held.labels[:n]))

    def _by_group(self, score: Callable[[_Places, _Places], Tensor]) -> np.ndarray:
        """[loop, group, label] from scores [label, loop, group] of groups of like size."""
        order = np.argsort([group for chosen, _, _ in self._parts for group in chosen])
        scores = torch.cat([score(fit, held) for _, fit, held in self._parts], dim=-1)
        return scores.permute(1, 2, 0).cpu().numpy()[:, order]

    def code_lengths(self, activations: Float[Tensor, "loop batch pos d"]) -> np.ndarray:
        """Bits per label [loop, group, target], on places that have a class at every loop."""
        out = np.full((self.n_loops, len(self.n_train), self.n_targets), np.nan)
        order = torch.Generator().manual_seed(0)
        for chosen, fit, _ in self._parts:
            for place, group in enumerate(chosen):
                for target in range(self.n_targets):
                    y = fit.labels[target, :, place]
                    known = (y != IGNORE).all(0).nonzero()[:, 0]
                    shuffled = torch.randperm(len(known), generator=order)[:_CODED_SAMPLES]
                    known = known[shuffled.to(known.device)]
                    x = activations[:, fit.row[place, known], fit.pos[place, known]]
                    out[:, group, target] = online_code_length(x, y[:, known]).cpu().numpy()
        return out


def _stack_targets(
    targets: Mapping[str, Tensor], n_loops: int, inputs: Tensor
) -> Int[Tensor, "target loop batch pos"]:
    check_integer("n_loops", n_loops, least=1)
    if not targets:
        raise InputError("targets", expected="at least one", given="none", fix="Name a target.")
    batch, n_pos = inputs.shape[:2]
    for name, y in targets.items():
        if tuple(y.shape) not in ((batch, n_pos), (n_loops, batch, n_pos)):
            raise InputError(
                f"target {name!r}",
                expected=f"classes [{batch}, {n_pos}], or [{n_loops}, {batch}, {n_pos}] by loop",
                given=f"shape {list(y.shape)}",
                fix="Give one class for each place, IGNORE where there is none.",
            )
    return torch.stack([y.long().expand(n_loops, batch, n_pos) for y in targets.values()])


def _control_task(
    labels: Int[Tensor, "target loop batch pos"],
    types: Int[Tensor, "batch pos"],
    generator: torch.Generator,
) -> Int[Tensor, "draw target loop batch pos"]:
    """Random labels for each target, fixed by the type of input, where the target has a class."""
    drawn = torch.stack(
        [
            control_labels(y[y != IGNORE], types, n_draws=_CONTROL_DRAWS, generator=generator)
            for y in labels
        ],
        dim=1,
    )
    return torch.where(labels == IGNORE, IGNORE, drawn[:, :, None])


def _activations(
    model: Any, inputs: Tensor, sites: Sequence[str], n_loops: int
) -> list[Float[Tensor, "loop batch pos d"]]:
    """Each site at every loop; the features of all heads side by side."""
    with torch.no_grad():
        _, cache = model.run_with_cache(inputs, n_loops=n_loops, names_filter=list(sites))
    return [cache.stack(site).flatten(3) for site in sites]


def _random_half(batch: int, generator: torch.Generator) -> Bool[Tensor, " batch"]:
    half = torch.zeros(batch, dtype=torch.bool)
    half[torch.randperm(batch, generator=generator)[: (batch + 1) // 2]] = True
    return half
