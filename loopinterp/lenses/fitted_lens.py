"""A fitted lens: an affine map from each place of a run to its end.

It reads and writes the files of the package tuned-lens: ``config.json`` and ``params.pt``.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import torch
from pydantic import NonNegativeInt

from loopinterp.core.boundary import checked
from loopinterp.core.errors import CheckpointError, InputError, check_choice
from loopinterp.core.storage import (
    parse_json_object,
    read_bytes,
    read_json_object,
    read_tensors_and_metadata,
    write_bytes,
    write_json,
    write_tensors,
)
from loopinterp.core.text import ShortRepr
from loopinterp.models.iteration import bind, iterate
from loopinterp.models.protocol import declared, need_hooks
from loopinterp.models.taps import recording_gradients

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from loopinterp.models import LoopedModel


_FittedKind = Literal["tuned", "jacobian"]
_HEADER = "loopinterp.lens"

EVERYWHERE: tuple[int, Layer] = (-1, None)
"""The place of a map that is shared by all places."""


@dataclass(frozen=True, kw_only=True, repr=False)
class FittedLens(ShortRepr):
    r"""An affine map :math:`h \mapsto A h + b` from each place to the state after the last loop.

    The lens reads ``model.readout(A h + b)``. At a layer, h is the residual for a Jacobian lens;
    for a tuned lens it is the state in which the loop would end there. The last state is read
    directly, by a tuned lens also the layer before it.

    Attributes:
        kind: "tuned" (:func:`fit_tuned_lens`) or "jacobian" (:func:`fit_jacobian_lens`).
        matrix, offset: A and b of each place.
        places: ``(loops made, layer or None)``; :data:`EVERYWHERE` for a shared map.
        n_layers: Layers of the tied block if maps are inside loops; else 0.
        n_before: Layers of the prelude.
        n_examples: Examples of the fit.
        made: Options and model (``weights_sha256``) of the fit.

    Example:
        >>> lens = FittedLens(kind="tuned", matrix=2 * torch.eye(2)[None], offset=torch.ones(1, 2),
        ...                   places=[(0, None)], n_loops=1)
        >>> lens.transport(torch.tensor([1.0, 0.0]), 0), lens.transport(torch.tensor([1.0, 0.0]), 1)
        (tensor([3., 1.]), tensor([1., 0.]))
    """

    kind: _FittedKind
    matrix: Float[Tensor, "place d_model d_model"]
    offset: Float[Tensor, "place d_model"]
    places: list[tuple[int, Layer]]
    n_loops: int
    n_layers: int = 0
    n_before: int = 0
    n_examples: int = 0
    made: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_choice("FittedLens(kind)", self.kind, get_args(_FittedKind))
        n, width = self.offset.shape
        if self.matrix.shape != (n, width, width) or len(self.places) != n:
            raise InputError(
                "FittedLens",
                expected="a matrix, an offset and a place for each map",
                given=f"matrix {list(self.matrix.shape)}, offset {[n, width]}, "
                f"{len(self.places)} places",
                fix="Pass matrix [place, d_model, d_model] and offset [place, d_model].",
            )

    @property
    def d_model(self) -> int:
        return self.offset.shape[1]

    @property
    def shared(self) -> bool:
        """Whether one map serves all places."""
        return self.places == [EVERYWHERE]

    def transport(
        self, h: Float[Tensor, "*at width"], loop: int, layer: Layer = None
    ) -> Float[Tensor, "*at d_model"]:
        """The predicted last state, from the residual at a place."""
        last = self.kind == "tuned" and self.n_layers > 0 and layer == self.n_layers - 1
        if loop == self.n_loops and (layer is None or last):
            return h
        at = EVERYWHERE if self.shared else (loop, layer)
        narrow = layer is not None and h.shape[-1] < self.d_model
        if at not in self.places or (h.shape[-1] != self.d_model and not narrow):
            raise InputError(
                "place",
                expected=f"a place of the fit, up to loop {self.n_loops}, of width {self.d_model}",
                given=f"loop {loop}, layer {layer}, width {h.shape[-1]}",
                fix="Fit the lens with that n_loops, and with inside=True for layers.",
            )
        k = self.places.index(at)
        matrix, offset = (x[k].to(h.device) for x in (self.matrix, self.offset))
        return (as_wide(h, self.d_model).to(matrix.dtype) @ matrix.T + offset).to(h.dtype)

    def save(self, path: str | Path) -> Path:
        """Write one self-describing safetensors file, complete or not at all."""
        header = {
            name: getattr(self, name)
            for name in ("kind", "places", "n_loops", "n_layers", "n_before", "n_examples", "made")
        }
        tensors = {"matrix": self.matrix, "offset": self.offset}
        write_tensors(path, tensors, {_HEADER: json.dumps(header, default=str)})
        return Path(path)

    @classmethod
    def load(cls, path: str | Path) -> FittedLens:
        """Read a saved lens."""
        tensors, texts = read_tensors_and_metadata(path)
        header = parse_json_object(texts.get(_HEADER, "")) or {}
        try:
            header["places"] = [tuple(place) for place in header["places"]]
            return cls(**tensors, **header)
        except (KeyError, TypeError, InputError) as error:
            raise CheckpointError(
                f"file {path}",
                expected="a lens that FittedLens.save wrote",
                given=f"another file ({error})",
                fix="Fit the lens again, or read a result with load_result.",
            ) from error

    def to_transformer_lens(self) -> Any:
        """The maps as TransformerLens' ``JacobianLens``.

        Layer ``l`` of loop ``t`` (counted from 1) is number ``n_before + (t - 1) n_layers + l``,
        with ``n_layers = 1`` for maps of states. The initial state is left out.

        Raises:
            InputError: If an offset is not 0, or the map is shared.
        """
        from transformer_lens.tools.analysis import JacobianLens

        first, per_loop = self.n_before, max(self.n_layers, 1)
        last = first + self.n_loops * per_loop - 1
        # With layers inside, the target is the last block's output; states have no block.
        inside = self.n_layers > 0
        matrices = {
            flat: matrix
            for (loop, layer), matrix in zip(self.places, self.matrix)
            if loop > 0 and (layer is not None) == inside
            if (flat := first + (loop - 1) * per_loop + (layer or 0)) < last
        }
        if self.shared or bool(self.offset.any()) or not matrices:
            raise InputError(
                "lens",
                expected="matrices of places after loop 1 and before the last state, no offsets",
                given=f"places {self.places}, largest offset {float(self.offset.abs().max()):.3g}",
                fix="Fit a Jacobian lens with centred=False for two loops or more.",
            )
        about = {name: getattr(self, name) for name in ("n_loops", "n_layers", "n_before")}
        source = "block outputs" if inside else "states of loops"
        metadata = {"estimator": "jacobian_lens", "target_layer": last, "source": source}
        metadata |= {"loopinterp": about}
        return JacobianLens(
            matrices, n_prompts=self.n_examples, d_model=self.d_model, metadata=metadata
        )

    @classmethod
    def from_transformer_lens(
        cls, lens: Any, *, n_loops: int, n_layers: int = 0, n_before: int = 0
    ) -> FittedLens:
        """The maps of a TransformerLens ``JacobianLens``, at the loops of a model.

        Args:
            n_layers: Layers of the tied block; 0 if each layer of the lens is a loop.
            n_before: Layers of the prelude.
        """
        per_loop = max(n_layers, 1)
        fitted_at: list[tuple[int, Layer]] = []
        for flat in lens.source_layers:
            loop, layer = divmod(flat - n_before, per_loop)
            if not 0 <= loop < n_loops:
                raise InputError(
                    "lens",
                    expected=f"layers {n_before} to {n_before + n_loops * per_loop - 1}",
                    given=f"layer {flat}",
                    fix="Pass the n_loops, n_layers and n_before of the model it was fitted on.",
                )
            fitted_at.append((loop + 1, layer if n_layers else None))
        matrix = torch.stack([lens.jacobians[flat] for flat in lens.source_layers])
        return cls(
            kind="jacobian",
            matrix=matrix,
            offset=matrix.new_zeros(matrix.shape[:2]),
            places=fitted_at,
            n_loops=n_loops,
            n_layers=n_layers,
            n_before=n_before,
            n_examples=lens.n_prompts,
            made=dict(lens.metadata),
        )


STATE = "state"
"""The layer coordinate of the state after a loop."""

Layer = int | None


class LoopResidual(NamedTuple):
    """A residual of a run, ``[batch, pos, d_model]``."""

    loop: int  # loops made
    layer: Layer  # of the last of them; None for the state after it
    residual: Tensor
    ended: Tensor  # the state that the loop would end in with this residual


def places(
    model: LoopedModel | Any,
    inputs: Tensor,
    n_loops: int,
    *,
    inside: bool = False,
) -> Iterator[LoopResidual]:
    """The residuals of a run, loop by loop; ``inside`` adds those after each layer.

    Without ``end_loop(h, e)``, the model runs another loop for each layer.
    """
    if not inside:
        for loop, h in iterate(model, inputs, n_loops):
            yield LoopResidual(loop, None, h, h)
        return
    need_hooks(model)
    hooked: Any = model
    iteration = bind(model, inputs)  # refuses hooks that are on
    h, end_loop = iteration.h0, declared(model, "end_loop")
    yield LoopResidual(0, None, h, h)
    for loop in range(n_loops):
        layers = layer_hooks(model, loop, n_loops)
        span = {"n_loops": n_loops, "start_at_loop": loop, "stop_at_loop": loop + 1, "state": h}
        after, cache = hooked.run_with_cache(
            inputs, names_filter=layers, return_type="state", **span
        )
        for layer, name in enumerate(layers):
            x = end = cache[name]  # [batch, pos, d_layer]
            if name == layers[-1]:
                end = after
            elif end_loop is not None:
                end = end_loop(x, iteration.e)
            else:  # by running the loop with x at its last hook
                hooks = [(layers[-1], lambda residual, hook, x=x: x)]
                end = hooked.run_with_hooks(inputs, fwd_hooks=hooks, return_type="state", **span)
            yield LoopResidual(loop + 1, layer, x, end)
        yield LoopResidual(loop + 1, None, after, after)
        h = after


def layer_hooks(model: Any, loop: int | None, n_loops: int, *, section: str = "block") -> list[str]:
    """The hooks after each layer of a loop (or, with None, of prelude or coda), if any."""
    if not hasattr(model, "site"):
        return []
    names = model.site("resid_post", section=section, loop=loop, n_loops=n_loops)
    return [names] if isinstance(names, str) else names


def live_places(
    model: LoopedModel | Any, inputs: Tensor, n_loops: int, *, inside: bool = False
) -> tuple[Tensor, dict[tuple[int, Layer], Tensor]]:
    """The last state of a run, and the residuals to differentiate it by."""
    recorded: dict[tuple[int, Layer], Tensor] = {}
    with recording_gradients(model):
        iteration = bind(model, inputs)
        start = iteration.h0.detach().clone().requires_grad_()
        if not inside:
            for loop, h in iteration.run(n_loops, state=start, start_at_loop=0):
                recorded[loop, None] = h
            return recorded.pop((n_loops, None)), recorded
        need_hooks(model)
        hooked: Any = model

        def keep(place: tuple[int, Layer]) -> Callable[..., None]:
            return lambda x, hook: recorded.update({place: x})

        hooks: list[tuple[str, Any]] = []
        for loop in range(n_loops):
            names = layer_hooks(model, loop, n_loops)
            hooks += [(name, keep((loop + 1, layer))) for layer, name in enumerate(names)]
            state = hooked.site("hook_state_post", loop=loop, n_loops=n_loops)
            hooks.append((state, keep((loop + 1, None))))
        end = hooked.run_with_hooks(
            inputs, n_loops=n_loops, state=start, fwd_hooks=hooks, return_type="state"
        )
    del recorded[n_loops, None]
    return end, {(0, None): start, **recorded}


def readout_without_coda(
    model: LoopedModel | Any, inputs: Tensor
) -> Callable[[Tensor], Tensor] | None:
    """Final norm and unembedding of a model with a coda, in a run of no loop; None without one."""
    hooked: Any = model
    coda = layer_hooks(model, None, 1, section="coda")
    if not coda:
        return None

    def read(h: Tensor) -> Tensor:
        hooks = [(coda[-1], lambda residual, hook: h)]
        return hooked.run_with_hooks(inputs, n_loops=1, start_at_loop=1, state=h, fwd_hooks=hooks)

    return read


def as_wide(x: Tensor, width: int) -> Tensor:
    """A residual padded with zeros up to the width of a state."""
    return torch.nn.functional.pad(x, (0, width - x.shape[-1]))


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
    expected = f"{n_maps} linear translators of width {width}"
    wrong = partial(CheckpointError, f"file {path}", expected=expected, fix=_FIX)
    data = read_bytes(path)
    try:
        state = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged pickle raises errors of any type
        raise wrong(given=f"a file that does not load ({type(error).__name__})") from error
    if not isinstance(state, dict):
        raise wrong(given=f"a {type(state).__name__}")
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
        raise wrong(given=f"{name!r} of shape {shapes_there.get(name)}")
    W = torch.stack([state[f"{i}.weight"] for i in range(n_maps)])  # [place, to, from]
    W = W.to(torch.promote_types(W.dtype, torch.float32))
    b = torch.stack([state[f"{i}.bias"] for i in range(n_maps)]) if biased else W[..., 0] * 0
    return W + torch.eye(width, dtype=W.dtype), b.to(W.dtype)
