"""Mutations of loop programs: one property changed, always or under a :class:`Condition`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

import torch
from jaxtyping import Int
from torch import Tensor

from loopinterp.programs.expressions import (
    Aggregate,
    Elementwise,
    Expr,
    Select,
    SelWidth,
    Seq,
    ShiftRight,
    Var,
    postorder,
    rewritten,
)
from loopinterp.programs.language import (
    eq,
    full,
    indices,
    larger,
    ne,
    shift_right,
    smaller,
    tok_map,
    tokens,
    var,
    where,
)
from loopinterp.programs.program import LoopProgram, spell_loops


@dataclass(frozen=True)
class Condition:
    """A condition on positions and loops, with the variables it needs."""

    label: str = ""  # its part of a mutation's name
    holds: Seq | None = None  # 1 where it holds; None for always
    memory: Mapping[str, tuple[Seq, Seq]] = field(default_factory=dict)  # see changed

    def choose(self, inside: Seq, outside: Seq) -> Seq:
        return inside if self.holds is None else where(self.holds, inside, outside)

    def __and__(self, other: Condition) -> Condition:
        if self.holds is None or other.holds is None:
            return other if self.holds is None else self
        label, memory = f"{self.label} {other.label}", {**self.memory, **other.memory}
        return Condition(label, self.holds & other.holds, memory)


ALWAYS = Condition()


def at_tokens(program: LoopProgram, chosen: Sequence[int]) -> Condition:
    """Positions with one of these tokens; the label lists three of them."""
    listed = ", ".join(program.inputs[token] for token in chosen[:3])
    label = f"at {listed}" + (f" and {len(chosen) - 3} more" if len(chosen) > 3 else "")
    return Condition(label, tok_map(tokens, dict.fromkeys(chosen, 1), default=0, name="chosen"))


def once_converged(program: LoopProgram, lateness: int) -> Condition:
    """Position i from loop i + :func:`lateness` on, by a countdown."""
    name = program.unused_name("until_settled")
    countdown = {name: (larger(indices + lateness, 0), larger(var(name) - 1, 0))}
    return Condition("once settled", eq(var(name), 0), countdown)


def lateness(program: LoopProgram, inputs: Int[Tensor, "batch pos"], *, n_loops: int) -> int:
    """The most loops by which position i becomes constant later than at loop i."""
    trace = program.trace(inputs, n_loops)
    positions = torch.arange(inputs.shape[1], device=inputs.device)
    return max(int((trace.converged(name) - positions).max()) for name in program.step)


def changed(
    program: LoopProgram,
    what: str,
    when: Condition = ALWAYS,
    *,
    prepare: Mapping[str, Seq] | None = None,
    inside: Mapping[str, Seq] | None = None,
    step: Mapping[str, Seq] | None = None,
    memory: Mapping[str, tuple[Seq, Seq]] | None = None,
    finish: Seq | None = None,
) -> LoopProgram:
    """The program with other expressions, renamed.

    Steps ``inside`` apply where the condition holds, those of ``step`` everywhere. ``memory`` adds
    variables, each with its first value and its step.
    """
    name = f"{program.name}, {what} {when.label}".rstrip()
    chosen = {v: when.choose(x, program.step[v]) for v, x in (inside or {}).items()}
    added = {**(memory or {}), **when.memory}
    first, following = ({v: pair[k] for v, pair in added.items()} for k in (0, 1))
    return replace(
        program,
        name=name,
        prepare={**program.prepare, **(prepare or {}), **first},
        step={**program.step, **chosen, **(step or {}), **following},
        finish=program.finish if finish is None else finish,
        doc=f"A mutation: {name}.",
    )


def substituted(root: Seq, replacements: Mapping[Seq, Seq]) -> Seq:
    """The expression with every node among the keys replaced by its value, all at once.

    A selection that changes loses its name.
    """

    def change(old: Expr, new: Expr) -> Expr:
        if isinstance(old, Seq) and old in replacements:
            return replacements[old]
        return replace(new, name=None) if isinstance(new, Select) and new is not old else new

    return cast(Seq, rewritten([root], change)[root])


def after_a_step(root: Seq, program: LoopProgram) -> Seq:
    """The expression's value one loop later, by the present variables."""
    return substituted(root, {Var(name): x for name, x in program.step.items()})


def reads_of_other_positions(program: LoopProgram) -> list[Seq]:
    """The outermost expressions by which a step reads other positions' variables."""
    # A selection by position and token alone sees no variable.
    reads = dict.fromkeys(
        node
        for node in postorder(program.step.values())
        if isinstance(node, (Aggregate, ShiftRight, SelWidth)) and node.variables
    )
    inner = {below for read in reads for below in postorder(read.children)}
    return [read for read in reads if read not in inner]


# How one variable is kept.


def held(program: LoopProgram, name: str, when: Condition, *, loops: int) -> LoopProgram:
    """The variable changes only once a change was due for ``loops`` loops."""
    value, due = var(name), program.step[name]
    waited = program.unused_name(f"{name}_waited")
    waits = when.choose(ne(value, due) & (var(waited) < loops - 1), full(0))
    memory = {waited: (full(0), where(waits, var(waited) + 1, 0))}
    step, what = {name: where(waits, value, due)}, f"{name} held {spell_loops(loops)}"
    return changed(program, what, when, step=step, memory=memory)


def altered(program: LoopProgram, name: str, when: Condition, *, how: str) -> LoopProgram:
    """The variable is ``held for ever``, ``only grows``, ``only falls``, or is ``forgotten``.

    A forgotten variable returns to its first value where it would change.
    """
    value, due = var(name), program.step[name]
    altered = {
        "held for ever": value,
        "only grows": larger(value, due),  # as the carry of a sticky ripple
        "only falls": smaller(value, due),
        "forgotten": where(ne(value, due), program.prepare[name], due),
    }
    return changed(program, f"{name} {how}", when, inside={name: altered[how]})


def delayed(program: LoopProgram, name: str, when: Condition) -> LoopProgram:
    pending = program.unused_name(f"{name}_pending")
    memory = {pending: (program.prepare[name], program.step[name])}
    return changed(program, f"{name} delayed", when, inside={name: var(pending)}, memory=memory)


def kept_shorter(program: LoopProgram, name: str, when: Condition, *, loops: int) -> LoopProgram:
    """A kept value (:func:`keep_choice`) is recomputed after ``loops`` loops."""
    choice = keep_choice(program, name)
    assert choice is not None  # only such variables are mutated so
    keeps, anew = choice
    age = program.unused_name(f"{name}_kept")
    limited = when.choose(keeps & (var(age) < loops), full(0))
    memory = {age: (full(0), where(limited, smaller(var(age) + 1, loops), 0))}
    inside, what = {name: where(limited, var(name), anew)}, f"{name} kept {spell_loops(loops)}"
    return changed(program, what, when, inside=inside, memory=memory)


def keep_choice(program: LoopProgram, name: str) -> tuple[Seq, Seq] | None:
    """The condition under which a step keeps the variable, and its expression otherwise."""
    due, value = program.step[name], var(name)
    if not isinstance(due, Elementwise) or due.op not in ("or", "where"):
        return None
    if due.op == "or":  # a truth value that is never reset
        condition, inside, outside = value, *sorted(due.args, key=lambda x: x is not value)
    else:
        condition, inside, outside = due.args
    keeps, anew = (condition, outside) if inside is value else (~condition, inside)
    # A counter continues from its own value: it is not computed anew.
    local = substituted(anew, dict.fromkeys(reads_of_other_positions(program), full(0)))
    if value not in (inside, outside) or name in local.variables:
        return None
    return (keeps & ~anew if due.op == "or" else keeps), anew


def recomputed(program: LoopProgram, name: str, when: Condition) -> LoopProgram:
    """A variable that is only kept is recomputed from the tokens in every loop."""
    step = {name: when.choose(program.prepare[name], var(name))}
    return changed(program, f"{name} recomputed", when, step=step)


def reading_old(program: LoopProgram, name: str, when: Condition) -> LoopProgram:
    """Other positions read the variable's value of the loop before."""
    before = program.unused_name(f"{name}_before")
    reads = reads_of_other_positions(program)
    old = {read: substituted(read, {var(name): var(before)}) for read in reads}
    inside = {v: substituted(x, old) for v, x in program.step.items()}
    memory = {before: (program.prepare[name], var(name))}
    what = f"{name} of a loop ago read by others"
    return changed(program, what, when, inside=inside, memory=memory)


# What only a state of another loop, or a second interchange in one run, brings out.


def held_out_of_phase(program: LoopProgram, name: str, when: Condition = ALWAYS) -> LoopProgram:
    """The variable never changes where a clock of period 4 differs from its left neighbour's."""
    clock = program.unused_name("clock")
    differs = ne(var(clock), shift_right(var(clock))) & ne(indices, 0)
    inside = {name: where(differs, var(name), program.step[name])}
    memory = {clock: (full(0), where(var(clock) < 3, var(clock) + 1, full(0)))}
    return changed(program, f"{name} held where out of phase", when, inside=inside, memory=memory)


def forgotten_the_second_time(
    program: LoopProgram, name: str, when: Condition = ALWAYS
) -> LoopProgram:
    """The variable returns to its first value for ever after a second intervention.

    Each position stores its own and its left neighbour's variable of the loop before; memories that
    disagree reveal an intervention.
    """
    before, left, times = (
        program.unused_name(f"{name}_{suffix}") for suffix in ("before", "left_before", "times")
    )
    disturbed = ne(var(left), shift_right(var(before))) & ne(indices, 0)
    count = smaller(larger(var(times), shift_right(var(times))) + disturbed, 2)
    first = program.prepare[name]
    memory = {
        before: (first, var(name)),
        left: (shift_right(first), shift_right(var(name))),
        times: (full(0), count),
    }
    inside = {name: where(count < 2, program.step[name], first)}
    what = f"{name} forgotten after the second change"
    return changed(program, what, when, inside=inside, memory=memory)


# When things happen.


def several_steps(program: LoopProgram, steps: int, when: Condition) -> LoopProgram:
    step = dict(program.step)
    for _ in range(steps - 1):  # each variable in terms of those one step earlier
        step = {name: after_a_step(x, program) for name, x in step.items()}
    number = {2: "two", 3: "three"}[steps]
    return changed(program, f"{number} steps a loop", when, inside=step)


def every_other_loop(program: LoopProgram, when: Condition) -> LoopProgram:
    resting = program.unused_name("resting")
    inside = {v: where(var(resting), var(v), x) for v, x in program.step.items()}
    memory = {resting: (full(0), ~var(resting))}
    return changed(program, "a step every other loop", when, inside=inside, memory=memory)


def worked_out_from_before(program: LoopProgram, read: Seq, when: Condition) -> LoopProgram:
    """A read (:func:`reads_of_other_positions`) is computed one step further, from a loop ago.

    A change then reaches others one loop later and two positions further.
    """
    begun = program.unused_name("begun")
    reading = after_a_step(read, program)
    before = {name: program.unused_name(f"{name}_before") for name in sorted(reading.variables)}
    old = substituted(reading, {var(name): var(was) for name, was in before.items()})
    known = when.choose(where(var(begun), old, read), read)
    step = {name: substituted(x, {read: known}) for name, x in program.step.items()}
    memory = {was: (program.prepare[name], var(name)) for name, was in before.items()}
    memory[begun] = full(0), full(1)
    what = f"{' and '.join(sorted(read.variables))} worked out from a loop ago"
    return changed(program, what, when, step=step, memory=memory)


def answers_by_the_larger(program: LoopProgram, name: str) -> LoopProgram:
    """The answer uses the larger of a variable and its value one loop before."""
    before = program.unused_name(f"{name}_before")
    finish = substituted(program.finish, {var(name): larger(var(name), var(before))})
    memory = {before: (program.prepare[name], var(name))}
    return changed(
        program, f"answers by the larger {name} of two loops", memory=memory, finish=finish
    )


def answers_ahead(program: LoopProgram) -> LoopProgram:
    return changed(program, "answers a loop ahead", finish=after_a_step(program.finish, program))


# How variables are stored; clean runs are those of the original at every loop. Interchanges of
# whole positions separate copies that another position keeps, but no other code of a variable.


def negated(program: LoopProgram, name: str) -> LoopProgram:
    """The variable is stored as 1 - v."""
    read = {var(name): 1 - var(name)}
    step = {v: substituted(x, read) for v, x in program.step.items()}
    if name in step:
        step[name] = 1 - step[name]
    prepare, finish = {name: 1 - program.prepare[name]}, substituted(program.finish, read)
    return changed(program, f"{name} negated", prepare=prepare, step=step, finish=finish)


def doubled(program: LoopProgram, name: str) -> LoopProgram:
    """Two copies of the variable, each computed from the other; the answer reads one."""
    copy = program.unused_name(f"{name}_copy")
    other = {var(name): var(copy)}
    step, finish = (substituted(x, other) for x in (program.step[name], program.finish))
    memory = {copy: (program.prepare[name], program.step[name])}
    return changed(program, f"{name} doubled", step={name: step}, memory=memory, finish=finish)


def read_from_a_copy(program: LoopProgram, read: Seq, *, trust: str) -> LoopProgram:
    """Readers of other positions use a copy of the read, kept one step ahead; equal in clean runs.

    ``trust`` is ``copy``, or the ``larger`` or ``smaller`` of copy and read.
    """
    copy = program.unused_name("copied")
    trusted = {
        "copy": var(copy),
        "larger": larger(var(copy), read),
        "smaller": smaller(var(copy), read),
    }
    step = {v: substituted(x, {read: trusted[trust]}) for v, x in program.step.items()}
    prepare = {copy: substituted(read, {Var(v): x for v, x in program.prepare.items()})}
    step[copy] = after_a_step(read, changed(program, "", prepare=prepare, step=step))
    how = f" or the others, the {trust}" if trust != "copy" else ""
    what = f"{' and '.join(sorted(read.variables))} read from a copy{how}"
    return changed(program, what, prepare=prepare, step=step)
