"""What chains may be made of, and what a class says of its own."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hypergrad as hg
from hypergrad.optimizers import Link, Optimizer


class Annealed(Optimizer):
    """s <- f s;  v <- m v - s g;  w <- w + a v."""

    learning_rate: Any = 0.1
    momentum: Any = 0.9
    fade: Any = 0.99
    chain = (
        Link("scale", None, decay="fade", start=jnp.ones_like),
        Link("velocity", lambda h, z, g: -z.scale * g, decay="momentum"),
        Link("params", lambda h, z: h.learning_rate * z.velocity),
    )


@pytest.mark.long
def test_a_link_may_decay_and_add_nothing() -> None:
    hg.testing.check_inverse(Annealed())
    loss, data = lambda w, _, x: jnp.sum(jnp.cos(w - x)), hg.full_batch(jnp.float32(0))

    def slopes(adjoint: Any) -> Any:
        value = lambda rule: jnp.sum(hg.train(loss, jnp.ones(3), rule, data, steps=10, adjoint=adjoint).params)  # noqa: E731
        return jax.tree.leaves(jax.grad(value)(jax.tree.map(jnp.asarray, Annealed())))

    with jax.enable_x64(True):
        np.testing.assert_allclose(slopes(hg.Reversible()), slopes(hg.Unrolled()), rtol=1e-9)


def test_a_value_out_of_range_is_told_of_a_link_that_only_decays() -> None:
    far = type("Far", (Annealed,), {"__module__": __name__, "chain": (
        Annealed.chain[0]._replace(start=lambda w: jnp.full_like(w, 1e6)), *Annealed.chain[1:],
    )})  # fmt: skip
    with pytest.raises(hg.RangeError, match="scale left the range .* before the first step"):
        hg.train(lambda w, _, x: jnp.sum(w * x), jnp.ones(3), far(fade=0.5), hg.full_batch(jnp.float32(0)), steps=40)


class Bent(hg.SGD):
    """A chain of its own, of which it says nothing."""

    chain = (
        Link("velocity", lambda h, z, g: (h.momentum - 1) * jnp.tanh(3 * g), decay="momentum"),
        Link("params", lambda h, z: h.learning_rate * z.velocity),
    )


class OfAnother:
    chain = Bent.chain


class Mixed(OfAnother, hg.SGD):
    """Its chain comes from beside its base."""


class Chosen(hg.SGD):
    """A chain that calls what a class below may change."""

    linear = True

    @staticmethod
    def bent(g: Any) -> Any:
        return g

    @property
    def chain(self) -> Any:  # type: ignore[override]
        bent = type(self).bent
        return (Link("velocity", lambda h, z, g: (h.momentum - 1) * bent(g), decay="momentum"), Bent.chain[1])


class Below(Chosen):
    @staticmethod
    def bent(g: Any) -> Any:
        return jnp.tanh(3 * g)


class Normed(hg.Adam):
    """Divided by a mean over the leaf."""

    chain = (
        *hg.Adam.chain[:2],
        Link("params", lambda h, z: -h.learning_rate * z.mean / (jnp.sqrt(jnp.mean(z.square)) + 1e-3)),
    )


def test_what_a_rule_says_of_its_chain_says_nothing_of_another() -> None:
    assert not (Bent.linear or Bent.entrywise or Normed.entrywise or Mixed.linear) and hg.SGD.linear and hg.AdamW.entrywise

    def slope(adjoint: Any, rule: Any) -> Any:
        end = lambda rate: jnp.sum(hg.train(loss, jnp.ones(3), rule(rate, 0.5), data, steps=5, adjoint=adjoint).params)  # noqa: E731
        return jax.grad(end)(0.1)

    with jax.enable_x64(True):
        loss, data = lambda w, _, x: jnp.sum(jnp.cos(w - x) * jnp.arange(1.0, 4.0)), hg.full_batch(jnp.float64(0.2))
        for rule in (Bent, Mixed, Below):
            np.testing.assert_allclose(slope(hg.Reversible(), rule), slope(hg.Unrolled(), rule), rtol=1e-9)
    large = {"a": jnp.ones(3), "b": jnp.full(3, 5.0), "w": jnp.ones(3000)}  # a and b are small beside it
    of_all = lambda p, _, x: sum(jnp.sum((v - x) ** 2) for v in p.values())  # noqa: E731
    run = lambda p: hg.train(of_all, p, Normed(0.1), hg.full_batch(jnp.float32(0.2)), steps=5).params["a"]  # noqa: E731
    np.testing.assert_allclose(run(large), run({"a": large["a"]}), rtol=1e-6)
