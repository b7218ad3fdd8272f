"""Models that accelerate has placed, and quantised ones: the numbers of the plain model.

No second device and no library of quantisation is needed. Weights wait on a disk; a pretended
device computes some layers; a linear layer of integers, and a tensor of them, stand for those of
bitsandbytes and torchao.
"""

from __future__ import annotations

import copy
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from accelerate import dispatch_model
from accelerate.hooks import attach_align_device_hook_on_blocks
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from loopinterp.adapters import PublishedModel, adapt, load_published
from loopinterp.core.errors import InputError
from loopinterp.edges import edge_study
from loopinterp.interventions import InterchangePairs, InterchangeRun, patching_sweep
from loopinterp.models import describe_model, taps
from loopinterp.tasks import Batch
from tests.adapters.kinds import KINDS, tokens_of
from tests.pretend_gpu import DEVICE, pretend_gpu
from tests.refusals import naming

PLACED = ["ouro", "ouro-grouped", "huginn", "hrm_text", "albert", "albert-groups", "albert-states"]
QUANTISED = ["ouro", "ouro-grouped", "huginn", "hrm_text", "albert"]


# Placed by accelerate


def parts_of(model: nn.Module, path: str = "") -> list[str]:
    """Paths that cover all weights: whole layers, and the other modules that hold some."""
    paths = []
    for name, module in model.named_children():
        if isinstance(model, nn.ModuleList) or not [*module.children()]:
            paths.append(path + name)
        else:
            paths += parts_of(module, f"{path}{name}.")
    own = [*model._parameters, *model._buffers]
    return [*paths, *(path + name for name in own)]


def on_disk(model: nn.Module, folder: Path, *, odd: int) -> nn.Module:
    """A copy, whose parts wait on the disk by turns."""
    model = copy.deepcopy(model)
    places: dict[str, Any] = {
        path: ("cpu", "disk")[(k + odd) % 2] for k, path in enumerate(parts_of(model))
    }
    with warnings.catch_warnings():  # buffers that no file holds are no parts to accelerate
        warnings.simplefilter("ignore")
        return dispatch_model(model, places, offload_dir=str(folder))


def over_devices(model: nn.Module, there: Callable[[int], bool]) -> nn.Module:
    """A copy, some of whose parts compute on the pretended device."""
    model = copy.deepcopy(model)
    parts = parts_of(model)
    places = {path: DEVICE if there(k) else "cpu" for k, path in enumerate(parts)}
    stay: dict[str, Any] = dict.fromkeys(places, False)
    attach_align_device_hook_on_blocks(model, execution_device=places, offload=stay)  # type: ignore
    return model


LOOPS: dict[str, Any] = {"n_loops": 2}
"""A second loop shows what the first has left behind."""


def hooked(model: PublishedModel, tokens: Tensor) -> Tensor:
    """Logits after an intervention in the last layer of the first loop."""
    site = model.site("resid_pre", loop=0, layer=-1)
    assert isinstance(site, str)
    return model.run_with_hooks(tokens, fwd_hooks=[(site, lambda x, hook: -2 * x)], **LOOPS)


@pytest.mark.parametrize("odd", [0, 1])
@pytest.mark.parametrize("name", PLACED)
def test_weights_on_the_disk_change_no_number(name: str, odd: int, tmp_path: Path) -> None:
    published, tokens = KINDS[name].build(), tokens_of(name)
    placed = on_disk(published, tmp_path, odd=odd)
    away = [x for x in placed.parameters() if x.device == torch.device("meta")]
    assert away
    plain, model = adapt(published), adapt(placed)
    assert model.device == torch.device("cpu") and model.dtype == plain.dtype
    logits, cache = plain.run_with_cache(tokens, **LOOPS)
    again, recorded = model.run_with_cache(tokens, **LOOPS)
    assert torch.equal(again, logits) and list(recorded) == list(cache)
    assert all(torch.equal(recorded[site], cache[site]) for site in cache)
    assert torch.equal(model(tokens), plain(tokens))
    assert torch.equal(hooked(model, tokens), hooked(plain, tokens))
    assert not torch.equal(hooked(model, tokens), model(tokens, **LOOPS))
    answers = logits.argmax(-1)
    parts = cache.logit_attribution(answers, from_loop=0)
    assert parts.equals(recorded.logit_attribution(answers, from_loop=0))
    if name != "albert":  # of one layer
        stopped = [each(tokens, **LOOPS, stop_at_layer=1) for each in (plain, model)]
        assert torch.equal(*stopped)
    assert all(x.device == torch.device("meta") for x in away)  # nothing stays loaded
    if name not in ("albert", "albert-groups", "huginn"):  # without tied weights, which come apart
        assert describe_model(model) == describe_model(plain)
    grads = ({}, {})
    for each, grad in zip((plain, model), grads):
        backward: dict[str, Any] = {"incl_bwd": True, "loss_fn": lambda x: x.square().sum()}
        _, kept = each.run_with_cache(tokens, **backward, **LOOPS)
        grad.update({site: x for site, x in kept.items() if site.endswith("_grad")})
    assert grads[0] and all(torch.equal(grads[1][site], x) for site, x in grads[0].items())


@pytest.mark.parametrize("name", ["ouro", "huginn", "hrm_text"])
def test_generation_and_interchange_with_weights_on_the_disk(name: str, tmp_path: Path) -> None:
    published, tokens = KINDS[name].build(), tokens_of(name)
    plain, model = adapt(published), adapt(on_disk(published, tmp_path, odd=1))
    options: dict[str, Any] = {"n_loops": 2, "max_new_tokens": 2}
    assert torch.equal(model.generate(tokens, **options), plain.generate(tokens, **options))
    assert torch.equal(interchanged(model, tokens), interchanged(plain, tokens))


def interchanged(model: PublishedModel, tokens: Tensor) -> Tensor:
    batch = Batch(tokens, tokens, torch.full((3,), 6), torch.full((3,), 2))
    pairs = InterchangePairs.of(
        batch,
        base=torch.tensor([0, 1]),
        source=torch.tensor([2, 2]),
        positions=torch.tensor([[3], [2]]),
        loop=torch.tensor([1, 1]),
    )
    return InterchangeRun(model, pairs).interchange()


@pytest.mark.parametrize(
    ("name", "odd"), [("ouro", 0), ("ouro", 1), ("huginn", 0), ("hrm_text", 1)]
)
def test_layers_on_another_device_show_their_activations_on_that_of_the_input(
    name: str, odd: int
) -> None:
    published, tokens = KINDS[name].build(), tokens_of(name)
    plain = adapt(published)
    _, cache = plain.run_with_cache(tokens, **LOOPS)
    with pretend_gpu():
        placed = over_devices(published, lambda k: k > 0 and k % 2 == odd)
        assert {x.device for x in placed.parameters()} == {torch.device("cpu"), DEVICE}
        model = adapt(placed)
        assert model.device == torch.device("cpu")
        logits, recorded = model.run_with_cache(tokens, **LOOPS)
        assert {x.device for x in recorded.values()} == {torch.device("cpu")}
        for site in cache:  # attention on the pretended device has another kernel
            torch.testing.assert_close(recorded[site], cache[site], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(hooked(model, tokens), hooked(plain, tokens))
        options: dict[str, Any] = {"n_loops": 1, "max_new_tokens": 2}
        assert torch.equal(model.generate(tokens, **options), plain.generate(tokens, **options))
        assert torch.equal(interchanged(model, tokens), interchanged(plain, tokens))
        parts = recorded.logit_attribution(logits.argmax(-1), from_loop=0)
        expected = cache.logit_attribution(logits.argmax(-1), from_loop=0)
        assert abs(parts - expected).max() < 1e-5
        stream = model(tokens, stop_at_layer=3)
        torch.testing.assert_close(stream, plain(tokens, stop_at_layer=3), atol=1e-5, rtol=1e-5)


def test_the_memory_of_a_cache_is_that_of_the_device_of_the_inputs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    published, tokens, asked = KINDS["ouro"].build(), tokens_of("ouro"), []
    placed = on_disk(published, tmp_path, odd=1)
    assert next(placed.parameters()).device == torch.device("meta")
    monkeypatch.setattr(taps, "_ALWAYS_FITS", 0)
    monkeypatch.setattr(taps, "_free_bytes", lambda device: asked.append(device) or 1000)
    with naming("cache"):
        adapt(placed).run_with_cache(tokens)
    with pretend_gpu():
        model = adapt(over_devices(published, lambda k: k == 0))  # the embedding alone
        with naming("cache"):
            model.run_with_cache(tokens.to(DEVICE))
        with naming("inputs"):
            model(tokens)
    assert asked == [torch.device("cpu"), DEVICE]


def test_the_model_of_a_users_own_code_may_wait_on_the_disk(tmp_path: Path) -> None:
    published, tokens = KINDS["ouro"].build(), tokens_of("ouro")
    plain = adapt(published, inputs=tokens, repeat="model.layers")
    model = adapt(on_disk(published, tmp_path, odd=1), inputs=tokens, repeat="model.layers")
    runs = [each.run_with_cache(tokens, **LOOPS) for each in (plain, model)]
    (logits, cache), (again, recorded) = runs
    assert torch.equal(again, logits)
    assert all(torch.equal(recorded[site], cache[site]) for site in cache)


def test_placements_that_do_not_run_are_refused(tmp_path: Path) -> None:
    with naming("device_map of the model"):
        adapt(on_disk(KINDS["hrm"].build(), tmp_path, odd=1))
    published, tokens = KINDS["ouro"].build(), tokens_of("ouro")
    model = adapt(on_disk(published, tmp_path, odd=1))
    for move in (lambda: model.to("cpu"), model.half, model.double):
        with naming("model to be moved or cast"):
            move()
    with pretend_gpu():
        with naming("device_map of the model"):
            placed = over_devices(published, lambda k: k % 2 == 1)
            adapt(placed, inputs=tokens, repeat="model.layers")
        split = copy.deepcopy(published)
        places = {"model.layers.0.mlp": DEVICE, "model.layers.0.self_attn": "cpu"}
        stay: dict[str, Any] = dict.fromkeys(places, False)
        attach_align_device_hook_on_blocks(split, execution_device=places, offload=stay)  # type: ignore
        with naming("device_map: model.layers.0"):
            adapt(split)


# Quantised


class IntegerLinear(nn.Linear):
    """A linear layer of 8-bit weights with a scale for each row, as bitsandbytes has them."""

    scale: Tensor

    @classmethod
    def of(cls, linear: nn.Linear) -> IntegerLinear:
        made = cls(linear.in_features, linear.out_features, bias=linear.bias is not None)
        whole, scale = rounded(linear.weight)
        made.weight = nn.Parameter(whole, requires_grad=False)
        made.register_buffer("scale", scale)
        made.bias = linear.bias
        return made

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, self.weight.to(input) * self.scale, self.bias)


class IntegerWeight(Tensor):
    """A weight of integers and scales that is a tensor of floats to its layer, as in torchao."""

    whole: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls, whole: Tensor, scale: Tensor) -> IntegerWeight:
        made = Tensor._make_wrapper_subclass(cls, whole.shape, dtype=scale.dtype)  # type: ignore
        made.whole, made.scale = whole, scale
        return made

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["whole", "scale"], None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear:
            x, weight, *bias = args
            return F.linear(x, weight.whole.to(x) * weight.scale, *bias, **kwargs or {})
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].whole, args[0].scale)
        raise NotImplementedError(f"{func} of quantised weights")


def rounded(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Integers from -127 to 127, and the scale of each row."""
    scale = weight.detach().abs().amax(1, keepdim=True) / 127
    return (weight.detach() / scale).round().to(torch.int8), scale


def with_tensor(linear: nn.Linear) -> nn.Linear:
    weight = IntegerWeight(*rounded(linear.weight))
    linear.weight = nn.Parameter(weight, requires_grad=False)
    return linear


def dequantised(linear: nn.Linear) -> nn.Linear:
    """The oracle: the same numbers in float."""
    whole, scale = rounded(linear.weight)
    linear.weight = nn.Parameter(whole * scale, requires_grad=False)
    return linear


def mapped(model: nn.Module, change: Callable[[nn.Linear], nn.Linear]) -> nn.Module:
    """A copy with all linear layers changed."""
    model = copy.deepcopy(model)
    for name, module in [*model.named_modules()]:
        if type(module) is nn.Linear:
            parent, _, own = name.rpartition(".")
            setattr(model.get_submodule(parent), own, change(module))
    return model


@pytest.mark.parametrize("change", [IntegerLinear.of, with_tensor])
@pytest.mark.parametrize("name", QUANTISED)
def test_a_quantised_model_has_the_numbers_of_its_weights_in_float(
    name: str, change: Callable[[nn.Linear], nn.Linear]
) -> None:
    published, tokens = KINDS[name].build(), tokens_of(name)
    plain, model = adapt(mapped(published, dequantised)), adapt(mapped(published, change))
    assert model.dtype == torch.float32
    logits, cache = plain.run_with_cache(tokens, **LOOPS)
    again, recorded = model.run_with_cache(tokens, **LOOPS)
    assert model.cache_nbytes(*tokens.shape, **LOOPS) == recorded.nbytes == cache.nbytes
    torch.testing.assert_close(again, logits, atol=1e-5, rtol=1e-5)
    assert (logits - adapt(published)(tokens, **LOOPS)).abs().max() > 1e-3  # it is quantised
    for site in cache:
        torch.testing.assert_close(recorded[site], cache[site], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(hooked(model, tokens), hooked(plain, tokens), atol=1e-5, rtol=1e-5)
    answers = logits.argmax(-1)
    parts = recorded.logit_attribution(answers, from_loop=0)
    assert abs(parts - cache.logit_attribution(answers, from_loop=0)).max() < 1e-5
    backward: dict[str, Any] = {"incl_bwd": True, "loss_fn": lambda x: x.square().sum()}
    _, grads = model.run_with_cache(tokens, **backward, **LOOPS)
    _, expected = plain.run_with_cache(tokens, **backward, **LOOPS)
    site = "loops.0.blocks.0.hook_resid_pre_grad"
    torch.testing.assert_close(grads[site], expected[site], atol=1e-4, rtol=1e-4)


class IntegerEmbedding(nn.Embedding):
    """An embedding of integers, which is the first weight of a model."""

    def forward(self, input: Tensor) -> Tensor:
        return F.embedding(input, self.weight).to(torch.bfloat16) / 32


def test_the_type_of_activations_is_not_that_of_integers() -> None:
    published, tokens = KINDS["ouro"].build().to(torch.bfloat16), tokens_of("ouro")
    embedding = published.model.embed_tokens
    whole = (embedding.weight.detach() * 32).round().to(torch.int8)
    embedding.weight = nn.Parameter(whole, requires_grad=False)
    embedding.__class__ = IntegerEmbedding
    model = adapt(published)
    _, cache = model.run_with_cache(tokens, names_filter="resid_post")
    assert {x.dtype for x in cache.values()} == {torch.bfloat16} == {model.dtype}
    assert model.cache_nbytes(*tokens.shape, names_filter="resid_post") == cache.nbytes


@pytest.mark.parametrize("name", ["ouro", "huginn"])
@pytest.mark.parametrize("change", [IntegerLinear.of, with_tensor])
def test_a_change_in_a_quantised_layer_is_that_of_its_own_forward(
    name: str, change: Callable[[nn.Linear], nn.Linear]
) -> None:
    kind, tokens, calls = KINDS[name], tokens_of(name), 0
    path, component, layer, before, per_loop = kind.written
    model = adapt(mapped(kind.build(), change))
    start = model.initial_state(model.embed(tokens))

    def edit(module: Any, inputs: Any, output: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return 3 * output if calls - 1 == per_loop + before else output

    handle = model.published.get_submodule(path).register_forward_hook(edit)
    expected = kind.native(model.published, tokens, model.n_loops, start)
    handle.remove()
    site = model.site(component, loop=1, layer=layer)
    logits = model.run_with_hooks(tokens, fwd_hooks=[(site, lambda x, hook: 3 * x)])
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)
    assert (logits - model(tokens)).abs().max() > 1e-3


@pytest.mark.parametrize("change", [IntegerLinear.of, with_tensor])
def test_studies_of_a_quantised_model(change: Callable[[nn.Linear], nn.Linear]) -> None:
    published, tokens = KINDS["ouro"].build(), tokens_of("ouro")
    plain, model = adapt(mapped(published, dequantised)), adapt(mapped(published, change))
    base, source = tokens[:2], tokens[1:]
    edges = [
        edge_study(each, base[:1], source[:1], n_loops=1, n_steps=1, curve_points=1)
        for each in (plain, model)
    ]
    assert edges[0].data["effect"].max() > 0.1
    assert abs(edges[0].data["effect"] - edges[1].data["effect"]).max() < 1e-4
    options: dict[str, Any] = {"n_loops": 1, "component": "resid_pre"}
    sweeps = [patching_sweep(each, base, source, **options) for each in (plain, model)]
    assert abs(sweeps[0].data["effect"] - sweeps[1].data["effect"]).max() < 1e-4
    about = describe_model(model)
    assert isinstance(about, dict) and describe_model(plain) != about
    with torch.no_grad():  # the digest is that of integers and scales
        projection = model.published.model.layers[0].self_attn.q_proj
        scale = projection.scale if change == IntegerLinear.of else projection.weight.scale
        scale[0] *= 2
    assert describe_model(model) != about


class Rounding(nn.Linear):
    """A layer whose products round their inputs too, and have no gradients."""

    def forward(self, input: Tensor) -> Tensor:
        scale = input.detach().abs().amax(-1, keepdim=True) / 7
        return super().forward((input.detach() / scale).round() * scale).detach()


def test_products_that_round_activations_are_refused_where_they_are_no_linear_maps() -> None:
    def rounding(linear: nn.Linear) -> nn.Linear:
        linear.__class__ = Rounding
        return linear

    published, tokens = KINDS["ouro"].build(), tokens_of("ouro")
    model = adapt(mapped(published, rounding))
    logits, cache = model.run_with_cache(tokens)
    with naming("logit_attribution"):
        cache.logit_attribution(logits.argmax(-1), from_loop=0)
    with naming("model"):
        edge_study(model, tokens, tokens.flip(0), n_loops=1)


# Loading


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hrm_text")
    KINDS["hrm_text"].build().save_pretrained(folder)
    return folder


@pytest.mark.filterwarnings("ignore:The following device_map keys")  # a parameter of its own
def test_a_checkpoint_is_loaded_over_devices(checkpoint: Path, tmp_path: Path) -> None:
    plain, tokens = load_published(str(checkpoint)), tokens_of("hrm_text")
    paths = parts_of(plain.published)
    places = {path: "disk" if "H_module" in path else "cpu" for path in paths}
    model = load_published(str(checkpoint), device_map=places, offload_folder=tmp_path)
    assert any(x.device == torch.device("meta") for x in model.parameters())
    assert torch.equal(model(tokens), plain(tokens))
    whole = load_published(str(checkpoint), device_map={"": "cpu"})
    assert torch.equal(whole.to("cpu")(tokens), plain(tokens))


def test_what_cannot_be_placed_or_quantised_is_refused_before_it_is_read(checkpoint: Path) -> None:
    name = str(checkpoint)
    refused: tuple[tuple[str, dict[str, Any]], ...] = (
        ("device", {"device": "cpu", "device_map": "auto"}),
        ("device_map", {"device_map": "everywhere"}),
        ("device", {"device": "gpu"}),
        ("offload_folder", {"offload_folder": checkpoint}),
        ("device", {"device_map": {"": "gpu"}}),
        ("device 'cuda:99'", {"device_map": {"": 99}}),
        ("quantization_config", {"quantization_config": "int8"}),
    )
    for what, options in refused:
        with naming(f".*{what}.*"):
            load_published(name, **options)
    with naming("device_map"):
        load_published("kokoro-plbert", device_map="auto")
    with pytest.raises(InputError):
        load_published(name, device="cuda:99")


def test_a_checkpoint_without_one_of_the_weights_is_refused(
    checkpoint: Path, tmp_path: Path
) -> None:
    shutil.copytree(checkpoint, tmp_path, dirs_exist_ok=True)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with naming("weights of .*"):  # transformers would draw it at random
        load_published(str(tmp_path))
