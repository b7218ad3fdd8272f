"""Calls of the modules inside a model's own code: recorded, replaced, tapped.

PyTorch's forward hooks are on a module only while a run lasts; the model itself is unchanged.
"""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from threading import RLock
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from loopinterp.core.errors import InputError
from loopinterp.models.addresses import Axes
from loopinterp.models.protocol import TOKEN_TYPES, need_evaluation, spell

if TYPE_CHECKING:
    from torch import Tensor

    from loopinterp.models.taps import Tap, Taps

Place = tuple[str, int]  # the path of a module, and the index of one of its calls


def is_floats(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.is_floating_point()


def _first_tensor(tree: Any) -> Tensor | None:
    return next((x for x in tree_flatten(tree)[0] if is_floats(x)), None)


def _with_first(tree: Any, tensor: Tensor) -> Any:
    leaves, shape = tree_flatten(tree)
    where = next(k for k, x in enumerate(leaves) if is_floats(x))
    return tree_unflatten([*leaves[:where], tensor, *leaves[where + 1 :]], shape)


@dataclass(frozen=True, eq=False)
class Call:
    """One call of a module.

    Attributes:
        index: The number of the module's calls before.
        entered: Place in the order of all entries and exits of a run; ``left`` that of its exit.
        arguments: Its arguments by place or name, flat, with copies of the tensors.
        given: The first tensor of floats among them.
        output: The output, with copies of the tensors.
        returned: The first tensor of floats in it.
    """

    path: str
    index: int
    entered: int
    left: int
    arguments: Mapping[str, Any]
    given: Tensor | None
    output: Any
    returned: Tensor | None

    @property
    def place(self) -> Place:
        return self.path, self.index


def _copied(tree: Any) -> Any:
    return tree_map_only(torch.Tensor, lambda x: x.detach().clone(), tree)


@torch.no_grad()
def record_calls(model: nn.Module, run: Callable[[], Any]) -> tuple[list[Call], Any]:
    """The calls of all modules inside a model in one run, in the order of their exits."""
    calls: list[Call] = []
    clock, entered = iter(range(10**9)), defaultdict(list)
    counts: Counter[str] = Counter()

    def enter(path: str, args: Any, kwargs: Any) -> None:
        leaves = {}  # by name: "0", "attention_mask", "position_embeddings.1"
        for name, tree in {**{str(k): x for k, x in enumerate(args)}, **kwargs}.items():
            flat = [_copied(x) for x in tree_flatten(tree)[0]]
            leaves |= {name if len(flat) == 1 else f"{name}.{k}": x for k, x in enumerate(flat)}
        entered[path].append((next(clock), leaves))

    def leave(path: str, output: Any) -> None:
        start, arguments = entered[path].pop()
        copy = _copied(output)
        given = next((x for x in arguments.values() if is_floats(x)), None)
        at = counts[path], start, next(clock)
        calls.append(Call(path, *at, arguments, given, copy, _first_tensor(copy)))
        counts[path] += 1

    with _at_calls({path: x for path, x in model.named_modules() if path}, enter, leave):
        output = run()
    return calls, output


@contextmanager
def _at_calls(
    modules: Mapping[str, nn.Module],
    enter: Callable[[str, Any, Any], Any],
    leave: Callable[[str, Any], Any],
) -> Iterator[None]:
    """Call ``enter(path, args, kwargs)`` and ``leave(path, output)`` around each module's calls."""
    with ExitStack() as stack:
        # Compiled code would leave hooks out, or trace them with all that they have recorded.
        # Where nothing has loaded torch._dynamo, which takes seconds, nothing is compiled.
        if "torch._dynamo" in sys.modules:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        for path, module in modules.items():
            pre = module.register_forward_pre_hook(
                lambda _, args, kwargs, path=path: enter(path, args, kwargs), with_kwargs=True
            )
            post = module.register_forward_hook(
                lambda _, args, output, path=path: leave(path, output)
            )
            stack.callback(pre.remove)
            stack.callback(post.remove)
        yield


# Examples


def need_example(model: Any, inputs: Any) -> None:
    if not isinstance(model, nn.Module):
        expected, fix = "a torch.nn.Module", "Derive it from torch.nn.Module."
        raise InputError("model", expected=expected, given=f"a {type(model).__name__}", fix=fix)
    for name, module in model.named_modules():
        need_evaluation(name or "model", module)
    fits = isinstance(inputs, torch.Tensor) and inputs.dim() in (2, 3) and inputs.numel() > 0
    if not (fits and (is_floats(inputs) if inputs.dim() == 3 else inputs.dtype in TOKEN_TYPES)):
        expected = "an example: tokens [batch, pos], or features [batch, pos, d_features]"
        fix = "Pass inputs=, some inputs of the model."
        raise InputError("inputs", expected=expected, given=spell(inputs), fix=fix)


def another_size(inputs: Tensor) -> Tensor:
    more = torch.cat([inputs, inputs[:1]])
    return more[:, :-1] if inputs.shape[1] > 1 else torch.cat([more, more], dim=1)


# Places of hooks

Layout = Literal["batch", "flat", "pos"]  # [batch, …], [batch * pos, …] or [pos, batch, …]


@dataclass(frozen=True)
class Slot:
    """The input or output of one call of a module in each loop, and its hook.

    Attributes:
        index: The number of the module's calls before it in the loop.
        layer: Its layer, if it is the stream around one.
        axes: Axes of its tensor after the batch.
    """

    path: str
    index: int
    is_input: bool
    component: str
    layer: int | None
    axes: Axes
    layout: Layout = "batch"


# Runs


class _At(NamedTuple):
    tap: Tap
    component: str
    layout: Layout
    batch: int

    def __call__(self, x: Tensor | None) -> Tensor:
        assert x is not None
        # From the module's own layout to [batch, pos, …], as hooks see it, and back.
        if self.layout != "batch":
            x = x.unflatten(0, (self.batch, -1)) if self.layout == "flat" else x.transpose(0, 1)
        # Copies, as the model's code may write into its own.
        x = self.tap(self.component, x.clone()).clone()
        if self.layout == "batch":
            return x
        return x.flatten(0, 1) if self.layout == "flat" else x.transpose(0, 1)


class _Taken(BaseException):  # the model's own code may catch an Exception
    """Ends a run at the output that was asked for."""


@dataclass
class Watch:
    """Changes at the calls of modules during one run.

    Attributes:
        put: Outputs that replace those of calls.
        take: The call after which the run ends.
        opens: The call after which the calls of a loop are counted; None: the start of the run.
        inputs: Taps on the inputs of calls, counted from there; ``outputs`` those on outputs.
        blank: Modules that return their input until all outputs are put.
    """

    put: Mapping[Place, Tensor] = field(default_factory=dict)
    take: Place | None = None
    opens: Place | None = None
    inputs: Mapping[Place, _At] = field(default_factory=dict)
    outputs: Mapping[Place, _At] = field(default_factory=dict)
    blank: Mapping[str, Any] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    taken: Tensor | None = None

    def __post_init__(self) -> None:
        self._is_open, self._left = self.opens is None, len(self.put)
        self._inside: Counter[str] = Counter()
        self._pending: defaultdict[str, list[int | None]] = defaultdict(list)

    def tapping(self, slots: Iterable[Slot], taps: Taps, loop: int, batch: int) -> Watch:
        inputs: dict[Place, _At] = {}
        outputs: dict[Place, _At] = {}
        for slot in slots:
            tap = taps.at("block", loop, slot.layer)
            if tap.listens(slot.component):
                ends = inputs if slot.is_input else outputs
                ends[slot.path, slot.index] = _At(tap, slot.component, slot.layout, batch)
        return replace(self, inputs=inputs, outputs=outputs)

    @property
    def paths(self) -> set[str]:
        places = [*self.put, *self.inputs, *self.outputs, *filter(None, (self.take, self.opens))]
        return {path for path, _ in places} | {*self.blank}

    @property
    def is_complete(self) -> bool:
        return not self._left and (self.take is None or self.taken is not None)

    def enter(self, path: str, args: Any, kwargs: Any) -> Any:
        """A forward pre-hook."""
        index = self._inside[path] if self._is_open else None
        self._pending[path].append(index)
        if index is None:
            return None
        self._inside[path] += 1
        if (at := self.inputs.get((path, index))) is None:
            return None
        return _with_first((args, kwargs), at(_first_tensor((args, kwargs))))

    def leave(self, path: str, output: Any) -> Any:
        """A forward hook: the output, as a tap leaves it or another one that is put."""
        index, place = self._pending[path].pop(), (path, self.counts[path])
        self.counts[path] += 1
        if index is not None and (at := self.outputs.get((path, index))) is not None:
            output = _with_first(output, at(_first_tensor(output)))
        if place in self.put:  # a copy, as the model's code may write into it
            output, self._left = _with_first(output, self.put[place].clone()), self._left - 1
        self._is_open = self._is_open or place == self.opens
        if place == self.take:
            self.taken = _first_tensor(output)
            raise _Taken
        return output

    def blanked(self, path: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        """A forward that returns its input until all outputs are put."""

        def skip(*args: Any, **kwargs: Any) -> Any:
            x = _first_tensor((args, kwargs))
            if not self._left or x is None:
                return forward(*args, **kwargs)
            return _with_first(self.blank[path], x)

        return skip


class Modules:
    """One thread at a time watches the calls of a model's modules."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.by_path = model, dict(model.named_modules())
        self._lock = RLock()

    def __getstate__(self) -> dict[str, Any]:  # a lock is not copied
        return {name: x for name, x in vars(self).items() if name != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _lock=RLock())

    @contextmanager
    def watching(self, watch: Watch) -> Iterator[None]:
        if not watch.paths:
            yield
            return
        watched = {path: self.by_path[path] for path in watch.paths}
        with self._lock, ExitStack() as stack, _at_calls(watched, watch.enter, watch.leave):
            for path in watch.blank:
                attributes = vars(self.by_path[path])  # rarely with a forward of its own
                if "forward" in attributes:
                    stack.callback(attributes.update, forward=attributes["forward"])
                else:
                    stack.callback(attributes.pop, "forward")
                attributes["forward"] = watch.blanked(path, self.by_path[path].forward)
            with suppress(_Taken):
                yield
