"""From a looped model to its program: values, a table of steps, an automaton, RASP-L."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
