"""Does a compiled model do what its program does? Every loop, every variable, every selector."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from loopinterp.errors import check_integer
from loopinterp.rasp.compiler.compiled import Compiled, need_compiled
from loopinterp.rasp.expr import selectors
from loopinterp.rasp.interpreter import evaluate
from loopinterp.rasp.language import UNKNOWN
from loopinterp.short_repr import ShortRepr
from loopinterp.tasks.sampling import check_tokens

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jaxtyping import Bool, Int
    from torch import Tensor

    from loopinterp.rasp.compiler.circuit import Circuit, HeadNode

CHUNK = 2**21
"""Loops x examples x positions x d_model that are compared at a time."""

PATTERN = "attn.hook_pattern"


@dataclass(frozen=True, repr=False)
class Agreement(ShortRepr):
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
        InputError: no compiled model, tokens that are not of its program or too long, or a wrong
            number of loops.

    Example:
        >>> from loopinterp.rasp import compile_program
        >>> compiled = compile_program("parity", max_length=6)
        >>> compare_with_program(compiled, torch.tensor([[4, 1, 0, 1, 2, 3]]), n_loops=3).exact
        True
    """
    need_compiled(compiled)
    check_tokens(tokens, len(compiled.program.inputs), f"tokens of {compiled.program.name}")
    check_integer("n_loops", n_loops, least=1)
    wrong = dict.fromkeys(compiled.circuit.variables, 0)
    named = selectors(compiled.program.expressions)
    attention: dict[str, float] = {}
    values, answers, error = 0, 0, 0.0
    for part in parts_of(tokens, n_loops, compiled):
        trace = compiled.program.trace(part, n_loops=n_loops)
        states, logits, patterns = _run(compiled, part, n_loops)
        for name, expected in trace.variables.items():
            wrongly, apart = _differences(compiled.circuit, name, states, expected)
            wrong[name] += wrongly
            error = max(error, apart)
            values += expected.numel()
        decided = trace.outputs != UNKNOWN
        answers += int(((logits.argmax(-1) != trace.outputs) & decided).sum())
        for head, loop, pattern in patterns:
            state = {variable: x[loop] for variable, x in trace.variables.items()}
            apart = uneven(pattern, evaluate(named[head.selector], part, state))
            attention[head.selector] = max(attention.get(head.selector, 0.0), apart)
    return Agreement(values, wrong, answers, error, attention)


def parts_of(tokens: Tensor, n_loops: int, compiled: Compiled) -> Sequence[Tensor]:
    """As many examples at a time as are compared at a time."""
    each = n_loops * max(tokens.shape[1], 1) * compiled.model.config.d_model
    return tokens.split(max(CHUNK // each, 1))


def _differences(
    circuit: Circuit, name: str, states: Tensor, expected: Tensor
) -> tuple[int, float]:
    """How many values of a variable are decoded wrongly, and the largest error of its reads."""
    reads = states @ circuit.of(name).read.to(states).mT
    values = torch.tensor(circuit.variables[name].values, device=states.device)
    wrong = int((values[reads.argmax(-1)] != expected).sum())
    return wrong, float((reads - (expected[..., None] == values).to(reads)).abs().max())


def _run(
    compiled: Compiled, tokens: Tensor, n_loops: int
) -> tuple[Tensor, Tensor, list[tuple[HeadNode, int, Tensor]]]:
    """States, their logits, and where each head looks (head, loop, [batch, query, key])."""
    model, heads = compiled.model, compiled.circuit.heads
    sites = [(h, 0, f"prelude.{h.layer}.{PATTERN}") for h in heads if h.section == "prelude"]
    for head in (head for head in heads if head.section == "block"):
        layer = f"blocks.{head.layer}.{PATTERN}"
        sites += [(head, loop, f"loops.{loop}.{layer}") for loop in range(n_loops)]
    # There may be no heads, and a filter must match something.
    names = {"hook_embed", *(name for *_, name in sites)}
    states, cache = model.run_with_cache(
        tokens, n_loops=n_loops, names_filter=names, return_type="states"
    )
    found = [(head, loop, cache[name][:, head.head]) for head, loop, name in sites]
    in_coda = {h: f"coda.{h.layer}.{PATTERN}" for h in heads if h.section == "coda"}
    if not in_coda:
        return states, torch.stack([model.readout(h) for h in states]), found
    # A run that stops before its one loop reads all states out, as one batch.
    logits, cache = model.run_with_cache(
        tokens.repeat(len(states), 1),
        n_loops=1,
        stop_at_loop=0,
        state=states.flatten(0, 1),
        names_filter=in_coda.values(),
    )
    for head, name in in_coda.items():
        patterns = cache[name][:, head.head].unflatten(0, states.shape[:2])
        found += [(head, loop, pattern) for loop, pattern in enumerate(patterns)]
    return states, logits.unflatten(0, states.shape[:2]), found


def uneven(pattern: Tensor, selector: Bool[Tensor, "batch query key"]) -> float:
    """Largest difference of attention from an even one over what is selected."""
    chosen = selector.to(pattern)
    count = chosen.sum(-1, keepdim=True)
    difference = (pattern - chosen / count.clamp(min=1)).abs() * (count > 0)
    return float(difference.max())
