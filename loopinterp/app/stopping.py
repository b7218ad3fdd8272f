"""Stopping rules from their names on the command line, and the one fitted to a model."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, NamedTuple

from loopinterp import models, training
from loopinterp.core.errors import InputError, check_choice
from loopinterp.models import STOPPING_RULES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from loopinterp.app.session import Session

CALIBRATED = "calibrated"
"""The stopping rule fitted on answers at training lengths."""


class _Number(NamedTuple):
    """The number of a rule: its type, its word in help, and its format in a label."""

    kind: type
    word: str
    label: str


_NUMBERS = {
    "tolerance": _Number(float, "TOLERANCE", " < {:g}"),
    "threshold": _Number(float, "THRESHOLD", " > {:g}"),
    "hold": _Number(int, "LOOPS", " {} loops"),
}
"""Numbers of stopping rules, by the field that holds them."""


def stopping_rules(names: Sequence[str]) -> dict[str, models.StoppingRule]:
    """Stopping rules from their names on the command line, by the names in results.

    Example:
        >>> stopping_rules(["residual=0.01"])
        {'residual < 0.01': ResidualBelow(tolerance=0.01)}
    """
    rules: dict[str, models.StoppingRule] = {}
    for text in names:
        name, _, number = text.partition("=")
        rule: Any = STOPPING_RULES[check_choice("stopping rule", name, [*STOPPING_RULES])]
        if number:
            field = _number_field(rule)
            try:
                value = _NUMBERS[field].kind(number)
            except (KeyError, ValueError):  # the rule takes no number, or not this one
                fields = {other: _number_field(its) for other, its in STOPPING_RULES.items()}
                spelled = (f"{o}={_NUMBERS[f].word}" if f else o for o, f in fields.items())
                raise InputError(
                    "stopping rule",
                    expected=f"{', '.join(spelled)} or {CALIBRATED}",
                    given=repr(text),
                    fix="Write residual=0.03, for instance.",
                ) from None
            rule = dataclasses.replace(rule, **{field: value})
        rules[_label(name, rule)] = rule
    return rules


def _number_field(rule: Any) -> str:
    """The field of a rule's number; "" if it has none."""
    fields = {field.name for field in dataclasses.fields(rule)}
    return next((name for name in _NUMBERS if name in fields), "")


def _label(name: str, rule: Any) -> str:
    label = name.replace("-", " ").replace("kl", "KL").replace(" batch", " per batch")
    field = _number_field(rule)
    return label + _NUMBERS[field].label.format(getattr(rule, field)) if field else label


def calibrate_stopping(model: Session) -> models.LengthLine:
    """A line of loops against length, fitted on the upper half of the training lengths."""
    lengths = _calibration_lengths(model)
    return training.calibrate_stopping(model.model, model.task, lengths, seed=model.seed)


def _calibration_lengths(model: Session) -> list[int]:
    last = model.affordable(model.cutoff)
    # At most six lengths, evenly from the middle of the training lengths to their end.
    upper = last - last // 2
    steps = min(6, upper + 1) - 1
    lengths = (last // 2 + k * upper // max(steps, 1) for k in range(steps + 1))
    return sorted({model.affordable(max(n, 1)) for n in lengths})
