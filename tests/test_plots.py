"""Pictures show what they are given: curves, bands, labels, colours; and matplotlib is asked for by name."""

import math
import sys
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import pytest
from tiny import fails

import hypergrad as hg
from hypergrad import plots
from hypergrad.errors import Status


STATUS = Status(*(np.int32(0),) * 7, ("params",), (1.0,))


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    yield
    plt.close("all")


def result(values: Any, errors: Any = 0.0, monitor: Any = math.nan) -> hg.Result:
    rows = np.broadcast_arrays(values, errors, monitor)
    history = [
        hg.MetaStep(i, float(v), 1.0, 0.1, None, 0.0, None, value_error=float(e), monitor=float(m))
        for i, (v, e, m) in enumerate(zip(*rows, strict=True))
    ]
    return hg.Result(None, history[-1], history)


def legend(ax: Any) -> list[str]:
    return [] if ax.get_legend() is None else [text.get_text() for text in ax.get_legend().get_texts()]


def drawn(ax: Any) -> None:
    """Draw it: labels that overlap nothing are not checked, but errors of rendering are."""
    ax.figure.canvas.draw()


def test_learning_draws_values_bands_and_the_monitor() -> None:
    ax = plots.learning(result([3.0, 2.0, 1.0], 0.25, [3.5, 2.5, 2.0]))
    np.testing.assert_array_equal(ax.lines[0].get_ydata(), [3, 2, 1])
    np.testing.assert_array_equal(ax.lines[1].get_ydata(), [3.5, 2.5, 2])
    corners = ax.collections[0].get_paths()[0].vertices
    assert corners[:, 1].min() == 0.75 and corners[:, 1].max() == 3.25
    assert legend(ax) == ["validation", "monitor"] and ax.get_xlabel() == "meta-step" and ax.get_ylabel()
    drawn(ax)


def test_learning_compares_runs() -> None:
    runs = {"adam": result([2.0, 1.0]), "sign": result([3.0, 1.0])}
    ax = plots.learning(runs)
    assert legend(ax) == ["adam", "sign"] and not ax.collections
    assert ax.lines[0].get_color() != ax.lines[1].get_color()
    assert legend(plots.learning(list(runs.values()))) == ["run 1", "run 2"]
    assert legend(plots.learning(runs["adam"])) == []


def test_a_label_that_was_given_is_drawn() -> None:
    assert plots.learning({"adam": result([1.0, 0.5])}).lines[0].get_label() == "adam"
    assert plots.learning(result([1.0, 0.5])).lines[0].get_label() == "validation"


def test_schedules_with_one_label_are_drawn_all() -> None:
    one, two = hg.PerStep(jnp.arange(4.0)), hg.PerStep(jnp.arange(4.0) + 1)
    assert len(plots.schedules({"l2_w": one, "l2 w": two}).lines) == 2


def test_schedules_are_drawn_in_natural_units_and_named_by_their_path() -> None:
    rates = {f"layer_{i}": hg.PerStep(jnp.full(5, 0.1 * i)) for i in (1, 2)}
    hypers = {"learning_rate": hg.positive(rates), "momentum": hg.unit_interval(hg.PerStep(jnp.full(5, 0.9))), "scale": 1.0}
    ax = plots.schedules(hypers)
    assert legend(ax) == ["learning rate, layer 1", "learning rate, layer 2", "momentum"]
    np.testing.assert_allclose([line.get_ydata()[0] for line in ax.lines], [0.1, 0.2, 0.9], rtol=1e-5)
    ax = plots.schedules(hypers["momentum"], start=hypers["momentum"])
    assert legend(ax) == ["start", "learned"]
    drawn(ax)


def test_a_schedule_per_weight_is_a_median_and_a_band() -> None:
    values = np.linspace(0, 1, 11) * np.ones((4, 1))
    ax = plots.schedules(hg.PerStep({"w": values}))
    np.testing.assert_allclose(ax.lines[0].get_ydata(), 0.5)
    corners = ax.collections[0].get_paths()[0].vertices
    np.testing.assert_allclose([corners[:, 1].min(), corners[:, 1].max()], [0.1, 0.9])


def test_images_stand_side_by_side_and_zero_is_white() -> None:
    values = np.arange(6 * 4 * 3.0).reshape(6, 12)
    (shown,) = plots.images(values, (4, 3), columns=3).images
    sheet = np.asarray(shown.get_array())
    assert sheet.shape == (9, 11)
    np.testing.assert_array_equal(sheet[5:9, 4:7], values[4].reshape(4, 3))
    assert shown.get_cmap().name == "viridis"
    ax = plots.images(values.reshape(6, 4, 3) - 10, label="penalty")
    (shown,) = ax.images
    assert shown.get_cmap().name == "RdBu_r" and shown.norm.vmin == -shown.norm.vmax
    assert ax.figure.axes[1].get_ylabel() == "penalty"
    drawn(ax)
    with fails(ValueError, "shape=(rows, columns)"):
        plots.images(values, (5, 5))


def diagnosis(**fields: Any) -> hg.Diagnosis:
    norms = {"velocity": np.array([9.0, 3.0, 1.0, 0.0]), "params": np.array([8.0, 4.0, 2.0, 1.0])}
    base = hg.Diagnosis("healthy", None, None, 8.0, 2.0, 1.0, 1.0, norms, np.zeros(3), STATUS, 1)
    return base._replace(**fields)


def test_cotangents_are_drawn_on_a_log_axis_with_the_onset() -> None:
    ax = plots.cotangents(diagnosis(verdict="exploding", onset=1, until=3))
    assert ax.get_yscale() == "log" and legend(ax) == ["params", "velocity", "onset: step 1"]
    np.testing.assert_array_equal(ax.lines[0].get_ydata(), [8, 4, 2, 1])
    assert np.isnan(ax.lines[1].get_ydata()[-1])  # zero has no logarithm
    drawn(ax)
    assert legend(plots.cotangents(diagnosis())) == ["params", "velocity"]
    assert legend(plots.cotangents(diagnosis(verdict="vanishing", onset=1)))[-1] == "no influence before: step 1"
    broken = plots.cotangents(diagnosis(verdict="not finite", onset=2))
    assert legend(broken)[-1] == "NaN or infinite, from here back: step 2"


def test_the_buffer_grows_as_theory_says() -> None:
    ax = plots.buffer([0.5, 0.9], 640)
    memory, theory = ax.lines[0].get_ydata(), ax.lines[1].get_ydata()
    np.testing.assert_allclose(theory, np.arange(1, 641))
    assert np.all(memory <= theory) and np.all(theory - memory <= 16)  # the rest waits in the integers
    assert legend(ax) == ["decay 0.5", "decay 0.9", "sum of log2(1/decay)"]
    learned = hg.unit_interval(hg.PerStep(jnp.linspace(0.5, 0.9, 64)))
    ax = plots.buffer({"learned momentum": learned})
    np.testing.assert_allclose(ax.lines[1].get_ydata()[-1], -np.log2(np.linspace(0.5, 0.9, 64)).sum(), rtol=1e-4)
    drawn(ax)
    with fails(ValueError, "`steps` is missing"):
        plots.buffer(0.9)


def test_a_given_axes_is_drawn_into() -> None:
    _, ax = plt.subplots()
    assert plots.learning(result([1.0]), ax) is ax and plots.cotangents(diagnosis(), ax) is ax


def test_a_history_is_no_result() -> None:
    with fails(TypeError, "what hg.optimize returns", "got int 1"):
        plots.learning([1, 2])


def test_without_a_schedule_there_is_nothing_to_draw() -> None:
    with fails(ValueError, "no hg.PerStep"):
        plots.schedules({"learning_rate": hg.positive(0.1)})


def test_missing_matplotlib_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    with fails(ImportError, "pip install matplotlib"):
        plots.learning(result([1.0]))


@pytest.mark.parametrize(
    ("draw", "words"),
    [
        (lambda: plots.images(np.ones((4, 6)), (3, 4)), "are no images of shape (3, 4)"),  # each would begin within another
        (lambda: plots.images(np.ones((0, 6)), (2, 3)), "have no entry"),
        (lambda: plots.images(np.ones((2, 6)), (2, 3), columns=0), "`columns` must be at least 1"),
        (lambda: plots.buffer(1.5, 5), "got 1.5"),
        (lambda: plots.buffer([0.9, 0.0], 5), "got 0."),
        (lambda: plots.buffer(1.0, 5), "between 0 and 1, rounded to multiples of 2^-16"),
        (lambda: plots.buffer(0.999999, 5), "got 0.999999."),
        (lambda: plots.images(np.zeros((5, 4, 4, 3))), "one channel at a time, values[..., 0]"),
        (lambda: plots.buffer(0.9, 0), "`steps` must be at least 1"),
    ],
)
def test_what_is_no_picture(draw: Any, words: str) -> None:
    with fails(ValueError, words):
        draw()


@pytest.mark.parametrize(
    ("draw", "words"),
    [
        (lambda: plots.images({"a": 1}), "takes one array, such as result.hypers['images']; got dict"),
        (lambda: plots.buffer(hg.SGD(0.1)), "takes decays, such as 0.9"),
        (lambda: plots.buffer(result([1.0])), "takes decays, such as 0.9"),
        (lambda: plots.schedules(result([1.0])), "takes hyperparameters, such as result.hypers"),
        (lambda: plots.cotangents(result([1.0])), "takes what hg.diagnose returns; got Result"),
    ],
)
def test_what_another_picture_is_of(draw: Any, words: str) -> None:
    with fails(TypeError, words):
        draw()


def test_images_in_a_domain_are_drawn_in_natural_units() -> None:
    (shown,) = plots.images(hg.positive(jnp.full((1, 2, 2), 3.0))).images
    np.testing.assert_allclose(shown.get_array(), 3.0, rtol=1e-6)
