from __future__ import annotations

import pytest

from loopinterp.training import TrainingConfig
from tests.training.tiny_run import TINY


@pytest.fixture
def tiny() -> TrainingConfig:
    return TINY
