"""Generation token by token: sampling, hooks and caches, with keys kept for each loop and layer."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import torch
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from loopinterp.core.boundary import checked, resolve_device
from loopinterp.core.errors import InputError, check_integer
from loopinterp.core.settings import Seed
from loopinterp.models.addresses import Index
from loopinterp.models.cache import LoopedCache
from loopinterp.models.positions import check_length
from loopinterp.models.protocol import (
    TOKEN_TYPES,
    check_dtype,
    check_ends,
    check_loops,
    check_tokens,
    device_of,
    need_causal,
    need_model,
    refuse,
    spell,
)
from loopinterp.models.run import HookedRun
from loopinterp.models.stopped_run import StoppingRule
from loopinterp.models.stopping import Fixed, LengthLine
from loopinterp.models.token_runs import CachedRun, RecomputedRun, TokenRecorder, TokenStops
from loopinterp.models.transformer import LoopedTransformer

if TYPE_CHECKING:
    from jaxtyping import Int, Integer

    from loopinterp.models.protocol import LoopedModel

_Share = Annotated[float, Field(gt=0, le=1)]


@torch.no_grad()
@checked
def generate(
    model: LoopedModel | Any,
    prompts: Integer[Tensor, "batch pos"] | Sequence[Sequence[int]],
    *,
    max_new_tokens: PositiveInt,
    n_loops: int | Int[Tensor, " batch"] | None = None,
    temperature: NonNegativeFloat = 0.0,
    top_k: PositiveInt | None = None,
    top_p: _Share | None = None,
    seed: Seed = 0,
    stop_token: NonNegativeInt | Sequence[NonNegativeInt] | None = None,
    attention_mask: Tensor | None = None,
    position_offset: int | Int[Tensor, " batch"] = 0,
    fwd_hooks: Iterable[tuple[Any, Callable[..., Any]]] = (),
    use_cache: bool = True,
    on_token: Callable[[Tensor], Any] | None = None,
) -> Int[Tensor, "batch new"]:
    r"""Continue each prompt, one token at a time: greedily, or by sampling.

    .. math::
        x_{p+1} \sim \operatorname{softmax}(\operatorname{readout}(h_T)_p \,/\, \text{temperature}),
        \qquad h_{t+1} = \operatorname{step}(h_t, \operatorname{embed}(x_0 \dots x_p))

    A :class:`~loopinterp.models.LoopedTransformer` and most adapters keep keys and values for each
    loop and layer, so a token costs one position (in half precision, rounding may choose another
    likely token than a rerun). Other models rerun the whole sequence.

    Hooks fire on the positions that are run: those of the prompt, then the one of each new token.
    The hook ``tokens.3.loops.2.blocks.0.hook_resid_post`` sees one position only, whose logits
    choose new token 3 (from 0).

    An initial ``noise`` is drawn once, for the prompt with all new tokens; a rerun draws the same
    if ``d_model`` is a multiple of 16.

    Args:
        model: A causal looped model whose answers are its input tokens.
        prompts: Tokens ``[batch, pos]``, or lists of tokens of any lengths.
        n_loops: Loops for each token, or a number for each example; ``model.n_loops`` if None.
        temperature: 0 takes the likeliest token.
        top_k: Sample among the k likeliest tokens.
        top_p: Sample among the likeliest tokens that hold this share of the probability.
        seed: Samples are those of transformers' ``generate`` after ``torch.manual_seed(seed)``.
        stop_token: Token that ends an example, or several.
        attention_mask: 0 where a prompt is padded, on either side, and 1 elsewhere.
        position_offset: Added to abacus positions: one number, or one for each example.
        fwd_hooks: As for ``model.run_with_hooks``; each new position is changed once, and later
            tokens attend to the changed one.
        use_cache: False always reruns the whole sequence, and fires hooks on all of it.
        on_token: Called with each new token of all examples ``[batch]``.

    Returns:
        The new tokens, as many as the longest answer has; ended examples are filled with the
        first ``stop_token``.

    Raises:
        InputError: If the new tokens exceed the model's context, or a logit is NaN.
        HookError: If a hook's name matches nothing, or it returns another shape.

    Example:
        >>> from loopinterp.models import LoopedTransformerConfig
        >>> config = LoopedTransformerConfig(d_model=16, n_heads=2, d_vocab=5, d_vocab_out=5)
        >>> model = LoopedTransformer(config, seed=0)
        >>> generate(model, [[1, 2], [3, 0, 4]], n_loops=3, max_new_tokens=4).shape
        torch.Size([2, 4])
    """
    run = _open(model, prompts, n_loops, max_new_tokens, attention_mask, position_offset, use_cache)
    choose = _sampler(run.tokens.device, temperature, top_k, top_p, seed)
    with run.hooks(fwd_hooks):
        return run.write(max_new_tokens, choose, _stops(model, stop_token), on_token)


@checked
def stream_tokens(
    model: LoopedModel | Any,
    prompts: Integer[Tensor, "batch pos"] | Sequence[Sequence[int]],
    *,
    max_new_tokens: PositiveInt,
    n_loops: int | Int[Tensor, " batch"] | None = None,
    temperature: NonNegativeFloat = 0.0,
    top_k: PositiveInt | None = None,
    top_p: _Share | None = None,
    seed: Seed = 0,
    stop_token: NonNegativeInt | Sequence[NonNegativeInt] | None = None,
    attention_mask: Tensor | None = None,
    position_offset: int | Int[Tensor, " batch"] = 0,
    use_cache: bool = True,
) -> Generator[Tensor, None, None]:
    """The new tokens of :func:`generate` one by one, as an iterator that may be left early.

    Each is computed on demand, with the hooks that are on then.

    Yields:
        The next token of each example ``[batch]``.

    Example:
        >>> from loopinterp.models import LoopedTransformerConfig
        >>> config = LoopedTransformerConfig(d_model=16, n_heads=2, d_vocab=5, d_vocab_out=5)
        >>> model = LoopedTransformer(config, seed=0)
        >>> tokens = stream_tokens(model, [[1, 2]], n_loops=3, max_new_tokens=4)
        >>> torch.stack([next(tokens), *tokens], 1).shape
        torch.Size([1, 4])
    """
    run = _open(model, prompts, n_loops, max_new_tokens, attention_mask, position_offset, use_cache)
    choose = _sampler(run.tokens.device, temperature, top_k, top_p, seed)
    return run.choices(max_new_tokens, choose, _stops(model, stop_token))


@torch.no_grad()
@checked
def generate_by_rule(
    model: LoopedModel | Any,
    prompts: Integer[Tensor, "batch pos"] | Sequence[Sequence[int]],
    rule: StoppingRule | Sequence[NonNegativeInt],
    *,
    max_new_tokens: PositiveInt,
    n_loops: PositiveInt | None = None,
    temperature: NonNegativeFloat = 0.0,
    top_k: PositiveInt | None = None,
    top_p: _Share | None = None,
    seed: Seed = 0,
    stop_token: NonNegativeInt | Sequence[NonNegativeInt] | None = None,
    attention_mask: Tensor | None = None,
    position_offset: int | Int[Tensor, " batch"] = 0,
    use_cache: bool = True,
) -> tuple[Int[Tensor, "batch new"], Int[Tensor, "batch new"]]:
    """As :func:`generate`; each new token is read after a number of loops of its own.

    A rule sees the position that chooses the token, and its state after each loop. All ``n_loops``
    loops run nevertheless, for the keys and values that later tokens read, as in the published
    Ouro. So a token's loops affect later tokens only through the token itself and a coda, which
    reads the state where its token stopped.

    Args:
        rule: An online stopping rule, such as ``GateAbove(model.exit_probability, 0.5,
            cumulated=True)`` of Ouro; or loops for each new token.

    Returns:
        The new tokens, and the loops that each was read after.

    Raises:
        InputError: If the rule is offline, needs T(n) or the length, or reads logits of a model
            with a coda; or for the reasons of :func:`generate`.

    Example:
        >>> from loopinterp.models import LoopedTransformerConfig
        >>> config = LoopedTransformerConfig(d_model=16, n_heads=2, d_vocab=5, d_vocab_out=5)
        >>> model = LoopedTransformer(config, seed=0)
        >>> generate_by_rule(model, [[1, 2]], [3, 1, 2], n_loops=3, max_new_tokens=3)[1]
        tensor([[3, 1, 2]])
    """
    run = _open(model, prompts, n_loops, max_new_tokens, attention_mask, position_offset, use_cache)
    rules = _rules(rule, run.n_loops, max_new_tokens)
    coda = isinstance(model, HookedRun) and model.site_map.n_coda > 0
    run.stops = TokenStops(rules, run.n_loops, reads=not coda)
    choose = _sampler(run.tokens.device, temperature, top_k, top_p, seed)
    new = run.write(max_new_tokens, choose, _stops(model, stop_token), None)
    return new, torch.stack(run.stops.loops, 1)


def _rules(rule: Any, n_loops: int, n_new: int) -> list[StoppingRule]:
    if not isinstance(rule, Sequence):
        rule.horizon(n_loops, None)  # refuses rules that need T(n)
        if rule.tolerance is None or isinstance(rule, LengthLine):
            expected, fix = "an online rule of states or logits", "Pass for example GateAbove."
            raise InputError("rule", expected=expected, given=repr(rule), fix=fix)
        return [rule]
    if len(rule) != n_new:
        expected, fix = f"loops for each of {n_new} new tokens", "Pass as many numbers."
        raise InputError("rule", expected=expected, given=f"{len(rule)} numbers", fix=fix)
    return [Fixed(check_integer("rule", loops, least=0, most=n_loops)) for loops in rule]


@torch.no_grad()
@checked
def generate_with_cache(
    model: LoopedModel | Any,
    prompts: Integer[Tensor, "batch pos"] | Sequence[Sequence[int]],
    *,
    max_new_tokens: PositiveInt,
    names_filter: str | Iterable[Any] | Callable[[str], bool] | None = None,
    loops: Index = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | str | None = None,
    n_loops: int | Int[Tensor, " batch"] | None = None,
    temperature: NonNegativeFloat = 0.0,
    top_k: PositiveInt | None = None,
    top_p: _Share | None = None,
    seed: Seed = 0,
    stop_token: NonNegativeInt | Sequence[NonNegativeInt] | None = None,
    attention_mask: Tensor | None = None,
    position_offset: int | Int[Tensor, " batch"] = 0,
    fwd_hooks: Iterable[tuple[Any, Callable[..., Any]]] = (),
    use_cache: bool = True,
    on_token: Callable[[Tensor], Any] | None = None,
) -> tuple[Int[Tensor, "batch new"], LoopedCache]:
    """As :func:`generate`, with the activations behind each new token, at every loop and layer.

    Position k of the cache is the position whose logits chose new token k. Keys are those of the
    sequence with all new tokens; at later keys, a pattern is 0 and scores are minus infinity.

    Args:
        names_filter, loops, device, dtype: As for ``model.run_with_cache``.

    Returns:
        The new tokens, and their cache ``[batch, new, …]``.

    Raises:
        InputError: If the model has no hooks, or for the reasons of :func:`generate`.
        HookError: If the filter keeps nothing.

    Example:
        >>> from loopinterp.models import LoopedTransformerConfig
        >>> config = LoopedTransformerConfig(d_model=16, n_heads=2, d_vocab=5, d_vocab_out=5)
        >>> model = LoopedTransformer(config, seed=0)
        >>> _, cache = generate_with_cache(model, [[1, 2, 4]], n_loops=3, max_new_tokens=4)
        >>> cache.stack("resid_post").shape  # loop, batch, new token, d_model
        torch.Size([3, 1, 4, 16])
    """
    if not isinstance(model, HookedRun):
        got, fix = type(model).__name__, "Pass it to loopinterp.adapters.adapt first."
        raise InputError("model", expected="a model with hooks", given=got, fix=fix)
    run = _open(model, prompts, n_loops, max_new_tokens, attention_mask, position_offset, use_cache)
    choose = _sampler(run.tokens.device, temperature, top_k, top_p, seed)
    book = model.addresses(run.n_loops)
    fires = [book.addresses[name] for name in book.select(names_filter, loops)]
    place = None if device is None else resolve_device(device)
    run.recorder = TokenRecorder(run, place, check_dtype(dtype))
    run.recorded = [address for address in fires if address.pos_axis is not None]
    with run.hooks(fwd_hooks):
        new = run.write(max_new_tokens, choose, _stops(model, stop_token), on_token)
    return new, run.recorder.cache()


def _sampler(
    device: torch.device, temperature: float, top_k: int | None, top_p: float | None, seed: int
) -> Callable[[Tensor], Tensor]:
    if not temperature:
        fix = "Pass temperature=1.0 to sample."
        refuse({"top_k": top_k, "top_p": top_p}, "none at temperature 0", fix)
        return lambda logits: logits.argmax(-1)
    from transformers.generation import logits_process as warpers

    warped: list[Any] = [warpers.TemperatureLogitsWarper(float(temperature))]
    warped += [] if top_k is None else [warpers.TopKLogitsWarper(top_k)]
    warped += [] if top_p is None else [warpers.TopPLogitsWarper(float(top_p))]
    generator = torch.Generator(device).manual_seed(seed)

    def sample(logits: Tensor) -> Tensor:
        scores = logits.float()
        for warp in warped:
            scores = warp(None, scores)
        return torch.multinomial(scores.softmax(-1), 1, generator=generator)[:, 0]

    return sample


def _stops(model: Any, stop_token: int | Sequence[int] | None) -> list[int]:
    listed = [] if stop_token is None else stop_token
    stops = [listed] if isinstance(listed, int) else [*listed]
    if isinstance(model, HookedRun):
        for token in stops:
            check_integer("stop_token", token, most=model.config.d_vocab_out - 1)
    return stops


def _open(
    model: Any,
    prompts: Any,
    n_loops: int | Tensor | None,
    n_new: int,
    mask: Tensor | None,
    offset: int | Tensor,
    use_cache: bool,
) -> RecomputedRun:
    need_model(model)
    need_causal(model)
    tokens, lengths = padded_prompts(prompts, mask, device_of(model))
    filler, longest = 0, int(lengths.max())
    if isinstance(model, HookedRun):
        answers, known = model.config.d_vocab_out, model.config.d_vocab or 0
        fix = "Read the answers of such a model at once: model(inputs)."
        check_integer("d_vocab_out", answers, most=known, fix=fix)
    elif isinstance(offset, Tensor) or offset:
        refuse({"position_offset": offset}, "0 for another kind of model", "Omit it.")
    if isinstance(model, LoopedTransformer):
        config = model.config
        if config.positions == "absolute":
            check_length(longest + n_new - 1, config.n_ctx or 0, "prompt and new tokens")
        # The room for new tokens holds no digit, which would count as the prompt's.
        filler = min({*range(config.d_vocab or 0)} - {*config.digit_tokens}, default=0)
    if n_loops is None:
        if not isinstance(model, HookedRun) or model.loop_rule is not None:
            got = "a rule by the length of the input" if isinstance(model, HookedRun) else "none"
            fix = "Pass n_loops=, loops for each token."
            raise InputError("n_loops", expected="a number of loops", given=got, fix=fix)
        n_loops = model.n_loops
    loops = check_ends(n_loops, tokens) if isinstance(n_loops, Tensor) else check_loops(n_loops)
    tokens = pad(tokens[:, :longest].long(), (0, n_new))
    # Places after each prompt: [batch, pos].
    empty = torch.arange(tokens.shape[1], device=tokens.device) >= lengths[:, None]
    tokens = tokens.masked_fill(empty, filler)
    if isinstance(model, HookedRun):
        model.check_inputs(tokens[:, :longest], position_offset=offset)
    keeps = use_cache and isinstance(model, HookedRun) and model.keeps_keys
    return (CachedRun if keeps else RecomputedRun)(model, tokens, lengths, loops, offset)


def padded_prompts(
    prompts: Any, mask: Tensor | None, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Prompts padded on the right, and their lengths."""
    if not isinstance(prompts, Tensor):
        refuse({"attention_mask": mask}, "none with lists, which have no padding", "Leave it out.")
        rows = [torch.tensor(row) for row in prompts]
        lengths = torch.tensor([len(row) for row in rows], device=device)
        fits = rows and all(len(row) and not row.is_floating_point() for row in rows)
        prompts = pad_sequence(rows, batch_first=True).to(device) if fits else torch.empty(0)
        check_tokens(prompts, sys.maxsize)
        return prompts, lengths
    check_tokens(prompts, sys.maxsize)
    n_pos, places = prompts.shape[1], torch.arange(prompts.shape[1], device=prompts.device)
    if mask is None:
        return prompts, torch.full((len(prompts),), n_pos, device=prompts.device)
    known = (torch.bool, *TOKEN_TYPES)
    if mask.shape != prompts.shape or mask.dtype not in known or mask.device != prompts.device:
        expected, fix = f"ones and zeros like prompts, {spell(prompts)}", "Pass the tokenizer's."
        raise InputError("attention_mask", expected=expected, given=spell(mask), fix=fix)
    lengths, first = (mask != 0).sum(1), (mask != 0).long().argmax(1)
    ends = (first + lengths)[:, None]
    fits = ((places >= first[:, None]) & (places < ends)) == (mask != 0)
    if not bool(fits.all()) or not bool(lengths.all()):
        row = int((~fits.all(1) | (lengths == 0)).nonzero()[0])
        expected, fix = "ones of a whole prompt, in each row", "Pad on the left or the right only."
        got = f"row {row}: {mask[row].long().tolist()}"
        raise InputError("attention_mask", expected=expected, given=got, fix=fix)
    # Each prompt moved to the left end of its row; what is behind it is not read.
    return prompts.gather(1, (places + first[:, None]).clamp(max=n_pos - 1)), lengths
