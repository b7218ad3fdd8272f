"""Comparing a learned circuit with programs: decodability, heads, interchange, verdict."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
