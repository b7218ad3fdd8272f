"""``--set key=value``: change a configuration from the command line."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Sequence
from typing import Any

from loopinterp.errors import ConfigError, unknown_name
from loopinterp.settings import flatten
from loopinterp.training.config import TrainingConfig

_OPEN = "task_settings"
"""The one part of a configuration whose names the task decides."""


def apply_settings(config: TrainingConfig, settings: Iterable[str]) -> TrainingConfig:
    """A configuration with some settings changed, by dotted name.

    Values are read by :func:`parse_value`; the type each setting wants is checked. All changes are
    made together, so that the order does not matter.

    Args:
        config: What to start from.
        settings: ``key=value`` each, with dots in the key for nested settings.

    Raises:
        ConfigError: If a key is unknown, or a value is of the wrong type or out of range.

    Example:
        >>> from loopinterp.training.recipes import RECIPES
        >>> config = apply_settings(RECIPES["addition"], ["optimiser.lr=3e-4", "seed=7"])
        >>> config.optimiser.lr, config.seed
        (0.0003, 7)
    """
    values = config.to_dict()
    known = sorted(flatten(values))
    for setting in settings:
        key, equals, text = setting.partition("=")
        key = key.strip()
        if not equals or not key:
            raise ConfigError(
                f"setting {setting!r}",
                expected="key=value",
                given=repr(setting),
                fix="Write for instance optimiser.lr=3e-4.",
            )
        _check_key(key, known)
        *parents, last = path = key.split(".")
        place = values
        for parent in parents:
            place = place[parent]
        place[last] = parse_value(text, TrainingConfig.choices(path))
    return TrainingConfig.from_dict(values)


def parse_value(text: str, choices: Sequence[str] = ()) -> Any:
    """A value from the command line: one of the choices of its setting, or else JSON.

    ``none`` is None, unless it is one of the choices; what is no JSON is text.

    Example:
        >>> [parse_value(text) for text in ("3", "3e-4", "true", "none", "[1, 2]", "pairs")]
        [3, 0.0003, True, None, [1, 2], 'pairs']
        >>> parse_value("none", choices=("none", "rotary"))
        'none'
    """
    text = text.strip()
    if text in choices:
        return text
    if text.lower() == "none":
        return None
    try:
        return json.loads(text)
    except (ValueError, RecursionError):  # numbers of 5,000 digits, 200,000 brackets
        return {"True": True, "False": False}.get(text, text)


def _check_key(key: str, known: list[str]) -> None:
    if key in known or (key.startswith(f"{_OPEN}.") and key.count(".") == 1):
        return
    # "lr" alone is far from "optimiser.lr" as text, and yet it is what was meant.
    endings = [name for name in known if name.split(".")[-1] == key.split(".")[-1]]
    if not endings:
        raise unknown_name("setting", key, known, ConfigError)
    nearest = difflib.get_close_matches(key, endings, n=1, cutoff=0.0)
    raise ConfigError(
        "setting",
        expected="the full name of a setting",
        given=repr(key),
        fix=f"Did you mean {' or '.join(nearest[:1] + [e for e in endings if e not in nearest])}?",
    )
