"""Results of studies: named axes, estimates with their intervals, provenance; one file each.

A study is a function that returns a :class:`Result`. Its numbers are one ``xarray.Dataset``, so
that a cell is asked for by name (``result.data["iia"].sel(program="ripple", delay="end")``).
What a result shows is kept out of it: figures and findings are registered for its type in a
module of their own, which is imported when they are first asked for.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import json
import os
import reprlib
import time
import typing
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field
from functools import singledispatch
from html import escape
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from loopinterp.core.errors import (
    CheckpointError,
    InputError,
    check_new_name,
    check_number,
    check_seed,
)
from loopinterp.core.intervals import ENDS, ESTIMATE
from loopinterp.core.storage import (
    check_file_name,
    json_default,
    parse_json_object,
    read_arrays,
    write_arrays,
)

if TYPE_CHECKING:
    import pandas as pd
    import xarray as xr
    from typing_extensions import Self


SUFFIX = ".safetensors"
"""How a saved result's file name ends."""

_HEADER = "loopinterp.result"

_DIGEST = "weights_sha256"


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
        run: :func:`config_hash` of the ``config.json`` of the run whose study it is, if of any.
    """

    seed: int
    config: dict[str, Any] = field(default_factory=dict)
    config_hash: str = ""
    version: str = ""
    wall_time: float = 0.0
    run: str = ""

    def __post_init__(self) -> None:
        check_number("wall_time", self.wall_time, least=0, below=1e300)

    @property
    def weights(self) -> list[str]:
        """SHA-256 of the weights of the models studied, as ``describe_model`` has it."""
        several = self.config.get("models")
        models = [self.config.get("model"), *(several if isinstance(several, list) else [])]
        return [m[_DIGEST] for m in models if isinstance(m, dict) and _DIGEST in m]


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
    yield Stopwatch(check_seed(seed), config)


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A figure as the report shows it.

    Attributes:
        title: A few words.
        plot: The Plotly figure, or the :class:`~loopinterp.figures.CircuitGraph` of a circuit.
        caption: How to read it, in plain words.
        control: What its control is and what the control shows ("" where none applies).
        data: The table behind it, linked from the report.
        code: What is printed under it as it is, such as a program.
        section: The report section it belongs to ("convergence", "wavefront", "program", …), by
            default that of the module of views it is made in.
    """

    title: str
    plot: Any
    caption: str
    control: str = ""
    data: pd.DataFrame | None = None
    section: str = ""
    code: str = ""


@dataclass(frozen=True)
class Finding:
    """One thing a result says, in plain words: the report's summary is made of these.

    Attributes:
        text: A whole sentence that someone new to the field understands.
        kind: The report section it belongs to, as in :attr:`Figure.section`, or ``"verdict"``
            (shown first, and large).
        value: The one number or name that carries it, formatted ("1.00", "loop 17"), or "".
        good: Whether this is what one hopes for; None where that has no meaning.
        label: What the value is, in a few words; such a finding stands beside the verdict.
    """

    text: str
    _: KW_ONLY
    kind: str = ""
    value: str = ""
    good: bool | None = None
    label: str = ""


def tidy(arrays: Mapping[Any, xr.DataArray]) -> pd.DataFrame:
    """A table of arrays with the same axes: a row for each cell, a column for each axis and array.

    An estimate called ``iia`` becomes three columns, ``iia``, ``iia_low`` and ``iia_high``.

    Raises:
        InputError: arrays of different axes.
    """
    import pandas as pd
    import xarray as xr

    columns: dict[str, xr.DataArray] = {}
    for name, array in arrays.items():
        if ESTIMATE not in array.dims:
            columns[name] = array
            continue
        for end in ENDS:
            column = name if end == "value" else f"{name}_{end}"
            columns[column] = array.sel({ESTIMATE: end}, drop=True)
    if len({array.dims for array in columns.values()}) > 1:
        raise InputError(
            "arrays",
            expected="arrays of the same axes",
            given=", ".join(f"{n} {list(a.dims)}" for n, a in columns.items()),
            fix="Ask for them one by one.",
        )
    if not columns:
        return pd.DataFrame()
    order = list(next(iter(columns.values())).dims)
    if not order:
        return pd.DataFrame([{name: array.item() for name, array in columns.items()}])
    return xr.Dataset(columns).to_dataframe(dim_order=order).reset_index()


@singledispatch
def figures_of(result: Result) -> list[Figure]:
    """The figures of a result; implementations are registered for its type."""
    return []


@singledispatch
def findings_of(result: Result) -> list[Finding]:
    """What a result says in plain words, most telling first; registered for its type."""
    return []


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class Result:
    """Base of every study's result.

    A subclass is a frozen, keyword-only dataclass with a stable ``kind``, under which it is
    saved. Its arrays are declared once, in ``VARIABLES``, with their axes in the fixed order
    loop, layer, batch, head, pos, feature; an axis called ``estimate`` holds a value and the ends
    of its interval. Every other field is JSON-ready (numbers, strings, lists, dicts, dataclasses
    of these).

    Example:
        >>> @dataclass(frozen=True, kw_only=True, repr=False, eq=False)
        ... class Growth(Result, kind="growth"):
        ...     VARIABLES = {"norm": "loop batch"}
        ...     d_model: int
        >>> with study(0) as watch:
        ...     result = Growth.of(
        ...         watch, norm=np.ones((3, 2)), coords={"loop": [0, 1, 2]}, d_model=8
        ...     )
        >>> result
        Growth(loop: 3, batch: 2; norm)
        >>> float(result.data["norm"].sel(loop=2).mean())
        1.0
    """

    VARIABLES: ClassVar[Mapping[str, str]] = {}
    """Array -> its axes, separated by spaces."""

    OPTIONAL: ClassVar[frozenset[str]] = frozenset()
    """Arrays that may be absent."""

    kind: ClassVar[str] = ""

    data: xr.Dataset
    provenance: Provenance

    _kinds: ClassVar[dict[str, type[Result]]] = {}

    def __init_subclass__(cls, *, kind: str = "", **rest: Any) -> None:
        super().__init_subclass__(**rest)
        if kind:
            cls.kind = kind
            Result._kinds[kind] = cls

    def __post_init__(self) -> None:
        for name, axes in self.VARIABLES.items():
            if name in self.data:
                given, expected = self.data[name].dims, tuple(axes.split())
            elif name in self.OPTIONAL:
                continue
            else:
                given, expected = "no such array", tuple(axes.split())
            if given != expected:
                raise InputError(
                    f"{type(self).__name__}, array {name!r}",
                    expected=f"axes {expected}",
                    given=f"{given}",
                    fix="Give one dimension for each named axis, in that order.",
                )

    @classmethod
    def of(
        cls,
        watch: Stopwatch,
        *,
        coords: Mapping[str, Any] | None = None,
        **values: Any,
    ) -> Self:
        """Build a result from arrays (those of ``VARIABLES``; None where absent) and fields.

        Args:
            watch: What timed the study.
            coords: Axis -> its coordinates; axes left out are counted from 0.
            values: Arrays (NumPy's, or tensors on any device) and fields, by name.
        """
        import xarray as xr

        arrays = {name: values.pop(name) for name in cls.VARIABLES if name in values}
        coordinates = {axis: list(c) for axis, c in (coords or {}).items()}
        axes = {name: tuple(cls.VARIABLES[name].split()) for name in arrays}
        if any(ESTIMATE in a for a in axes.values()):
            coordinates[ESTIMATE] = list(ENDS)
        given = {
            name: (axes[name], np.asarray(array.cpu() if hasattr(array, "cpu") else array))
            for name, array in arrays.items()
            if array is not None
        }
        try:
            data = xr.Dataset(given, coords=coordinates)
        except ValueError as error:
            raise InputError(
                f"arrays of {cls.__name__}",
                expected=f"the axes {dict(cls.VARIABLES)} with one size each",
                given=f"others ({error})",
                fix="Check the shapes and coordinates.",
            ) from error
        return cls(data=data, provenance=watch.provenance(), **values)

    def figures(self) -> list[Figure]:
        """The figures of this result."""
        section = _import_figures(type(self))
        return [dataclasses.replace(f, section=f.section or section) for f in figures_of(self)]

    def findings(self) -> list[Finding]:
        """What this result says in plain words, most telling first."""
        section = _import_figures(type(self))
        return [dataclasses.replace(f, kind=f.kind or section) for f in findings_of(self)]

    def show(self) -> None:
        """Print what the result says, and show its figures (in a notebook, or in a browser)."""
        print("\n".join(finding.text for finding in self.findings()))  # noqa: T201
        for figure in self.figures():
            figure.plot.show()

    def to_dataframe(self, *names: str) -> pd.DataFrame:
        """A tidy table: a row for each cell, a column for each axis and each array.

        Args:
            names: The arrays wanted; by default all that have the axes of the widest one. An
                estimate becomes three columns (``iia``, ``iia_low``, ``iia_high``).

        Raises:
            InputError: an array that is not there, or arrays of different axes.
        """
        chosen = list(names) or self._widest()
        for name in chosen:
            if name not in self.data.data_vars:
                raise InputError(
                    "array",
                    expected=f"one of {', '.join(map(str, self.data.data_vars))}",
                    given=repr(name),
                    fix="See result.data.",
                )
        return tidy(self.data[chosen])

    def _widest(self) -> list[str]:
        axes = {str(n): set(a.dims) - {ESTIMATE} for n, a in self.data.data_vars.items()}
        widest = max(axes.values(), key=len, default=set())
        return [name for name, of_array in axes.items() if of_array == widest]

    def __repr__(self) -> str:
        sizes = ", ".join(f"{axis}: {size}" for axis, size in self.data.sizes.items())
        return f"{type(self).__name__}({sizes}; {', '.join(map(str, self.data.data_vars))})"

    def _repr_html_(self) -> str:
        items = "".join(f"<li>{escape(finding.text)}</li>" for finding in self.findings())
        return f"<p><code>{escape(repr(self))}</code></p><ul>{items}</ul>"

    def save(self, folder: str | Path, name: str | None = None) -> Path:
        """Write one file, ``NAME.safetensors`` (the kind by default), complete or not at all.

        Raises:
            InputError: If the name is not that of a file, or the folder cannot be written.
        """
        fields = [f.name for f in dataclasses.fields(self) if f.name not in ("data", "provenance")]
        header = {
            "kind": self.kind,
            "axes": {name: list(array.dims) for name, array in self.data.data_vars.items()},
            "coords": {axis: c.values for axis, c in self.data.coords.items()},
            "fields": {name: getattr(self, name) for name in fields},
            "provenance": self.provenance,
        }
        file = check_file_name(self.kind if name is None else name, "name of a result")
        path = Path(folder) / f"{file}{SUFFIX}"
        arrays = {str(name): array.values for name, array in self.data.data_vars.items()}
        write_arrays(path, arrays, metadata={_HEADER: json.dumps(header, default=json_default)})
        return path

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a result back.

        Raises:
            CheckpointError: If the file is missing, damaged, or holds a result of another kind.
        """
        import xarray as xr

        path = Path(path)
        arrays, header = _read(path)
        if header["kind"] != cls.kind:
            raise CheckpointError(
                f"result {path}",
                expected=f"a result of the kind {cls.kind!r}",
                given=f"one of the kind {header['kind']!r}",
                fix="Load it with loopinterp.core.results.load_result.",
            )
        try:
            variables = {name: (axes, arrays[name]) for name, axes in header["axes"].items()}
            return cls(
                data=xr.Dataset(variables, coords=header["coords"]),
                provenance=_validated(Provenance, header["provenance"]),
                **_fields(cls, header["fields"]),
            )
        except Exception as error:  # whatever a damaged description makes of xarray's own code
            raise CheckpointError(
                f"result {path}",
                expected=f"the arrays and fields of {cls.__name__} in this version",
                given=f"others ({error})",
                fix="Run the study again with this version.",
            ) from error


def kind_of(path: str | Path) -> str:
    """The kind of a saved result.

    Raises:
        CheckpointError: If the file is missing, damaged, or no result.
    """
    return _read(Path(path))[1]["kind"]


def known_kinds() -> Mapping[str, type[Result]]:
    """The kinds of result that are defined in modules imported so far."""
    return dict(Result._kinds)


def _read(path: Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    arrays, metadata = read_arrays(path)
    header = parse_json_object(metadata.get(_HEADER, ""))
    parts = {"kind": str, "axes": dict, "coords": dict, "fields": dict, "provenance": dict}
    if header is None or not all(isinstance(header.get(part), t) for part, t in parts.items()):
        raise CheckpointError(
            f"result {path}",
            expected="a file written by Result.save",
            given="a safetensors file without a result's description",
            fix="Run the study again, or point to another file of a folder of results.",
        )
    return arrays, header


def _fields(cls: type[Result], values: Mapping[str, Any]) -> dict[str, Any]:
    datasets = SimpleNamespace(Dataset=Any)  # the one type that is not imported here
    hints = typing.get_type_hints(cls, localns={"xr": datasets})
    return {name: _validated(hints.get(name, Any), value) for name, value in values.items()}


def _validated(kind: Any, value: Any) -> Any:
    """A value read from JSON, as the type that a field declares."""
    from pydantic import TypeAdapter

    return TypeAdapter(kind).validate_json(json.dumps(value))


def _import_figures(cls: type[Result]) -> str:
    """Import what registers figures and findings of a class; the section that they belong to.

    That is a module beside the class's, with ``_figures`` at the end of its name, or the
    ``figures`` of its package. The section is the one that the kind is registered with, or else
    the module's ``SECTION``, one for all or by kind.
    """
    section = _KINDS[cls.kind].section if cls.kind in registered_kinds() else ""
    for base in cls.__mro__:
        if base is Result or not issubclass(base, Result):
            continue
        module, package = base.__module__, base.__module__.rpartition(".")[0]
        for name in (f"{module}_figures", f"{package}.figures"):
            if _exists(name):
                declared = getattr(importlib.import_module(name), "SECTION", "")
                by_kind = declared if isinstance(declared, Mapping) else {base.kind: declared}
                section = section or by_kind.get(base.kind, "")
    return section


def _exists(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # a class defined in a script, or by hand
        return False


@dataclass(frozen=True)
class Kind:
    """A kind of saved result, as it is registered.

    Attributes:
        module: The module that defines its class.
        section: The section of the report that it belongs to.
        study: The study of ``loopinterp analyze`` that makes it; "" if none does.
        tasks: Tasks that the study asks about; any if empty.
        of_programs: Whether it asks only about tasks that a stock program solves.
    """

    module: str
    section: str = ""
    study: str = ""
    tasks: tuple[str, ...] = ()
    of_programs: bool = False


_KINDS: dict[str, Kind] = {}
_CATALOGUE = "loopinterp.app.catalogue"
"""What registers the kinds of the package; imported by name, when one is first asked for."""


def register_kind(kind: str, module: str, section: str = "", **study: Any) -> None:
    """Say where a kind of result is defined, so that :func:`load_result` and the report know it.

    Args:
        kind: As its class has it.
        module: The module that defines the class.
        section: The section of the report that it belongs to.
        study: ``study``, ``tasks`` and ``of_programs``, as :class:`Kind` has them.

    Raises:
        InputError: If there is such a kind.
    """
    check_new_name("kind of result", kind, _KINDS)
    _KINDS[kind] = Kind(module, section, **study)


def registered_kinds() -> Mapping[str, Kind]:
    """The kinds of result of the package, and those that were registered beside them."""
    importlib.import_module(_CATALOGUE)
    return dict(_KINDS)


def load_result(path: str | Path) -> Result:
    """Read any saved result; nothing is unpickled, and no name in the file is imported.

    Raises:
        CheckpointError: If the file is missing or damaged, or of a kind that is not known here.
    """
    kind = kind_of(path)
    registered = registered_kinds()
    if kind not in known_kinds() and kind in registered:
        importlib.import_module(registered[kind].module)
    cls = known_kinds().get(kind)
    if cls is None:
        raise CheckpointError(
            f"result {path}",
            expected=f"one of the kinds {', '.join(sorted({*registered, *known_kinds()}))}",
            given=f"the kind {reprlib.repr(kind)}",
            fix="Run the study again with this version, or import the package that defines it.",
        )
    return cls.load(path)


def result_files(folder: str | Path) -> Iterator[Path]:
    """The saved results in a folder, in alphabetical order; none where there is no folder.

    Raises:
        CheckpointError: If it is no folder, or one that may not be read.
    """
    folder = Path(folder)
    try:
        names = sorted(name for name in os.listdir(folder) if name.endswith(SUFFIX))
    except FileNotFoundError:
        names = []
    except OSError as error:
        raise CheckpointError(
            f"results {folder}",
            expected="a folder that can be read",
            given=error.strerror or str(error),
            fix="Check what it is, and its permissions.",
        ) from error
    return (folder / name for name in names)
