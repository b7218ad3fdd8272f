"""Does a compiled model do what its program does? Every loop, every variable, every selector."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from loopinterp.errors import check_integer
from loopinterp.rasp import graph
from loopinterp.rasp.compiler.compiled import Compiled, need_compiled
from loopinterp.rasp.interpreter import evaluate
from loopinterp.rasp.language import UNKNOWN
from loopinterp.tasks.sampling import check_tokens

if TYPE_CHECKING:
    from collections.abc import Iterator

    from jaxtyping import Bool, Int
    from torch import Tensor

    from loopinterp.rasp.compiler.circuit import Circuit, HeadNode
    from loopinterp.rasp.program import LoopProgram
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
    attention: dict[str, float] = {}
    values, answers, error = 0, 0, 0.0
    for part in _parts(tokens, n_loops, compiled.model.config.d_model):
        trace = compiled.program.trace(part, n_loops=n_loops)
        states, in_loops = _patterns(compiled, part, n_loops)
        logits, in_coda = _coda_patterns(compiled, part, states)
        for name, expected in trace.variables.items():
            wrongly, apart = _differences(compiled.circuit, name, states, expected)
            wrong[name] += wrongly
            error = max(error, apart)
            values += expected.numel()
        decided = trace.outputs != UNKNOWN
        answers += int(((logits.argmax(-1) != trace.outputs) & decided).sum())
        selectors = _Selectors(compiled.program, part, trace)
        for head, loop, pattern in (*in_loops, *in_coda):
            difference = uneven(pattern, selectors.of(head, loop))
            attention[head.selector] = max(attention.get(head.selector, 0.0), difference)
    return Agreement(values, wrong, answers, error, attention)


def _parts(tokens: Tensor, n_loops: int, d_model: int) -> Iterator[Tensor]:
    size = max(CHUNK // (max(n_loops, 1) * max(tokens.shape[1], 1) * d_model), 1)
    return iter(tokens.split(size))


def _differences(
    circuit: Circuit, name: str, states: Tensor, expected: Tensor
) -> tuple[int, float]:
    """How many values of a variable are decoded wrongly, and the largest error of its reads."""
    reads = states @ circuit.of(name).read.to(states).mT
    values = torch.tensor(circuit.variables[name].values, device=states.device)
    wrong = int((values[reads.argmax(-1)] != expected).sum())
    return wrong, float((reads - (expected[..., None] == values).to(reads)).abs().max())


Pattern = tuple["HeadNode", int, "Tensor"]
"""A head, after how many loops it looks, and where [batch, query, key]."""


def _patterns(compiled: Compiled, tokens: Tensor, n_loops: int) -> tuple[Tensor, list[Pattern]]:
    """The states of a run, and where the heads of prelude and block look."""
    model, config = compiled.model, compiled.model.config
    first = {"prelude": 0, "block": config.n_prelude}
    sites = [
        (head, loop, f"blocks.{first[head.section] + loop * config.n_layers + head.layer}")
        for head in compiled.circuit.heads
        if head.section in first
        for loop in range(n_loops if head.section == "block" else 1)
    ]
    if not sites:
        return model(tokens, n_loops=n_loops, return_type="states"), []
    names = {f"{block}.attn.hook_pattern" for _, _, block in sites}
    states, cache = model.run_with_cache(
        tokens, n_loops=n_loops, names_filter=names, return_type="states"
    )
    return states, [
        (head, loop, cache[f"{block}.attn.hook_pattern"][:, head.head])
        for head, loop, block in sites
    ]


def _coda_patterns(
    compiled: Compiled, tokens: Tensor, states: Tensor
) -> tuple[Tensor, list[Pattern]]:
    """The logits of every state, and where the heads of the coda look."""
    model, config = compiled.model, compiled.model.config
    heads = [head for head in compiled.circuit.heads if head.section == "coda"]
    if not heads:
        return torch.stack([model.readout(h) for h in states]), []
    first = config.n_prelude + config.n_layers
    names = {f"blocks.{first + head.layer}.attn.hook_pattern" for head in heads}
    # A run that stops before its one loop reads all states out, as one batch.
    logits, cache = model.run_with_cache(
        tokens.repeat(len(states), 1),
        n_loops=1,
        stop_at_loop=0,
        state=states.flatten(0, 1),
        names_filter=names,
    )
    found: list[Pattern] = []
    for head in heads:
        pattern = cache[f"blocks.{first + head.layer}.attn.hook_pattern"][:, head.head]
        parts = pattern.unflatten(0, states.shape[:2])
        found += [(head, loop, part) for loop, part in enumerate(parts)]
    return logits.unflatten(0, states.shape[:2]), found


class _Selectors:
    """The selectors of a run, those of ``finish`` included."""

    def __init__(self, program: LoopProgram, tokens: Tensor, trace: Trace) -> None:
        self._tokens, self._trace = tokens, trace
        self._of_finish = graph.selectors([program.finish])
        self._kept: dict[str, Tensor] = {}

    def of(self, head: HeadNode, loop: int) -> Tensor:
        """What a head computes after so many loops [batch, query, key]."""
        name = head.selector
        if head.section == "coda" or not (
            name in self._trace.selectors or name in self._trace.prepare_selectors
        ):
            variables = {name: x[loop] for name, x in self._trace.variables.items()}
            return evaluate(self._of_finish[name], self._tokens, variables)
        if name not in self._kept:
            in_step = name in self._trace.selectors
            self._kept[name] = (
                self._trace.selectors[name] if in_step else self._trace.prepare_selectors[name]
            )
        kept = self._kept[name]
        return kept[loop] if kept.dim() == 4 else kept


def uneven(pattern: Tensor, selector: Bool[Tensor, "batch query key"]) -> float:
    """Largest difference of attention from an even one over what is selected."""
    chosen = selector.to(pattern)
    count = chosen.sum(-1, keepdim=True)
    difference = (pattern - chosen / count.clamp(min=1)).abs() * (count > 0)
    return float(difference.max())
