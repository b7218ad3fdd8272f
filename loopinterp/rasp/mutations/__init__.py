"""Programs that are nearly another one, and whether they are another one at all.

``near_misses`` mutates a loop program: ``of_a_variable``, ``of_storage``, ``of_schedule`` and
``of_history`` hold the mutations, ``conditions`` when they act. ``equivalence`` looks for an
interchange intervention that tells two programs apart: ``paired_runs`` makes those of one state,
``repeated_states`` follows every two of them.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
