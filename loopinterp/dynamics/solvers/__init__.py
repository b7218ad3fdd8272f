"""Fixed-point solvers, one per file, behind one protocol: ``init`` and ``step``.

Which one? :class:`Picard` is the loop itself: it ends where the model ends, and fails where the
model does not settle. :class:`Anderson` needs far fewer steps on slow contractions and also finds
fixed points that the loop never reaches; a limit found by it alone says that a fixed point exists,
not that the model goes there.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
