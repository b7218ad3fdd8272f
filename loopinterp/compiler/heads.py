"""Stage 3, lower (heads): selections as queries and keys, aggregates as what a head writes.

A selection is a 0/1 matrix of key values against query values. Keys with equal rows form a class:
the key writes its class, the query its relation to each class (or the reverse, if there are fewer
query classes). The score is 1 where the relation holds, else 0. Scaled up, attention is even over
the selected keys, and a head writes the share of each value among them.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

from loopinterp.compiler.features import (
    RAW,
    WITNESS,
    Codes,
    Feature,
    FeatureFunction,
    LoweredHead,
    Read,
    Writes,
    at_least,
    constant,
    fuse,
    of_feature,
    one_if_all,
    read_any,
)
from loopinterp.compiler.lookups import FeatureWriter, advance, has_few_rules, thresholds
from loopinterp.programs.expressions import Aggregate, Select, SelWidth, code
from loopinterp.programs.selection import PREDICATES


@dataclass(frozen=True, eq=False)
class AttentionRelation:
    """A selection whose keys and queries are functions of one feature each."""

    select: Select
    key: FeatureFunction
    query: FeatureFunction
    holds: np.ndarray  # where it selects [value of the key's feature, value of the query's]

    @classmethod
    def from_functions(
        cls, select: Select, key: FeatureFunction, query: FeatureFunction
    ) -> AttentionRelation:
        k, q = key.table.reshape(-1), query.table.reshape(-1)
        if isinstance(select.predicate, str):
            keys, queries = (torch.from_numpy(np.array(x)) for x in (k, q))
            holds = PREDICATES[select.predicate](keys[:, None], queries[None, :]).numpy()
        else:
            known = set(select.predicate)
            holds = np.array([[(int(a), int(b)) in known for b in q] for a in k])
        return cls(select, key, query, holds.reshape(len(k), len(q)))

    @property
    def name(self) -> str:
        return self.select.name or code(self.select, short=True)

    @property
    def layer(self) -> int:
        """First layer whose attention can compute it."""
        read = (*self.key.features, *self.query.features)
        return max((f.for_attention for f in read), default=0)

    @property
    def sees_itself(self) -> bool:
        same = self.key.features == self.query.features and len(self.key.features) == 1
        return bool(self.holds.all() or (same and self.holds.diagonal().all()))

    @property
    def by_position(self) -> bool:
        """Whether the selection depends only on the keys' positions."""
        return bool(self.key.features) and self.key.features[0].role == "indices"

    def one_value(self, value: FeatureFunction) -> bool:
        one_key = self.by_position and bool((self.holds.sum(axis=0) <= 1).all())
        if one_key or not value.features:
            return True
        if value.features != self.key.features:
            return False
        return all(len(np.unique(value.table[column])) <= 1 for column in self.holds.T)

    @property
    def within_reach(self) -> np.ndarray:
        """Whether a query can select something [query value, position of the query]."""
        assert self.by_position
        return np.maximum.accumulate(self.holds, axis=0).T

    def codes(self) -> tuple[Codes, Codes]:
        """Codes of keys and queries whose products are the relation, in the fewest dimensions."""
        key, query = (next(iter(x.features), None) for x in (self.key, self.query))
        queries, key_class = classes(self.holds.T)  # [query, class of keys]
        keys, query_class = classes(self.holds)  # [key, class of queries]
        n_keys, n_queries = queries.shape[1], keys.shape[1]
        # One-hot codes, all 0 for class -1.
        k, q = np.eye(n_keys + 1)[key_class, :n_keys], queries.astype(float)
        if n_queries < n_keys:
            k, q = keys.astype(float), np.eye(n_queries + 1)[query_class, :n_queries]
        return Codes(key, k), Codes(query, q)


def classes(holds: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Relations of queries without repetition: (relation [key, class], class of each query).

    Queries that can select nothing have class -1.
    """
    # columns [class, key], and the row of it that each query has, [query].
    columns, kind = np.unique(holds.T, axis=0, return_inverse=True)
    some = columns.any(axis=1)
    number = np.where(some, np.cumsum(some) - 1, -1)
    return columns[some].T, number[kind.reshape(-1)]


def causal_codes(indices: Feature) -> tuple[Codes, Codes]:
    """Codes that subtract 2 from the score for each position of a key ahead of its query."""
    positions = np.arange(len(indices.values))
    # [position, point]: one point for each position but the first, 1 from there on.
    ahead = (positions[:, None] >= positions[None, 1:]).astype(float)
    return Codes(indices, 2 * ahead), Codes(indices, ahead - 1)


class AggregateHeads:
    def __init__(self, writer: FeatureWriter, indices: Feature) -> None:
        self._writer, self._indices = writer, indices
        self._heads: dict[tuple[Select, int], LoweredHead] = {}
        self._carried: dict[tuple[LoweredHead, Feature, bytes, int], Feature] = {}
        self._witnesses: dict[Select, FeatureFunction] = {}

    def aggregate(
        self, node: Aggregate, relation: AttentionRelation, value: FeatureFunction
    ) -> FeatureFunction:
        witness, here = self._witness(relation), value
        if value.features:
            shares = self._shares(relation, value)
            one_value = relation.one_value(value)
            here = of_feature(shares if one_value else self._reduced(node, shares))
        return self._where(witness, here, node.default)

    def width(self, node: SelWidth, relation: AttentionRelation) -> FeatureFunction:
        shares = self._shares(relation, of_feature(self._indices))
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
        return self._where(self._witness(relation), of_feature(count), 0)

    def _where(
        self, witness: FeatureFunction, here: FeatureFunction, default: int
    ) -> FeatureFunction:

        def choose(witness: FeatureFunction) -> FeatureFunction | None:
            return fuse(lambda x: np.where(x[0] != 0, x[1], default), [witness, here])

        chosen = choose(witness)
        if not has_few_rules(chosen):
            chosen = choose(of_feature(self._writer.store(witness, "a key is found")))
        assert chosen is not None  # of two features
        return chosen

    def _shares(self, relation: AttentionRelation, value: FeatureFunction) -> Feature:
        """The share of each value of a function of one feature, written by a head."""
        feature = value.features[0]
        layer = max(relation.layer, feature.for_attention)
        values = value.values
        # [value of the feature, value of the function]: one-hot
        codes = Codes(feature, (value.table[:, None] == np.array(values)).astype(float))
        name = f"shares of {feature.name} by {relation.name}"
        return self._carry(relation, layer, codes, Feature(name, values, order=RAW))

    def _carry(
        self, relation: AttentionRelation, layer: int, codes: Codes, feature: Feature
    ) -> Feature:
        """The feature that a head writes with these codes, created once."""
        select = relation.select
        if (select, layer) not in self._heads:
            pairs = [relation.codes()]
            if select.causal and not self._writer.source.causal:
                pairs.append(causal_codes(self._indices))
            self._heads[select, layer] = LoweredHead(select, tuple(pairs))
        head = self._heads[select, layer]
        assert codes.feature is not None
        key = (head, codes.feature, codes.matrix.tobytes(), feature.order)
        if key not in self._carried:
            feature.layer, feature.head = layer, head
            head.carried[feature] = codes
            self._carried[key] = feature
            self._writer.written.append(feature)
        return self._carried[key]

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

    def _witness(self, relation: AttentionRelation) -> FeatureFunction:
        """1 where a query selects something, else 0."""
        if relation.select not in self._witnesses:
            self._witnesses[relation.select] = self._new_witness(relation)
        return self._witnesses[relation.select]

    def _new_witness(self, relation: AttentionRelation) -> FeatureFunction:
        if relation.sees_itself:
            return constant(1)
        if not relation.holds.any():
            return constant(0)
        query = relation.query
        if relation.by_position and relation.select.causal:
            # Of a query that is a position, or always the same, one of the two axes goes.
            table, number = relation.within_reach.astype(int), np.arange(query.table.size)
            row = FeatureFunction(query.features, number.reshape(query.table.shape))
            witness = fuse(lambda x: table[x[0], x[1]], [row, of_feature(self._indices)])
            assert witness is not None  # of at most two features
            return witness
        if not relation.key.features:
            # All keys or none, by the query alone.
            holds = relation.holds[0].astype(int)
            return FeatureFunction(query.features, holds.reshape(query.table.shape))
        # Else heads carry, for each class of queries, whether the keys that they attend to are
        # selected: where there are such keys.
        selected, kind = classes(relation.holds)  # [key, class], class of each query
        key, name, flags = relation.key.features[0], f"found by {relation.name}", []
        for k, column in enumerate(selected.T):
            case = f", case {k}" if selected.shape[1] > 1 else ""
            flag = Feature(f"{name}{case}", (0, 1), order=WITNESS, one_direction=True)
            codes = Codes(key, column[:, None].astype(float))
            flags.append(self._carry(relation, relation.layer, codes, flag))
        if len(flags) == 1:
            selects_some = (kind == 0).astype(int).reshape(query.table.shape)
            both = [FeatureFunction(query.features, selects_some), of_feature(flags[0])]
            witness = fuse(lambda x: x[0] * x[1], both)
            assert witness is not None
            return witness
        (feature,), yes = query.features, np.array([False, True])
        units = tuple(
            one_if_all((read_any(feature, kind == k), read_any(flag, yes)), ((0, -1.0), (1, 1.0)))
            for k, flag in enumerate(flags)
        )
        writes = Writes("found", (feature, *flags), units, ((0, 1.0),))
        return of_feature(self._writer.write(Feature(name, (0, 1)), writes))
