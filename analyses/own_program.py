"""Programs of one's own for a task of one's own: compiled, trained against, and compared.

python analyses/own_program.py --out own_program

docs/write-a-program.md goes through it step by step.
"""

from dataclasses import dataclass
from itertools import product
from pathlib import Path

import pandas as pd
import torch
import typer

from loopinterp.comparison import (
    Decodability,
    ProgramComparison,
    compare_programs,
    decodability,
    head_study,
)
from loopinterp.compiler import compare_with_program, compile_program, rotate
from loopinterp.interventions import InterchangePairs, InterchangeRun
from loopinterp.pages import write_results
from loopinterp.programs import (
    UNKNOWN,
    CeilLog2,
    Linear,
    LoopProgram,
    aggregate,
    eq,
    full,
    indices,
    kqv,
    larger,
    select,
    shift_right,
    smaller,
    tok_map,
    tokens,
    var,
    where,
)
from loopinterp.tasks import IGNORE, Batch, InWords, get_task, register_task
from loopinterp.tasks.sampling import choice, coins, inside, lengths, pick_distribution
from loopinterp.training import RECIPES, CurriculumConfig, TrainingConfig, evaluate, train

DIGITS = 5
BOS, PAD = DIGITS, DIGITS + 1


@dataclass(frozen=True)
class RunningMax(InWords):
    """The largest digit so far, at every position. T(n) = n."""

    name = "running_max"
    d_vocab = DIGITS + 2
    d_features = None
    d_vocab_out = DIGITS
    distributions = ("peak", "uniform", "first")

    def n_loops(self, n):
        return n

    def n_positions(self, n):
        return n + 1  # BOS comes first

    def config(self):
        return {}

    def describe(self):
        return "The largest of the digits so far, at every digit."

    def sample(self, n, *, batch_size=None, generator, distribution=None):
        each = lengths(n, batch_size=batch_size, generator=generator)
        digits = self._digits(pick_distribution(self, distribution), each, generator)
        digits = digits.masked_fill(~inside(each, digits.shape[1]), PAD)
        inputs = torch.cat([torch.full((len(each), 1), BOS), digits], dim=1)
        return Batch(inputs, self.targets(inputs), each, each)

    def targets(self, inputs):
        answer = inputs.masked_fill(inputs >= BOS, -1).cummax(dim=1).values
        return answer.masked_fill(inputs >= BOS, IGNORE)

    def _digits(self, kind, n, generator):
        """A peak, early on or (``first``) at the first place, has to travel over smaller digits."""
        shape, row = (len(n), int(n.max())), (len(n), 1)
        if kind == "uniform":
            return torch.randint(DIGITS, shape, generator=generator)
        peak = torch.randint(1, DIGITS, row, generator=generator)
        others = (torch.rand(shape, generator=generator) * peak).long()
        others *= coins(choice((0.2, 1.0), row, generator), shape, generator)
        place = (torch.rand(row, generator=generator).square() * n[:, None]).long()
        return others.scatter(1, 0 * place if kind == "first" else place, peak)


register_task("running_max", RunningMax)

digit = tok_map(tokens, {d: d for d in range(DIGITS)}, default=0, name="digit")
best, span = var("best"), var("span")
before = select(indices, indices - span, "==", name="span_before")


def max_program(name, prepare, step, n_loops, doc):
    inputs = (*map(str, range(DIGITS)), "BOS", "PAD")
    return LoopProgram(name, "running_max", inputs, prepare, step, best, n_loops, doc)


RIPPLE = max_program(
    "max_ripple",
    {"best": digit},
    {"best": larger(digit, shift_right(best))},
    Linear(offset=-1),
    "Each loop computes the best anew: the own digit, or the left neighbour's best.",
)
KEEPER = max_program(
    "max_keeper",
    {"best": digit},
    {"best": larger(best, shift_right(best))},
    Linear(offset=-1),
    "Each loop keeps the best, or takes the left neighbour's.",
)
DOUBLING = max_program(
    "max_doubling",
    {"best": digit, "span": full(1)},
    {
        "best": larger(best, aggregate(before, best)),
        "span": smaller(span + span, indices + 1),
    },
    CeilLog2(),
    "The best of a span and of the one before it: spans that double in every loop.",
)
AT_ONCE = max_program(
    "max_at_once",
    {"best": full(UNKNOWN)},
    {"best": kqv(digit, digit, digit, "true", mode="max", name="all_before")},
    Linear(slope=0, offset=1),
    "Attention to everything so far.",
)
GUESS = max_program(
    "max_guess",
    {"best": where(eq(tokens, BOS), 0, larger(digit, 1))},
    {"best": larger(digit, shift_right(best))},
    Linear(),
    "The ripple from a guess of 1, which only information from BOS corrects to 0.",
)
GUESS_KEEPER = max_program(
    "max_guess_keeper",
    {"best": where(eq(tokens, BOS), 0, larger(digit, 1))},
    {"best": larger(larger(digit, shift_right(best)), where(best > 1, best, 0))},
    Linear(),
    "The same from a guess of 1, but a best above the guess is kept.",
)
PROGRAMS = [RIPPLE, KEEPER, DOUBLING, AT_ONCE, GUESS, GUESS_KEEPER]


def check(n: int) -> None:
    """On all inputs up to length n: right after T(n) loops, and not always after one less."""
    for program, length in product(PROGRAMS, range(1, n + 1)):
        rows = list(product(range(DIGITS), repeat=length))
        inputs = torch.tensor([(BOS, *row) for row in rows])
        expected = torch.tensor([[max(row[: k + 1]) for k in range(length)] for row in rows])
        outputs = program.trace(inputs, n_loops=program.n_loops(length)).outputs[:, :, 1:]
        right = (outputs == expected).all(-1).all(-1).tolist()
        assert right == [False] * program.n_loops(length) + [True], program.name


def ground_truth(batch: Batch) -> None:
    """Each program compiled, compared with itself, and with all of them."""
    n_loops, n_pos = int(batch.n_loops.max()), batch.inputs.shape[1]
    for program in PROGRAMS:
        compiled = rotate(compile_program(program, max_length=n_pos), seed=1)
        agreement = compare_with_program(compiled, batch.inputs, n_loops=n_loops)
        verdict = compare_programs(compiled.model, PROGRAMS, batch).verdict
        config = compiled.model.config
        print(
            f"{program.name}: {config.n_prelude} + {config.n_layers} layers of width "
            f"{config.d_model}; exact: {agreement.exact}; named: {verdict.identified}"
        )


def recipe(n: int, steps: int, seed: int) -> TrainingConfig:
    """Supervised at T(n) and later: no loss constrains the loops before."""
    start = RECIPES["addition"]
    return start.replace(
        task="running_max",
        model=start.model.replace(d_vocab=DIGITS + 2, d_vocab_out=DIGITS),
        distribution="peak",
        curriculum=CurriculumConfig(max_n=n),
        state_noise=0.5,
        steps=steps,
        seed=seed,
        device="cpu",
    )


def conflicts(model, batch: Batch, seed: int) -> pd.DataFrame:
    """How often a best that no run gets to is kept, by it and its left neighbour's best.

    After n loops a position's state is taken from an input with the same digit there and a larger
    best, so that its best is larger than its digit and its left neighbour's best.
    """
    generator = torch.Generator().manual_seed(seed)
    n, rows = int(batch.n_loops.max()), torch.arange(len(batch))
    source = torch.randperm(len(batch), generator=generator)
    place = torch.randint(2, n + 1, (len(batch),), generator=generator)
    own, new = batch.targets[rows, place], batch.targets[source, place]
    same_digit = batch.inputs[rows, place] == batch.inputs[source, place]
    base = (same_digit & (new > own)).nonzero().squeeze(1)
    source, place, new = source[base], place[base], new[base]

    at = torch.full_like(base, n)
    pairs = InterchangePairs(
        inputs=batch.inputs,
        asked=batch.targets != IGNORE,
        n_loops=n + 1,
        base=base,
        source=source,
        positions=place[:, None],
        loop=at,
        source_loop=at,
    )
    one_later = InterchangeRun(model, pairs).interchange()[:, 1]
    kept = one_later[torch.arange(len(base)), place] == new
    left = batch.targets[base, place - 1]
    table = pd.DataFrame({"best": new, "left": left, "kept": kept})
    return table.pivot_table(index="best", columns="left", values="kept").round(2)


def followed(comparison: ProgramComparison) -> pd.DataFrame:
    """Each program: whole runs after an exchange with their interval, and the controls."""
    data = comparison.data.isel(model=0)
    run = data["whole_run"].sel(stratum="all")
    table = {end: run.sel(estimate=end) for end in ("value", "low", "high")}
    for name in ("undisturbed", "random_change", "specific"):
        table[name] = data[name].sel(estimate="value")
    for states in ("states: that a run reaches", "states: that no run reaches"):
        at = data.sel(stratum=states)
        table[states] = at["whole_run"].sel(estimate="value")
        table[f"{states}, pairs"] = at["whole_run_effective"]
    return pd.DataFrame({k: v.values for k, v in table.items()}, index=data.program).round(2)


def read_loop_for_loop(result: Decodability) -> pd.DataFrame:
    """Balanced accuracy of the probes, mean over loops from 1 on, with the controls beside it."""
    names = ("accuracy", "random_weights", "shuffled", "embedding")
    later = {k: result.loop_for_loop(k).sel(loop=slice(1, None)).mean("loop") for k in names}
    index = result.data["variable"].values
    return pd.DataFrame({k: v.values for k, v in later.items()}, index=index).round(2)


def main(
    out: Path = Path("own_program"),
    n: int = 10,
    steps: int = 1000,
    seed: int = 0,
    samples: int = 300,
) -> None:
    """Train a looped model on the running maximum of up to n digits; which program does it run?"""
    check(min(n, 4))
    task = get_task("running_max")
    generator = torch.Generator().manual_seed(seed)
    batch, longer = (task.sample(k, batch_size=256, generator=generator) for k in (n, 2 * n))
    ground_truth(batch)

    model = train(recipe(n, steps, seed), out / "run").model()
    judged, tested = ["uniform", "first"], [n, 2 * n, 4 * n]
    comparison = compare_programs(model, PROGRAMS, [batch, longer], seed=seed)
    decoded = decodability(model, batch, PROGRAMS, seed=seed)
    results = {
        "evaluation": evaluate(
            model, task, tested, distributions=judged, n_samples=samples, trained_up_to=n
        ),
        "comparison": comparison,
        "decodability": decoded,
        "heads": head_study(model, batch, PROGRAMS, seed=seed),
    }
    for name, result in results.items():
        result.save(out / "results", name)
        print(f"\n{name}:", *(finding.text for finding in result.findings()), sep="\n  ")
    write_results(results, out / "own_program.html", title="Which program does the model run?")

    print("\nWhole runs after an exchange:", followed(comparison).to_string(), sep="\n")
    print("\nThe variables, read from the state loop for loop (after 1 loop and more):")
    print(read_loop_for_loop(decoded).to_string())
    table = conflicts(model, task.sample(n, batch_size=20_000, generator=generator), seed)
    table.to_csv(out / "conflicts.csv")
    print("\nHow often a best that no run gets to is kept, by it and its left neighbour's best:")
    print(table.to_string(na_rep=""))


if __name__ == "__main__":
    typer.run(main)
