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

from loopinterp.rasp.compiler.lower.attention import Selection, causal_codes
from loopinterp.rasp.compiler.lower.features import (
    RAW,
    WITNESS,
    Codes,
    Feature,
    HeadPlan,
    Read,
    Writes,
    at_least,
    one_if_all,
    read_any,
)
from loopinterp.rasp.compiler.lower.functions import Function, constant, fuse, of_feature
from loopinterp.rasp.compiler.lower.lookups import MOST_FUSED_RULES, cost, thresholds
from loopinterp.rasp.show import code

if TYPE_CHECKING:
    from loopinterp.rasp.compiler.lower.held import Held
    from loopinterp.rasp.expr import Aggregate, Select, SelWidth


class Aggregates:
    """The heads of a section.

    Args:
        held: What the section writes; what heads need is added to it.
        indices: The feature of the positions.
    """

    def __init__(self, held: Held, indices: Feature) -> None:
        self._held, self._indices = held, indices
        self._heads: dict[tuple[Select, int], HeadPlan] = {}
        self._carried: dict[tuple[HeadPlan, Feature, bytes, int], Feature] = {}
        self._found: dict[Select, Function] = {}

    def aggregate(self, node: Aggregate, selection: Selection, value: Function) -> Function:
        """An aggregate as a function of features: the default where no key is found."""
        found = self._found_of(selection)
        if not value.features:
            here = value
        else:
            shares = self._shares(selection, value)
            here = of_feature(shares)
            if not selection.one_value(value):
                here = of_feature(self._reduced(node, shares))
        return self._where(found, here, node.default)

    def width(self, node: SelWidth, selection: Selection) -> Function:
        """How many keys are selected, as a function of features."""
        places = of_feature(self._indices)
        shares = self._shares(selection, places)
        length = len(self._indices.values)
        name, widths = code(node, short=True), tuple(range(length + 1))
        units = tuple(
            at_least((read_any(shares, one),), 0.5 / length, 1 / length, ((0, 1.0),))
            for one in np.eye(length, dtype=bool)
        )
        number = self._held.write(
            Feature(f"{name}, as a number", widths, one_direction=True),
            Writes("count", (shares,), units),
        )
        levels = [(k + 0.5, 1.0) for k in range(length)]
        cut = thresholds((Read(number, np.ones(1)),), levels, widths, widths)
        count = self._held.write(Feature(name, widths), Writes("count", (number,), *cut))
        return self._where(self._found_of(selection), of_feature(count), 0)

    def _where(self, found: Function, here: Function, default: int) -> Function:
        """The value where a key is found, else the default."""

        def choose(found: Function) -> Function | None:
            return fuse(lambda x: np.where(x[0] != 0, x[1], x[2]), [found, here, constant(default)])

        chosen = choose(found)
        if chosen is None or cost(chosen, MOST_FUSED_RULES) > MOST_FUSED_RULES:
            chosen = choose(of_feature(self._held.hold(found, "a key is found")))
        assert chosen is not None  # of two features
        return chosen

    def _shares(self, selection: Selection, value: Function) -> Feature:
        """What a head writes of a function of one feature: the share of each of its values."""
        feature = value.features[0]
        layer = max(selection.layer, feature.for_attention)
        values = value.values
        codes = Codes(feature, (value.table[:, None] == np.array(values)).astype(float))
        name = f"shares of {feature.name} by {selection.name}"
        return self._carry(selection, layer, codes, Feature(name, values, order=RAW))

    def _carry(self, selection: Selection, layer: int, codes: Codes, feature: Feature) -> Feature:
        head = self._head(selection, layer)
        assert codes.feature is not None
        key = (head, codes.feature, codes.matrix.tobytes(), feature.order)
        if key not in self._carried:
            feature.layer, feature.head = layer, head
            head.carried[feature] = codes
            self._carried[key] = feature
            self._held.written.append(feature)
        return self._carried[key]

    def _head(self, selection: Selection, layer: int) -> HeadPlan:
        key = (selection.select, layer)
        if key not in self._heads:
            pairs = [selection.codes()]
            if selection.select.causal and not self._held.source.causal:
                pairs.append(causal_codes(self._indices))
            self._heads[key] = HeadPlan(selection.select, layer, tuple(pairs))
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
            some = 0.5 / length
            units = tuple(
                at_least(
                    (read_any(shares, further(values, after)),),
                    some,
                    2 * some,
                    ((shares.values.index(before), -1.0), (shares.values.index(after), 1.0)),
                )
                for before, after in pairwise(taken)
            )
            cut = units, ((shares.values.index(taken[0]), 1.0),)
            taken = shares.values
        name = f"{node.mode} of {shares.name}"
        return self._held.write(Feature(name, taken), Writes(node.mode, (shares,), *cut))

    def _found_of(self, selection: Selection) -> Function:
        """1 where a query selects something."""
        if selection.select not in self._found:
            self._found[selection.select] = self._find(selection)
        return self._found[selection.select]

    def _find(self, selection: Selection) -> Function:
        if selection.sees_itself:
            return constant(1)
        if not selection.holds.any():
            return constant(0)
        query = selection.query
        if selection.by_position and selection.select.causal:
            table = selection.within_reach.astype(int)
            if not query.features:
                return Function((self._indices,), table[0])
            if query.features == (self._indices,):
                return Function((self._indices,), table.diagonal())
            return Function((*query.features, self._indices), table)
        if not selection.key.features:
            # All keys or none, by the query alone.
            return Function(
                query.features, selection.holds[0].astype(int).reshape(query.table.shape)
            )
        return self._witnessed(selection)

    def _witnessed(self, selection: Selection) -> Function:
        """1 where the keys that the head looks at are selected: where there are such keys."""
        relation, kind = selection.classes()
        key, query = selection.key.features[0], selection.query.features
        flags = []
        for k, column in enumerate(relation.T):
            flag = Feature(
                f"found by {selection.name}" + (f", case {k}" if relation.shape[1] > 1 else ""),
                (0, 1),
                order=WITNESS,
                one_direction=True,
            )
            codes = Codes(key, column[:, None].astype(float))
            flags.append(self._carry(selection, selection.layer, codes, flag))
        if len(flags) == 1:
            asks = Function(query, (kind == 0).astype(int).reshape(selection.query.table.shape))
            found = fuse(lambda x: x[0] * x[1], [asks, of_feature(flags[0])])
            assert found is not None
            return found
        yes = np.array([False, True])
        units = tuple(
            one_if_all((read_any(query[0], kind == k), read_any(flag, yes)), ((0, -1.0), (1, 1.0)))
            for k, flag in enumerate(flags)
        )
        writes = Writes("found", (*query, *flags), units, ((0, 1.0),))
        return of_feature(self._held.write(Feature(f"found by {selection.name}", (0, 1)), writes))
