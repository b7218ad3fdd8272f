"""Small compiled models, made once for all tests that only read them."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from loopinterp.compiler import Compiled, compile_program
from loopinterp.programs import get_program
from loopinterp.programs.stock_programs import unique_set
from loopinterp.tasks import get_task

SMALL = {"abacus_ripple": 2, "multiplication": 2}
"""Lengths of inputs of programs whose models are large; those of all others are 4."""


@functools.cache
def stock_model(name: str, max_length: int = 7) -> Compiled:
    """A registered program, compiled."""
    return compile_program(name, max_length=max_length)


@dataclass(frozen=True, eq=False)
class SmallModel:
    """A compiled model, inputs of its task, loops that settle it, and its logits at each."""

    compiled: Compiled
    inputs: Tensor
    n_loops: int
    logits: Tensor


@functools.cache
def small_model(name: str, n: int | None = None, *, batch_size: int = 24) -> SmallModel:
    """The model of a program for inputs of length n."""
    program = unique_set(5) if name == "unique_set" else get_program(name)
    settings = {"n_symbols": 5} if name == "unique_set" else program.task_settings
    task = get_task(program.task, **settings)
    n = SMALL.get(name, 4) if n is None else n
    lengths = torch.full((batch_size,), n)
    inputs = task.sample(lengths, generator=torch.Generator().manual_seed(0)).inputs
    compiled = compile_program(program, max_length=inputs.shape[1])
    n_loops = program.n_loops(n) + 2
    return SmallModel(compiled, inputs, n_loops, logits_of(compiled, inputs, n_loops))


@torch.no_grad()
def logits_of(compiled: Compiled, inputs: Tensor, n_loops: int) -> Tensor:
    """Logits at every loop."""
    return compiled.model(inputs, n_loops=n_loops, return_type="all_logits")


def cached(compiled: Compiled, inputs: Tensor, n_loops: int, site: str) -> dict[int, Tensor]:
    """Activations at one site of every layer of a run, by the layer's number in it."""
    with torch.no_grad():
        _, cache = compiled.model.run_with_cache(inputs, n_loops=n_loops, names_filter=site)
    config = compiled.model.config
    return {k: cache[f"blocks.{k}.{site}"] for k in range(config.layers_total(n_loops))}


def section_of(compiled: Compiled, number: int, n_loops: int) -> tuple[str, int]:
    """(section, layer) of a layer's number in a run."""
    config = compiled.model.config
    if number < config.n_prelude:
        return "prelude", number
    number -= config.n_prelude
    if number < n_loops * config.n_layers:
        return "block", number % config.n_layers
    return "coda", number - n_loops * config.n_layers
