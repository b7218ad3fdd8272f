from __future__ import annotations

import itertools
import json
from typing import Any

import numpy as np
import plotly.graph_objects as go
import pytest
import torch
import xarray as xr

from loopinterp.core.errors import InputError
from loopinterp.dynamics import attention_stabilisation_study
from loopinterp.figures import (
    PALETTE,
    LinePanel,
    Reference,
    Series,
    bars_with_intervals,
    category_maps,
    head_lines,
    heatmap_panels,
    joined,
    line_figure,
    line_panels,
    loop_slider_figure,
    ramp,
    space_figure,
)
from loopinterp.lenses import attention_study
from loopinterp.models import LoopedTransformer, LoopedTransformerConfig
from loopinterp.tasks import Addition

# Machado, Oliveira and Fernandes (2009), severity 1, on linear RGB.
SIMULATIONS = {
    "normal": np.eye(3),
    "protanopia": [
        [0.152286, 1.052583, -0.204868],
        [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ],
    "deuteranopia": [
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.011820, 0.042940, 0.968881],
    ],
    "tritanopia": [
        [1.255528, -0.076749, -0.178779],
        [-0.078411, 0.930809, 0.147602],
        [0.004733, 0.691367, 0.303900],
    ],
}


def parts(figure: go.Figure) -> Any:
    """Plotly's figures have no types that a checker could follow."""
    return figure


def cells(values: Any, **axes: Any) -> xr.DataArray:
    """Values [row, column], with the coordinates of the rows and columns by their names."""
    return xr.DataArray(np.asarray(values, float), axes)


def linear(colour: str) -> np.ndarray:
    channels = np.array([int(colour[k : k + 2], 16) / 255 for k in (1, 3, 5)])
    return np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)


def luminance(colour: str) -> float:
    return float(np.array([0.2126, 0.7152, 0.0722]) @ linear(colour))


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def lab(colour: np.ndarray) -> np.ndarray:
    to_xyz = np.array(
        [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
    )
    xyz = to_xyz @ np.clip(colour, 0, 1) / [0.95047, 1, 1.08883]
    x, y, z = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("page", ["#ffffff", "#14171c"])
@pytest.mark.parametrize("name", PALETTE)
def test_colours_stand_out_on_light_and_dark_pages(name: str, page: str) -> None:
    assert contrast(PALETTE[name], page) > 2.9


@pytest.mark.parametrize("vision", SIMULATIONS)
def test_colours_stay_apart_in_colour_blind_eyes(vision: str) -> None:
    simulate = np.asarray(SIMULATIONS[vision])
    seen = {name: lab(simulate @ linear(colour)) for name, colour in PALETTE.items()}
    for one, other in itertools.combinations(seen, 2):
        assert np.linalg.norm(seen[one] - seen[other]) > 15, (one, other)


def test_a_line_has_its_interval_as_a_band_behind_it() -> None:
    line = Series("model", [1, 2, 3], [1.0, 0.5, 0.2], low=[0.9, 0.4, 0.1], high=[1, 0.6, 0.3])
    band, drawn = parts(line_figure([line], x_title="n", y_title="accuracy")).data
    assert list(band.x) == [1, 2, 3, 3, 2, 1]
    assert list(band.y) == [1, 0.6, 0.3, 0.1, 0.4, 0.9]
    assert band.fill == "toself" and not band.showlegend
    assert list(drawn.y) == [1.0, 0.5, 0.2]


def test_a_missing_value_splits_the_band() -> None:
    nan = float("nan")
    line = Series("model", [1, 2, 3], [1, nan, 0.2], low=[0.9, nan, 0.1], high=[1, nan, 0.3])
    first, second, _ = parts(line_figure([line], x_title="n", y_title="accuracy")).data
    assert list(first.x) == [1, 1] and list(second.x) == [3, 3]


def test_controls_are_grey_and_dashed_and_do_not_use_up_a_colour() -> None:
    figure = parts(
        line_figure(
            [
                Series("random labels", [1], [0.5], control=True),
                Series("model", [1], [1.0]),
                Series("random weights", [1], [0.4], control=True),
            ],
            x_title="loop",
            y_title="accuracy",
        )
    )
    first, model, second = figure.data
    assert first.line.color == second.line.color == PALETTE["grey"]
    assert first.line.dash == "dash" and second.line.dash == "dot"
    assert model.line.color == PALETTE["blue"] and model.line.dash == "solid"


def test_no_two_of_twelve_series_look_alike() -> None:
    series = [Series(f"series {k}", [1], [k]) for k in range(12)]
    series += [Series(f"control {k}", [1], [k], control=True) for k in range(4)]
    series += [Series("blue again", [1], [0], colour="blue")]
    lines = parts(line_figure(series, x_title="x", y_title="y")).data
    looks = {(t.line.color, t.line.dash, t.marker.symbol) for t in lines}
    unmarked = {(t.line.color, t.line.dash) for t in lines}
    assert len(looks) == len(unmarked) == len(series)
    bars = parts(bars_with_intervals(series, value_title="x")).data
    assert len({(t.marker.color, t.marker.pattern.shape) for t in bars}) == len(series)


def test_one_name_has_one_colour_and_one_legend_entry_in_all_panels() -> None:
    figure = parts(
        line_panels(
            [
                LinePanel([Series("a", [1], [1]), Series("b", [1], [2])], "residual", y_log=True),
                LinePanel(
                    [Series("b", [1], [3])], "accuracy", references=[Reference(0.5, "chance")]
                ),
            ],
            x_title="loop",
        )
    )
    a, b, again = figure.data
    assert b.line.color == again.line.color != a.line.color
    assert [t.showlegend for t in figure.data] == [True, True, False]
    assert figure.layout.yaxis.type == "log" and figure.layout.xaxis2.title.text == "loop"
    assert figure.layout.xaxis2.matches == "x"


def test_references_on_logarithmic_axes_put_their_words_where_their_line_is() -> None:
    figure = parts(
        line_figure(
            [Series("a", [1, 10], [1, 100])],
            x_title="x",
            y_title="y",
            y_log=True,
            y_range=(1, 100),
            references=[Reference(10, "ten")],
        )
    )
    assert figure.layout.shapes[0].y0 == 10  # shapes take data units
    assert figure.layout.annotations[-1].y == 1  # annotations take the exponent
    assert list(figure.layout.yaxis.range) == [0, 2]


def test_words_of_references_keep_out_of_each_others_way() -> None:
    figure = parts(
        line_figure(
            [Series("a", [1, 100], [0, 1])],
            x_title="x",
            y_title="y",
            x_log=True,
            references=[Reference(5, "second", "x"), Reference(4, "first", "x")],
        )
    )
    anchors = {note.text: note.xanchor for note in figure.layout.annotations}
    assert anchors == {"first": "right", "second": "left"}  # away from each other
    figure = parts(
        line_figure(
            [Series("a", [0, 10], [0, 1])],
            x_title="x",
            y_title="y",
            references=[Reference(9, "late", "x")],
        )
    )
    assert figure.layout.annotations[0].xanchor == "right"  # away from the edge


@pytest.mark.parametrize("axis", ["x", "y"])
def test_a_mark_that_has_no_place_on_a_logarithmic_axis_is_left_out(axis: Any) -> None:
    marks = [Reference(0, "nowhere", axis), Reference(-1, "nor here", axis), Reference(2, "", axis)]
    panel = LinePanel([Series("a", [1, 10], [1, 9])], "y", y_log=True, references=marks)
    figure = parts(line_panels([panel], x_title="x", x_log=True))
    (line,) = figure.layout.shapes
    assert line[f"{axis}0"] == line[f"{axis}1"] == 2 and not figure.layout.annotations
    linear = LinePanel([Series("a", [1, 10], [1, 9])], "y", references=marks)
    assert len(parts(line_panels([linear], x_title="x")).layout.shapes) == 3


def test_bars_take_absolute_intervals() -> None:
    bars = Series("IIA", ["ripple", "latched"], [0.4, 0.9], low=[0.3, 0.85], high=[0.6, 0.95])
    (bar,) = parts(bars_with_intervals([bars], value_title="IIA")).data
    np.testing.assert_allclose(bar.error_x.array, [0.2, 0.05])
    np.testing.assert_allclose(bar.error_x.arrayminus, [0.1, 0.05])


def test_a_line_is_drawn_for_each_place_on_an_axis() -> None:
    values = cells([[1, 2], [3, 4]], head=[0, 1], loop=[5, 6])
    first, second = Series.each(values, "head", "head {}".format, control=True)
    assert (first.name, list(first.x), list(first.y)) == ("head 0", [5, 6], [1, 2])
    assert (second.name, list(second.y), second.control) == ("head 1", [3, 4], True)
    estimates = xr.concat([values, values - 1, values + 1], "estimate")
    estimates = estimates.assign_coords(estimate=["value", "low", "high"])
    (_, last) = Series.each(estimates, "head")
    assert last.low is not None and last.high is not None
    assert (list(last.y), list(last.low), list(last.high)) == ([3, 4], [2, 3], [4, 5])


def test_heat_maps_share_one_scale_and_are_labelled_by_their_axes() -> None:
    axes: dict[str, Any] = {"pos": [0], "chain_length": ["a", "b"]}
    one, two = cells([[0, 1]], **axes), cells([[2, np.nan]], **axes)
    figure = parts(heatmap_panels({"one": one, "two": two}, value_title="v"))
    assert {t.coloraxis for t in figure.data} == {"coloraxis"}
    assert (figure.layout.coloraxis.cmin, figure.layout.coloraxis.cmax) == (0, 2)
    assert figure.layout.meta["loopinterp"]["panels"] == 2
    assert list(figure.data[0].x) == ["a", "b"] and list(figure.data[0].y) == [0]
    assert figure.layout.xaxis.title.text == figure.layout.xaxis2.title.text == "chain length"
    assert figure.layout.yaxis.title.text == "position" and figure.layout.yaxis2.title.text is None


def test_cells_of_categories_have_a_colour_and_a_name_each() -> None:
    one, two = cells([[0, 2]], pos=[0], loop=[0, 1]), cells([[1, np.nan]], pos=[0], loop=[0, 1])
    kinds = {"near": "blue", "far": "red", "none": "#123456"}
    figure = parts(category_maps({"one": one, "two": two}, kinds, marks={"here": (1, 0)}))
    maps = [t for t in figure.data if t.type == "heatmap"]
    assert [list(t.text[0]) for t in maps] == [["near", "none"], ["far", ""]]
    for trace in maps:  # the middle of each third of the scale is that category's number
        assert (trace.zmin, trace.zmax, trace.coloraxis) == (-0.5, 2.5, None)
        ends = [(at, colour) for at, colour in trace.colorscale]
        expected = [PALETTE["blue"]] * 2 + [PALETTE["red"]] * 2 + ["#123456"] * 2
        assert [colour for _, colour in ends] == expected
        np.testing.assert_allclose([at for at, _ in ends], [0, 1 / 3, 1 / 3, 2 / 3, 2 / 3, 1])
    legend = {t.name: t.marker.color for t in figure.data if t.name}
    assert legend == {"near": PALETTE["blue"], "far": PALETTE["red"], "none": "#123456"}
    marked = [t for t in figure.data if t.type == "scatter" and not t.name]
    assert [(t.xaxis, t.x[0], t.y[0], t.text[0]) for t in marked] == [
        ("x", 1, 0, "here"),
        ("x2", 1, 0, "here"),
    ]
    with pytest.raises(InputError, match=r"^panels:"):
        category_maps({"": one}, {"near": "blue", "far": "red"})


def test_names_of_points_on_one_height_do_not_stand_in_one_line() -> None:
    marks = {"middle": (0.0, 0.0), "high": (0.3, 1.0), "right": (0.5, 0.0)}
    figure = parts(
        heatmap_panels({"": cells([[0, 1]], pos=[0], loop=[0, 1])}, value_title="v", marks=marks)
    )
    (trace,) = [t for t in figure.data if t.type == "scatter"]
    side = dict(zip(trace.text, trace.textposition))
    assert {side["middle"], side["right"]} == {"top center", "bottom center"}


def test_rows_with_names_are_read_from_the_top() -> None:
    named = cells([[0], [1]], head=["a", "b"], loop=[0])
    numbered = named.assign_coords(head=[0, 1])
    down = [parts(heatmap_panels({"": v}, value_title="v")).layout.yaxis for v in (named, numbered)]
    assert [axis.autorange for axis in down] == ["reversed", None]


def test_the_slider_has_one_frame_for_each_loop() -> None:
    values = np.random.default_rng(0).random((3, 2, 4, 4))
    heads = {"loop": [0, 1, 2], "head": ["head 0", "head 1"]}
    patterns = xr.DataArray(values, heads, ["loop", "head", "query", "key"])
    figure = parts(loop_slider_figure(patterns, value_title="attention"))
    for t, frame in enumerate(figure.frames):
        for k, heat in enumerate(frame.data):
            np.testing.assert_allclose(heat.z, values[t, k], rtol=1e-6)
    assert [step.label for step in figure.layout.sliders[0].steps] == ["0", "1", "2"]
    assert [note.text for note in figure.layout.annotations] == ["<b>head 0</b>", "<b>head 1</b>"]
    with pytest.raises(InputError, match=r"^values:"):
        loop_slider_figure(patterns[0], value_title="attention")


def test_figures_hold_no_colour_of_text_or_page() -> None:
    figure = heatmap_panels({"": cells([[0]], pos=[0], loop=[0])}, value_title="v", scale="mass")
    layout = json.loads(str(figure.to_json()))["layout"]["template"]["layout"]
    assert "color" not in layout["font"]
    assert layout["paper_bgcolor"] == layout["plot_bgcolor"] == "rgba(0,0,0,0)"


def test_what_cannot_be_drawn_is_explained() -> None:
    with pytest.raises(InputError, match=r"^panels:"):
        line_panels([], x_title="x")
    with pytest.raises(InputError, match=r"^panels:"):
        heatmap_panels({}, value_title="v")
    with pytest.raises(InputError) as caught:
        Series.of("a", cells([[0]], pos=[0], loop=[0]))
    assert caught.value.what == "line 'a'" and "'pos': 1" in caught.value.given


def test_heat_maps_of_different_axes_are_refused() -> None:
    one = cells([[0]], pos=[0], loop=[0])
    with pytest.raises(InputError) as caught:
        heatmap_panels({"a": one, "b": one.T}, value_title="v")
    assert caught.value.what == "heat map 'b'"
    with pytest.raises(InputError, match=r"^scale:.*diverging"):
        heatmap_panels({"": one}, value_title="v", scale="divergin")  # type: ignore[arg-type]


def test_a_ramp_starts_blue_and_ends_ochre() -> None:
    assert ramp(1) == [PALETTE["blue"]]
    assert ramp(5)[0] == PALETTE["blue"] and ramp(5)[-1] == PALETTE["ochre"]


def test_colours_of_heads_differ_and_are_never_a_controls() -> None:
    for n_layers, n_heads in ((1, 5), (3, 4)):
        values = xr.DataArray(np.zeros((n_layers, n_heads, 7)), dims=("layer", "head", "loop"))
        lines = head_lines(values)
        colours = [line.colour for line in lines]
        assert len(set(colours)) == n_layers * n_heads and PALETTE["grey"] not in colours
    assert [line.name for line in lines[:2]] == ["head 0.0", "head 0.1"]


def test_a_head_has_one_colour_in_all_figures(generator: torch.Generator) -> None:
    config = LoopedTransformerConfig(d_model=9, n_heads=3, n_layers=2, d_vocab=6, d_vocab_out=2)
    model = LoopedTransformer(config, seed=0)
    batch = Addition().sample(5, batch_size=4, generator=generator)
    seen: dict[str, set[str]] = {}
    for result in (
        attention_study(model, batch.inputs, n_loops=4),
        attention_stabilisation_study(model, batch, n_loops=4),
    ):
        for figure in result.figures():
            for line in figure.plot.select_traces({"type": "scatter"}):
                if line.name.startswith("head ") and line.line.color:
                    seen.setdefault(line.name, set()).add(line.line.color)
    assert len(seen) == 6 and all(len(colours) == 1 for colours in seen.values())


TITLES = ("a", "b", "c")


def test_lines_and_points_in_space() -> None:
    paths = np.arange(12.0).reshape(2, 2, 3)
    x, y, z = joined(paths).T
    lines = [
        Series("path", x, y, colour="blue", markers=False),
        Series("wrong", x, y, markers=False, control=True),
        Series("limit", [1.0], [2.0], markers=True),
    ]
    heights = {"path": z, "wrong": z, "limit": np.array([3.0])}
    figure: Any = space_figure(lines, heights, titles=TITLES)
    path, wrong, limit = figure.data
    assert path.mode == "lines" and path.line.color == PALETTE["blue"]
    np.testing.assert_array_equal(path.z, [2, 5, np.nan, 8, 11, np.nan])
    assert wrong.line.dash == "dash" and path.line.dash is None
    assert limit.mode == "markers" and limit.z.tolist() == [3.0]
    assert figure.layout.scene.zaxis.title.text == "c"


def test_a_line_without_its_heights_is_refused() -> None:
    line = Series("path", [1.0, 2.0], [1.0, 2.0])
    for heights in ({}, {"path": np.zeros(3)}):
        with pytest.raises(InputError, match=r"^heights.*'path'"):
            space_figure([line], heights, titles=TITLES)


def test_few_whole_numbers_have_a_tick_each_unless_the_axis_is_longer() -> None:
    series = [Series("loops", [0, 1, 2], [1, 2, 3])]
    short = parts(line_figure(series, x_title="x", y_title="y")).layout
    assert short.xaxis.dtick == short.yaxis.dtick == 1
    long = parts(line_figure(series, x_title="x", y_title="y", y_range=(0, 500))).layout
    assert long.yaxis.dtick is None


def test_differences_of_rounding_do_not_fill_the_axis() -> None:
    rounding = [Series("norm", [0, 1, 2], [1.73205, 1.7320501, 1.73205])]
    small = [Series("norm", [0, 1, 2], [1.73, 1.74, 1.75])]
    even = [Series("norm", [0, 1, 2], [2.0, 2.0, 2.0])]
    panels = [LinePanel(lines, "norm") for lines in (rounding, small, even)]
    layout = parts(line_panels(panels, x_title="loop")).layout
    low, high = layout.yaxis.range
    assert low < 1.72 and high > 1.74
    assert layout.yaxis2.range is None and layout.yaxis3.range is None


def test_a_logarithmic_axis_of_less_than_two_decades_has_more_than_one_tick() -> None:
    series = [Series("directions", [0, 1, 2], [2.9, 6.2, 63.3])]
    axis = parts(line_figure(series, x_title="x", y_title="y", y_log=True)).layout.yaxis
    assert list(axis.tickvals) == [5, 10, 20, 50] and axis.dtick is None
    wide = [Series("residual", [0, 1, 2], [1, 1e-3, 1e-6])]
    axis = parts(line_figure(wide, x_title="x", y_title="y", y_log=True)).layout.yaxis
    assert axis.tickvals is None and axis.dtick == 1
