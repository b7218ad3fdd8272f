"""The compiler: from a loop program to a looped transformer whose circuit is known.

Its stages are files and a folder: ``validate``, ``domains`` (infer domains), ``lower`` (expressions
as features, heads and MLPs), ``layout`` (lay out), and ``assemble`` with ``describe`` (weights and
circuit). ``compiled`` runs them.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
