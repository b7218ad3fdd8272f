"""The tasks, and the right answers to those in the full-output format, in plain Python."""

from __future__ import annotations

from collections.abc import Callable

from loopinterp.tasks import FullOutput

SETTINGS: list[tuple[str, dict[str, object]]] = [
    ("addition", {}),
    ("addition", {"format": "features"}),
    ("parity", {}),
    ("prefix_sum", {}),
    ("prefix_sum", {"modulus": 7}),
    ("copy", {}),
    ("binary_sum", {}),
    ("unique_set", {}),
    ("unique_set", {"n_symbols": 3}),
    ("token_addition", {}),
    ("multiplication", {}),
    ("multiplication", {"m": 3}),
    ("abacus_addition", {}),
    ("abacus_sum", {}),
    ("abacus_sum", {"n_operands": 12}),
    ("abacus_multiplication", {}),
    ("abacus_sorting", {}),
    ("abacus_sorting", {"n_digits": 1}),
    ("next_token", {}),
    ("next_token", {"of": "multiplication", "of_settings": {"m": 3}, "n_pause": 3}),
]
"""Every task of the library, with settings."""


def copied(prompt: str) -> str:
    return prompt


def counted(prompt: str) -> str:
    return format(prompt.count("1"), "b")[::-1]


def parity(prompt: str) -> str:
    return str(prompt.count("1") % 2)


def added(prompt: str) -> str:
    a, b = prompt.split("+")
    return format(int(a, 2) + int(b, 2), f"0{len(a) + 1}b")


def multiplied(prompt: str) -> str:
    a, b = prompt.split("*")
    return format(int(a[::-1], 2) * int(b[::-1], 2), f"0{len(a) + len(b)}b")[::-1]


def distinct(prompt: str) -> str:
    return "".join(dict.fromkeys(prompt))


ANSWERS: dict[str, Callable[[str], str]] = {
    "copy": copied,
    "binary_sum": counted,
    "parity": parity,
    "token_addition": added,
    "multiplication": multiplied,
    "unique_set": distinct,
}
LETTERS = [chr(ord("A") + i) for i in range(60)]


def spelled(task: FullOutput) -> list[str]:
    """One character for each prompt symbol, then '=', EOS and BOS."""
    symbols = LETTERS[: len(task.symbols)] if task.name == "unique_set" else list(task.symbols)
    return [*symbols, "=", ".", "^"]
