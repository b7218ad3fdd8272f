"""Disguises: the same behaviour, or nearly, with the circuit hidden: honest tests for tools.

Each takes a compiled model and returns another, whose circuit says where everything is now and
what was done. They can be put on in any order, one over the other; ``add_noise`` comes last.
"""

from typing import TYPE_CHECKING

from loopinterp._lazy import lazy_exports

if TYPE_CHECKING:
    from loopinterp.rasp.disguises.disguise_check import DisguiseCheck as DisguiseCheck
    from loopinterp.rasp.disguises.disguise_check import check_disguise as check_disguise
    from loopinterp.rasp.disguises.distractors import distract as distract
    from loopinterp.rasp.disguises.noise import add_noise as add_noise
    from loopinterp.rasp.disguises.permutation import permute as permute
    from loopinterp.rasp.disguises.rotation import rotate as rotate
    from loopinterp.rasp.disguises.superposition import (
        narrowest_superposition as narrowest_superposition,
    )
    from loopinterp.rasp.disguises.superposition import superpose as superpose

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "DisguiseCheck": ".disguise_check",
        "add_noise": ".noise",
        "check_disguise": ".disguise_check",
        "distract": ".distractors",
        "narrowest_superposition": ".superposition",
        "permute": ".permutation",
        "rotate": ".rotation",
        "superpose": ".superposition",
    },
)
