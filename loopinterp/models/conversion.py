"""Converts other models, a task's vocabulary and folded norms."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import torch
from pydantic import Field, PositiveFloat
from torch import nn

from loopinterp.core.boundary import Loops, checked
from loopinterp.core.errors import InputError, check_integer
from loopinterp.core.text import say
from loopinterp.models.checkpoints import check_tensors
from loopinterp.models.iteration import bind
from loopinterp.models.protocol import (
    TOKEN_TYPES,
    CheckedModel,
    check_tokens,
    declared,
    device_of,
    need_model,
    takes_loop,
)
from loopinterp.models.transformer import LoopedTransformer
from loopinterp.models.weights import need_plain

if TYPE_CHECKING:
    from jaxtyping import Float, Integer
    from torch import Tensor

    from loopinterp.models.config import LoopedTransformerConfig
    from loopinterp.models.iteration import Iteration
    from loopinterp.models.protocol import LoopedModel


@checked
def convert_model(
    original: LoopedModel | Any,
    config: LoopedTransformerConfig,
    weights: Mapping[str, Tensor],
    inputs: Tensor,
    *,
    n_loops: Loops,
    activations: Mapping[str, Tensor] | None = None,
    tolerance: PositiveFloat = 1e-5,
) -> LoopedTransformer:
    """A ``LoopedTransformer`` with given weights, checked against the original model.

    Args:
        original: The original model, with the four methods.
        weights: The weights under the names of ``LoopedTransformer(config).state_dict()``, all of
            one floating-point type; matrices are ``[out, in]``, as in ``torch.nn.Linear``.
        inputs: Inputs on which both must agree, for ``n_loops`` loops.
        activations: The original's activations on these inputs by name or alias (such as
            ``loops.0.blocks.0.attn.hook_pattern``), to locate a difference inside a loop.
        tolerance: Largest difference, relative to the larger of 1 and the tensor's largest number.

    Raises:
        InputError: If the models differ, with the first place (:func:`first_difference`).
    """
    tensors = [x for x in weights.values() if isinstance(x, torch.Tensor)]
    dtype = next((x.dtype for x in tensors if x.is_floating_point()), torch.float32)
    model = LoopedTransformer(config).to(inputs.device, dtype).eval()
    fix = "Rename, transpose, split or cast the original's, or change the configuration."
    check_tensors(weights, model.state_dict(), "weights", fix=fix)
    model.load_state_dict(dict(weights))
    where = first_difference(
        original, model, inputs, n_loops=n_loops, activations=activations, tolerance=tolerance
    )
    if where is not None:
        expected = f"the original's numbers to {tolerance:g}"
        got = f"a difference, first in {where}"
        fix = "Compare the weights used there, or pass activations= to look inside."
        raise InputError("converted model", expected=expected, given=got, fix=fix)
    return model


@dataclasses.dataclass(frozen=True)
class Difference:
    """The first difference between an original model and a converted one.

    Attributes:
        site: ``embed``, ``initial_state``, ``loop t``, ``readout after t loops``, or an activation.
        theirs: The original's number, or its shape where shapes differ.
        place: Index of the number, if shapes agree.
    """

    site: str
    theirs: float | list[int]
    ours: float | list[int]
    place: list[int] | None = None

    def __str__(self) -> str:
        if self.place is None:
            return f"{self.site}: shape {self.theirs} in the original and {self.ours} converted"
        numbers = f"{self.theirs:.6g} in the original and {self.ours:.6g} converted"
        return f"{self.site}: {numbers}, at {self.place}"


@torch.no_grad()
@checked
def first_difference(
    original: LoopedModel | Any,
    converted: LoopedTransformer,
    inputs: Tensor,
    *,
    n_loops: Loops,
    activations: Mapping[str, Tensor] | None = None,
    tolerance: PositiveFloat = 1e-5,
) -> Difference | None:
    """The first difference between a converted model and the original, if any.

    Arguments are those of :func:`convert_model`. Each loop of both starts from the original's
    state.
    """
    need_model(original)
    book = converted.addresses(n_loops)
    expected = {book.resolve_name(name): x for name, x in (activations or {}).items()}
    if outside := [name for name in expected if book.addresses[name].loop is None]:
        fix = "Leave it out: embedding, prelude and readout are compared anyway."
        expected_sites = "activations inside a loop"
        raise InputError("activations", expected=expected_sites, given=outside[0], fix=fix)
    theirs, ours = bind(original, inputs), bind(converted, inputs)

    def compared() -> Iterator[tuple[str, Tensor, Tensor]]:
        yield "embed", theirs.e, ours.e
        yield "initial_state", theirs.h0, ours.h0
        before = theirs.h0
        for loop, h in theirs.run(n_loops):
            if loop:
                step = f"loop {loop - 1}", h, ours.step(before)
                names = [name for name in expected if book.addresses[name].loop == loop - 1]
                if names and _difference(*step, tolerance) is not None:
                    span = {"start_at_loop": loop - 1, "stop_at_loop": loop, "state": before}
                    _, cache = converted.run_with_cache(
                        inputs, n_loops=n_loops, names_filter=names, return_type="state", **span
                    )
                    yield from ((name, expected[name], cache[name]) for name in cache)
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


_Token = Annotated[int, Field(ge=0, lt=2**31)]
_Tokens = Annotated[Sequence[_Token], Field(min_length=1)]
_Answers = Annotated[Sequence[_Token], Field(min_length=2)]


def _of_model(name: str) -> property:
    return property(lambda self: declared(self.model, name), doc=f"``{name}`` of the model.")


class WithVocabulary(nn.Module):
    """A looped model that reads a task's tokens and answers in its classes.

    Args:
        tokens: The model's token for each token of the task; unchanged if None.
        answers: The model's output for each answer class of the task; unchanged if None.

    Example:
        >>> from loopinterp.models import LoopedTransformer, LoopedTransformerConfig
        >>> config = LoopedTransformerConfig(d_model=8, n_heads=2, d_vocab=100, d_vocab_out=100)
        >>> model = WithVocabulary(LoopedTransformer(config), tokens=[48, 49, 2], answers=[48, 49])
        >>> model.readout(model.embed(torch.tensor([[2, 0, 1]]))).shape
        torch.Size([1, 3, 2])
    """

    tokens: Tensor | None
    answers: Tensor | None

    @checked
    def __init__(
        self,
        model: LoopedModel | Any,
        *,
        tokens: _Tokens | None = None,
        answers: _Answers | None = None,
    ) -> None:
        super().__init__()
        need_model(model)
        self.model = model
        for name, numbers in (("tokens", tokens), ("answers", answers)):
            size = declared(model, "d_vocab" if name == "tokens" else "d_vocab_out")
            if numbers is not None and size is not None:
                check_integer(f"largest of {name}", max(numbers), most=size - 1)
            table = None if numbers is None else torch.tensor(numbers, device=device_of(model))
            self.register_buffer(name, table)

    def __repr__(self) -> str:
        shown = {"model": self.model, "tokens": self.tokens, "answers": self.answers}
        return say(type(self).__name__, shown.items())

    reach, reach_before, local_step = map(_of_model, ("reach", "reach_before", "local_step"))
    causal, n_ctx, d_features = map(_of_model, ("causal", "n_ctx", "d_features"))
    loop_rule, repeatable = map(_of_model, ("loop_rule", "repeatable"))
    wrapped = property(lambda self: self.model, doc="The model with a vocabulary of its own.")
    takes_loop = property(lambda self: takes_loop(self.model), doc="Whether its step does.")
    device = property(lambda self: device_of(self.model), doc="Device of the model.")

    @property
    def d_vocab(self) -> int | None:
        """Tokens of the task, if known."""
        return declared(self.model, "d_vocab") if self.tokens is None else len(self.tokens)

    @property
    def d_vocab_out(self) -> int | None:
        """Answer classes of the task, if known."""
        return declared(self.model, "d_vocab_out") if self.answers is None else len(self.answers)

    def embed(self, inputs: Integer[Tensor, "batch pos"]) -> Float[Tensor, "batch pos d_model"]:
        return self.model.embed(self._own_tokens(inputs))

    def initial_state(
        self, e: Float[Tensor, "batch pos d_model"]
    ) -> Float[Tensor, "batch pos d_model"]:
        return self.model.initial_state(e)

    def step(
        self,
        h: Float[Tensor, "batch pos d_model"],
        e: Float[Tensor, "batch pos d_model"],
        loop: int | None = None,
    ) -> Float[Tensor, "batch pos d_model"]:
        return CheckedModel(self.model).step(h, e, loop)

    def readout(
        self, h: Float[Tensor, "batch pos d_model"]
    ) -> Float[Tensor, "batch pos d_vocab_out"]:
        return self._answers(self.model.readout(h))

    def bind(self, inputs: Integer[Tensor, "batch pos"]) -> Iteration:
        bound = bind(self.model, self._own_tokens(inputs))
        return dataclasses.replace(bound, readout=lambda h: self._answers(bound.readout(h)))

    def _own_tokens(self, inputs: Tensor) -> Tensor:
        if self.tokens is not None:
            check_tokens(inputs, len(self.tokens))
            return self.tokens[inputs.long()]
        # An embedding of PyTorch looks up int32 and int64 only.
        return inputs.long() if getattr(inputs, "dtype", None) in TOKEN_TYPES else inputs

    def _answers(self, logits: Tensor) -> Tensor:
        return logits if self.answers is None else logits[..., self.answers]


def fold_vocabulary(
    model: LoopedTransformer,
    *,
    tokens: Sequence[int] | None = None,
    answers: Sequence[int] | None = None,
) -> LoopedTransformer:
    r"""The model with only the rows of embedding and unembedding that a task uses.

    It computes the same as :class:`~loopinterp.models.WithVocabulary`, and has hooks:

    .. math:: E'_k = E_{\text{tokens}[k]}, \qquad U'_k = U_{\text{answers}[k]}

    A tied unembedding becomes untied; the new model has no :attr:`task`.
    """
    _need_ours(model, "fold_vocabulary")
    config, words = model.config, WithVocabulary(model, tokens=tokens, answers=answers)
    changes: dict[str, Any] = {}
    rows: dict[str, Tensor] = {}  # rows of each table, by the start of its names
    if words.tokens is not None:
        if config.d_vocab is None:
            expected = "none, as the model reads features"
            raise InputError("tokens", expected=expected, given="some", fix="Leave them out.")
        changes["d_vocab"] = len(words.tokens)
        rows["embedding."] = words.tokens
        if config.digit_tokens:
            which = words.tokens.tolist()
            digits = (k for k, token in enumerate(which) if token in config.digit_tokens)
            changes["digit_tokens"] = tuple(digits)
    if words.answers is not None:
        changes["d_vocab_out"] = len(words.answers)
        rows["unembedding."] = words.answers
    # Tied, the two would have to have the same rows.
    changes |= {"tie_unembed": False} if rows and config.tie_unembed else {}
    chosen = {
        name: next((x[some] for start, some in rows.items() if name.startswith(start)), x)
        for name, x in model.state_dict().items()
    }
    return _rebuilt(model, config.replace(**changes), chosen)


def fold_final_norm(model: LoopedTransformer) -> LoopedTransformer:
    r"""The same model with the final norm's weights folded into the unembedding.

    .. math:: W_U' = \operatorname{diag}(w) W_U, \qquad b_U' = b_U + b W_U, \qquad w' = 1, \; b' = 0

    TransformerLens' direct logit attribution needs such a model. A tied unembedding becomes untied.
    """
    _need_ours(model, "fold_final_norm")
    if model.ln_final is None:
        fix = "Leave it as it is: there is nothing to fold."
        raise InputError("model", expected="one with a final norm", given="none", fix=fix)
    weight, bias = model.ln_final.weight, model.ln_final.bias  # each [d_model]
    has_bias = model.config.unembed_bias or bias is not None
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
    config = model.config.replace(unembed_bias=has_bias, tie_unembed=False)
    folded = _rebuilt(model, config, chosen)
    folded.task = model.task
    return folded


def _need_ours(model: Any, what: str) -> None:
    if type(model) is not LoopedTransformer:
        got, fix = f"a {type(model).__name__}", "Wrap other models in WithVocabulary."
        raise InputError("model", expected="a LoopedTransformer itself", given=got, fix=fix)
    need_plain(model, what, saved=True)


def _rebuilt(
    model: LoopedTransformer, config: LoopedTransformerConfig, weights: Mapping[str, Tensor]
) -> LoopedTransformer:
    rebuilt = LoopedTransformer(config).to(model.device, model.dtype)
    rebuilt.load_state_dict(weights)
    rebuilt.n_loops, rebuilt.loop_rule = model.n_loops, model.loop_rule
    return rebuilt
