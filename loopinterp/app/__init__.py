"""From a run to its results and its report: what the commands do, as functions.

>>> from loopinterp.app import STUDIES
>>> [study.name for study in STUDIES][:3]
['explorer', 'convergence', 'extrapolation']
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
