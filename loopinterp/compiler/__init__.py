"""The compiler: from a loop program to a looped transformer with a known circuit.

Its stages: ``validation``, ``lowering`` (to ``features``, by ``heads`` and ``lookups``),
``assembly``.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
