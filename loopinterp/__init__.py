"""Mechanistic interpretability of looped transformers, with every loop's activations open."""

import lazy_loader

__version__ = "0.5.0"

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
