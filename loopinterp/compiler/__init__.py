"""The compiler: from a loop program to a looped transformer with a known circuit.

Its stages are files: ``validation`` (with the values of every expression), ``lowering`` (to
``features``, by ``heads`` and ``lookups``), ``stream_layout`` and ``assembly``. ``compiled`` runs
them; ``agreement`` checks the result. ``disguises`` and ``superposition`` hide the circuit; they
combine in any order, ``add_noise`` last.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
