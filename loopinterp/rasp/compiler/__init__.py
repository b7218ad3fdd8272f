"""The compiler: from a loop program to a looped transformer whose circuit is known.

Its stages are files and a folder: ``validate``, ``value_domains``, ``lower`` (expressions as
features, heads and MLPs), ``stream_layout``, and ``assemble`` with ``circuit_description`` (weights
and circuit). ``compiled`` runs them.
"""

from typing import TYPE_CHECKING

from loopinterp._lazy import lazy_exports

if TYPE_CHECKING:
    from loopinterp.rasp.compiler.agreement import Agreement as Agreement
    from loopinterp.rasp.compiler.agreement import compare_with_program as compare_with_program
    from loopinterp.rasp.compiler.circuit import Circuit as Circuit
    from loopinterp.rasp.compiler.circuit import Directions as Directions
    from loopinterp.rasp.compiler.circuit import FeatureNode as FeatureNode
    from loopinterp.rasp.compiler.circuit import HeadNode as HeadNode
    from loopinterp.rasp.compiler.circuit import NeuronGroup as NeuronGroup
    from loopinterp.rasp.compiler.circuit import Superposition as Superposition
    from loopinterp.rasp.compiler.compiled import Compiled as Compiled
    from loopinterp.rasp.compiler.compiled import compile_program as compile_program

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "Agreement": ".agreement",
        "Circuit": ".circuit",
        "Compiled": ".compiled",
        "Directions": ".circuit",
        "HeadNode": ".circuit",
        "FeatureNode": ".circuit",
        "NeuronGroup": ".circuit",
        "Superposition": ".circuit",
        "compare_with_program": ".agreement",
        "compile_program": ".compiled",
    },
)
