"""From a recipe to the smallest finite-state model."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from loopinterp.core.boundary import checked
from loopinterp.core.errors import ConfigError, check_integer
from loopinterp.core.run_files import CONFIG
from loopinterp.core.text import ShortRepr
from loopinterp.models import LoopedTransformer
from loopinterp.training.config import CodeConfig, CurriculumConfig
from loopinterp.training.device import stream
from loopinterp.training.evaluation import evaluate
from loopinterp.training.fitting import train
from loopinterp.training.run import Run

if TYPE_CHECKING:
    from jaxtyping import Int
    from torch import Tensor

    from loopinterp.tasks.task import Task
    from loopinterp.training.config import TrainingConfig

# A stage has learnt if all answers are right at so many times the training cutoff, to so many
# examples of each length and distribution.
_TIMES, _EXAMPLES = (1, 2, 4), 200

_TUNING_STEPS, _STEPS_FROM_ANYWHERE = 350, 600
_MOST_STARTS = 64  # initial bits that are tried


@dataclass(frozen=True)
class FiniteStage(ShortRepr):
    """A stage on the way to the smallest model.

    ``chosen_start``: whether its initial bits were chosen after training.
    """

    n_bits: int
    run: Run
    from_anywhere: bool
    lowest: dict[int, float]
    chosen_start: bool = False

    @property
    def learnt(self) -> bool:
        """Whether every answer was right."""
        return min(self.lowest.values()) == 1


@checked
def train_finite(
    config: TrainingConfig,
    out: str | Path,
    *,
    fewest_bits: int = 1,
    progress: bool = True,
    resume: bool = True,
) -> list[FiniteStage]:
    """Train a model with a state code, and drop its bits one by one while it stays right.

    Each dropped bit is followed by some hundred steps. The smallest model that has learnt is
    trained from random initial bits, so that its answer cannot rely on the initial state; if that
    succeeds, further bits are dropped. Finally it gets the initial bits with every answer right and
    the fewest cells (pairs of a token and a code) in clean runs.

    Args:
        config: The first stage, with ``model.state_code``.
        out: A folder of ordinary runs, one per stage: ``bits-4``, ``bits-3``, …,
            ``bits-3-from-anywhere`` and ``bits-3-chosen-start``.
        fewest_bits: Lower limit of bits; there are always enough for the task's answers.

    Returns:
        All stages in the order of training; see :func:`smallest_stage`.
    """
    if config.model.state_code is None:
        expected = "a number of bits, for a finite-state model"
        fix = "Set model.state_code=4 and model.initial_state=code."
        raise ConfigError("model.state_code", expected=expected, given="none", fix=fix)
    check_integer("fewest_bits", fewest_bits, least=1, most=config.model.state_code)
    # The readout sees the state alone, so there have to be as many states as answers.
    for_answers = (config.model.d_vocab_out - 1).bit_length()
    fewest_bits = max(fewest_bits, min(for_answers, config.model.state_code))
    out, options = Path(out), {"progress": progress, "resume": resume}
    stages = [_stage(config, out, **options)]
    while stages[-1].learnt and stages[-1].n_bits > fewest_bits:
        tuned = _tuned(config, stages[-1], stages[-1].n_bits - 1)
        stages.append(_stage(tuned, out, **options))
    if (smallest := smallest_stage(stages)) is None:
        return stages
    for n_bits in range(smallest.n_bits, fewest_bits - 1, -1):
        drawn = {"random_everywhere": 0.4, "random_somewhere": 0.4}  # initial bits
        from_anywhere = _tuned(config, smallest, n_bits).replace(
            steps=_STEPS_FROM_ANYWHERE,
            code=CodeConfig(hard=0.3, harden_from=0.2, harden_to=0.6, gain=3.0, **drawn),
            objective=config.objective.replace(hold_loops=0, hold_share=0.25),
        )
        stages.append(_stage(from_anywhere, out, **options))
        if not stages[-1].learnt:
            break
        smallest = stages[-1]
    if smallest.from_anywhere and (chosen := _with_chosen_start(smallest, out, resume=resume)):
        stages.append(chosen)
    return stages


def with_initial_bits(model: LoopedTransformer, bits: Int[Tensor, " n_bits"]) -> LoopedTransformer:
    """The same model, started from these bits (-1 or 1) instead of -1 everywhere.

    A bit and its two directions change sign together, which leaves every state unchanged.
    """
    signs = -bits.to(torch.float32)
    weights = model.state_dict()
    weights |= {
        "code.read.weight": weights["code.read.weight"] * signs[:, None],
        "code.read.bias": weights["code.read.bias"] * signs,
        "code.write.weight": weights["code.write.weight"] * signs,
    }
    turned = LoopedTransformer(model.config)
    turned.load_state_dict(weights)
    turned.loop_rule = model.loop_rule
    return turned


def smallest_stage(stages: list[FiniteStage]) -> FiniteStage | None:
    """The last stage with the fewest bits that has learnt, if any."""
    learnt = [one for one in reversed(stages) if one.learnt]
    return min(learnt, key=lambda one: one.n_bits, default=None)


def _tuned(config: TrainingConfig, before: FiniteStage, n_bits: int) -> TrainingConfig:
    lengths = {"max_n": config.curriculum.max_n, "min_n": config.curriculum.min_n}
    return config.replace(
        model=config.model.replace(state_code=n_bits),
        start_from=str(before.run.folder),
        curriculum=CurriculumConfig(kind="none", **lengths),
        optimiser=config.optimiser.replace(schedule="linear", decay=0.3),
        steps=_TUNING_STEPS,
        code=CodeConfig(hard=0.2, harden_from=0.3, harden_to=0.7, gain=3.0),
    )


def _with_chosen_start(stage: FiniteStage, out: Path, *, resume: bool) -> FiniteStage | None:
    """The stage with the initial bits of the fewest cells; None if unchanged."""
    folder, n_bits = out / f"bits-{stage.n_bits}-chosen-start", stage.n_bits
    if resume and (folder / CONFIG).exists():  # written last: without it, it was killed on the way
        run = Run.load(folder)
        lowest = _lowest(run.model(), run.task, run.cutoff)
        return FiniteStage(n_bits, run, True, lowest, chosen_start=True)
    if 2**n_bits > _MOST_STARTS:
        return None
    model, task, cutoff = stage.run.model(), stage.run.task, stage.run.cutoff
    inputs = task.sample(cutoff, batch_size=_EXAMPLES, generator=stream(0, "initial bits")).inputs
    starts = torch.tensor([*itertools.product((-1, 1), repeat=n_bits)])  # its own start is first
    turned = [with_initial_bits(model, bits) for bits in starts]
    fewest_first = sorted(range(len(starts)), key=lambda k: _count_cells(turned[k], inputs))
    for k in fewest_first[: fewest_first.index(0)]:
        bits = "".join("-+"[int(bit > 0)] for bit in starts[k])
        origin = f"trained in {stage.run.folder.name}; its initial bits ({bits}) were chosen later"
        lowest = _lowest(turned[k], task, cutoff)
        if min(lowest.values()) == 1:
            run = Run.from_model(turned[k], task, folder, max_n=cutoff, origin=origin)
            return FiniteStage(n_bits, run, True, lowest, chosen_start=True)
    return None


@torch.no_grad()
def _count_cells(model: LoopedTransformer, inputs: Int[Tensor, "batch pos"]) -> int:
    states = model(inputs, return_type="states")  # [loop, batch, pos, d_model]
    tokens = inputs.expand(len(states), -1, -1)[..., None].to(states)
    return len(torch.cat([tokens, states], dim=-1).flatten(0, 2).unique(dim=0))


def _stage(config: TrainingConfig, out: Path, *, progress: bool, resume: bool) -> FiniteStage:
    n_bits, anywhere = config.model.state_code or 0, config.code.random_everywhere > 0
    folder = out / (f"bits-{n_bits}" + "-from-anywhere" * anywhere)
    run = train(config, folder, progress=progress, resume=resume)
    lowest = _lowest(run.model(), run.task, run.cutoff)
    return FiniteStage(n_bits, run, anywhere, lowest)


def _lowest(model: LoopedTransformer, task: Task, cutoff: int) -> dict[int, float]:
    lengths = [cutoff * times for times in _TIMES]
    found = evaluate(model, task, lengths, n_samples=_EXAMPLES)
    return {n: found.lowest(n).share for n in lengths}
