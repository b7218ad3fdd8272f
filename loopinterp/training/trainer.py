"""One training run in memory: model, optimiser, curriculum and random streams."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from loopinterp.errors import ConfigError, InputError
from loopinterp.models import LoopedTransformer
from loopinterp.models.pretrained import check_tensors
from loopinterp.models.recorded_gradients import recording_gradients
from loopinterp.models.state_code import Softening
from loopinterp.short_repr import ShortRepr
from loopinterp.tasks.task import IGNORE
from loopinterp.training.config import HARD_GAIN, SOMEWHERE
from loopinterp.training.curriculum import Curriculum
from loopinterp.training.device import (
    make_bind,
    resolve_device,
    send,
    with_given_noise,
    with_state_noise,
)
from loopinterp.training.ema import Ema
from loopinterp.training.objectives import answers_at, ask
from loopinterp.training.processes import ALONE, Processes
from loopinterp.training.run import reading_counters
from loopinterp.training.schedule import learning_rate_factor
from loopinterp.training.seeding import stream
from loopinterp.training.starting_model import starting_model

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from torch import Tensor

    from loopinterp.models.looped_model import Iteration
    from loopinterp.tasks.task import Batch
    from loopinterp.training.config import TrainingConfig
    from loopinterp.training.objectives import Asked, Supervised

_MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Drawn:
    """What a step draws.

    Attributes:
        inputs: Those of this process's examples, on the model's device.
        position_offset: Where abacus positions start.
        asked: What the objective wants to know of these examples.
        ends: Loops of every example of the whole batch, of all processes.
    """

    inputs: Tensor
    position_offset: int | Tensor
    asked: Asked
    ends: Tensor


class Trainer(ShortRepr):
    """Makes one optimiser step at a time; :meth:`state` and :meth:`load` freeze and thaw it.

    :meth:`step` says how each went, which takes waiting for the device. :meth:`advance` does not;
    :meth:`read` then says it of several at once, as soon as it is :attr:`due`.

    Args:
        config: The run. Its device is resolved here.
        processes: Those that train together; this one alone if nothing is said.

    Example:
        >>> from loopinterp.training import RECIPES
        >>> trainer = Trainer(RECIPES["addition-quick"])
        >>> metrics = trainer.step()
        >>> trainer.steps_done, metrics["longest_n"]
        (1, 1)
    """

    def __init__(self, config: TrainingConfig, processes: Processes = ALONE) -> None:
        if processes.count > 1 and config.model.state_code is not None:
            raise ConfigError(
                "model.state_code",
                expected="none where several processes train, as signs are drawn for a whole batch",
                given=str(config.model.state_code),
                fix="Train with one process.",
            )
        self.config, self.processes = config, processes
        self.device = resolve_device(config.device)
        self.task = config.make_task()
        self.model = starting_model(config).to(self.device)
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
        if config.model.state_code is not None:
            self.generators["code"] = stream(config.seed, "code", self.device)
        self._bind = make_bind(self.model, compiled=config.compile)
        self.steps_done = 0
        self._spoiled = torch.zeros((), dtype=torch.bool, device=self.device)
        self._unread: list[tuple[Tensor, dict[str, Any]]] = []

    def step(self) -> dict[str, float | int]:
        """Draw a batch, descend once, and say how that went.

        Raises:
            InputError: If the loss or the gradient is not finite, where the weights are left as
                the step before made them; or if a weight is not finite after the step.
        """
        self.advance()
        return self.read()[-1]

    def advance(self) -> None:
        """A step whose metrics nobody has asked for yet: nothing waits for the device.

        The device minds by itself that what is not finite changes no weight, and no step after it
        does; :meth:`read` says so, and has to be called before what is saved is saved.
        """
        with recording_gradients():
            drawn = self.begin()
            supervised = self._supervise(drawn)
            supervised.loss.backward()
            self.finish(drawn, supervised)

    def begin(self) -> Drawn:
        """The part of a step before the forward pass: a batch is drawn, gradients are cleared."""
        self.optimiser.zero_grad(set_to_none=True)
        return self.draw()

    def draw(self) -> Drawn:
        """A batch, looked at before it is sent to the device."""
        batch, offset = self._batch(), self._position_offset()
        self.model.check_inputs(batch.inputs, position_offset=offset)
        asked = ask(self.config.objective, batch, self.generators["objective"])
        ends, rows = asked.loops.amax(0), self.processes.rows
        if self.processes.count > 1:
            _need_a_loop(ends)
            asked = asked.of(rows)
        inputs = send(batch.inputs[rows], self.device)
        if isinstance(offset, torch.Tensor):
            offset = send(offset[rows], self.device)
        return Drawn(inputs, offset, asked, ends)

    def finish(self, drawn: Drawn, supervised: Supervised) -> None:
        """The part of a step after the backward pass: the weights move, and are averaged."""
        config, settings = self.config, self.config.optimiser
        factor = learning_rate_factor(
            settings,
            step=self.steps_done,
            n_steps=config.steps,
            curriculum_done_at=self.curriculum.done_at,
        )
        for group in self.optimiser.param_groups:
            group["lr"] = settings.lr * factor
        exact = _exact_matches(supervised.logits, send(drawn.asked.targets[0], self.device))
        said = torch.stack([supervised.loss.detach().float(), exact / len(drawn.ends)])
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        self.processes.add_up([*gradients, said])
        limit = math.inf if settings.clip is None else settings.clip
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), limit)
        made = torch.stack([said[0], norm.float(), said[1]])
        self._spoiled |= ~made[:2].isfinite().all()
        # PyTorch's word for it, from the scaling of gradients: a step in which it is 1 is none.
        self.optimiser.found_inf = self._spoiled.float()  # type: ignore[attr-defined]
        self.optimiser.step()
        # A finite gradient can still carry a weight beyond what its type holds.
        largest = torch.nn.utils.get_total_norm([*self.model.parameters()], math.inf)
        self._spoiled |= ~largest.isfinite()
        self.ema.update(unless=self._spoiled)
        self.steps_done += 1
        known = {"step": self.steps_done, "longest_n": self.curriculum.longest}
        known |= {"lr": settings.lr * factor}
        self._unread.append((torch.cat([made, largest.float()[None]]), known))

    @property
    def due(self) -> bool:
        """Whether it is time to :meth:`read`.

        A line of metrics or a checkpoint is due, or the next lengths may depend on what is read.
        """
        config, step = self.config, self.steps_done
        written = (config.log_every, config.checkpoint_every, config.steps)
        return any(step % every == 0 for every in written) or self.curriculum.may_grow(
            len(self._unread)
        )

    def read(self) -> list[dict[str, float | int]]:
        """Metrics of the steps since the last reading, in turn; the one wait for the device.

        Raises:
            InputError: As :meth:`step`, at the first of them that is not finite; what is left is
                what the step before made.
        """
        unread, self._unread = self._unread, []
        if not unread:
            return []
        found = []
        for (loss, norm, exact, largest), known in zip(
            torch.stack([values for values, _ in unread]).tolist(), [known for _, known in unread]
        ):
            self._check_finite(loss, norm, largest, known["step"])
            self.curriculum.update(exact)
            found.append(
                {
                    "step": known["step"],
                    "loss": loss,
                    "exact_match": exact,
                    "longest_n": known["longest_n"],
                    "lr": known["lr"],
                    "grad_norm": norm,
                }
            )
        return found

    def averaged_model(self) -> LoopedTransformer:
        """A copy of the model with the averaged weights, on the CPU: what is evaluated."""
        model = LoopedTransformer(self.config.model)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(self.ema.shadow[name])
        return model

    def state(self) -> tuple[dict[str, Tensor], dict[str, str]]:
        """Everything that the next step depends on: tensors, and JSON as safetensors metadata.

        Raises:
            InputError: If steps have been made that nobody has :meth:`read`.
        """
        if self._unread:
            raise InputError(
                "training state",
                expected="steps of which it is known that they were finite",
                given=f"{len(self._unread)} that have not been read",
                fix="Call trainer.read() first.",
            )
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
        self._unread.clear()
        self._spoiled.fill_(False)

    def _batch(self) -> Batch:
        generator = self.generators["data"]
        lengths = self.curriculum.lengths(self.config.batch_size, generator)
        return self.task.sample(lengths, generator=generator, distribution=self.config.distribution)

    def autocast(self) -> torch.autocast:
        """What a forward pass runs in: the precision that is configured."""
        half = self.config.precision == "bf16"
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=half)

    def bind(self, drawn: Drawn) -> Iteration:
        """The model bound to what was drawn."""
        return self._bind(drawn.inputs, position_offset=drawn.position_offset, look=False)

    def _supervise(self, drawn: Drawn) -> Supervised:
        with self.autocast(), self._soft_signs():
            iteration = self._started(self.bind(drawn))
            if self.config.state_noise and self.processes.count > 1:
                iteration = with_given_noise(iteration, self._share_of_noise(drawn, iteration.h0))
            elif self.config.state_noise:
                iteration = with_state_noise(
                    iteration, self.config.state_noise, self.generators["noise"]
                )
            return drawn.asked.score(answers_at(iteration, drawn.asked.loops))

    @contextmanager
    def _soft_signs(self) -> Iterator[None]:
        """The signs of a state code as soft as they are at this step."""
        code, settings = self.model.code, self.config.code
        if code is None:
            yield
            return
        hardness = settings.hardness(self.steps_done / self.config.steps)
        softening = Softening(
            hard=settings.hard + (1 - settings.hard) * hardness,
            gain=settings.gain + (HARD_GAIN - settings.gain) * hardness,
            noise=settings.noise * (1 - hardness),
            generator=self.generators["code"],
        )
        with code.softened(softening):
            yield

    def _started(self, iteration: Iteration) -> Iteration:
        """The iteration from initial bits that are drawn, in some examples."""
        code, settings = self.model.code, self.config.code
        everywhere, somewhere = settings.random_everywhere, settings.random_somewhere
        if code is None or not everywhere + somewhere:
            return iteration
        h, generator = iteration.h0, self.generators["code"]
        how = {"generator": generator, "device": h.device, "dtype": h.dtype}
        bits = torch.randint(2, (*h.shape[:2], code.n_bits), generator=generator, device=h.device)
        example, place = torch.rand(len(h), 1, **how), torch.rand(h.shape[:2], **how)
        drawn = (example < everywhere) | ((example < everywhere + somewhere) & (place < SOMEWHERE))
        return replace(iteration, h0=code.state(2.0 * bits - 1).to(h).where(drawn[..., None], h))

    def noise(self, like: Tensor, running: Iterable[int]) -> list[Tensor]:
        """What :func:`with_state_noise` adds before each loop to as many examples as run it."""
        std, generator = self.config.state_noise, self.generators["noise"]
        if not std:
            return []
        kind = {"device": like.device, "dtype": like.dtype, "generator": generator}
        return [std * torch.randn(n, *like.shape[1:], **kind) for n in running]

    def _share_of_noise(self, drawn: Drawn, like: Tensor) -> list[Tensor]:
        """Of the noise of the whole batch, what this process's examples would get in it."""
        order = drawn.ends.argsort(descending=True, stable=True)  # as they run, the longest first
        mine = (order % self.processes.count == self.processes.rank).nonzero()[:, 0]
        running = [int((drawn.ends >= loop).sum()) for loop in range(1, int(drawn.ends.max()) + 1)]
        noise = self.noise(like, running)
        return [x[send(mine[mine < n], like.device)] for x, n in zip(noise, running)]

    def _position_offset(self) -> int | Tensor:
        """Abacus positions start anywhere in training, so that all of the table is trained."""
        model = self.config.model
        if model.positions != "abacus":
            return 0
        highest, data = model.abacus_max_offset + 1, self.generators["data"]
        if self.config.offset_per_example:
            return torch.randint(highest, (self.config.batch_size,), generator=data)
        return int(torch.randint(highest, (), generator=data))

    def _check_finite(self, loss: float, grad_norm: float, largest: float, step: int) -> None:
        """Raise where a step was none, or spoiled a weight; it and those after it do not count."""
        numbers = {"loss": loss, "gradient norm": grad_norm, "largest weight": largest}
        for what, value in numbers.items():
            if math.isfinite(value):
                continue
            self.steps_done = self.ema.n_updates = step - 1
            self._spoiled.fill_(False)
            if what != "largest weight":
                raise self._unstable(f"{what} at step {step}", "a finite number", value)
            for name, x in self.model.named_parameters():
                if spoiled := int((~torch.isfinite(x)).sum()):
                    raise self._unstable(
                        f"weights {name} after step {step}",
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
def _exact_matches(logits: Tensor, targets: Tensor) -> Tensor:
    """Number of examples that are right at every position that is asked for."""
    right = (logits.argmax(-1) == targets) | (targets == IGNORE)
    return right.all(-1).float().sum()


def _need_a_loop(ends: Tensor) -> None:
    """Gradients are added up where all processes have them: every example runs the block."""
    if (least := int(ends.min())) < 1:
        raise InputError(
            "n_loops",
            expected="a loop at least of every example, where several processes train",
            given=str(least),
            fix="Set objective.n_loops, or train with one process.",
        )
