"""Hypergradients of every kind, by five roads: reversal, two adjoints, a scan written here, and central differences."""

import functools
import itertools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from covering import some_of
from jax import monitoring
from problems import network

import hypergrad as hg
from hypergrad._isolation import isolated
from hypergrad.adjoints import cotangents, link


STEPS = 16
NET = network("tanh")
SHAPES = {k: w.shape for k, w in NET.weights.items()}
FORMS = ("scalar", "per step", "per group", "per weight", "per step and weight")
EXTREMES = (FORMS[0], FORMS[-1])
KINDS = ("params", "state", "theta", "learning_rate", "momentum")
ROADS = {"reversible": hg.Reversible(), "unrolled": hg.Unrolled(), "checkpointed": hg.Checkpointed(5)}


def formed(form: str, low: float, high: float, dtype: Any) -> Any:
    """A hyperparameter in one of `FORMS`, drawn from [low, high]."""
    rng = np.random.default_rng(FORMS.index(form))
    draw = lambda *shape: jnp.asarray(rng.uniform(low, high, shape), dtype)  # noqa: E731
    match form:
        case "scalar":
            return draw()
        case "per step":
            return hg.PerStep(draw(STEPS))
        case "per group":
            return {k: draw() for k in SHAPES}
        case "per weight":
            return {k: draw(*s) for k, s in SHAPES.items()}
        case _:
            return {k: hg.PerStep(draw(STEPS, *s)) for k, s in SHAPES.items()}


def hypers_of(form: str, dtype: Any) -> dict[str, Any]:
    rng = np.random.default_rng(2)
    return {
        "params": NET.params(dtype),
        "state": {k: jnp.asarray(0.1 * rng.normal(size=s), dtype) for k, s in SHAPES.items()},
        "theta": {k: jnp.asarray(rng.uniform(0.01, 0.1, s), dtype) for k, s in SHAPES.items()},
        "learning_rate": formed(form, 0.1, 0.5, dtype),
        "momentum": formed(form, 0.5, 0.95, dtype),
    }


def probe(params: Any, losses: jax.Array, velocity: Any) -> jax.Array:
    """A scalar of all that training returns: so there are cotangents of parameters, learning curve and final state."""
    curve = jnp.sum(losses * jnp.cos(jnp.arange(STEPS)).astype(losses.dtype))
    return NET.value(params) + 0.1 * curve + sum(jnp.sum(jnp.sin(3 * v)) for v in jax.tree.leaves(velocity))


def objective(adjoint: Any, hypers: dict[str, Any]) -> tuple[jax.Array, Any]:
    sgd = hg.SGD(hypers["learning_rate"], hypers["momentum"])
    state = {"velocity": hypers["state"]}
    options = {"theta": hypers["theta"], "state": state, "adjoint": adjoint}
    trained = hg.train(NET.loss, hypers["params"], sgd, NET.batches(STEPS), **options)
    outputs = trained.params, trained.losses, trained.state["velocity"]
    return probe(*outputs), outputs


def evaluate(form: str, road: str, dtype: str) -> Any:
    """((value, outputs), gradients), compiled; NumPy arrays. Bits are compared of what was compiled alike."""
    return evaluated(form, road, dtype, jax.config.read("jax_disable_most_optimizations"))


@functools.cache
def evaluated(form: str, road: str, dtype: str, quick: bool) -> Any:
    del quick
    function = jax.value_and_grad(functools.partial(objective, ROADS[road]), has_aux=True)
    with jax.enable_x64(dtype == "float64"):
        return jax.tree.map(np.asarray, jax.jit(function)(hypers_of(form, dtype)))


def dense(x: Any) -> dict[str, jax.Array]:
    """A hyperparameter of any form as {leaf: [steps, *shape]}."""
    x = x if isinstance(x, dict) else dict.fromkeys(SHAPES, x)
    result = {}
    for k, shape in SHAPES.items():
        v = x[k].values if isinstance(x[k], hg.PerStep) else x[k][None]
        v = v.reshape(len(v), *(v.shape[1:] or (1,) * len(shape)))
        result[k] = jnp.broadcast_to(v, (STEPS, *shape))
    return result


@jax.jit
def plain(params: Any, velocity: Any, theta: Any, learning_rate: Any, momentum: Any) -> Any:
    """SGD with momentum in floats: Algorithm 5 with the momentum on the grid of 2^-16, and nothing of the library."""
    on_grid = lambda m: m + jax.lax.stop_gradient(jnp.round(m * 2**16) / 2**16 - m)  # noqa: E731

    def step(carry: Any, x: Any) -> tuple[Any, jax.Array]:
        (w, v), (a, m, batch) = carry, x
        loss, g = jax.value_and_grad(NET.loss)(w, theta, batch)
        v = jax.tree.map(lambda m, v, g: m * v - (1 - m) * g, m, v, g)
        return (jax.tree.map(lambda w, a, v: w + a * v, w, a, v), v), loss

    xs = (learning_rate, jax.tree.map(on_grid, momentum), NET.batches(STEPS).arrays)
    (params, velocity), losses = jax.lax.scan(step, (params, velocity), xs)
    return params, losses, velocity


def plain_outputs(hypers: dict[str, Any]) -> Any:
    *others, a, m = (hypers[k] for k in KINDS)
    return plain(*others, dense(a), dense(m))


@functools.cache
def evaluate_plain(form: str, dtype: str) -> Any:
    function = lambda hypers: probe(*plain_outputs(hypers))  # noqa: E731
    with jax.enable_x64(dtype == "float64"):
        return jax.tree.map(np.asarray, jax.jit(jax.grad(function))(hypers_of(form, dtype)))


def assert_close(got: Any, expected: Any, tolerance: float) -> None:
    """Leaf by leaf, |got - expected| <= tolerance |expected| in the Euclidean norm."""
    for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(expected), strict=True):
        error = np.linalg.norm(np.asarray(x, np.float64) - y) / np.linalg.norm(y)
        assert error <= tolerance, f"{jax.tree_util.keystr(path)}: relative error {error:.1e} > {tolerance:.0e}"


@pytest.mark.long
@some_of(
    ("form", "oracle"),
    [*((form, "unrolled") for form in FORMS), *((form, "checkpointed") for form in EXTREMES)],
    ("per step", "unrolled"),
)
def test_reversal_agrees_with_the_adjoints_that_store(form: str, oracle: str) -> None:
    assert_close(evaluate(form, "reversible", "float64")[1], evaluate(form, oracle, "float64")[1], 1e-9)


@some_of("form", FORMS, "per step and weight")
def test_reversal_agrees_with_a_plain_scan_in_float64(form: str) -> None:
    assert_close(evaluate(form, "reversible", "float64")[1], evaluate_plain(form, "float64"), 1e-7)


@pytest.mark.long
@pytest.mark.of_bits
def test_reversal_agrees_with_a_plain_scan_in_float32() -> None:
    assert_close(evaluate("scalar", "reversible", "float32")[1], evaluate_plain("scalar", "float32"), 1e-3)


@functools.cache
def value_of(form: str) -> Any:
    """The value alone, compiled; on a grid 64 times finer than usual, whose digits would show in the differences."""
    adjoint = hg.Reversible(fraction_bits=58)
    return jax.jit(lambda hypers: objective(adjoint, hypers)[0])


@some_of(
    ("form", "kind"),
    [*itertools.product(FORMS, KINDS[3:]), *itertools.product(FORMS[:1], KINDS[:3])],
    *itertools.product(("per step and weight",), KINDS),
)
def test_reversal_agrees_with_central_differences(form: str, kind: str) -> None:
    gradient = evaluate(form, "reversible", "float64")[1][kind]
    with jax.enable_x64(True):
        hypers = hypers_of(form, "float64")
        function = lambda x: value_of(form)({**hypers, kind: x})  # noqa: E731
        hg.testing.check_hypergradient(function, hypers[kind], tolerance=1e-6, gradient=gradient)


@pytest.mark.long
@pytest.mark.of_bits
@some_of(("form", "road"), list(itertools.product(EXTREMES, ["checkpointed", "unrolled"])), (EXTREMES[0], "checkpointed"))
def test_all_adjoints_train_alike_bit_for_bit(form: str, road: str) -> None:
    assert_same_bits(evaluate(form, road, "float64")[0][1], evaluate(form, "reversible", "float64")[0][1])


@pytest.mark.of_bits
@some_of("road", ["unrolled", "checkpointed"])
def test_all_adjoints_train_alike_in_float32_too(road: str) -> None:
    outputs = jax.jit(functools.partial(objective, ROADS[road]))(hypers_of("scalar", "float32"))[1]
    assert_same_bits(outputs, evaluate("scalar", "reversible", "float32")[0][1])


@pytest.mark.long
@pytest.mark.of_bits
def test_the_host_driver_trains_and_differentiates_as_the_scan_does() -> None:
    on_host = functools.partial(objective, hg.Reversible(driver="host"))
    (_, outputs), gradients = jax.value_and_grad(on_host, has_aux=True)(hypers_of("scalar", "float32"))
    (_, expected), expected_gradients = evaluate("scalar", "reversible", "float32")
    assert_same_bits(outputs, expected)
    assert_close(gradients, expected_gradients, 1e-5)


@pytest.mark.long
def test_gmpy2_trains_and_differentiates_as_the_scan_does() -> None:
    """On a network of which two leaves are one vector."""
    net = network("layer norm")

    def value(adjoint: Any, rate: Any, momentum: Any, params: Any, theta: Any) -> Any:
        sgd = hg.SGD(hg.PerStep(rate), momentum)
        run = hg.train(net.loss, params, sgd, net.batches(len(rate)), theta=theta, adjoint=adjoint)
        return net.value(run.params) + jnp.sum(run.losses), (run.params, run.losses, run.state)

    with jax.enable_x64(True):
        arguments = jnp.linspace(0.1, 0.3, 3), jnp.float64(0.8), net.params(jnp.float64), net.theta(jnp.float64)
        by = lambda adjoint: jax.value_and_grad(functools.partial(value, adjoint), (0, 1, 2, 3), has_aux=True)  # noqa: E731
        (_, outputs), gradients = by(hg.Reversible(buffer="gmpy2"))(*arguments)
        (_, expected), wanted = jax.tree.map(np.asarray, jax.jit(by(hg.Reversible()))(*arguments))
    assert_same_bits(outputs, expected)
    assert_close(gradients, wanted, 1e-9)


def test_what_is_computed_apart_compiles_once() -> None:
    """However often Python comes to it: the gmpy2 road does at every step, each time with another closure."""
    compiled = []

    def listen(event: str, duration: float, **_: Any) -> None:
        if event.endswith("backend_compile_duration"):
            compiled.append(duration)

    results, x, t = [], jnp.ones(7), jnp.int32(0)
    monitoring.register_event_duration_secs_listener(listen)
    try:
        results.append(isolated(t, lambda x: jnp.sin(x) + 2, x))
        programs = len(compiled)
        results += [isolated(t, lambda x: jnp.sin(x) + 2, x) for _ in range(4)]
    finally:
        monitoring.unregister_event_duration_listener(listen)
    assert programs and len(compiled) == programs
    np.testing.assert_array_equal(results[-1], results[0])


def assert_same_bits(got: Any, expected: Any) -> None:
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


@pytest.mark.long
@pytest.mark.parametrize("output", [0, 1, 2], ids=["params", "losses", "state"])
def test_one_output_and_one_input_at_a_time(output: int) -> None:
    with jax.enable_x64(True):
        hypers = hypers_of("per step", "float64")
        chosen = lambda outputs: jax.tree.reduce(jnp.add, jax.tree.map(lambda x: jnp.sum(jnp.sin(x)), outputs[output]))  # noqa: E731
        with_rate = lambda a: {**hypers, "learning_rate": a}  # noqa: E731
        got = jax.jit(jax.grad(lambda a: chosen(objective(hg.Reversible(), with_rate(a))[1])))(hypers["learning_rate"])
        expected = jax.grad(lambda a: chosen(plain_outputs(with_rate(a))))(hypers["learning_rate"])
        assert_close(got, jax.tree.map(np.asarray, expected), 1e-7)


@pytest.mark.long
def test_second_derivatives_go_through_unrolled() -> None:
    """d/dh of g(h) = u . dF/dh: nested through `Unrolled`, against differences of the gradients of `Reversible`."""

    def along(adjoint: Any, h: Any) -> jax.Array:
        gradient = jax.grad(lambda h: objective(adjoint, {**hypers, **h})[0])(h)
        return sum(jnp.sum(jnp.cos(x)) for x in jax.tree.leaves(gradient))

    with jax.enable_x64(True):
        hypers = hypers_of("per step", "float64")
        h = {k: hypers[k] for k in ("learning_rate", "momentum", "theta")}
        nested = jax.jit(jax.grad(functools.partial(along, hg.Unrolled(fraction_bits=58))))(h)
        once = jax.jit(functools.partial(along, hg.Reversible(fraction_bits=58)))
        hg.testing.check_hypergradient(once, h, tolerance=1e-6, gradient=nested)


@pytest.fixture
def recompiled() -> Iterator[None]:
    """Nothing compiled before a patch is used under it, nor the other way round."""
    jax.clear_caches()
    yield
    jax.clear_caches()


@pytest.mark.long
@some_of("part", ["h", "read", "g"], "read")
def test_a_derivative_off_by_a_thousandth_is_caught(part: str, recompiled: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one link's pullback to hyperparameters, to other links, or to the gradient."""
    pull = link.pull

    def lying(*args: Any) -> Any:
        back = pull(*args)
        return back._replace(**{part: jax.tree.map(lambda x: 1.001 * x, getattr(back, part))})

    def function(h: Any) -> jax.Array:
        return objective(hg.Reversible(), {**hypers, **h})[0]

    with jax.enable_x64(True):
        hypers = hypers_of("per group", "float64")
        h = {k: hypers[k] for k in ("learning_rate", "momentum")}
        for module in (link, cotangents):
            monkeypatch.setattr(module, "pull", lying)
        gradient = jax.jit(jax.grad(function))(h)
        with pytest.raises(AssertionError, match="the gradient is not the derivative"):
            hg.testing.check_hypergradient(jax.jit(function), h, tolerance=1e-6, gradient=gradient)
