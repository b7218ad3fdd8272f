"""The compiler: from a loop program to a looped transformer whose circuit is known.

Its stages are files: ``validate``, ``domains`` (infer domains), ``planning`` with ``schedule``,
``aggregates``, ``attention``, ``lookups`` and ``covers`` (lower), ``layout`` (lay out), and
``assemble`` with ``describe`` (weights and circuit).
"""

from typing import TYPE_CHECKING

from loopinterp._lazy import lazy_exports

if TYPE_CHECKING:
    from loopinterp.rasp.compiler.circuit import Circuit as Circuit
    from loopinterp.rasp.compiler.circuit import Directions as Directions
    from loopinterp.rasp.compiler.circuit import HeadNode as HeadNode
    from loopinterp.rasp.compiler.circuit import HeldFeature as HeldFeature
    from loopinterp.rasp.compiler.circuit import NeuronGroup as NeuronGroup
    from loopinterp.rasp.compiler.compiled import Compiled as Compiled
    from loopinterp.rasp.compiler.compiled import compile_program as compile_program

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "Circuit": ".circuit",
        "Compiled": ".compiled",
        "Directions": ".circuit",
        "HeadNode": ".circuit",
        "HeldFeature": ".circuit",
        "NeuronGroup": ".circuit",
        "compile_program": ".compiled",
    },
)
