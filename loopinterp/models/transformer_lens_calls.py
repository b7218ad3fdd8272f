"""TransformerLens' calls on a model or adapter: losses, tokens, options.

There is no tokenizer: tokens are numbers, and text is refused.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from loopinterp.core.errors import InputError, check_choice
from loopinterp.models.config import LoopedTransformerConfig
from loopinterp.models.protocol import TOKEN_TYPES, spell

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor
    from transformer_lens.config import TransformerBridgeConfig


@dataclass(frozen=True)
class Needs:
    """Settings that a TransformerLens method needs: allowed values, with words for the error."""

    expected: str
    fix: str
    settings: Mapping[str, tuple[Any, ...]]

    def also(self, **settings: tuple[Any, ...]) -> Needs:
        return replace(self, settings={**self.settings, **settings})

    def check(self, config: Any, method: str) -> None:
        values = {name: getattr(config, name, None) for name in self.settings}
        wrong = [f"{k}={value!r}" for k, value in values.items() if value not in self.settings[k]]
        if not isinstance(config, LoopedTransformerConfig):
            wrong = ["an adapter, whose weights have other names"]
        if wrong:
            raise InputError(method, expected=self.expected, given=", ".join(wrong), fix=self.fix)


DIRECT_WRITES = Needs(
    "heads, neurons and biases that reach the stream without a norm or gate between",
    "Read hook_attn_out and hook_mlp_out, or use a model with norm='pre' or 'none'.",
    {"norm": ("none", "pre")},
)


class TransformerLensCalls(nn.Module):
    config: Any
    task: Any = None  #: the task it was trained on, if known

    @property
    def cfg(self) -> TransformerBridgeConfig:
        """TransformerLens' configuration of a run: ``n_layers`` counts every loop."""
        from transformer_lens.config import TransformerBridgeConfig

        model: Any = self  # device, dtype and site map are those of the class that has weights
        config, sizes = model.config, model.site_map
        return TransformerBridgeConfig(
            d_model=sizes.d_model,
            d_head=sizes.d_head,
            n_heads=sizes.n_heads,
            n_layers=sizes.layers_total(self.n_loops),
            n_ctx=config.n_ctx or 2048,
            d_mlp=sizes.d_mlp,
            d_vocab=config.d_vocab or 1,
            d_vocab_out=config.d_vocab_out,
            attention_dir="causal" if config.causal else "bidirectional",
            device=str(model.device),
            dtype=model.dtype,
            **self.cfg_options(),
        )

    def cfg_options(self) -> dict[str, Any]:
        return {}

    def loss_fn(
        self,
        logits: Float[Tensor, "batch pos d_vocab_out"],
        tokens: Tensor,
        attention_mask: None = None,
        per_token: bool = False,
    ) -> Tensor:
        """Cross-entropy of each next token in nats, ``-log p(x_{i+1} | x_0 … x_i)``, or its mean.

        Args:
            tokens: The inputs ``[batch, pos]``.
            attention_mask: Must be None: runs have no padding.

        Raises:
            InputError: If the model is not causal, its answers are not its tokens, or it has a
                task.
        """
        from transformer_lens.utilities.lm_utils import lm_cross_entropy_loss

        config, task = self.config, self.task
        if config.d_vocab_out != config.d_vocab or not config.causal or task is not None:
            has = f"d_vocab_out={config.d_vocab_out}, d_vocab={config.d_vocab}, {task=}"
            expected = "a causal model that predicts the tokens that it reads"
            fix = "Use F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten())."
            raise InputError("loss of the next token", expected=expected, given=has, fix=fix)
        refuse_options({} if attention_mask is None else {"attention_mask": attention_mask})
        return lm_cross_entropy_loss(logits, tokens.long(), None, per_token)

    def to_tokens(self, tokens: Any, *_: Any, **__: Any) -> Tensor:
        """The tokens, unchanged; text is refused."""
        if isinstance(tokens, torch.Tensor):
            return tokens
        expected, fix = "token indices as a tensor: there is no tokenizer", "Use task.sample(...)."
        raise InputError("tokens", expected=expected, given=repr(tokens), fix=fix)

    def to_single_token(self, token: Any) -> Any:
        return token if isinstance(token, int) else self.to_tokens(token)

    def to_str_tokens(self, tokens: Any, *_: Any, **__: Any) -> list[str]:
        """Each token's number as a label."""
        tensor = torch.as_tensor(self.to_tokens(tokens))
        flat = tensor[0] if tensor.dim() == 2 and len(tensor) == 1 else tensor
        if flat.dim() > 1 or tensor.dtype not in TOKEN_TYPES:
            expected, fix = "the tokens of one example, [pos] or [1, pos]", "Pass tokens[0]."
            raise InputError("tokens", expected=expected, given=spell(tensor), fix=fix)
        return [str(token) for token in flat.reshape(-1).tolist()]

    def to_string(self, tokens: Any, *_: Any, **__: Any) -> str | list[str]:
        """The tokens' numbers, separated by spaces, for each example."""
        tensor = torch.as_tensor(tokens if isinstance(tokens, int) else self.to_tokens(tokens))
        if tensor.dim() == 2:
            return [" ".join(self.to_str_tokens(row)) for row in tensor]
        return " ".join(self.to_str_tokens(tensor))

    def get_token_position(self, token: Any, tokens: Any, mode: str = "first", **_: Any) -> int:
        """The first position of a token in one example, or the last (``mode="last"``)."""
        check_choice("mode", mode, ("first", "last"))
        number = str(int(self.to_single_token(token)))
        places = [k for k, name in enumerate(self.to_str_tokens(tokens)) if name == number]
        if not places:
            expected, fix = "a token of the example", "Look at model.to_str_tokens(tokens)."
            raise InputError("token", expected=expected, given=number, fix=fix)
        return places[0 if mode == "first" else -1]

    def generate(self, prompts: Any, **options: Any) -> Tensor:
        """:func:`~loopinterp.models.generate` with this model."""
        # By name, as generation stands on the models.
        generation = importlib.import_module("loopinterp.models.generation")
        return generation.generate(self, prompts, **options)


def refuse_options(options: Mapping[str, Any]) -> None:
    instead = {  # of options whose absence alone would change the numbers
        "attention_mask": "Leave padding out, or run examples of each length by themselves.",
        "past_kv_cache": "Use model.generate, which keeps keys and values.",
        "start_at_layer": "Use start_at_loop= and state=, or a hook on the stream.",
    }
    for name, value in options.items():
        fix = instead.get(name, "Leave it out; help(model.forward) lists the options.")
        expected = "an option of loopinterp's runs"
        raise InputError(name, expected=expected, given=repr(value), fix=fix)
