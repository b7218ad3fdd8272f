"""Tuned lenses in the files of the package tuned-lens: ``config.json`` and ``params.pt``."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from pydantic import NonNegativeInt

from loopinterp.core.boundary import checked
from loopinterp.core.errors import CheckpointError, InputError
from loopinterp.core.storage import read_bytes, read_json_object, write_bytes, write_json
from loopinterp.lenses.fitted_lens import EVERYWHERE, FittedLens

if TYPE_CHECKING:
    from loopinterp.lenses.fitted_lens import Layer

_CONFIG, _PARAMETERS = "config.json", "params.pt"
_FIX = "Save it with tuned-lens 0.1 or later, or with write_tuned_lens."


@checked
def write_tuned_lens(lens: FittedLens, folder: str | Path, *, base_model: str = "looped") -> Path:
    r"""Write a tuned lens to a folder that ``TunedLens.from_unembed_and_pretrained`` reads.

    Translator i is :math:`h \mapsto h + W_i h + b_i`, with :math:`W_i = A_i - 1`, and reads the
    state before layer i; here i counts loops or, with maps inside loops, layers. The last layer of
    a loop has the map of the state after it. A shared map is written for each.

    Args:
        folder: New or existing; the two files are replaced.
        base_model: ``base_model_name_or_path`` of the configuration.

    Raises:
        InputError: If the lens is no tuned lens, or lacks a place.

    Example:
        >>> import tempfile
        >>> lens = FittedLens(kind="tuned", matrix=2 * torch.eye(2)[None], offset=torch.ones(1, 2),
        ...                   places=[(0, None)], n_loops=1)
        >>> folder = write_tuned_lens(lens, tempfile.mkdtemp())
        >>> read_tuned_lens(folder).matrix[0].tolist()
        [[2.0, 0.0], [0.0, 2.0]]
    """
    folder, places = Path(folder), _places(lens.n_loops, lens.n_layers)
    missing = [] if lens.shared else [place for place in places if place not in lens.places]
    if lens.kind != "tuned" or missing:
        raise InputError(
            "lens",
            expected="a tuned lens with a map for each loop (or layer) before the last state",
            given=f"a {lens.kind} lens, without the places {missing}",
            fix="Fit it with fit_tuned_lens.",
        )
    at = [lens.places.index(EVERYWHERE if lens.shared else place) for place in places]
    eye = torch.eye(lens.d_model, dtype=lens.matrix.dtype)
    state: dict[str, Any] = {}
    for i, k in enumerate(at):
        state[f"{i}.weight"] = lens.matrix[k].cpu() - eye
        state[f"{i}.bias"] = lens.offset[k].cpu().clone()
    buffer = io.BytesIO()
    torch.save(state, buffer)  # the format has no safetensors
    write_bytes(folder / _PARAMETERS, buffer.getvalue())
    config = {
        "base_model_name_or_path": base_model,
        "d_model": lens.d_model,
        "num_hidden_layers": len(at),
        "bias": True,
        "base_model_revision": None,
        "unembed_hash": None,
        "lens_type": "linear_tuned_lens",
    }
    write_json(folder / _CONFIG, config)
    return folder


@checked
def read_tuned_lens(folder: str | Path, *, n_layers: NonNegativeInt = 0) -> FittedLens:
    """Read a folder of tuned-lens or of :func:`write_tuned_lens`.

    No code of the file is run (``weights_only``).

    Args:
        n_layers: Layers of the tied block; 0 if each translator is of a loop.

    Raises:
        CheckpointError: If a file is missing, damaged, or of another format.
        InputError: If the translators are no whole number of loops.
    """
    folder = Path(folder)
    config = read_json_object(folder / _CONFIG)
    width: Any = config.get("d_model")
    n_maps: Any = config.get("num_hidden_layers")
    are_counts = all(type(size) is int and size > 0 for size in (width, n_maps))
    if not are_counts or config.get("lens_type", "linear_tuned_lens") != "linear_tuned_lens":
        raise CheckpointError(
            f"file {folder / _CONFIG}",
            expected="the configuration of a linear tuned lens, with d_model, num_hidden_layers",
            given=f"d_model {width!r}, num_hidden_layers {n_maps!r}, "
            f"lens_type {config.get('lens_type')!r}",
            fix=_FIX,
        )
    if n_maps % max(n_layers, 1):
        expected, fix = f"a divisor of {n_maps} translators", "Pass the layers of one loop."
        raise InputError("n_layers", expected=expected, given=str(n_layers), fix=fix)
    n_loops = n_maps // max(n_layers, 1)
    matrix, offset = _parameters(folder / _PARAMETERS, n_maps, width)
    fitted_at = _places(n_loops, n_layers)
    # The last layer of a loop ends in the state after it.
    twins = [
        (i, (t, n_layers - 1)) for i, (t, k) in enumerate(fitted_at) if n_layers and t and k is None
    ]
    at = [*range(n_maps), *(i for i, _ in twins)]
    return FittedLens(
        kind="tuned",
        matrix=matrix[at],
        offset=offset[at],
        places=[*fitted_at, *(place for _, place in twins)],
        n_loops=n_loops,
        n_layers=n_layers,
        made={"tuned_lens": config},
    )


def _places(n_loops: int, n_layers: int) -> list[tuple[int, Layer]]:
    inner: list[Layer] = [None, *range(max(n_layers, 1) - 1)]
    return [
        (loop, None) if layer is None else (loop + 1, layer)
        for loop in range(n_loops)
        for layer in inner
    ]


def _parameters(path: Path, n_maps: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A and b of each translator, in float32 or wider."""
    data = read_bytes(path)
    try:
        state = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged pickle raises errors of any type
        got = f"a file that does not load ({type(error).__name__})"
        raise _wrong(path, n_maps, width, got) from error
    if not isinstance(state, dict):
        raise _wrong(path, n_maps, width, f"a {type(state).__name__}")
    biased = "0.bias" in state
    shapes: dict[str, list[int]] = {f"{i}.weight": [width, width] for i in range(n_maps)}
    shapes |= {f"{i}.bias": [width] for i in range(n_maps)} if biased else {}
    shapes_there = {
        name: list(x.shape) if torch.is_tensor(x) and x.is_floating_point() else str(type(x))
        for name, x in state.items()
    }
    if shapes_there != shapes:
        every = [*shapes_there, *shapes]
        name = next(str(k) for k in every if shapes_there.get(k) != shapes.get(k))
        raise _wrong(path, n_maps, width, f"{name!r} of shape {shapes_there.get(name)}")
    W = torch.stack([state[f"{i}.weight"] for i in range(n_maps)])  # [place, to, from]
    W = W.to(torch.promote_types(W.dtype, torch.float32))
    b = torch.stack([state[f"{i}.bias"] for i in range(n_maps)]) if biased else W[..., 0] * 0
    return W + torch.eye(width, dtype=W.dtype), b.to(W.dtype)


def _wrong(path: Path, n_maps: int, width: int, got: str) -> CheckpointError:
    expected = f"{n_maps} linear translators of width {width}"
    return CheckpointError(f"file {path}", expected=expected, given=got, fix=_FIX)
