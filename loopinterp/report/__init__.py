"""Saved results, of a run or alone, as one HTML file that works offline.

The report knows saved results only: no model is loaded to write it.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
