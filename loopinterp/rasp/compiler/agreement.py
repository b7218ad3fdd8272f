"""Does a compiled model do what its program does? Every loop, every variable, every selector."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from loopinterp.rasp.language import UNKNOWN

if TYPE_CHECKING:
    from collections.abc import Iterator

    from jaxtyping import Bool, Int
    from torch import Tensor

    from loopinterp.rasp.compiler.circuit import Circuit, HeadNode
    from loopinterp.rasp.compiler.compiled import Compiled
    from loopinterp.rasp.trace import Trace

CHUNK = 2**21
"""Loops x examples x positions x d_model that are compared at a time."""


@dataclass(frozen=True)
class Agreement:
    """How far a compiled model is from its program, over every loop of a run.

    Attributes:
        values: Values compared, of all variables.
        wrong_values: Variable -> values that were decoded wrongly.
        wrong_answers: Answers that differ from the program's, where that is decided.
        state_error: Largest difference of a variable's reads from 1 for its value and 0 for all
            others.
        attention_error: Selector -> largest difference of its head's attention from an even one
            over the selected keys, where some are selected.
    """

    values: int
    wrong_values: dict[str, int]
    wrong_answers: int
    state_error: float
    attention_error: dict[str, float]

    @property
    def exact(self) -> bool:
        """Whether every variable and every answer is the program's."""
        return not self.wrong_answers and not any(self.wrong_values.values())


@torch.no_grad()
def compare_with_program(
    compiled: Compiled, tokens: Int[Tensor, "batch pos"], *, n_loops: int
) -> Agreement:
    """Run model and program side by side.

    Args:
        compiled: The model, its circuit, its program.
        tokens: Inputs.
        n_loops: Loops to run.

    Raises:
        InputError: the tokens are not of this program, or too long.

    Example:
        >>> from loopinterp.rasp import compile_program
        >>> compiled = compile_program("parity", max_length=6)
        >>> compare_with_program(compiled, torch.tensor([[4, 1, 0, 1, 2, 3]]), n_loops=3).exact
        True
    """
    wrong = dict.fromkeys(compiled.circuit.variables, 0)
    attention: dict[str, float] = {}
    values, answers, error = 0, 0, 0.0
    for part in _parts(tokens, n_loops, compiled.model.config.d_model):
        trace = compiled.program.trace(part, n_loops=n_loops)
        states = compiled.model(part, n_loops=n_loops, return_type="states")
        for name, expected in trace.variables.items():
            wrong[name] += int((compiled.circuit.decode(name, states) != expected).sum())
            error = max(error, _state_error(compiled.circuit, name, states, expected))
            values += expected.numel()
        logits = torch.stack([compiled.model.readout(h) for h in states])
        decided = trace.outputs != UNKNOWN
        answers += int(((logits.argmax(-1) != trace.outputs) & decided).sum())
        for name, difference in _attention(compiled, part, trace, n_loops):
            attention[name] = max(attention.get(name, 0.0), difference)
    return Agreement(values, wrong, answers, error, attention)


def _parts(tokens: Tensor, n_loops: int, d_model: int) -> Iterator[Tensor]:
    size = max(CHUNK // ((n_loops + 1) * max(tokens.shape[1], 1) * d_model), 1)
    return iter(tokens.split(size))


def _state_error(circuit: Circuit, name: str, states: Tensor, expected: Tensor) -> float:
    reads = states @ circuit.of(name).read.to(states).mT
    values = torch.tensor(circuit.variables[name].values, device=states.device)
    return float((reads - (expected[..., None] == values).to(reads)).abs().max())


def _attention(
    compiled: Compiled, tokens: Tensor, trace: Trace, n_loops: int
) -> Iterator[tuple[str, float]]:
    """Selector and error of each head, loop by loop for those of the block."""
    heads = [head for head in compiled.circuit.heads if head.section != "coda" and n_loops]
    if not heads:
        return
    _, cache = compiled.model.run_with_cache(
        tokens, n_loops=n_loops, names_filter="attn.hook_pattern", return_type="state"
    )
    n_prelude, n_layers = compiled.model.config.n_prelude, compiled.model.config.n_layers
    for head in heads:
        selectors = _selectors(head, trace, n_loops)
        for loop, selector in enumerate(selectors if head.section == "block" else selectors[:1]):
            inside = n_prelude + loop * n_layers if head.section == "block" else 0
            pattern = cache[f"blocks.{inside + head.layer}.attn.hook_pattern"][:, head.head]
            yield head.selector, uneven(pattern, selector)


def _selectors(head: HeadNode, trace: Trace, n_loops: int) -> Tensor:
    """The selector of a head at each loop."""
    if head.selector in trace.selectors:
        return trace.selectors[head.selector]
    return trace.prepare_selectors[head.selector][None]


def uneven(pattern: Tensor, selector: Bool[Tensor, "batch query key"]) -> float:
    """Largest difference of attention from an even one over what is selected."""
    chosen = selector.to(pattern)
    count = chosen.sum(-1, keepdim=True)
    difference = (pattern - chosen / count.clamp(min=1)).abs() * (count > 0)
    return float(difference.max())
