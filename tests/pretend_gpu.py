"""A device that is not there: what a GPU would refuse, or wait for, is found without one.

PyTorch's own fake tensors cannot pose as ``cuda`` in a build without CUDA, as their autograd asks
for its driver. The device of this module is the one that every build has beside the CPU, ``meta``,
with the numbers kept: each tensor on it holds one on the CPU, which computes in its place.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any
from unittest.mock import patch

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing

DEVICE = torch.device("meta:0")
"""Where such tensors say that they are; as numbered as those of a GPU, whatever was asked for."""

aten = torch.ops.aten
_READS_BACK = {
    aten._local_scalar_dense,
    aten.is_nonzero,
    aten.equal,
    aten.nonzero,
    aten.masked_select,
    aten.bincount,
    aten.repeat_interleave,
    aten._unique2,
    aten.unique_dim,
    aten.unique_consecutive,
    aten._linalg_eigh,
    aten.linalg_eig,
    aten.linalg_inv_ex,
    aten._linalg_solve_ex,
    aten.linalg_cholesky_ex,
    aten._linalg_svd,
    aten.linalg_lstsq,
}
"""Operations whose result, or its size, the host waits for."""
_COPIES = {aten._to_copy, aten.copy_}
_INDEXES = {aten.index, aten.index_put_, aten.index_put, aten._index_put_impl_}


class WouldWait(AssertionError):
    """The host would wait for the device, where a test says that it must not."""


class OnDevice(torch.Tensor):
    """A tensor that is on the device to everyone who asks."""

    held: torch.Tensor

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> OnDevice:
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            held.shape,
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=DEVICE,
            requires_grad=held.requires_grad,
        )
        made.held = held.detach()
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        return f"OnDevice({self.held!r})"

    def __deepcopy__(self, memo: dict[int, Any]) -> OnDevice:
        twin = OnDevice(self.held.clone())
        vars(twin).update({k: v for k, v in vars(self).items() if k != "held"})
        twin.requires_grad_(self.requires_grad)
        return twin

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        if force:
            return self.detach().cpu().numpy()
        raise TypeError("can't convert a tensor of the device to numpy: Tensor.cpu() comes first")

    def __array__(self, *_: Any, **__: Any) -> Any:
        return self.numpy()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


def _is_device(device: Any) -> bool:
    return device is not None and torch.device(device).type == DEVICE.type


_forbidden: list[Callable[[str], None]] = []


def _waits(what: str) -> None:
    for tell in _forbidden:
        tell(what)


# An operation takes and gives tensors, and lists of them; the functions of torch's pytree, for
# values of any kind, take as long as small operations do.


def _numbers_of(value: Any, here: list[OnDevice], apart: list[torch.Tensor]) -> Any:
    """A value with the numbers of its tensors on the device; these, and the others, are noted."""
    if isinstance(value, OnDevice):
        here.append(value)
        return value.held
    if isinstance(value, torch.Tensor):
        apart.append(value)
    elif isinstance(value, (list, tuple)):
        return type(value)([_numbers_of(part, here, apart) for part in value])
    return value


def _on_device(value: Any) -> Any:
    """A result with all its tensors on the device."""
    if isinstance(value, torch.Tensor):
        return OnDevice(value)
    if isinstance(value, (list, tuple)):
        return type(value)([_on_device(part) for part in value])
    return value


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """An operation, on the CPU; refused where a GPU would refuse it."""
    packet = func.overloadpacket
    here: list[OnDevice] = []
    apart: list[torch.Tensor] = []
    numbers = _numbers_of(args, here, apart)
    options = {key: _numbers_of(value, here, apart) for key, value in kwargs.items()}
    asked = kwargs.get("device")
    target = _is_device(asked) if asked is not None else bool(here)
    if packet is aten.copy_:
        target = isinstance(args[0], OnDevice)
    if packet in _COPIES:
        crosses = target != bool(here) or (here and apart)
        if crosses and not kwargs.get("non_blocking", len(args) > 2 and args[2]):
            _waits(f"{func} from {'the device' if not target else 'the CPU'}")
    elif here and packet in _INDEXES:
        indices = [x for x in args[1] if x is not None]
        if not isinstance(args[0], OnDevice):
            raise _mismatch(func)
        if any(x.dtype in (torch.bool, torch.uint8) for x in indices):
            _waits(f"{func} with a mask")
        if any(not isinstance(x, OnDevice) for x in indices):
            _waits(f"{func} with indices on the CPU")
        if any(x.dim() and not isinstance(x, OnDevice) for x in args[2:3]):
            raise _mismatch(func)
    elif here and any(x.dim() for x in apart):
        raise _mismatch(func)
    elif (
        here
        and packet in _READS_BACK
        and not (packet is aten.repeat_interleave and kwargs.get("output_size") is not None)
    ):
        _waits(str(func))
    if _is_device(asked):
        options["device"] = torch.device("cpu")
    options.pop("pin_memory", None)
    out = func(*numbers, **options)
    if packet in _COPIES and not target:
        if packet is aten.copy_:
            return args[0]
        # What is not converted is not copied on the CPU, and is on the way from a GPU.
        return out
    if not target:
        return out
    out = _on_device(out)
    if not here or not _gives_an_argument(func):
        return out
    return return_and_correct_aliasing(func, args, kwargs, out)


@cache
def _gives_an_argument(func: Any) -> bool:
    """Whether results share memory with an argument, as a view does, or are one."""
    return any(result.alias_info is not None for result in func._schema.returns)


def _mismatch(func: Any) -> RuntimeError:
    return RuntimeError(f"{func}: expected all tensors to be on the same device")


class _Operations(TorchDispatchMode):
    """What is made on the device without any tensor of it: zeros, draws, copies."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


# PyTorch has put a look for compiled code around it, which a small operation takes as long as.
_Operations.__torch_dispatch__ = inspect.unwrap(_Operations.__torch_dispatch__)


class _Functions(TorchFunctionMode):
    """What no operation shows: numbers that become tensors, and whose generator draws."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        generator = kwargs.get("generator")
        if hasattr(generator, "on_device"):  # one in the operation itself is not ours any more
            device = kwargs.get("device") or next(
                (x.device for x in args if isinstance(x, torch.Tensor)), "cpu"
            )
            if _is_device(device) != generator.on_device:
                raise RuntimeError(
                    f"{func}: generator of {generator.device}, result on device {device}"
                )
        if func in (torch.tensor, torch.as_tensor) and _is_device(kwargs.get("device")):
            target = kwargs.pop("device")
            return func(*args, **kwargs).to(target)
        return func(*args, **kwargs)


_REAL = torch.Generator


class _AnyGenerator(type(torch.Generator)):
    """A module that is first imported here names the type for good, and later gets real ones."""

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, _REAL)


class _Generator(torch.Generator, metaclass=_AnyGenerator):
    """One that says of which device it is."""

    on_device: bool

    def __new__(cls, device: Any = "cpu") -> _Generator:
        made = super().__new__(cls)
        made.on_device = _is_device(device)
        return made

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return DEVICE if self.on_device else torch.device("cpu")

    def get_state(self) -> torch.Tensor:  # on the CPU whatever the device, as CUDA's is
        return super().get_state()


@contextmanager
def pretend_gpu() -> Iterator[torch.device]:
    """A device for a while: computes what the CPU does, and refuses what a GPU refuses."""
    fused = "torch.optim.optimizer._get_fused_kernels_supported_devices"
    with (
        patch("torch.Generator", _Generator),
        patch(fused, lambda: ["cpu", DEVICE.type]),
        _Functions(),
        _Operations(),
    ):
        yield DEVICE


@contextmanager
def no_waiting() -> Iterator[None]:
    """Raise :class:`WouldWait` where the host would wait for the device."""

    def refuse(what: str) -> None:
        raise WouldWait(what)

    with told_of_waiting(refuse):
        yield


@contextmanager
def told_of_waiting(tell: Callable[[str], None]) -> Iterator[None]:
    """Call ``tell`` wherever the host would wait for the device."""
    _forbidden.append(tell)
    try:
        yield
    finally:
        _forbidden.remove(tell)
