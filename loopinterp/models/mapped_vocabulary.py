"""A looped model behind the vocabulary of a task."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from loopinterp.errors import InputError
from loopinterp.models.looped_model import bind, need_model
from loopinterp.models.model_description import device_of, said_of
from loopinterp.models.run_inputs import check_tokens
from loopinterp.short_repr import say

if TYPE_CHECKING:
    from jaxtyping import Float, Integer
    from torch import Tensor

    from loopinterp.models.looped_model import Iteration, LoopedModel
    from loopinterp.models.run_length import LoopRule


class WithVocabulary(nn.Module):
    """A looped model that reads a task's tokens, and answers in its classes.

    Args:
        model: Any looped model, with a vocabulary of its own.
        tokens: The model's token for each token of the task, from 0 on; as they are if None.
        answers: The model's output for each answer class of the task; as they are if None.

    Raises:
        InputError: If the model is none, or a list is no list of integers from 0 on.

    Example:
        >>> from loopinterp.models import LoopedTransformer, LoopedTransformerConfig
        >>> config = LoopedTransformerConfig(d_model=8, n_heads=2, d_vocab=100, d_vocab_out=100)
        >>> model = WithVocabulary(LoopedTransformer(config), tokens=[48, 49, 2], answers=[48, 49])
        >>> model.readout(model.embed(torch.tensor([[2, 0, 1]]))).shape
        torch.Size([1, 3, 2])
    """

    tokens: Tensor | None
    answers: Tensor | None

    def __init__(
        self,
        model: LoopedModel | Any,
        *,
        tokens: Sequence[int] | None = None,
        answers: Sequence[int] | None = None,
    ) -> None:
        super().__init__()
        need_model(model)
        self.model = model
        for name, numbers in (("tokens", tokens), ("answers", answers)):
            table = None if numbers is None else torch.as_tensor(numbers)
            if table is not None and (
                table.dtype != torch.int64 or table.ndim != 1 or table.min() < 0
            ):
                raise InputError(
                    name,
                    expected="a list of the model's own tokens, one for each of the task's",
                    given=repr(numbers),
                    fix="Pass e.g. [tokenizer.convert_tokens_to_ids(word) for word in words].",
                )
            self.register_buffer(name, None if table is None else table.to(device_of(model)))

    def __repr__(self) -> str:
        shown = {"model": self.model, "tokens": self.tokens, "answers": self.answers}
        return say(type(self).__name__, shown.items())

    @property
    def device(self) -> torch.device:
        """Where the model lies."""
        return device_of(self.model)

    @property
    def reach(self) -> int | None:
        """That of the model."""
        return getattr(self.model, "reach", None)

    @property
    def n_ctx(self) -> int | None:
        """The positions that the model has room for, where it says so."""
        return said_of(self.model, "n_ctx")

    @property
    def d_vocab(self) -> int | None:
        """Tokens that the task has, where that is known."""
        return said_of(self.model, "d_vocab") if self.tokens is None else len(self.tokens)

    @property
    def d_features(self) -> int | None:
        """That of the model, which has it where it reads no tokens."""
        return said_of(self.model, "d_features")

    @property
    def d_vocab_out(self) -> int | None:
        """Answer classes that the task has, where that is known."""
        return said_of(self.model, "d_vocab_out") if self.answers is None else len(self.answers)

    @property
    def loop_rule(self) -> LoopRule | None:
        """That of the model: how many loops it was made for, where that is known."""
        return getattr(self.model, "loop_rule", None)

    def embed(self, inputs: Integer[Tensor, "batch pos"]) -> Float[Tensor, "batch pos d_model"]:
        """The model's, of its own tokens."""
        return self.model.embed(self._own(inputs))

    def initial_state(
        self, e: Float[Tensor, "batch pos d_model"]
    ) -> Float[Tensor, "batch pos d_model"]:
        """The model's."""
        return self.model.initial_state(e)

    def step(
        self, h: Float[Tensor, "batch pos d_model"], e: Float[Tensor, "batch pos d_model"]
    ) -> Float[Tensor, "batch pos d_model"]:
        """The model's."""
        return self.model.step(h, e)

    def readout(
        self, h: Float[Tensor, "batch pos d_model"]
    ) -> Float[Tensor, "batch pos d_vocab_out"]:
        """The model's, at the answers of the task."""
        return self._answers(self.model.readout(h))

    def bind(self, inputs: Integer[Tensor, "batch pos"]) -> Iteration:
        """The model's, which may know more of its input than the four methods pass on."""
        own = bind(self.model, self._own(inputs))
        return dataclasses.replace(own, readout=lambda h: self._answers(own.readout(h)))

    def _own(self, inputs: Tensor) -> Tensor:
        if self.tokens is None:
            return inputs
        check_tokens(inputs, len(self.tokens), "Map every token of the task, or use its sampler.")
        return self.tokens[inputs.long()]

    def _answers(self, logits: Tensor) -> Tensor:
        return logits if self.answers is None else logits[..., self.answers]
