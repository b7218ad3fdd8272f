"""Programs that are nearly another one, and whether they are another one at all.

``near_misses`` mutates a loop program: ``of_a_variable``, ``of_storage`` and ``of_schedule`` hold
the mutations, ``conditions`` when they act. ``equivalence`` looks for an interchange intervention
that tells two programs apart.
"""

from typing import TYPE_CHECKING

from loopinterp._lazy import lazy_exports

if TYPE_CHECKING:
    from loopinterp.rasp.mutations.near_miss_generator import near_misses as near_misses
    from loopinterp.rasp.mutations.near_miss_generator import (
        near_misses_by_kind as near_misses_by_kind,
    )
    from loopinterp.rasp.mutations.program_equivalence import Equivalence as Equivalence
    from loopinterp.rasp.mutations.program_equivalence import equivalence as equivalence

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "Equivalence": ".program_equivalence",
        "equivalence": ".program_equivalence",
        "near_misses": ".near_miss_generator",
        "near_misses_by_kind": ".near_miss_generator",
    },
)
