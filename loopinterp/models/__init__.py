"""Looped transformers: configuration, protocol, hooked model, cache, stopping rules."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
