"""Which functions of TransformerLens work on a looped model: tried out, and written as a table.

    python -m tests.models.transformer_lens_table   # writes it into docs/results/transformerlens.md

Each function runs on five models. On a plain looped model, with the weights of its final norm
folded or not, its result must equal, to 1e-5, that on an untied GPT-2 in TransformerLens' bridge
with the same weights in every layer. With an injection and a loop norm it must equal that on a
naive model written out loop by loop. A model with sandwich norms and an adapter have no second
implementation with these names: there it runs, or is refused.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from transformer_lens import head_detector, patching
from transformer_lens.ActivationCache import ActivationCache
from transformer_lens.model_bridge import TransformerBridge
from transformer_lens.SVDInterpreter import SVDInterpreter
from transformer_lens.tools import analysis
from transformer_lens.tools.analysis.attribution_patching import EdgeAttributionConfig

from loopinterp.adapters import adapt
from loopinterp.core.errors import InputError
from loopinterp.models import LoopedTransformer, LoopedTransformerConfig
from tests.adapters.published import hrm_text
from tests.models.peers.bridged_gpt2 import bridged_gpt2
from tests.models.peers.naive import NaiveLooped

if TYPE_CHECKING:
    from torch import Tensor

N_LOOPS, TOLERANCE = 2, 1e-5
PAGE = Path(__file__).parents[2] / "docs" / "results" / "transformerlens.md"
START, END = "<!-- table -->\n", "<!-- end of table -->"
KINDS = ("plain", "unfolded", "sandwich", "injected", "adapter")
COMPARED = ("plain", "injected")
"""Those of which every activation and gradient is compared with another implementation."""
REFUSALS = (InputError, ValueError, NotImplementedError, AssertionError)
"""Errors that say why: ours, and those that TransformerLens raises; any other is a fault."""


@dataclass(frozen=True)
class Setting:
    """A model with a clean and a corrupted input, and what it did on both."""

    model: Any
    clean: Tensor
    corrupted: Tensor
    clean_cache: ActivationCache
    corrupted_cache: ActivationCache

    @staticmethod
    def metric(logits: Tensor) -> Tensor:
        """Logit difference at the last position."""
        return (logits[:, -1, 1] - logits[:, -1, 0]).mean()

    def answer(self, tokens: Tensor) -> Tensor:
        """Logits at the last position."""
        return self.model(tokens)[:, -1]


@dataclass(frozen=True)
class Check:
    """One function, how it is tried, and why it does or does not work."""

    section: str
    name: str
    run: Callable[[Setting], Any]
    note: str = ""


SECTIONS = {
    "cache": "`ActivationCache` (a `LoopedCache` is one)",
    "patching": "`transformer_lens.patching`",
    "tools": "Other tools of TransformerLens",
}
_DIRECT = "Refused where a norm or gate stands between a head or neuron and the stream."
_WHOLE_STREAM = "Tried with `apply_ln=True`, which is refused until the final norm is folded. With \
an injection or a loop norm the stream is not a plain sum of sublayer outputs; `decompose_loop` \
decomposes one loop there."
_PLUS_REST = (
    f"{_DIRECT} What an injection or a loop norm adds is in the remainder, not in the stack."
)
_UNFOLDED = "Reads along `W_U` alone: refused until the final norm's weight and bias are folded \
into the unembedding, as `fold_final_norm(model)` does."
_OTHER_NORMS = "Also refused with a loop norm or post norms, because no part reaches the final \
norm unchanged. `cache.logit_attribution` goes through every norm, weights and biases included, at \
any loop."
_SSM = "There are no state-space layers in a looped transformer, as in the untied one."
_EDGES = "Needs a stream that is the sum of the token embedding and what heads and MLPs write. \
`loopinterp.edges.edge_study` knows norms and injections."
_PATHS = "Gives each head its own copy of the stream while it runs (`use_split_qkv_input`). Adds a \
head's output to later streams unchanged. Post norms and a loop norm change it, so it is refused \
there; `loopinterp.edges.path_patching` goes through these norms."
_FORKS = "Gives each head its own copy of the stream while it runs (`use_split_qkv_input`)."


def _first(cache: ActivationCache) -> ActivationCache:
    return cache.apply_slice_to_batch_dim((0, 1))


def _shared(names: Iterable[str]) -> list[str]:
    """The names that both models know, in one order."""
    return sorted(shared_names() & set(names))


def _attrs(s: Setting) -> Any:
    right, wrong = torch.tensor([1, 2, 3, 4]), torch.tensor([0, 0, 0, 0])
    heads: Any = s.clean_cache.stack_head_results()
    return s.clean_cache.logit_attrs(heads, tokens=right, incorrect_tokens=wrong)


def _toggle(s: Setting) -> Any:
    before, seen = torch.is_grad_enabled(), []
    try:
        for mode in (False, True):
            s.clean_cache.toggle_autodiff(mode)
            seen.append(torch.is_grad_enabled())
    finally:
        torch.set_grad_enabled(before)
    return seen


_SITE = "blocks.2.hook_resid_pre"


def _after(cache: ActivationCache, method: str) -> ActivationCache:
    getattr(cache, method)()
    return cache


def _last(s: Setting) -> Tensor:
    return torch.full((len(s.clean),), s.clean.shape[1] - 1)


def _interchange(s: Setting) -> tuple[Any, ...]:
    basis = analysis.random_basis(s.model.cfg.d_model, 4, seed=0)
    source = s.clean_cache[_SITE][:, -1]
    return s.model, _SITE, analysis.SubspaceInterchange(basis), s.corrupted, source, s.answer


def _das(s: Setting) -> Any:
    with torch.enable_grad():
        result = analysis.fit_das(
            s.model,
            _SITE,
            s.corrupted,
            s.clean,
            torch.tensor([0, 1, 1, 0]),
            s.answer,
            rank=2,
            base_positions=_last(s),
            source_positions=_last(s),
            epochs=1,
        )
    return result.losses


def _attribution(s: Setting, granularity: Any) -> Any:
    config = EdgeAttributionConfig(granularity=granularity)
    with torch.enable_grad():
        scores = analysis.attribution_patch(s.model, s.clean, s.corrupted, s.metric, config)
    return {str(node): torch.tensor(score) for node, score in scores.node_scores.items()}


def _faithfulness(s: Setting) -> Any:
    pair = s.clean[:1], s.corrupted[:1]
    with torch.enable_grad():
        config = EdgeAttributionConfig(granularity="edge")
        scores = analysis.attribution_patch(s.model, *pair, s.metric, config).edge_scores
    circuit = [edge for number, edge in enumerate(scores) if number % 7 == 0]
    return analysis.faithfulness(s.model, *pair, s.metric, circuit).recovered


def _by_head(s: Setting) -> Any:
    if isinstance(s.model, TransformerBridge):
        heads: Any = s.clean_cache.stack_head_results(pos_slice=-1, incl_remainder=True)
        return s.clean_cache.logit_attrs(heads, tokens=1, pos_slice=-1)
    result = analysis.direct_logit_attribution(
        s.model, answer_tokens=1, unit="head", pos=-1, cache=s.clean_cache
    )
    return result.attribution


CACHE = {
    "__getitem__": (lambda s: [s.clean_cache["resid_post", -1], s.clean_cache["pattern", 2]], ""),
    "__iter__": (lambda s: _shared(s.clean_cache), ""),
    "__len__": (lambda s: len(s.clean_cache) > 0, ""),
    "accumulated_resid": (
        lambda s: [
            s.clean_cache.accumulated_resid(incl_mid=True, return_labels=True),
            s.clean_cache.accumulated_resid(layer=3, apply_ln=True),
            s.clean_cache.accumulated_resid(apply_ln=True, pos_slice=-1),
        ],
        "Layers of all loops in a row. With a loop norm, each layer's output before that norm. "
        "Tried with `apply_ln=True`, which is refused until the final norm is folded; without it, "
        "it works everywhere.",
    ),
    "apply_ln_to_stack": (
        lambda s: s.clean_cache.apply_ln_to_stack(s.clean_cache.accumulated_resid(), layer=3),
        "At the final norm (`layer=-1`) it is refused until that norm is folded "
        "(`fold_final_norm(model)`), because `W_U` alone would ignore the norm's weights.",
    ),
    "apply_slice_to_batch_dim": (
        lambda s: s.clean_cache.apply_slice_to_batch_dim((1, 3))["resid_mid", 3],
        "",
    ),
    "compute_head_results": (
        lambda s: _after(_first(s.clean_cache), "compute_head_results")["result", 3, "attn"],
        _DIRECT,
    ),
    "compute_ssm_effective_attention": (
        lambda s: _without_layers(s.clean_cache.compute_ssm_effective_attention),
        _SSM,
    ),
    "compute_ssm_state": (lambda s: _without_layers(s.clean_cache.compute_ssm_state), _SSM),
    "decompose_resid": (
        lambda s: s.clean_cache.decompose_resid(return_labels=True, apply_ln=True),
        _WHOLE_STREAM,
    ),
    "get_full_resid_decomposition": (
        lambda s: s.clean_cache.get_full_resid_decomposition(return_labels=True, apply_ln=True),
        _WHOLE_STREAM,
    ),
    "get_neuron_results": (
        lambda s: s.clean_cache.get_neuron_results(3, pos_slice=-1),
        _DIRECT,
    ),
    "items": (lambda s: _shared(name for name, _ in s.clean_cache.items()), ""),
    "keys": (lambda s: _shared(s.clean_cache.keys()), ""),
    "logit_attrs": (
        _attrs,
        f"{_UNFOLDED} {_OTHER_NORMS}",
    ),
    "logit_lens": (
        lambda s: s.clean_cache.logit_lens(positions=None).values,
        "Refused until the final norm is folded. With a loop norm the final norm does not read a "
        'layer\'s output: use `return_type="all_logits"`, the readout of each loop.',
    ),
    "remove_batch_dim": (lambda s: _first(s.clean_cache).remove_batch_dim()["resid_pre", 2], ""),
    "ssm_layers": (lambda s: s.clean_cache.ssm_layers(), "Always empty."),
    "stack_activation": (
        lambda s: s.clean_cache.stack_activation("pattern"),
        "`stack` also gives the loop axis, and activations that occur once per loop.",
    ),
    "stack_head_results": (
        lambda s: s.clean_cache.stack_head_results(incl_remainder=True, return_labels=True),
        _PLUS_REST,
    ),
    "stack_neuron_results": (
        lambda s: s.clean_cache.stack_neuron_results(3, incl_remainder=True, return_labels=True),
        _PLUS_REST,
    ),
    "to": (lambda s: _first(s.clean_cache).to("cpu")["resid_post", 3], "Also casts: `dtype=`."),
    "toggle_autodiff": (_toggle, "Switches autograd for all of PyTorch; avoid it."),
    "values": (lambda s: len(list(s.clean_cache.values())) == len(s.clean_cache), ""),
}

TOOLS = {
    "logit_lens": (
        lambda s: analysis.logit_lens(s.model, s.clean, positions=None).values,
        "Refused until the final norm is folded, and if logits are not read from the last layer's "
        "output, as with a loop norm.",
    ),
    "logit_readout": (
        lambda s: analysis.logit_readout(s.model, s.clean_cache["resid_post", 3]).values,
        "With a loop norm, give it states after that norm.",
    ),
    "direct_logit_attribution": (
        _by_head,
        f"By head, from a cache; compared with `logit_attrs` of the bridge. {_UNFOLDED} "
        f"{_OTHER_NORMS}",
    ),
    "attribution_patch (nodes)": (
        lambda s: _attribution(s, "node"),
        "Gradients of every loop.",
    ),
    "attribution_patch (edges)": (lambda s: _attribution(s, "edge"), _EDGES),
    "faithfulness": (lambda s: _faithfulness(s), _EDGES),
    "collect_activations": (
        lambda s: analysis.collect_activations(
            s.model, _SITE, s.clean, s.answer, positions=_last(s)
        ),
        "Each hook fires once, because each loop has its own.",
    ),
    "run_with_intervention": (
        lambda s: analysis.run_with_intervention(*_interchange(s), positions=_last(s)),
        "",
    ),
    "intervened_logits": (
        lambda s: analysis.intervened_logits(*_interchange(s), positions=_last(s)),
        "",
    ),
    "fit_das": (lambda s: _das(s), "Weights are frozen while it learns, and thawed afterwards."),
    "detect_head": (
        lambda s: head_detector.detect_head(
            s.model,
            s.clean[:1],  # type: ignore[arg-type]
            "previous_token_head",
            cache=_first(s.clean_cache).remove_batch_dim(),
        ),
        "Scores every head at every loop. There is no tokenizer: give it tokens.",
    ),
    "SVDInterpreter": (
        lambda s: [
            SVDInterpreter(s.model).get_singular_vectors(kind, 3, 4, head_index=1).abs()
            for kind in ("OV", "w_in", "w_out")
        ],
        "The same at every loop, as weights are (compared up to sign). It takes for granted that "
        "`d_vocab_out` equals `d_vocab`, as on the plain model here.",
    ),
    "attention_head_subspace_affinity": (
        lambda s: analysis.attention_head_subspace_affinity(s.model, target_role="Q"),
        "Of weights, so the same between any two loops.",
    ),
}


def _patching(name: str) -> Callable[[Setting], Any]:
    function = getattr(patching, name)
    if name == "get_act_patch_direct_path":
        return lambda s: function(
            s.model, s.corrupted, s.clean_cache, s.corrupted_cache, s.metric, 1, 1, verbose=False
        )
    if name == "get_act_patch_direct_path_all_sources":
        return lambda s: function(
            s.model, s.corrupted, s.clean_cache, s.corrupted_cache, s.metric, verbose=False
        )
    if name == "generic_activation_patch":
        return lambda s: function(
            s.model,
            s.corrupted,
            s.clean_cache,
            s.metric,
            patching.layer_pos_patch_setter,
            "mlp_out",
            index_axis_names=("layer", "pos"),
        )
    return lambda s: _patched(name, s)


SWEEPS: dict[str, Any] = {
    name: functools.cache(function)
    for name, function in vars(patching).items()
    if isinstance(function, functools.partial)
}
"""Each sweep of one activation runs once: those of many stack its result."""


def _patched(name: str, s: Setting) -> Any:
    with mock.patch.multiple(patching, **SWEEPS):
        function = getattr(patching, name)
        return function(s.model, s.corrupted, s.clean_cache, s.metric, baseline=False)


def patching_functions() -> list[str]:
    """Every public patching function of the installed TransformerLens."""
    names = [name for name in dir(patching) if name.startswith("get_act_patch")]
    return ["generic_activation_patch", *names]


def cache_methods() -> list[str]:
    """Every public method of ActivationCache."""
    dunders = {"__getitem__", "__iter__", "__len__"}
    return sorted(n for n in vars(ActivationCache) if not n.startswith("_") or n in dunders)


def checks() -> list[Check]:
    """All checks; a method that TransformerLens adds must be given one."""
    checks = [Check("cache", name, *CACHE[name]) for name in cache_methods()]
    for name in patching_functions():
        checks.append(Check("patching", name, _patching(name), _PATHS if "direct" in name else ""))
    return checks + [Check("tools", name, *entry) for name, entry in TOOLS.items()]


@functools.cache
def settings(kind: str) -> tuple[Setting, Setting]:
    """Ours and the other model: a bridged GPT-2, a naive model, or for an adapter itself."""
    if kind == "adapter":
        made_once = adapter_setting()
        return made_once, made_once
    common: dict[str, Any] = {"d_model": 12, "n_heads": 2, "d_vocab": 11}
    common |= {"n_layers": 2, "n_loops": 7}
    if kind in ("plain", "unfolded"):
        config = LoopedTransformerConfig(
            **common,
            d_vocab_out=11,
            positions="absolute",
            n_ctx=9,
            unembed_bias=False,
            act_fn="gelu_new",
        )
    elif kind == "sandwich":
        config = LoopedTransformerConfig(**common, d_vocab_out=5, norm="sandwich")
    else:
        config = LoopedTransformerConfig(
            **common,
            d_vocab_out=5,
            positions="relative",
            relative_window=1,
            attention_window=1,
            injection="input",
            initial_state="zeros",
            loop_norm=True,
        )
    generator = torch.Generator().manual_seed(0)
    looped = LoopedTransformer(config, seed=0).eval()
    with torch.no_grad():
        for parameter in looped.parameters():
            parameter += 0.2 * torch.randn(parameter.shape, generator=generator)
    clean, corrupted = torch.randint(0, 11, (2, 4, 2), generator=generator).unbind()
    if kind == "plain":
        looped = fold_of(looped)
    if kind in ("plain", "unfolded"):
        other: Any = bridged_gpt2(looped, N_LOOPS)
    elif kind == "injected":
        other = NaiveLooped(looped, N_LOOPS)
    if kind == "sandwich":
        other = None
    both = []
    for model in filter(None, (looped.unroll(N_LOOPS), other)):
        with torch.no_grad():
            caches = [model.run_with_cache(tokens)[1] for tokens in (clean, corrupted)]
        both.append(Setting(model, clean, corrupted, *caches))
    return both[0], both[-1]


def fold_of(looped: LoopedTransformer) -> LoopedTransformer:
    """The model with the weight 1 and the bias 0 in its final norm; nothing takes up a bias."""
    assert looped.ln_final is not None and looped.ln_final.bias is not None
    with torch.no_grad():
        looped.unembedding.weight *= looped.ln_final.weight
        looped.ln_final.weight.fill_(1)
        looped.ln_final.bias.zero_()
    return looped


def adapter_setting() -> Setting:
    """An adapter of a published model, with two inputs, short: there is nothing to compare with."""
    generator = torch.Generator().manual_seed(0)
    model = adapt(hrm_text.tiny(num_hidden_layers=1, L_cycles=2)).unroll(2)
    clean, corrupted = torch.randint(0, 11, (2, 4, 2), generator=generator).unbind()
    with torch.no_grad():
        caches = [model.run_with_cache(tokens)[1] for tokens in (clean, corrupted)]
    return Setting(model, clean, corrupted, *caches)


@functools.cache
def shared_names() -> frozenset[str]:
    """Hook names that a run of ours and of the bridge have in common."""
    ours, bridge = settings("plain")
    return frozenset(ours.clean_cache.keys()) & frozenset(bridge.clean_cache.keys())


def _without_layers(call: Callable[[], Any]) -> Any:
    """TransformerLens says in a RuntimeError that a model has no layers of a kind: a refusal."""
    try:
        return call()
    except RuntimeError as error:
        raise NotImplementedError(str(error)) from error


def outcome(check: Check, kind: str) -> str:
    """``yes`` where the results are equal, ``no`` where ours refuses, else a fault."""
    ours, other = settings(kind)
    logging.disable(logging.WARNING)
    try:
        with torch.no_grad():
            try:
                actual = check.run(ours)
            except REFUSALS:
                return "no"
            except Exception as error:
                return f"error: {type(error).__name__}"
            if other is ours:
                return "runs"
            return "yes" if same(actual, check.run(other)) else "differs"
    finally:
        logging.disable(logging.NOTSET)


def same(a: Any, b: Any) -> bool:
    """Equal to the tolerance, whatever the function returned."""
    if isinstance(a, torch.Tensor):
        return a.shape == b.shape and torch.allclose(a, b, atol=TOLERANCE, rtol=TOLERANCE)
    if isinstance(a, float):
        return abs(a - b) <= TOLERANCE * max(1.0, abs(a))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b))
    if is_dataclass(a):
        return all(same(getattr(a, f.name), getattr(b, f.name)) for f in fields(a))
    return a == b


def table(outcomes: dict[tuple[str, str], tuple[str, ...]]) -> str:
    """The table in Markdown, a part for each section."""
    lines = []
    for section, title in SECTIONS.items():
        lines += [f"### {title}", "", f"| function | {' | '.join(KINDS)} | why, and what to know |"]
        lines.append("|---" * (len(KINDS) + 2) + "|")
        for check in checks():
            if check.section == section:
                cells = " | ".join(outcomes[check.section, check.name])
                lines.append(f"| `{check.name}` | {cells} | {check.note} |")
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    torch.set_num_threads(1)
    outcomes = {
        (check.section, check.name): tuple(outcome(check, kind) for kind in KINDS)
        for check in checks()
    }
    before, _, rest = PAGE.read_text().partition(START)
    after = rest.partition(END)[2]
    PAGE.write_text(f"{before}{START}\n{table(outcomes)}\n{END}{after}")


if __name__ == "__main__":
    main()
