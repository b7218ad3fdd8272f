"""Interventions on a looped model: interchanges, patching, ablation, subspaces of the state."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
