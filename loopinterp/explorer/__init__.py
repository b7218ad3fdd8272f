"""The explorer: chosen examples, loop by loop and position by position, to be stepped through."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
