"""Has layers of a section write features."""

from __future__ import annotations

from loopinterp.errors import InputError
from loopinterp.rasp.compiler.lower.feature_functions import FeatureFunction
from loopinterp.rasp.compiler.lower.lowered_features import Feature, Role, Writes
from loopinterp.rasp.compiler.lower.mlp_lookups import lookup_units
from loopinterp.rasp.compiler.validate import ValidatedProgram

MAX_LAYERS = 128
"""Most layers of a section."""


class FeatureWriter:
    """The features that a section of a program writes, in the order in which they are asked for."""

    def __init__(self, source: ValidatedProgram) -> None:
        self.source = source
        self.written: list[Feature] = []

    def write(self, feature: Feature, writes: Writes) -> Feature:
        """Have the first MLP that can write a feature, unless that takes too many layers."""
        if writes.layer >= MAX_LAYERS:
            raise InputError(
                f"{feature.name} of program {self.source.program.name}",
                expected=f"what at most {MAX_LAYERS} layers can compute, one after the other",
                given="an expression that takes more",
                fix="Keep intermediate values in variables, and let loops do what repeats.",
            )
        feature.layer, feature.writes = writes.layer, writes
        self.written.append(feature)
        return feature

    def store(
        self,
        function: FeatureFunction,
        name: str,
        *,
        role: Role = "scratch",
        values: tuple[int, ...] = (),
    ) -> Feature:
        """A feature that holds a function; its values are those of the function by default.

        Raises:
            InputError: one MLP would need too many units to look the function up.
        """
        taken = values or function.values
        writes = lookup_units(function, taken)
        if writes is None:
            sizes = " and ".join(f"{len(f.values)} values" for f in function.features)
            raise InputError(
                f"{name} of program {self.source.program.name}",
                expected="an operation that one layer can look up",
                given=f"a function of {sizes}",
                fix="Compile for a smaller max_length, or write it in smaller steps.",
            )
        return self.write(Feature(name, taken, role), writes)
