"""The examples of a study, in the model's tokens and numbers of loops."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from loopinterp.core.errors import InputError, check_integer, describe_tensor
from loopinterp.models.iteration import bind, need_repeatable
from loopinterp.models.protocol import (
    check_loops,
    declared,
    device_of,
    need_causal,
    need_examples,
    need_model,
    need_weights,
    own_depth,
    rule_of,
)
from loopinterp.tasks.sampling import as_batch
from loopinterp.tasks.token_by_token import TokenByToken

if TYPE_CHECKING:
    from jaxtyping import Float, Int
    from torch import Tensor

    from loopinterp.tasks.task import Batch, Task


def examples_for(
    model: Any, data: object, *, needs_loops: bool = False, of_states: bool = False, **drawn: Any
) -> Batch:
    """The batch of a study, given or drawn from a task, fitted to this model.

    Args:
        needs_loops: Whether the study follows the model from loop to loop, up to T(n).
        of_states: Whether it reads states only, and so accepts models without classes.
        **drawn: ``n``, ``batch_size`` and ``seed`` of :func:`~loopinterp.tasks.as_batch`.
    """
    need_model(model)
    need_weights(model)
    batch = as_batch(data, device=device_of(model), **drawn)
    return fit_to_model(model, batch, needs_loops=needs_loops, of_states=of_states)


def inputs_and_loops(
    model: Any, data: object, n_loops: int | None, **drawn: Any
) -> tuple[Int[Tensor, "batch pos"] | Float[Tensor, "batch pos d_features"], int]:
    if n_loops is not None:
        check_loops(n_loops)
    if not isinstance(data, torch.Tensor):
        batch = examples_for(model, data, **drawn)
        return batch.inputs, int(batch.n_loops.max()) if n_loops is None else n_loops
    n_loops = own_depth(model) if n_loops is None else n_loops
    need_examples(data)
    if n_loops is None or data.ndim < 2:
        expected = "a batch or a task, or inputs [batch, pos] and the n_loops to run"
        what, fix = "n_loops" if n_loops is None else "data", "Pass inputs[None], n_loops=16."
        raise InputError(what, expected=expected, given=describe_tensor(data), fix=fix)
    need_model(model)
    need_repeatable(model, data.to(device_of(model)))
    _need_answers(model, data)
    return data, n_loops


def fit_to_model(
    model: Any, batch: Batch, *, needs_loops: bool = False, of_states: bool = False
) -> Batch:
    if needs_loops:
        need_loops(model)
        check_integer("n_loops of a batch", int(batch.n_loops.max()), least=1)
    if batch.task is not None:
        need_model_of(batch.task, model, batch.inputs)
    need_repeatable(model, batch.inputs.to(device_of(model)))
    if not of_states:
        _need_answers(model, batch.inputs)
    rule = rule_of(model)
    return batch if rule is None else replace(batch, n_loops=rule.loops_for(batch.n_loops))


def loops_at(model: Any, task: Task, n: int) -> int:
    """Loops for problems of length n: T(n), or what the model's rule gives."""
    rule, required = rule_of(model), task.n_loops(n)
    return required if rule is None else int(rule.loops_for(torch.tensor(required)))


def makes_one_loop(model: Any) -> bool:
    return own_depth(model) == 1


def need_loops(model: Any) -> None:
    if makes_one_loop(model):
        fix = "Set model.loop_rule = None to loop its block T(n) times."
        raise InputError("model", expected="one that loops", given="a rule of one loop", fix=fix)


def answered_after(model: Any) -> str:
    """The loop after which a model answers, in words."""
    rule, depth = rule_of(model), own_depth(model)
    if depth is None:
        return "T(n)" if rule is None else str(rule)
    return f"its own {depth} loop{'s' * (depth > 1)}"


def need_model_of(task: Task, model: Any, inputs: Tensor | None = None) -> None:
    """Raise if a model does not fit a task: by its sizes, its own ``task``, or causality.

    With ``inputs``, its readout shows undeclared output classes. Tasks whose inputs hold their
    answers need a causal model.
    """
    if isinstance(task, TokenByToken):
        need_causal(model)
    sizes = ("d_vocab", "d_features", "d_vocab_out")
    declares = {name: declared(model, name) for name in sizes}
    task_sizes = {name: getattr(task, name) for name in sizes}
    if inputs is not None:
        declares["d_vocab_out"] = _classes(model, inputs)
    compared = {name for name, size in declares.items() if size is not None}
    if compared & {*sizes[:2]}:
        # A model has one of the two kinds of input.
        compared |= {*sizes[:2]}
    task_name, known = _task_name(task), _task_name(declared(model, "task"))
    if known == task_name and (declares["d_vocab_out"] or 0) < task.d_vocab_out:
        compared -= {"d_vocab_out"}  # a compiled program may lack classes that it never answers
    if any(declares[name] != task_sizes[name] for name in compared):
        expected, got = (
            ", ".join(f"{name}={size}" for name, size in each.items() if size is not None)
            for each in (task_sizes, declares)
        )
        expected = f"one with the tokens of task {task.name!r}: {expected}"
        fix = "Use its own task, or WithVocabulary(model, tokens=…, answers=…)."
        raise InputError("model", expected=expected, given=got or "nothing", fix=fix)
    if known not in (None, task_name):
        expected, got = f"one of task {task_name!r}", f"one of {known!r}"
        fix = "Use its own task, or set model.task = None if the tokens mean the same."
        raise InputError("model", expected=expected, given=got, fix=fix)


def need_classes(model: Any, batch: Batch) -> None:
    most = int(batch.targets.max())
    # One number is no class.
    if most >= 0 and most >= (classes := _classes(model, batch.inputs)) > 1:
        expected, fix = f"classes in 0..{classes - 1}", "Use a task of the model."
        raise InputError("targets of the batch", expected=expected, given=str(most), fix=fix)


def _need_answers(model: Any, inputs: Tensor) -> None:
    if _classes(model, inputs) == 1:
        what, expected = f"readout of {type(model).__name__}", "two classes or more"
        fix = "Use a study of states: convergence_study, geometry_study or local_stability_study."
        raise InputError(what, expected=expected, given="one number, of a regression", fix=fix)


def _task_name(task: Any) -> str | None:
    name, inner = getattr(task, "name", None), getattr(task, "task", None)
    return name if inner is None else f"{name} of {_task_name(inner)}"


@torch.no_grad()
def _classes(model: Any, inputs: Tensor) -> int:
    """Output classes, as the model declares them or as its readout has them."""
    if (known := declared(model, "d_vocab_out")) is not None:
        return known
    bound = bind(model, inputs[:1].to(device_of(model)))
    return bound.readout(bound.h0).shape[-1]
