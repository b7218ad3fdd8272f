"""One training run in memory, and the model it starts from."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.swa_utils import get_ema_multi_avg_fn

from loopinterp.core.boundary import resolve_device
from loopinterp.core.errors import ConfigError, InputError, need
from loopinterp.core.storage import digest_tensors
from loopinterp.core.text import ShortRepr
from loopinterp.models import LoopedTransformer
from loopinterp.models.checkpoints import check_tensors
from loopinterp.models.layers import Softening
from loopinterp.models.taps import recording_gradients
from loopinterp.tasks.task import IGNORE
from loopinterp.training.device import (
    ONE_PROCESS,
    Processes,
    make_bind,
    send,
    stream,
    with_noise,
)
from loopinterp.training.muon import Muon, matrices_of_layers
from loopinterp.training.objectives import (
    Curriculum,
    answers_at,
    ask,
    cross_entropy,
    learning_rate_factor,
)
from loopinterp.training.run import Run, RunError, RunFault, reading_counters

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from jaxtyping import Bool
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from loopinterp.models.iteration import Iteration
    from loopinterp.training.config import OptimiserConfig, TrainingConfig
    from loopinterp.training.objectives import Questions, Supervised


def starting_model(config: TrainingConfig) -> LoopedTransformer:
    """The model of a run before its first step; raise if that of ``start_from`` has changed."""
    if config.start_from is None:
        return LoopedTransformer(config.model, seed=config.seed)
    model = Run.load(config.start_from).model()
    if config.start_sha256 not in (None, digest_tensors(model.state_dict())):
        raise RunError(RunFault.OTHER_START, f"model of {config.start_from}")
    target, source = config.model, model.config
    n_bits, n_target = source.state_code or 0, target.state_code or 0
    changes = {"state_code": target.state_code, "initial_state": target.initial_state}
    enough = n_bits >= n_target and (n_bits > 0) == (n_target > 0)
    same = source.replace(**changes) == target
    expected = "a run of the same architecture, with as many bits in its state code or more"
    got = f"one with {n_bits} bits" if n_bits < n_target else "another architecture"
    fix = "Keep the model settings of that run; only model.state_code may be smaller."
    need(enough and same, "start_from", expected, got, fix, error=ConfigError)
    if n_bits == n_target:
        return model
    generator = stream(config.seed, "dropped bits")
    ends = config.curriculum.min_n, config.curriculum.max_n + 1
    lengths = torch.randint(*ends, (256,), generator=generator)
    task, distribution = config.make_task(), config.distribution
    batch = task.sample(lengths, generator=generator, distribution=distribution)
    question = ask(config.objective, batch, stream(config.seed, "dropped bits"))

    @torch.no_grad()
    def loss(model: LoopedTransformer) -> float:
        logits = answers_at(model.bind(batch.inputs), question.loops[:1])
        return float(cross_entropy(logits[0], question.targets[0]))

    # One bit at a time: the one without which the loss is lowest.
    for _ in range(n_bits - n_target):
        model = min(_without_each_bit(model), key=loss)
    return model


def _without_each_bit(model: LoopedTransformer) -> Iterator[LoopedTransformer]:
    """The model without each of its bits in turn (fixed at -1)."""
    assert model.code is not None
    n_bits = model.code.n_bits
    for bit in range(n_bits):
        # Without a bit its column of the write matrix is a constant, -1 times the column.
        left = [k for k in range(n_bits) if k != bit]
        smaller = LoopedTransformer(model.config.replace(state_code=n_bits - 1))
        weights = model.state_dict()
        write = weights["code.write.weight"]
        weights |= {
            "code.read.weight": weights["code.read.weight"][left],
            "code.read.bias": weights["code.read.bias"][left],
            "code.write.weight": write[:, left],
            "code.write.bias": weights["code.write.bias"] - write[:, bit],
        }
        smaller.load_state_dict(weights)
        yield smaller


class _Ema:
    """Running average of a model's parameters.

    ``shadow <- decay_t * shadow + (1 - decay_t) * weights`` after each step, with
    ``decay_t = min(decay, (1 + t) / (10 + t))``: the random initial weights are soon forgotten.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self.n_updates = 0
        self._live = dict(model.named_parameters())
        self.shadow: dict[str, Tensor] = {k: v.detach().clone() for k, v in self._live.items()}

    @torch.no_grad()
    def update(self, *, unless: Bool[Tensor, ""] | None = None) -> None:
        decay = min(self.decay, (1 + self.n_updates) / (10 + self.n_updates))
        average = get_ema_multi_avg_fn(decay)
        shadow: list[Tensor] = list(self.shadow.values())
        live: list[Tensor] = list(self._live.values())
        if unless is not None:
            # A choice on the device, without waiting to learn whether the step was finite.
            live = [torch.where(unless, old, new) for old, new in zip(shadow, live)]
        average(shadow, live, torch.tensor(0))
        self.n_updates += 1


@dataclass(frozen=True)
class Drawn:
    """The data of a step.

    ``inputs`` are those of this process, on the model's device; ``ends`` the loops of every example
    of the batch, over all processes.
    """

    inputs: Tensor
    position_offset: int | Tensor
    questions: Questions
    ends: Tensor


def _optimisers(model: LoopedTransformer, settings: OptimiserConfig) -> list[Optimizer]:
    """AdamW and, for the matrices of layers, Muon."""
    matrices = matrices_of_layers(model) if settings.kind == "muon" else {}
    others = [p for name, p in model.named_parameters() if name not in matrices]
    options = {"betas": settings.betas, "eps": settings.eps, "fused": True}
    decay = settings.weight_decay
    adamw = torch.optim.AdamW(others, settings.lr, weight_decay=decay, **options)
    if not matrices:
        return [adamw]
    return [adamw, Muon(matrices, lr=settings.matrix_lr, weight_decay=decay)]


class Trainer(ShortRepr):
    """Makes one optimiser step at a time; :meth:`state` and :meth:`load` save and restore it.

    :meth:`step` returns its metrics, which waits for the device. :meth:`advance` does not wait;
    :meth:`read` then returns the metrics of several steps, when they are :attr:`due`.

    Example:
        >>> from loopinterp.training import RECIPES
        >>> trainer = Trainer(RECIPES["addition-quick"])
        >>> metrics = trainer.step()
        >>> trainer.steps_done, metrics["longest_n"]
        (1, 1)
    """

    def __init__(self, config: TrainingConfig, processes: Processes = ONE_PROCESS) -> None:
        if processes.count > 1 and (n_bits := config.model.state_code) is not None:
            expected = "none where several processes train, as signs are drawn for a whole batch"
            fix = "Train with one process."
            raise ConfigError("model.state_code", expected=expected, given=str(n_bits), fix=fix)
        self.config, self.processes = config, processes
        self.device = resolve_device(config.device)
        self.task = config.make_task()
        self.model = starting_model(config).to(self.device)
        self.ema = _Ema(self.model, config.ema)
        self.curriculum = Curriculum(config.curriculum)
        self.optimisers = _optimisers(self.model, config.optimiser)
        devices = {"data": "cpu", "objective": "cpu", "noise": self.device, "code": self.device}
        if config.model.state_code is None:
            del devices["code"]
        self.generators = {name: stream(config.seed, name, at) for name, at in devices.items()}
        self._bind = make_bind(self.model, compiled=config.compile)
        self.steps_done = 0
        self._snapshots = frozenset(config.snapshots.at(config.steps))
        # Whether some step was not finite, known on the device before it is read.
        self._spoiled = torch.zeros((), dtype=torch.bool, device=self.device)
        self._unread: list[tuple[Tensor, dict[str, Any]]] = []

    def zero_grad(self) -> None:
        for optimiser in self.optimisers:
            optimiser.zero_grad(set_to_none=True)

    def step(self) -> dict[str, float | int]:
        """Draw a batch, make one step, and return the metrics.

        Raise if loss or gradient is not finite (weights stay those of the step before), or a weight
        after the step.
        """
        self.advance()
        return self.read()[-1]

    def advance(self) -> None:
        """A step that does not wait for the device.

        After a step that is not finite, weights no longer change and :meth:`read` raises; call it
        before writing a checkpoint.
        """
        with recording_gradients():
            self.zero_grad()
            drawn = self.draw()
            supervised = self._supervise(drawn)
            supervised.loss.backward()
            self.finish(drawn, supervised)

    def draw(self) -> Drawn:
        """A batch, inspected before it is sent to the device."""
        config, generator = self.config, self.generators["data"]
        lengths = self.curriculum.lengths(config.batch_size, generator)
        batch = self.task.sample(lengths, generator=generator, distribution=config.distribution)
        offset = self._position_offset()
        self.model.check_inputs(batch.inputs, position_offset=offset)
        questions = ask(config.objective, batch, self.generators["objective"])
        ends, rows = questions.loops.amax(0), slice(self.processes.rank, None, self.processes.count)
        if self.processes.count > 1:
            # Gradients are added up where all processes have them: every example runs a loop.
            expected = "a loop at least of every example, where several processes train"
            fix = "Set objective.n_loops, or train with one process."
            need(ends.min() > 0, "n_loops", expected, str(int(ends.min())), fix)
            questions = questions.share_of(rows)
        inputs = send(batch.inputs[rows], self.device)
        if isinstance(offset, torch.Tensor):
            offset = send(offset[rows], self.device)
        return Drawn(inputs, offset, questions, ends)

    def finish(self, drawn: Drawn, supervised: Supervised) -> None:
        """The step after the backward pass: update and average the weights."""
        config, settings = self.config, self.config.optimiser
        factor = learning_rate_factor(
            settings,
            step=self.steps_done,
            n_steps=config.steps,
            curriculum_done_at=self.curriculum.done_at,
        )
        targets = send(drawn.questions.targets[0], self.device)
        with torch.no_grad():
            right = (supervised.logits.argmax(-1) == targets) | (targets == IGNORE)  # [batch, pos]
            exact = right.all(-1).float().sum() / len(drawn.ends)
        shares = torch.stack([supervised.loss.detach().float(), exact])
        # Of several processes each has its share of the batch: gradient, loss and score are sums.
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        self.processes.add_up([*gradients, shares])
        # Without clipping the norm is measured all the same.
        limit = math.inf if settings.clip is None else settings.clip
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), limit)
        # Loss, norm of the gradient, exact match.
        metrics = torch.stack([shares[0], norm.float(), shares[1]])
        self._spoiled |= ~metrics[:2].isfinite().all()
        # PyTorch's flag from the scaling of gradients: a step in which it is 1 changes nothing.
        for optimiser, peak in zip(self.optimisers, (settings.lr, settings.matrix_lr)):
            optimiser.param_groups[0]["lr"] = peak * factor
            optimiser.found_inf = self._spoiled.float()  # type: ignore[attr-defined]
            optimiser.step()
        # A finite gradient can still carry a weight beyond what its type holds.
        largest = torch.nn.utils.get_total_norm([*self.model.parameters()], math.inf)
        self._spoiled |= ~largest.isfinite()
        self.ema.update(unless=self._spoiled)
        self.steps_done += 1
        lr = settings.lr * factor
        known = {"step": self.steps_done, "longest_n": self.curriculum.longest, "lr": lr}
        self._unread.append((torch.cat([metrics, largest.float()[None]]), known))

    @property
    def due(self) -> bool:
        """Whether metrics, a checkpoint or a snapshot are due, or lengths may depend on them."""
        config, step = self.config, self.steps_done
        written = (config.log_every, config.checkpoint_every, config.steps)
        return (
            any(step % every == 0 for every in written)
            or self.snapshot_due
            or self.curriculum.may_grow(len(self._unread))
        )

    @property
    def snapshot_due(self) -> bool:
        """Whether the weights after this step are to be kept."""
        return self.steps_done in self._snapshots

    def read(self) -> list[dict[str, float | int]]:
        """Metrics of the steps since the last reading; waits for the device.

        Errors are those of :meth:`step`.
        """
        unread, self._unread = self._unread, []
        metrics = []
        values = torch.stack([row for row, _ in unread]).tolist() if unread else []
        for (loss, norm, exact, largest), (_, known) in zip(values, unread):
            self._check_finite(loss, norm, largest, known["step"])
            self.curriculum.update(exact)
            step = {"step": known["step"], "loss": loss, "exact_match": exact}
            metrics.append(
                step | {"longest_n": known["longest_n"], "lr": known["lr"], "grad_norm": norm}
            )
        return metrics

    def averaged_model(self) -> LoopedTransformer:
        """A copy of the model with the averaged weights, on the CPU."""
        model = LoopedTransformer(self.config.model)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(self.ema.shadow[name])
        return model

    def state(self) -> tuple[dict[str, Tensor], dict[str, str]]:
        """Everything that the next step depends on: tensors, and JSON as safetensors metadata.

        Raise if :meth:`read` has not returned all steps.
        """
        expected, fix = "steps that are known to be finite", "Call trainer.read() first."
        got = f"{len(self._unread)} that have not been read"
        need(not self._unread, "training state", expected, got, fix)
        # Names as in the checkpoint: weights/, ema/, exp_avg/, exp_avg_sq/, momentum/, random/.
        tensors = {f"weights/{k}": v for k, v in self.model.named_parameters()}
        tensors |= {f"ema/{k}": v for k, v in self.ema.shadow.items()}
        for name, parameter in self.model.named_parameters():
            for optimiser in self.optimisers:
                moments = optimiser.state.get(parameter, {})
                tensors |= {f"{kind}/{name}": x for kind, x in moments.items() if kind != "step"}
        # Random streams go on where they were.
        tensors |= {f"random/{k}": g.get_state() for k, g in self.generators.items()}
        scalars = {
            "steps_done": self.steps_done,
            "ema_updates": self.ema.n_updates,
            "curriculum": self.curriculum.state(),
        }
        return tensors, {"scalars": json.dumps(scalars)}

    @torch.no_grad()
    def load(self, tensors: dict[str, Tensor], metadata: dict[str, str], path: Path) -> None:
        """Restore a :meth:`state`; one of another model or version is a ``CheckpointError``."""
        # AdamW makes its moments at the first step; they are there before it for what is loaded.
        adamw = self.optimisers[0]
        for parameter in adamw.param_groups[0]["params"]:
            adamw.state[parameter] = {
                "step": torch.tensor(0.0, device=parameter.device),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }
        current, _ = self.state()  # the tensors themselves, which are written over below
        fix = "Restore them, or train in another folder."
        check_tensors(tensors, current, f"checkpoint {path}", fix=fix)
        with reading_counters(path):
            scalars: dict[str, Any] = json.loads(metadata["scalars"])
            self.steps_done = int(scalars["steps_done"])
            self.ema.n_updates = int(scalars["ema_updates"])
            self.curriculum.load(scalars["curriculum"])
        for name, tensor in current.items():
            tensor.copy_(tensors[name])
        for moments in adamw.state.values():
            moments["step"].fill_(self.steps_done)
        for name, generator in self.generators.items():
            generator.set_state(tensors[f"random/{name}"])
        self._unread.clear()
        self._spoiled.fill_(False)

    def autocast(self) -> torch.autocast:
        half = self.config.precision == "bf16"
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=half)

    def bind(self, drawn: Drawn) -> Iteration:
        return self._bind(drawn.inputs, position_offset=drawn.position_offset, checked=True)

    def _supervise(self, drawn: Drawn) -> Supervised:
        with self.autocast(), self._soft_signs():
            iteration = self._started(self.bind(drawn))
            if self.config.state_noise:
                iteration = with_noise(iteration, self._noise_of(drawn, iteration.h0))
            return drawn.questions.score(answers_at(iteration, drawn.questions.loops))

    @contextmanager
    def _soft_signs(self) -> Iterator[None]:
        code, settings = self.model.code, self.config.code
        if code is None:
            yield
            return
        hardness = settings.hardness(self.steps_done / self.config.steps)
        softening = Softening(
            hard=settings.hard + (1 - settings.hard) * hardness,
            gain=settings.gain + (3.0 - settings.gain) * hardness,  # tanh(3 z) with all signs hard
            noise=settings.noise * (1 - hardness),
            generator=self.generators["code"],
        )
        with code.softened(softening):
            yield

    def _started(self, iteration: Iteration) -> Iteration:
        code, settings = self.model.code, self.config.code
        everywhere, somewhere = settings.random_everywhere, settings.random_somewhere
        if code is None or not everywhere + somewhere:
            return iteration
        h, generator = iteration.h0, self.generators["code"]
        how = {"generator": generator, "device": h.device, "dtype": h.dtype}
        bits = torch.randint(2, (*h.shape[:2], code.n_bits), generator=generator, device=h.device)
        example, place = torch.rand(len(h), 1, **how), torch.rand(h.shape[:2], **how)
        # [batch, pos]: all positions of some examples, and a tenth of the positions of others.
        drawn = (example < everywhere) | ((example < everywhere + somewhere) & (place < 0.1))
        return replace(iteration, h0=code.state(2.0 * bits - 1).to(h).where(drawn[..., None], h))

    def noise(self, like: Tensor, running: Iterable[int]) -> Iterator[Tensor]:
        """The noise before each loop."""
        std, generator = self.config.state_noise, self.generators["noise"]
        kind = {"device": like.device, "dtype": like.dtype, "generator": generator}
        return (std * torch.randn(n, *like.shape[1:], **kind) for n in running if std)

    def _noise_of(self, drawn: Drawn, like: Tensor) -> Iterator[Tensor]:
        """The rows of the batch's noise for this process's examples."""
        running = [int((drawn.ends >= loop).sum()) for loop in range(1, int(drawn.ends.max()) + 1)]
        noise = self.noise(like, running)
        if self.processes.count == 1:
            return noise
        order = drawn.ends.argsort(descending=True, stable=True)  # as they run, the longest first
        mine = (order % self.processes.count == self.processes.rank).nonzero()[:, 0]
        # All of it is drawn, whatever this process runs: the streams stay in step.
        return iter([x[send(mine[mine < n], like.device)] for x, n in zip(noise, running)])

    def _position_offset(self) -> int | Tensor:
        model = self.config.model
        if model.positions != "abacus":
            return 0
        highest, data = model.abacus_max_offset + 1, self.generators["data"]
        if self.config.offset_per_example:
            return torch.randint(highest, (self.config.batch_size,), generator=data)
        return int(torch.randint(highest, (), generator=data))

    def _check_finite(self, loss: float, grad_norm: float, largest: float, step: int) -> None:
        numbers = {"loss": loss, "gradient norm": grad_norm, "largest weight": largest}
        wrong = [what for what, value in numbers.items() if not math.isfinite(value)]
        if not wrong:
            return
        # On the device nothing has changed since that step, see advance.
        self.steps_done = self.ema.n_updates = step - 1
        self._spoiled.fill_(False)
        what, got = f"{wrong[0]} at step {step}", str(numbers[wrong[0]])
        if wrong == ["largest weight"]:
            counts = {k: int((~x.isfinite()).sum()) for k, x in self.model.named_parameters()}
            name = next(name for name, count in counts.items() if count)
            what, got = f"weights {name} after step {step}", f"{counts[name]} that are not"
        fix = f"Lower optimiser.lr (now {self.config.optimiser.lr:g}), set optimiser.clip=1, or "
        fix += "lengthen the warm-up (optimiser.warmup_steps), in a new folder; what was saved "
        fix += "before this step is kept."
        raise InputError(what, expected="finite numbers", given=got, fix=fix)
