"""Models whose program is known, and additions to try them on."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from loopinterp.comparison.program_runs import ProgramModel
from loopinterp.models import LoopedTransformer, LoopedTransformerConfig
from loopinterp.programs import LoopProgram, get_program
from loopinterp.tasks import Addition
from loopinterp.tasks.task import Batch

N_BITS = 16


@pytest.fixture(scope="session")
def additions() -> Batch:
    generator = torch.Generator().manual_seed(0)
    return Addition().sample(N_BITS, batch_size=64, generator=generator)


@pytest.fixture(scope="session")
def program_model(additions: Batch) -> Callable[[str | LoopProgram], ProgramModel]:
    def build(program: str | LoopProgram) -> ProgramModel:
        chosen = get_program(program) if isinstance(program, str) else program
        return ProgramModel(chosen, max_length=N_BITS + 1)

    return build


@pytest.fixture(scope="session")
def untrained() -> LoopedTransformer:
    config = LoopedTransformerConfig(
        d_model=16,
        n_heads=2,
        d_vocab=6,
        d_vocab_out=2,
        positions="relative",
        relative_window=1,
        attention_window=1,
        norm="pre",
        loop_norm=True,
        injection="input",
        initial_state="zeros",
        final_norm=True,
    )
    return LoopedTransformer(config, seed=0)
