"""Lenses by loop: what the state says of the answer after each loop, read in one of four ways."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from loopinterp.dynamics.state_trajectories import gather
from loopinterp.errors import InputError, check_integer
from loopinterp.lenses.chosen_lens import check_lens, fitted_lens, loops_of_lens, of_other_weights
from loopinterp.lenses.lens_readings import LensReader, baselines
from loopinterp.models.looped_model import need_hooks, need_model
from loopinterp.models.model_description import describe_model
from loopinterp.results import Result, study
from loopinterp.study_examples import examples_for, inputs_and_loops, need_loops
from loopinterp.tasks.task import Batch

if TYPE_CHECKING:
    import xarray as xr
    from jaxtyping import Int
    from torch import Tensor

    from loopinterp.lenses.chosen_lens import LensName
    from loopinterp.lenses.fitted_lens import FittedLens
    from loopinterp.models import LoopedModel
    from loopinterp.tasks.task import Task

_CELL = "loop layer batch pos"


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class LensResult(Result, kind="lens"):
    r"""What :func:`lens_study` returns.

    ``loop`` counts loops made: loop 0 is the initial state. ``layer`` is "state", what the loop
    leaves, and where the study looks inside loops "layer 0", …: the residual after that layer of
    the last loop made. The initial state has no layers: NaN there, and -1 where numbers are whole.

    Arrays:
        answer: The class that is on top.
        rank: Rank of the wanted class, 1 for the top.
        probability: Probability of the wanted class.
        entropy: Entropy of the reading, in nats.
        kl: :math:`\mathrm{KL}(p_T \| q)` in nats: from the model's own readout after the last loop
            to the reading.
        wanted: The right class; where the data has none, the model's own answer after the last
            loop; -1 where nothing is asked.
        settled: The loop from which on the state is read as it is at the end (from 1 on, as
            the initial state has seen no loop).
        flips: How often the reading changes from one loop to the next, from loop 1 on.
        reading_kl: Mean of ``kl`` over the asked positions of an example, by ``reading``: "lens";
            "plain", final norm and unembedding alone, or where that is the lens and the model has
            a coda, "coda", its own readout; and "shuffled", the lens on states whose components
            are shuffled, all alike, the mean of four shuffles (controls).
        reading_top: Share of its asked positions at which the wanted class is on top, likewise.
        unigram_kl: The same divergence to the mean of all :math:`p_T` (control: nothing of the
            state is read).
        majority_top: Share of its asked positions whose wanted class is the most frequent of all
            (control).
        transfer_kl: With a map for each place: mean ``kl`` where the map of loop ``translator``
            reads the state after loop ``applied`` (control: whether a loop needs its own). That
            of the last loop is the identity.
        expected_top: Share of asked positions that are read as what the model is known to hold
            after that loop, as a compiled one does (control: a state that holds an intermediate
            value is far from the end, and read rightly). NaN where nothing is decided yet.

    Attributes:
        lens: "logit", "coda", "tuned" or "jacobian".
        has_coda: Whether the model has a coda, without which "logit" and "coda" are the same lens.
        targets: Whether the data says what is right.
        n_fit: Examples that the lens was fitted on; 0 where none are needed.
        of_other_weights: Whether it was fitted on other weights than those that it reads.
    """

    VARIABLES: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("answer", "rank", "probability", "entropy", "kl"), _CELL),
        **dict.fromkeys(("wanted", "settled", "flips"), "batch pos"),
        **dict.fromkeys(("reading_kl", "reading_top"), "reading loop layer batch"),
        **dict.fromkeys(("unigram_kl", "majority_top"), "batch"),
        "transfer_kl": "translator applied batch",
        "expected_top": "loop",
    }
    OPTIONAL: ClassVar[frozenset[str]] = frozenset({"transfer_kl", "expected_top"})

    lens: str
    has_coda: bool
    targets: bool
    n_fit: int = 0
    of_other_weights: bool = False

    @property
    def n_loops(self) -> int:
        """Loops of the run."""
        return self.data.sizes["loop"] - 1

    @property
    def asked(self) -> xr.DataArray:
        """Where an answer is asked for, [batch, pos]."""
        return self.data["wanted"] >= 0

    @property
    def top(self) -> xr.DataArray:
        """Share of asked positions at which the wanted class is on top, [loop, layer]."""
        right = (self.data["rank"] == 1) & self.asked
        return (right.sum(("batch", "pos")) / self.asked.sum()).where(self.there)

    @property
    def there(self) -> xr.DataArray:
        """Which places there are, [loop, layer]: all but the layers before the first loop."""
        return (self.data["answer"] >= 0).any(("batch", "pos"))


@torch.no_grad()
def lens_study(
    model: LoopedModel | Any,
    data: Batch | Task | Tensor,
    *,
    lens: LensName | FittedLens = "logit",
    n_loops: int | None = None,
    inside: bool = False,
    positions: Sequence[int] | None = None,
    fit_on: Batch | Task | Tensor | None = None,
    expected: Int[Tensor, "loop batch pos"] | None = None,
    n: int | None = None,
    batch_size: int | None = None,
    seed: int = 0,
) -> LensResult:
    r"""Read every state of a run through a lens, with its controls.

    ========== ==========================================================================
    logit      ``unembed(final_norm(h))``, without a coda
    coda       ``model.readout(h)``, coda included: the same where there is none
    tuned      ``model.readout(A_t h + b_t)``, trained: :func:`fit_tuned_lens`
    jacobian   ``model.readout(J_t h)``, :math:`J_t = \mathbb{E}\,\partial h_T/\partial h_t`:
               :func:`fit_jacobian_lens`
    ========== ==========================================================================

    Inside a loop the first three read what the loop would leave if it ended at that layer: with
    its loop norm. At the last state all but the logit lens of a model with a coda are the model's
    own readout. A lens that has to be fitted is fitted on other examples than it reads.

    Args:
        model: Any looped model.
        data: A batch, its inputs alone, or a task to draw a batch from; all asked for after one
            number of loops.
        lens: Its name, or one that is fitted already.
        n_loops: Loops T of the run; T(n) by default, that of its fit for a fitted lens.
        inside: Whether to read after each layer too, which takes a model with hooks.
        positions: Positions to read; all by default.
        fit_on: What to fit on; by default the task that the data is of, with another seed.
        expected: Classes that the model is known to hold after each loop, from loop 0 on, as
            ``program.trace(batch.inputs, n_loops=T).outputs`` of the one that it was compiled from;
            -1 where there is none.
        n: Problem length, where a task is given; see :func:`~loopinterp.tasks.as_batch`.
        batch_size: Examples, where a task is given.
        seed: Seed of what is drawn.

    Raises:
        InputError: If examples are asked for after several numbers of loops, the lens does not fit
            the model, or nothing is asked at any position that is read.

    Example:
        >>> from loopinterp.rasp import compile_program
        >>> from loopinterp.tasks import Addition
        >>> model = compile_program("ripple", max_length=6).model
        >>> result = lens_study(model, Addition(), lens="coda", n=5, batch_size=32)
        >>> result.top.sel(layer="state").values.round(1).tolist()
        [0.8, 0.9, 1.0, 1.0, 1.0, 1.0, 1.0]
    """
    need_model(model)
    name = check_lens(lens)
    drawn = {"n": n, "batch_size": batch_size, "seed": seed}
    inputs, targets, n_loops = _inputs(model, data, n_loops, lens, drawn)
    if inside:
        need_hooks(model)
    n_pos = inputs.shape[1]
    chosen = [
        check_integer("positions", p, least=-n_pos, most=n_pos - 1) % n_pos
        for p in (range(n_pos) if positions is None else positions)
    ]
    if not chosen or len({*chosen}) < len(chosen):
        raise InputError(
            "positions",
            expected="one at least, each once",
            given=str(list(positions or [])),
            fix="Pass e.g. positions=[-1], or None for all.",
        )
    described = describe_model(model)
    options = {"n_loops": n_loops, "inside": inside, "n_examples": len(inputs)}
    with study(seed, study="lens", model=described, lens=name, **options) as watch:
        how = {"n_loops": n_loops, "inside": inside, "seed": seed}
        fitted = fitted_lens(lens, model, data, fit_on=fit_on, n=n, **how)
        reader = LensReader(model, name, fitted, n_loops, inside, chosen, seed)
        run = reader.parts(inputs, targets)
        wanted = torch.cat([part["wanted"] for part in run])
        if not bool((wanted >= 0).any(1).all()):
            raise InputError(
                "data",
                expected="an answer to be asked for at some position of each example that is read",
                given=f"none in {int((wanted < 0).all(1).sum())} of {len(wanted)} examples",
                fix="Leave positions= out, or pass inputs alone to read what the model ends with.",
            )
        controls = baselines(run)
        if expected is not None:
            controls["expected_top"] = _expected_top(run, wanted, expected, chosen)
        coords: dict[str, Any] = {
            "loop": range(n_loops + 1),
            "layer": reader.layers,
            "pos": chosen,
            "reading": reader.readings,
        }
        if reader.transferred:
            coords |= {"translator": reader.transferred, "applied": reader.transferred}
        return LensResult.of(
            watch,
            coords=coords,
            **gather(LensResult, [{k: v for k, v in p.items() if k[0] != "_"} for p in run]),
            **controls,
            lens=name,
            has_coda=reader.has_coda,
            targets=targets is not None,
            n_fit=fitted.n_examples if fitted else 0,
            of_other_weights=fitted is not None and of_other_weights(fitted, described),
        )


def _expected_top(
    run: list[dict[str, Tensor]], wanted: Tensor, expected: Tensor, chosen: list[int]
) -> Tensor:
    """Share of the asked positions whose state is read as the expected class, [loop]."""
    answer = torch.cat([part["answer"][:, -1] for part in run], dim=1)  # [loop, batch, pos]
    n_pos = max(chosen) + 1
    fits = expected.ndim == 3 and expected.shape[2] >= n_pos
    if not fits or expected.shape[:2] != answer.shape[:2]:
        raise InputError(
            "expected",
            expected=f"a class for each loop, example and position, {[*answer.shape[:2], n_pos]}",
            given=str([*expected.shape]),
            fix="Trace the program on the same inputs, over as many loops.",
        )
    wish = expected.to(answer.device)[:, :, chosen]
    decided = (wish >= 0) & (wanted >= 0)
    # Of no decided position the share is 0 / 0: NaN, nothing is known of that loop.
    return ((answer == wish) & decided).sum((1, 2)) / decided.sum((1, 2))


def _inputs(
    model: Any, data: Any, n_loops: int | None, lens: LensName | FittedLens, drawn: dict[str, Any]
) -> tuple[Tensor, Tensor | None, int]:
    """Inputs, what is right if that is known, and loops."""
    n_loops = loops_of_lens(lens, n_loops)
    if isinstance(data, torch.Tensor):
        inputs, n_loops = inputs_and_loops(model, data, n_loops)
        check_integer("n_loops", n_loops, least=1)
        return inputs, None, n_loops
    batch = examples_for(model, data, **drawn)
    if n_loops is None:
        need_loops(model)
        if len(own := batch.n_loops.unique().tolist()) != 1:
            raise InputError(
                "data",
                expected="examples that are asked for after one number of loops",
                given=f"examples asked for after {own} loops",
                fix="Sample them with one n, or pass n_loops.",
            )
        n_loops = own[0]
    return batch.inputs, batch.targets, check_integer("n_loops", n_loops, least=1)
