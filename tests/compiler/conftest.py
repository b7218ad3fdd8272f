"""Shared by the tests of the compiler."""

from tests.programs.conftest import quick as quick
