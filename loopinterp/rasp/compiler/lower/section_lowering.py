"""Stage 3, lower: an expression graph as features, each written by one layer.

A section is a stack of layers that is run as one: the prelude, the block, or the coda. Going
through the graph from the leaves, every expression becomes a function of features that the stream
holds already; it gets a feature of its own only where one is needed: where a head must read it,
where it is a variable, or where the table would be too large otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from loopinterp.errors import InputError
from loopinterp.rasp import expr as nodes
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
from loopinterp.rasp.compiler.lower.mlp_lookups import has_few_rules
from loopinterp.rasp.compiler.validate import ValidatedProgram
from loopinterp.rasp.compiler.value_domains import Values, applied
from loopinterp.rasp.node import Expr, code, postorder


class SectionLowering:
    """The layers of one section, as they are planned.

    ``known`` are the expressions that the stream holds at the start, as functions of features.
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

    def function(self, expr: nodes.Seq) -> FeatureFunction:
        """An expression as a function of features, with whatever that needs."""
        for node in postorder([expr], self.functions):
            if isinstance(node, nodes.Seq):
                self.functions[node] = self._function(node).within(self.domains[node])
        return self.functions[expr]

    def readable(self, node: nodes.Seq) -> FeatureFunction:
        """An expression as a function that a head can read; stored first, if need be."""
        if not self.functions[node].for_attention:
            self._store(node)
        return self.functions[node]

    def _function(self, node: nodes.Seq) -> FeatureFunction:
        match node:
            case nodes.Full():
                return constant(node.value)
            case nodes.TokMap() | nodes.Elementwise():
                return self._operation(node)
            case nodes.SelWidth():
                return self._heads.width(node, self._relation(node.selector))
            case nodes.Aggregate():
                relation = self._relation(node.selector)
                return self._heads.aggregate(node, relation, self.readable(node.value))
        raise AssertionError(f"{node!r} is not known in the {self.name}")

    def _relation(self, select: nodes.Selector) -> AttentionRelation:
        assert isinstance(select, nodes.Select)  # there is no other selector
        return AttentionRelation.of(select, self.readable(select.k), self.readable(select.q))

    def _operation(self, node: nodes.TokMap | nodes.Elementwise) -> FeatureFunction:
        """An operation on functions; their features are shared, or they are stored first."""
        op = node.op if isinstance(node, nodes.Elementwise) else None

        def fused() -> FeatureFunction | None:
            functions = [self.functions[arg] for arg in node.children]
            return fuse(partial(applied, self.source, node), functions, op)

        function = fused()
        args = dict.fromkeys(node.children)
        several = [arg for arg in args if len(self.functions[arg].features) > 1]
        if several and not has_few_rules(function):
            for arg in several:
                self._store(arg)
            function = fused()
        if function is None:
            # Flags of large features are small features.
            for arg in args:
                large = self.functions[arg]
                if large.features and len(large.values) < large.table.size:
                    self._store(arg)
            function = fused()
        if function is None:
            raise InputError(
                self.source.where(node),
                expected="arguments with few enough values to be tabled together",
                given=" and ".join(
                    f"{len(self.functions[x].values)} values" for x in node.children
                ),
                fix="Compile for a smaller max_length, or write it in smaller steps.",
            )
        return function

    def _store(self, node: Expr) -> None:
        function = self.functions[node]
        self.functions[node] = of_feature(self.writer.store(function, code(node, short=True)))
