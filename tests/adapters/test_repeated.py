"""The adapter of any repeated block, against the model's own forward with PyTorch's hooks."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from loopinterp import dynamics, interventions, lenses
from loopinterp.adapters import RepeatedAdapter, adapt
from loopinterp.core.errors import HookError, InputError
from loopinterp.models import bind, generate, iterate
from loopinterp.tasks import Batch
from tests.adapters.published import ouro

VOCAB, WIDTH = 17, 16


def encoder_layer() -> nn.TransformerEncoderLayer:
    return nn.TransformerEncoderLayer(WIDTH, 2, 24, dropout=0.0, batch_first=True, norm_first=True)


class Looped(nn.Module):
    """Embedding, the same list of layers again and again, one untied layer, head."""

    def __init__(self, n_layers: int = 2, n_loops: int = 3) -> None:
        super().__init__()
        self.n_loops = n_loops
        self.embed, self.place = nn.Embedding(VOCAB, WIDTH), nn.Embedding(32, WIDTH)
        self.start = nn.Identity()
        self.layers = nn.ModuleList(encoder_layer() for _ in range(n_layers))
        self.coda, self.out = encoder_layer(), nn.Linear(WIDTH, VOCAB)

    def mask(self, tokens: Tensor) -> Tensor:
        n_pos = tokens.shape[1]
        return torch.ones(n_pos, n_pos, dtype=torch.bool).triu(1)

    def loops(self, h: Tensor, mask: Tensor) -> Tensor:
        for _ in range(self.n_loops):
            for layer in self.layers:
                h = layer(h, src_mask=mask)
        return h

    def forward(self, tokens: Tensor) -> Tensor:
        place = torch.arange(tokens.shape[1])
        h = self.start(self.embed(tokens) + self.place(place))
        mask = self.mask(tokens)
        return self.head(self.loops(h, mask), mask)

    def head(self, h: Tensor, mask: Tensor) -> Tensor:
        return self.out(self.coda(h, src_mask=mask))


class Normed(Looped):
    """A norm after each loop, as in Ouro, and an update in place."""

    def __init__(self) -> None:
        super().__init__(1)
        self.norm = nn.LayerNorm(WIDTH)

    def loops(self, h: Tensor, mask: Tensor) -> Tensor:
        for _ in range(self.n_loops):
            h = self.norm(self.layers[0](h, src_mask=mask))
            h += 0.0
        return h


class Injected(Looped):
    """``h = layers(h + e)``, from zeros."""

    def loops(self, h: Tensor, mask: Tensor) -> Tensor:
        e, h = h, torch.zeros_like(h)
        for _ in range(self.n_loops):
            h = h + e
            for layer in self.layers:
                h = layer(h, src_mask=mask)
        return h


class Learnt(Injected):
    """The same, from a learnt vector, with the input beside the state in an adapter."""

    def __init__(self) -> None:
        super().__init__(1)
        self.h0, self.adapter = nn.Parameter(torch.randn(WIDTH)), nn.Linear(2 * WIDTH, WIDTH)

    def loops(self, h: Tensor, mask: Tensor) -> Tensor:
        e, h = h, self.h0.expand_as(h)
        for _ in range(self.n_loops):
            h = self.layers[0](self.adapter(torch.cat((h, e), -1)), src_mask=mask)
        return h


class Gated(Looped):
    """A GRU gate after each block, on positions side by side."""

    def __init__(self) -> None:
        super().__init__(1)
        self.gate = nn.GRUCell(WIDTH, WIDTH)

    def loops(self, h: Tensor, mask: Tensor) -> Tensor:
        for _ in range(self.n_loops):
            x = self.layers[0](h, src_mask=mask)
            h = self.gate(x.flatten(0, 1), h.flatten(0, 1)).view_as(h)
        return h


class Plus(nn.Module):
    """A residual connection that is a module, as in x-transformers."""

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        return x + residual


class PreNorm(Looped):
    """Lists of norm, function and residual, in which only the residual returns the stream."""

    def __init__(self) -> None:
        super().__init__(0, n_loops=4)
        mixes = (nn.Sequential(nn.Linear(WIDTH, 24), nn.GELU(), nn.Linear(24, WIDTH)) for _ in "ab")
        self.layers = nn.ModuleList(
            nn.ModuleList([nn.LayerNorm(WIDTH), mix, Plus()]) for mix in mixes
        )

    def loops(self, h: Tensor, mask: Tensor) -> Tensor:
        for _ in range(self.n_loops):
            for norm, mix, plus in self.layers:  # type: ignore[misc]
                h = plus(mix(norm(h)), h)
        return h


class Padded(Looped):
    """Token 0 is padding, which no position attends to."""

    def mask(self, tokens: Tensor) -> Tensor:
        return (tokens == 0)[:, None].expand(-1, tokens.shape[1], -1).repeat_interleave(2, 0)

    def head(self, h: Tensor, mask: Tensor) -> Tensor:
        return self.out(h)


class Features(nn.Module):
    """A stack that reads features, with no module before it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.out = encoder_layer(), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(5):
            x = self.layer(x)
        return self.out(x)


class LlamaLoops(nn.Module):
    """Llama layers applied twice, with the norm after each loop, as in Nanbeige4.2."""

    def __init__(self) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        super().__init__()
        config = LlamaConfig(
            vocab_size=VOCAB, hidden_size=WIDTH, intermediate_size=24, num_hidden_layers=3,
            num_attention_heads=4, num_key_value_heads=2,
        )  # fmt: skip
        llama = LlamaForCausalLM(config)
        self.model, self.lm_head, self.n_loops = llama.model, llama.lm_head, 2

    def forward(self, tokens: Tensor) -> Tensor:
        h: Any = self.model.embed_tokens(tokens)
        turns = self.model.rotary_emb(h, torch.arange(tokens.shape[1])[None])
        ahead = torch.full((tokens.shape[1],) * 2, -1e9).triu(1)[None, None]
        for loop in range(self.n_loops):
            for layer in self.model.layers:
                # The published layer takes the loop's index, for its cache alone.
                h = layer(h, attention_mask=ahead, position_embeddings=turns, loop_idx=loop)
            h = self.model.norm(h)
        return self.lm_head(h)


class Retrofitted(Looped):
    """A stack that was cut into prelude, core and coda: Huginn's loop of pre-norm layers."""

    def __init__(self) -> None:
        super().__init__(n_loops=4)
        self.prelude, self.adapter = encoder_layer(), nn.Linear(2 * WIDTH, WIDTH)

    def loops(self, h: Tensor, mask: Tensor) -> Tensor:
        e = self.prelude(h, src_mask=mask)
        h = torch.zeros_like(e)
        for _ in range(self.n_loops):
            h = self.adapter(torch.cat((h, e), -1))
            for layer in self.layers:
                h = layer(h, src_mask=mask)
        return h


def albert(kind: str = "AlbertModel") -> nn.Module:
    import transformers

    config = transformers.AlbertConfig(
        vocab_size=VOCAB, embedding_size=8, hidden_size=WIDTH, num_attention_heads=2,
        intermediate_size=24, num_hidden_layers=4, inner_group_num=2, max_position_embeddings=32,
    )  # fmt: skip
    return getattr(transformers, kind)(config)


def perceiver() -> nn.Module:
    import transformers

    config = transformers.PerceiverConfig(
        num_latents=5, d_latents=WIDTH, d_model=WIDTH, num_blocks=3, num_self_attends_per_block=2,
        num_self_attention_heads=2, num_cross_attention_heads=2, vocab_size=VOCAB,
        max_position_embeddings=7,
    )  # fmt: skip
    return transformers.PerceiverForMaskedLM(config)


@dataclass(frozen=True)
class Case:
    """A model, its block, its number of loops, and the last module of a loop."""

    build: Callable[[], nn.Module]
    repeat: str
    n_loops: int
    last: str
    n_layers: int
    injects: bool = False
    features: bool = False
    n_pos: int = 7


CASES = {
    "albert": Case(albert, "encoder.albert_layer_groups", 4, "encoder.albert_layer_groups.0", 1),
    "albert_lm": Case(
        lambda: albert("AlbertForMaskedLM"),
        "albert.encoder.albert_layer_groups.0.albert_layers",
        4,
        "albert.encoder.albert_layer_groups.0.albert_layers.1",
        2,
    ),
    "perceiver": Case(
        perceiver, "perceiver.encoder.self_attends", 3, "perceiver.encoder.self_attends.1", 2
    ),
    "looped": Case(Looped, "layers", 3, "layers.1", 2),
    "normed": Case(Normed, "layers", 3, "norm", 1),
    "injected": Case(Injected, "layers", 3, "layers.1", 2, injects=True),
    "gated": Case(Gated, "layers", 3, "gate", 1),
    "learnt": Case(Learnt, "layers", 3, "layers.0", 1, injects=True),
    "pre_norm": Case(PreNorm, "layers", 4, "layers.1.2", 0),
    "padded": Case(Padded, "layers", 3, "layers.1", 2),
    "features": Case(Features, "layer", 5, "layer", 1, features=True),
    "llama_loops": Case(LlamaLoops, "model.layers", 2, "model.norm", 3),
    "retrofitted": Case(Retrofitted, "layers", 4, "layers.1", 2, injects=True),
    "ouro": Case(ouro.tiny, "model.layers", ouro.tiny().model.total_ut_steps, "model.norm", 2),
}
every = pytest.mark.parametrize("name", list(CASES))


def inputs_of(name: str, batch: int = 3, n_pos: int | None = None, seed: int = 0) -> Tensor:
    generator, case = torch.Generator().manual_seed(seed), CASES[name]
    shape = batch, n_pos or case.n_pos
    if case.features:
        return torch.randn(*shape, WIDTH, generator=generator)
    return torch.randint(VOCAB, shape, generator=generator)


@cache
def published(name: str) -> nn.Module:
    torch.manual_seed(0)
    model = CASES[name].build().eval()
    for x in model.parameters():  # norms and biases too
        nn.init.normal_(x, std=0.3)
    return model


@cache
def adapted(name: str) -> Any:
    return adapt(published(name), repeat=CASES[name].repeat, inputs=inputs_of(name))


def own(name: str, inputs: Tensor) -> Tensor:
    output = published(name)(inputs)
    return getattr(output, "logits", getattr(output, "last_hidden_state", output))


@contextmanager
def edited(module: nn.Module, call: int, edit: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """A change of a module's output at one of its calls, by PyTorch's own hook."""
    calls = 0

    def hook(module: nn.Module, args: Any, output: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls - 1 != call:
            return None
        return (edit(output[0]), *output[1:]) if isinstance(output, tuple) else edit(output)

    handle = module.register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()
        assert calls > call


def close(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and bool((a - b).abs().max() <= 1e-5 * (1 + b.abs().max()))


# The numbers


@every
def test_logits_are_those_of_the_models_own_forward(name: str) -> None:
    model, case = adapted(name), CASES[name]
    assert model.n_loops == case.n_loops and model.site_map.n_layers == max(1, case.n_layers)
    assert model.loop.injects == case.injects
    sizes = [(3, case.n_pos), (1, case.n_pos)]
    sizes += [] if name == "perceiver" else [(5, 4), (2, 11)]
    for batch, n_pos in sizes:
        inputs = inputs_of(name, batch, n_pos, seed=1)
        assert close(model(inputs), own(name, inputs))


@pytest.mark.parametrize(
    "name",
    [
        *("looped", "normed", "injected", "learnt", "gated", "pre_norm", "padded", "albert"),
        *("llama_loops", "retrofitted"),
    ],
)
@pytest.mark.parametrize("more", [-1, 2])
def test_other_numbers_of_loops_are_those_of_a_model_built_so(name: str, more: int) -> None:
    inputs, n_loops = inputs_of(name, seed=1), CASES[name].n_loops + more
    other: Any = copy.deepcopy(published(name))
    if name == "albert":
        other.config.num_hidden_layers = n_loops
    else:
        other.n_loops = n_loops
    output = other(inputs)
    expected = getattr(output, "last_hidden_state", output)
    assert close(adapted(name)(inputs, n_loops=n_loops), expected)
    assert not close(adapted(name)(inputs), expected)


@every
def test_states_are_the_outputs_of_the_last_module_at_each_call(name: str) -> None:
    model, inputs, case = adapted(name), inputs_of(name, seed=1), CASES[name]
    outputs: list[Tensor] = []

    def keep(module: Any, args: Any, output: Any) -> None:
        outputs.append((output[0] if isinstance(output, tuple) else output).clone())

    handle = published(name).get_submodule(case.last).register_forward_hook(keep)
    own(name, inputs)
    handle.remove()
    states = model(inputs, return_type="states")
    assert len(states) == case.n_loops + 1
    for state, output in zip(states[1:], outputs):
        assert close(state, output.view_as(state))
    _, cache = model.run_with_cache(inputs)
    assert torch.equal(cache.stack("hook_state_post"), states[1:])
    assert torch.equal(cache.stack("hook_state_pre"), states[:-1])


@every
def test_the_block_is_found_without_its_name(name: str) -> None:
    model = adapt(published(name), inputs=inputs_of(name))
    assert isinstance(model, RepeatedAdapter) and model.n_loops == CASES[name].n_loops
    assert torch.equal(model(inputs_of(name)), adapted(name)(inputs_of(name)))


# Hooks


@every
def test_a_change_at_one_loop_is_that_of_a_plain_hook_at_that_call(name: str) -> None:
    model, inputs, case = adapted(name), inputs_of(name, seed=1), CASES[name]
    outputs = [slot for slot in model.slots if not slot.is_input]
    clean = model(inputs, return_type="states")
    assert {slot.path for slot in outputs} >= {case.last}
    reached = [f"loops.{loop}.hook_state_post" for loop in range(case.n_loops)]
    reached.insert(0, "loops.0.hook_state_pre")
    alike: dict[tuple[str, int], list[Any]] = {}  # but for their layer
    for slot in outputs:
        alike.setdefault((re.sub(r"\.\d+\b", "", slot.path, count=1), slot.index), []).append(slot)
    tried = [slots[number % len(slots)] for number, slots in enumerate(alike.values())]
    tried += [slot for slot in outputs if slot.path == case.last and slot not in tried]
    for number, slot in enumerate(tried):
        module = published(name).get_submodule(slot.path)
        per_loop = sum(x.path == slot.path and not x.is_input for x in model.slots)
        # At the first or last loop, in one of the layers, by turns; at both where a loop ends.
        loops = (0, case.n_loops - 1)
        for loop in loops if slot.path == case.last else loops[number // 2 % 2 :][:1]:

            def edit(x: Tensor) -> Tensor:
                return 1.5 * x + torch.linspace(-1, 1, x.shape[-1])

            with edited(module, loop * per_loop + slot.index, edit):
                expected = own(name, inputs)
            site = model.site(slot.component, loop=loop, layer=slot.layer)
            same: list[bool] = []

            def compare(x: Tensor, hook: Any, same: list[bool] = same) -> None:
                same.append(torch.equal(x, clean[len(same)]))

            hooks = [(site, lambda x, hook: edit(x)), (reached, compare)]
            assert close(model.run_with_hooks(inputs, fwd_hooks=hooks), expected), site
            assert same == [True] * (loop + 1) + [False] * (case.n_loops - loop), site


@every
def test_each_hook_fires_once_per_loop_with_the_shape_it_promises(name: str) -> None:
    model = adapted(name)
    n_pos = 5
    inputs = inputs_of(name, 2, n_pos)
    fired: dict[str, int] = {}

    def count(x: Tensor, hook: Any) -> None:
        fired[hook.name] = fired.get(hook.name, 0) + 1
        assert x.shape == model.addresses(2).addresses[hook.name].shape(2, n_pos), hook.name

    names = list(model.addresses(2).addresses)
    model.run_with_hooks(inputs, n_loops=2, fwd_hooks=[(names, count)])
    assert fired == dict.fromkeys(names, 1)
    logits, cache = model.run_with_cache(inputs, n_loops=2)
    assert {*cache} == {*names} and close(logits, model(inputs, n_loops=2))
    assert model.cache_nbytes(2, n_pos, n_loops=2) == cache.nbytes


def test_modules_have_their_own_paths() -> None:
    _, cache = adapted("albert").run_with_cache(inputs_of("albert"))
    layer = "encoder.albert_layer_groups.0.albert_layers.1"
    assert f"loops.3.{layer}.attention.query.hook_out" in cache
    assert cache.stack(f"{layer}.ffn.hook_out").shape == (4, 3, 7, 24)
    assert cache["loops.2.blocks.0.hook_resid_pre"] is cache["blocks.2.hook_resid_pre"]
    with pytest.raises(HookError, match="Did you mean"):
        adapted("albert").run_with_hooks(
            inputs_of("albert"),
            fwd_hooks=[(f"loops.0.{layer}.attn.query.hook_out", lambda x, hook: None)],
        )


def test_a_list_may_have_places_without_a_module() -> None:
    """As in x-transformers, whose lists of norms hold None."""
    net = PreNorm().eval()
    net.norms = nn.ModuleList([None, nn.LayerNorm(WIDTH)])  # type: ignore[list-item]
    tokens = torch.randint(VOCAB, (3, 7), generator=torch.Generator().manual_seed(0))
    assert close(adapt(net, repeat="layers", inputs=tokens)(tokens), net(tokens))


def test_a_list_of_one_module_is_one_layer() -> None:
    class Listed(Looped):
        def __init__(self) -> None:
            super().__init__(1, n_loops=1)
            self.layers = nn.ModuleList([self.layers[0]] * 4)

    torch.manual_seed(0)
    theirs, tokens = Listed().eval(), inputs_of("looped")
    for repeat in ("layers", None):
        model = adapt(theirs, repeat=repeat, inputs=tokens)
        assert model.n_loops == 4 and close(model(tokens), theirs(tokens))
        assert "loops.3.blocks.0.hook_resid_pre" not in model.hook_dict  # one name each
        assert model.site("resid_pre", loop=3) == "blocks.3.hook_resid_pre"


def test_a_module_that_runs_twice_in_a_loop_has_two_addresses() -> None:
    class Twice(Looped):
        def loops(self, h: Tensor, mask: Tensor) -> Tensor:
            for _ in range(self.n_loops):
                for k in (0, 1, 0):
                    h = self.layers[k](h, src_mask=mask)
            return h

    torch.manual_seed(0)
    theirs, tokens = Twice().eval(), inputs_of("looped")
    model = adapt(theirs, repeat="layers", inputs=tokens)
    assert model.n_loops == 3
    site = "loops.1.layers.0.calls.1.linear1.hook_out"
    assert site not in model.hook_dict
    site = "loops.1.layers.0.linear1.calls.1.hook_out"
    with edited(theirs.layers[0].linear1, 3, torch.zeros_like):  # type: ignore[arg-type]
        expected = theirs(tokens)
    hooks = [(site, lambda x, hook: torch.zeros_like(x))]
    assert close(model.run_with_hooks(tokens, fwd_hooks=hooks), expected)


def test_a_module_that_also_runs_around_the_loop_is_hooked_inside_it() -> None:
    class Around(Looped):
        def __init__(self) -> None:
            super().__init__(1)
            self.norm = nn.LayerNorm(WIDTH)

        def loops(self, h: Tensor, mask: Tensor) -> Tensor:
            h = self.norm(h)
            for _ in range(self.n_loops):
                h = self.norm(self.layers[0](h, src_mask=mask))
            return self.norm(2 * h + 1)

    torch.manual_seed(0)
    theirs, tokens = Around().eval(), inputs_of("looped")
    model: Any = adapt(theirs, repeat="layers", inputs=tokens)
    assert close(model(tokens), theirs(tokens)) and model.loop.ends[0] == ("layers.0", 0)
    for loop in range(3):
        with edited(theirs.norm, loop, torch.tanh):
            expected = theirs(tokens)
        hooks = [(f"loops.{loop}.norm.hook_out", lambda x, hook: x.tanh())]
        assert close(model.run_with_hooks(tokens, fwd_hooks=hooks), expected)


def test_half_precision_is_its_own_precision() -> None:
    half = copy.deepcopy(published("looped")).bfloat16()
    model = adapt(half, repeat="layers", inputs=inputs_of("looped"))
    logits = model(inputs_of("looped", 2, 5)), half(inputs_of("looped", 2, 5))
    assert logits[0].dtype == torch.bfloat16 and torch.equal(*logits)


@every
def test_gradients_reach_the_weights_and_the_first_loop(name: str) -> None:
    model, inputs = adapted(name), inputs_of(name, seed=1)
    weights = [x for x in published(name).parameters() if x.requires_grad]

    def gradients(logits: Tensor) -> list[Tensor]:
        return torch.autograd.grad(
            logits.square().mean(), weights, allow_unused=True, materialize_grads=True
        )  # type: ignore[return-value]

    for ours, theirs in zip(gradients(model(inputs)), gradients(own(name, inputs))):
        assert torch.allclose(ours, theirs, atol=1e-4 * float(theirs.abs().max()) + 1e-7)
    options: dict[str, Any] = {"incl_bwd": True, "loss_fn": lambda x: x.square().mean()}
    _, cache = model.run_with_cache(inputs, loops=[0], **options)
    assert cache["loops.0.hook_state_post_grad"].abs().sum() > 0


def test_a_forward_that_stops_gradients_says_so() -> None:
    class Stopping(Looped):
        def loops(self, h: Tensor, mask: Tensor) -> Tensor:
            with torch.no_grad():
                h = self.layers[0](h)
            return self.layers[0](h)

    torch.manual_seed(0)
    model = adapt(Stopping().eval(), repeat="layers.0", inputs=inputs_of("looped"))
    with torch.no_grad():
        assert close(model(inputs_of("looped")), model.published(inputs_of("looped")))
    with pytest.raises(InputError, match="stops them"):
        model(inputs_of("looped"))


@every
def test_the_models_own_modules_are_left_as_they_were(name: str) -> None:
    model, inputs = adapted(name), inputs_of(name)
    model.run_with_cache(inputs)
    for module in published(name).modules():
        assert not module._forward_hooks and not module._forward_pre_hooks
        assert "forward" not in vars(module)


# The protocol


@every
def test_the_four_methods_are_the_run(name: str) -> None:
    model, inputs = adapted(name), inputs_of(name, seed=1)
    states = model(inputs, n_loops=3, return_type="states")
    logits = model(inputs, n_loops=3, return_type="all_logits")
    bound = bind(model, inputs)
    for loop, state in iterate(model, inputs, 3):
        assert close(state, states[loop]) and close(model.readout(state), logits[loop])
    rows = torch.tensor([2, 0])
    assert close(bound.select(rows).step(states[1][rows]), states[2][rows])
    assert close(model.readout(states), logits)
    if model.loop.reads_inputs:
        with pytest.raises(InputError, match="bind"):
            model.step(states[0], bound.e)
    else:
        assert close(model.step(states[1], bound.e), states[2])
    assert model.loop.reads_inputs == (name == "padded")


def test_an_injected_input_may_be_another_ones() -> None:
    model, one, other = adapted("injected"), inputs_of("injected"), inputs_of("injected", seed=1)
    h = model(one, n_loops=2, return_type="state")
    mixed = model.step(h, model.embed(other))
    assert close(mixed, model(other, n_loops=3, start_at_loop=2, state=h, return_type="state"))
    assert not close(mixed, model.step(h, model.embed(one)))


def _compiled_layers(model: nn.Module) -> nn.Module:
    model.layers[0] = torch.compile(model.layers[0], backend="eager")  # type: ignore[index]
    return model


def _compiled_in_place(model: nn.Module) -> nn.Module:
    model.compile(backend="eager")
    return model


@pytest.mark.parametrize(
    "compiled",
    [lambda model: torch.compile(model, backend="eager"), _compiled_layers, _compiled_in_place],
)
def test_a_compiled_model_has_the_hooks_of_the_one_inside(
    compiled: Callable[[nn.Module], nn.Module],
) -> None:
    name, hook = "injected", "loops.1.hook_state_post"
    x = inputs_of(name)
    plain, model = adapted(name), compiled(copy.deepcopy(published(name)))
    other = adapt(model, inputs=x, repeat="layers")
    _, cache = plain.run_with_cache(x, n_loops=4)
    _, compiled_cache = other.run_with_cache(x, n_loops=4)
    assert torch.equal(compiled_cache.stack("state_post"), cache.stack("state_post"))
    runs = [
        each.run_with_hooks(x, fwd_hooks=[(hook, lambda h, hook: h * 0.5)])
        for each in (plain, other)
    ]
    assert torch.equal(*runs) and not close(runs[0], plain(x))


def test_its_copy_is_a_model_of_its_own() -> None:
    model, inputs = adapted("looped"), inputs_of("looped")
    before, other = model(inputs), copy.deepcopy(model)
    with torch.no_grad():
        for x in other.parameters():
            x.zero_()
    assert not other(inputs).any() and torch.equal(model(inputs), before)


def test_causality_and_vocabulary_are_measured() -> None:
    assert adapted("looped").config.causal is True and adapted("albert").config.causal is False
    assert adapted("looped").config.d_vocab == VOCAB and adapted("features").config.d_vocab is None
    assert adapted("looped").config.n_ctx is None
    with pytest.raises(InputError, match="tokens from 0 to 16"):
        adapted("looped")(torch.full((1, 3), VOCAB))


def test_it_generates_by_running_the_whole_again() -> None:
    model, tokens = adapted("looped"), inputs_of("looped", 2, 4)
    new = generate(model, tokens, n_loops=3, max_new_tokens=3)
    for _ in range(3):
        tokens = torch.cat((tokens, own("looped", tokens)[:, -1:].argmax(-1)), dim=1)
    assert torch.equal(new, tokens[:, 4:])


# Studies


def batch_of(name: str) -> Batch:
    inputs = inputs_of(name, 4, 5)
    n_loops = torch.full((4,), CASES[name].n_loops)
    return Batch(inputs, own(name, inputs).argmax(-1), torch.full((4,), 5), n_loops)


@pytest.mark.parametrize("name", ["albert_lm", "looped", "injected", "pre_norm", "padded"])
def test_studies_run_unchanged(name: str) -> None:
    model, batch = adapted(name), batch_of(name)
    result = dynamics.convergence_study(model, batch, n_loops=12, limit_steps=4, n_spectral=0)
    assert result.data.sizes
    lens = lenses.lens_study(model, batch.inputs, lens="coda", n_loops=3)
    assert lens.data.sizes


@pytest.mark.parametrize("name", ["albert_lm", "injected", "padded"])
def test_a_state_of_one_input_in_the_run_of_another(name: str) -> None:
    model, batch = adapted(name), batch_of(name)
    places, loops = torch.tensor([[1], [4]]), torch.tensor([1, 2])
    pairs = interventions.InterchangePairs.of(
        batch,
        base=torch.tensor([0, 1]),
        source=torch.tensor([2, 3]),
        positions=places,
        loop=loops,
    )
    changed = interventions.InterchangeRun(model, pairs).interchange()
    states = model(batch.inputs, return_type="states")
    last = published(name).get_submodule(CASES[name].last)
    for k, (base, source) in enumerate(((0, 2), (1, 3))):
        loop, place = int(loops[k]), int(places[k])

        def put(x: Tensor, place: int = place, state: Tensor = states[loop, source]) -> Tensor:
            x = x.clone()
            x[:, place] = state[place]
            return x

        with edited(last, loop - 1, put):  # the model's own forward
            expected = own(name, batch.inputs[base : base + 1]).argmax(-1)
        assert torch.equal(changed[k, model.n_loops - loop], expected[0])


@pytest.mark.parametrize("component", ["state", "resid_pre", "layers.0.linear1.hook_out"])
def test_a_patching_sweep_is_what_hooks_do(component: str) -> None:
    model, base, source = (
        adapted("looped"),
        inputs_of("looped", 2),
        inputs_of("looped", 2, seed=1),
    )

    def metric(logits: Tensor) -> Tensor:
        return logits[..., 0].mean(-1)

    result = interventions.patching_sweep(
        model, base, source, n_loops=3, component=component, loops=[1], metric=metric
    )
    sites = {"state": "hook_state_pre", "resid_pre": "blocks.0.hook_resid_pre"}
    site = f"loops.1.{sites.get(component, component)}"
    _, cache = model.run_with_cache(source, names_filter=site)
    patched = model.run_with_hooks(base, fwd_hooks=[(site, lambda x, hook: cache[site])])
    logits = patched, model(base), model(source)
    value, low, high = (float(metric(x.detach()).mean()) for x in logits)
    effect = result.data["effect"].sel(loop=1, pos="all", head="all").values.flatten()[0]
    assert effect == pytest.approx((value - low) / (high - low), abs=1e-3)


# What is refused


class Timed(Looped):
    """The layer reads the loop's index."""

    def __init__(self) -> None:
        super().__init__(0)
        self.block = TimedLayer()

    def loops(self, h: Tensor, mask: Tensor) -> Tensor:
        for t in range(self.n_loops):
            h = self.block(h, torch.tensor(t))
        return h


class TimedLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.map, self.time = nn.Linear(WIDTH, WIDTH), nn.Embedding(8, WIDTH)

    def forward(self, h: Tensor, when: Tensor) -> Tensor:
        return self.map(h + self.time(when)).tanh()


class Signal(Looped):
    """A timing signal is added between the loops, by no module of the block."""

    def loops(self, h: Tensor, mask: Tensor) -> Tensor:
        for t in range(self.n_loops):
            h = self.layers[0](h + t)
        return h


class Faint(Looped):
    """The same, as faint as the rounding of half precision."""

    def loops(self, h: Tensor, mask: Tensor) -> Tensor:
        for t in range(self.n_loops):
            h = self.layers[0](h + 1e-4 * t)
        return h


class Branches(Looped):
    """The block reads the embedding each time; its outputs are summed."""

    def loops(self, h: Tensor, mask: Tensor) -> Tensor:
        return sum(self.layers[0](h * (k + 1)) for k in range(3))  # type: ignore[return-value]


class Halting(Looped):
    """Logits are read from the mean of all states, as with adaptive computation time."""

    def loops(self, h: Tensor, mask: Tensor) -> Tensor:
        states = []
        for _ in range(self.n_loops):
            h = self.layers[0](h)
            states.append(h)
        return torch.stack(states).mean(0)


class Carry(Looped):
    """Two tensors are fed back."""

    def loops(self, h: Tensor, mask: Tensor) -> Tensor:
        carry = torch.zeros_like(h)
        for _ in range(self.n_loops):
            carry = carry * 0.5 + h
            h = self.layers[0](carry)
        return h


class Layerwise(Looped):
    """Each layer runs several times before the next."""

    def loops(self, h: Tensor, mask: Tensor) -> Tensor:
        for layer in self.layers:
            for _ in range(self.n_loops):
                h = layer(h)
        return h


class Shared(Looped):
    """Different modules that share their weights: each is called once."""

    def __init__(self) -> None:
        super().__init__(2, n_loops=1)
        for name, weight in self.layers[0].named_parameters():
            path, _, last = name.rpartition(".")
            setattr(self.layers[1].get_submodule(path), last, weight)


class Once(Looped):
    """An ordinary transformer."""

    def __init__(self) -> None:
        super().__init__(n_loops=1)


class Pooled(nn.Module):
    """The state has no positions."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.block, self.out = nn.Embedding(VOCAB, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.embed(tokens).mean(1)
        for _ in range(3):
            h = self.block(h).tanh()
        return self.out(h)[:, None].expand(-1, tokens.shape[1], -1)


class ByLength(Looped):
    """As many loops as positions."""

    def loops(self, h: Tensor, mask: Tensor) -> Tensor:
        for _ in range(h.shape[1]):
            h = self.layers[0](h)
        return h


class Noisy(Looped):
    """The initial state is drawn anew."""

    def loops(self, h: Tensor, mask: Tensor) -> Tensor:
        return super().loops(h + torch.randn_like(h), mask)


class Skipping(Looped):
    """The embedding is added to the logits' state."""

    def loops(self, h: Tensor, mask: Tensor) -> Tensor:
        return super().loops(h, mask) + h


class Dropping(Looped):
    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Dropout(0.1)  # type: ignore[assignment]


class Keyed(Looped):
    """Later loops attend to the keys and values of the first one."""

    def __init__(self, layer: Callable[[], nn.Module], n_loops: int = 2) -> None:
        super().__init__(0, n_loops)
        self.layers = nn.ModuleList(layer() for _ in range(2))

    def loops(self, h: Tensor, mask: Tensor) -> Tensor:
        first: dict[nn.Module, tuple[Tensor, Tensor]] = {}
        for _ in range(self.n_loops):
            for layer in self.layers:
                h = layer(h, first)
        return h


class SharedKeys(nn.Module):
    """To them alone, as with Nanbeige's ``loop_share_kv``."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in "qkv")
        self.gate = nn.Linear(WIDTH, 1)

    def qkv(self, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.q(h), self.k(h), self.v(h)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, window: int = 99) -> Tensor:
        near = torch.ones(q.shape[1], q.shape[1]).tril().triu(1 - window) > 0
        return (q @ k.mT).masked_fill(~near, -torch.inf).softmax(-1) @ v

    def forward(self, h: Tensor, first: dict[nn.Module, tuple[Tensor, Tensor]]) -> Tensor:
        q, k, v = self.qkv(h)
        return h + self.attend(q, *first.setdefault(self, (k, v)))


class NeededKeys(SharedKeys):
    """As there, in code that does not run without its first loop."""

    def forward(self, h: Tensor, first: dict[nn.Module, tuple[Tensor, Tensor]]) -> Tensor:
        if len(first) == 1 and self in first:
            raise RuntimeError("a layer was left out")
        return super().forward(h, first)


class MixedKeys(SharedKeys):
    """To them, and in a window to the loop's own: the same as the first loop up to 8 positions."""

    def forward(self, h: Tensor, first: dict[nn.Module, tuple[Tensor, Tensor]]) -> Tensor:
        q, k, v = self.qkv(h)
        share, is_first = self.gate(q).sigmoid(), self not in first
        window = 99 if is_first else 8
        far = self.attend(q, *first.setdefault(self, (k, v)))
        return h + share * far + (1 - share) * self.attend(q, k, v, window)


class LoopCoder(Keyed):
    """As in IQuest's LoopCoder: the same mix, by a method beside the layer's forward."""

    def __init__(self) -> None:
        super().__init__(SharedKeys)

    def loops(self, h: Tensor, mask: Tensor) -> Tensor:
        first, layers = [], list(self.layers)
        for layer in layers:
            first.append(layer.qkv(h)[1:])  # type: ignore[operator]
            h = layer(h, {})
        for _ in range(1, self.n_loops):
            for layer, (k, v) in zip(layers, first):
                q, *own = layer.qkv(h)  # type: ignore[operator]
                share = layer.gate(q).sigmoid()  # type: ignore[operator]
                far, near = layer.attend(q, k, v), layer.attend(q, *own, window=8)  # type: ignore[operator]
                h = h + share * far + (1 - share) * near
        return h


REFUSED: dict[str, tuple[Callable[[], nn.Module], str | None, str]] = {
    "no such path": (Looped, "layer", "Did you mean 'layers'"),
    "the model itself": (Looped, "", "repeat: expected one of"),
    "called once": (
        Looped,
        "coda",
        "'coda', called once. Pass repeat='layers', called 3 times",
    ),
    "never called": (lambda: Normed(), "coda.self_attn.out_proj", "never called"),
    "untied": (Once, "layers", "weights of their own.*no looped model"),
    "tied, untied modules": (Shared, "layers", "different modules that share weights"),
    "untied, unnamed": (Once, None, "untied layers"),
    "an argument changes": (Timed, "block", "argument 'when' of 'block'.*loop 1.*loop"),
    "a signal between": (Signal, "layers.0", "repeat: expected a state.*four methods"),
    "a faint signal": (Faint, "layers.0", "repeat: expected a state"),
    "a faint signal in half precision": (
        lambda: Faint().bfloat16(),
        "layers.0",
        "repeat: expected a state",
    ),
    "not fed back": (Branches, "layers.0", "repeat: expected a state.*four methods"),
    "logits of all states": (Halting, "layers.0", "logits that are read from the last state alone"),
    "two states": (Carry, "layers.0", "repeat: expected a state"),
    "layer by layer": (Layerwise, "layers", "each module called several times before the next"),
    "no positions": (Pooled, "block", r"a state \[batch, pos, width\], got \[3, 8\]"),
    "loops by length": (ByLength, "layers.0", "same calls for inputs of every size"),
    "noise": (Noisy, "layers", "the same logits when it is run again"),
    "embedding read at the end": (Skipping, "layers", "last state alone"),
    "the first loop's keys": (lambda: Keyed(SharedKeys), "layers", "more of it, such as its keys"),
    "its keys, unnamed": (lambda: Keyed(SharedKeys, 3), None, "such as its keys"),
    "its keys, needed": (lambda: Keyed(NeededKeys), "layers", "such as its keys"),
    "its keys, mixed": (lambda: Keyed(MixedKeys), "layers", "such as its keys"),
    "LoopCoder": (LoopCoder, "layers", "the same modules in the same order in every loop"),
    "LoopCoder, unnamed": (LoopCoder, None, "expected"),
}


@pytest.mark.parametrize("why", list(REFUSED))
def test_what_has_no_place_is_refused_with_the_reason(why: str) -> None:
    build, repeat, message = REFUSED[why]
    torch.manual_seed(0)
    model = build().eval()
    with pytest.raises(InputError, match=message) as caught:
        adapt(model, repeat=repeat, inputs=inputs_of("looped"))
    assert caught.value.fix
    for module in model.modules():
        assert not module._forward_hooks and not module._forward_pre_hooks


def test_dropout_in_training_is_refused() -> None:
    with pytest.raises(InputError, match=r"evaluation mode.*model.eval\(\)"):
        adapt(Dropping(), repeat="layers", inputs=inputs_of("looped"))
    adapt(Dropping().eval(), repeat="layers", inputs=inputs_of("looped"))


@pytest.mark.usefixtures("no_type_checks")
def test_what_is_missing_is_named() -> None:
    model = published("looped")
    with pytest.raises(InputError, match="inputs: expected an example"):
        adapt(model, repeat="layers")
    with pytest.raises(InputError, match="inputs: expected an example"):
        adapt(model, inputs=torch.zeros(3))
    with pytest.raises(InputError, match="positions differ"):
        adapt(model, inputs=torch.ones(2, 4, dtype=torch.long))
    with pytest.raises(InputError, match="option of RepeatedAdapter"):
        adapt(model, inputs=inputs_of("looped"), seed=1)
    with pytest.raises(InputError, match="a torch"):
        adapt("looped", inputs=inputs_of("looped"))  # type: ignore[arg-type]


def test_a_forward_of_ones_own_names_the_logits() -> None:
    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = published("looped")

        def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
            return {"answer": self.inner(batch["tokens"])}

    tokens = inputs_of("looped")
    model = adapt(
        Wrapped(),
        repeat="inner.layers",
        inputs=tokens,
        forward=lambda model, tokens: model({"tokens": tokens})["answer"],
    )
    assert close(model(tokens), own("looped", tokens))
