"""Adapted models as files: built from a configuration, written, read back, and refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from loopinterp.adapters import AdaptedModelConfig, adapt, keep_outputs
from loopinterp.adapters.architectures import read_adapted
from loopinterp.core.errors import CheckpointError, ConfigError
from loopinterp.models import describe_model
from loopinterp.models.checkpoints import write_model
from loopinterp.tasks import PHop
from loopinterp.training import GivenModelConfig, Run
from tests.adapters.published import albert, hrm, huginn, ouro, trm
from tests.refusals import naming

TASK = PHop(n_symbols=4, most_hops=8)
TOKENS = TASK.sample(5, batch_size=3, seed=0).inputs
SIZES: dict[str, dict[str, Any]] = {
    "albert": {"vocab_size": 13},
    "hrm": {"vocab_size": 13, "seq_len": 6},
    "huginn": {"vocab_size": 13},
    "ouro": {"vocab_size": 13},
    "trm": {"vocab_size": 13, "seq_len": 6},
}
MODULES: dict[str, Any] = {
    "albert": albert, "hrm": hrm, "huginn": huginn, "ouro": ouro, "trm": trm
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(SIZES))
@torch.no_grad()
def test_a_model_read_back_computes_what_it_did(name: str, tmp_path: Path) -> None:
    published = MODULES[name].tiny(seed=5, **SIZES[name])
    options: Any = {"seed": 3} if name == "huginn" else {}
    model = adapt(published, **options)
    config = AdaptedModelConfig.of(model)
    assert (config.architecture, config.d_vocab, config.d_vocab_out) == (name, 13, 13)
    assert AdaptedModelConfig.from_dict(config.to_dict()) == config
    write_model(model, tmp_path, config=config.to_dict())
    again = read_adapted(tmp_path)
    assert type(again) is type(model) and not again.training
    torch.testing.assert_close(again(TOKENS), model(TOKENS), rtol=0, atol=0)
    assert describe_model(again) == describe_model(model)
    assert not torch.equal(config.build(seed=1)(TOKENS), model(TOKENS))


@pytest.mark.parametrize("name", ["hrm", "huginn", "ouro", "trm"])
@torch.no_grad()
def test_a_run_keeps_an_adapted_model_with_the_classes_of_its_task(
    name: str, tmp_path: Path
) -> None:
    published = MODULES[name].tiny(seed=5, **SIZES[name])
    every_class = adapt(published)(TOKENS)
    with naming("model"):
        Run.from_model(adapt(published), TASK, tmp_path / "run", max_n=5, origin="drawn")
    keep_outputs(published, TASK.d_vocab_out)
    model = adapt(published)
    torch.testing.assert_close(model(TOKENS), every_class[..., :5])
    run = Run.from_model(model, TASK, tmp_path / "run", max_n=5, origin="drawn")
    again = Run.load(tmp_path / "run")
    assert again == run and again.task == TASK and again.cutoff == 5
    torch.testing.assert_close(again.model()(TOKENS), model(TOKENS), rtol=0, atol=0)
    assert again.model().task == TASK and again.model().loop_rule == model.loop_rule
    other = adapt(MODULES[name].tiny(seed=6, **SIZES[name]))
    keep_outputs(other.published, TASK.d_vocab_out)
    elsewhere = Run.from_model(
        adapt(other.published), TASK, tmp_path / "2", max_n=5, origin="drawn"
    )
    weights = "model/model.safetensors"
    (run.folder / weights).write_bytes((elsewhere.folder / weights).read_bytes())
    with pytest.raises(CheckpointError):
        again.model()


def test_what_cannot_be_rebuilt_is_refused(tmp_path: Path) -> None:
    published = ouro.tiny(vocab_size=13)
    with naming("model"):  # a generic adapter of the same module may loop otherwise
        AdaptedModelConfig.of(adapt(published, inputs=TOKENS, repeat="model.layers"))

    class OuroForCausalLM(torch.nn.Module):  # of the same name, and other code
        def __init__(self) -> None:
            super().__init__()
            self.model, self.lm_head = published.model, published.lm_head
            self.config = published.config

    with naming("model"):
        AdaptedModelConfig.of(adapt(OuroForCausalLM().eval()))
    with naming("published"):
        keep_outputs(published, 14)
    with naming("published"):
        keep_outputs(albert.tiny(), 5)


@pytest.mark.parametrize(
    ("what", "values"),
    [
        ("sizes.vocab_size", {"architecture": "ouro", "sizes": {}}),
        ("n_outputs", {"architecture": "albert", "sizes": {"vocab_size": 13}, "n_outputs": 5}),
        ("architecture", {"architecture": "our", "sizes": {"vocab_size": 13}}),
    ],
)
def test_a_configuration_is_checked(what: str, values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        AdaptedModelConfig.from_dict(values)
    assert caught.value.what == what


def test_an_unknown_size_gets_the_nearest_name() -> None:
    with pytest.raises(ConfigError) as caught:
        AdaptedModelConfig(architecture="ouro", sizes={"vocab_size": 13, "hiden_size": 8}).build()
    assert "'hidden_size'" in caught.value.fix


def test_files_of_two_models_do_not_fit(tmp_path: Path) -> None:
    small, large = (adapt(ouro.tiny(vocab_size=13, hidden_size=size)) for size in (32, 64))
    for name, model in (("small", small), ("large", large)):
        write_model(model, tmp_path / name, config=AdaptedModelConfig.of(model).to_dict())
    for file in ("config.json", "model.safetensors"):
        mixed = tmp_path / f"with {file}"
        mixed.mkdir()
        for each in ("config.json", "model.safetensors"):
            source = tmp_path / ("large" if each == file else "small") / each
            (mixed / each).write_bytes(source.read_bytes())
        with pytest.raises(CheckpointError):
            read_adapted(mixed)


@pytest.mark.parametrize(
    ("path", "value", "what"),
    [
        (("architecture",), "ourro", "model.architecture"),
        (("sizes", "vocab_size"), "many", "model.sizes.vocab_size"),
        (("n_outputs",), 0, "model.n_outputs"),
        (("sizez",), {}, "setting of model"),
    ],
)
def test_a_damaged_configuration_of_a_run_is_refused_by_the_name_of_its_setting(
    path: tuple[str, ...], value: object, what: str
) -> None:
    """Also of a looped transformer: which of the two it is, its architecture says."""
    task = PHop()
    sizes = {"vocab_size": task.d_vocab}
    model = AdaptedModelConfig(architecture="ouro", sizes=sizes, n_outputs=task.d_vocab_out)
    config = GivenModelConfig(task="p_hop", model=model, max_n=8, origin="given")
    assert GivenModelConfig.from_dict(config.to_dict()) == config
    document = config.to_dict()
    settings = document["model"]
    for name in path[:-1]:
        settings = settings[name]
    settings[path[-1]] = value
    with pytest.raises(ConfigError) as caught:
        GivenModelConfig.from_dict(document)
    assert caught.value.what == what
