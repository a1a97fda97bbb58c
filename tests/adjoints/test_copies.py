"""That neither loop copies what it overwrites: XLA does, unless all that reads it is known to come before."""

import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from covering import long

import hypergrad as hg


SHAPE, STEPS = (60, 50), 40
SIZE = SHAPE[0] * SHAPE[1]


def loss(w: Any, theta: Any, t: Any) -> Any:
    return jnp.mean(jnp.tanh(jnp.cos(t + jnp.arange(4.0 * SHAPE[0]).reshape(4, -1)) @ w) ** 2) + theta * jnp.mean(w**2)


def copied(rule: Any, asked: str) -> list[str]:
    """The types of large arrays that the bodies of loops copy, in a program that differentiates what is asked for."""
    given = {"rate": jnp.full(STEPS, 0.1), "momentum": jnp.float32(0.9), "theta": jnp.float32(0.01)}

    def end(value: Any, given: Any) -> Any:
        of = given | {asked: value}
        moved = rule(hg.PerStep(of["rate"]), of["momentum"])
        return jnp.sum(hg.train(loss, jnp.ones(SHAPE), moved, lambda t: t, theta=of["theta"], steps=STEPS).params ** 2)

    text = jax.jit(jax.grad(end)).lower(given[asked], given).compile().as_text()
    bodies = set(re.findall(r"body=%([\w.\-]+)", text))
    found = []
    for name, body in re.findall(r"^%([\w.\-]+) \([^\n]*\{\n(.*?)^\}", text, re.MULTILINE | re.DOTALL):
        if name in bodies and " while(" not in body:  # not the loop over attempts to reverse
            found += [
                kind
                for kind, shape in re.findall(r"= (\w+)\[([\d,]+)\]\S* copy\(", body)
                if math.prod(map(int, shape.split(","))) >= SIZE
            ]
    assert bodies
    return found


@pytest.mark.of_bits
@pytest.mark.parametrize(
    "rule, asked",
    [(hg.SGD, "rate"), long(hg.SGD, "momentum"), long(hg.SGD, "theta"), long(hg.HeavyBall, "rate"), long(hg.Adam, "rate")],
)
def test_loops_overwrite_in_place(rule: Any, asked: str) -> None:
    assert copied(rule, asked) == []
