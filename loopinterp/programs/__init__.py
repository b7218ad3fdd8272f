"""RASP-L as an embedded language: expressions, an interpreter, loop programs, equivalence.

Source: RASP-L, arXiv 2310.16028.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
