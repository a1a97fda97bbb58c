"""Reports out of compiled code: outputs of the programs of `hg.optimize`, callbacks in all others; none is lost."""

import itertools
import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import jax
import pytest
from covering import some_of
from test_optimize import RATE, trainer, val_fn

import hypergrad as hg
from hypergrad import _evaluate
from hypergrad._evaluate import Evaluation
from hypergrad._program_keys import contains
from hypergrad.hypers import check_hypers, split_fixed


def program(train_fn: Any, seeds: int) -> Any:
    """That of an evaluation, and what it reports."""
    evaluation = Evaluation(train_fn, val_fn, seeds=seeds, watch=True)
    seen: list[Any] = []
    make = _evaluate.programs.trace

    def kept(*args: Any) -> Any:
        traced = make(*args)
        seen.append(traced[0].jaxpr)
        return traced

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_evaluate.programs, "trace", kept)
        learned, fixed = split_fixed(check_hypers(RATE))
        _, failure = evaluation(learned, fixed, jax.random.key(0))
    assert failure is None
    return seen[-1], evaluation.ledger


def alone(train_fn: Callable[..., Any]) -> Callable[..., Any]:
    return train_fn


def called(train_fn: Callable[..., Any]) -> Callable[..., Any]:
    """Inside a user's jit, and another one."""
    return jax.jit(lambda h, key: jax.jit(train_fn)(h, key))


def batched(train_fn: Callable[..., Any]) -> Callable[..., Any]:
    return lambda h, key: jax.tree.map(
        lambda x: x.mean(axis=0), jax.vmap(lambda k: train_fn(h, k))(jax.random.split(key, 2))
    )


def looped(train_fn: Callable[..., Any]) -> Callable[..., Any]:
    return lambda h, key: jax.lax.scan(lambda c, k: (train_fn(h, k), None), train_fn(h, key), jax.random.split(key, 2))[0]


@some_of(("seeds", "around"), list(itertools.product([1, 3], [alone, called, batched])), (1, batched))
def test_programs_of_the_meta_loop_have_no_callback_and_report(around: Any, seeds: int) -> None:
    jaxpr, ledger = program(around(trainer(8)), seeds)
    assert not contains(jaxpr, "pure_callback") and not contains(jaxpr, "hypergrad_report")
    assert ledger.statuses and all(status.ok for status in ledger.statuses)
    assert ledger.summary().bits > 0
    assert len(ledger.norms) >= seeds


def test_a_report_inside_of_a_users_loop_is_called_back() -> None:
    jaxpr, ledger = program(looped(trainer(8)), 1)
    assert contains(jaxpr, "hypergrad_report")
    assert len(ledger.statuses) >= 4  # two runs one after the other, on the way out and on the way back, and one before
    assert ledger.failure is None


@some_of("around", [alone, called, batched, looped], batched)
def test_a_run_that_fails_is_told_wherever_it_stands(around: Any) -> None:
    with pytest.raises(hg.RangeError, match="left the range"):
        hg.optimize(around(trainer(8)), val_fn, {"learning_rate": 1e30}, meta_steps=1)


CHILD = """
import sys, json, jax, jax.monitoring
import jax.numpy as jnp, optax
import hypergrad as hg

folder, meta_steps = sys.argv[1], int(sys.argv[2])
jax.config.update("jax_compilation_cache_dir", folder + "/cache")
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
events = []
jax.monitoring.register_event_listener(lambda name, **_: events.append(name))


def loss(w, theta, batch):
    return jnp.sum((w - batch) ** 2) + theta * jnp.sum(w**2)


def train_fn(hypers, key):
    adam, target = hg.AdamW(hypers["rate"], 0.9, 0.99), hg.full_batch(jnp.ones(3))
    return hg.train(loss, jax.random.normal(key, 3), adam, target, theta=hypers["penalty"], steps=8).params


hypers = {"rate": hg.positive(hg.PerStep(jnp.full(8, 0.1))), "penalty": hg.positive(0.1)}
result = hg.optimize(train_fn, lambda w: jnp.sum((w - 1) ** 2), hypers, seeds_per_step=3, meta_steps=meta_steps,
                     checkpoint=folder + "/run")
hg.hypergradient(train_fn, lambda w: jnp.sum(w), hypers)  # eager
count = {name.rsplit("/", 1)[1]: events.count(name) for name in set(events) if "compilation_cache" in name}
print(json.dumps(count | {"steps": len(result.history)}))
"""


@pytest.mark.long
def test_a_resumed_run_compiles_nothing(tmp_path: Any) -> None:
    def run(meta_steps: int) -> dict[str, int]:
        command = [sys.executable, "-c", CHILD, str(tmp_path), str(meta_steps)]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    assert run(2)["cache_misses"] > 0
    again = run(3)
    assert again["steps"] == 3
    assert again.get("cache_misses", 0) == 0 and again["cache_hits"] > 0
    assert again["compile_requests_use_cache"] == again["cache_hits"]
