"""Every head of a model against every selector of programs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from loopinterp.circuits.comparison_inputs import check_batch, check_programs
from loopinterp.circuits.head_matching import HeadMatch, match_heads
from loopinterp.circuits.layer_sections import BLOCK, CODA, PRELUDE, head_name, surround
from loopinterp.models.looped_model import need_model
from loopinterp.models.model_description import describe_model
from loopinterp.models.positions import attention_mask
from loopinterp.rasp.expr import selectors as selectors_of
from loopinterp.rasp.interpreter import evaluate

if TYPE_CHECKING:
    from jaxtyping import Bool
    from torch import Tensor

    from loopinterp.models import LoopedTransformer
    from loopinterp.rasp.program import LoopProgram
    from loopinterp.tasks.task import Batch

_PATTERN = "attn.hook_pattern"


def head_study(
    model: LoopedTransformer,
    batch: Batch,
    programs: Sequence[str | LoopProgram],
    *,
    seed: int = 0,
) -> HeadMatch:
    """:func:`match_heads` of a model, against every selector of the programs.

    Heads of the prelude, the block and the coda are all matched with the selectors of
    ``prepare``, ``step`` and ``finish``: a selection of ``step`` that reads no variable may be
    made once for all loops. What is done once (heads of prelude and coda, selectors of
    ``prepare`` and of ``finish`` after the last loop) is compared at every loop.

    Args:
        model: The model.
        batch: Examples of one length in the programs' token format, on the model's device.
        programs: The programs, such as ``list_programs(task.name)``. Selectors that programs
            share are listed once.
        seed: Written to the provenance.

    Raises:
        InputError: what is no model, no batch or no list of programs, or tokens that a program
            does not know.
    """
    chosen = check_programs(programs)
    check_batch(batch, chosen)
    need_model(model)
    n_loops = int(batch.n_loops.max())
    selectors: dict[str, Tensor] = {}
    for program in chosen:
        for name, values in _selectors(program, batch.inputs, n_loops):
            known = selectors.get(name)
            if known is None or not torch.equal(known, values):
                selectors[name if known is None else f"{program.name}.{name}"] = values
    parts, heads = _patterns(model, batch.inputs, n_loops)
    visible = attention_mask(
        batch.inputs.shape[1],
        causal=model.config.causal,
        window=model.config.attention_window,
        device=batch.inputs.device,
    )
    return match_heads(
        parts,
        selectors,
        heads=heads,
        visible=visible,
        seed=seed,
        config={"model": describe_model(model)},
    )


def _selectors(
    program: LoopProgram, tokens: Tensor, n_loops: int
) -> Iterator[tuple[str, Bool[Tensor, "loop batch query key"]]]:
    """Every selector of a program at every loop, by name."""
    trace = program.trace(tokens, n_loops=n_loops)
    yield from trace.selectors.items()
    at_the_end = {name: values[-1] for name, values in trace.variables.items()}
    once = dict(trace.prepare_selectors)
    for name, select in selectors_of([program.finish]).items():
        # The same selection in ``step`` reads the variables as they were before each loop.
        own = f"finish.{name}" if select.variables and name in trace.selectors else name
        once[own] = evaluate(select, tokens, at_the_end)
    for name, values in once.items():
        yield name, values.expand(n_loops, *values.shape)


@torch.no_grad()
def _patterns(
    model: LoopedTransformer, inputs: Tensor, n_loops: int
) -> tuple[list[Tensor], list[str]]:
    """Patterns [loop or 1, batch, head, query, key] of each layer, and the names of all heads."""
    _, cache = model.run_with_cache(inputs, n_loops=n_loops, names_filter=_PATTERN)
    n_layers, n_heads = model.config.n_layers, model.config.n_heads
    around = surround(model.config, n_loops)

    def once(section: str) -> list[tuple[str, int, Tensor]]:
        return [
            (section, layer, cache[f"blocks.{number}.{_PATTERN}"][None])
            for layer, number in enumerate(around[section])
        ]

    block = [(BLOCK, k, cache.stack(_PATTERN, layer=k)) for k in range(n_layers)]
    sections = [*once(PRELUDE), *block, *once(CODA)]
    heads = [
        head_name(section, layer, head, n_layers=n_layers)
        for section, layer, _ in sections
        for head in range(n_heads)
    ]
    return [pattern for _, _, pattern in sections], heads
