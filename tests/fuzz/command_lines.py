"""Command lines out of good and odd values, all of which end soon: refused, or on a tiny run."""

from __future__ import annotations

import random
from pathlib import Path

SMOKE = Path(__file__).parents[2] / "analyses" / "sweeps" / "smoke.json"
BIG = ["99999999999", str(2**63), str(10**20), "9" * 5000]
NUMBERS = ["0", "-1", "x", "", "1e20", "nan", "inf", "1.5", "²", "٣", "0x10", "1_0", " 2", *BIG]
WORDS = [
    "é", "—", "\udcff", "--json", "-h", "--out", "²/x", "nan", "1e999", "~", "$HOME", "%s", "", " ",
    "x", "Ripple", "additon", "../..", "-", "--", "*", "\u202e", "a\0b", "n" * 5000,
]  # fmt: skip
DEVICES = ["cpu", "auto", "cuda:²", "cuda:-1", "cuda:" + "9" * 50, "cuda:999", "tpu", "", "CPU"]
SETTINGS = [
    "steps", "batch_size", "seed", "threads", "device", "precision", "ema", "state_noise",
    "task", "task_settings", "task_settings.format", "distribution", "log_every", "model",
    "model.d_model", "model.n_heads", "model.n_layers", "model.n_ctx", "model.attention_window",
    "model.positions", "model.norm", "model.norm_eps", "model.init_std", "model.d_mlp",
    "model.injection", "model.initial_state", "model.causal", "model.n_loops", "curriculum.kind",
    "curriculum.max_n", "optimiser.lr", "optimiser.betas", "optimiser.clip", "objective.kind",
    "objective.n_loops", "objective.weights", "nosuch", "", "model.", ".", "model.d_model.x",
]  # fmt: skip
VALUES = [
    "0", "-1", "1e20", str(10**20), "nan", "NaN", "Infinity", "1e400", "null", "none", "true",
    "", "x", "[]", "[1]", "{}", '{"a": 1}', "[" * 50_000, "9" * 5000, '"\\ud800"', "[1, 2", "-0.0",
]  # fmt: skip


def command_line(rng: random.Random, run: Path, mine: Path) -> list[str]:
    """A command line over a run, in a folder with files of the user's."""
    command = rng.choice(["train", "train", "compile", "evaluate", "evaluate", "grid", "sweep",
                          "analyze", "report", "lens", "tasks", "recipes", "zoo", "demo",
                          "benchmark", "nothing"])  # fmt: skip
    if command == "nothing":
        return rng.choice([[], ["--version"], ["--nosuch"], [rng.choice(WORDS)], ["-h"]])
    words = [command, *_OF[command](rng, run, mine)]
    if rng.random() < 0.05:
        words.insert(rng.randint(0, len(words)), rng.choice([*WORDS, "--what", "--json=1"]))
    return words


def _place(rng: random.Random, run: Path, mine: Path) -> str:
    """Somewhere to write to: new, or taken by what must stay as it is."""
    places = [
        mine / "new", mine / "deep" / "er" / "new", mine / "notes.txt", mine / "folder",
        mine / "link", mine / "dangling", mine / "pipe", mine / "notes.txt" / "x", run,
        run / "config.json", run / "model", mine / ("n" * 300), mine / "empty",
    ]  # fmt: skip
    return rng.choice([*map(str, places), "", " "])


def _options(rng: random.Random, **choices: list[str]) -> list[str]:
    """Some options, some of them twice."""
    words: list[str] = []
    for name, values in choices.items():
        for _ in range(rng.choice([0, 0, 1, 1, 2])):
            words += [f"--{name.replace('_', '-')}", rng.choice(values)]
    return words


def _train(rng: random.Random, run: Path, mine: Path) -> list[str]:
    words = ["--config", str(run / "config.json"), "--out", _place(rng, run, mine)]
    settings = [f"{rng.choice(SETTINGS)}={rng.choice(VALUES)}" for _ in range(3)]
    words += _options(
        rng,
        set=[*settings, *WORDS],
        seed=["0", "7", *NUMBERS],
        steps=["1", "2", *NUMBERS],
        device=DEVICES,
        precision=["fp32", *WORDS],
        threads=["1", *NUMBERS],
        recipe=WORDS,
        task=["addition", *WORDS],
    )
    # Whatever else it says, it ends soon: a few steps, or more than once and so refused.
    return [*words, "--set", "steps=2", rng.choice(["--no-progress", "--json"])]


def _compile(rng: random.Random, run: Path, mine: Path) -> list[str]:
    words = [rng.choice(["parity", "ripple", *WORDS]), "--out", _place(rng, run, mine)]
    if rng.random() < 0.9:
        words += ["--max-length", rng.choice(["1", "3", "513", *NUMBERS])]
    return words + _options(
        rng, disguise=["permute", "rotate", "distract", *WORDS], seed=["0", "5", *NUMBERS]
    )


def _run_of(rng: random.Random, run: Path, mine: Path) -> str:
    return str(run) if rng.random() < 0.85 else _place(rng, run, mine)


def _evaluate(rng: random.Random, run: Path, mine: Path) -> list[str]:
    rules = ["residual", "residual=0.1", "residual=-1", "residual=nan", "readout-kl=1e400",
             "max-confidence", "max-confidence=", "answer-held=0", *WORDS]  # fmt: skip
    samples = rng.choice(["1", "4", "4", "4", *NUMBERS])
    more = _options(
        rng,
        length=["1", "2", "3", "9", *NUMBERS],
        distribution=["uniform", "chain", *WORDS],
        stop=rules,
        seed=["0", "3", *NUMBERS],
        device=DEVICES,
        threads=["1", "2", *NUMBERS],
    )
    return [_run_of(rng, run, mine), "--samples", samples, *more]


def _grid(rng: random.Random, run: Path, mine: Path) -> list[str]:
    words = [_run_of(rng, run, mine), "--to", rng.choice(["1", "2", *NUMBERS]), "--samples", "2"]
    return words + _options(
        rng,
        loops=["1", "1,2", "2,1", "1,,2", ",", "1;2", *NUMBERS],
        seed=["0", "3", *NUMBERS],
        device=DEVICES,
    )


def _sweep(rng: random.Random, run: Path, mine: Path) -> list[str]:
    # Only what is refused: its runs take longer than a command should here.
    files = [run / "config.json", mine / "notes.txt", mine / "folder", mine / "nosuch", SMOKE]
    more = _options(
        rng, jobs=["1", *NUMBERS], scale=["laptop", *WORDS], set=WORDS, cluster=["x", *WORDS]
    )
    words = [str(rng.choice(files)), "--out", _place(rng, run, mine), *more]
    return [*words, "--only", rng.choice(["nosuch", *WORDS])]


def _analyze(rng: random.Random, run: Path, mine: Path) -> list[str]:
    studies = ["attention", "stabilisation", "heads", "wavefront", "subspaces", *WORDS]
    more = _options(
        rng, study=studies, seed=["0", *NUMBERS], device=DEVICES, threads=["1", *NUMBERS]
    )
    return [_run_of(rng, run, mine), "--study", rng.choice(studies), *more]


def _report(rng: random.Random, run: Path, mine: Path) -> list[str]:
    return [_run_of(rng, run, mine), "--out", _place(rng, run, mine)]


def _lens(rng: random.Random, run: Path, mine: Path) -> list[str]:
    prompts = [
        "1+1 0+1", "3 + 5", "0+0", "+", "\u202e", "1" * 300, "13*9", "011 + 101 = 000 mod 2^3",
        "1 + 1 = ? mod 2^0", "1.../..3./.4../...2", "#####/#S..#", "9" * 400 + "+1",
        "8/8/8/8/8/8/8/8 w - -", *WORDS,
    ]  # fmt: skip
    more = _options(rng, loops=["2", *NUMBERS], device=DEVICES, threads=["1", *NUMBERS])
    out = ["--out", _place(rng, run, mine)]
    lens = _options(rng, lens=["logit", "tuned", str(run / "config.json"), *WORDS])
    return [_run_of(rng, run, mine), "--prompt", rng.choice(prompts), *out, *more, *lens]


def _zoo(rng: random.Random, run: Path, mine: Path) -> list[str]:
    return [rng.choice(["addition", *WORDS]), "--out", _place(rng, run, mine)]


def _benchmark(rng: random.Random, run: Path, mine: Path) -> list[str]:
    # One small model, or what is refused.
    return [_place(rng, run, mine), "--only", rng.choice(["parity", *WORDS]), "--no-progress"]


def _demo(rng: random.Random, run: Path, mine: Path) -> list[str]:
    # Only what is refused: a demo takes minutes.
    words = [
        ["--seed", rng.choice(["-1", "x", str(2**63)])],
        ["--threads", rng.choice(["0", *BIG])],
    ]
    words += [["--out", str(mine / "notes.txt")], ["--out", ""], ["--set", rng.choice(WORDS)]]
    refused = rng.choice(words)
    if refused[0] == "--out":
        return refused
    # Where no folder is named, nothing but the word itself can be what is wrong.
    alone = rng.choice([["--seed", "-1"], ["--threads", "0"], ["--set", "steps=0"]])
    return rng.choice([alone, ["--out", _place(rng, run, mine), *refused]])


_OF = {
    "train": _train,
    "compile": _compile,
    "evaluate": _evaluate,
    "grid": _grid,
    "sweep": _sweep,
    "analyze": _analyze,
    "report": _report,
    "lens": _lens,
    "tasks": lambda rng, run, mine: _options(rng, json=WORDS),
    "recipes": lambda rng, run, mine: [rng.choice(["addition", *WORDS])],
    "zoo": _zoo,
    "benchmark": _benchmark,
    "demo": _demo,
}
