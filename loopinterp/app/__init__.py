"""What the commands do, as functions: runs, results and reports.

>>> from loopinterp.app import STUDIES
>>> [study.name for study in STUDIES][:3]
['explorer', 'convergence', 'extrapolation']
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
