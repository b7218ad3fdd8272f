"""The same looped transformer by other weights: a task's tokens, or its final norm, folded in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from loopinterp.errors import InputError
from loopinterp.models.changed_layers import need_plain
from loopinterp.models.looped_transformer import LoopedTransformer
from loopinterp.models.mapped_vocabulary import WithVocabulary
from loopinterp.models.run_inputs import check_tokens

if TYPE_CHECKING:
    from torch import Tensor


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
            own = chosen.get("unembedding.bias", unembedding.new_zeros(len(unembedding)))
            chosen["unembedding.bias"] = own if bias is None else own + unembedding @ bias
        if bias is not None:
            chosen["ln_final.bias"] = torch.zeros_like(bias)
    folded.load_state_dict(chosen)
    folded.n_loops, folded.loop_rule, folded.task = model.n_loops, model.loop_rule, model.task
    return folded
