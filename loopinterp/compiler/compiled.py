"""Compiled models: a model with its program and circuit, and how far it agrees with the program."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from loopinterp.compiler.assembly import assemble, describe, lay_out
from loopinterp.compiler.circuit import Circuit, HeadNode
from loopinterp.compiler.lowering import lower_program
from loopinterp.compiler.validation import validate
from loopinterp.core.boundary import Loops, checked
from loopinterp.core.errors import CheckpointError, InputError, check_integer, need
from loopinterp.core.text import ShortRepr
from loopinterp.models.transformer import LoopedTransformer
from loopinterp.programs.expressions import MAX_TABLE, selectors
from loopinterp.programs.interpreter import evaluate
from loopinterp.programs.language import UNKNOWN
from loopinterp.programs.program import LoopProgram
from loopinterp.programs.stock_programs import get_program, list_programs
from loopinterp.tasks.sampling import check_tokens
from loopinterp.tasks.task_registry import get_task, list_tasks


@dataclass(frozen=True, eq=False, repr=False)
class Compiled(ShortRepr):
    """A looped transformer that runs a program, with its circuit."""

    model: LoopedTransformer
    circuit: Circuit
    program: LoopProgram

    def __post_init__(self) -> None:
        if self.model.task is None and self.program.task in list_tasks():
            self.model.task = get_task(self.program.task, **self.program.task_settings)

    def __repr__(self) -> str:
        config = self.model.config
        layers = f"{config.n_prelude} + {config.n_layers} + {config.n_coda}"
        return f"<Compiled {self.program.name}: d_model {config.d_model}, layers {layers}>"

    def save(self, folder: str | Path) -> None:
        """Write model and circuit to a folder."""
        self.model.save_pretrained(folder)
        self.circuit.save(folder)

    @classmethod
    def load(
        cls,
        folder: str | Path,
        *,
        program: LoopProgram | str | None = None,
        device: torch.device | str = "cpu",
    ) -> Compiled:
        """Read what :meth:`save` wrote.

        Args:
            program: The program or its name, if it is not registered under the saved one.

        Raises:
            CheckpointError: If a file is missing or damaged, or the files do not belong together.
            InputError: If the program is missing, or another one.
        """
        circuit = Circuit.load(folder)
        if program is not None or circuit.program in list_programs():
            program = get_program(program or circuit.program)
        if (
            program is None
            or (circuit.program, circuit.inputs) != (program.name, program.inputs)
            or set(circuit.variables) != set(program.variables)
        ):
            variables, n_inputs = ", ".join(circuit.variables), len(circuit.inputs)
            expected = f"{circuit.program!r} with variables {variables} and {n_inputs} input tokens"
            other = program and f"{program.name!r} with other inputs or variables"
            got, fix = other or "none that is registered", "Pass program=, the compiled one."
            raise InputError("program", expected=expected, given=got, fix=fix)
        model = LoopedTransformer.from_pretrained(folder, device=device)
        widths = {d.write.shape[-1] for d in circuit.directions.values()}
        if widths != {model.config.d_model}:
            expected = f"directions of d_model = {model.config.d_model}, as the model has"
            got, fix = f"widths {sorted(widths)}", "Save model and circuit together again."
            raise CheckpointError(f"circuit in {folder}", expected=expected, given=got, fix=fix)
        return cls(model, circuit, program)


def need_compiled(compiled: object) -> None:
    expected, got = "a Compiled: a model with its circuit", type(compiled).__name__
    fix = "Pass what compile_program gives, not its .model."
    need(isinstance(compiled, Compiled), "compiled", expected, got, fix)


@checked
def compile_program(
    program: LoopProgram | str, *, max_length: int, n_outputs: int | None = None
) -> Compiled:
    """Compile a loop program into the weights of a looped transformer.

    The state after t loops holds every variable of the program after t loops, one direction for
    each value, beside the injected input. A selection becomes a head with even attention over the
    selected keys. Maps become MLPs, which restore reads to 0 and 1, so errors do not grow with the
    loops. The model has ReLU, learned positions, external recall and no norms.

    Args:
        max_length: Positions of the longest sequence, BOS and padding included.
        n_outputs: Classes of the output; by default those of the answer, at least two.

    Raises:
        InputError: If the program cannot be compiled; the message names the expression and why.

    Example:
        >>> import torch
        >>> compiled = compile_program("ripple", max_length=6)
        >>> tokens = torch.tensor([[4, 3, 1, 2, 0]])
        >>> compiled.model(tokens, n_loops=4).argmax(-1)[0, 1:].tolist()     # 3 + 5 = 8
        [0, 0, 0, 1]
        >>> states = compiled.model(tokens, n_loops=4, return_type="states")
        >>> compiled.circuit.decode("carry", states)[:, 0].tolist()
        [[0, 0, 0, 0, 0], [0, 0, 1, 0, 0], [0, 0, 1, 1, 0], [0, 0, 1, 1, 1], [0, 0, 1, 1, 1]]
    """
    source = validate(program, max_length)
    answers = source.domains[source.finish]
    low, high = int(answers.min()), int(answers.max())
    what = f"finish of program {source.program.name}, {source.finish!r}"
    expected = f"answers that are classes from 0 to {MAX_TABLE - 1:,}, or UNKNOWN (-1)"
    got = f"{low if low < UNKNOWN else high} as a possible value"
    fix = "Map what is no answer to UNKNOWN: tok_map(x, {...}, default=UNKNOWN)."
    need(low >= UNKNOWN and high < MAX_TABLE, what, expected, got, fix)
    classes = max(1 + high, 1)
    n_outputs = max(classes, 2) if n_outputs is None else n_outputs
    check_integer("n_outputs", n_outputs, least=classes, fix="Pass the classes of the task.")
    layout = lay_out(lower_program(source))
    return Compiled(assemble(layout, n_outputs), describe(layout), source.program)


_CHUNK = 2**21  # of the states of all loops that are compared at a time


@dataclass(frozen=True, repr=False)
class Agreement(ShortRepr):
    """Differences between a compiled model and its program, over every loop of a run."""

    values: int  # compared, of all variables
    wrong_values: dict[str, int]  # of each variable: values that were decoded wrongly
    wrong_answers: int  # that differ from the program's, where that is decided
    # Largest difference of a variable's reads from 1 for its value and 0 for all others.
    state_error: float
    # Selector -> largest difference of its head's attention from an even one over the selected
    # keys, where some are selected.
    attention_error: dict[str, float]

    @property
    def exact(self) -> bool:
        """Whether every variable and answer equals the program's."""
        return not self.wrong_answers and not any(self.wrong_values.values())


@torch.no_grad()
@checked
def compare_with_program(
    compiled: Compiled, tokens: Int[Tensor, "batch pos"], *, n_loops: Loops
) -> Agreement:
    """Run a compiled model and its program on the same tokens, and count the differences.

    Example:
        >>> from loopinterp.compiler import compile_program
        >>> compiled = compile_program("parity", max_length=6)
        >>> compare_with_program(compiled, torch.tensor([[4, 1, 0, 1, 2, 3]]), n_loops=3).exact
        True
    """
    need_compiled(compiled)
    check_tokens(tokens, len(compiled.program.inputs), f"tokens of {compiled.program.name}")
    wrong = dict.fromkeys(compiled.circuit.variables, 0)
    named = selectors(compiled.program.expressions)
    attention: dict[str, float] = {}
    n_values, wrong_answers, state_error = 0, 0, 0.0
    for part in _parts(tokens, n_loops, compiled):
        trace = compiled.program.trace(part, n_loops=n_loops)
        states, logits, patterns = _run(compiled, part, n_loops)
        for name, expected in trace.variables.items():
            read = compiled.circuit.directions_of(name).read.to(states)
            reads = states @ read.mT  # [loop, batch, pos, value]
            values = torch.tensor(compiled.circuit.variables[name].values, device=states.device)
            wrong[name] += int((values[reads.argmax(-1)] != expected).sum())
            one_hot = (expected[..., None] == values).to(reads)  # as reads
            state_error = max(state_error, float((reads - one_hot).abs().max()))
            n_values += expected.numel()
        decided = trace.outputs != UNKNOWN
        wrong_answers += int(((logits.argmax(-1) != trace.outputs) & decided).sum())
        for head, pattern in patterns:  # of the first loops, which are selected as one batch
            n = len(pattern)
            state = {name: x[:n].flatten(0, 1) for name, x in trace.variables.items()}
            selector = evaluate(named[head.selector], part.repeat(n, 1), state)
            error = _unevenness(pattern.flatten(0, 1), selector)
            attention[head.selector] = max(attention.get(head.selector, 0.0), error)
    return Agreement(n_values, wrong, wrong_answers, state_error, attention)


def _unevenness(pattern: Tensor, selector: Bool[Tensor, "batch query key"]) -> float:
    """Largest deviation of attention from an even spread over the selected keys."""
    chosen = selector.to(pattern)
    count = chosen.sum(-1, keepdim=True)
    return float(((pattern - chosen / count.clamp(min=1)).abs() * (count > 0)).max())


@dataclass(frozen=True, eq=False, repr=False)
class DisguiseCheck(ShortRepr):
    """Differences between a disguised model and the original, at every loop."""

    logits: Float[Tensor, " loops"]  # largest difference of a logit
    reads: Float[Tensor, " loops"]  # of a read of a variable's value, which is 0 or 1 originally
    agreement: Agreement  # of the disguised model with its program

    @property
    def exact(self) -> bool:
        """Whether all variables and answers equal the program's."""
        return self.agreement.exact


@torch.no_grad()
def check_disguise(
    disguised: Compiled, original: Compiled, inputs: Int[Tensor, "batch pos"], *, n_loops: int
) -> DisguiseCheck:
    r"""Compare a disguised model with the original.

    .. math:: \max_{x, p} |y'_t - y_t| \quad\text{and}\quad
        \max_{x, p, v} |r'_v h'_t - r_v h_t|, \qquad t = 0 \dots T

    over inputs x, positions p and values v of all variables, with the reads r_v of each circuit.

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
    largest = []
    for part in _parts(inputs, n_loops, original):
        pairs = []
        for compiled in (disguised, original):
            model, circuit = compiled.model, compiled.circuit
            states = model(part, n_loops=n_loops, return_type="states")
            read = torch.cat([circuit.directions_of(v).read for v in circuit.variables])
            # [loop, batch, pos, class] and [loop, batch, pos, value]
            logits = torch.stack([model.readout(state) for state in states])
            pairs.append((logits, states @ read.to(states).mT))
        # [logits or reads, loop]
        difference = [(x - y).abs().flatten(1).amax(1) for x, y in zip(*pairs)]
        largest.append(torch.stack(difference))
    logits, reads = torch.stack(largest).amax(0)
    return DisguiseCheck(logits, reads, agreement)


def _parts(tokens: Tensor, n_loops: int, compiled: Compiled) -> Sequence[Tensor]:
    each = n_loops * max(tokens.shape[1], 1) * compiled.model.config.d_model
    return tokens.split(max(_CHUNK // each, 1))


def _run(
    compiled: Compiled, tokens: Tensor, n_loops: int
) -> tuple[Tensor, Tensor, list[tuple[HeadNode, Tensor]]]:
    """States, logits, and each head's attention, [loop, batch, query, key], from loop 0 on."""
    model, heads = compiled.model, compiled.circuit.heads
    hook = "attn.hook_pattern"
    sites = [(h, [f"prelude.{h.layer}.{hook}"]) for h in heads if h.section == "prelude"]
    for head in (head for head in heads if head.section == "block" and n_loops):
        layer = f"blocks.{head.layer}.{hook}"
        sites.append((head, [f"loops.{loop}.{layer}" for loop in range(n_loops)]))
    # There may be no heads, and a filter must match something.
    names = {"hook_embed", *(name for _, loops in sites for name in loops)}
    states, cache = model.run_with_cache(
        tokens, n_loops=n_loops, names_filter=names, return_type="states"
    )
    patterns = [(h, torch.stack([cache[name][:, h.head] for name in loops])) for h, loops in sites]
    in_coda = {h: f"coda.{h.layer}.{hook}" for h in heads if h.section == "coda"}
    if not in_coda:
        return states, model.readout(states), patterns
    # A run that stops before its one loop reads all states out, as one batch.
    logits, cache = model.run_with_cache(
        tokens.repeat(len(states), 1),
        n_loops=1,
        stop_at_loop=0,
        state=states.flatten(0, 1),
        names_filter=in_coda.values(),
    )
    for head, name in in_coda.items():
        patterns.append((head, cache[name][:, head.head].unflatten(0, states.shape[:2])))
    return states, logits.unflatten(0, states.shape[:2]), patterns
