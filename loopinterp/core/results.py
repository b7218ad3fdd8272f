"""Results of studies: named axes, estimates with intervals, provenance, one file each.

A :class:`Result` holds one ``xarray.Dataset``:
``result.data["iia"].sel(program="ripple", delay="end")``.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import json
import reprlib
import sys
import time
import typing
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field
from functools import cache, singledispatch
from html import escape
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from pydantic import FiniteFloat, TypeAdapter

from loopinterp.core.errors import CheckpointError, check_new_name, check_seed, unknown_name
from loopinterp.core.intervals import ENDS, ESTIMATE, tidy
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
_HEADER = "loopinterp.result"


def config_hash(config: Mapping[str, Any]) -> str:
    """First 12 hex digits of the SHA-256 of the canonical JSON."""
    canonical = json.dumps(config, sort_keys=True, default=str)
    return hashlib.sha256(canonical.encode()).hexdigest()[:12]


@dataclass(frozen=True, kw_only=True)
class Provenance:
    """The origin of a result.

    Attributes:
        config: Configuration of study and model, JSON-ready.
        run: :func:`config_hash` of the ``config.json`` of the studied run, if any.
    """

    seed: int
    config: dict[str, Any] = field(default_factory=dict)
    config_hash: str = ""
    version: str = ""
    wall_time: FiniteFloat = 0.0
    run: str = ""

    @property
    def weights(self) -> list[str]:
        """SHA-256 of the weights of each model studied."""
        several = self.config.get("models")
        models = [self.config.get("model"), *(several if isinstance(several, list) else [])]
        digest = "weights_sha256"
        return [m[digest] for m in models if isinstance(m, dict) and digest in m]


class Stopwatch:
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
    """Time and describe a study: ``with study(seed, model=..., loops=8) as watch: ...``."""
    yield Stopwatch(check_seed(seed), config)


@dataclass(frozen=True, kw_only=True, repr=False)
class Figure:
    """A figure of the report.

    Attributes:
        plot: A Plotly figure, or a circuit's :class:`~loopinterp.figures.CircuitGraph`.
        control: The control and its result, if any.
        code: Text printed unchanged below, such as a program.
        section: The report section; by default that of the module that makes it.
    """

    title: str
    plot: Any
    caption: str
    control: str = ""
    data: pd.DataFrame | None = None
    section: str = ""
    code: str = ""

    def save(self, path: str | Path, *, width: int = 800) -> Path:
        """Write the figure; see :func:`loopinterp.figures.save_figure`."""
        save_figure = importlib.import_module("loopinterp.figures").save_figure
        return save_figure(self.plot, path, title=self.title, width=width)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.title!r}, {type(self.plot).__name__})"

    def _ipython_display_(self) -> None:
        from IPython.display import HTML, display

        parts = [("p", self.caption), ("p", self.control), ("pre", self.code)]
        below = "".join(f"<{tag}>{escape(text)}</{tag}>" for tag, text in parts if text)
        # A legend hung on the top of the figure stays above it where a notebook resizes it.
        display(importlib.import_module("loopinterp.figures.axes").titled(self.plot, self.title))
        if below:
            display(HTML(below))


@dataclass(frozen=True)
class Finding:
    """One statement of a result, for the report's summary.

    Attributes:
        text: A whole sentence for readers new to the field.
        section: As in :attr:`Figure.section`, or ``"verdict"`` (shown first).
        value: Its one number or name, formatted ("1.00", "loop 17"), or "".
        good: Whether this is desirable, if that has a meaning.
        label: A short heading for the value.
    """

    text: str
    _: KW_ONLY
    section: str = ""
    value: str = ""
    good: bool | None = None
    label: str = ""


@singledispatch
def figures_of(result: Result) -> list[Figure]:
    """The figures of a result; register one function per type."""
    return []


@singledispatch
def findings_of(result: Result) -> list[Finding]:
    """The findings of a result, the most important first; register one function per type."""
    return []


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class Result:
    """Base of every study's result.

    A subclass is a frozen, keyword-only dataclass with a stable ``kind``. ``VARIABLES`` declares
    its arrays with their axes, in the order loop, layer, batch, head, pos, feature; an axis
    ``estimate`` holds a value and its interval. All other fields are JSON-ready (numbers, strings,
    lists, dicts, dataclasses of these).

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
            there = name in self.data
            # Fails on a damaged file or a wrong study; readers select by these names.
            assert there or name in self.OPTIONAL, f"{type(self).__name__} lacks {name!r}"
            assert not there or self.data[name].dims == tuple(axes.split()), f"{name}: {axes}"

    @classmethod
    def of(
        cls, watch: Stopwatch, *, coords: Mapping[str, Any] | None = None, **values: Any
    ) -> Self:
        """Build a result from arrays (those of ``VARIABLES``) and fields.

        Args:
            coords: Axis -> coordinates; other axes are counted from 0.
            values: Arrays (NumPy's, or tensors on any device; None if absent) and fields.
        """
        import xarray as xr

        got = {name: values.pop(name, None) for name in cls.VARIABLES}
        arrays = {
            name: (
                cls.VARIABLES[name].split(),
                np.asarray(array.cpu() if hasattr(array, "cpu") else array),
            )
            for name, array in got.items()
            if array is not None
        }
        coordinates = {axis: list(c) for axis, c in (coords or {}).items()}
        if any(ESTIMATE in axes for axes, _ in arrays.values()):
            coordinates[ESTIMATE] = list(ENDS)
        data = xr.Dataset(arrays, coords=coordinates)
        return cls(data=data, provenance=watch.provenance(), **values)

    def figures(self) -> list[Figure]:
        """The figures of this result."""
        section = _import_figures(type(self))
        return [dataclasses.replace(f, section=f.section or section) for f in figures_of(self)]

    def findings(self) -> list[Finding]:
        """The findings, the most important first."""
        section = _import_figures(type(self))
        return [dataclasses.replace(f, section=f.section or section) for f in findings_of(self)]

    def show(self) -> None:
        """Print the findings and show the figures."""
        print("\n".join(finding.text for finding in self.findings()))  # noqa: T201
        for figure in self.figures():
            figure.plot.show()

    def to_dataframe(self, *names: str) -> pd.DataFrame:
        """A table of arrays, as :func:`~loopinterp.core.intervals.tidy` makes it.

        Args:
            names: Arrays of equal axes; by default all with the axes of the widest one.
        """
        for name in names:
            if name not in self.data.data_vars:
                raise unknown_name("array", name, map(str, self.data.data_vars))
        return tidy(self.data[list(names) or self._widest()])

    def _widest(self) -> list[str]:
        axes = {str(n): set(a.dims) - {ESTIMATE} for n, a in self.data.data_vars.items()}
        widest = max(axes.values(), key=len, default=set())
        return [name for name, own_axes in axes.items() if own_axes == widest]

    def __repr__(self) -> str:
        sizes = ", ".join(f"{axis}: {size}" for axis, size in self.data.sizes.items())
        return f"{type(self).__name__}({sizes}; {', '.join(map(str, self.data.data_vars))})"

    def _repr_html_(self) -> str:
        items = "".join(f"<li>{escape(finding.text)}</li>" for finding in self.findings())
        return f"<p><code>{escape(repr(self))}</code></p><ul>{items}</ul>"

    def _ipython_display_(self) -> None:
        from IPython.display import HTML, display

        display(HTML(self._repr_html_()), *self.figures()[:1])

    def save(self, folder: str | Path, name: str | None = None) -> Path:
        """Write ``NAME.safetensors`` (by default ``KIND``), complete or not at all."""
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
        """Read a result; a damaged file or another kind is a ``CheckpointError``."""
        import xarray as xr

        arrays, header = _read(Path(path))
        if header["kind"] != cls.kind:
            fix = "Load it with loopinterp.core.results.load_result."
            raise _unusable(path, f"the kind {cls.kind!r}", f"the kind {header['kind']!r}", fix)
        try:
            variables = {name: (axes, arrays[name]) for name, axes in header["axes"].items()}
            saved = {**header["fields"], "provenance": header["provenance"]}
            readers = {**dict.fromkeys(saved, TypeAdapter(Any)), **_readers(cls)}
            values = {
                name: readers[name].validate_json(json.dumps(value))
                for name, value in saved.items()
            }
            return cls(data=xr.Dataset(variables, coords=header["coords"]), **values)
        except Exception as error:  # xarray raises anything on a damaged description
            expected = f"the arrays and fields of {cls.__name__} in this version"
            fix = "Run the study again with this version."
            raise _unusable(path, expected, f"others ({error})", fix) from error


@cache
def _readers(cls: type[Result]) -> dict[str, TypeAdapter[Any]]:
    """By field of a kind of result, what reads its JSON."""
    # xr is not imported in this module: no type of a field, and checked by its axes.
    hints = typing.get_type_hints(cls, localns={"xr": SimpleNamespace(Dataset=Any)})
    hints["provenance"] = Provenance
    fields = [field.name for field in dataclasses.fields(cls) if field.name != "data"]
    return {name: TypeAdapter(hints[name]) for name in fields}


def _unusable(path: str | Path, expected: str, got: str, fix: str) -> CheckpointError:
    return CheckpointError(f"result {path}", expected=expected, given=got, fix=fix)


def _read(path: Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    arrays, metadata = read_arrays(path)
    header = parse_json_object(metadata.get(_HEADER, ""))
    parts = {"kind": str, "axes": dict, "coords": dict, "fields": dict, "provenance": dict}
    if header is None or not all(isinstance(header.get(part), t) for part, t in parts.items()):
        got = "a safetensors file without a result's description"
        fix = "Run the study again, or point to another file of a folder of results."
        raise _unusable(path, "a file written by Result.save", got, fix)
    return arrays, header


def _import_figures(cls: type[Result]) -> str:
    """Import the module of a class's figures and findings; return their report section.

    The module is the class's own with ``_figures`` at its end, or ``figures`` of its package. A
    section registered for the kind takes precedence over that module's ``SECTION``.
    """
    section = _KINDS[cls.kind].section if cls.kind in registered_kinds() else ""
    for base in cls.__mro__:
        if base is Result or not issubclass(base, Result):
            continue
        module, package = base.__module__, base.__module__.rpartition(".")[0]
        for name in (f"{module}_figures", f"{package}.figures"):
            # A class defined in a script has no package.
            if sys.modules.get(package) is not None and find_spec(name) is not None:
                declared = getattr(importlib.import_module(name), "SECTION", "")
                by_kind = declared if isinstance(declared, Mapping) else {base.kind: declared}
                section = section or by_kind.get(base.kind, "")
    return section


@dataclass(frozen=True)
class Kind:
    """A kind of saved result, defined in ``module``, with its section of the report.

    Attributes:
        study: The study of ``loopinterp analyze`` that makes it, if any.
        tasks: Tasks that the study serves; all if empty.
        of_programs: Whether it serves only tasks that a stock program solves.
    """

    module: str
    section: str = ""
    study: str = ""
    tasks: tuple[str, ...] = ()
    of_programs: bool = False


_KINDS: dict[str, Kind] = {}


def register_kind(kind: str, module: str, section: str = "", **study: Any) -> None:
    """Register a :class:`Kind` of result, for :func:`load_result` and the report."""
    check_new_name("kind of result", kind, _KINDS)
    _KINDS[kind] = Kind(module, section, **study)


def registered_kinds() -> Mapping[str, Kind]:
    # The catalogue registers the package's kinds; by name, as core imports nothing above it.
    importlib.import_module("loopinterp.app.catalogue")
    return dict(_KINDS)


def load_result(path: str | Path) -> Result:
    """Read any saved result, without unpickling and without imports named in the file.

    Raises:
        CheckpointError: If the file is missing, damaged or of an unknown kind.
    """
    kind = _read(Path(path))[1]["kind"]
    registered = registered_kinds()
    if kind not in Result._kinds and kind in registered:
        importlib.import_module(registered[kind].module)
    if kind not in Result._kinds:
        expected = f"one of the kinds {', '.join(sorted({*registered, *Result._kinds}))}"
        fix = "Run the study again with this version, or import the package that defines it."
        raise _unusable(path, expected, f"the kind {reprlib.repr(kind)}", fix)
    return Result._kinds[kind].load(path)


def result_files(folder: str | Path) -> Iterator[Path]:
    """The saved results in a folder, sorted by name; none without a folder."""
    folder = Path(folder)
    try:
        files = sorted(p for p in folder.iterdir() if p.suffix == SUFFIX) if folder.exists() else []
    except OSError as error:
        fix = "Check what it is, and its permissions."
        raise _unusable(folder, "a folder that can be read", str(error), fix) from error
    return iter(files)
