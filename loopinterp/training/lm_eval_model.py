"""A looped language model in lm-eval, EleutherAI's evaluation harness."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from pydantic import PositiveInt
from torch.nn.utils.rnn import pad_sequence

from loopinterp.core.boundary import checked
from loopinterp.core.errors import InputError, need
from loopinterp.models.generation import stream_tokens
from loopinterp.models.protocol import device_of, need_causal
from loopinterp.models.run import HookedRun

_Scored = tuple[list[int], list[int]]  # tokens that are read, and those after them that are scored


@checked
def lm_eval_model(
    model: HookedRun,
    tokenizer: Any,
    *,
    n_loops: PositiveInt | None = None,
    batch_size: PositiveInt = 8,
    max_length: PositiveInt | None = None,
    max_new_tokens: PositiveInt = 256,
) -> Any:
    """A model for ``lm_eval.simple_evaluate(model=…)``, run for a number of loops.

    Args:
        model: A causal model with hooks.
        tokenizer: A tokenizer of transformers, or any object with ``encode(text,
            add_special_tokens=False)``, ``decode(tokens)``, ``bos_token_id`` and ``eos_token_id``.
        n_loops: Loops for each token; ``model.n_loops`` if None.
        batch_size: Texts in a forward pass, padded on the right.
        max_length: Most tokens of a forward pass; the model's context if it has one. Longer
            texts lose their beginning, or are scored in parts where lm-eval asks for that.
        max_new_tokens: New tokens at most, where a task does not say.

    Raises:
        InputError: If the model is not causal, or the tokenizer has no first or last token.
        ModuleNotFoundError: If lm-eval is not installed (``pip install lm-eval``).

    Source: the interface ``lm_eval.api.model.LM`` of lm-eval 0.4.
    """
    from lm_eval.api.model import LM  # pyright: ignore[reportMissingImports]

    class LoopedLM(LanguageScores, LM):
        pass

    return LoopedLM(model, tokenizer, n_loops, batch_size, max_length, max_new_tokens)


class LanguageScores:
    """The three requests of lm-eval; each request has its arguments in ``args``."""

    def __init__(
        self,
        model: HookedRun,
        tokenizer: Any,
        n_loops: int | None,
        batch_size: int,
        max_length: int | None,
        max_new_tokens: int,
    ) -> None:
        super().__init__()  # lm-eval's model
        need_causal(model)
        context = getattr(model.config, "n_ctx", None)
        if max_length is not None and context is not None and max_length > context:
            expected, fix = f"at most the model's context, {context}", "Leave it out."
            raise InputError("max_length", expected=expected, given=str(max_length), fix=fix)
        self.model, self.tokenizer, self.n_loops = model, tokenizer, n_loops
        self.batch_size, self.max_new_tokens = batch_size, max_new_tokens
        self.max_length = max_length or context
        ends = (getattr(tokenizer, name, None) for name in ("bos_token_id", "eos_token_id"))
        known = [token for token in ends if token is not None]
        expected, fix = "one with bos_token_id or eos_token_id", "Set one of them."
        need(known, "tokenizer", expected, "neither", fix)
        self.first, self.stop = known[0], known[-1]

    @property
    def device(self) -> torch.device:
        return device_of(self.model)

    @property
    def tokenizer_name(self) -> str:
        return str(getattr(self.tokenizer, "name_or_path", type(self.tokenizer).__name__))

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        options = {"tokenize": False, "add_generation_prompt": add_generation_prompt}
        return self.tokenizer.apply_chat_template(chat_history, **options)

    def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
        """Log-probability of each continuation, and whether it is the greedy one."""
        return self._score([self._pair(*request.args) for request in requests])

    def loglikelihood_rolling(self, requests: Sequence[Any]) -> list[float]:
        """Log-probability of each whole text; a long one is scored in parts."""
        parts = [[*self._parts(self._tokens(request.args[0]))] for request in requests]
        scores = iter(self._score([part for of_text in parts for part in of_text]))
        return [sum(next(scores)[0] for _ in of_text) for of_text in parts]

    def generate_until(self, requests: Sequence[Any]) -> list[str]:
        """Text after each context, up to a stopping text or the tokenizer's last token."""
        return [self._text(*request.args) for request in requests]

    def _tokens(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def _pair(self, context: str, continuation: str) -> _Scored:
        """Spaces at the end of a context belong to the continuation, as in lm-eval."""
        bare = context.rstrip()
        before = self._tokens(bare) if bare else []
        scored = self._tokens(context + continuation)[len(before) :]
        expected, fix = f"continuations of at most {self.max_length} tokens", "Skip the task."
        fits, got = len(scored) <= (self.max_length or len(scored)), str(len(scored))
        need(fits, "requests", expected, got, fix)
        return before or [self.first], scored

    def _parts(self, tokens: list[int]) -> Iterator[_Scored]:
        """Each token once; the last part reads as much as fits."""
        read, length = [self.first, *tokens], self.max_length or len(tokens)
        for start in range(0, len(tokens), max(length, 1)):
            end = min(start + length, len(tokens))
            first = max(0, end - length)
            yield read[first : start + 1], tokens[start:end]

    @torch.no_grad()
    def _score(self, pairs: Sequence[_Scored]) -> list[tuple[float, bool]]:
        # Texts of similar length are run together.
        order = sorted(range(len(pairs)), key=lambda k: -len(pairs[k][0]) - len(pairs[k][1]))
        scores: dict[int, tuple[float, bool]] = {}
        for start in range(0, len(order), self.batch_size):
            rows = order[start : start + self.batch_size]
            read = [([*pairs[k][0], *pairs[k][1]])[:-1] for k in rows]
            read = [row[-self.max_length :] if self.max_length else row for row in read]
            tokens = pad_sequence([torch.tensor(row) for row in read], batch_first=True)
            logits = self.model(tokens.to(device_of(self.model)), n_loops=self.n_loops)
            for k, row, of_text in zip(rows, read, logits):
                targets = torch.tensor(pairs[k][1], dtype=torch.int64, device=logits.device)
                # [target, d_vocab_out]: the last logits of the text, which predict its targets
                last = of_text[len(row) - len(targets) : len(row)]
                log_p = last.float().log_softmax(-1).gather(-1, targets[:, None])
                is_greedy = bool((last.argmax(-1) == targets).all())
                scores[k] = float(log_p.double().sum()), is_greedy
        return [scores[k] for k in range(len(pairs))]

    def _text(self, context: str, settings: dict[str, Any]) -> str:
        until = settings.get("until") or []
        stops = [stop for stop in ([until] if isinstance(until, str) else until) if stop]
        n_new = int(settings.get("max_gen_toks") or self.max_new_tokens)
        prompt = self._tokens(context) or [self.first]
        if self.max_length:
            expected = f"fewer new tokens than max_length={self.max_length}"
            fix = "Pass gen_kwargs={'max_gen_toks': …} to lm-eval, or max_new_tokens here."
            need(n_new < self.max_length, "max_gen_toks", expected, str(n_new), fix)
            prompt = prompt[n_new - self.max_length :]
        options: dict[str, Any] = {"temperature": 0.0}
        if settings.get("do_sample"):
            options = {"temperature": float(settings.get("temperature") or 1.0)}
            options |= {name: settings[name] for name in ("top_k", "top_p") if settings.get(name)}
        tokens: list[int] = []
        text = ""
        for token in stream_tokens(
            self.model, [prompt], max_new_tokens=n_new, n_loops=self.n_loops, **options
        ):
            if int(token) == self.stop:
                break
            tokens.append(int(token))
            text = self.tokenizer.decode(tokens)
            if any(stop in text for stop in stops):
                break
        return text[: min([len(text), *(text.find(s) for s in stops if s in text)])]
