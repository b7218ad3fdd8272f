"""Taps: where a run passes its activations to hooks and recorders.

Nothing is written in place after a tap has seen it, so a cache need not clone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformer_lens.utilities import Slice

from loopinterp.core.errors import HookError, InputError

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int
    from torch import Tensor
    from transformer_lens.hook_points import HookPoint

    from loopinterp.models.addresses import Address, LayerKey


@dataclass(frozen=True)
class RunReadout:
    """The end of a run: the last state of each example.

    Attributes:
        positions: Positions that the run's cache keeps, in their order there.
        by_example: Whether each example had its own number of loops.
    """

    state: Float[Tensor, "batch pos d_model"]
    positions: Int[Tensor, " kept"]
    by_example: Bool[Tensor, ""]
    logits: Float[Tensor, "batch pos d_vocab_out"] | None = None

    def tensors(self) -> dict[str, Tensor]:
        """Tensors for a file, under names that no activation has."""
        return {f"readout.{name}": x for name, x in vars(self).items() if x is not None}

    @classmethod
    def pop_from(cls, tensors: dict[str, Tensor]) -> RunReadout | None:
        tensors.pop("readout.weights", None)  # a digest in files of earlier versions
        names = ("state", "positions", "by_example", "logits")
        values = {x: tensors.pop(f"readout.{x}") for x in names if f"readout.{x}" in tensors}
        return cls(**values) if values.keys() >= {*names[:3]} else None


class Tap:
    """The hooks of a layer, a loop, or the top of the model; here, none."""

    def __call__(self, component: str, x: Tensor) -> Tensor:
        return x

    def listens(self, *components: str) -> bool:
        """Whether any of the components is hooked or recorded."""
        return False

    def edits(self, *components: str) -> bool:
        """Whether any of the components has a hook or needs a gradient."""
        return False


SILENT = Tap()


@dataclass(eq=False, repr=False)
class ChangingTap(Tap):
    changes: Mapping[str, Callable[[Tensor], Tensor]]

    def __call__(self, component: str, x: Tensor) -> Tensor:
        change = self.changes.get(component)
        return x if change is None else change(x)

    def listens(self, *components: str) -> bool:
        return any(c in self.changes for c in components)

    edits = listens


@dataclass(eq=False, repr=False)
class _OpenTap(Tap):
    recorder: Recorder
    points: dict[str, list[HookPoint]] = field(default_factory=dict)
    recorded: dict[str, Address] = field(default_factory=dict)  # both by component

    def __call__(self, component: str, x: Tensor) -> Tensor:
        for point in self.points.get(component, ()):
            # Hooks of TransformerLens write in place: each has a copy.
            x = point(x.clone())
        address = self.recorded.get(component)
        if address is not None:
            self.recorder(address, x)
        return x

    def listens(self, *components: str) -> bool:
        return any(c in self.points or c in self.recorded for c in components)

    def edits(self, *components: str) -> bool:
        needed = self.recorded if self.recorder.gradients else ()
        return any(c in self.points or c in needed for c in components)


class Taps:
    def __init__(
        self,
        points: Iterable[tuple[Address, HookPoint]] = (),
        record: Iterable[Address] = (),
        recorder: Recorder | None = None,
    ) -> None:
        self._recorder = recorder
        opened: defaultdict[LayerKey, _OpenTap] = defaultdict(
            lambda: _OpenTap(recorder or Recorder())
        )
        for address, point in points:
            opened[address.place].points.setdefault(address.component, []).append(point)
        for address in record:
            opened[address.place].recorded[address.component] = address
        self._taps: dict[LayerKey, Tap] = dict(opened)

    def at(self, section: str, loop: int | None = None, layer: int | None = None) -> Tap:
        return self._taps.get((section, loop, layer), SILENT)

    def end(self, state: Tensor, logits: Tensor | None) -> None:
        if self._recorder is not None:
            self._recorder.end(state, logits)

    def see_scores(self) -> bool:
        """Whether attention scores or patterns are hooked or recorded anywhere."""
        scores = ("attn.hook_attn_scores", "attn.hook_pattern")
        return any(tap.listens(*scores) for tap in self._taps.values())


NO_TAPS = Taps()


class ChangingTaps(Taps):
    """Changes of activations by section and layer, in whichever loop runs."""

    def __init__(
        self, changes: Mapping[tuple[str, int | None], Mapping[str, Callable[[Tensor], Tensor]]]
    ) -> None:
        super().__init__()
        for (section, layer), these in changes.items():
            self._taps[section, None, layer] = ChangingTap(these)

    def at(self, section: str, loop: int | None = None, layer: int | None = None) -> Tap:
        return super().at(section, None, layer)


class Recorder:
    def __init__(
        self,
        *,
        pos_slice: Any = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        gradients: bool = False,
    ) -> None:
        self.activations: dict[str, Tensor] = {}
        self.last: tuple[Tensor, Tensor | None] | None = None  # state and logits
        self._slice = None if pos_slice is None else Slice.unwrap(pos_slice)
        self._device, self._dtype, self.gradients = device, dtype, gradients
        self._live: dict[Address, Tensor] = {}

    def __call__(self, address: Address, x: Tensor) -> None:
        if self.gradients:
            self._live[address] = x
        self.activations[address.name] = self._keep(address, x)

    def end(self, state: Tensor, logits: Tensor | None) -> None:
        self.last = state, logits

    def kept_positions(self, n_pos: int) -> int:
        return n_pos if self._slice is None else self._sliced(torch.arange(n_pos), 0).numel()

    def readout(self, *, by_example: bool) -> RunReadout:
        assert self.last is not None
        state, logits = self.last
        positions = torch.arange(state.shape[1])
        return RunReadout(
            state.detach().to(device=self._device),
            positions if self._slice is None else self._slice.apply(positions),
            torch.tensor(by_example),
            None if logits is None else logits.detach().to(device=self._device),
        )

    def add_gradients(self, loss: Tensor) -> None:
        """Add ``d loss / d activation`` for everything kept, as ``NAME_grad``."""
        if loss.numel() != 1 or not loss.requires_grad:
            got = f"shape {list(loss.shape)}, requires_grad={loss.requires_grad}"
            fix = "Pass loss_fn=, to a scalar; leave torch.no_grad, or unfreeze the weights."
            raise InputError("loss", expected="a scalar with a gradient", given=got, fix=fix)
        live = {address: x for address, x in self._live.items() if x.requires_grad}
        gradients = torch.autograd.grad(
            loss, list(live.values()), allow_unused=True, materialize_grads=True
        )
        # Each has the shape of its activation.
        for address, gradient in zip(live, gradients):
            self.activations[f"{address.name}_grad"] = self._keep(address, gradient)

    def _keep(self, address: Address, x: Tensor) -> Tensor:
        if x.requires_grad:
            x = x.detach()
        axis = address.pos_axis
        if self._slice is not None and axis is not None:
            # Cloned, or the part would keep the whole activation in memory.
            x = self._sliced(x, axis).clone()
        if self._device is not None or self._dtype is not None:
            x = x.to(device=self._device, dtype=self._dtype)
        return x

    def _sliced(self, x: Tensor, axis: int) -> Tensor:
        chosen: Any = self._slice
        try:
            part = chosen.apply(x, dim=axis)
        except IndexError:
            part = x[:0]
        if not part.numel():
            expected, fix = f"some of {x.shape[axis]} positions", "Name positions of the sequence."
            raise HookError("pos_slice", expected=expected, given="none of them", fix=fix)
        return part


def recording_gradients(model: Any = None) -> torch.enable_grad:
    """A context with gradients, even under ``torch.no_grad()``.

    Raises:
        InputError: Under ``torch.inference_mode()``, or if the model's weights were made there.
    """
    if torch.is_inference_mode_enabled():
        expected, fix = "a call outside torch.inference_mode()", "Use torch.no_grad() instead."
        raise InputError("gradients", expected=expected, given="one inside", fix=fix)
    if any(x.is_inference() for x in getattr(model, "parameters", tuple)()):
        expected, fix = "weights made outside torch.inference_mode()", "Pass copy.deepcopy(model)."
        raise InputError("model", expected=expected, given="some made inside", fix=fix)
    return torch.enable_grad()


@contextmanager
def no_fast_path() -> Iterator[None]:
    """Turn off the fast path of PyTorch's attention."""
    enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(enabled)


_ALWAYS_FITS = 64 * 1024**2  # bytes of a cache that is not checked


def need_room(size: int, device: torch.device) -> None:
    """Raise if a cache exceeds its device's free memory, the run not counted."""
    free = _free_bytes(device) if size > _ALWAYS_FITS else None
    if free is not None and size > free:
        expected = f"at most the {_spell_bytes(free)} that are free on {device}"
        fix = "Pass names_filter=, loops=, pos_slice=, dtype= or device=."
        raise InputError("cache", expected=expected, given=_spell_bytes(size), fix=fix)


def _spell_bytes(number: int) -> str:
    return f"{number / 1e9:.1f} GB" if number >= 1e9 else f"{number / 1e6:.1f} MB"


def _free_bytes(device: torch.device) -> int | None:
    """Free bytes on a device, if known: with PyTorch's idle reserve, within control groups."""
    if device.type == "cuda":
        idle = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + idle
    if device.type != "cpu":
        return None
    import psutil

    return min([psutil.virtual_memory().available, *_left_in_groups()])


def _left_in_groups(
    member: Path = Path("/proc/self/cgroup"), mounted: Path = Path("/sys/fs/cgroup")
) -> Iterator[int]:
    """Bytes that each control group leaves of its limit; cached files do not count as used."""
    # The limit of a group and what it uses, in versions 2 and 1.
    pairs = ("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")
    for line in member.read_text().splitlines() if member.exists() else ():
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        first = mounted / controllers
        inside = first / path.lstrip("/")
        folders = [folder for folder in (inside, *inside.parents) if folder.is_relative_to(first)]
        for folder, files in product(folders, pairs):
            try:
                most, used = (int((folder / name).read_text()) for name in files)
                rows = (folder / "memory.stat").read_text().splitlines()
                stat = dict(row.split() for row in rows)
            except (OSError, ValueError):  # no such file, or no limit: "max"
                continue
            again = int(stat.get("total_inactive_file", stat.get("inactive_file", 0)))
            yield max(0, most - used + again)
