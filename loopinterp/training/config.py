"""The configuration of a training run: frozen, validated, and to and from JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from loopinterp.errors import ConfigError, unknown_name
from loopinterp.models.model_config import LoopedTransformerConfig
from loopinterp.training.fields import from_plain, to_plain

if TYPE_CHECKING:
    from loopinterp.tasks.task import Task


def _require(holds: bool, name: str, value: Any, expected: str, fix: str) -> None:
    if not holds:
        raise ConfigError(name, expected=expected, given=repr(value), fix=fix)


def _integer(name: str, value: Any, least: int) -> None:
    fine = isinstance(value, int) and not isinstance(value, bool) and value >= least
    _require(fine, name, value, f"an integer >= {least}", f"Set {name} to {least} or more.")


def _number(name: str, value: Any, low: float, high: float, *, open_high: bool = False) -> None:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    fine = number and low <= value and (value < high if open_high else value <= high)
    span = f"a number in [{low:g}, {high:g}{')' if open_high else ']'}"
    if high == float("inf"):
        span = f"a finite number >= {low:g}"
    _require(fine, name, value, span, f"Choose {name} inside that range.")


@dataclass(frozen=True, kw_only=True)
class ObjectiveConfig:
    """Which loops the loss is taken at.

    Attributes:
        kind: ``last`` (after the last loop), ``step_dependent`` (each example at its own T(n)),
            ``progressive`` (a mix of the last loop and a random one) or ``every`` (all loops).
        n_loops: Loops to run; None runs the largest T(n) of the batch.
        hold_loops: ``step_dependent``: a share of the examples is asked a second time, up to this
            many loops after T(n), so that the answer has to be held.
        hold_share: ``step_dependent``: that share.
        alpha: ``progressive``: weight of the random loop.
        weights: ``every``: one weight for each of ``n_loops`` loops; all equal if None.
    """

    kind: Literal["last", "step_dependent", "progressive", "every"] = "step_dependent"
    n_loops: int | None = None
    hold_loops: int = 0
    hold_share: float = 0.25
    alpha: float = 0.5
    weights: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        kinds = ("last", "step_dependent", "progressive", "every")
        if self.kind not in kinds:
            raise unknown_name("kind", str(self.kind), kinds, ConfigError)
        if self.n_loops is not None:
            _integer("n_loops", self.n_loops, 1)
            _require(
                self.kind != "step_dependent",
                "n_loops",
                self.n_loops,
                "none with kind=step_dependent, where the task's T(n) decides",
                "Leave n_loops out, or use kind=last.",
            )
        _number("alpha", self.alpha, 0, 1)
        _integer("hold_loops", self.hold_loops, 0)
        _number("hold_share", self.hold_share, 0, 1)
        _require(
            self.hold_loops > 0 or self.hold_share == 0.25,
            "hold_share",
            self.hold_share,
            "no hold_share with hold_loops=0",
            "Set hold_loops as well, or leave it out.",
        )
        for name, only, default in (
            ("hold_loops", "step_dependent", 0),
            ("alpha", "progressive", 0.5),
            ("weights", "every", None),
        ):
            value = getattr(self, name)
            idle = self.kind != only and value != default
            _require(not idle, name, value, f"no {name} with kind={self.kind}", "Leave it out.")
        if self.weights is not None:
            fits = self.n_loops == len(self.weights)
            positive = min(self.weights, default=-1.0) >= 0 and sum(self.weights) > 0
            _require(
                fits and positive,
                "weights",
                self.weights,
                f"n_loops={self.n_loops} numbers >= 0, not all 0",
                "Set n_loops, and give one weight for each loop.",
            )


@dataclass(frozen=True, kw_only=True)
class CurriculumConfig:
    """Which problem lengths are drawn: n uniform in ``min_n .. M``, where M may grow.

    Attributes:
        kind: ``accuracy`` (M grows when the running accuracy passes ``threshold``), ``interval``
            (every ``interval`` steps) or ``none`` (M is ``max_n`` throughout).
        max_n: Greatest length ever drawn: the training cutoff.
        min_n: Least length drawn.
        start_n: M at the first step (``accuracy`` and ``interval``).
        threshold: Running exact match (``accuracy``).
        min_steps: Steps made at each M at least (``accuracy``).
        interval: Steps at each M (``interval``).
    """

    kind: Literal["accuracy", "interval", "none"] = "accuracy"
    max_n: int = 12
    min_n: int = 1
    start_n: int = 1
    threshold: float = 0.97
    min_steps: int = 30
    interval: int = 500

    def __post_init__(self) -> None:
        kinds = ("accuracy", "interval", "none")
        if self.kind not in kinds:
            raise unknown_name("kind", str(self.kind), kinds, ConfigError)
        for name in ("max_n", "min_n", "start_n", "min_steps", "interval"):
            _integer(name, getattr(self, name), 1)
        _number("threshold", self.threshold, 0, 1, open_high=True)
        _require(
            self.min_n <= self.first_longest <= self.max_n,
            "start_n" if self.kind != "none" else "min_n",
            self.start_n if self.kind != "none" else self.min_n,
            f"min_n <= start_n <= max_n, with min_n={self.min_n}, max_n={self.max_n}",
            "Order the lengths.",
        )
        idle = {
            "accuracy": ("interval",),
            "interval": ("threshold", "min_steps"),
            "none": ("interval", "threshold", "min_steps", "start_n"),
        }[self.kind]
        defaults = {f.name: f.default for f in dataclasses.fields(self)}
        for name in idle:
            value = getattr(self, name)
            fine = value == defaults[name]
            _require(fine, name, value, f"no {name} with kind={self.kind}", "Leave it out.")

    @property
    def first_longest(self) -> int:
        """M at the first step."""
        return self.max_n if self.kind == "none" else self.start_n


@dataclass(frozen=True, kw_only=True)
class OptimiserConfig:
    """AdamW and its schedule.

    Attributes:
        lr: Peak learning rate.
        betas: Decay of the two moments.
        eps: Added to the root of the second moment.
        weight_decay: Decoupled weight decay.
        clip: Greatest norm of the gradient; None for no clipping.
        warmup_steps: Steps of linear warm-up.
        schedule: ``linear`` (down to 0 over the last ``decay`` share of the steps), ``cosine``
            (down to 0 from the end of the curriculum on) or ``constant``.
        decay: Share of the steps over which ``linear`` goes down.
    """

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.99)
    eps: float = 1e-8
    weight_decay: float = 0.01
    clip: float | None = 1.0
    warmup_steps: int = 100
    schedule: Literal["linear", "cosine", "constant"] = "linear"
    decay: float = 0.2

    def __post_init__(self) -> None:
        kinds = ("linear", "cosine", "constant")
        if self.schedule not in kinds:
            raise unknown_name("schedule", str(self.schedule), kinds, ConfigError)
        infinity = float("inf")
        for name in ("lr", "eps", "weight_decay"):
            _number(name, getattr(self, name), 0, infinity, open_high=True)
        _require(self.lr > 0, "lr", self.lr, "a number > 0", "Set lr above 0.")
        for beta in self.betas:
            _number("betas", beta, 0, 1, open_high=True)
        if self.clip is not None:
            _number("clip", self.clip, 0, infinity, open_high=True)
            _require(self.clip > 0, "clip", self.clip, "a number > 0, or none", "Raise clip.")
        _integer("warmup_steps", self.warmup_steps, 0)
        _number("decay", self.decay, 0, 1)
        fine = self.schedule == "linear" or self.decay == 0.2
        _require(fine, "decay", self.decay, f"none with {self.schedule=!s}", "Leave it out.")


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """Everything that decides a training run; the same configuration gives the same numbers.

    Attributes:
        task: Name of a registered task.
        model: Architecture.
        task_settings: The task's own settings.
        distribution: Input distribution of the training data; the task's first if None.
        objective: Which loops the loss is taken at.
        curriculum: Which lengths are drawn.
        optimiser: AdamW and its schedule.
        steps: Optimiser steps.
        batch_size: Examples per step.
        state_noise: Standard deviation of Gaussian noise added to the state before each loop, in
            training only. It turns the states that a program has to hold into attractors:
            without it, they may be held as long as in training, and drift after.
        ema: Decay of the averaged weights that are evaluated and saved; 0 for none.
        seed: Seed of weights, data and everything else that is drawn.
        log_every: Steps per line of metrics.
        checkpoint_every: Steps per checkpoint.
        device: ``auto`` is the GPU where there is one, decided once, when the run starts.
        precision: ``fp32``, or ``bf16`` for autocast.
        compile: Whether the loop is compiled with ``torch.compile``.
        threads: CPU threads while training; None leaves PyTorch's number as it is. At these
            sizes one is as fast as two, and spinning OpenMP threads can stall it.

    Raises:
        ConfigError: If a value is unknown, out of range, in conflict, or without effect.

    Example:
        >>> from loopinterp.training.recipes import RECIPES
        >>> config = RECIPES["addition"]
        >>> TrainingConfig.from_dict(config.to_dict()) == config
        True
    """

    task: str
    model: LoopedTransformerConfig
    task_settings: dict[str, Any] = field(default_factory=dict)
    distribution: str | None = None
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    curriculum: CurriculumConfig = field(default_factory=CurriculumConfig)
    optimiser: OptimiserConfig = field(default_factory=OptimiserConfig)
    steps: int = 1000
    batch_size: int = 64
    state_noise: float = 0.0
    ema: float = 0.999
    seed: int = 0
    log_every: int = 10
    checkpoint_every: int = 100
    device: str = "auto"
    precision: Literal["fp32", "bf16"] = "fp32"
    compile: bool = False
    threads: int | None = 1

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "log_every", "checkpoint_every"):
            _integer(name, getattr(self, name), 1)
        _integer("seed", self.seed, 0)
        if self.threads is not None:
            _integer("threads", self.threads, 1)
        _number("state_noise", self.state_noise, 0, float("inf"), open_high=True)
        _number("ema", self.ema, 0, 1, open_high=True)
        if self.precision not in ("fp32", "bf16"):
            raise unknown_name("precision", str(self.precision), ("fp32", "bf16"), ConfigError)
        kinds = ("auto", "cpu", "cuda")
        if self.device not in kinds and not self.device.startswith("cuda:"):
            raise unknown_name("device", self.device, kinds, ConfigError)
        self._check_task()
        if self.compile and self.model.positions == "abacus" and self.model.abacus_target == "qk":
            raise ConfigError(
                "compile",
                expected="false with abacus positions on queries and keys",
                given="true",
                fix="Leave compile out, or use model.abacus_target=input.",
            )

    def make_task(self) -> Task:
        """The task that the run trains on."""
        from loopinterp.tasks import get_task

        return get_task(self.task, **self.task_settings)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form; :meth:`from_dict` reads it back."""
        return to_plain(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> TrainingConfig:
        """Build from nested dicts, refusing names that do not exist and values of other types.

        Raises:
            ConfigError: If a name is unknown, a needed one is missing, or a value is wrong.
        """
        return from_plain(cls, values)

    def replace(self, **changes: Any) -> TrainingConfig:
        """A copy with some fields changed, validated again."""
        return dataclasses.replace(self, **changes)

    def _check_task(self) -> None:
        task = self.make_task()
        if self.distribution is not None and self.distribution not in task.distributions:
            raise unknown_name("distribution", self.distribution, task.distributions, ConfigError)
        for name in ("d_vocab", "d_features", "d_vocab_out"):
            wanted, given = getattr(task, name), getattr(self.model, name)
            _require(
                wanted == given,
                f"model.{name}",
                given,
                f"{wanted}, as task {self.task!r} has it",
                f"Set model.{name}={'none' if wanted is None else wanted}.",
            )
