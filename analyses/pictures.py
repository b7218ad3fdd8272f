"""The pictures of the guide: every one is made here, from saved results or from a model of the zoo.

    loopinterp zoo addition --out runs/addition && loopinterp analyze runs/addition
    python -m analyses.pictures --run runs/addition

writes ``docs/pictures/*.png`` and the gallery's page. Needs Chromium and the extra ``browser``.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import plotly.graph_objects as go
import torch
import xarray as xr

import loopinterp
from analyses.still_pictures import StillPictures
from analyses.tables_in_pages import PAGES, rewrite
from loopinterp.compiler import draw_program
from loopinterp.core.results import load_result
from loopinterp.figures import PALETTE, heatmap_panels, template
from loopinterp.models import bind
from loopinterp.pages import explore, write_circuit_page, write_results
from loopinterp.programs import get_program
from loopinterp.tasks import Addition

PICTURES = PAGES / "pictures"


@dataclass(frozen=True)
class Thumbnail:
    """A figure of a saved study, and where it is explained.

    Attributes:
        name: Of the file.
        study: The saved result.
        figure: Which of its figures.
        asks: What it shows, as a question.
        page: The page of the guide on it.
    """

    name: str
    study: str
    asks: str
    page: str
    figure: int = 0


PHOTOGRAPHED = (
    Thumbnail("explorer", "", "A few inputs, answered loop by loop", "explorer"),
    Thumbnail("circuit-graph", "", "Which component reads which in a circuit?", "edges"),
)
"""What is no figure, but a page."""

GALLERY = (
    Thumbnail(
        "convergence",
        "convergence",
        "Does the state converge, and is the answer right?",
        "convergence-and-answers",
    ),
    Thumbnail(
        "extrapolation",
        "extrapolation",
        "What happens beyond the loops of training?",
        "when-to-stop",
    ),
    Thumbnail("lens", "lens", "What would each loop answer?", "lenses"),
    Thumbnail("exits", "exits", "How early could an example be answered?", "lenses"),
    Thumbnail(
        "input-dependence",
        "input-dependence",
        "Does the limit depend on the input?",
        "convergence-and-answers",
    ),
    Thumbnail("local-stability", "local-stability", "Is the limit stable?", "finding-fixed-points"),
    Thumbnail(
        "basins", "basins", "Which limit does each initial state reach?", "finding-fixed-points"
    ),
    Thumbnail("geometry", "geometry", "Which paths do states take?", "convergence-and-answers", 1),
    Thumbnail(
        "stabilisation",
        "stabilisation",
        "Do the attention patterns stop changing?",
        "convergence-and-answers",
    ),
    Thumbnail("wavefront", "wavefront", "How far has the carry travelled?", "tutorial"),
    Thumbnail("programs", "programs", "Which program does it run?", "which-program"),
    Thumbnail(
        "hold-time", "hold-time", "How long does an injected carry persist?", "which-program"
    ),
    Thumbnail(
        "subspaces", "subspaces", "In how few directions is the carry kept?", "which-program"
    ),
    Thumbnail("decodability", "decodability", "Which variables can a probe read?", "which-program"),
    Thumbnail(
        "decompilation",
        "decompilation",
        "Which program can be read off the model?",
        "read-a-program",
    ),
    Thumbnail("heads", "heads", "Do heads attend where programs do?", "which-program"),
    Thumbnail("ablation", "ablation", "Which parts are needed, and when?", "ablation-and-patching"),
    Thumbnail("attention", "attention", "Where does each head look?", "address-and-cache"),
)


IN_PAGES = ("convergence", "wavefront", "programs")
"""Studies whose pictures stand in other pages too, where they are larger."""


@torch.no_grad()
def main() -> None:
    names = [*IDEAS, *(one.name for one in (*PHOTOGRAPHED, *GALLERY))]
    parser = argparse.ArgumentParser(description="The pictures of the guide.")
    parser.add_argument("--run", type=Path, default=Path("runs/addition"), help="Analysed.")
    parser.add_argument("--only", nargs="*", choices=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--out", type=Path, default=PICTURES)
    args = parser.parse_args()
    torch.set_num_threads(1)
    args.out.mkdir(parents=True, exist_ok=True)
    studies = {one.name: one for one in GALLERY}
    with StillPictures() as pictures:
        for name in args.only or names:
            if name in IDEAS:
                picture = pictures.draw(IDEAS[name](), height=360)
            elif name in studies:
                scale = 1.25 if name in IN_PAGES else 0.8
                picture = pictures.draw(first_plot(args.run, studies[name]), scale=scale)
            else:
                picture = {"explorer": explorer, "circuit-graph": circuit_graph}[name](pictures)
            keep(picture, args.out / f"{name}.png")
    if not args.only and args.out == PICTURES:
        rewrite(PAGES / "gallery.md", {"gallery": as_cards((*PHOTOGRAPHED, *GALLERY))})


def first_plot(run: Path, one: Thumbnail) -> go.Figure:
    """The figure of a saved study: that of its number, graphs of circuits left out."""
    figures = load_result(run / "results" / f"{one.study}.safetensors").figures()
    return [shown.plot for shown in figures if isinstance(shown.plot, go.Figure)][one.figure]


def keep(picture: bytes, file: Path) -> None:
    """Write a picture, and say how large it is."""
    file.write_bytes(picture)
    print(f"{file}: {len(picture) / 1e3:.0f} kB", flush=True)


def as_cards(thumbnails: Sequence[Thumbnail]) -> str:
    """The gallery in Markdown: pictures with their questions, each linked to its page."""
    cards = [
        f"- [![{one.asks}](pictures/{one.name}.png)]({one.page}.md)\n\n"
        f"  [{one.asks}]({one.page}.md)"
        for one in thumbnails
    ]
    return "\n".join(cards)


def explorer(pictures: StillPictures) -> bytes:
    """The explorer on a carry that runs through a whole sum, a place in its front chosen."""
    run = loopinterp.zoo.pretrained_run("addition")
    shown = run.task.encode(f"{2**21 - 1} + 1")
    found = explore(run.model().eval(), shown, programs=["ripple"])
    choose = (
        "async () => { while (!document.querySelector('.explorer').explorer) "
        "await new Promise(requestAnimationFrame); "
        "document.querySelector('.explorer').explorer.select({ loop: 9, pos: 10 }); }"
    )
    with tempfile.TemporaryDirectory() as folder:
        page = write_results({"explorer": found}, Path(folder) / "page.html", title="Explorer")
        return pictures.photograph(page, width=1240, script=choose, element=".explorer")


def circuit_graph(pictures: StillPictures) -> bytes:
    """The circuit of a program, its head chosen."""
    choose = """() => {
      document.querySelector('header').remove();
      document.querySelector('main').style.padding = '1rem';
      document.querySelector('.folded.wide .node.head').dispatchEvent(new MouseEvent('click'));
    }"""
    with tempfile.TemporaryDirectory() as folder:
        graph = draw_program(get_program("ripple_held_2"))
        page = write_circuit_page(graph, Path(folder) / "circuit.html")
        return pictures.photograph(page, width=1060, height=760, script=f"({choose})()")


# Ideas, each on the smallest example that shows it


def light_cone() -> go.Figure:
    """How far one changed state has got, loop by loop, in the zoo's addition."""
    model, task = loopinterp.load_pretrained("addition"), Addition()
    ones = sum(1 << k for k in range(1, 16))
    inputs = task.encode([(ones, 0)], n=16).inputs
    iteration = bind(model, inputs)
    other = bind(model, task.encode([(ones | 1, 1)], n=16).inputs)
    states = dict(iteration.run(20))
    h = states[6].clone()
    h[:, 6] = dict(other.run(6))[6][:, 6]
    changed = dict(iteration.run(12, state=h))
    size = [
        (changed[k] - states[6 + k]).norm(dim=-1)[0] / states[6 + k].norm(dim=-1)[0]
        for k in range(13)
    ]
    values = torch.stack(size).numpy()
    cells = xr.DataArray(values, {"loops since": range(13), "position": range(values.shape[1])})
    return heatmap_panels({"": cells}, value_title="change, over size", scale="mass")


def fates() -> go.Figure:
    """Four long-run behaviours of a trajectory: maps of the plane, from one initial state."""
    turn = np.array([[0.0, -1.0], [1.0, 0.0]])
    maps: dict[str, Callable[[np.ndarray, int], np.ndarray]] = {
        "fixed point": lambda h, _: 0.8 * (h @ _rotation(0.7)) + 0.1,
        "limit cycle (period 4)": lambda h, _: h @ turn,
        "drift": lambda h, t: h + np.array([0.12, 0.05]) / (1 + 0.02 * t),
        "divergence": lambda h, _: 1.12 * (h @ _rotation(0.35)),
    }
    figure = go.Figure(layout={"template": template()})
    for (name, step), shade in zip(maps.items(), PALETTE.values()):
        h = [np.array([1.0, 0.3])]
        for t in range(24):
            h.append(step(h[-1], t))
        x, y = np.clip(np.array(h).T, -6, 6)
        figure.add_scatter(
            x=x, y=y, name=name, mode="lines+markers", line_color=shade, marker_size=5
        )
    figure.update_xaxes(title_text="first direction of the state", range=[-4.5, 4.5])
    figure.update_yaxes(title_text="second", range=[-3.5, 3.5])
    return figure


def hold_times() -> go.Figure:
    """An injected carry behind the front, in three compiled programs: does the bit show it?"""
    from loopinterp.compiler import compile_program

    task = Addition()
    ones = sum(1 << k for k in range(1, 12))
    base, source = task.encode([(ones, 0)], n=12), task.encode([(ones | 1, 1)], n=12)
    figure = go.Figure(layout={"template": template()})
    names = {"ripple": "ripple", "ripple_held_3": "held for 3 loops", "sticky_ripple": "sticky"}
    for (name, said), shade in zip(names.items(), PALETTE.values()):
        model = compile_program(name, max_length=13).model
        n_loops, at = 6, 5
        h = dict(bind(model, base.inputs).run(n_loops))[n_loops].clone()
        h[:, at] = dict(bind(model, source.inputs).run(n_loops))[n_loops][:, at]
        bound = bind(model, base.inputs)
        right = bound.readout(dict(bound.run(n_loops))[n_loops])[0, at].argmax()
        shows = [
            float(bound.readout(state)[0, at].argmax() != right)
            for _, state in bound.run(7, state=h)
        ]
        figure.add_scatter(x=list(range(8)), y=shows, name=said, line_color=shade, line_shape="hv")
    figure.update_xaxes(title_text="loops since a carry was put in")
    figure.update_yaxes(title_text="its bit still shows it", tickvals=[0, 1], range=[-0.1, 1.1])
    return figure


def steering() -> go.Figure:
    """Answers changed along the difference of mean states with and without a carry."""
    from loopinterp.interventions import steering_sweep

    model = loopinterp.load_pretrained("addition")
    fit = model.task.sample(8, batch_size=256, seed=1)
    asked = fit.targets >= 0
    carry = model.task.carries(fit)[asked]
    state = model(fit.inputs, n_loops=9, return_type="states")[6][asked]  # after 6 loops
    means = state[carry == 1].mean(0) - state[carry == 0].mean(0)
    batch = model.task.sample(8, batch_size=64, seed=0)
    strengths = (0.25, 0.5, 0.75, 1, 1.5, 2)
    sweep = steering_sweep(model, batch, means, strengths=strengths, loops=[0, 4, 8], n_draws=4)
    return sweep.figures()[0].plot


def _rotation(angle: float) -> np.ndarray:
    return np.array([[np.cos(angle), np.sin(angle)], [-np.sin(angle), np.cos(angle)]])


IDEAS: dict[str, Callable[[], Any]] = {
    "light-cone": light_cone,
    "fates": fates,
    "hold-times": hold_times,
    "steering": steering,
}
"""Pictures of an idea."""


if __name__ == "__main__":
    main()
