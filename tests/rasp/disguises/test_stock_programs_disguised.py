"""What every exact disguise must hold, on the model of every program."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from loopinterp.rasp import (
    Compiled,
    compare_with_program,
    distract,
    list_programs,
    permute,
    rotate,
    superpose,
)
from tests.rasp.disguises.small_models import logits_of, small_model


def everything(compiled: Compiled) -> Compiled:
    return permute(rotate(distract(superpose(compiled, seed=1), seed=2), seed=3), seed=4)


DISGUISES: dict[str, Callable[[Compiled], Compiled]] = {
    "rotated": partial(rotate, seed=0),
    "permuted": partial(permute, seed=0),
    "distracted": partial(distract, seed=0),
    "superposed": partial(superpose, seed=0),
    "everything": everything,
}


@pytest.mark.parametrize("disguise", DISGUISES)
@pytest.mark.parametrize("program", list_programs())
def test_a_disguised_model_does_the_same_and_its_circuit_says_where(program, disguise):
    plain = small_model(program)
    hidden = DISGUISES[disguise](plain.compiled)
    logits = logits_of(hidden, plain.inputs, plain.n_loops)
    assert (logits - plain.logits).abs().max() < 1e-4
    agreement = compare_with_program(hidden, plain.inputs, n_loops=plain.n_loops)
    assert agreement.exact
    assert agreement.state_error < 1e-3
    assert max(agreement.attention_error.values()) < 1e-3
    assert set(agreement.attention_error) == {node.selector for node in hidden.circuit.heads}
