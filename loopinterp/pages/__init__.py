"""Pages: saved results, of a run or several, as one HTML file that works offline.

The report knows saved results only: no model is loaded to write it. Its explorer shows chosen
examples, loop by loop and position by position.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
