"""Tasks: token formats, seeded samplers, exact oracles, and T(n)."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
