"""Lazy re-exports: ``import loopinterp`` must cost no more than ``import torch``."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any


def lazy_exports(
    package: str, exports: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return ``__getattr__``, ``__dir__`` and ``__all__`` for a package.

    Args:
        package: The package's ``__name__``.
        exports: Public name -> module it lives in, relative to the package (``".config"``).
            A name whose module ends in the name itself (``"dynamics": ".dynamics"``) is a
            subpackage.

    Example:
        >>> getter, lister, public = lazy_exports("json", {"JSONDecoder": ".decoder"})
        >>> getter("JSONDecoder").__name__, public
        ('JSONDecoder', ['JSONDecoder'])
    """

    def __getattr__(name: str) -> Any:
        if name not in exports:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = importlib.import_module(exports[name], package)
        return module if exports[name] == f".{name}" else getattr(module, name)

    def __dir__() -> list[str]:
        return sorted(exports)

    return __getattr__, __dir__, sorted(exports)
