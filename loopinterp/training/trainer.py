"""One training run in memory: model, optimiser, curriculum and random streams."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

import torch

from loopinterp.errors import InputError
from loopinterp.models import LoopedTransformer
from loopinterp.models.pretrained import check_tensors
from loopinterp.short_repr import ShortRepr
from loopinterp.tasks.task import IGNORE
from loopinterp.training.curriculum import Curriculum
from loopinterp.training.device import make_bind, resolve_device, with_state_noise
from loopinterp.training.ema import Ema
from loopinterp.training.objectives import supervise
from loopinterp.training.run import reading_counters
from loopinterp.training.schedule import learning_rate_factor
from loopinterp.training.seeding import stream

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from loopinterp.models.looped_model import Iteration
    from loopinterp.tasks.task import Batch
    from loopinterp.training.config import TrainingConfig
    from loopinterp.training.objectives import Supervised

_MOMENTS = ("exp_avg", "exp_avg_sq")


class Trainer(ShortRepr):
    """Makes one optimiser step at a time; :meth:`state` and :meth:`load` freeze and thaw it.

    Args:
        config: The run. Its device is resolved here.

    Example:
        >>> from loopinterp.training import RECIPES
        >>> trainer = Trainer(RECIPES["addition-quick"])
        >>> metrics = trainer.step()
        >>> trainer.steps_done, metrics["longest_n"]
        (1, 1)
    """

    def __init__(self, config: TrainingConfig) -> None:
        self.config = config
        self.device = resolve_device(config.device)
        self.task = config.make_task()
        self.model = LoopedTransformer(config.model, seed=config.seed).to(self.device)
        self.ema = Ema(self.model, config.ema)
        self.curriculum = Curriculum(config.curriculum)
        settings = config.optimiser
        self.optimiser = torch.optim.AdamW(
            self.model.parameters(),
            lr=settings.lr,
            betas=settings.betas,
            eps=settings.eps,
            weight_decay=settings.weight_decay,
            fused=True,
        )
        self.generators = {
            "data": stream(config.seed, "data"),
            "objective": stream(config.seed, "objective"),
            "noise": stream(config.seed, "noise", self.device),
        }
        self._bind = make_bind(self.model, compiled=config.compile)
        self.steps_done = 0

    def step(self) -> dict[str, float | int]:
        """Draw a batch and descend once.

        Raises:
            InputError: If the loss or the gradient is not finite, where the weights are left as
                the step before made them; or if a weight is not finite after the step.
        """
        batch = self.begin()
        supervised = self._supervise(batch)
        supervised.loss.backward()
        return self.finish(batch, supervised)

    def begin(self) -> Batch:
        """The part of a step before the forward pass: a batch is drawn, gradients are cleared."""
        self.optimiser.zero_grad(set_to_none=True)
        return self._batch()

    def finish(self, batch: Batch, supervised: Supervised) -> dict[str, float | int]:
        """The part of a step after the backward pass: the weights move, and are averaged.

        Raises:
            InputError: As :meth:`step`.
        """
        config, settings = self.config, self.config.optimiser
        factor = learning_rate_factor(
            settings,
            step=self.steps_done,
            n_steps=config.steps,
            curriculum_done_at=self.curriculum.done_at,
        )
        for group in self.optimiser.param_groups:
            group["lr"] = settings.lr * factor
        limit = math.inf if settings.clip is None else settings.clip
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), limit)
        exact = _exact_match(supervised.logits, batch.targets)
        loss, grad_norm, exact_match = torch.stack(
            [supervised.loss.detach().float(), norm.float(), exact]
        ).tolist()
        self._check_finite(loss, grad_norm)
        self.optimiser.step()
        self._check_weights()
        self.ema.update()
        self.steps_done += 1
        metrics = {
            "step": self.steps_done,
            "loss": loss,
            "exact_match": exact_match,
            "longest_n": self.curriculum.longest,
            "lr": settings.lr * factor,
            "grad_norm": grad_norm,
        }
        self.curriculum.update(exact_match)
        return metrics

    def averaged_model(self) -> LoopedTransformer:
        """A copy of the model with the averaged weights, on the CPU: what is evaluated."""
        model = LoopedTransformer(self.config.model)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(self.ema.shadow[name])
        return model

    def state(self) -> tuple[dict[str, Tensor], dict[str, str]]:
        """Everything that the next step depends on: tensors, and JSON as safetensors metadata."""
        tensors = {f"weights/{k}": v for k, v in self.model.named_parameters()}
        tensors |= {f"ema/{k}": v for k, v in self.ema.shadow.items()}
        for name, parameter in self.model.named_parameters():
            moments = self.optimiser.state[parameter]
            for moment in _MOMENTS:
                tensors[f"{moment}/{name}"] = moments[moment]
        tensors |= {f"random/{k}": g.get_state() for k, g in self.generators.items()}
        scalars = {
            "steps_done": self.steps_done,
            "ema_updates": self.ema.n_updates,
            "curriculum": self.curriculum.state(),
        }
        return tensors, {"scalars": json.dumps(scalars)}

    @torch.no_grad()
    def load(self, tensors: dict[str, Tensor], metadata: dict[str, str], path: Path) -> None:
        """Take back what :meth:`state` gave.

        Raises:
            CheckpointError: If it is of another model or of another version.
        """
        for parameter in self.model.parameters():
            self.optimiser.state[parameter] = {
                "step": torch.tensor(0.0, device=parameter.device),
                **{moment: torch.zeros_like(parameter) for moment in _MOMENTS},
            }
        wanted, _ = self.state()
        fix = "Restore them, or train in another folder."
        check_tensors(tensors, wanted, f"checkpoint {path}", fix=fix)
        with reading_counters(path):
            scalars: dict[str, Any] = json.loads(metadata["scalars"])
            self.steps_done = int(scalars["steps_done"])
            self.ema.n_updates = int(scalars["ema_updates"])
            self.curriculum.load(scalars["curriculum"])
        for name, tensor in wanted.items():
            tensor.copy_(tensors[name])
        for moments in self.optimiser.state.values():
            moments["step"].fill_(self.steps_done)
        for name, generator in self.generators.items():
            generator.set_state(tensors[f"random/{name}"])

    def _batch(self) -> Batch:
        generator = self.generators["data"]
        lengths = self.curriculum.lengths(self.config.batch_size, generator)
        batch = self.task.sample(
            lengths, generator=generator, distribution=self.config.distribution
        )
        return batch.to(self.device)

    def autocast(self) -> torch.autocast:
        """What a forward pass runs in: the precision that is configured."""
        half = self.config.precision == "bf16"
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=half)

    def bind(self, batch: Batch) -> Iteration:
        """The model bound to a batch, at positions that training draws."""
        return self._bind(batch.inputs, position_offset=self._position_offset())

    def _supervise(self, batch: Batch) -> Supervised:
        with self.autocast():
            iteration = self.bind(batch)
            if self.config.state_noise:
                iteration = with_state_noise(
                    iteration, self.config.state_noise, self.generators["noise"]
                )
            generator = self.generators["objective"]
            return supervise(self.config.objective, iteration, batch, generator=generator)

    def _position_offset(self) -> int | Tensor:
        """Abacus positions start anywhere in training, so that all of the table is trained."""
        model = self.config.model
        if model.positions != "abacus":
            return 0
        highest, data = model.abacus_max_offset + 1, self.generators["data"]
        if self.config.offset_per_example:
            size = (self.config.batch_size,)
            return torch.randint(highest, size, generator=data).to(self.device)
        return int(torch.randint(highest, (), generator=data))

    def _check_finite(self, loss: float, grad_norm: float) -> None:
        for what, value in {"loss": loss, "gradient norm": grad_norm}.items():
            if not math.isfinite(value):
                what = f"{what} at step {self.steps_done + 1}"
                raise self._unstable(what, "a finite number", value)

    def _check_weights(self) -> None:
        """A finite gradient can still carry a weight beyond what its type holds."""
        weights = dict(self.model.named_parameters())
        if bool(torch.isfinite(torch.nn.utils.get_total_norm(weights.values()))):
            return
        for name, x in weights.items():  # the norm of finite weights may overflow as well
            if spoiled := int((~torch.isfinite(x)).sum()):
                raise self._unstable(
                    f"weights {name} after step {self.steps_done + 1}",
                    "finite numbers",
                    f"{spoiled} of {x.numel()} that are not",
                )

    def _unstable(self, what: str, expected: str, given: object) -> InputError:
        return InputError(
            what,
            expected=expected,
            given=str(given),
            fix=f"Lower optimiser.lr (now {self.config.optimiser.lr:g}), set optimiser.clip=1, or "
            "train longer warm-up (optimiser.warmup_steps), in a new folder; what was saved "
            "before this step is kept.",
        )


@torch.no_grad()
def _exact_match(logits: Tensor, targets: Tensor) -> Tensor:
    """Share of examples that are right at every position that is asked for."""
    right = (logits.argmax(-1) == targets) | (targets == IGNORE)
    return right.all(-1).float().mean()
