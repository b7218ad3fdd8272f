"""Do features live at one loop or at all? Activity, reconstruction and directions by loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from pydantic import PositiveInt
from torch.nn.functional import normalize

from loopinterp.core.boundary import Loops, checked
from loopinterp.core.errors import InputError, check_integer
from loopinterp.core.intervals import bootstrap_ratio, mean_estimate
from loopinterp.core.results import Result, study
from loopinterp.core.settings import Seed
from loopinterp.core.text import track
from loopinterp.features.autoencoder import AutoencoderConfig, SparseAutoencoder
from loopinterp.features.feature_hooks import site_names
from loopinterp.interventions.base_and_source import scored_examples
from loopinterp.interventions.engine import CleanRun
from loopinterp.models.protocol import describe_model, need_hooks

if TYPE_CHECKING:
    import pandas as pd
    import xarray as xr
    from jaxtyping import Bool, Float, Int
    from torch import Tensor

    from loopinterp.models.addresses import Index
    from loopinterp.tasks.task import Batch, Task

RARE = 20  # features active at fewer positions, in all loops, have no effective number of loops

SHARED, OF_LOOP = "shared", "of the loop"
RANDOM, PCA, MEAN = "random", "principal components", "mean"
_ACROSS = ("fve_across", "fve_recentred", "cosine_across", "cosine_control")


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class FeatureStudy(Result, kind="features"):
    r"""The result of :func:`feature_study`. Shares are of held-out positions.

    Arrays:
        activity: Share of positions at which a feature of the shared autoencoder is active.
        effective_loops: :math:`\exp H(p)` of each feature, where :math:`p_t` is the share of its
            activity in loop t: 1 for one loop, their number if all alike. NaN of rare features.
        effective_loops_shuffled: Control: the same with loops permuted at each position.
        effective_loops_random: Control: features of a random autoencoder.
        fve: Fraction of the variance around the loop's mean that is explained, by dictionary.
        fve_across: The same of an autoencoder trained at one loop on the states of another.
        fve_recentred: The same after the states are moved to the mean of its own loop; the
            remaining gap is due to directions.
        cosine_across: Mean cosine of its live directions with the closest of the other loop's
            (trained with another seed, if given; else the diagonal is NaN).
        cosine_control: Control: with the closest of as many differences of states of that loop.
        live: Live features of each loop's autoencoder in its own loop.
        kept: Share of the clean run's answers kept if one loop is spliced.
        loss: Mean of -log p of the clean run's answers then, in nats.
        kept_all, loss_all: The same if all the loops are spliced.
        top_example, top_loop, top_pos, top_value: Where a feature is most active, one row for an
            example; top_trace: its activations at all positions of that loop.
        tokens: The inputs of the held-out examples.

    Attributes:
        loss_clean: Loss of the clean run.
        n_dead: Features of the shared autoencoder that are never active.
        n_active: Mean number of active features of the shared autoencoder.
    """

    VARIABLES: ClassVar[Mapping[str, str]] = {
        "activity": "loop feature",
        **dict.fromkeys(("effective_loops", "effective_loops_shuffled"), "feature"),
        "effective_loops_random": "random_feature",
        "fve": "dictionary loop estimate",
        **dict.fromkeys(_ACROSS, "trained_loop loop"),
        "live": "trained_loop",
        **dict.fromkeys(("kept", "loss"), "dictionary loop estimate"),
        **dict.fromkeys(("kept_all", "loss_all"), "dictionary estimate"),
        **dict.fromkeys(("top_example", "top_loop", "top_pos", "top_value"), "feature rank"),
        "top_trace": "feature rank pos",
        "tokens": "example pos",
    }
    OPTIONAL: ClassVar[frozenset[str]] = frozenset({*_ACROSS, "live", "tokens"})

    component: str
    n_examples: int
    loss_clean: float
    n_dead: int
    n_active: float

    @property
    def recovered(self) -> xr.DataArray:
        """Loss recovered against mean ablation, ``[dictionary, loop]``.

        (mean ablation - spliced) / (mean ablation - clean).
        """
        loss = self.data["loss"].sel(estimate="value", drop=True)
        ablated = loss.sel(dictionary=MEAN, drop=True)
        return (ablated - loss) / (ablated - self.loss_clean)

    def top_examples(self, feature: int, k: int = 5, *, window: int = 6) -> pd.DataFrame:
        """Where a feature is most active, the strongest first; at most one row for an example.

        Columns: example, loop, pos, activation, token, and the tokens around it (``window`` on each
        side, the one in brackets). A feature that is never active has no rows.
        """
        import pandas as pd

        check_integer("feature", feature, least=0, most=self.data.sizes["feature"] - 1)
        check_integer("k", k, least=1)
        data, rows = self.data.isel(feature=feature), []
        for rank in range(min(k, data.sizes["rank"])):
            here = data.isel(rank=rank)
            example, pos = int(here["top_example"]), int(here["top_pos"])
            if (value := float(here["top_value"])) > 0:
                row: dict[str, Any] = {"example": example, "loop": int(here["top_loop"])}
                row |= {"pos": pos, "activation": value}
                if "tokens" in data:
                    tokens = data["tokens"].values[example].tolist()
                    before = tokens[max(0, pos - window) : pos]
                    around = [*before, f"[{tokens[pos]}]", *tokens[pos + 1 : pos + window + 1]]
                    row |= {"token": tokens[pos], "context": " ".join(map(str, around))}
                rows.append(row)
        return pd.DataFrame(rows)


@torch.no_grad()
@checked
def feature_study(
    model: Any,
    data: Batch | Task | Tensor,
    shared: SparseAutoencoder,
    *,
    by_loop: Mapping[int, SparseAutoencoder] | None = None,
    repeats: Mapping[int, SparseAutoencoder] | None = None,
    component: str = "state_post",
    layer: int | None = None,
    loops: Index = None,
    n_loops: Loops | None = None,
    n_top: PositiveInt = 8,
    n: int | None = None,
    batch_size: PositiveInt | None = None,
    seed: Seed = 0,
) -> FeatureStudy:
    """Whether the features of an activation belong to one loop or to all.

    Half of the examples fit the controls: mean ablation (of each position), as many principal
    components of all loops as features are active, and a random autoencoder (as many active random
    directions around the mean). Everything is measured on the other half.

    Args:
        data: Examples that no autoencoder was trained on: a batch of one T(n), a task to draw from,
            or inputs alone.
        shared: An autoencoder for all loops.
        by_loop: Autoencoders that were trained at one loop each, by loop.
        repeats: The same with another seed: how similar two autoencoders of one loop are.
        component, layer, loops: The site, as for :func:`read_features`.
        n_loops: Loops of the run; T(n) by default, required for inputs alone.
        n_top: Examples kept for each feature.

    Raises:
        InputError: If an autoencoder is a transcoder, does not fit the site, or its loop is not
            studied; or if there are fewer than two examples.

    Example:
        >>> from loopinterp.models import LoopedTransformer, LoopedTransformerConfig
        >>> config = LoopedTransformerConfig(d_model=16, n_heads=2, d_vocab=5, d_vocab_out=2)
        >>> tokens = torch.randint(5, (8, 4), generator=torch.Generator().manual_seed(0))
        >>> shared = SparseAutoencoder(AutoencoderConfig(d_in=16, n_features=32))
        >>> result = feature_study(LoopedTransformer(config), tokens, shared, n_loops=3)
        >>> result.data["activity"].sizes["feature"]
        32
    """
    need_hooks(model)
    inputs, scored, n_loops = scored_examples(model, data, n_loops, n, batch_size, seed)
    chosen, names = site_names(model, component, layer, loops, n_loops)
    trained, again = dict(by_loop or {}), dict(repeats or {})
    _check(chosen, shared, trained, again, len(inputs))
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(inputs), generator=generator).to(inputs.device)
    fit, test = order[: len(order) // 2], order[len(order) // 2 :].sort().values
    about = {"study": "features", "component": component, "n_loops": n_loops, "layer": layer}
    about |= {"model": describe_model(model), "n_examples": len(inputs)}
    about |= {"autoencoder": {**shared.config.to_dict(), **shared.about}}
    with study(seed, **about) as watch:
        _, cache = model.run_with_cache(inputs, n_loops=n_loops, names_filter=names)
        # [loop, batch, pos, d_in], heads side by side
        fitted, held_out = (
            torch.stack([cache[x][half].flatten(2) for x in names]) for half in (fit, test)
        )
        features = torch.stack([shared.encode(x) for x in held_out])  # [loop, batch, pos, feature]
        active = features > 0
        n_active = float(active.sum(-1).double().mean())
        random = _random_like(shared, fitted, max(1, round(n_active)), seed)
        components = _principal_components(fitted, max(1, round(n_active)))
        means = fitted.mean(1)  # [loop, pos, d_in]
        dictionaries: dict[str, list[Callable[[Tensor], Tensor]]] = {
            SHARED: [shared] * len(chosen),
            **({OF_LOOP: [trained[t] for t in chosen]} if trained else {}),
            RANDOM: [random] * len(chosen),
            PCA: [components] * len(chosen),
            MEAN: [lambda x, mean=mean: mean.expand_as(x) for mean in means],
        }
        run, held_out_scored = CleanRun(model, inputs[test], n_loops), scored[test]
        sites = dict(zip(chosen, names))
        by_dictionary = track(list(dictionaries.values()), "splice")
        both = [_spliced(run, held_out_scored, sites, each) for each in by_dictionary]
        # [dictionary, loop, measure, example], and without loops
        spliced, all_spliced = map(np.stack, zip(*both))
        across = _across(held_out, trained, again, chosen, generator) if trained else {}
        return FeatureStudy.of(
            watch,
            coords={
                "loop": chosen,
                "dictionary": list(dictionaries),
                **({"trained_loop": chosen} if trained else {}),
            },
            activity=active.double().mean((1, 2)),
            effective_loops=_effective_loops(active.sum((1, 2))),
            effective_loops_shuffled=_effective_loops(_shuffled_counts(active, generator)),
            effective_loops_random=_effective_loops(
                torch.stack([(random.encode(x) > 0).sum((0, 1)) for x in held_out])
            ),
            fve=np.stack(
                [[_fve(x, f(x)) for x, f in zip(held_out, each)] for each in dictionaries.values()]
            ),
            kept=mean_estimate(spliced[:, :, 0]),
            loss=mean_estimate(spliced[:, :, 1]),
            kept_all=mean_estimate(all_spliced[:, 0]),
            loss_all=mean_estimate(all_spliced[:, 1]),
            **across,
            **_top(features, chosen, n_top),
            tokens=None if inputs.is_floating_point() else inputs[test],
            component=component,
            n_examples=len(test),
            loss_clean=float(_scores(run, held_out_scored, run.logits)[1].mean()),
            n_dead=int((~active.flatten(0, 2).any(0)).sum()),
            n_active=n_active,
        )


def _check(
    chosen: Sequence[int],
    shared: SparseAutoencoder,
    trained: Mapping[int, SparseAutoencoder],
    again: Mapping[int, SparseAutoencoder],
    n_examples: int,
) -> None:
    for name, each in (("by_loop", trained), ("repeats", again)):
        if each and sorted(each) != sorted(chosen):
            expected, fix = f"one for each of the loops {[*chosen]}", "Pass loops= of these."
            raise InputError(name, expected=expected, given=str(sorted(each)), fix=fix)
    if again and not trained:
        fix = "Pass by_loop too, or leave repeats out."
        raise InputError("repeats", expected="none without by_loop", given="some", fix=fix)
    every = {"shared": shared, "by_loop": [*trained.values()], "repeats": [*again.values()]}
    for name, each in every.items():
        if any(x.is_transcoder for x in (each if isinstance(each, list) else [each])):
            fix = "Use splice_hooks for a transcoder."
            raise InputError(name, expected="autoencoders", given="a transcoder", fix=fix)
    if n_examples < 2:
        fix = "Pass more: half of them fit the controls."
        raise InputError("data", expected="at least two examples", given=str(n_examples), fix=fix)


def _principal_components(
    states: Float[Tensor, "loop batch pos d_in"], n: int
) -> Callable[[Tensor], Tensor]:
    """The projection of states on the mean and first ``n`` principal components of all loops."""
    rows = states.flatten(0, 2).double()
    mean = rows.mean(0)
    covariance = (rows - mean).T @ (rows - mean)
    axes = torch.linalg.eigh(covariance).eigenvectors[:, -n:]  # [d_in, component]
    return lambda x: (mean + (x.double() - mean) @ axes @ axes.T).to(x.dtype)


def _random_like(
    shared: SparseAutoencoder, states: Float[Tensor, "loop batch pos d_in"], k: int, seed: int
) -> SparseAutoencoder:
    """Random directions around the mean state; as many are active as in the shared one."""
    config = AutoencoderConfig(
        d_in=states.shape[-1], n_features=shared.config.n_features, activation="topk", k=k
    )
    random = SparseAutoencoder(config, seed=seed).to(states)
    random.b_dec.copy_(states.mean((0, 1, 2)))
    return random


def _effective_loops(counts: Int[Tensor, "loop feature"]) -> np.ndarray:
    p = counts.double() / counts.sum(0).clamp(min=1)
    effective = torch.special.entr(p).sum(0).exp()
    return torch.where(counts.sum(0) >= RARE, effective, torch.nan).cpu().numpy()


def _shuffled_counts(
    active: Bool[Tensor, "loop batch pos feature"], generator: torch.Generator
) -> Tensor:
    """Active positions of each loop and feature, after loops were permuted at each position."""
    drawn = torch.rand(active.shape[:3], generator=generator, dtype=torch.float64)
    order = drawn.argsort(0).to(active.device)
    return active.gather(0, order[..., None].expand_as(active)).sum((1, 2))


def _fve(x: Float[Tensor, "batch pos d_in"], reconstruction: Tensor) -> np.ndarray:
    """Fraction of variance explained, with its interval over examples, [estimate]."""
    error = (x - reconstruction).double().square().sum((1, 2)).cpu()
    total = (x - x.mean((0, 1))).double().square().sum((1, 2)).cpu()
    unexplained = bootstrap_ratio(error, total, resamples=400).values
    return 1 - unexplained[[0, 2, 1]]


def _across(
    held_out: Float[Tensor, "loop batch pos d_in"],
    trained: Mapping[int, SparseAutoencoder],
    again: Mapping[int, SparseAutoencoder],
    chosen: Sequence[int],
    generator: torch.Generator,
) -> dict[str, np.ndarray]:
    size = len(chosen)
    fve, recentred, cosine, control = (np.full((size, size), np.nan) for _ in range(4))
    means = held_out.mean((1, 2))  # [loop, d_in]
    directions = [_live_directions(trained[t], x) for t, x in zip(chosen, held_out)]
    others = (
        [_live_directions(again[t], x) for t, x in zip(chosen, held_out)] if again else directions
    )
    for i, j in np.ndindex(size, size):
        fve[i, j] = _fve(held_out[j], trained[chosen[i]](held_out[j]))[0]
        moved = held_out[j] - means[j] + means[i]
        recentred[i, j] = _fve(moved, trained[chosen[i]](moved))[0]
        if not len(directions[i]) or not len(others[j]):
            continue
        if again or i != j:
            cosine[i, j] = float((directions[i] @ others[j].T).max(1).values.mean())
        rows = held_out[j].flatten(0, 1)
        pairs = torch.randint(len(rows), (2, len(others[j])), generator=generator)
        difference = normalize(rows[pairs[0]] - rows[pairs[1]], dim=1)
        control[i, j] = float((directions[i] @ difference.T).max(1).values.mean())
    live = np.array([len(x) for x in directions])
    return {**dict(zip(_ACROSS, (fve, recentred, cosine, control))), "live": live}


def _live_directions(
    autoencoder: SparseAutoencoder, states: Float[Tensor, "batch pos d_in"]
) -> Float[Tensor, "live d_in"]:
    live = (autoencoder.encode(states) > 0).flatten(0, 1).any(0)
    return normalize(autoencoder.W_dec[live], dim=1)


def _top(
    features: Float[Tensor, "loop batch pos feature"], chosen: Sequence[int], n_top: int
) -> dict[str, Tensor]:
    n_pos = features.shape[2]
    by_place = features.permute(3, 1, 0, 2).flatten(2)  # [feature, batch, loop * pos]
    strongest, place = by_place.max(-1)  # [feature, batch]
    value, example = strongest.topk(min(n_top, strongest.shape[1]), dim=1)
    place = place.gather(1, example)  # [feature, rank]
    loop, feature = place // n_pos, torch.arange(len(place), device=place.device)[:, None]
    return {
        "top_example": example,
        "top_loop": torch.tensor([*chosen], device=loop.device)[loop],
        "top_pos": place % n_pos,
        "top_value": value,
        "top_trace": features[loop, example, :, feature],
    }


def _spliced(
    run: CleanRun,
    scored: Bool[Tensor, "batch pos"],
    sites: Mapping[int, str],
    replace: Sequence[Callable[[Tensor], Tensor]],
) -> tuple[Float[np.ndarray, "loop measure example"], Float[np.ndarray, "measure example"]]:
    """Scores if the activation of one loop is replaced, and if those of all the loops are."""
    hooks = [(name, partial(_hook, f)) for name, f in zip(sites.values(), replace)]
    one = [_scores(run, scored, run.with_hooks([at], t)) for t, at in zip(sites, hooks)]
    return np.stack(one), _scores(run, scored, run.with_hooks(hooks))


def _scores(
    run: CleanRun, scored: Tensor, logits: Float[Tensor, "batch pos d_vocab_out"]
) -> Float[np.ndarray, "measure example"]:
    """Share of the clean run's answers that are kept, and their loss."""
    same = (logits.argmax(-1) == run.answers).double()
    log_p = logits.double().log_softmax(-1).gather(-1, run.answers[..., None])[..., 0]
    each = [(x * scored).sum(1) / scored.sum(1) for x in (same, -log_p)]
    return torch.stack(each).cpu().numpy()


def _hook(replace: Callable[[Tensor], Tensor], x: Tensor, hook: Any = None) -> Tensor:
    return replace(x.flatten(2)).to(x.dtype).reshape(x.shape)
