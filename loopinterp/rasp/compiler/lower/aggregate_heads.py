"""Stage 3, lower (heads): aggregates and widths as what a head carries, and how it is read.

A head looks at all keys that its selection selects, alike. What it writes is therefore the mean
of the keys' one-hot values: the share of each value among them. That is read as

* the value, where all selected keys have the same one;
* the truncated mean, by thresholds on the mean of the shares;
* the largest (smallest), by which shares of large (small) values are not 0;
* the width, by how many positions have a share.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from loopinterp.rasp.compiler.lower.attention_relation import AttentionRelation, causal_codes
from loopinterp.rasp.compiler.lower.feature_functions import (
    FeatureFunction,
    constant,
    fuse,
    of_feature,
)
from loopinterp.rasp.compiler.lower.lowered_features import (
    RAW,
    WITNESS,
    Codes,
    Feature,
    LoweredHead,
    Read,
    Writes,
    at_least,
    one_if_all,
    read_any,
)
from loopinterp.rasp.compiler.lower.mlp_lookups import advance, has_few_rules, thresholds
from loopinterp.rasp.node import code

if TYPE_CHECKING:
    from loopinterp.rasp.compiler.lower.feature_writer import FeatureWriter
    from loopinterp.rasp.expr import Aggregate, Select, SelWidth


class AggregateHeads:
    """The heads of a section; what they need is added to what its writer writes."""

    def __init__(self, writer: FeatureWriter, indices: Feature) -> None:
        self._writer, self._indices = writer, indices
        self._heads: dict[tuple[Select, int], LoweredHead] = {}
        self._carried: dict[tuple[LoweredHead, Feature, bytes, int], Feature] = {}
        self._found: dict[Select, FeatureFunction] = {}

    def aggregate(
        self, node: Aggregate, relation: AttentionRelation, value: FeatureFunction
    ) -> FeatureFunction:
        """An aggregate as a function of features: the default where no key is found."""
        found, here = self._found_of(relation), value
        if value.features:
            shares = self._shares(relation, value)
            one_value = relation.one_value(value)
            here = of_feature(shares if one_value else self._reduced(node, shares))
        return self._where(found, here, node.default)

    def width(self, node: SelWidth, relation: AttentionRelation) -> FeatureFunction:
        """How many keys are selected, as a function of features."""
        positions = of_feature(self._indices)
        shares = self._shares(relation, positions)
        length = len(self._indices.values)
        name, widths = code(node, short=True), tuple(range(length + 1))
        units = tuple(
            at_least((read_any(shares, one),), 0.5 / length, 1 / length, ((0, 1.0),))
            for one in np.eye(length, dtype=bool)
        )
        number = self._writer.write(
            Feature(f"{name}, as a number", widths, one_direction=True),
            Writes("count", (shares,), units),
        )
        levels = [(k + 0.5, 1.0) for k in range(length)]
        cut = thresholds((Read(number, np.ones(1)),), levels, widths, widths)
        count = self._writer.write(Feature(name, widths), Writes("count", (number,), *cut))
        return self._where(self._found_of(relation), of_feature(count), 0)

    def _where(
        self, found: FeatureFunction, here: FeatureFunction, default: int
    ) -> FeatureFunction:
        """The value where a key is found, else the default."""

        def choose(found: FeatureFunction) -> FeatureFunction | None:
            return fuse(lambda x: np.where(x[0] != 0, x[1], default), [found, here])

        chosen = choose(found)
        if not has_few_rules(chosen):
            chosen = choose(of_feature(self._writer.store(found, "a key is found")))
        assert chosen is not None  # of two features
        return chosen

    def _shares(self, relation: AttentionRelation, value: FeatureFunction) -> Feature:
        """What a head writes of a function of one feature: the share of each of its values."""
        feature = value.features[0]
        layer = max(relation.layer, feature.for_attention)
        values = value.values
        codes = Codes(feature, (value.table[:, None] == np.array(values)).astype(float))
        name = f"shares of {feature.name} by {relation.name}"
        return self._carry(relation, layer, codes, Feature(name, values, order=RAW))

    def _carry(
        self, relation: AttentionRelation, layer: int, codes: Codes, feature: Feature
    ) -> Feature:
        head = self._head(relation, layer)
        assert codes.feature is not None
        key = (head, codes.feature, codes.matrix.tobytes(), feature.order)
        if key not in self._carried:
            feature.layer, feature.head = layer, head
            head.carried[feature] = codes
            self._carried[key] = feature
            self._writer.written.append(feature)
        return self._carried[key]

    def _head(self, relation: AttentionRelation, layer: int) -> LoweredHead:
        key = (relation.select, layer)
        if key not in self._heads:
            pairs = [relation.codes()]
            if relation.select.causal and not self._writer.source.causal:
                pairs.append(causal_codes(self._indices))
            self._heads[key] = LoweredHead(relation.select, tuple(pairs))
        return self._heads[key]

    def _reduced(self, node: Aggregate, shares: Feature) -> Feature:
        """Mean, largest or smallest of the selected values, from their shares."""
        length = len(self._indices.values)
        values = np.array(shares.values)
        if node.mode == "mean":
            low = shares.values[0]
            taken = tuple(range(low, shares.values[-1] + 1))
            # A mean that is not an integer is at least 1 / length away from one. Truncation is
            # towards 0: up to 0, a level is reached as soon as the one below it is left.
            away = 0.5 / length
            levels = [((v - low) - away if v > 0 else (v - low) - 1 + away) for v in taken[1:]]
            # Counted from the least value, which keeps numbers small: the shares add up to 1.
            number = Read(shares, (values - low).astype(float))
            cut = thresholds((number,), [(level, 2 * away) for level in levels], taken, taken)
        else:
            taken = shares.values if node.mode == "max" else shares.values[::-1]
            further = np.greater_equal if node.mode == "max" else np.less_equal
            units = []
            for before, after in pairwise(taken):
                read = read_any(shares, further(values, after))
                onward = advance(shares.values, before, after)
                units.append(at_least((read,), 0.5 / length, 1 / length, onward))
            cut = tuple(units), ((shares.values.index(taken[0]), 1.0),)
            taken = shares.values
        name = f"{node.mode} of {shares.name}"
        return self._writer.write(Feature(name, taken), Writes(node.mode, (shares,), *cut))

    def _found_of(self, relation: AttentionRelation) -> FeatureFunction:
        """1 where a query selects something."""
        if relation.select not in self._found:
            self._found[relation.select] = self._find(relation)
        return self._found[relation.select]

    def _find(self, relation: AttentionRelation) -> FeatureFunction:
        if relation.sees_itself:
            return constant(1)
        if not relation.holds.any():
            return constant(0)
        query = relation.query
        if relation.by_position and relation.select.causal:
            # Of a query that is a position, or always the same, one of the two axes goes.
            table, number = relation.within_reach.astype(int), np.arange(query.table.size)
            asked = FeatureFunction(query.features, number.reshape(query.table.shape))
            found = fuse(lambda x: table[x[0], x[1]], [asked, of_feature(self._indices)])
            assert found is not None  # of at most two features
            return found
        if not relation.key.features:
            # All keys or none, by the query alone.
            holds = relation.holds[0].astype(int)
            return FeatureFunction(query.features, holds.reshape(query.table.shape))
        return self._witnessed(relation)

    def _witnessed(self, relation: AttentionRelation) -> FeatureFunction:
        """1 where the keys that the head looks at are selected: where there are such keys."""
        classes, kind = relation.classes()
        key, query = relation.key.features[0], relation.query.features
        name, flags = f"found by {relation.name}", []
        for k, column in enumerate(classes.T):
            case = f", case {k}" if classes.shape[1] > 1 else ""
            flag = Feature(f"{name}{case}", (0, 1), order=WITNESS, one_direction=True)
            codes = Codes(key, column[:, None].astype(float))
            flags.append(self._carry(relation, relation.layer, codes, flag))
        if len(flags) == 1:
            asked = (kind == 0).astype(int).reshape(relation.query.table.shape)
            asks = FeatureFunction(query, asked)
            found = fuse(lambda x: x[0] * x[1], [asks, of_feature(flags[0])])
            assert found is not None
            return found
        yes = np.array([False, True])
        units = tuple(
            one_if_all((read_any(query[0], kind == k), read_any(flag, yes)), ((0, -1.0), (1, 1.0)))
            for k, flag in enumerate(flags)
        )
        writes = Writes("found", (*query, *flags), units, ((0, 1.0),))
        return of_feature(self._writer.write(Feature(name, (0, 1)), writes))
