"""Trained models that come with the package: a folder each, with a card of what it can do."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
