"""Where a model's own forward loops: found by recording its calls, and tested by rerunning it.

Each recorded state, the output of one call per loop, must lead to the next one when it is put back.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten

from loopinterp.adapters.module_calls import Call, Slot, is_floats
from loopinterp.adapters.own_forward import Block, OwnForward, Recording, RepeatedLoop, slots_of
from loopinterp.core.errors import InputError, unknown_name
from loopinterp.models.protocol import spell

if TYPE_CHECKING:
    from torch import Tensor

# The block


def repeated_blocks(native: OwnForward, calls: Sequence[Call]) -> list[Block]:
    """Modules with weights that are called several times, those with the most weights first.

    All that are called equally often are one block; so are those of them in one container, and
    each by itself.
    """
    often = Counter(call.path for call in calls)
    several = {path for path, n in often.items() if n > 1 and _weights(native.by_path[path])}
    outermost = [
        path  # in the order in which the model declares them
        for path in native.by_path
        if path in several and not any(path.startswith(f"{x}.") for x in several)
    ]
    groups: dict[tuple[int, str | None], list[str]] = {}
    for path in outermost:
        for container in (None, path.rpartition(".")[0], path):
            groups.setdefault((often[path], container), []).append(path)
    blocks = dict.fromkeys(tuple(group) for group in groups.values())
    return sorted(blocks, key=lambda b: (-sum(_weights(native.by_path[x]) for x in b), b))


def _weights(module: nn.Module) -> int:
    return sum(x.numel() for x in module.parameters())


def block_of(native: OwnForward, calls: Sequence[Call], repeat: str | Sequence[str]) -> Block:
    block = (repeat,) if isinstance(repeat, str) else tuple(repeat)
    for path in block:
        if path not in native.by_path or not path:
            raise unknown_name("repeat", path, filter(None, native.by_path))
    often = Counter(call.path for call in calls)
    counts = [often[path] for path in _inside(native, block) if path in often]
    if counts and max(counts) > 1:
        return block
    several = repeated_blocks(native, calls)
    got = f"{block[0]!r}, {'called once' if counts else 'never called'}"
    if max(counts, default=0) == 1 and not often[block[0]]:
        got = f"{block[0]!r}, whose layers have weights of their own and are called once"
        module = native.by_path[block[0]]
        n_tied = len(list(module.parameters()))
        if len(list(module.named_parameters(remove_duplicate=False))) > n_tied:
            got = f"{block[0]!r}, of different modules that share weights"
    fix = "It is no looped model, or its loop is not made of modules: write the four methods."
    if several:
        named = as_named(native, several[0])
        shown = named[0] if len(named) == 1 else list(named)
        fix = f"Pass repeat={shown!r}, called {often[several[0][0]]} times."
    expected = "modules that one forward calls several times"
    raise InputError("repeat", expected=expected, given=got, fix=fix)


def as_named(native: OwnForward, block: Block) -> Block:
    """A block as a user names it: the path of a list, if it has all modules of one."""
    container = block[0].rpartition(".")[0]
    is_all = len(block) > 1 and container and _members(native, (container,)) == list(block)
    return (container,) if is_all else block


def _inside(native: OwnForward, block: Block) -> set[str]:
    modules = {id(x) for path in block for x in native.by_path[path].modules()}
    return {path for path, module in native.by_path.items() if id(module) in modules}


def _loops_of(native: OwnForward, calls: Sequence[Call], block: Block) -> list[list[Call]]:
    """The calls inside a block, loop by loop.

    Raises:
        InputError: If they come in another order in some loop.
    """
    paths = _inside(native, block)
    inside = [call for call in calls if call.path in paths]
    order = [call.path for call in inside]
    lengths = (n for n in range(1, len(order) + 1) if len(order) % n == 0)
    period = next(n for n in lengths if order == order[:n] * (len(order) // n))
    if period == len(order):
        often = Counter(order)
        most = max(often, key=lambda path: often[path])
        expected = "the same modules in the same order in every loop"
        got = f"{most!r} called {often[most]} times, others {min(often.values())} times"
        if len({*often.values()}) == 1:
            got = "each module called several times before the next"
        fix = "Name the path of one module that is called again and again."
        raise InputError("repeat", expected=expected, given=got, fix=fix)
    return [inside[k : k + period] for k in range(0, len(inside), period)]


# The state


@dataclass(frozen=True, kw_only=True)
class _Search:
    native: OwnForward
    recording: Recording
    block: Block
    loops: list[list[Call]]

    def ends(self) -> Iterator[list[Call]]:
        """Calls whose output may be the state: the block's last one, and those right after it."""
        calls, after = self.recording.calls, []
        for loop, following in zip(self.loops, [*self.loops[1:], None]):
            stop = min(x.entered for x in following) if following else float("inf")
            start = max(x.left for x in loop)
            after.append([x for x in calls if start < x.entered and x.left < stop])
        yield [loop[-1] for loop in self.loops]
        for same in zip(*after):
            if len({call.path for call in same}) > 1:
                return
            yield list(same)

    def entries(self) -> list[Call | None]:
        """Calls before the first loop, the last one first, and the model's input."""
        first = min(call.entered for call in self.loops[0])
        before = [x for x in self.recording.calls if x.left < first and _is_stream(x.returned)]
        bare = [None] if _is_stream(self.recording.inputs) else []
        return [*reversed(before), *bare]

    def blank(self) -> dict[str, Any]:
        """Repeated modules whose output is one tensor, of the shape of their input."""
        outputs, members = {}, _members(self.native, self.block)
        for call in self.loops[0]:
            before, after = (None if x is None else x.shape for x in (call.given, call.returned))
            tensors = [x for x in tree_flatten(call.output)[0] if isinstance(x, torch.Tensor)]
            if call.path in members and before == after and len(tensors) == 1:
                outputs[call.path] = call.output
        return outputs

    def candidates(self) -> Iterator[tuple[RepeatedLoop, list[Tensor]]]:
        """Loops with the model's own states, and these from the initial one on."""
        blank, entries = self.blank(), self.entries()
        # Where the model's own code does not run without its early loops, they are computed.
        for skipped in [blank, {}] if blank else [{}]:
            for ends in self.ends():
                states = [self.recording.state(call) for call in ends]
                if any(x is None for x in states):
                    continue
                for entry in entries:
                    loop = RepeatedLoop(
                        block=self.block,
                        n_loops=len(self.loops),
                        entry=None if entry is None else entry.place,
                        ends=tuple(call.place for call in ends),
                        injects=False,
                        blank=skipped,
                        flat=ends[0].returned is not states[0],
                        n_ends=sum(x.path == ends[0].path for x in self.recording.calls),
                    )
                    e = self.recording.inputs if entry is None else entry.returned
                    assert e is not None
                    try:
                        yield from self._starts(loop, e, states)  # type: ignore[arg-type]
                    except Exception:  # the model's own code may raise anything
                        if not skipped:
                            raise

    def reads_state_alone(self, loop: RepeatedLoop, states: list[Tensor]) -> bool:
        """Whether loops read no more of the first one, such as its keys, than the state after it.

        Other outputs of its modules, with the same state, must not change the next state.
        """
        if not loop.injects:  # a step is the first loop, run on a state in place of e
            return True
        begins = min(call.entered for call in self.loops[0])
        ends = next(call.left for call in self.recording.calls if call.place == loop.ends[0])
        early = {
            call.place: 1 - x
            for call in self.recording.calls
            if (x := call.returned) is not None and x.dim() == 3
            if begins <= call.entered and call.left < ends
        }
        native, inputs, loop = self.native, self.recording.inputs, replace(loop, blank={})
        h, after = states[1:3]
        return alike(loop.step(native, h, loop.embed(native, inputs), inputs, early=early), after)

    def _starts(
        self, loop: RepeatedLoop, e: Tensor, states: list[Tensor]
    ) -> Iterator[tuple[RepeatedLoop, list[Tensor]]]:
        """The loop with a state in place of ``e``, or beside it and from each known start."""
        native, inputs = self.native, self.recording.inputs
        if e.shape == states[0].shape:
            follow = zip([e, *states], states)
            if all(alike(loop.step(native, h, e, inputs), after) for h, after in follow):
                yield loop, [e, *states]
        if e.shape[:2] != states[0].shape[:2]:
            return
        width, follow = states[0].shape[-1], pairwise(states)
        injecting = replace(loop, injects=True)
        if not all(alike(injecting.step(native, h, e, inputs), after) for h, after in follow):
            return
        # A tensor of the model that is one vector, [width] or [1, 1, width].
        tensors = [*native.model.named_parameters(), *native.model.named_buffers()]
        vectors = [name for name, x in tensors if x.numel() == width == x.shape[-1]]
        for start in ("zeros", None, *vectors):
            h = replace(injecting, start=start).initial_state(native, e, width)
            if h.shape == states[0].shape and alike(
                injecting.step(native, h, e, inputs), states[0]
            ):
                yield replace(injecting, start=start), [h, *states]


def _is_stream(x: Any) -> bool:
    return is_floats(x) and x.dim() == 3


def _members(native: OwnForward, block: Block) -> list[str]:
    """The layers of a block: the modules named, or those in a list that is named."""
    lists = (nn.ModuleList, nn.ModuleDict)
    members: list[str] = []
    for path in block:
        module = native.by_path[path]
        # A list may hold one module several times, which has one path.
        inside = [f"{path}.{name}" for name, _ in module.named_children()]
        members += inside if isinstance(module, lists) else [path]
    return [path for path in members if path in native.by_path]


def alike(x: Tensor, y: Tensor) -> bool:
    """Whether tensors differ by rounding alone; in half precision not at all."""
    if x.shape != y.shape or x.dtype != y.dtype:
        return False
    units = 64 if x.dtype in (torch.float32, torch.float64) else 0
    limit = units * torch.finfo(x.dtype).eps * float(y.abs().max())
    return bool(((x - y).abs() <= limit).all())


@torch.no_grad()
def find_loop(native: OwnForward, recording: Recording, block: Block) -> RepeatedLoop:
    """The loop of a block in a model's own forward.

    Raises:
        InputError: If the state is not the output of one call, the map differs between loops, or
            the logits are no function of the last state.
    """
    loops = _loops_of(native, recording.calls, block)
    search = _Search(native=native, recording=recording, block=block, loops=loops)
    inputs = recording.inputs
    other = inputs.flip(1).roll(1, 0)  # other inputs of the same size
    if torch.equal(other, inputs):
        expected, fix = "an example whose positions differ", "Pass a batch of your data."
        raise InputError("inputs", expected=expected, given="one value everywhere", fix=fix)
    fitting, rereading, with_inputs = False, False, None
    for loop, states in search.candidates():
        if not search.reads_state_alone(loop, states):
            rereading = True
            continue
        fitting = True
        if not alike(loop.read(native, states[-1], other), recording.logits):
            continue
        e, pairs = loop.embed(native, inputs), pairwise(states)
        if all(alike(loop.step(native, h, e, other), after) for h, after in pairs):
            return loop
        with_inputs = with_inputs or replace(loop, reads_inputs=True)
        if not loop.injects:  # an earlier call before the loop decides no more of it
            break
    if with_inputs is not None:
        return with_inputs
    if fitting:
        expected, got = "logits that are read from the last state alone", "others"
        fix = "Pass forward=, up to the last state's readout, or write the four methods."
        raise InputError("forward of the model", expected=expected, given=got, fix=fix)
    if rereading:
        what, expected = "loops of the model", "ones that read the state after the first loop alone"
        got, fix = "more of it, such as its keys", "Write the four methods, with that in the state."
        raise InputError(what, expected=expected, given=got, fix=fix)
    raise _misplaced(native, loops, block)


def _misplaced(native: OwnForward, loops: list[list[Call]], block: Block) -> InputError:
    if not any(_is_stream(call.returned) for call in loops[0]):
        got = spell(loops[0][-1].returned)
        expected, fix = "a state [batch, pos, width]", "Name modules that return such a tensor."
        return InputError(f"output of {loops[0][-1].path!r}", expected=expected, given=got, fix=fix)
    members = _members(native, block)
    for t, loop in enumerate(loops):
        for call, first in zip(loop, loops[0]):
            changed = (
                name
                for name, value in call.arguments.items()
                if value is not call.given and not _same_value(value, first.arguments.get(name))
            )
            name = next(changed, None) if call.path in members else None
            if name is None:
                continue
            names = list(inspect.signature(native.by_path[call.path].forward).parameters)
            shown = names[int(name)] if name.isdecimal() and int(name) < len(names) else name
            expected, got = f"the same {shown!r} in every loop", f"another one in loop {t}"
            fix = "Write the four methods, with step(self, h, e, loop)."
            what = f"argument {shown!r} of {call.path!r}"
            return InputError(what, expected=expected, given=got, fix=fix)
    expected = "a state: the output of one call that decides all of the next loop"
    got = f"other states than the model's own when outputs of {loops[0][-1].path!r} are fed back"
    fix = "Turn caches off with forward= (use_cache=False), or write the four methods."
    return InputError("repeat", expected=expected, given=got, fix=fix)


def _same_value(x: Any, y: Any) -> bool:
    if isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor):
        return x.shape == y.shape and x.dtype == y.dtype and torch.equal(x, y)
    if isinstance(x, (int, float, str, bool, type(None))):
        return x == y
    return type(x) is type(y)


def loop_slots(
    native: OwnForward, recording: Recording, loop: RepeatedLoop, *, has_layers: bool = True
) -> list[Slot]:
    """The slots of the modules that run in every loop; of its layers, if it has any."""
    at = {call.place: call for call in recording.calls}
    first, second = at[loop.ends[0]], at[loop.ends[1]]
    in_loop = {
        call.path
        for call in recording.calls
        if first.left < call.entered and call.left <= second.left
    }
    # The part of the forward that a step runs: the second loop, or the first one from its entry on.
    start = first.left if loop.injects else -1
    if not loop.injects and loop.entry is not None:
        start = at[loop.entry].left
    stop = second.left if loop.injects else first.left
    here = [
        (call, twin)
        for call, twin in zip(recording.calls, recording.other_calls)
        if start < call.entered and call.left <= stop
    ]
    before = recording.inputs if loop.entry is None else at[loop.entry].returned
    before = None if loop.injects else before
    after = recording.state(second if loop.injects else first)
    assert after is not None
    calls, twins = [call for call, _ in here], [twin for _, twin in here]
    layers = _layers(native, loop.block, calls, before, after) if has_layers else []
    slots = slots_of(calls, twins, recording.sizes, layers)
    return [slot for slot in slots if slot.path in in_loop]


def _layers(
    native: OwnForward, block: Block, calls: Sequence[Call], before: Tensor | None, after: Tensor
) -> list[str]:
    """Modules of a block through which the stream goes, one after the other; else none.

    The first reads the state ``before`` the loop; where an input is injected (None), the last
    returns the state ``after`` it.
    """
    members, often = _members(native, block), Counter(call.path for call in calls)
    chain = [call for call in calls if call.path in members]
    for call in chain:
        ends = call.given, call.returned
        if often[call.path] > 1 or any(x is None or x.shape != after.shape for x in ends):
            return []
    streams = [(call.given, earlier) for call, earlier in zip(chain[1:], chain)]
    linked = all(_same_value(x, earlier.returned) for x, earlier in streams)
    if not chain or not linked:
        return []
    end = (chain[-1].returned, after) if before is None else (chain[0].given, before)
    return [call.path for call in chain] if _same_value(*end) else []
