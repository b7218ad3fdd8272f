"""Compiled models: a model with its program and circuit."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from loopinterp.compiler.assembly import assemble
from loopinterp.compiler.circuit import Circuit
from loopinterp.compiler.lowering import lower_program
from loopinterp.compiler.stream_layout import describe, lay_out
from loopinterp.compiler.validation import validate
from loopinterp.core.boundary import checked
from loopinterp.core.errors import CheckpointError, InputError, check_integer, need
from loopinterp.core.text import ShortRepr
from loopinterp.models.transformer import LoopedTransformer
from loopinterp.programs.expressions import MAX_TABLE
from loopinterp.programs.language import UNKNOWN
from loopinterp.programs.program import LoopProgram
from loopinterp.programs.stock_programs import get_program, list_programs
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
