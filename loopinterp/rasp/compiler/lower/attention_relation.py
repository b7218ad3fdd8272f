"""Stage 3, lower (attention): a selection as queries and keys of a head.

A selection is a relation of the key's value and the query's value: a matrix of 0 and 1. Keys with
the same row are one class; the key writes its class, the query what the relation says of each
class (or the other way round, if queries have fewer classes), and the score is 1 where the relation
holds and 0 where it does not. Scaled up, softmax looks at the selected keys alone, and at all of
them alike. Where a query selects nothing it looks at everything alike, and what the head writes
means nothing: :class:`AttentionRelation` says how that is known.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from loopinterp.rasp.compiler.lower.feature_functions import FeatureFunction
from loopinterp.rasp.compiler.lower.lowered_features import Codes, Feature
from loopinterp.rasp.expr import Select
from loopinterp.rasp.node import code
from loopinterp.rasp.ops import PREDICATES


@dataclass(frozen=True, eq=False)
class AttentionRelation:
    """A selection with its keys and queries as functions of one feature each.

    ``holds`` says where it selects [value of the key's feature, value of the query's].
    """

    select: Select
    key: FeatureFunction
    query: FeatureFunction
    holds: np.ndarray

    @classmethod
    def of(cls, select: Select, key: FeatureFunction, query: FeatureFunction) -> AttentionRelation:
        """The relation as a matrix over the values of the features."""
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
        """What names of features call it."""
        return self.select.name or code(self.select, short=True)

    @property
    def layer(self) -> int:
        """First layer whose attention can compute it."""
        read = (*self.key.features, *self.query.features)
        return max((f.for_attention for f in read), default=0)

    @property
    def sees_itself(self) -> bool:
        """Whether every position selects at least itself."""
        if bool(self.holds.all()):
            return True
        same = self.key.features == self.query.features and len(self.key.features) == 1
        return same and bool(self.holds.diagonal().all())

    @property
    def by_position(self) -> bool:
        """Whether the keys are told apart by where they are alone."""
        return bool(self.key.features) and self.key.features[0].role == "indices"

    @property
    def one_key(self) -> bool:
        """Whether no query ever selects two keys."""
        return self.by_position and bool((self.holds.sum(axis=0) <= 1).all())

    def one_value(self, value: FeatureFunction) -> bool:
        """Whether all keys that a query selects have the same value."""
        if self.one_key or not value.features:
            return True
        if value.features != self.key.features:
            return False
        return all(len(np.unique(value.table[column])) <= 1 for column in self.holds.T)

    @property
    def within_reach(self) -> np.ndarray:
        """By position: whether a query selects something [query value, position of the query]."""
        assert self.by_position
        return np.maximum.accumulate(self.holds, axis=0).T

    def classes(self) -> tuple[np.ndarray, np.ndarray]:
        """The different things that queries ask: (relation [key value, class], class of each).

        Queries that can select nothing are of class -1.
        """
        columns, kind = np.unique(self.holds.T, axis=0, return_inverse=True)
        some = columns.any(axis=1)
        number = np.where(some, np.cumsum(some) - 1, -1)
        return columns[some].T, number[kind.reshape(-1)]

    def codes(self) -> tuple[Codes, Codes]:
        """Codes of keys and queries whose products are the relation."""
        key = self.key.features[0] if self.key.features else None
        query = self.query.features[0] if self.query.features else None
        by_query, by_key = _factors(self.holds), _factors(self.holds.T)
        if by_query[0].shape[1] <= by_key[0].shape[1]:
            k, q = by_query
        else:
            q, k = by_key
        return Codes(key, k), Codes(query, q)


def causal_codes(indices: Feature) -> tuple[Codes, Codes]:
    """Codes that take 2 points for each position that a key is ahead of its query."""
    positions = np.arange(len(indices.values))
    ahead = (positions[:, None] >= positions[None, 1:]).astype(float)
    return Codes(indices, 2 * ahead), Codes(indices, ahead - 1)


def _factors(relation: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Matrices of 0 and 1 with ``first @ second.T = relation``, one dimension per distinct row."""
    rows, kind = np.unique(relation, axis=0, return_inverse=True)
    some = rows.any(axis=1)
    first = np.eye(len(rows))[kind.reshape(-1)][:, some]
    return first, rows[some].T.astype(float)
