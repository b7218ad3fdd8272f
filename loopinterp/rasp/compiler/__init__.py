"""The compiler: from a loop program to a looped transformer whose circuit is known.

Its stages are files and a folder: ``validate``, ``value_domains``, ``lower`` (expressions as
features, heads and MLPs), ``stream_layout``, and ``assemble`` with ``circuit_description`` (weights
and circuit). ``compiled`` runs them.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
