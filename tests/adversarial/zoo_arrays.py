"""What moves numbers around: gathers, scatters, sorts, transforms, sums along segments; and complex numbers between."""

from typing import Any

import jax
import jax.numpy as jnp
from zoo import Draw, Problem, cross_entropy, entry, mlp, mse, net, squares


@entry()
def spectral_filter(draw: Draw) -> Problem:
    """`rfft`, a filter, `irfft`: complex numbers between real ones."""

    def loss(p: Any, theta: Any, batch: Any) -> jax.Array:
        x, y = batch
        frequencies = jnp.fft.rfft(x, axis=-1)
        gain = p["gain"] * jnp.exp(1j * theta * p["phase"])
        return mse(jnp.tanh(jnp.fft.irfft(frequencies * gain, n=8)), y) + 0.01 * jnp.mean(
            jnp.abs(jnp.fft.fft2(x + 1)) * theta
        )

    params = {"gain": draw(5), "phase": draw(5)}
    return Problem(loss, params, draw.number(0.7), (draw.rows(4, 8), draw.rows(4, 8)))


@entry()
def complex_arithmetic(draw: Draw) -> Problem:
    """Unit complex rotations, conjugates, absolute values, and a complex matrix product."""

    def loss(p: Any, theta: Any, batch: Any) -> jax.Array:
        x, y = batch
        w = jax.lax.complex(p["re"], p["im"])
        z = (x.astype(w.dtype) @ w) * jnp.exp(1j * theta)
        z = z / (1 + jnp.abs(z)) + jnp.conj(z) ** 2 / 4
        return mse(jnp.real(z * jnp.conj(z)) @ p["out"] + jnp.imag(z).sum(axis=-1) + jnp.angle(z + 3).sum(axis=-1), y)

    params = {"re": draw(3, 4, scale=0.5), "im": draw(3, 4, scale=0.5), "out": draw(4, scale=0.5)}
    return Problem(loss, params, draw.number(0.4), (draw.rows(5, 3), draw.rows(5)), rate=0.1)


@entry(smooth=False)
def sorted_transport(draw: Draw) -> Problem:
    """The Wasserstein distance of two samples on a line, by sorting; and a median."""

    def loss(p: Any, theta: Any, batch: Any) -> jax.Array:
        x, y = batch
        prediction = net(p, x)
        transport = jnp.mean(jnp.abs(jnp.sort(prediction) - jnp.sort(y)) ** theta)
        return transport + jnp.median(prediction) ** 2 + jnp.mean(prediction[jnp.argsort(y)] * jnp.arange(8)) / 8

    return Problem(loss, mlp(draw), draw.number(1.5), (draw.rows(8, 3), draw.rows(8)))


@entry(smooth=False)
def hard_examples(draw: Draw) -> Problem:
    """`lax.top_k` of the losses, a trimmed rest, and a smooth weight in theta."""

    def loss(p: Any, heat: Any, batch: Any) -> jax.Array:
        x, y = batch
        errors = (net(p, x) - y) ** 2
        worst, places = jax.lax.top_k(errors, 3)
        return jnp.mean(worst) + jnp.sum(jax.nn.softmax(heat * errors) * errors) + jnp.mean(errors[places] ** 2) / 9

    return Problem(loss, mlp(draw), draw.number(0.8), (draw.rows(8, 3), draw.rows(8)), rate=0.1)


@entry()
def scattered_updates(draw: Draw) -> Problem:
    """`.at[].add`, `.at[].multiply`, `.at[].set`: a memory that is written at addresses from the batch."""

    def loss(p: Any, keep: Any, batch: Any) -> jax.Array:
        x, where, y = batch
        memory = p["memory"].at[where].add(jnp.tanh(x @ p["w"]))
        memory = memory.at[where[0]].multiply(keep).at[0, 0].set(keep * p["w"][0, 0])
        return mse(memory[where, :].sum(axis=-1), y)

    params = {"memory": draw(5, 3, scale=0.5), "w": draw(2, 3)}
    return Problem(loss, params, draw.number(0.8), (draw.rows(6, 2), draw.integers(5, 6), draw.rows(6)))


@entry()
def embeddings(draw: Draw) -> Problem:
    """A table read by tokens, tied to the output; a temperature in theta."""

    def loss(p: Any, heat: Any, batch: Any) -> jax.Array:
        tokens, y = batch
        hidden = jnp.tanh(jnp.mean(p["table"][tokens], axis=1) @ p["w"])
        return cross_entropy(heat * hidden @ p["table"].T, y)

    params = {"table": draw(7, 4, scale=0.5), "w": draw(4, 4, scale=0.5)}
    return Problem(loss, params, draw.number(1.5), (draw.integers(7, 5, 3), draw.integers(7, 5)))


@entry()
def graph_convolution(draw: Draw) -> Problem:
    """Messages along edges, summed at their ends by `segment_sum`, divided by the degree; a residual weight in theta."""

    def loss(p: Any, theta: Any, batch: Any) -> jax.Array:
        x, start, end, y = batch
        degree = 1 + jax.ops.segment_sum(jnp.ones_like(start, x.dtype), end, num_segments=6)
        for name in ("w1", "w2"):
            messages = jax.ops.segment_sum((x @ p[name])[start], end, num_segments=6)
            x = theta * x + jnp.tanh(messages / degree[:, None])
        highest = jax.ops.segment_max(x[:, 0], end[:6], num_segments=6)
        return mse(x @ p["out"] + jnp.where(jnp.isfinite(highest), highest, 0), y)

    params = {"w1": draw(3, 3, scale=0.6), "w2": draw(3, 3, scale=0.6), "out": draw(3)}
    data = (draw.rows(6, 3), draw.integers(6, 9), draw.integers(6, 9), draw.rows(6))
    return Problem(loss, params, draw.number(0.5), data, rate=0.1)


@entry()
def cumulative(draw: Draw) -> Problem:
    """`cumsum`, `cumprod`, `cumlogsumexp`, `diff`: a stick-breaking mixture and a monotone spline."""

    def loss(p: Any, theta: Any, batch: Any) -> jax.Array:
        x, y = batch
        broken = jax.nn.sigmoid(theta * p["stick"])
        weights = broken * jnp.cumprod(jnp.append(jnp.ones(1, x.dtype), 1 - broken[:-1]))
        knots = jnp.cumsum(jax.nn.softplus(p["knots"]))
        parts = jnp.tanh(x[:, None] - knots) @ weights + jax.lax.cumlogsumexp(p["stick"])[-1]
        return mse(parts, y) + jnp.mean(jnp.diff(p["knots"]) ** 2)

    return Problem(loss, {"stick": draw(5), "knots": draw(5)}, draw.number(1.2), (draw.rows(8), draw.rows(8)))


@entry()
def einsums(draw: Draw) -> Problem:
    """Tensor contractions of three operands, a trace, an outer product, a Kronecker product."""

    def loss(p: Any, theta: Any, batch: Any) -> jax.Array:
        x, y = batch
        form = jnp.einsum("ni,ijk,nk->nj", x, p["t"], x)
        mixed = jnp.einsum("nj,j->n", jnp.tanh(form), p["v"]) + jnp.einsum("ii", p["t"][0])
        low = jnp.kron(p["v"][:2], p["v"][2:]) @ jnp.outer(p["v"], theta).ravel()[:2]
        return mse(mixed, y) + jnp.mean(low**2)

    params = {"t": draw(3, 3, 3, scale=0.4), "v": draw(3, scale=0.6)}
    return Problem(loss, params, draw.number([0.6, 1.1]), (draw.rows(6, 3), draw.rows(6)))


@entry()
def slices_and_masks(draw: Draw) -> Problem:
    """Dynamic slices, rolls, pads, `where` with a safe inside, clipped indices, flips and tiles."""

    def loss(p: Any, theta: Any, batch: Any) -> jax.Array:
        x, start, y = batch
        window = jax.lax.dynamic_slice(p["long"], (start,), (4,))
        window = jnp.pad(jnp.roll(window, 1) * theta, (1, 1), mode="reflect") + jnp.flip(jnp.tile(p["short"], 2))
        positive = x > 0
        safe = jnp.where(positive, jnp.sqrt(jnp.where(positive, x, 1)), jnp.expm1(jnp.where(positive, 0, x)))
        changed = jax.lax.dynamic_update_slice(safe[0], window[:2] ** 2, (start,))
        return mse(safe @ window + changed.sum(), y)

    params = {"long": draw(9), "short": draw(3)}
    return Problem(loss, params, draw.number(0.8), (draw.rows(5, 6), draw.integers(6), draw.rows(5)), rate=0.05)


@entry()
def integers_only(draw: Draw) -> Problem:
    """A batch of integers alone: a table of pairwise scores, bits and remainders."""

    def loss(p: Any, theta: Any, batch: Any) -> jax.Array:
        i, j, y = batch
        score = p["table"][i, j % 4] + p["bias"][(i ^ j) & 3]
        return jnp.mean(jax.nn.softplus(score) - (y > 1) * score) + theta * squares(p)

    params = {"table": draw(6, 4), "bias": draw(4)}
    data = (draw.integers(6, 8), draw.integers(9, 8), draw.integers(4, 8))
    return Problem(loss, params, draw.number(0.05), data, rate=1.0)


@entry()
def static_arguments(draw: Draw) -> Problem:
    """Strings, bools, functions, None and integers ride in theta beside the floats."""

    def loss(p: Any, theta: Any, batch: Any) -> jax.Array:
        x, y = batch
        hidden = theta["act"](x @ p["w"] + (p["b"] if theta["biased"] else 0)) if theta["kind"] == "plain" else x
        return mse(hidden @ p["v"], y) + theta["l2"] * squares(p) * theta["times"]

    theta = {"act": jnp.tanh, "biased": True, "kind": "plain", "l2": draw.number(0.02), "none": None, "times": 2}
    return Problem(loss, mlp(draw), theta, (draw.rows(6, 3), draw.rows(6)))


@entry()
def awkward_leaves(draw: Draw) -> Problem:
    """Parameters that are scalars, of size one, empty, nested in tuples; penalties of theta for each."""

    def loss(p: Any, theta: Any, batch: Any) -> jax.Array:
        x, y = batch
        slope, (offset, empty), [bend] = p
        terms = jax.tree.map(lambda t, w: jnp.sum(t * w * w), theta, p)
        return mse(slope * x + offset[0, 0] * jnp.tanh(bend @ bend * x) + jnp.sum(empty), y) + sum(jax.tree.leaves(terms))

    params = (draw(), (draw(1, 1), draw(0, 3)), [draw(2)])
    theta = jax.tree.map(lambda w: draw.full(0.05, *w.shape), params)
    return Problem(loss, params, theta, (draw.rows(6), draw.rows(6)), rate=0.1)
