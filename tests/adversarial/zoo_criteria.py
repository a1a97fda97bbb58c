"""Criteria: what is minimized in classification, ranking, regression and alignment, those of `optax` among them."""

from typing import Any

import jax
import jax.numpy as jnp
import jax.scipy.special
import optax
from zoo import Draw, Problem, cross_entropy, entry, mlp, mse, net, squares


def classifier(draw: Draw, criterion: Any, theta: Any, rate: float = 0.3) -> Problem:
    """criterion(theta, logits, labels) of four classes."""

    def loss(p: Any, theta: Any, batch: Any) -> jax.Array:
        x, y = batch
        return jnp.mean(criterion(theta, net(p, x), y)) + 0.01 * squares(p)

    return Problem(loss, mlp(draw, 3, 4, 4), theta, (draw.rows(6, 3), draw.integers(4, 6)), rate=rate)


@entry()
def smoothed_labels(draw: Draw) -> Problem:
    def criterion(amount: Any, logits: jax.Array, labels: jax.Array) -> jax.Array:
        soft = optax.smooth_labels(jax.nn.one_hot(labels, 4, dtype=logits.dtype), amount)
        return optax.softmax_cross_entropy(logits, soft)

    return classifier(draw, criterion, draw.number(0.1))


@entry()
def focal(draw: Draw) -> Problem:
    def criterion(gamma: Any, logits: jax.Array, labels: jax.Array) -> jax.Array:
        return optax.sigmoid_focal_loss(logits, jax.nn.one_hot(labels, 4, dtype=logits.dtype), alpha=0.3, gamma=gamma)

    return classifier(draw, criterion, draw.number(2.0))


@entry()
def polynomial_and_safe(draw: Draw) -> Problem:
    """`poly_loss_cross_entropy`, and `safe_softmax_cross_entropy`, which has a rule of its own."""

    def criterion(epsilon: Any, logits: jax.Array, labels: jax.Array) -> jax.Array:
        hot = jax.nn.one_hot(labels, 4, dtype=logits.dtype)
        safe = optax.losses.safe_softmax_cross_entropy(logits, hot)
        return optax.losses.poly_loss_cross_entropy(logits, hot, epsilon=epsilon) + epsilon * safe

    return classifier(draw, criterion, draw.number(1.0))


@entry(smooth=False)
def sparsemax(draw: Draw) -> Problem:
    """`projection_simplex`, which has a rule of its own, and the loss that belongs to it (Fenchel and Young)."""

    def criterion(heat: Any, logits: jax.Array, labels: jax.Array) -> jax.Array:
        chosen = jnp.take_along_axis(logits, labels[:, None], axis=1)[:, 0]
        p = jax.vmap(optax.projections.projection_simplex)(heat * logits)
        return 0.5 + jnp.sum(p * (heat * logits - p / 2), axis=-1) - heat * chosen

    return classifier(draw, criterion, draw.number(1.2))


@entry(smooth=False)
def projected_weights(draw: Draw) -> Problem:
    """Weights on the simplex, in a box, in balls: `optax.projections` inside the loss."""

    def loss(p: Any, radius: Any, batch: Any) -> jax.Array:
        x, y = batch
        project = optax.projections
        mixture = project.projection_simplex(p["mix"], 1.0)
        w = project.projection_l2_ball(p["w"], radius) + project.projection_box(p["w"], -0.5, 0.5)
        return mse(jnp.tanh(x @ w) @ mixture, y) + mse(project.projection_l1_ball(p["mix"], radius), 0.1)

    params = {"mix": draw(4), "w": draw(3, 4)}
    return Problem(loss, params, draw.number(1.1), (draw.rows(6, 3), draw.rows(6)))


@entry(smooth=False)
def perturbed_maximum(draw: Draw) -> Problem:
    """`make_perturbed_fun`: the derivative of an argmax by noise whose key is in the batch, in a Fenchel-Young loss."""

    def loss(p: Any, heat: Any, batch: Any) -> jax.Array:
        x, labels, key = batch
        highest = lambda z: jnp.max(z, axis=-1)  # noqa: E731
        soft = optax.perturbations.make_perturbed_fun(highest, num_samples=4, sigma=0.5, noise=optax.perturbations.Normal())
        logits = heat * net(p, x)
        return jnp.mean(soft(key, logits) - jnp.take_along_axis(logits, labels[:, None], axis=1)[:, 0])

    data = (draw.rows(6, 3), draw.integers(4, 6), draw.keys())
    return Problem(loss, mlp(draw, 3, 4, 4), draw.number(1.3), data)


@entry()
def ranking(draw: Draw) -> Problem:
    """`ranking_softmax_loss`, `ntxent`, `cosine_distance`, `dice_loss`."""

    def loss(p: Any, heat: Any, batch: Any) -> jax.Array:
        x, labels = batch
        z = net(p, x)
        ranks = optax.losses.ranking_softmax_loss(heat * z[:, 0], labels.astype(z.dtype))
        close = optax.losses.ntxent(z, labels, temperature=0.7)
        far = jnp.mean(optax.cosine_distance(z[:3], z[3:], epsilon=1e-3))
        return ranks + 0.1 * close + heat * far + jnp.mean(optax.losses.dice_loss(z[:, 1:2], (labels[:, None] > 1) * 1.0))

    return Problem(loss, mlp(draw, 3, 4, 3), draw.number(1.2), (draw.rows(6, 3), draw.integers(3, 6)), rate=0.1)


@entry()
def ctc(draw: Draw) -> Problem:
    """`optax.ctc_loss`: a scan in log space over alignments."""

    def loss(p: Any, heat: Any, batch: Any) -> jax.Array:
        x, labels = batch
        logits = heat * jnp.tanh(x @ p["w"]) @ p["v"]
        pads = jnp.zeros(logits.shape[:2], logits.dtype).at[0, -1].set(1)
        label_pads = jnp.zeros(labels.shape, logits.dtype).at[1, -1].set(1)
        return jnp.mean(optax.ctc_loss(logits, pads, labels + 1, label_pads)) / 5

    params = {"w": draw(3, 4, scale=0.6), "v": draw(4, 4, scale=0.6)}
    return Problem(loss, params, draw.number(1.1), (draw.rows(2, 5, 3), draw.integers(3, 2, 2)))


@entry()
def contrastive(draw: Draw) -> Problem:
    """InfoNCE of two views, with a temperature in theta."""

    def loss(p: Any, heat: Any, batch: Any) -> jax.Array:
        a, b = (jnp.tanh(x @ p["w"] + p["b"]) @ p["v"] for x in batch)
        a, b = (z / jnp.sqrt(jnp.sum(z * z, axis=-1, keepdims=True) + 1e-3) for z in (a, b))
        scores = heat * a @ b.T
        both = jnp.diag(jax.nn.log_softmax(scores, axis=0)) + jnp.diag(jax.nn.log_softmax(scores, axis=1))
        return -jnp.mean(both)

    return Problem(loss, mlp(draw, 3, 4, 3), draw.number(2.0), (draw.rows(5, 3), draw.rows(5, 3)))


@entry(smooth=False)
def margins(draw: Draw) -> Problem:
    """Triplet, hinge, multiclass hinge and perceptron losses, their margin in theta."""

    def loss(p: Any, margin: Any, batch: Any) -> jax.Array:
        x, labels = batch
        z = net(p, x)
        near, far = (jnp.sum((z[:2] - z[2 * i : 2 * i + 2]) ** 2, axis=-1) for i in (1, 2))
        triplets = jnp.mean(jax.nn.relu(near - far + margin))
        signs = 2 * (labels > 1) - 1
        hinges = jnp.mean(optax.hinge_loss(z[:, 0] / margin, signs)) + jnp.mean(jax.nn.relu(margin - signs * z[:, 1]) ** 2)
        return triplets + hinges + jnp.mean(optax.losses.multiclass_hinge_loss(z, labels)) + 0.01 * squares(p)

    return Problem(loss, mlp(draw, 3, 4, 3), draw.number(0.7), (draw.rows(6, 3), draw.integers(3, 6)))


@entry(smooth=False)
def robust_regression(draw: Draw) -> Problem:
    """Huber, quantile (pinball), log-cosh and absolute errors."""

    def loss(p: Any, theta: Any, batch: Any) -> jax.Array:
        x, y = batch
        found = net(p, x)
        huber = optax.huber_loss(found[:, 0], y, delta=0.5) + optax.log_cosh(found[:, 0], y)
        error = y[:, None] - found
        pinball = jnp.maximum(theta * error, (theta - 1) * error)
        return jnp.mean(huber) + jnp.mean(pinball)

    return Problem(loss, mlp(draw, 3, 4, 3), draw.number([0.1, 0.5, 0.9]), (draw.rows(6, 3), draw.rows(6)))


@entry()
def counts(draw: Draw) -> Problem:
    """Poisson and negative binomial likelihoods: `gammaln`, `digamma` in the derivative, an overdispersion in theta."""

    def loss(p: Any, theta: Any, batch: Any) -> jax.Array:
        x, k = batch
        rate, k = jax.nn.softplus(net(p, x)) + 0.1, k.astype(x.dtype)
        special = jax.scipy.special
        poisson = rate - special.xlogy(k, rate)
        binomial = special.gammaln(theta) - special.gammaln(k + theta) - theta * jnp.log(theta / (theta + rate))
        return jnp.mean(poisson + binomial - k * jnp.log(rate / (theta + rate)))

    return Problem(loss, mlp(draw), draw.number(1.5), (draw.rows(6, 3), draw.integers(4, 6)), rate=0.1)


@entry()
def distillation(draw: Draw) -> Problem:
    """A soft teacher and hard labels, mixed by theta, at a temperature; `kl_divergence` and an entropy bonus."""

    def loss(p: Any, theta: Any, batch: Any) -> jax.Array:
        x, labels, teacher = batch
        logits = net(p, x)
        soft = jax.nn.softmax(teacher / theta["heat"])
        apart = optax.kl_divergence(jax.nn.log_softmax(logits / theta["heat"]), soft)
        entropy = jnp.sum(jax.scipy.special.entr(jax.nn.softmax(logits)), axis=-1)
        hard = cross_entropy(logits, labels)
        return theta["mix"] * jnp.mean(apart) + (1 - theta["mix"]) * hard - 0.1 * jnp.mean(entropy)

    theta = {"heat": draw.number(2.0), "mix": draw.number(0.6)}
    return Problem(loss, mlp(draw, 3, 4, 4), theta, (draw.rows(6, 3), draw.integers(4, 6), draw.rows(6, 4)))
