"""Decompiling: the transition table and the program of a looped model, by interchanges."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
