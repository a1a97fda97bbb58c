"""A training run of two weights and a few steps, and one way to check an error: its class and what its text names."""

import contextlib
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import hypergrad as hg


PARAMS = {"w": jnp.array([1.0, -2.0])}
BATCHES = hg.full_batch(jnp.array([0.5, 0.25]))
SGD = hg.SGD(0.1, 0.9)


def loss(params: Any, theta: Any, batch: Any) -> jax.Array:
    return jnp.sum((params["w"] - batch) ** 2) / 2


def train(
    loss: Callable[..., Any] = loss,
    params: Any = PARAMS,
    optimizer: Any = SGD,
    batches: Any = BATCHES,
    steps: Any = 3,
    **options: Any,
) -> hg.Trained:
    return hg.train(loss, params, optimizer, batches, steps=steps, **options)


def final(**arguments: Any) -> jax.Array:
    """A scalar of the trained parameters, to differentiate."""
    return sum(jnp.sum(x) for x in jax.tree.leaves(train(**arguments).params))


@contextlib.contextmanager
def fails(error: type[Exception] | tuple[type[Exception], ...], *fragments: str) -> Iterator[pytest.ExceptionInfo]:
    """Inside, `error` is raised, and its text with its notes contains every fragment."""
    with pytest.raises(error) as caught:
        yield caught
    text = "\n".join([str(caught.value), *getattr(caught.value, "__notes__", ())])
    for fragment in fragments:
        assert fragment in text, f"{fragment!r} is not in {text}"


def fails_compiled(error: type[hg.HypergradError], *fragments: str) -> Any:
    """The same out of compiled code: JAX's class, ours by name at the head of the sentence."""
    return fails(jax.errors.JaxRuntimeError, f"hypergrad.{error.__qualname__}: ", *fragments)


def sentence(error: Exception) -> str:
    """The sentence of one of our errors, out of what XLA wrapped around it."""
    return re.search(r"(?:[\w.]+Error: )?(.*)\s*$", str(error))[1]
