"""What a record prints of a run, and refuses: another loss, and Python that may compute something else when it is opened."""

import os
import pathlib
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback
from recorded import NET, assert_same, options
from tiny import BATCHES, PARAMS, SGD, fails, final, loss

import hypergrad as hg
from hypergrad._program_keys import contains
from hypergrad._record_files import Made, run_of
from hypergrad._record_prints import prints_of


GIVEN: dict[str, Any] = {"params": PARAMS, "optimizer": SGD, "batches": BATCHES, "steps": 3}


def twice(x: Any) -> Any:
    return 2 * np.asarray(x)


CALLS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "twice by jax.pure_callback": lambda x: jax.pure_callback(twice, x, x),
    "twice by jax.experimental.io_callback": lambda x: io_callback(twice, x, x),
}


def called_in_its_derivative(call: Callable[[jax.Array], jax.Array]) -> Callable[..., jax.Array]:
    """A loss whose gradient alone calls what no record can print."""

    @jax.custom_vjp
    def same(x: jax.Array) -> jax.Array:
        return x

    same.defvjp(lambda x: (x, None), lambda _, ct: (call(ct),))
    return lambda params, theta, batch: loss({"w": same(params["w"])}, theta, batch)


@pytest.mark.parametrize("what", CALLS)
def test_python_that_a_program_calls_is_not_recorded(what: str, tmp_path: pathlib.Path) -> None:
    with fails(ValueError, "hg.record needs `loss`", f"got a call of {what}.", "cannot tell whether that is the same"):
        hg.record(called_in_its_derivative(CALLS[what]), **GIVEN, folder=tmp_path / "a")
    assert not (tmp_path / "a").exists()


@pytest.mark.long
def test_nor_is_a_record_opened_with_it(tmp_path: pathlib.Path) -> None:
    hg.record(loss, **GIVEN, folder=tmp_path)
    with fails(ValueError, "got a call of twice by jax.pure_callback"):
        hg.record(called_in_its_derivative(CALLS["twice by jax.pure_callback"]), **GIVEN, folder=tmp_path)


def test_errors_of_equinox_are_recorded(tmp_path: pathlib.Path) -> None:
    """What they call raises, or is not called."""

    def checked(params: Any, theta: Any, batch: Any) -> jax.Array:
        found = loss(params, theta, batch)
        return eqx.error_if(found, found > 1e9, "too large")

    _, opened = (hg.record(checked, **GIVEN, folder=tmp_path) for _ in range(2))
    gradient = opened.hypergradient(lambda run: jnp.sum(run.params["w"]))["optimizer"].learning_rate
    np.testing.assert_allclose(gradient, jax.grad(lambda a: final(optimizer=hg.SGD(a, 0.9)))(0.1), rtol=1e-6)


def test_what_only_reports_is_recorded(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A print, and a training inside of the loss, which says how it went."""

    monkeypatch.setattr(jax, "device_count", lambda: 1)  # of several, the training reports by jax.debug

    def reporting(params: Any, theta: Any, batch: Any) -> jax.Array:
        jax.debug.callback(lambda x: None, batch)
        return loss(params, theta, batch) + final(params=params, adjoint=hg.Unrolled())

    given = {"theta": None, "state": None, "statistics": None, "params": PARAMS, "optimizer": SGD}
    run, inputs, _ = run_of(Made(reporting, BATCHES, 3, given), tmp_path)
    assert all(contains(run.functions.loss.jaxpr, name) for name in ("hypergrad_report", "debug_callback"))
    assert prints_of(run, inputs)["program"]


@pytest.mark.long
def test_a_record_from_elsewhere_is_opened_with_a_warning(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hg.record(**options(), folder=tmp_path)
    monkeypatch.setattr("jax.__version__", "0.0.1")
    with pytest.warns(UserWarning, match=r"was made elsewhere: jax '.*', now '0.0.1'"):
        record = hg.record(**options(), folder=tmp_path)
    assert_same(record.rewind(0).params, NET.params())


def test_other_draws_of_the_same_generator_are_another_run(tmp_path: pathlib.Path) -> None:
    given = GIVEN | {"batches": hg.minibatches(jnp.arange(12.0).reshape(6, 2), 3, jax.random.key(0))}
    hg.record(loss, **given, folder=tmp_path)
    hg.record(loss, **given, folder=tmp_path)
    with jax.threefry_partitionable(False), fails(ValueError, "is of another run", "compute differ"):
        hg.record(loss, **given, folder=tmp_path)


def test_another_loss_is_no_record_from_elsewhere(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one version of JAX programs can be compared, whatever XLA is told."""
    hg.record(**options(), folder=tmp_path)
    monkeypatch.setenv("XLA_FLAGS", os.environ.get("XLA_FLAGS", "") + " --xla_dump_disable_metadata=true")
    other = {"loss": lambda *a: 2 * NET.loss(*a)}
    with pytest.warns(UserWarning, match="was made elsewhere: flags"), fails(ValueError, "is of another run", "`loss`"):
        hg.record(**options() | other, folder=tmp_path)
    monkeypatch.setattr("jax.__version__", "0.0.1")
    with pytest.warns(UserWarning, match="compute the same cannot be told: what was trained is given as it was recorded"):
        hg.record(**options() | other, folder=tmp_path)


def test_arrays_that_a_rule_closes_over_are_part_of_its_print(tmp_path: pathlib.Path) -> None:
    def masked(mask: np.ndarray) -> Any:
        class Masked(hg.optimizers.Optimizer):
            learning_rate: Any = 0.1
            momentum: Any = 0.5
            chain = (
                hg.optimizers.Link("velocity", lambda h, z, g: -g, decay="momentum"),
                hg.optimizers.Link("params", lambda h, z: h.learning_rate * mask * z.velocity),
            )

        return Masked()

    given = {"loss": lambda w, _, x: jnp.sum((w - x) ** 2), "params": jnp.ones(3), "steps": 4}
    given |= {"batches": hg.full_batch(jnp.float32(0)), "folder": tmp_path}
    hg.record(**given, optimizer=masked(np.ones(3, np.float32)))
    hg.record(**given, optimizer=masked(np.ones(3, np.float32)))
    with fails(ValueError, "is of another run", "what `loss`, `batches` or `optimizer` compute differ"):
        hg.record(**given, optimizer=masked(np.float32([1, 0, 1])))


def test_a_file_is_no_folder(tmp_path: pathlib.Path) -> None:
    (tmp_path / "run").touch()
    with fails(hg.StorageError, "it is a file"):
        hg.record(**options(), folder=tmp_path / "run")
