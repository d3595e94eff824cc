import math

import numpy as np
import plotly.graph_objects as go
import pytest
from scipy import stats

from fedstrata.lab.report import Claim, Column, PlotSpec, Reference, ReportError, RunRecord, plot_history
from fedstrata.lab.report.curves import POINTS, build_plot
from fedstrata.lab.report.interactive import figure
from fedstrata.lab.report.plots import PALETTE, draw, to_png, to_svg


def of(runs, label, H):
    return [run for run in runs if run.label == label and run.setting["H"] == H]


SPECS = {
    "lines": PlotSpec("loss", panels="H", log_y=True, references=(Reference(0.5, "here", panel=5),)),
    "lines by time": PlotSpec("accuracy", x="seconds", lines=("label", "H")),
    "lines by bytes": PlotSpec(
        "loss", x="bytes_up", panels="H", log_x=True, references=(Reference(1e5, "x", "x"),)
    ),
    "bars": PlotSpec("loss", x="H", kind="bar", references=(Reference(0.5, "paper"),)),
    "bars of labels": PlotSpec("loss", x="label", kind="bar", panels="H", log_y=True),
    "heat-map": PlotSpec("loss", x="H", down="label", kind="heatmap", log_y=True),
}


def test_the_band_is_scipys_t_interval(runs):
    plot = build_plot(runs, PlotSpec("loss", panels="H"))
    assert [panel.title for panel in plot.panels] == ["H = 1", "H = 5"]
    for panel, h in zip(plot.panels, (1, 5), strict=True):
        assert [curve.name for curve in panel.curves] == ["FedAvg", "FedMSA"]
        for curve in panel.curves:
            values = np.array([run.history["loss"] for run in of(runs, curve.name, h)])
            low, high = stats.t.interval(0.95, 3, values.mean(axis=0), stats.sem(values, axis=0))
            np.testing.assert_array_equal(curve.x, np.arange(0, 21, 2))
            np.testing.assert_allclose(curve.y.mean, values.mean(axis=0), rtol=1e-14)
            np.testing.assert_allclose(curve.y.low, low, rtol=1e-10)
            np.testing.assert_allclose(curve.y.high, high, rtol=1e-10)
    assert "means over 4 seeds, bands Student's t-intervals of 95% for the mean" in plot.caption


def test_both_forms_draw_the_band(runs):
    plot = build_plot(of(runs, "FedAvg", 5), PlotSpec("loss"))
    curve = plot.panels[0].curves[0]
    outline = draw(plot).axes[0].collections[0].get_paths()[0].vertices
    assert {(x, y) for x, y in zip(curve.x, curve.y.low, strict=True)} <= {tuple(point) for point in outline}
    assert {(x, y) for x, y in zip(curve.x, curve.y.high, strict=True)} <= {tuple(point) for point in outline}
    band, mean = figure(plot)["data"]
    np.testing.assert_allclose(mean["y"], curve.y.mean, rtol=1e-5)
    np.testing.assert_allclose(band["y"], [*curve.y.high, *curve.y.low[::-1]], rtol=1e-5)
    assert band["fill"] == "toself"


def test_several_series_become_bars_side_by_side():
    runs = [
        RunRecord(label, {}, seed, {"round": [0, 1], "a": [0, 1 + seed], "b": [0, 5]}, {}, 0.0, "M")
        for label in ("u", "v")
        for seed in (0, 1)
    ]
    plot = build_plot(runs, PlotSpec("value", kind="bar", x="series", series=("a", "b", "c")))
    (panel,) = plot.panels
    assert [curve.name for curve in panel.curves] == ["u", "v"]
    assert panel.curves[0].x == ["a", "b"]
    np.testing.assert_allclose(panel.curves[0].y.mean, [1.5, 5])
    with pytest.raises(ReportError, match="no run has"):
        build_plot(runs, PlotSpec("value", kind="bar", x="series", series=("c",)))


def test_bars_and_cells_are_means_of_final_values(runs):
    bars = build_plot(runs, SPECS["bars"]).panels[0].curves
    grid = build_plot(runs, SPECS["heat-map"]).panels[0].grid
    assert (grid.rows, grid.columns) == (["FedAvg", "FedMSA"], ["1", "5"])
    for i, label in enumerate(grid.rows):
        assert bars[i].x == ["1", "5"]
        for j, h in enumerate((1, 5)):
            values = np.array([run.history["loss"][-1] for run in of(runs, label, h)])
            _, high = stats.t.interval(0.95, 3, values.mean(), stats.sem(values))
            assert math.isclose(grid.means[i, j], values.mean(), rel_tol=1e-14)
            assert math.isclose(bars[i].y.mean[j], values.mean(), rel_tol=1e-14)
            assert math.isclose(bars[i].y.high[j], high, rel_tol=1e-10)


def test_along_another_axis_points_are_averaged_round_by_round(runs):
    members = of(runs, "FedMSA", 1)
    curve = build_plot(members, PlotSpec("loss", x="seconds")).panels[0].curves[0]
    np.testing.assert_allclose(curve.x, np.mean([run.history["seconds"] for run in members], axis=0))


def test_seeds_that_recorded_different_rounds_meet_where_they_can():
    def run(seed, rounds):
        history = {"round": rounds, "loss": np.array(rounds) + 10.0 * seed}
        return RunRecord("A", {}, seed, history, {}, 0.0, "A")

    curve = build_plot([run(0, [0, 1, 2, 4]), run(1, [0, 2, 3, 4])], PlotSpec("loss")).panels[0].curves[0]
    np.testing.assert_array_equal(curve.x, [0, 2, 4])
    np.testing.assert_array_equal(curve.y.mean, [5, 7, 9])
    with pytest.raises(ReportError, match="share no recorded round"):
        build_plot([run(0, [0, 1]), run(1, [2, 3])], PlotSpec("loss"))


def test_on_a_logarithmic_axis_the_band_is_that_of_the_logarithms(runs):
    plot = build_plot(runs, PlotSpec("loss", panels="H", log_y=True))
    for panel, h in zip(plot.panels, (1, 5), strict=True):
        for curve in panel.curves:
            logs = np.log([run.history["loss"] for run in of(runs, curve.name, h)])
            low, high = stats.t.interval(0.95, 3, logs.mean(axis=0), stats.sem(logs, axis=0))
            np.testing.assert_allclose(curve.y.mean, stats.gmean(np.exp(logs), axis=0), rtol=1e-12)
            np.testing.assert_allclose([curve.y.low, curve.y.high], np.exp([low, high]), rtol=1e-10)
            assert min(curve.y.low) > 0
    assert "geometric means over 4 seeds" in plot.caption
    assert "for the mean of the logarithms" in plot.caption


def test_what_a_logarithmic_axis_cannot_show_is_left_out_and_said():
    def run(seed, loss):
        return RunRecord("A", {}, seed, {"round": [0, 1], "loss": loss}, {}, 0.0, "A")

    plot = build_plot([run(0, [1.0, 0.0]), run(1, [4.0, 3.0])], PlotSpec("loss", log_y=True))
    np.testing.assert_allclose(plot.panels[0].curves[0].y.mean, [2.0, np.nan])
    assert "not above zero are left out" in plot.caption
    assert [trace["y"] for trace in figure(plot)["data"]] == [[1.0, None], [4.0, 3.0], [2.0, None]]
    assert to_png(draw(plot))


def test_two_or_three_runs_are_shown_in_place_of_a_band(make_runs):
    members = make_runs(seeds=3, labels=("A",), H=(1,))
    plot = build_plot(members, PlotSpec("loss"))
    *thin, mean = figure(plot)["data"]
    for trace, run in zip(thin, members, strict=True):
        np.testing.assert_allclose(trace["y"], run.history["loss"], rtol=1e-5)
    np.testing.assert_allclose(mean["y"], np.mean([run.history["loss"] for run in members], 0), rtol=1e-5)
    assert len(draw(plot).axes[0].lines) == 4
    assert not draw(plot).axes[0].collections
    assert "thin lines the single runs" in plot.caption
    (bar,) = build_plot(members, PlotSpec("loss", kind="bar", x="label")).panels[0].curves
    last = [run.history["loss"][-1] for run in members]
    assert (bar.y.low[0], bar.y.high[0]) == (min(last), max(last))


def test_a_line_has_its_points_along_every_axis_that_all_runs_have(runs):
    plot = build_plot(runs, PlotSpec("loss", panels="H"))
    assert plot.along == ("round", "bytes_up", "seconds")  # these runs count no exchanges or oracle calls
    curve = plot.panels[0].curves[0]
    expected = np.mean([run.history["seconds"] for run in of(runs, "FedAvg", 1)], axis=0)
    np.testing.assert_allclose(curve.along["seconds"], expected)
    assert build_plot(runs, PlotSpec("loss", x="accuracy", panels="H")).along == ()
    assert build_plot(runs, SPECS["bars"]).along == ()


def test_what_all_lines_share_is_said_once(make_runs):
    runs = make_runs(labels=("A", "B"), H=(5,))
    plot = build_plot(runs, PlotSpec("loss", lines=("label", "H")))
    assert [curve.name for curve in plot.panels[0].curves] == ["A", "B"]
    assert plot.caption.startswith("All with H = 5.")


def test_svg_files_follow_the_theme(runs):
    svg = to_svg(draw(build_plot(runs, SPECS["lines"]))).decode()
    assert "@media (prefers-color-scheme: dark)" in svg
    assert '[style*="stroke: #0072b2"]{stroke:#4aa8e0 !important}' in svg
    assert "stroke: #0072b2" in svg.split("</style>", 1)[1]
    assert "fill: #ffffff" not in svg.split("</style>", 1)[1]  # no paper of its own


def test_long_histories_are_thinned_and_say_so():
    rounds = np.arange(5000)
    run = RunRecord("A", {}, 0, {"round": rounds, "loss": 1.0 * rounds}, {}, 0.0, "A")
    plot = build_plot([run], PlotSpec("loss"))
    x = plot.panels[0].curves[0].x
    assert (len(x), x[0], x[-1]) == (POINTS, 0, 4999)
    assert f"{POINTS} rounds are drawn" in plot.caption
    assert "without confidence intervals" in plot.caption


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_plotly_accepts_the_figures(runs, spec):
    made = figure(build_plot(runs, spec))
    assert len(go.Figure(made).data) == len(made["data"]) > 0


@pytest.mark.slow
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_the_same_plot_is_the_same_file(runs, spec):
    once, again = (draw(build_plot(runs, spec)) for _ in range(2))
    assert to_svg(once) == to_svg(again)
    assert to_png(once) == to_png(again)
    assert to_png(once).startswith(b"\x89PNG")
    assert to_svg(once).startswith(b"<?xml")


def test_every_line_has_its_own_look(make_runs):
    labels = tuple(f"method {k}" for k in range(2 * len(PALETTE)))
    plot = build_plot(make_runs(seeds=1, labels=labels, H=(1,)), PlotSpec("loss"))
    lines = [line for line in draw(plot).axes[0].lines if len(line.get_xdata())]
    assert len({(line.get_color(), line.get_linestyle()) for line in lines}) == len(labels)
    traces = figure(plot)["data"]
    assert len({(trace["line"]["color"], trace["line"]["dash"]) for trace in traces}) == len(labels)


def test_more_lines_than_colours_have_a_colour_for_each_method(make_runs):
    runs = make_runs(seeds=1, labels=("A", "B", "C"), H=(1, 5, 10))
    curves = build_plot(runs, PlotSpec("loss", lines=("label", "H"))).panels[0].curves
    looks = {curve.name: divmod(curve.colour, len(PALETTE)) for curve in curves}
    assert len(set(looks.values())) == 9
    for k, label in enumerate("ABC"):
        assert [looks[f"{label}, H = {H}"] for H in (1, 5, 10)] == [(0, k), (1, k), (2, k)]


def test_a_method_has_the_same_colour_in_every_plot(make_runs):
    runs = make_runs(labels=("A", "B", "C"), H=(1,))
    for run in runs[:4]:
        del run.history["accuracy"]
    for metric, names in (("loss", ["A", "B", "C"]), ("accuracy", ["B", "C"])):
        curves = build_plot(runs, PlotSpec(metric)).panels[0].curves
        assert [(curve.name, curve.colour) for curve in curves] == [(n, "ABC".index(n)) for n in names]


def test_a_logarithmic_axis_begins_at_the_first_positive_point(runs):
    curve = build_plot(runs, PlotSpec("loss", lines=("label", "H"), log_x=True)).panels[0].curves[0]
    members = [run.history["loss"] for run in runs[:4]]
    np.testing.assert_array_equal(curve.x, np.arange(2, 21, 2))
    np.testing.assert_allclose(curve.y.mean, np.mean(members, axis=0)[1:])


def test_names_are_not_mathematics_or_markup():
    label = r"$\bad{$ <b>%{y}</b>"
    run = RunRecord(label, {"$a$": "$b"}, 0, {"round": [0, 1], "loss": [1.0, 2.0]}, {}, 0.0, "A")
    plot = build_plot([run], PlotSpec("loss", panels="$a$", title="$x"))
    assert to_svg(draw(plot))
    trace = figure(plot)["data"][0]
    assert trace["name"] == r"$\bad{$ &lt;b&gt;%{y}&lt;/b&gt;"
    assert label not in trace["hovertemplate"]


def test_runs_that_diverged_leave_gaps():
    def run(seed):
        history = {"round": [0, 1, 2], "loss": [1.0, np.inf, np.nan]}
        return RunRecord("A", {}, seed, history, {}, 0.0, "A")

    runs = [run(0), run(1)]
    for spec in (PlotSpec("loss"), PlotSpec("loss", x="label", kind="bar"), PlotSpec("loss", log_y=True)):
        plot = build_plot(runs, spec)
        assert to_png(draw(plot))
        assert go.Figure(figure(plot))
    assert figure(build_plot(runs, PlotSpec("loss")))["data"][1]["y"] == [1.0, None, None]


def test_what_names_nothing_is_refused(runs):
    with pytest.raises(
        ReportError, match=r"no run has 'regret' beside 'round'; the histories have \['round'"
    ):
        build_plot(runs, PlotSpec("regret"))
    with pytest.raises(ReportError, match="no run has a 'K'"):
        build_plot(runs, PlotSpec("loss", panels="K"))
    with pytest.raises(ReportError, match="no run has a 'K'"):
        build_plot(runs, PlotSpec("loss", kind="heatmap", x="H", down="K"))
    with pytest.raises(ReportError, match="differ in 'H'"):
        build_plot(runs, PlotSpec("loss"))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kind": "heatmap"}, "down="),
        ({"kind": "heatmap", "down": "H", "references": (Reference(1, ""),)}, "no reference lines"),
        ({"kind": "bar", "reduce": "best"}, "needs better"),
        ({"kind": "pie"}, "heatmap"),
        ({"name": "../escape"}, "not a valid name for a plot's file"),
        ({"colour": "red"}, "colour"),
    ],
)
def test_bad_plots_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        PlotSpec("loss", **fields)


def test_specs_keep_a_values_type():
    assert [type(v) for v in Claim({"a": 1, "b": 1.0, "c": "1", "d": True}, "x", 0).where.values()] == [
        int,
        float,
        str,
        bool,
    ]
    assert Column("loss").heading == "loss"


def test_a_historys_plot_has_a_panel_per_metric(tmp_path):
    history = {
        "round": np.arange(5),
        "seconds": np.arange(5.0),
        "upper": np.arange(1.0, 6),
        "lower": np.ones(5),
    }
    made = plot_history(history, log_y=["upper"], title="FedMSA")
    assert [ax.get_title(loc="left") for ax in made.axes] == ["upper", "lower"]
    assert [ax.get_yscale() for ax in made.axes] == ["log", "linear"]
    np.testing.assert_array_equal(made.axes[0].lines[0].get_ydata(), history["upper"])
    made.savefig(tmp_path / "history.png")
    by_time = plot_history(history, ["lower"], x="seconds", log_x=True, log_y=True)
    np.testing.assert_array_equal(by_time.axes[0].lines[0].get_xdata(), history["seconds"])
    with pytest.raises(ReportError, match=r"no \['middle'\]; it has"):
        plot_history(history, ["middle"])
    with pytest.raises(ReportError, match="has no metrics"):
        plot_history({"round": [0]})
