"""Causal edges between the components of a looped model, exact and approximate."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
