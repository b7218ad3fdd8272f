"""Tasks answered at every prefix: running sums and regular languages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Annotated

import torch
from pydantic import Field

from loopinterp.core.errors import ConfigError, check_choice, check_new_name, need
from loopinterp.core.settings import settings
from loopinterp.core.text import ShortRepr
from loopinterp.tasks.sampling import (
    Sampler,
    check_digits,
    check_tokens,
    integers,
    join,
    random_bits,
    read_strings,
    same,
    uniform,
)
from loopinterp.tasks.task import IGNORE, Batch, inputs_of, or_text, spell

if TYPE_CHECKING:
    from jaxtyping import Int
    from torch import Tensor


class _Prefixes(Sampler):
    """Tokens: symbols 0 .. k - 1, BOS (k), PAD (k + 1). T(n) = n + 1."""

    d_vocab: int
    d_vocab_out: int

    def _n_positions(self, n: int) -> int:
        return n + 1

    def _batch(self, symbols: Tensor, n: Tensor, k: int, what: str) -> Batch:
        check_digits(symbols, n, k, what)
        tokens = join([same(k, n), (symbols, n)], width=symbols.shape[1] + 1, fill=k + 1)
        return Batch(tokens, self.targets(tokens), n, n + 1, self)


@settings
class PrefixSum(_Prefixes):
    """Running sum mod ``modulus`` of n digits after BOS; mod 2, the parity of all bits so far.

    Distributions: ``"uniform"``, and ``"biased"`` (each example draws the probability that a digit
    is not 0 from {.05, .5, .95}).

    Source: arXiv 2604.15259.

    Example:
        >>> batch = PrefixSum().from_bits(torch.tensor([[1, 0, 1, 1]]), torch.tensor([4]))
        >>> batch.inputs.tolist(), batch.targets.tolist()
        ([[2, 1, 0, 1, 1]], [[-100, 1, 1, 0, 1]])
    """

    name = "prefix_sum"
    goal = "compute running sums modulo a number"
    distributions = ("uniform", "biased")

    modulus: Annotated[int, Field(ge=2)] = 2

    @property
    def d_vocab(self) -> int:
        return self.modulus + 2

    @property
    def d_vocab_out(self) -> int:
        return self.modulus

    def describe(self) -> str:
        what = "XOR of n bits" if self.modulus == 2 else f"sum of n digits mod {self.modulus}"
        return f"Running {what}, answered at every one."

    def say(self, row: Sequence[int], answer: Sequence[int] | None) -> str:
        space = "" if self.modulus <= 10 else " "
        real = [digit for digit in row if digit < self.modulus]
        what = "running XOR" if self.modulus == 2 else f"running sum mod {self.modulus}"
        question = f"{what} of {spell(real, separator=space)} ="
        if answer is None:
            return question
        return f"{question} {spell(answer[1 : len(real) + 1], separator=space)}"

    def from_bits(self, bits: Int[Tensor, "batch width"], n: Int[Tensor, " batch"]) -> Batch:
        """The batch of bits (mod m: digits); the first ``n`` of each row count."""
        return self._batch(bits, n, self.modulus, "bits")

    def targets(self, inputs: Batch | Tensor) -> Int[Tensor, "batch pos"]:
        """The running sum; ``IGNORE`` at BOS and PAD."""
        tokens = check_tokens(inputs, self.d_vocab)
        special = tokens >= self.modulus  # BOS and PAD
        answer = tokens.masked_fill(special, 0).cumsum(dim=1) % self.modulus
        return answer.masked_fill(special, IGNORE)

    def _draw(self, kind: str, n: Tensor, generator: torch.Generator) -> Batch:
        shape = (len(n), int(n.max()))
        if self.modulus == 2:
            return self.from_bits(random_bits(kind, *shape, generator), n)
        digits = integers(0 if kind == "uniform" else 1, self.modulus, shape, generator)
        if kind == "biased":  # a bit says where the digit is not 0
            digits = digits * random_bits(kind, *shape, generator)
        return self.from_bits(digits, n)


@dataclass(frozen=True, repr=False)
class Automaton(ShortRepr):
    """A complete deterministic finite automaton.

    Args:
        alphabet: The symbols, one character each, at least two.
        transitions: Next state by state and symbol; state 0 is the start.
    """

    alphabet: str
    transitions: tuple[tuple[int, ...], ...]
    accepting: tuple[int, ...]

    def __post_init__(self) -> None:
        n_symbols, states = len(self.alphabet), range(len(self.transitions))
        complete = states and all(len(row) == n_symbols for row in self.transitions)
        named = {*self.accepting}.union(*self.transitions)
        fits = complete and not named - {*states} and 2 <= n_symbols == len({*self.alphabet})
        expected = "two or more different symbols, and each state's next one per symbol"
        fix = "Number the states 0, 1, …; each needs a row with one next state per symbol."
        need(fits, "automaton", expected, repr(self), fix)

    @cached_property
    def dead(self) -> tuple[int, ...]:
        """States from which no accepting state can be reached."""
        live = {*self.accepting}
        for _ in self.transitions:  # a shortest path to an accepting state visits each state once
            live |= {s for s, row in enumerate(self.transitions) if live & {*row}}
        return tuple(s for s in range(len(self.transitions)) if s not in live)


_LANGUAGES = {
    "tomita1": Automaton("01", ((1, 0), (1, 1)), (0,)),
    "tomita2": Automaton("01", ((2, 1), (0, 2), (2, 2)), (0,)),
    # Even run of 1s, or none; odd run of 1s; odd and even run of 0s after an odd run of 1s; dead.
    "tomita3": Automaton("01", ((0, 1), (2, 0), (3, 4), (2, 1), (4, 4)), (0, 1, 3)),
    "tomita4": Automaton("01", ((1, 0), (2, 0), (3, 0), (3, 3)), (0, 1, 2)),
    "tomita5": Automaton("01", ((1, 2), (0, 3), (3, 0), (2, 1)), (0,)),
    "tomita6": Automaton("01", ((1, 2), (2, 0), (0, 1)), (0,)),
    "tomita7": Automaton("01", ((0, 1), (2, 1), (2, 3), (4, 3), (4, 4)), (0, 1, 2, 3)),
    "dyck_2": Automaton("()", ((1, 3), (2, 0), (3, 1), (3, 3)), (0,)),
    "dyck_3": Automaton("()", ((1, 4), (2, 0), (3, 1), (4, 2), (4, 4)), (0,)),
}


def list_languages() -> list[str]:
    """Names of the registered languages, sorted."""
    return sorted(_LANGUAGES)


def get_automaton(language: str) -> Automaton:
    """The automaton of a registered language."""
    return _LANGUAGES[check_choice("language", language, _LANGUAGES)]


def register_language(name: str, automaton: Automaton, *, replace: bool = False) -> None:
    """Register a language for :class:`RegularLanguage`; ``replace`` allows a taken name."""
    if not replace:
        check_new_name("language", name, _LANGUAGES)
    _LANGUAGES[name] = automaton


@settings
class RegularLanguage(_Prefixes):
    """Membership of every prefix of n symbols in a regular language, after a BOS token.

    The answer at position i is 1 if ``s_1 … s_i`` is in the language, else 0:
    ``state_i = transitions[state_{i-1}][s_i]`` from state 0 at BOS.

    Languages over {0, 1} (Tomita 1982): ``tomita1`` 1*; ``tomita2`` (10)*; ``tomita3`` no
    odd-length run of 1s directly followed by an odd-length run of 0s; ``tomita4`` no 000;
    ``tomita5`` an even number of 0s and of 1s; ``tomita6`` the number of 0s less that of 1s is a
    multiple of 3; ``tomita7`` 0*1*0*1*. Over brackets: ``dyck_2`` and ``dyck_3``, balanced and
    nested at most 2 or 3 deep (arXiv 2010.07515). :func:`register_language` adds others.

    Distributions: ``"uniform"``, and ``"steered"``, which keeps both answers frequent: half of the
    examples avoid dead states; the others, from a random step on, take the first symbol that leads
    to one.

    Source: Tomita, "Dynamic construction of finite automata from examples using hill-climbing",
    1982.

    Example:
        >>> task = RegularLanguage(language="dyck_2")
        >>> batch = task.encode(["(())", "()("])
        >>> batch.targets.tolist()
        [[-100, 0, 0, 0, 1], [-100, 0, 1, 0, -100]]
    """

    name = "regular_language"
    goal = "recognise a regular language"
    about = "Whether each prefix of n symbols is in {self.language}, answered at every symbol."
    d_vocab_out = 2
    distributions = ("uniform", "steered")

    language: str = "tomita6"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("language", self.language, _LANGUAGES, error=ConfigError)

    @property
    def automaton(self) -> Automaton:
        return get_automaton(self.language)

    @property
    def symbols(self) -> tuple[str, ...]:
        """A word for each token."""
        return (*self.automaton.alphabet, "BOS", "PAD")

    @property
    def d_vocab(self) -> int:
        return len(self.symbols)

    def say(self, row: Sequence[int], answer: Sequence[int] | None) -> str:
        alphabet = self.automaton.alphabet
        real = [token for token in row if token < len(alphabet)]
        question = f"in {self.language}, prefixes of {spell(real, alphabet)} ="
        return question if answer is None else f"{question} {spell(answer[1 : len(real) + 1])}"

    @or_text
    def encode(self, words: Sequence[str]) -> Batch:
        """The batch of strings of one or more symbols of the alphabet."""
        return self.from_symbols(*read_strings(words, self.automaton.alphabet))

    def from_symbols(self, symbols: Int[Tensor, "batch width"], n: Int[Tensor, " batch"]) -> Batch:
        """The batch of symbols; the first ``n`` of each row count."""
        return self._batch(symbols, n, self.d_vocab - 2, "symbols")

    def states(self, inputs: Batch | Tensor) -> Int[Tensor, "batch pos"]:
        """The automaton's state after each position; BOS and PAD leave it unchanged."""
        tokens = check_tokens(inputs, self.d_vocab)
        rows = [(*row, state, state) for state, row in enumerate(self.automaton.transitions)]
        next_state = torch.tensor(rows, device=tokens.device)  # [state, token]
        states = torch.empty_like(tokens)
        state = tokens.new_zeros(len(tokens))
        for pos in range(tokens.shape[1]):  # the automaton is sequential
            state = states[:, pos] = next_state[state, tokens[:, pos]]
        return states

    def targets(self, inputs: Batch | Tensor) -> Int[Tensor, "batch pos"]:
        """1 if the prefix is in the language, else 0; ``IGNORE`` at BOS and PAD."""
        states, tokens = self.states(inputs), inputs_of(inputs)
        accepting = torch.tensor(self.automaton.accepting, device=tokens.device)
        answer = torch.isin(states, accepting).long()  # [batch, pos]
        return answer.masked_fill(tokens >= self.d_vocab - 2, IGNORE)

    def _draw(self, kind: str, n: Tensor, generator: torch.Generator) -> Batch:
        shape = (len(n), int(n.max()))
        symbols = integers(0, self.d_vocab - 2, shape, generator)
        if kind == "uniform" or not self.automaton.dead:
            return self.from_symbols(symbols, n)
        transitions = torch.tensor(self.automaton.transitions, device=n.device)
        dead = torch.tensor(self.automaton.dead, device=n.device)
        fatal = torch.isin(transitions, dead)  # [state, symbol]
        # A state that offers no symbol of the wanted kind allows all symbols.
        safe = torch.where(fatal.all(1, keepdim=True), True, ~fatal)
        ending = torch.where(fatal.any(1, keepdim=True), fatal, True)
        weights = torch.stack([safe, ending]).float()  # [ends, state, symbol]
        # Uniform in 0 .. 2n - 1; n or more means never.
        end = (2 * n * uniform((len(n),), generator)).long()
        state = torch.zeros_like(n)
        for step in range(shape[1]):
            likelihood = weights[(step >= end).long(), state]  # [batch, symbol]
            symbols[:, step] = torch.multinomial(likelihood, 1, generator=generator)[:, 0]
            state = transitions[state, symbols[:, step]]
        return self.from_symbols(symbols, n)
