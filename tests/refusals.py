"""The context in which something wrong is refused, by the thing that the error names."""

from __future__ import annotations

import re

import pytest

from loopinterp.core.errors import InputError


def naming(what: str, error: type[InputError] = InputError) -> pytest.RaisesExc[InputError]:
    """An error of a type whose ``what`` is some text, or matches a pattern."""
    return pytest.raises(error, check=lambda e: e.what == what or bool(re.fullmatch(what, e.what)))
