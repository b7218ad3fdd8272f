"""Lenses: what a looped model attends to and reads out, loop by loop."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
