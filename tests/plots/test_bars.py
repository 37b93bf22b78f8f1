import pytest
from matplotlib.colors import to_hex
from parts import bars_of

from workbook import plots


class TestBars:
    def test_bars_are_medians_with_whiskers_over_all_repeats(self):
        groups = {"ring": {"measured": [0.001, 0.009, 0.002], "model": 0.0015}}
        figure = plots.bars(groups, quantity="time of a step", unit="s")
        axes = figure.figure.axes[0]
        heights = {name: bar.get_height() for name, (bar,) in bars_of(axes).items()}
        assert heights == {"measured": pytest.approx(2), "model": pytest.approx(1.5)}
        assert axes.get_ylabel() == "time of a step (ms)"
        (whisker,) = [c for c in axes.collections if hasattr(c, "get_segments")]
        assert whisker.get_segments()[0][:, 1] == pytest.approx([1, 9])
        assert "1.33 times the model" in figure.caption
        assert "medians of 3 repeats" in figure.caption

    def test_models_are_hatched_and_pale_in_the_color_of_what_they_predict(self):
        groups = {"1 MiB": {"ours": 2, "gloo": 4, "ours model": 1}}
        figure = plots.bars(groups, quantity="time", unit="s")
        looks = {name: bar for name, (bar,) in bars_of(figure.figure.axes[0]).items()}
        model = plots.Style(to_hex(looks["ours"].get_facecolor())).model
        assert looks["ours model"].get_hatch() == model.hatch
        assert to_hex(looks["ours model"].get_facecolor()) == model.color
        assert looks["ours"].get_facecolor() != looks["gloo"].get_facecolor()
        assert "2 times the model" in figure.caption

    @pytest.mark.parametrize(
        ("value", "unit", "label"),
        [
            (3 * 2**20, "bytes", "sent (MiB)"),
            (4e-5, "s", "sent (µs)"),
            (12, "messages", "sent (messages)"),
        ],
    )
    def test_unit_fits_the_largest(self, value, unit, label):
        figure = plots.bars({"ring": {"measured": value}}, quantity="sent", unit=unit)
        assert figure.figure.axes[0].get_ylabel() == label

    def test_equal_to_the_model_is_said_so(self):
        groups = {"ring": {"measured": 2048, "model": 2048}}
        figure = plots.bars(groups, quantity="bytes sent", unit="bytes")
        assert "equal to the model" in figure.caption
        assert "ring: measured 2 KiB, model 2 KiB" in figure.alt

    def test_series_may_be_absent_from_a_group(self):
        groups = {"a": {"measured": 1}, "b": {"measured": 2, "model": 3}}
        (bar,) = bars_of(plots.bars(groups, quantity="time", unit="s").figure.axes[0])["model"]
        assert bar.get_height() == 3

    def test_log_axis(self):
        groups = {"a": {"measured": 0.001}, "b": {"measured": 10}}
        figure = plots.bars(groups, quantity="time", unit="s", log=True)
        assert figure.figure.axes[0].get_yscale() == "log"
        assert figure.png()

    def test_wrong_inputs_are_refused(self):
        with pytest.raises(ValueError, match="no bars"):
            plots.bars({}, quantity="time", unit="s")
        with pytest.raises(ValueError, match="which excludes measured of a: draw with log=False"):
            plots.bars({"a": {"measured": 0}}, quantity="time", unit="s", log=True)
        with pytest.raises(ValueError, match="a number"):
            plots.bars({"a": {"measured": "3 ms"}}, quantity="time", unit="s")
