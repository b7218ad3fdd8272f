"""A conversion is exact or refused, and says where the two models part."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from loopinterp.core.errors import InputError
from loopinterp.models import (
    LoopedTransformer,
    LoopedTransformerConfig,
    LoopRule,
    WithVocabulary,
    bind,
    convert_model,
    describe_model,
    device_of,
    first_difference,
    fold_vocabulary,
    iterate,
    reach,
)
from loopinterp.models.protocol import own_depth
from loopinterp.tasks import Addition
from loopinterp.training import Run
from tests.models.looped_toys import Halving
from tests.models.variants import VARIANTS, build

D, HEADS, LOOPS = 8, 2, 3


CONFIG = LoopedTransformerConfig(
    d_model=D,
    n_heads=HEADS,
    d_vocab=5,
    d_vocab_out=3,
    norm="pre",
    injection="input",
    initial_state="zeros",
    act_fn="relu",
    d_mlp=16,
)


INPUTS = torch.randint(5, (4, 6), generator=torch.Generator().manual_seed(0))


class Original(nn.Module):
    """Written with PyTorch's own parts, behind the four methods."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.wte = nn.Embedding(5, D)
        self.block = nn.TransformerEncoderLayer(
            D, HEADS, 16, dropout=0.0, batch_first=True, norm_first=True
        )
        self.norm, self.head = nn.LayerNorm(D), nn.Linear(D, 3)
        for name, weight in self.named_parameters():  # PyTorch starts biases at 0 and norms at 1
            nn.init.normal_(weight, std=0.3) if weight.ndim == 1 else None
            assert name

    def embed(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.wte(inputs)

    def initial_state(self, e: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(e)

    def step(self, h: torch.Tensor, e: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(h.shape[1])
        return self.block(h + e, src_mask=mask)

    def readout(self, h: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(h))


def _original() -> Original:
    return Original().eval()


def _weights(model: Original) -> dict[str, torch.Tensor]:
    ours = {
        "wte": "embedding",
        "block.self_attn.in_proj_": "block.0.attn.qkv.",
        "block.self_attn.out_proj": "block.0.attn.out",
        "block.linear1": "block.0.mlp.fc_in",
        "block.linear2": "block.0.mlp.fc_out",
        "block.norm1": "block.0.ln1",
        "block.norm2": "block.0.ln2",
        "norm": "ln_final",
        "head": "unembedding",
    }
    renamed = {}
    for name, weight in model.state_dict().items():
        old = next(part for part in ours if name.startswith(part))
        renamed[name.replace(old, ours[old], 1)] = weight.clone()
    return renamed


def _converted(**changes: Any) -> LoopedTransformer:
    model = LoopedTransformer(CONFIG)
    model.load_state_dict(_weights(_original()) | changes)
    return model.eval()


def test_a_faithful_conversion_gives_the_model_with_the_same_logits() -> None:
    original = _original()
    model = convert_model(original, CONFIG, _weights(original), INPUTS, n_loops=LOOPS)
    h = original.initial_state(e := original.embed(INPUTS))
    for _ in range(LOOPS):
        h = original.step(h, e)
    torch.testing.assert_close(model(INPUTS, n_loops=LOOPS), original.readout(h))


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.bfloat16, 0.1), (torch.float16, 0.02)]
)
def test_the_model_has_the_type_of_the_weights(dtype: torch.dtype, tolerance: float) -> None:
    original = _original().to(dtype)
    weights = _weights(original)
    model = convert_model(original, CONFIG, weights, INPUTS, n_loops=LOOPS, tolerance=tolerance)
    assert model.dtype == dtype
    assert all(torch.equal(x, weights[name]) for name, x in model.state_dict().items())
    weights["embedding.weight"] = weights["embedding.weight"] * 1.5
    with pytest.raises(InputError, match=r"in embed"):
        convert_model(original, CONFIG, weights, INPUTS, n_loops=LOOPS, tolerance=tolerance)


@pytest.mark.usefixtures("no_type_checks")
def test_what_are_no_weights_or_inputs_is_refused() -> None:
    original, weights = _original(), _weights(_original())
    name = "embedding.weight"
    for wrong, message in (
        (weights | {name: weights[name].double()}, "torch.float64"),
        ({k: x.long() for k, x in weights.items()}, "torch.int64"),
        ({}, "missing"),
    ):
        with pytest.raises(InputError, match=rf"^weights: .*{message}"):
            convert_model(original, CONFIG, wrong, INPUTS, n_loops=LOOPS)  # type: ignore[arg-type]


@torch.no_grad()
def test_arrays_are_weights_too() -> None:
    original, weights = _original(), _weights(_original())
    arrays: dict[str, Any] = {name: x.numpy() for name, x in weights.items()}
    converted = convert_model(original, CONFIG, arrays, INPUTS, n_loops=LOOPS)
    expected = convert_model(original, CONFIG, weights, INPUTS, n_loops=LOOPS)
    assert torch.equal(converted(INPUTS, n_loops=LOOPS), expected(INPUTS, n_loops=LOOPS))


def test_weights_that_do_not_fit_are_named() -> None:
    original, weights = _original(), _weights(_original())
    del weights["ln_final.bias"]
    weights["head.scale"] = torch.ones(1)
    weights["embedding.weight"] = weights["embedding.weight"].T
    faults = "ln_final.bias is missing; head.scale is not known; "
    kind = "of torch.float32"
    faults += f"embedding.weight is ({D}, 5) {kind}, not (5, {D}) {kind}"
    with pytest.raises(InputError, match=re.escape(faults)):
        convert_model(original, CONFIG, weights, INPUTS, n_loops=LOOPS)


@pytest.mark.parametrize(
    ("weight", "where"),
    [
        ("embedding.weight", "embed"),
        ("block.0.attn.qkv.weight", "loop 0"),
        ("block.0.mlp.fc_out.bias", "loop 0"),
        ("unembedding.bias", "readout after 0 loops"),
    ],
)
def test_a_difference_is_said_where_it_arises(weight: str, where: str) -> None:
    changed = _weights(_original())[weight].clone()
    changed.view(-1)[1] += 0.1
    difference = first_difference(
        _original(), _converted(**{weight: changed}), INPUTS, n_loops=LOOPS
    )
    assert difference is not None and difference.site == where
    weights = _weights(_original()) | {weight: changed}
    with pytest.raises(InputError, match=rf"^converted model: .*in {where}: "):
        convert_model(_original(), CONFIG, weights, INPUTS, n_loops=LOOPS)


class _LateBump(Original):
    """Does something else in its third loop only, which no weight could do."""

    def step(self, h: torch.Tensor, e: torch.Tensor) -> torch.Tensor:
        self.loops = 0 if not h.any() else self.loops + 1
        return super().step(h, e) + (self.loops == 2)


def test_a_later_loop_is_told_from_what_it_carries_on() -> None:
    late = _LateBump().eval()
    late.load_state_dict(_original().state_dict())
    difference = first_difference(late, _converted(), INPUTS, n_loops=LOOPS)
    assert difference is not None and difference.site == "loop 2"
    assert first_difference(late, _converted(), INPUTS, n_loops=2) is None


def test_activations_say_which_component_of_the_loop_it_is() -> None:
    right, site = _converted(), "loops.{}.blocks.0.{}"
    names = ("hook_resid_pre", "ln1.hook_normalized", "attn.hook_pattern", "mlp.hook_post")
    _, cache = right.run_with_cache(INPUTS, n_loops=LOOPS)
    theirs = {
        site.format(loop, name): cache[site.format(loop, name)]
        for loop in range(LOOPS)
        for name in names
    }
    changed = _weights(_original())["block.0.mlp.fc_in.bias"] + 0.5
    wrong = _converted(**{"block.0.mlp.fc_in.bias": changed})
    difference = first_difference(_original(), wrong, INPUTS, n_loops=LOOPS, activations=theirs)
    assert difference is not None and difference.site == "blocks.0.mlp.hook_post"
    assert difference.place is not None and str(difference).endswith(
        f" converted, at {difference.place}"
    )
    outside = {"hook_embed": cache["hook_embed"]}
    with pytest.raises(InputError, match=r"^activations: .*hook_embed"):
        first_difference(right, right, INPUTS, n_loops=LOOPS, activations=outside)


BASE = LoopedTransformerConfig(
    d_model=8,
    n_heads=2,
    d_vocab=50,
    d_vocab_out=50,
    positions="abacus",
    n_ctx=60,
    abacus_target="qk",
    abacus_max_offset=0,
    digit_tokens=tuple(range(10)),
)


TOKENS, ANSWERS = [40, 41, 3, 7], [41, 40]


TASK_INPUTS = torch.tensor([[2, 0, 1, 3], [3, 3, 1, 0]])


def test_it_reads_and_answers_as_the_model_does_in_its_own_tokens() -> None:
    model = LoopedTransformer(BASE)
    mapped = WithVocabulary(model, tokens=TOKENS, answers=ANSWERS)
    task_tokens = torch.tensor(TOKENS)[TASK_INPUTS]
    for (_, theirs), (_, ours) in zip(
        iterate(model, task_tokens, 2), iterate(mapped, TASK_INPUTS, 2)
    ):
        assert torch.equal(theirs, ours)
        assert torch.equal(
            model.readout(theirs)[..., [41, 40]],
            bind(mapped, TASK_INPUTS).readout(ours),
        )
        assert torch.equal(mapped.readout(ours), model.readout(ours)[..., [41, 40]])


def test_what_the_model_says_of_itself_is_passed_on() -> None:
    windowed = LoopedTransformerConfig(
        d_model=8, n_heads=2, d_vocab=50, d_vocab_out=50, attention_window=2
    )
    assert reach(WithVocabulary(LoopedTransformer(windowed))) == 2
    assert WithVocabulary(LoopedTransformer(BASE)).n_ctx == 60
    assert next(WithVocabulary(LoopedTransformer(BASE)).parameters(), None) is not None
    once = LoopedTransformer(windowed)
    once.loop_rule = LoopRule(1)
    assert own_depth(WithVocabulary(once)) == 1 and own_depth(WithVocabulary(Halving())) is None


def test_its_sizes_are_those_of_the_task() -> None:
    def sizes(model: WithVocabulary) -> tuple[int | None, ...]:
        return model.d_vocab, model.d_features, model.d_vocab_out

    model = LoopedTransformer(BASE)
    assert sizes(WithVocabulary(model)) == (50, None, 50)
    assert sizes(WithVocabulary(model, tokens=TOKENS, answers=ANSWERS)) == (4, None, 2)
    assert sizes(WithVocabulary(Halving())) == (None, None, None)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int32])
def test_tokens_of_any_integer_type_are_the_same_tokens(dtype: torch.dtype) -> None:
    mapped = WithVocabulary(LoopedTransformer(BASE), tokens=TOKENS)
    assert torch.equal(mapped.embed(TASK_INPUTS.to(dtype)), mapped.embed(TASK_INPUTS))


@pytest.mark.usefixtures("no_type_checks")
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (-TASK_INPUTS, "^inputs: .*-3"),
        (TASK_INPUTS + 0.5, "integers"),
    ],
)
def test_what_is_no_token_of_the_task_is_refused(wrong: torch.Tensor, message: str) -> None:
    with pytest.raises(InputError, match=message):
        bind(WithVocabulary(LoopedTransformer(BASE), tokens=TOKENS), wrong)


def test_it_lies_where_the_model_does() -> None:
    mapped = WithVocabulary(LoopedTransformer(BASE).to("meta"), tokens=TOKENS)
    assert mapped.tokens is not None and mapped.tokens.device == torch.device("meta")
    toy = Halving()
    toy.device = torch.device("meta")  # type: ignore[attr-defined]
    assert device_of(WithVocabulary(toy)) == torch.device("meta")


def test_another_vocabulary_is_another_model() -> None:
    model = LoopedTransformer(BASE)
    descriptions = [describe_model(WithVocabulary(model, tokens=t)) for t in (TOKENS, TOKENS[::-1])]
    assert descriptions[0] != descriptions[1]


class Around(torch.nn.Module):
    """Somebody's wrapper."""

    def __init__(self, net: LoopedTransformer) -> None:
        super().__init__()
        self.net = net
        self.embed, self.initial_state = net.embed, net.initial_state
        self.step, self.readout = net.step, net.readout


@pytest.mark.parametrize("wrap", [lambda m: m, WithVocabulary, Around])
def test_what_is_wrapped_is_described_with_its_configuration_and_its_loops(wrap: Any) -> None:
    config = LoopedTransformerConfig(d_model=8, n_heads=2, d_vocab=6, d_vocab_out=6)
    models = [LoopedTransformer(config.replace(attention_window=w)) for w in (None, 1)]
    for rule in (LoopRule(2), LoopRule(9), LoopRule(9, of_length=lambda n: n)):
        models.append(LoopedTransformer(config))
        models[-1].loop_rule = rule
    descriptions: list[Any] = [describe_model(wrap(model)) for model in models]
    assert len({each["weights_sha256"] for each in descriptions}) == 1
    assert all(one != other for k, one in enumerate(descriptions) for other in descriptions[:k])
    assert json.loads(json.dumps(descriptions)) == descriptions


@pytest.mark.usefixtures("no_type_checks")
@pytest.mark.parametrize("name", ["tokens", "answers"])
@pytest.mark.parametrize(
    "wrong",
    [[0.5], [-1, 0], [[1, 2]], [None], [[1], [2, 3]], "abc", [], torch.empty(0).long(), 3, [2**70]],
)
def test_what_is_no_map_is_refused(wrong: Any, name: str) -> None:
    with pytest.raises(InputError, match=rf"^{name}:"):
        WithVocabulary(LoopedTransformer(BASE), **{name: wrong})


def test_one_answer_is_no_choice() -> None:
    with pytest.raises(InputError, match=r"^answers: .*\[3\]"):
        WithVocabulary(LoopedTransformer(BASE), answers=[3])


class Letters:
    """An embedding of 16 characters, and 16 outputs, which say nothing of how many they are."""

    def __init__(self) -> None:
        self.letters = torch.nn.Embedding(16, 16)

    def embed(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.letters(inputs)

    def initial_state(self, e: torch.Tensor) -> torch.Tensor:
        return e

    def step(self, h: torch.Tensor, e: torch.Tensor) -> torch.Tensor:
        return h + e

    def readout(self, h: torch.Tensor) -> torch.Tensor:
        return h


def test_a_map_to_what_the_model_has_not_is_named() -> None:
    ours = LoopedTransformer(BASE)
    for name, size in (("tokens", BASE.d_vocab or 0), ("answers", BASE.d_vocab_out)):
        with pytest.raises(InputError, match=rf"^largest of {name}: .*{size}"):
            WithVocabulary(ours, **{name: [0, size]})
        WithVocabulary(ours, **{name: [0, size - 1]})
    mapped = WithVocabulary(Letters(), tokens=[1, 2, 3, 16])
    for run in (bind, lambda model, x: model.embed(x)):
        with pytest.raises(IndexError):
            run(mapped, TASK_INPUTS)
    bound = bind(mapped := WithVocabulary(Letters(), answers=[0, 16]), TASK_INPUTS)
    for read in (bound.readout, mapped.readout):
        with pytest.raises(IndexError, match="16"):
            read(bound.h0)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32])
def test_tokens_that_are_not_mapped_are_read_in_any_integer_type(dtype: torch.dtype) -> None:
    mapped = WithVocabulary(Letters(), answers=[0, 1])
    assert torch.equal(
        bind(mapped, TASK_INPUTS.to(dtype)).h0,
        bind(mapped, TASK_INPUTS).h0,
    )


LISTS = st.lists(st.integers(0, 11), min_size=2, max_size=5)


TOKENS_folded_vocabulary = [name for name in VARIANTS if name != "features"]


@settings(deadline=None, max_examples=40)
@given(name=st.sampled_from(TOKENS_folded_vocabulary), tokens=LISTS, answers=LISTS, data=st.data())
def test_it_computes_what_the_mapped_model_does(name, tokens, answers, data):
    digits: dict[str, Any] = {"digit_tokens": (1, 2, 3, *tokens[:1])} if "abacus" in name else {}
    model = build(name, d_vocab=12, d_vocab_out=12, **digits)
    folded = fold_vocabulary(model, tokens=tokens, answers=answers)
    mapped = WithVocabulary(model, tokens=tokens, answers=answers)
    row = st.lists(st.integers(0, len(tokens) - 1), min_size=4, max_size=4)
    inputs = torch.tensor([data.draw(row), data.draw(row)])
    for (_, ours), (_, theirs) in zip(iterate(folded, inputs, 3), iterate(mapped, inputs, 3)):
        torch.testing.assert_close(ours, theirs)
        torch.testing.assert_close(folded.readout(ours), mapped.readout(theirs))
    assert (folded.config.d_vocab, folded.config.d_vocab_out) == (len(tokens), len(answers))


def test_what_is_left_out_stays_and_the_model_itself_does_not_change():
    model = build("tied", d_vocab=6)
    before = {name: x.clone() for name, x in model.state_dict().items()}
    inputs = torch.tensor([[0, 5, 2]])
    logits = model(inputs, n_loops=2)
    torch.testing.assert_close(fold_vocabulary(model)(inputs, n_loops=2), logits)
    answered = fold_vocabulary(model, answers=[4, 1])(inputs, n_loops=2)
    torch.testing.assert_close(answered, logits[..., [4, 1]])
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    model.loop_rule = LoopRule(3)
    assert fold_vocabulary(model, answers=[1, 2]).loop_rule == LoopRule(3)


@pytest.mark.usefixtures("no_type_checks")
def test_a_folded_model_is_kept_as_a_run_and_the_mapped_one_says_how(tmp_path: Path):
    theirs, words = build("plain", d_vocab=16, d_vocab_out=16), [2, 3, 4, 5, 14, 15]
    mapped = WithVocabulary(theirs, tokens=words, answers=[0, 1])
    options = {"task": Addition(), "max_n": 4, "origin": "written elsewhere"}
    with pytest.raises(InputError, match=r"WithVocabulary.*fold_vocabulary"):
        Run.from_model(mapped, folder=tmp_path / "run", **options)  # type: ignore[arg-type]
    ours = fold_vocabulary(theirs, tokens=words, answers=[0, 1])
    run = Run.from_model(ours, folder=tmp_path / "run", **options)
    inputs = torch.tensor([[4, 3, 1, 0]])
    torch.testing.assert_close(run.model()(inputs, n_loops=2), ours(inputs, n_loops=2))


@pytest.mark.usefixtures("no_type_checks")
def test_what_cannot_be_folded_is_refused():
    model = build("plain", d_vocab=6, d_vocab_out=3)
    with pytest.raises(InputError, match=r"^largest of tokens: .*6"):
        fold_vocabulary(model, tokens=[0, 6])
    with pytest.raises(InputError, match=r"^largest of answers: .*3"):
        fold_vocabulary(model, answers=[0, 3])
    with pytest.raises(InputError, match=r"^tokens:"):
        fold_vocabulary(build("features"), tokens=[0, 1])
    with pytest.raises(InputError, match=r"^model: .*WithVocabulary"):
        fold_vocabulary(WithVocabulary(model))  # type: ignore[arg-type]
