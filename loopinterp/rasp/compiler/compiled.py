"""A compiled model with its circuit: made, checked, saved, and read back."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from loopinterp.errors import InputError
from loopinterp.models.looped_transformer import LoopedTransformer
from loopinterp.rasp.compiler.assemble import assemble
from loopinterp.rasp.compiler.circuit import Circuit
from loopinterp.rasp.compiler.describe import describe
from loopinterp.rasp.compiler.domains import infer_domains
from loopinterp.rasp.compiler.layout import lay_out
from loopinterp.rasp.compiler.lower.plan import plan
from loopinterp.rasp.compiler.validate import validate
from loopinterp.rasp.program import LoopProgram
from loopinterp.rasp.registry import get_program

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, eq=False)
class Compiled:
    """A looped transformer that runs a program, with its circuit.

    Attributes:
        model: The model.
        circuit: What stands where in it.
        program: The program.
    """

    model: LoopedTransformer
    circuit: Circuit
    program: LoopProgram

    def save(self, folder: str | Path) -> None:
        """Write model and circuit to a folder.

        Raises:
            InputError: the folder cannot be written.
        """
        self.model.save_pretrained(folder)
        self.circuit.save(folder)

    @classmethod
    def load(
        cls,
        folder: str | Path,
        *,
        program: LoopProgram | None = None,
        device: torch.device | str = "cpu",
    ) -> Compiled:
        """Read what :meth:`save` wrote.

        Args:
            folder: The folder.
            program: The program, if it is not a registered one.
            device: Where to put the model.

        Raises:
            CheckpointError: a file is missing or damaged.
            InputError: the program is not registered and not given, or another one.
        """
        circuit = Circuit.load(folder)
        program = get_program(circuit.program) if program is None else program
        if program.name != circuit.program:
            raise InputError(
                "program",
                expected=f"{circuit.program!r}, which the model in {folder} runs",
                given=repr(program.name),
                fix="Pass the program that was compiled.",
            )
        model = LoopedTransformer.from_pretrained(folder, device=device)
        return cls(model, circuit, program)


def compile_program(
    program: LoopProgram | str, *, max_length: int, n_outputs: int | None = None
) -> Compiled:
    """Compile a loop program into the weights of a looped transformer.

    The model runs the program loop for loop: its state after t loops holds every variable of the
    program after t loops, one direction for each value, and nothing else but the injected input.
    Each selection is a head whose attention is spread evenly over the selected keys; maps are
    MLPs. Values are restored to 0 and 1 by every MLP, so that errors do not grow with the loops.

    Args:
        program: The program, or the name of a registered one.
        max_length: Positions of the longest sequence, BOS and padding included.
        n_outputs: Classes of the output; by default as many as the answer has.

    Returns:
        The model (no norms, ReLU, learned positions, external recall) and its circuit.

    Raises:
        InputError: the program cannot be compiled; the message names the expression and why.

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
    domains = infer_domains(source)
    layout = lay_out(plan(source, domains))
    classes = max(1 + int(domains[source.finish].max()), 1)
    model = assemble(layout, _outputs(n_outputs, classes))
    return Compiled(model, describe(layout), source.program)


def _outputs(wanted: int | None, needed: int) -> int:
    if wanted is None:
        return needed
    if isinstance(wanted, bool) or not isinstance(wanted, int) or wanted < needed:
        raise InputError(
            "n_outputs",
            expected=f"an integer >= {needed}, as the answer is up to {needed - 1}",
            given=repr(wanted),
            fix="Leave it out, or pass the classes of the task.",
        )
    return wanted
