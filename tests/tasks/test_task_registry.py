"""Tasks by name."""

from __future__ import annotations

import pytest
import torch

from loopinterp.core.errors import ConfigError, InputError
from loopinterp.tasks import Addition, Task, get_task, list_tasks, register_task
from loopinterp.tasks import task_registry as registry_module
from tests.tasks.answers import SETTINGS


@pytest.mark.parametrize(("name", "settings"), SETTINGS)
def test_every_built_in_task_meets_the_protocol_and_survives_its_own_config(name, settings):
    task = get_task(name, **settings)
    assert isinstance(task, Task)
    assert name in list_tasks()
    assert task.name == name
    assert get_task(task.name, **task.config()) == task
    assert (task.d_vocab is None) != (task.d_features is None)
    assert task.describe().endswith(".")
    assert "\n" not in task.describe()


@pytest.mark.parametrize(("name", "settings"), SETTINGS)
def test_a_sample_agrees_with_what_the_task_says_of_itself(name, settings):
    task = get_task(name, **settings)
    for distribution in task.distributions:
        generator = torch.Generator().manual_seed(1)
        batch = task.sample(7, batch_size=5, generator=generator, distribution=distribution)
        assert batch.inputs.shape[:2] == (5, task.n_positions(7))
        assert batch.targets.shape == (5, task.n_positions(7))
        if distribution != "mixed":  # factors, or operands, of several lengths
            assert batch.n_loops.tolist() == [task.n_loops(7)] * 5
        assert int(batch.n_loops.max()) <= task.n_loops(7)
        answers = batch.targets[batch.targets >= 0]
        assert int(answers.max()) < task.d_vocab_out
        torch.testing.assert_close(task.targets(batch), batch.targets)
        if task.d_vocab is not None:
            assert int(batch.inputs.max()) < task.d_vocab


@pytest.mark.parametrize(("name", "settings"), SETTINGS)
def test_the_same_seed_gives_the_same_examples_and_another_seed_others(name, settings):
    task = get_task(name, **settings)
    first, again, other = (
        task.sample(12, batch_size=8, generator=torch.Generator().manual_seed(seed)).inputs
        for seed in (3, 3, 4)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_an_unknown_task_names_the_nearest():
    with pytest.raises(InputError) as caught:
        get_task("additon")
    assert caught.value.what == "task" and "'addition'" in caught.value.fix


def test_an_unknown_setting_names_the_settings_there_are():
    for name, setting in (("addition", {"base": 10}), ("parity", {"format": "pairs"})):
        with pytest.raises(ConfigError) as caught:
            get_task(name, **setting)
        assert caught.value.what == f"setting of task {name}"
        assert ("format" in caught.value.expected) == (name == "addition")


@pytest.mark.usefixtures("no_type_checks")
def test_a_registered_task_is_found_and_its_name_is_protected(monkeypatch):
    monkeypatch.setattr(registry_module, "_FACTORIES", dict(registry_module._FACTORIES))
    register_task("mine", Addition)
    assert get_task("mine", format="features").d_features == 2
    assert "mine" in list_tasks()
    with pytest.raises(InputError) as caught:
        register_task("mine", Addition)
    assert caught.value.what == "task name"
    register_task("mine", Addition, replace=True)
    with pytest.raises(InputError) as caught:
        register_task("other", Addition())  # type: ignore[arg-type]
    assert caught.value.what == "factory"
