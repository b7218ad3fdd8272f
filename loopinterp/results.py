"""Results: frozen dataclasses with named axes, which go to disk, to tables and to figures.

A study is a function that returns a :class:`Result`. A saved result is two files,
``NAME.json`` (scalars, axes, provenance) and ``NAME.safetensors`` (arrays), so that a figure
can be redrawn without the model. Every probing or causal number has its control in the result.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from loopinterp.errors import CheckpointError, InputError
from loopinterp.storage import read_arrays, read_json, write_arrays, write_json

if TYPE_CHECKING:
    import pandas as pd
    import plotly.graph_objects as go
    from typing_extensions import Self


def config_hash(config: Mapping[str, Any]) -> str:
    """The first 12 hex digits of the SHA-256 of a config's canonical JSON.

    Example:
        >>> config_hash({"b": 1, "a": 2}) == config_hash({"a": 2, "b": 1})
        True
    """
    canonical = json.dumps(config, sort_keys=True, default=str)
    return hashlib.sha256(canonical.encode()).hexdigest()[:12]


@dataclass(frozen=True, kw_only=True)
class Provenance:
    """Where a result comes from.

    Attributes:
        seed: Seed of the study's generator.
        config: Configuration of the study and of the model, JSON-ready.
        config_hash: :func:`config_hash` of ``config``.
        version: Version of loopinterp.
        wall_time: Seconds the study took.
    """

    seed: int
    config: dict[str, Any] = field(default_factory=dict)
    config_hash: str = ""
    version: str = ""
    wall_time: float = 0.0


class Stopwatch:
    """Fills in a :class:`Provenance` when the study is done."""

    def __init__(self, seed: int, config: Mapping[str, Any]) -> None:
        self._seed, self._config, self._start = seed, dict(config), time.perf_counter()

    def provenance(self) -> Provenance:
        from loopinterp import __version__

        return Provenance(
            seed=self._seed,
            config=self._config,
            config_hash=config_hash(self._config),
            version=__version__,
            wall_time=time.perf_counter() - self._start,
        )


@contextmanager
def study(seed: int, **config: Any) -> Iterator[Stopwatch]:
    """Time a study and describe it: ``with study(seed, model=..., loops=8) as watch: ...``."""
    yield Stopwatch(seed, config)


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A figure as the report shows it.

    Attributes:
        title: A few words.
        plot: The Plotly figure.
        caption: How to read it, in plain words.
        control: What its control is and what the control shows ("" where none applies).
        data: The table behind it, linked from the report.
        section: The report section it belongs to ("convergence", "wavefront", "program", …).
    """

    title: str
    plot: go.Figure
    caption: str
    control: str = ""
    data: pd.DataFrame | None = None
    section: str = ""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing a result says, in plain words: the report's summary is made of these.

    Attributes:
        kind: The report section it belongs to, as in :attr:`Figure.section`, or ``"verdict"``
            (shown first, and large).
        text: A whole sentence that someone new to the field understands.
        value: The one number or name that carries it, formatted ("1.00", "loop 17"), or "".
        good: Whether this is what one hopes for; None where that has no meaning.
    """

    kind: str
    text: str
    value: str = ""
    good: bool | None = None


def percent(share: float | np.floating) -> str:
    """A share as findings say it: a whole percentage, but never rounded up to 100 or down to 0.

    Example:
        >>> percent(1.0), percent(0.997), percent(0.5), percent(0.001)
        ('100%', '99.7%', '50%', '0.1%')
    """
    value = 100 * float(share)
    if 0 < value < 1 or 99 < value < 100:
        return f"{min(max(value, 0.1), 99.9):.1f}%"
    return f"{value:.0f}%"


@dataclass(frozen=True, kw_only=True)
class Result:
    """Base of every study's result.

    Subclasses are frozen, keyword-only dataclasses. Fields holding NumPy arrays are named in
    ``AXES`` with their axes, in the fixed order loop, layer, batch, head, pos, feature; every
    other field is JSON-ready (numbers, strings, lists, dicts).
    """

    AXES: ClassVar[dict[str, tuple[str, ...]]] = {}

    provenance: Provenance

    def __post_init__(self) -> None:
        for name, axes in self.AXES.items():
            value = getattr(self, name)
            if value is None:
                continue
            array = np.asarray(value)
            if array.ndim != len(axes):
                raise InputError(
                    f"{type(self).__name__}.{name}",
                    expected=f"axes {axes}",
                    given=f"an array of shape {array.shape}",
                    fix="Give one dimension for each named axis.",
                )
            object.__setattr__(self, name, array)

    def save(self, folder: str | Path, name: str | None = None) -> Path:
        """Write ``NAME.json`` and ``NAME.safetensors`` (the class name by default)."""
        folder = Path(folder)
        name = name or type(self).__name__
        arrays = {k: getattr(self, k) for k in self.AXES if getattr(self, k) is not None}
        scalars = {
            f.name: getattr(self, f.name)
            for f in dataclasses.fields(self)
            if f.name not in self.AXES and f.name != "provenance"
        }
        write_arrays(folder / f"{name}.safetensors", arrays)
        write_json(
            folder / f"{name}.json",
            {
                "class": f"{type(self).__module__}:{type(self).__qualname__}",
                "axes": {k: list(v) for k, v in self.AXES.items()},
                "arrays": _shapes(arrays),
                "scalars": scalars,
                "provenance": dataclasses.asdict(self.provenance),
            },
        )
        return folder / f"{name}.json"

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a result back from its JSON file (its arrays lie beside it)."""
        result = load_result(path)
        if not isinstance(result, cls):
            raise CheckpointError(
                f"result {path}",
                expected=f"a {cls.__name__}",
                given=f"a {type(result).__name__}",
                fix=f"Load it with {type(result).__name__}.load.",
            )
        return result

    def to_frame(self) -> pd.DataFrame:
        """A tidy table: one row per cell, one column per axis, one per array of that shape."""
        import pandas as pd

        frames: dict[tuple[str, ...], pd.DataFrame] = {}
        for name, axes in self.AXES.items():
            array = getattr(self, name)
            if array is None:
                continue
            index = pd.MultiIndex.from_product(
                [self.axis_values(axis, size) for axis, size in zip(axes, array.shape)], names=axes
            )
            column = pd.Series(array.reshape(-1), index=index, name=name)
            frames[axes] = frames[axes].join(column) if axes in frames else column.to_frame()
        if not frames:
            return pd.DataFrame()
        widest = max(frames, key=len)
        return frames[widest].reset_index()

    def axis_values(self, axis: str, size: int) -> list[Any]:
        """Coordinates along an axis: a field ``{axis}s`` of that length, or 0..size-1."""
        values = getattr(self, f"{axis}s", None)
        if values is not None and len(values) == size:
            return list(values)
        return list(range(size))

    def figures(self) -> list[Figure]:
        """The figures this result can draw of itself."""
        return []

    def summary(self) -> list[Finding]:
        """What this result says in plain words, most telling first."""
        return []


def load_result(path: str | Path) -> Result:
    """Read any saved result; only results of loopinterp are loaded, and nothing is unpickled.

    Raises:
        CheckpointError: If either file is missing or damaged, if the two do not belong together,
            or if they are of a class or a version that cannot be read here.
    """
    path = Path(path)
    document = read_json(path)
    if not isinstance(document, dict) or not {"class", "scalars", "provenance"} <= set(document):
        raise CheckpointError(
            f"result {path}",
            expected="a file written by Result.save",
            given="JSON without the entries 'class', 'scalars' and 'provenance'",
            fix="Point to NAME.json in a folder of results.",
        )
    cls = _result_class(path, str(document["class"]))
    arrays = read_arrays(path.with_suffix(".safetensors"))
    unknown = sorted(set(arrays) - set(cls.AXES))
    if unknown or document.get("arrays") != _shapes(arrays):
        raise CheckpointError(
            f"result {path}",
            expected=f"the arrays {document.get('arrays')} beside it",
            given=f"{_shapes(arrays)}",
            fix="The two files of the result do not belong together; run the study again.",
        )
    absent = {k: None for k in cls.AXES if k not in arrays}
    try:
        return cls(
            provenance=_provenance(document["provenance"]),
            **document["scalars"],
            **arrays,
            **absent,
        )
    except (TypeError, ValueError) as error:  # InputError, of wrong axes, is a ValueError
        raise CheckpointError(
            f"result {path}",
            expected=f"the fields of {cls.__name__} in this version",
            given=f"others ({error})",
            fix="Run the study again with this version.",
        ) from error


def _provenance(values: dict[str, Any]) -> Provenance:
    read = Provenance(**values)
    if not (isinstance(read.wall_time, (int, float)) and isinstance(read.version, str)):
        raise TypeError("the provenance has a wall time or a version of another type")
    return read


def _shapes(arrays: Mapping[str, np.ndarray]) -> dict[str, list[int]]:
    return {name: list(arrays[name].shape) for name in sorted(arrays)}


def _result_class(path: Path, address: str) -> type[Result]:
    module, _, name = address.partition(":")
    if module.split(".")[0] != "loopinterp":
        raise CheckpointError(
            f"result {path}",
            expected="a result class of loopinterp",
            given=repr(address),
            fix="Load results of other packages with their own code.",
        )
    try:
        cls = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError):
        cls = None
    if not (isinstance(cls, type) and issubclass(cls, Result)):
        raise CheckpointError(
            f"result {path}",
            expected="a result class of this version of loopinterp",
            given=repr(address),
            fix="Run the study again with this version.",
        )
    return cls
