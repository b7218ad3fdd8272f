"""Golden numbers: what a change of structure must not move, written down and compared.

    python -m tests.golden golden.json                 # writes the numbers of this tree
    python -m tests.golden golden.json --against       # compares this tree with them
    python -m tests.golden golden.json --only studies programs

Each number is an array: logits and caches of every configuration axis and adapter, trained weights
after some steps of every objective, zoo models' logits and scores, traces, compiled weights and
decompiled tables of stock programs, and the arrays of every study. An array is kept as a digest of
its bytes with its shape, its mean and its greatest magnitude, so that a difference has a size.
Floats are equal bit by bit only on one machine with one number of threads: write and compare there.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from loopinterp.compiler import compile_program
from loopinterp.core.errors import InputError
from loopinterp.decompiler import decompile
from loopinterp.models import LoopedTransformer, LoopedTransformerConfig
from loopinterp.programs import get_program, list_programs
from loopinterp.tasks import Addition, as_batch, get_task
from loopinterp.training import CodeConfig, Trainer, evaluate
from loopinterp.zoo import list_pretrained, load_pretrained, pretrained_run
from tests.adapters.kinds import KINDS
from tests.test_devices import MODELS, SMALL
from tests.test_study_arguments import OF_A_TASK, OF_GIVEN_PAIRS, STUDIES
from tests.training.tiny_run import TINY

Numbers = Iterator[tuple[str, Any]]

CODED = {"state_code": 3, "initial_state": "code", "loop_norm": True, "injection": "input"}
MORE_MODELS: dict[str, dict[str, Any]] = {
    "state code": CODED,
    "two layers, no norm": {"n_layers": 2, "norm": "none"},
    "post norm, tied": {"norm": "post", "tie_unembed": True, "unembed_bias": False},
    "not causal": {"causal": False},
}
OBJECTIVES: dict[str, dict[str, Any]] = {
    "last": {"kind": "last"},
    "held and due": {"hold_loops": 3, "due_share": 0.5},
    "progressive": {"kind": "progressive", "n_loops": 4},
    "every": {"kind": "every", "n_loops": 3},
    "drawn": {"kind": "drawn", "n_loops": 5, "least_loops": 2},
}
RUN_TO_RUN = ("seconds", "wall_time")
"""Arrays that hold times."""


def logits_and_caches() -> Numbers:
    """Every configuration axis: logits after each loop, and every cached activation."""
    tokens = torch.randint(6, (3, 9), generator=torch.Generator().manual_seed(0))
    for name, axis in (MODELS | MORE_MODELS).items():
        model = LoopedTransformer(LoopedTransformerConfig(**SMALL | axis), seed=0).eval()
        yield f"{name}/logits", model(tokens, n_loops=4)
        _, cache = model.run_with_cache(tokens, n_loops=3)
        for hook in cache:
            yield f"{name}/{hook}", cache[hook]


def adapters() -> Numbers:
    """Every adapter on a tiny random published model."""
    from loopinterp.adapters import adapt

    tokens = torch.randint(4, (2, 6), generator=torch.Generator().manual_seed(0))
    for name, kind in KINDS.items():
        model = adapt(kind.build())
        logits, cache = model.run_with_cache(tokens, n_loops=2)
        yield f"{name}/logits", logits
        for hook in cache:
            yield f"{name}/{hook}", cache[hook]


def training() -> Numbers:
    """Weights after some steps of every objective."""
    for name, objective in OBJECTIVES.items():
        config = TINY.replace(objective=TINY.objective.replace(**objective), steps=6)
        yield from _trained(name, config)
    coded = TINY.replace(
        model=TINY.model.replace(**CODED), code=CodeConfig(hard=0.3, random_somewhere=0.5), steps=6
    )
    yield from _trained("state code", coded)


def _trained(name: str, config: Any) -> Numbers:
    trainer = Trainer(config)
    for _ in range(config.steps):
        trainer.step()
    for key, weight in trainer.model.state_dict().items():
        yield f"{name}/{key}", weight


def zoo() -> Numbers:
    """Every zoo model: logits and exact match on a small sample."""
    for name in sorted(list_pretrained().index):
        run = pretrained_run(name)
        model, task = run.model(), run.task
        n = run.cutoff
        batch = as_batch(task, n=n, batch_size=8, seed=0)
        with torch.no_grad():
            yield f"{name}/logits", model(batch.inputs, n_loops=min(int(batch.n_loops.max()), 16))
        scores = evaluate(model, task, [n], n_samples=16)
        yield from _arrays(name, scores)


def programs() -> Numbers:
    """Stock programs: compiled weights, answers and traces at each loop, and what is decompiled."""
    for name in list_programs():
        program = get_program(name)
        try:
            compiled = compile_program(program, max_length=7)
        except InputError as error:
            yield f"{name}/refused", np.frombuffer(type(error).__name__.encode(), np.uint8)
            continue
        for key, weight in compiled.model.state_dict().items():
            yield f"{name}/{key}", weight
        if program.task in ("addition", "parity", "prefix_sum"):
            task = get_task(program.task)
            batch = as_batch(task, n=4, batch_size=8, seed=0)
            yield f"{name}/logits", compiled.model(batch.inputs, n_loops=6)
            text = str(decompile(compiled.model, task, n=3, n_exchanges=100).program)
            yield f"{name}/decompiled", np.frombuffer(text.encode(), np.uint8)


def studies() -> Numbers:
    """The arrays of every study, on an untrained model, a trained one and a compiled one."""
    sizes: dict[str, Any] = SMALL | {"d_vocab_out": 2}
    untrained = LoopedTransformer(LoopedTransformerConfig(**sizes), seed=0)
    for kind, model in {
        "untrained": untrained.eval(),
        "trained": load_pretrained("addition"),
        "compiled": compile_program("ripple", max_length=7).model,
    }.items():
        data = as_batch(Addition(), n=4, batch_size=8, seed=0)
        for name, study in STUDIES.items():
            if name in OF_GIVEN_PAIRS:
                continue
            try:
                result = study(model, Addition() if name in OF_A_TASK else data)
            except InputError as error:
                yield f"{kind}/{name}/refused", np.array([hash_of(error.what.encode())])
                continue
            yield from _arrays(f"{kind}/{name}", result)


def _arrays(name: str, result: Any) -> Numbers:
    for key, array in sorted(result.data.variables.items()):
        if not any(word in str(key) for word in RUN_TO_RUN):
            yield f"{name}/{key}", np.asarray(array.values)


SECTIONS: Mapping[str, Callable[[], Numbers]] = {
    "logits": logits_and_caches,
    "adapters": adapters,
    "training": training,
    "zoo": zoo,
    "programs": programs,
    "studies": studies,
}


def hash_of(data: bytes) -> str:
    """A digest short enough to be read."""
    return hashlib.sha256(data).hexdigest()[:16]


def digest(value: Any) -> dict[str, Any]:
    """Shape, digest of the bytes and, of numbers, mean and greatest magnitude."""
    array = value.detach().numpy() if isinstance(value, torch.Tensor) else np.asarray(value)
    if array.dtype == object or array.dtype.kind in "US":
        return {"shape": list(array.shape), "digest": hash_of(repr(array.tolist()).encode())}
    found = {"shape": list(array.shape), "digest": hash_of(np.ascontiguousarray(array).tobytes())}
    if array.size:
        numbers = np.nan_to_num(array.astype(np.float64))
        found |= {"mean": float(numbers.mean()), "greatest": float(np.abs(numbers).max())}
    return found


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """A line for each number that is not the same."""
    lines = [f"gone: {key}" for key in sorted(before.keys() - after.keys())]
    lines += [f"new: {key}" for key in sorted(after.keys() - before.keys())]
    for key in sorted(before.keys() & after.keys()):
        if before[key] != after[key]:
            lines.append(f"differs: {key}: {before[key]} -> {after[key]}")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description="Write golden numbers, or compare with them.")
    parser.add_argument("file", type=Path)
    parser.add_argument("--against", action="store_true", help="Compare with the file.")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    args = parser.parse_args()
    torch.set_num_threads(1)
    numbers = {
        f"{section}/{name}": digest(value)
        for section in args.only
        for name, value in SECTIONS[section]()
    }
    if not args.against:
        args.file.write_text(json.dumps(numbers, indent=0, sort_keys=True))
        print(f"{len(numbers)} numbers written")
        return 0
    before = {
        key: value
        for key, value in json.loads(args.file.read_text()).items()
        if key.split("/")[0] in args.only
    }
    lines = differences(before, numbers)
    print("\n".join(lines[:200]))
    print(f"{len(numbers)} numbers, {len(lines)} differences")
    return bool(lines)


if __name__ == "__main__":
    sys.exit(main())
