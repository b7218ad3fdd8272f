"""The models of arXiv 2602.08857, with our measures: interventions beside match accuracy.

    git clone https://github.com/lacoco-lab/decompiling_transformers
    python -m analyses.decompiling_benchmark decompiling_transformers     # half an hour of one core

Each GPT-2 of the checkout is run as a looped model whose loops are its layers. Measured are its
accuracy, the heads and MLPs that it needs, how few principal directions per token keep its clean
answers and predict interchanges, and whether ``decompile`` applies. A row per model, length and
rank goes into analyses/results/decompiling_benchmark.csv after each model, so that a run that was
interrupted goes on; the table goes into docs/results/decompiling-benchmark.md. Data are drawn by
the checkout's own module. Python files of the checkout are run; no pickle is loaded.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import json
import random
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import torch
from torch import nn

from analyses.tables_in_pages import PAGES, RESULTS, replaced, rewrite, table
from loopinterp.comparison import reduction_study
from loopinterp.comparison.reduced_model import ENOUGH
from loopinterp.comparison.rule import LEAST_INPUTS
from loopinterp.core.errors import InputError
from loopinterp.decompiler import decompile
from loopinterp.interventions import ablation_study
from loopinterp.models import LoopedTransformer, LoopedTransformerConfig, iterate
from loopinterp.tasks import IGNORE, Batch, InWords

if TYPE_CHECKING:
    from jaxtyping import Float, Int
    from torch import Tensor
    from transformers import GPT2LMHeadModel

FILE, NAME = "decompiling_benchmark.csv", "decompiling-benchmark"
PAGE = f"results/{NAME}.md"
MODELS, DATA = Path("share/saved_models"), Path("crasp/scripts/patching")

LONGEST = 150
"""Problem length up to which their vocabularies and tables of positions are made."""

RANGES = ((0, 50), (51, 100), (101, LONGEST))
"""Lengths of their three evaluation sets; the first is that of training."""

LENGTHS = (24, 48)
"""Lengths of interventions: a problem of every task has them."""

EXAMPLES, ABLATED, PAIRS = 384, 128, 2048
MOST_NUMBERS = 2**18
"""Numbers in the exchanged states of all pairs: wider models have fewer pairs."""

TOLERANCE = 1e-5


class LayersAsLoops(nn.Module):
    """A GPT-2 as a looped model that applies layer t in loop t; the state is its residual stream.

    Args:
        net: The model.
        classes: Rows that make the scores of answer classes out of its logits; its tokens if None.
    """

    def __init__(
        self, net: GPT2LMHeadModel, classes: Float[Tensor, "answer d_vocab"] | None = None
    ) -> None:
        super().__init__()
        self.net, self.classes = net, classes
        self.n_ctx = int(net.config.n_positions)

    def embed(self, tokens: Int[Tensor, "batch pos"]) -> Float[Tensor, "batch pos d_model"]:
        body, places = self.net.transformer, torch.arange(tokens.shape[1], device=tokens.device)
        return body.wte(tokens) + body.wpe(places)

    def initial_state(
        self, e: Float[Tensor, "batch pos d_model"]
    ) -> Float[Tensor, "batch pos d_model"]:
        return e

    def step(
        self,
        h: Float[Tensor, "batch pos d_model"],
        e: Float[Tensor, "batch pos d_model"],
        loop: int = 0,
    ) -> Float[Tensor, "batch pos d_model"]:
        out = self.net.transformer.h[loop](h)
        return out if isinstance(out, torch.Tensor) else out[0]

    def readout(
        self, h: Float[Tensor, "batch pos d_model"]
    ) -> Float[Tensor, "batch pos d_vocab_out"]:
        logits = self.net.lm_head(self.net.transformer.ln_f(h))
        return logits if self.classes is None else logits @ self.classes.T


class OneLayer(LayersAsLoops):
    """A GPT-2 of one layer, which is one map."""

    def step(  # type: ignore[override]
        self, h: Float[Tensor, "batch pos d_model"], e: Float[Tensor, "batch pos d_model"]
    ) -> Float[Tensor, "batch pos d_model"]:
        return super().step(h, e)


def subsets(d_vocab: int) -> Float[Tensor, "answer d_vocab"]:
    """Rows that add up the logits of each set of tokens: the largest sum is of all that are > 0.

    Example:
        >>> scores = torch.tensor([0.5, -1.0, 2.0]) @ subsets(3).T
        >>> int(scores.argmax()) == 0b101
        True
    """
    return (torch.arange(2**d_vocab)[:, None] >> torch.arange(d_vocab) & 1).float()


def load(folder: Path) -> GPT2LMHeadModel:
    """A checkpoint by its configuration and safetensors."""
    from safetensors.torch import load_file
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config.from_pretrained(folder)
    config._attn_implementation = "sdpa"  # the causal mask of a layer that is called by itself
    net = GPT2LMHeadModel(config)
    weights = load_file(folder / "model.safetensors")
    missing, unknown = net.load_state_dict(weights, strict=False)
    if unknown or {*missing} - {"lm_head.weight"}:  # tied to the embedding
        raise InputError(
            f"weights of {folder.name}",
            expected="those of a GPT-2 with a tied unembedding",
            given=f"missing {missing}, unknown {unknown}",
            fix="Fetch the checkpoint again.",
        )
    net.tie_weights()
    return net.eval().requires_grad_(False)


def with_hooks(
    net: GPT2LMHeadModel, classes: Float[Tensor, "answer d_vocab"] | None = None
) -> LoopedTransformer:
    """The same model as one loop of all its layers, with hooks for heads and MLPs."""
    own, had = net.config, net.state_dict()
    unembedding = had["lm_head.weight"]
    unembedding = unembedding if classes is None else classes @ unembedding
    config = LoopedTransformerConfig(
        d_model=own.n_embd,
        n_heads=own.n_head,
        n_layers=own.n_layer,
        d_vocab=own.vocab_size,
        d_vocab_out=len(unembedding),
        positions="absolute",
        n_ctx=own.n_positions,
        act_fn="gelu_new",
        norm_eps=own.layer_norm_epsilon,
        unembed_bias=False,
    )
    weights = {
        "embedding.weight": had["transformer.wte.weight"],
        "position_embedding.weight": had["transformer.wpe.weight"],
        "unembedding.weight": unembedding,
    }
    theirs = {
        "ln_1": "ln1", "ln_2": "ln2", "attn.c_attn": "attn.qkv", "attn.c_proj": "attn.out",
        "mlp.c_fc": "mlp.fc_in", "mlp.c_proj": "mlp.fc_out",
    }  # fmt: skip
    for kind in ("weight", "bias"):
        weights[f"ln_final.{kind}"] = had[f"transformer.ln_f.{kind}"]
        for layer in range(own.n_layer):
            for name, ours in theirs.items():
                weight = had[f"transformer.h.{layer}.{name}.{kind}"]
                # A Conv1D has its matrix [in, out].
                weights[f"block.{layer}.{ours}.{kind}"] = weight.T if weight.ndim == 2 else weight
    model = LoopedTransformer(config).eval().requires_grad_(False)
    model.load_state_dict(weights)
    return model


@torch.no_grad()
def difference(net: GPT2LMHeadModel, tokens: Int[Tensor, "batch pos"]) -> float:
    """Largest difference of the logits of both forms from the model's own, in double precision,
    relative to the largest of them."""
    net = copy.deepcopy(net).double()
    logits = net(tokens, attention_mask=torch.ones_like(tokens)).logits
    model, hooked = LayersAsLoops(net), with_hooks(net).double()
    *_, (_, h) = iterate(model, tokens, net.config.n_layer)
    off = [(other - logits).abs().max() for other in (model.readout(h), hooked(tokens))]
    return float(torch.stack(off).max() / logits.abs().max().clamp(min=1))


@dataclass(frozen=True)
class TheirTask(InWords):
    """One of the checkout's tasks, drawn by its own module.

    Of a language the answer at a position is the set of tokens that may follow, as a number whose
    bits are the tokens; else it is the next token, where that is part of the answer.
    """

    name: str
    layers: int
    module: Any = field(repr=False)
    distributions = ("theirs",)
    d_features = None

    @property
    def tokenizer(self) -> Any:
        return self.module.get_tokenizer_for_task(self.name, LONGEST)

    @property
    def of_sets(self) -> bool:
        return self.name.startswith("bce")

    @property
    def d_vocab(self) -> int:
        return len(self.tokenizer)

    @property
    def d_vocab_out(self) -> int:
        return 2**self.d_vocab if self.of_sets else self.d_vocab

    def n_loops(self, n: int) -> int:
        return self.layers

    def n_positions(self, n: int) -> int:
        return self.draw(n, n, 1, seed=0).inputs.shape[1]

    def config(self) -> dict[str, object]:
        return {}

    def describe(self) -> str:
        return self.name

    def targets(self, inputs: Any) -> Int[Tensor, "batch pos"]:
        raise NotImplementedError("answers are drawn with the inputs")

    def sample(
        self,
        n: Any,
        *,
        batch_size: int | None = None,
        generator: torch.Generator,
        distribution: str | None = None,
    ) -> Batch:
        seed = int(torch.randint(2**31, (), generator=generator))
        length, size = (n, batch_size or 1) if isinstance(n, int) else (int(n[0]), len(n))
        return self.draw(length, length, size, seed=seed)

    def draw(self, least: int, most: int, size: int, *, seed: int) -> Batch:
        """Examples of lengths from ``least`` to ``most``, without a random offset of positions."""
        random.seed(seed)  # their module draws from the global generators
        np.random.seed(seed)  # noqa: NPY002
        words = self.tokenizer
        other = {"period_for_data": 3}
        data = iter(self.module.get_dataset_for_task(self.name, words, (least, most), -1, other))
        drawn = [next(data) for _ in range(size)]
        width = max(len(tokens) for tokens, _, _ in drawn)
        inputs = torch.full((size, width), words.pad_token_id)
        targets = torch.full_like(inputs, IGNORE)
        for row, (tokens, _, label) in enumerate(drawn):
            inputs[row, : len(tokens)] = torch.tensor(tokens)
            if self.of_sets:
                sets = torch.tensor(label)
                codes = (sets << torch.arange(sets.shape[1])).sum(1)
                targets[row, : len(tokens)] = codes.where(sets.any(1), IGNORE)
            else:
                following = torch.tensor(label[1:])
                asked = following != words.pad_token_id
                targets[row, : len(following)] = following.where(asked, IGNORE)
        n, n_loops = torch.full((size,), most), torch.full((size,), self.layers)
        return Batch(inputs, targets, n, n_loops)


@dataclass
class Subject:
    """A checkpoint that is measured."""

    name: str
    net: GPT2LMHeadModel
    task: TheirTask

    @property
    def classes(self) -> Float[Tensor, "answer d_vocab"] | None:
        return subsets(self.net.config.vocab_size) if self.task.of_sets else None

    def measure(self) -> list[dict[str, Any]]:
        """A row for each length and rank."""
        config = self.net.config
        evaluated = [self.task.draw(*span, EXAMPLES, seed=k) for k, span in enumerate(RANGES)]
        model = LayersAsLoops(self.net, self.classes)
        off = difference(self.net, evaluated[1].inputs[:32])
        if off > TOLERANCE:
            raise InputError(
                f"model {self.name}",
                expected=f"its own logits to {TOLERANCE:g}, with its layers as loops",
                given=f"a difference of {off:.2g}",
                fix="Use the versions of torch and transformers that the project pins.",
            )
        about: dict[str, Any] = {
            "model": self.name,
            "layers": config.n_layer,
            "heads": config.n_head,
            "d_model": config.n_embd,
            "difference": off,
            **{
                f"accuracy {span[0]}-{span[1]}": accuracy(model, batch)
                for span, batch in zip(RANGES, evaluated)
            },
        }
        at = [self.task.draw(n, n, EXAMPLES, seed=n) for n in LENGTHS]
        several = len(at[-1].inputs.unique(dim=0)) > 1
        if not several:  # a language with one string of each length
            at = evaluated[:1]
        about |= self.parts(at[-1]) if several else {}
        about["decompile"] = self.program()
        asked = float((at[0].targets != IGNORE).float().mean())
        found = reduction_study(
            model,
            at,
            ranks=[2**k for k in range(config.n_embd.bit_length()) if 2**k < config.n_embd],
            kinds=("same loop",),
            at_end=True,
            pairs=min(int(PAIRS / asked), MOST_NUMBERS // config.n_embd),
        )
        rows = []
        for n in found.data["n"].values.tolist():
            for rank in found.data["rank"].values.tolist():
                share = found.weakest(rank, n=n).share
                cell = found.data.sel(kind="same loop", n=n, rank=rank)
                clean = cell["undisturbed"].values.tolist()
                rows.append({
                    **about, "n": n, "rank": rank,
                    **dict(zip(("clean", "clean low", "clean high"), clean)),
                    "interchanges": int(cell["effective"].sum()),
                    **share._asdict(), "whole run": float(cell["whole_run"][0]),
                    "others": float(cell["others"][0]),
                })  # fmt: skip
        return rows

    def parts(self, batch: Batch) -> dict[str, Any]:
        """Heads and MLPs, and those whose ablation by a mean or another example changes answers."""
        batch = batch[slice(ABLATED)]
        hooked = with_hooks(self.net, self.classes)
        one = Batch(batch.inputs, batch.targets, batch.n, torch.ones_like(batch.n_loops))
        judged = ablation_study(hooked, one, kinds=("mean", "resample"), when=("all",)).judged()
        needed = {*judged["part"][judged["need"] == "needed"]}
        return {"parts": len({*judged["part"]}), "needed": len(needed)}

    def program(self) -> str:
        """``program``, or the code of the reason why ``decompile`` gives none."""
        if self.task.layers > 1:
            return "untied-layers"
        model = OneLayer(self.net, self.classes)
        found = decompile(model, self.task, n=(8, 12), lengths=(8, 12, 16), tolerances=(0.0,))
        return "program" if found.refusal is None else found.refusal.code


@torch.no_grad()
def accuracy(model: LayersAsLoops, batch: Batch) -> float:
    """Share of examples with all answers right."""
    right = 0
    for part in range(0, len(batch), 64):
        some = batch[slice(part, part + 64)]
        *_, (_, h) = iterate(model, some.inputs, int(some.n_loops[0]))
        same = model.readout(h).argmax(-1) == some.targets
        right += int((same | (some.targets == IGNORE)).all(1).sum())
    return right / len(batch)


def theirs(root: Path, name: str) -> dict[str, Any]:
    """Their accuracy on the three sets, and whether they give a program."""
    text = (root / MODELS / name / "acc.txt").read_text()
    found = dict(re.findall(r"eval_len([\d-]+)_acc: ([\d.]+)", text))
    good = json.loads((root / DATA / "good_models.json").read_text())["chosen_exps"]
    runs = [
        run
        for key, run in good.items()
        if re.fullmatch(rf"newprune-{re.escape(name)}-\d+_\d+", key)
    ]
    shares = {f"their {span}": float(value) for span, value in found.items()}
    program = "yes" if any(runs) else "no" if runs else "–"
    return {**shares, "their program": program}


_REASONS = {
    "program": "a program",
    "untied-layers": "untied layers",
    "many-tokens": "more than 12 tokens",
    "reads-farther": "reads more than the left neighbour",
    "starts-differ": "initial values differ by position",
    "many-values": "too many values",
    "many-cells": "too many values",
    "inconsistent": "one experiment, several values",
}


def as_table(known: pd.DataFrame) -> str:
    """A row a model: their result and ours."""
    header = (
        "model", "layers × d_model", "their program", "accuracy, theirs", "here", "parts needed",
        "r, clean answers", "r, interchanges", "`decompile`",
    )  # fmt: skip
    rows = []
    for name, of in known.groupby("model"):
        one, span = of.iloc[0], f"{RANGES[0][0]}-{RANGES[0][1]}"
        ranks: Any = of.groupby("rank").agg({"clean": "min", "value": "min", "inputs": "min"})
        most = ranks.index.max()

        enough = ranks["inputs"] >= LEAST_INPUTS
        clean, predicted = ranks["clean"] >= ENOUGH, (ranks["value"] >= ENOUGH) & enough
        above = f"> {most}"
        rows.append([
            f"`{name}`", f"{one['layers']} × {one['d_model']}",
            one["their program"],
            f"{one[f'their {span}']:.3f}", f"{one[f'accuracy {span}']:.3f}",
            "–" if pd.isna(one["parts"]) else f"{one['needed']:.0f} of {one['parts']:.0f}",
            min(ranks.index[clean], default=above),
            min(ranks.index[predicted], default=above if enough.any() else "–"),
            _REASONS.get(one["decompile"], one["decompile"]),
        ])  # fmt: skip
    return table(header, rows)


def need_checkout(root: Path) -> Any:
    """The checkout's data module.

    Raises:
        InputError: If there is none.
    """
    module = root / DATA / "patching_data.py"
    if not module.is_file() or not (root / MODELS).is_dir():
        raise InputError(
            "PATH",
            expected=f"a checkout of decompiling_transformers, with {DATA} and {MODELS}",
            given=f"{str(root)!r}, without them",
            fix="Clone https://github.com/lacoco-lab/decompiling_transformers and pass its folder.",
        )
    sys.path.insert(0, str(module.parent.resolve()))
    return importlib.import_module(module.stem)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("path", type=Path, metavar="PATH", help="The checkout.")
    parser.add_argument("--model", action="append", help="Measure these alone, anew.")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--page", type=Path, default=PAGES / PAGE)
    args = parser.parse_args()
    try:
        module = need_checkout(args.path)
    except InputError as error:
        parser.error(str(error))
    file = args.results / FILE
    done = {*pd.read_csv(file)["model"]} if file.exists() else set()
    weights = (args.path / MODELS).glob("*/model.safetensors")
    for path in sorted(weights, key=lambda path: (path.stat().st_size, path.parent.name)):
        name = path.parent.name
        if name not in args.model if args.model else name in done:
            continue
        net = load(path.parent)
        task = TheirTask(re.split(r"-[@#%^]", name)[0], net.config.n_layer, module)
        rows = [row | theirs(args.path, name) for row in Subject(name, net, task).measure()]
        known = replaced(file, pd.DataFrame(rows), ["model"])
        known.to_csv(file, index=False, float_format="%.4g")
    rewrite(args.page, {NAME: as_table(pd.read_csv(file))})


if __name__ == "__main__":
    main()
