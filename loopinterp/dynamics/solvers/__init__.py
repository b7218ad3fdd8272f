"""Fixed-point solvers, one per file, behind one protocol: ``init`` and ``step``.

Which one to take is the subject of a page of the guide, "Finding fixed points".
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
