"""RASP-L (arXiv 2310.16028): expressions, an interpreter, loop programs, equivalence."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
