"""A compiled model against its program, and a disguised model against the original."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from loopinterp.compiler.compiled import Compiled, need_compiled
from loopinterp.core.errors import check_integer
from loopinterp.core.text import ShortRepr
from loopinterp.programs.expressions import selectors
from loopinterp.programs.interpreter import evaluate
from loopinterp.programs.language import UNKNOWN
from loopinterp.tasks.sampling import check_tokens

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jaxtyping import Bool, Float, Int
    from torch import Tensor

    from loopinterp.compiler.circuit import Circuit, HeadNode

CHUNK = 2**21
"""Loops x examples x positions x d_model that are compared at a time."""


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

    Raises:
        InputError: no compiled model, tokens that are not of its program or too long, or a wrong
            number of loops.

    Example:
        >>> from loopinterp.compiler import compile_program
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
    n_values, wrong_answers, state_error = 0, 0, 0.0
    for part in _parts(tokens, n_loops, compiled):
        trace = compiled.program.trace(part, n_loops=n_loops)
        states, logits, patterns = _run(compiled, part, n_loops)
        for name, expected in trace.variables.items():
            n_wrong, error = _differences(compiled.circuit, name, states, expected)
            wrong[name] += n_wrong
            state_error = max(state_error, error)
            n_values += expected.numel()
        decided = trace.outputs != UNKNOWN
        wrong_answers += int(((logits.argmax(-1) != trace.outputs) & decided).sum())
        for head, loop, pattern in patterns:
            state = {variable: x[loop] for variable, x in trace.variables.items()}
            error = unevenness(pattern, evaluate(named[head.selector], part, state))
            attention[head.selector] = max(attention.get(head.selector, 0.0), error)
    return Agreement(n_values, wrong, wrong_answers, state_error, attention)


def unevenness(pattern: Tensor, selector: Bool[Tensor, "batch query key"]) -> float:
    """Largest difference of attention from an even one over the selected keys."""
    chosen = selector.to(pattern)
    count = chosen.sum(-1, keepdim=True)
    difference = (pattern - chosen / count.clamp(min=1)).abs() * (count > 0)
    return float(difference.max())


@dataclass(frozen=True, eq=False, repr=False)
class DisguiseCheck(ShortRepr):
    """How far a disguised model is from the original on some inputs, at every loop.

    Attributes:
        logits: Largest difference of a logit.
        reads: Largest difference of a read of a variable's value: 1 for the value that it has, 0
            for the others in the original.
        agreement: The disguised model against its program.
    """

    logits: Float[Tensor, " loops"]
    reads: Float[Tensor, " loops"]
    agreement: Agreement

    @property
    def exact(self) -> bool:
        """Whether all values and answers are the program's, at every loop."""
        return self.agreement.exact


@torch.no_grad()
def check_disguise(
    disguised: Compiled, original: Compiled, inputs: Int[Tensor, "batch pos"], *, n_loops: int
) -> DisguiseCheck:
    r"""Compare a disguised model with the original.

    .. math:: \max_{x, p} |y'_t - y_t| \quad\text{and}\quad
        \max_{x, p, v} |r'_v h'_t - r_v h_t|, \qquad t = 0 \dots T

    over inputs x, positions p and the values v of all variables, whose reads r are the circuits'.

    Raises:
        InputError: no compiled models, or inputs and loops that :func:`compare_with_program`
            refuses.

    Example:
        >>> from loopinterp.compiler import check_disguise, compile_program, superpose
        >>> plain = compile_program("ripple", max_length=6)
        >>> tokens = torch.tensor([[4, 3, 1, 2, 0]])
        >>> check = check_disguise(superpose(plain, seed=0), plain, tokens, n_loops=5)
        >>> check.exact, bool(check.logits.max() < 1e-4), len(check.logits)
        (True, True, 6)
    """
    need_compiled(original)
    agreement = compare_with_program(disguised, inputs, n_loops=n_loops)
    parts = []
    for part in _parts(inputs, n_loops, original):
        now, before = (_logits_and_reads(c, part, n_loops) for c in (disguised, original))
        # [logits or reads, loop]: the largest difference
        parts.append(torch.stack([(x - y).abs().flatten(1).amax(1) for x, y in zip(now, before)]))
    logits, reads = torch.stack(parts).amax(0)
    return DisguiseCheck(logits, reads, agreement)


def _parts(tokens: Tensor, n_loops: int, compiled: Compiled) -> Sequence[Tensor]:
    """As many examples at a time as are compared at a time."""
    each = n_loops * max(tokens.shape[1], 1) * compiled.model.config.d_model
    return tokens.split(max(CHUNK // each, 1))


def _differences(
    circuit: Circuit, name: str, states: Tensor, expected: Tensor
) -> tuple[int, float]:
    """How many values of a variable are decoded wrongly, and the largest error of its reads."""
    reads = states @ circuit.directions_of(name).read.to(states).mT  # [loop, batch, pos, value]
    values = torch.tensor(circuit.variables[name].values, device=states.device)
    wrong = int((values[reads.argmax(-1)] != expected).sum())
    return wrong, float((reads - (expected[..., None] == values).to(reads)).abs().max())


def _run(
    compiled: Compiled, tokens: Tensor, n_loops: int
) -> tuple[Tensor, Tensor, list[tuple[HeadNode, int, Tensor]]]:
    """States, their logits, and attention as (head, loop, [batch, query, key])."""
    model, heads = compiled.model, compiled.circuit.heads
    hook = "attn.hook_pattern"
    sites = [(h, 0, f"prelude.{h.layer}.{hook}") for h in heads if h.section == "prelude"]
    for head in (head for head in heads if head.section == "block"):
        layer = f"blocks.{head.layer}.{hook}"
        sites += [(head, loop, f"loops.{loop}.{layer}") for loop in range(n_loops)]
    # There may be no heads, and a filter must match something.
    names = {"hook_embed", *(name for *_, name in sites)}
    states, cache = model.run_with_cache(
        tokens, n_loops=n_loops, names_filter=names, return_type="states"
    )
    patterns = [(head, loop, cache[name][:, head.head]) for head, loop, name in sites]
    in_coda = {h: f"coda.{h.layer}.{hook}" for h in heads if h.section == "coda"}
    if not in_coda:
        return states, torch.stack([model.readout(h) for h in states]), patterns
    # A run that stops before its one loop reads all states out, as one batch.
    logits, cache = model.run_with_cache(
        tokens.repeat(len(states), 1),
        n_loops=1,
        stop_at_loop=0,
        state=states.flatten(0, 1),
        names_filter=in_coda.values(),
    )
    for head, name in in_coda.items():
        by_loop = cache[name][:, head.head].unflatten(0, states.shape[:2])
        patterns += [(head, loop, pattern) for loop, pattern in enumerate(by_loop)]
    return states, logits.unflatten(0, states.shape[:2]), patterns


def _logits_and_reads(compiled: Compiled, inputs: Tensor, n_loops: int) -> tuple[Tensor, Tensor]:
    """[loop, batch, pos, class] and [loop, batch, pos, value]."""
    model, circuit = compiled.model, compiled.circuit
    states = model(inputs, n_loops=n_loops, return_type="states")
    read = torch.cat([circuit.directions_of(name).read for name in circuit.variables]).to(states)
    return torch.stack([model.readout(state) for state in states]), states @ read.mT
