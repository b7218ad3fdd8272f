"""Models that know which loop they make, after the timing signal of the Universal Transformer."""

from __future__ import annotations

import torch
from torch import Tensor, nn

N_TOKENS, WIDTH, MOST = 6, 12, 9


class Timed(nn.Module):
    """``h <- tanh(W (mean of h so far) + e + signal of the loop)``: causal, a map for each loop."""

    def __init__(self, seed: int = 0, d_vocab_out: int = 4) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.tokens, self.signal = nn.Embedding(N_TOKENS, WIDTH), nn.Embedding(MOST, WIDTH)
            self.mix, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, d_vocab_out)
            self.mix.weight.data *= 3

    def around(self, h: Tensor) -> Tensor:
        return h + h.cumsum(1) / torch.arange(1, h.shape[1] + 1)[:, None]

    def embed(self, inputs: Tensor) -> Tensor:
        return self.tokens(inputs)

    def initial_state(self, e: Tensor) -> Tensor:
        return torch.zeros_like(e)

    def step(self, h: Tensor, e: Tensor, loop: int = 0) -> Tensor:
        return torch.tanh(self.mix(self.around(h)) / 2 + e + self.signal.weight[loop])

    def readout(self, h: Tensor) -> Tensor:
        return self.out(h)


class TimedNear(Timed):
    """The same, and a loop sees one position to its left alone: only cones are run again."""

    reach = 1

    def around(self, h: Tensor) -> Tensor:
        return h + torch.cat([torch.zeros_like(h[:, :1]), h[:, :-1]], dim=1)


class Clock(nn.Module):
    """The same loops as one map: the number of the loop is the state's last feature."""

    def __init__(self, net: Timed) -> None:
        super().__init__()
        self.net = net

    def embed(self, inputs: Tensor) -> Tensor:
        return self.net.embed(inputs)

    def initial_state(self, e: Tensor) -> Tensor:
        return torch.zeros_like(torch.cat([e, e[..., :1]], -1))

    def step(self, h: Tensor, e: Tensor) -> Tensor:
        signal = self.net.signal.weight[h[..., -1].detach().long()]
        mixed = self.net.mix(self.net.around(h[..., :-1])) / 2
        return torch.cat([torch.tanh(mixed + e + signal), h[..., -1:] + 1], -1)

    def readout(self, h: Tensor) -> Tensor:
        return self.net.out(h[..., :-1])


class Counted(Timed):
    """The natural wrapper, which is wrong: it counts its calls, and ``embed`` begins anew."""

    made = 0

    def embed(self, inputs: Tensor) -> Tensor:
        self.made = 0
        return super().embed(inputs)

    def step(self, h: Tensor, e: Tensor) -> Tensor:
        self.made += 1
        return super().step(h, e, min(self.made, MOST) - 1)


def by_hand(net: Timed, inputs: Tensor, loops: range, h: Tensor | None = None) -> Tensor:
    """The state after the loops of a range, with no part of the package."""
    e = net.tokens.weight[inputs]
    h = torch.zeros_like(e) if h is None else h
    for loop in loops:
        h = torch.tanh(net.mix(net.around(h)) / 2 + e + net.signal.weight[loop])
    return h
