"""What it saves that an example leaves the batch after its own T(n) loops, in training.

    python -m analyses.benchmarks.finished_examples

Loss and gradient of step-dependent supervision, in which each example is read after its own T(n)
loops; the yardstick runs all of them to the greatest T(n) of the batch. The settings are the one
that is published for parity (arXiv 2409.15647: lengths uniform in 1..20, width 256, batches of 64)
and the package's own recipe of it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from analyses.benchmarks.timing import compare, parser, settle, show
from analyses.published_settings import paper_config
from loopinterp.models import LoopedTransformer, bind
from loopinterp.tasks import Batch
from loopinterp.training import RECIPES, TrainingConfig
from loopinterp.training.objectives import answers_at, cross_entropy

TARGET = 1 / 1.5
Answers = Callable[[LoopedTransformer, Batch], torch.Tensor]


def as_they_finish(model: LoopedTransformer, batch: Batch) -> torch.Tensor:
    """Logits of each example after T(n), [batch, pos, d_vocab_out]: as our training has them."""
    return answers_at(bind(model, batch.inputs), batch.n_loops.cpu()[None])[0]


def all_to_the_end(model: LoopedTransformer, batch: Batch) -> torch.Tensor:
    """The same logits, from states of the whole batch at every loop."""
    iteration = bind(model, batch.inputs)
    states = [iteration.h0]
    for _ in range(int(batch.n_loops.max())):
        states.append(iteration.step(states[-1]))
    rows = torch.arange(len(batch), device=states[0].device)
    return iteration.readout(torch.stack(states)[batch.n_loops, rows])


def gradient(model: LoopedTransformer, batch: Batch, answers: Answers) -> torch.Tensor:
    """Of the loss, all parameters in one row."""
    model.zero_grad(set_to_none=True)
    cross_entropy(answers(model, batch), batch.targets).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def setting(config: TrainingConfig) -> tuple[LoopedTransformer, Batch]:
    """A new model, and a batch of lengths that are uniform up to the cutoff."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(
        1, config.curriculum.max_n + 1, (config.batch_size,), generator=generator
    )
    batch = config.make_task().sample(lengths, generator=generator)
    model = LoopedTransformer(config.model, seed=0)
    return model.to(config.device), batch.to(config.device)


def main() -> None:
    options = parser(__doc__, rounds=7, device=True).parse_args()
    settle(options)
    settings = {
        "parity as published": paper_config("parity", device=options.device),
        "the recipe of parity": RECIPES["parity"].replace(device=options.device),
    }
    tables = {}
    for title, config in settings.items():
        model, batch = setting(config)
        ways = {
            "all to the end": partial(gradient, model, batch, all_to_the_end),
            "as they finish": partial(gradient, model, batch, as_they_finish),
        }
        torch.testing.assert_close(*(way() for way in ways.values()), rtol=1e-3, atol=1e-5)
        tables[title] = compare(
            ways, rounds=options.rounds, clock=options.clock, device=options.device
        )
    target = {"as they finish": TARGET}
    show(tables, targets={"parity as published": target}, path=options.json)


if __name__ == "__main__":
    main()
