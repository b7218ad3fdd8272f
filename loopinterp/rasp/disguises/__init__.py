"""Disguises: the same behaviour, or nearly, with the circuit hidden: honest tests for tools.

Each takes a compiled model and returns another, whose circuit says where everything is now and
what was done. They can be put on in any order, one over the other; ``add_noise`` comes last.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
