"""Stage 3, lower: an expression graph as features, each written by one layer.

A section is a stack of layers that is run as one: the prelude, the block, or the coda. Going
through the graph from the leaves, every expression becomes a function of features that the stream
holds already; it gets a feature of its own only where one is needed: where a head must read it,
where it is a variable, or where the table would be too large otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping

from loopinterp.errors import InputError
from loopinterp.rasp.compiler.lower.aggregate_heads import AggregateHeads
from loopinterp.rasp.compiler.lower.attention_relation import AttentionRelation
from loopinterp.rasp.compiler.lower.feature_functions import (
    FeatureFunction,
    constant,
    fuse,
    of_feature,
)
from loopinterp.rasp.compiler.lower.feature_writer import FeatureWriter
from loopinterp.rasp.compiler.lower.lowered_features import Feature
from loopinterp.rasp.compiler.lower.mlp_lookups import MOST_FUSED_RULES, cost
from loopinterp.rasp.compiler.validate import ValidatedProgram
from loopinterp.rasp.compiler.value_domains import Values, applied, mapped
from loopinterp.rasp.expr import Aggregate, Elementwise, Full, Select, SelWidth, Seq, TokMap
from loopinterp.rasp.expression_code import code
from loopinterp.rasp.graph import postorder
from loopinterp.rasp.node import Expr


class SectionLowering:
    """The layers of one section, as they are planned.

    Args:
        name: ``prelude``, ``block`` or ``coda``.
        source: The program.
        domains: The values of every expression.
        known: Expressions that the stream holds at the start, as functions of their features.
        indices: The feature of the positions.
    """

    def __init__(
        self,
        name: str,
        source: ValidatedProgram,
        domains: Mapping[Expr, Values],
        known: dict[Expr, FeatureFunction],
        indices: Feature,
    ) -> None:
        self.name, self.source, self.domains = name, source, domains
        self.functions: dict[Expr, FeatureFunction] = dict(known)
        self.writer = FeatureWriter(source)
        self._heads = AggregateHeads(self.writer, indices)

    def function(self, expr: Seq) -> FeatureFunction:
        """An expression as a function of features, with whatever that needs."""
        for node in postorder([expr], self.functions):
            if isinstance(node, Seq):
                self.functions[node] = self._function(node).within(self.domains[node])
        return self.functions[expr]

    def readable(self, node: Seq) -> FeatureFunction:
        """An expression as a function that a head can read; stored first, if need be."""
        if not self.functions[node].for_attention:
            self._store(node)
        return self.functions[node]

    def _function(self, node: Seq) -> FeatureFunction:
        if isinstance(node, Full):
            return constant(node.value)
        if isinstance(node, TokMap):
            return self._operation(node, (node.x,))
        if isinstance(node, Elementwise):
            return self._operation(node, node.args)
        if isinstance(node, (Aggregate, SelWidth)):
            select = node.selector
            assert isinstance(select, Select)
            relation = AttentionRelation.of(
                select, self.readable(select.k), self.readable(select.q)
            )
            if isinstance(node, SelWidth):
                return self._heads.width(node, relation)
            return self._heads.aggregate(node, relation, self.readable(node.value))
        raise AssertionError(f"{node!r} is not known in the {self.name}")

    def _operation(self, node: TokMap | Elementwise, args: tuple[Seq, ...]) -> FeatureFunction:
        """An operation on functions; their features are shared, or they are stored first."""
        fused = self._fused(node, args)
        several = [arg for arg in dict.fromkeys(args) if len(self.functions[arg].features) > 1]
        if several and (fused is None or cost(fused, MOST_FUSED_RULES) > MOST_FUSED_RULES):
            for arg in several:
                self._store(arg)
            fused = self._fused(node, args)
        if fused is None:
            # Flags of large features are small features.
            for arg in dict.fromkeys(args):
                function = self.functions[arg]
                if function.features and len(function.values) < function.table.size:
                    self._store(arg)
            fused = self._fused(node, args)
        if fused is None:
            raise InputError(
                self.source.where(node),
                expected="arguments with few enough values to be tabled together",
                given=" and ".join(f"{len(self.functions[x].values)} values" for x in args),
                fix="Compile for a smaller max_length, or write it in smaller steps.",
            )
        return fused

    def _fused(self, node: TokMap | Elementwise, args: tuple[Seq, ...]) -> FeatureFunction | None:
        functions = [self.functions[arg] for arg in args]
        if isinstance(node, TokMap):
            return fuse(lambda x: mapped(self.source, node, x[0]), functions)
        return fuse(lambda x: applied(self.source, node, x), functions, node.op)

    def _store(self, node: Seq) -> None:
        function = self.functions[node]
        self.functions[node] = of_feature(self.writer.store(function, code(node, short=True)))
