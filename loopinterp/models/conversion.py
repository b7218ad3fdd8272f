"""Other people's weights and words: conversion, a task's vocabulary, folded norms."""

from __future__ import annotations

import dataclasses
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from loopinterp.core.errors import InputError, check_integer, check_number
from loopinterp.core.text import say
from loopinterp.models.checkpoints import misfits
from loopinterp.models.iteration import bind
from loopinterp.models.protocol import CheckedModel, declared, device_of, need_model, takes_loop
from loopinterp.models.run_inputs import TOKEN_TYPES, check_tokens
from loopinterp.models.transformer import LoopedTransformer
from loopinterp.models.weights import need_plain

if TYPE_CHECKING:
    from jaxtyping import Float, Integer
    from torch import Tensor

    from loopinterp.models.config import LoopedTransformerConfig
    from loopinterp.models.iteration import Iteration
    from loopinterp.models.protocol import LoopedModel


def convert_model(
    original: LoopedModel | Any,
    config: LoopedTransformerConfig,
    weights: Mapping[str, Tensor],
    inputs: Tensor,
    *,
    n_loops: int,
    activations: Mapping[str, Tensor] | None = None,
    tolerance: float = 1e-5,
) -> LoopedTransformer:
    """A ``LoopedTransformer`` with given weights, if it computes what the original does.

    Args:
        original: The model that the weights come from, behind the four methods.
        config: The architecture that it has in our words.
        weights: The weights by our names, those of ``LoopedTransformer(config).state_dict()``;
            matrices of linear maps are ``[out, in]``, as ``torch.nn.Linear`` has them. The model
            has their floating-point type.
        inputs: Inputs on which the two must agree.
        n_loops: Loops for which they must.
        activations: The original's activations on these inputs by our names (``site``, or
            aliases such as ``loops.0.blocks.0.attn.hook_pattern``), to find a difference inside
            a loop.
        tolerance: Largest difference of any number, relative to the largest one there, or to 1
            where that is smaller.

    Raises:
        InputError: A weight is missing, unknown or of another shape (it is named); they are no
            tensors of one floating-point type; or the two differ, it says where first (see
            :func:`first_difference`).
    """
    dtype = _dtype_of(weights)
    if not isinstance(inputs, torch.Tensor):
        raise InputError(
            "inputs",
            expected="a tensor [batch, pos], on which the two must agree",
            given=f"a {type(inputs).__name__}",
            fix="Pass torch.tensor(...) of it.",
        )
    model = LoopedTransformer(config).to(inputs.device, dtype).eval()
    if wrong := misfits(weights, model.state_dict(), lambda x: list(x.shape)):
        raise InputError(
            "weights",
            expected="those of LoopedTransformer(config).state_dict()",
            given=wrong,
            fix="Rename, transpose or split the original's, or change the configuration.",
        )
    model.load_state_dict(dict(weights))
    where = first_difference(
        original, model, inputs, n_loops=n_loops, activations=activations, tolerance=tolerance
    )
    if where is not None:
        raise InputError(
            "converted model",
            expected=f"the original's numbers to {tolerance:g}",
            given=f"a difference, first in {where}",
            fix="Compare the weights and settings that enter there, or pass activations= to look "
            "inside the loop.",
        )
    return model


def _dtype_of(weights: Mapping[str, Tensor]) -> torch.dtype:
    """The one floating-point type of some weights; raise unless they have one."""
    named = weights.items() if isinstance(weights, Mapping) else [("weights", weights)]
    kinds: dict[object, str] = {}  # and the first weight of each
    for name, x in named:
        kinds.setdefault(x.dtype if isinstance(x, torch.Tensor) else type(x).__name__, name)
    dtype = next(iter(kinds), None)
    if len(kinds) == 1 and isinstance(dtype, torch.dtype) and dtype.is_floating_point:
        return dtype
    raise InputError(
        "weights",
        expected="a mapping from names to tensors, all of one floating-point type",
        given=", ".join(f"{name} of {kind}" for kind, name in kinds.items()) or "none",
        fix="Pass e.g. {name: torch.as_tensor(x).float() for name, x in weights.items()}, and "
        "original.float().",
    )


@dataclasses.dataclass(frozen=True)
class Difference:
    """Where two models first compute different numbers, and which.

    Attributes:
        site: ``embed``, ``initial_state``, ``loop t``, ``readout after t loops``, or the name of an
            activation.
        theirs: The original's number there, or the shape of its tensor where the shapes differ.
        ours: The converted model's.
        place: Index of the number in its tensor; None where the shapes differ.
    """

    site: str
    theirs: float | list[int]
    ours: float | list[int]
    place: list[int] | None = None

    def __str__(self) -> str:
        if self.place is None:
            return f"{self.site}: shape {self.theirs} there and {self.ours} here"
        return f"{self.site}: {self.theirs:.6g} there and {self.ours:.6g} here at {self.place}"


@torch.no_grad()
def first_difference(
    original: LoopedModel | Any,
    converted: LoopedTransformer,
    inputs: Tensor,
    *,
    n_loops: int,
    activations: Mapping[str, Tensor] | None = None,
    tolerance: float = 1e-5,
) -> Difference | None:
    """Where a converted model first computes something else than the original; None if nowhere.

    Arguments are those of :func:`convert_model`. Each loop of both starts from the original's
    state, so a difference is found where it arises and not where it is carried to.

    Raises:
        InputError: If the original is no looped model, or an activation is not of a loop.
    """
    need_model(original)
    check_integer("n_loops", n_loops, least=1)
    check_number("tolerance", tolerance, above=0)
    book = converted.addresses(n_loops)
    expected = {book.resolve(name): x for name, x in (activations or {}).items()}
    if outside := [name for name in expected if book.addresses[name].loop is None]:
        raise InputError(
            "activations",
            expected="activations inside a loop",
            given=outside[0],
            fix="Leave it out: embedding, prelude and readout are compared as a whole.",
        )
    theirs, ours = bind(original, inputs), bind(converted, inputs)

    def inside(loop: int, state: Tensor) -> Iterator[tuple[str, Tensor, Tensor]]:
        """The activations of a loop that are expected, from the same state on."""
        names = [name for name in expected if book.addresses[name].loop == loop]
        if names:
            span = {"start_at_loop": loop, "stop_at_loop": loop + 1, "state": state}
            _, cache = converted.run_with_cache(
                inputs, n_loops=n_loops, names_filter=names, return_type="state", **span
            )
            yield from ((name, expected[name], cache[name]) for name in cache)

    def compared() -> Iterator[tuple[str, Tensor, Tensor]]:
        """What both compute, in the order of the computation; a loop's activations within it."""
        yield "embed", theirs.e, ours.e
        yield "initial_state", theirs.h0, ours.h0
        before = theirs.h0
        for loop, h in theirs.run(n_loops):
            if loop:
                step = f"loop {loop - 1}", h, ours.step(before)
                if _difference(*step, tolerance) is not None:
                    yield from inside(loop - 1, before)
                yield step
            yield f"readout after {loop} loops", theirs.readout(h), ours.readout(h)
            before = h

    differences = (_difference(*each, tolerance) for each in compared())
    return next((each for each in differences if each is not None), None)


def _difference(
    site: str, theirs: Float[Tensor, "*shape"], ours: Float[Tensor, "*own_shape"], tolerance: float
) -> Difference | None:
    if theirs.shape != ours.shape:
        return Difference(site, list(theirs.shape), list(ours.shape))
    finite = theirs.isfinite() & ours.isfinite()  # scores are minus infinity where barred
    off = torch.where(finite, (theirs - ours).abs(), 0.0)
    # Where either is infinite both must be, and equal.
    off = torch.where(~finite & (theirs != ours), torch.inf, off)
    scale = float(theirs[finite].abs().max()) if bool(finite.any()) else 1.0
    if not off.numel() or float(off.max()) <= tolerance * max(scale, 1.0):
        return None
    place = tuple(int(k) for k in torch.unravel_index(off.argmax(), off.shape))
    return Difference(site, float(theirs[place]), float(ours[place]), list(place))


def _of_model(name: str) -> property:
    """An optional property that a wrapper takes from its model."""
    return property(lambda self: declared(self.model, name), doc=f"``{name}`` of the model.")


class WithVocabulary(nn.Module):
    """A looped model that reads a task's tokens, and answers in its classes.

    Args:
        model: Any looped model, with a vocabulary of its own.
        tokens: The model's token for each token of the task, from 0 on; as they are if None.
        answers: The model's output for each answer class of the task; as they are if None.

    Raises:
        InputError: If the model is none, or a list is no list of integers from 0 on; once it is
            run, if the model has no such token or output.

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
            table = None if numbers is None else _table(name, numbers)
            self.register_buffer(name, None if table is None else table.to(device_of(model)))
            if name == "answers" and table is not None:
                self._last_answer = int(table.max())  # once, as devices are slow to say

    def __repr__(self) -> str:
        shown = {"model": self.model, "tokens": self.tokens, "answers": self.answers}
        return say(type(self).__name__, shown.items())

    @property
    def wrapped(self) -> LoopedModel | Any:
        """The model with a vocabulary of its own."""
        return self.model

    reach, reach_before, local_step = map(_of_model, ("reach", "reach_before", "local_step"))
    causal, n_ctx, d_features = map(_of_model, ("causal", "n_ctx", "d_features"))
    loop_rule, repeatable = map(_of_model, ("loop_rule", "repeatable"))

    @property
    def device(self) -> torch.device:
        """Where the model lies."""
        return device_of(self.model)

    @property
    def d_vocab(self) -> int | None:
        """Tokens that the task has, where that is known."""
        return declared(self.model, "d_vocab") if self.tokens is None else len(self.tokens)

    @property
    def d_vocab_out(self) -> int | None:
        """Answer classes that the task has, where that is known."""
        return declared(self.model, "d_vocab_out") if self.answers is None else len(self.answers)

    @property
    def takes_loop(self) -> bool:
        """Whether the model's step takes the index of the loop."""
        return takes_loop(self.model)

    def embed(self, inputs: Integer[Tensor, "batch pos"]) -> Float[Tensor, "batch pos d_model"]:
        """The model's, of its own tokens."""
        tokens = self._model_tokens(inputs)
        with self._naming_tokens(tokens):
            return self.model.embed(tokens)

    def initial_state(
        self, e: Float[Tensor, "batch pos d_model"]
    ) -> Float[Tensor, "batch pos d_model"]:
        """The model's."""
        return self.model.initial_state(e)

    def step(
        self,
        h: Float[Tensor, "batch pos d_model"],
        e: Float[Tensor, "batch pos d_model"],
        loop: int | None = None,
    ) -> Float[Tensor, "batch pos d_model"]:
        """The model's."""
        return CheckedModel(self.model).step(h, e, loop)

    def readout(
        self, h: Float[Tensor, "batch pos d_model"]
    ) -> Float[Tensor, "batch pos d_vocab_out"]:
        """The model's, at the answers of the task."""
        return self._answers(self.model.readout(h))

    def bind(self, inputs: Integer[Tensor, "batch pos"]) -> Iteration:
        """The model's, which may know more of its input than the four methods pass on."""
        tokens = self._model_tokens(inputs)
        with self._naming_tokens(tokens):
            bound = bind(self.model, tokens)
        return dataclasses.replace(bound, readout=lambda h: self._answers(bound.readout(h)))

    def _model_tokens(self, inputs: Tensor) -> Tensor:
        if self.tokens is None:
            # An embedding of PyTorch looks up int32 and int64 only.
            return inputs.long() if getattr(inputs, "dtype", None) in TOKEN_TYPES else inputs
        check_tokens(inputs, len(self.tokens), "Map every token of the task, or use its sampler.")
        return self.tokens[inputs.long()]

    @contextmanager
    def _naming_tokens(self, tokens: Tensor) -> Iterator[None]:
        """Name the map by which a model finds no token, or its lack of room for the positions."""
        try:
            yield
        except IndexError as error:
            if tokens.shape[1] > 1 and self._embeds_each(tokens):
                raise InputError(
                    "inputs",
                    expected="as many positions as the model has places for",
                    given=f"{tokens.shape[1]} positions",
                    fix=f"Shorten the input: embedding it, the model says {str(error)!r}.",
                ) from error
            raise InputError(
                "tokens",
                expected="tokens of the model's own vocabulary",
                given="the task's as they are" if self.tokens is None else _spelled(self.tokens),
                fix=f"Check the map: looking them up, the model says {str(error)!r}.",
            ) from error

    def _embeds_each(self, tokens: Tensor) -> bool:
        """Whether the model embeds each token of an input by itself."""
        try:
            self.model.embed(tokens.unique()[:, None])
        except IndexError:
            return False
        return True

    def _answers(self, logits: Tensor) -> Tensor:
        if self.answers is None:
            return logits
        if self._last_answer >= logits.shape[-1]:
            raise InputError(
                "answers",
                expected=f"outputs of the model, from 0 to {logits.shape[-1] - 1}",
                given=_spelled(self.answers),
                fix="Pass the model's output for each answer class of the task.",
            )
        return logits[..., self.answers]


def _table(name: str, numbers: Any) -> Tensor:
    """A map as a tensor; raise unless it is one. Of answers there are two or more."""
    least = 2 if name == "answers" else 1
    try:
        table = torch.as_tensor(numbers)
    except (TypeError, ValueError, RuntimeError):  # text, None, lists of lists
        table = torch.empty(0)
    if table.dtype in TOKEN_TYPES and table.ndim == 1 and len(table) >= least and table.min() >= 0:
        return table.long()
    raise InputError(
        name,
        expected=f"a list of {least} or more of the model's own tokens, one for each of the task's",
        given=_spelled(numbers),
        fix="Pass e.g. [tokenizer.convert_tokens_to_ids(word) for word in words].",
    )


def _spelled(numbers: Any) -> str:
    return reprlib.repr(numbers.tolist() if isinstance(numbers, torch.Tensor) else numbers)


def fold_vocabulary(
    model: LoopedTransformer,
    *,
    tokens: Sequence[int] | None = None,
    answers: Sequence[int] | None = None,
) -> LoopedTransformer:
    r"""The model with the rows of embedding and unembedding that a task's words have.

    It computes what :class:`~loopinterp.models.WithVocabulary` does, and keeps its hooks:

    .. math:: E'_k = E_{\text{tokens}[k]}, \qquad U'_k = U_{\text{answers}[k]}

    Args:
        model: A model with a vocabulary of its own, as
            :func:`~loopinterp.models.convert_model` gives.
        tokens: The model's token for each token of the task, from 0 on; as they are if None.
        answers: The model's output for each answer class of the task; as they are if None.

    Returns:
        Another model; an unembedding that was tied to the embedding no longer is. It has no
        :attr:`task` yet, and the same loops.

    Raises:
        InputError: what is no ``LoopedTransformer``, a list that is none of its tokens, or tokens
            for a model of features.

    Example:
        >>> import torch
        >>> from loopinterp.models import LoopedTransformerConfig
        >>> config = LoopedTransformerConfig(d_model=8, n_heads=2, d_vocab=100, d_vocab_out=100)
        >>> theirs = LoopedTransformer(config)
        >>> ours = fold_vocabulary(theirs, tokens=[48, 49, 2], answers=[48, 49])
        >>> said = theirs(torch.tensor([[2, 48, 49]]), n_loops=3)[..., [48, 49]]
        >>> torch.allclose(ours(torch.tensor([[2, 0, 1]]), n_loops=3), said, atol=1e-6)
        True
    """
    if type(model) is not LoopedTransformer:
        raise InputError(
            "model",
            expected="a LoopedTransformer itself",
            given=f"a {type(model).__name__}",
            fix="Wrap any other model in WithVocabulary.",
        )
    need_plain(model, "fold_vocabulary", saved=True)
    config, words = model.config, WithVocabulary(model, tokens=tokens, answers=answers)
    changes: dict[str, Any] = {}
    rows: dict[str, Tensor] = {}
    if words.tokens is not None:
        if config.d_vocab is None:
            raise InputError(
                "tokens", expected="none, as the model reads features", given="some", fix="Omit it."
            )
        check_tokens(words.tokens[None], config.d_vocab, "Name tokens that the model has.")
        changes["d_vocab"] = len(words.tokens)
        rows["embedding."] = words.tokens
        if config.digit_tokens:
            which = words.tokens.tolist()
            digits = (k for k, token in enumerate(which) if token in config.digit_tokens)
            changes["digit_tokens"] = tuple(digits)
    if words.answers is not None:
        check_tokens(words.answers[None], config.d_vocab_out, "Name outputs that the model has.")
        changes["d_vocab_out"] = len(words.answers)
        rows["unembedding."] = words.answers
    # Tied, the two would have to have the same rows.
    changes |= {"tie_unembed": False} if rows and config.tie_unembed else {}
    folded = LoopedTransformer(config.replace(**changes)).to(model.device, model.dtype)
    chosen = {
        name: next((x[some] for start, some in rows.items() if name.startswith(start)), x)
        for name, x in model.state_dict().items()
    }
    folded.load_state_dict(chosen)
    folded.n_loops = model.n_loops
    folded.loop_rule = model.loop_rule
    return folded


def fold_final_norm(model: LoopedTransformer) -> LoopedTransformer:
    r"""The model with the weights of its final norm in the unembedding.

    .. math:: W_U' = \operatorname{diag}(w) W_U, \qquad b_U' = b_U + b W_U, \qquad w' = 1, \; b' = 0

    It computes the same. TransformerLens' direct logit attribution reads along ``W_U`` alone, and
    asks for a model like this one.

    Args:
        model: A model with a final norm.

    Returns:
        Another model; an unembedding that was tied to the embedding no longer is.

    Raises:
        InputError: what is no ``LoopedTransformer``, or one without a final norm.

    Example:
        >>> import torch
        >>> from loopinterp.models import LoopedTransformerConfig
        >>> config = LoopedTransformerConfig(d_model=8, n_heads=2, d_vocab=5, d_vocab_out=5)
        >>> model, x = LoopedTransformer(config), torch.tensor([[0, 3, 1]])
        >>> with torch.no_grad():
        ...     _ = model.ln_final.weight.mul_(2), model.ln_final.bias.add_(1)
        >>> torch.allclose(fold_final_norm(model)(x, n_loops=3), model(x, n_loops=3), atol=1e-5)
        True
    """
    if not isinstance(model, LoopedTransformer) or model.ln_final is None:
        raise InputError(
            "model",
            expected="a LoopedTransformer with a final norm",
            given=f"a {type(model).__name__}",
            fix="Leave other models as they are: there is nothing to fold.",
        )
    need_plain(model, "fold_final_norm", saved=True)
    weight, bias = model.ln_final.weight, model.ln_final.bias
    has_bias = model.config.unembed_bias or bias is not None
    config = model.config.replace(unembed_bias=has_bias, tie_unembed=False)
    folded = LoopedTransformer(config).to(model.device, model.dtype)
    chosen = model.state_dict()
    unembedding = chosen["unembedding.weight"]
    with torch.no_grad():
        chosen["unembedding.weight"] = unembedding * weight
        chosen["ln_final.weight"] = torch.ones_like(weight)
        if has_bias:
            b_U = chosen.get("unembedding.bias", unembedding.new_zeros(len(unembedding)))
            chosen["unembedding.bias"] = b_U if bias is None else b_U + unembedding @ bias
        if bias is not None:
            chosen["ln_final.bias"] = torch.zeros_like(bias)
    folded.load_state_dict(chosen)
    folded.n_loops, folded.loop_rule, folded.task = model.n_loops, model.loop_rule, model.task
    return folded
