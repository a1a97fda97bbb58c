"""The operations of the grammar, as text with places for values: what `experiments/_grammar.py` draws from.

`FIRST` and `WHOLE` are tables of them. A table must stay as it is, since a case is made of its number alone: what is added
belongs into a new one.
"""

from typing import NamedTuple


SMOOTH = (
    "jnp.tanh({})", "jnp.sin({})", "jnp.cos({})", "jnp.arctan({})", "jnp.arcsinh({})", "jnp.exp(-({}) ** 2)",
    "jnp.log1p(({}) ** 2)", "jnp.sqrt(1 + ({}) ** 2)", "jnp.expm1(jnp.tanh({}))", "1 / (2 + jnp.sin({}))", "0.5 * {}",
    "jax.lax.rsqrt(1 + jnp.square({}))", "jnp.sinc({})", "jax.scipy.special.erf({})", "jnp.logaddexp({}, 0.5)",
    "1.5 ** jnp.tanh({})", "jnp.cbrt(2 + jnp.tanh({}))", "-jnp.abs(jnp.exp(1j * ({})) + 2)", "jnp.arctan2({}, 2.0)",
    *(f"jax.nn.{name}({{}})" for name in (
        "silu", "gelu", "softplus", "sigmoid", "elu", "selu", "celu", "mish", "squareplus", "soft_sign", "log_sigmoid",
    )),
)  # fmt: skip
KINKED = (
    "jnp.abs({})", "jnp.maximum({}, 0.1)", "jnp.clip({}, -1, 1)", "jnp.where({0} > 0, {0}, 0.1 * ({0}))",
    *(f"jax.nn.{name}({{}})" for name in ("relu", "relu6", "leaky_relu", "hard_tanh", "hard_silu", "sparse_plus")),
)  # fmt: skip
STOPPED = ("({0} + jax.lax.stop_gradient(jnp.sin({0}) - ({0})))", "({0} * jax.lax.stop_gradient(jnp.tanh({0})))")
BINARY = (
    "{0} + {1}", "{0} - {1}", "{0} * jnp.tanh({1})", "{0} / (1 + {1} ** 2)", "jnp.maximum({0}, {1})",
    "jnp.where({0} > {1}, {0}, 0.5 * {1})", "jnp.logaddexp({0}, {1})", "jnp.arctan2({0}, 1 + {1} ** 2)",
    "(1 + jnp.tanh({0}) ** 2) ** jnp.tanh({1})", "jnp.hypot(1 + jnp.square({0}), {1})",
)  # fmt: skip
ALONG = (  # an axis, the shape kept
    "jax.nn.softmax({}, axis={})", "jax.nn.log_softmax({}, axis={})", "jax.nn.standardize({}, axis={}, epsilon=0.1)",
    "jnp.cumsum({}, axis={}) / 2", "jnp.cumprod(jnp.tanh({}), axis={})", "jnp.sort({}, axis={})", "jnp.flip({}, axis={})",
    "jnp.roll({}, 1, axis={})", "jax.lax.cumlogsumexp({}, axis={})", "centred({}, axis={})",
    "jax.lax.associative_scan(jnp.add, jnp.sin({}), axis={})", "jnp.fft.irfft(1j * jnp.fft.rfft({0}, axis={1}) + "
    "jnp.fft.rfft({0}, axis={1}), n={2}, axis={1})",
)  # fmt: skip
REDUCED = (
    "jnp.sum({}, axis={}) / 2", "jnp.mean({}, axis={})", "jnp.max({}, axis={})", "jnp.var({}, axis={})",
    "jax.nn.logsumexp({}, axis={})", "jnp.sqrt(jnp.sum({} ** 2, axis={}) + 0.1)", "jnp.prod(jnp.cos({}), axis={})",
)  # fmt: skip
RULES = {  # derivative rules of the user's own -> whether what training follows is still a gradient
    "turned({}, {})": False, "limited({}, {})": False, "scaled({}, {})": False, "bell({}, {})": False,
    "lengthened({}, {})": False, "leaned({}, {})": False, "rounded(4 * {} * {}) / 4": False, "spike({} * {})": False,
    "plus({} * {})": False, "minus({} * {})": False, "damped({}, {})": False, "half_turned({} * {})": False,
    "free_equilibrium({}, {})": False, "equilibrium({}, {})": True, "honest({} * {})": True,
}  # fmt: skip
WRAPPED = (  # a function around a chain of operations of one value; {0}: the value, {1}: the chain on `z`, {2}: theta
    "jax.checkpoint(lambda z: {1})({0})",
    "jax.jit(lambda z: {1})({0})",
    "jax.jit(jax.checkpoint(lambda z: {2} * ({1}), policy=jax.checkpoint_policies.dots_saveable))({0})",
    "jax.lax.cond(jnp.mean({0}) > 0, lambda z: ({1}).astype(z.dtype), lambda z: 0.3 * z, {0})",
    "jax.lax.switch(batch['which'] % 2, [lambda z: jnp.sin(z), lambda z: ({1}).astype(z.dtype)], {0})",
    "jax.lax.fori_loop(0, 3, lambda i, z: (0.7 * z + 0.3 * ({1})).astype(z.dtype), {0})",
    "jax.lax.scan(lambda z, _: ((0.5 * z + {2} * ({1})).astype(z.dtype), None), {0}, None, length=3)[0]",
    "jax.grad(lambda z: jnp.sum({1}))({0})",
    "jax.jvp(lambda z: {1}, ({0},), (jnp.ones_like({0}),))[1]",
    "jax.vjp(lambda z: {1}, {0})[1](({1_of_0}) * 0 + 1)[0]",
)
SOLVED = ("jnp.linalg.cholesky({0})", "jnp.linalg.inv({0} + 1)", "jnp.linalg.solve({0}, jnp.ones({1}))")  # {1}: its size
VECTORS = ("solve", "eigvalsh", "slogdet", "expm", "svd")  # what of `SOLVED` has the shape [size]
CASTS = ("bfloat16", "float16", "float32")

OPERATIONS = (  # with how often each is tried
    ("elementwise", 5), ("binary", 5), ("weighed", 2), ("along", 3), ("reduced", 2), ("reshaped", 2), ("joined", 1),
    ("product", 4), ("solved", 1), ("convolved", 1), ("gathered", 2), ("recurrent", 1), ("wrapped", 3), ("batched", 1),
    ("ruled", 2), ("cast", 2),
)  # fmt: skip


class Table(NamedTuple):
    """All that a grammar draws from, each by its place."""

    smooth: tuple[str, ...] = SMOOTH
    kinked: tuple[str, ...] = KINKED
    along: tuple[str, ...] = ALONG
    reduced: tuple[str, ...] = REDUCED
    wrapped: tuple[str, ...] = WRAPPED
    solved: tuple[str, ...] = SOLVED
    casts: tuple[str, ...] = CASTS
    operations: tuple[tuple[str, int], ...] = OPERATIONS


FIRST = Table()
WHOLE = Table(
    SMOOTH + (
        "jax.scipy.special.gammaln(2 + jnp.tanh({}))", "jax.scipy.special.i0e({})", "jax.scipy.special.log_ndtr({})",
        "jnp.real(jnp.exp(1j * ({})) * (1 + 2j))", "jax.lax.erf_inv(0.9 * jnp.tanh({}))", "jnp.sinh(jnp.tanh({}))",
        "jnp.polyval(jnp.ones(3, ({0}).dtype), jnp.tanh({0}))", "jnp.float_power(2.0, jnp.tanh({0})).astype(({0}).dtype)",
        "jnp.abs(jnp.fft.fft(jnp.reshape({0}, -1)))[0] + 0 * ({0})", "jax.numpy.vectorize(jnp.sin)({})",
        "jax.scipy.stats.norm.logpdf({})", "jax.scipy.special.xlogy({0}, 1.5 + jnp.sin({0}))",
    ),
    KINKED + (
        "jnp.interp({0}, jnp.linspace(-2, 2, 5, dtype=({0}).dtype), jnp.sin(jnp.arange(5, dtype=({0}).dtype)))",
        "jnp.select([({0}) > 0.5, ({0}) < -0.5], [jnp.sin({0}), ({0}) ** 2], {0})", "jnp.mod({}, 1.7)",
        "({0}) * jnp.round(2 * ({0}))", "jnp.nan_to_num({})", "jnp.copysign({0}, jnp.sin({0}))",
        "jnp.piecewise({0}, [({0}) < 0], [jnp.sin, jnp.arcsinh])", "jnp.heaviside({0}, 0.5) * ({0})",
    ),
    ALONG + (
        "jax.lax.cummax({}, axis={})", "jnp.gradient({}, axis={})", "jnp.diff({}, axis={}, append=0.3)",
        "jnp.take_along_axis({0}, jnp.argsort({0}, axis={1}), axis={1})",
        "{0} / jnp.linalg.norm(1 + {0} ** 2, axis={1}, keepdims=True)",
        "jnp.apply_along_axis(lambda z: jnp.convolve(z, jnp.ones(3, z.dtype) / 3, 'same'), {1}, {0}) + 0 * {0}",
        "jnp.where(jnp.arange({2}).reshape([-1] + [1] * ({0}.ndim - 1 - {1})) % 2 == 0, {0}, 0.3 * jnp.sin({0}))",
    ),
    REDUCED + (
        "jnp.median({}, axis={})", "jnp.quantile({}, 0.3, axis={})", "jnp.linalg.norm(1 + {} ** 2, axis={})",
        "jnp.trapezoid({}, axis={})", "jnp.ptp({}, axis={})", "jnp.nanmean(jnp.where({0} > 9, jnp.nan, {0}), axis={1})",
    ),
    WRAPPED + (
        "jax.lax.map(lambda z: {1}, {0}[None])[0]", "jax.linearize(lambda z: {1}, {0})[1](jnp.ones_like({0}))",
        "jax.vmap(jax.grad(lambda z: jnp.sum({1})))({0}[None])[0]",
        "{0} * jnp.tanh(jax.grad(jax.grad(lambda s: jnp.sum((lambda z: {1})(s * {0}))))({2}))",
        "{0} * jax.lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, 0.5 * c[1]), (0, jax.lax.stop_gradient({0})))[1]",
        "jax.lax.custom_linear_solve(lambda x: 2 * x, ({1_of_0}) + 0 * {0}, lambda _, b: b / 2, symmetric=True)",
        "jax.lax.optimization_barrier({1_of_0})", "jax.named_call(lambda z: {1}, name='named')({0})",
        "(lambda f, held: f({2}, *held))(*jax.closure_convert(lambda s: s * ({1_of_0}), {2}))",
    ),
    SOLVED + (
        "jnp.linalg.eigvalsh({0} + jnp.diag(2 * jnp.arange({1}, dtype={0}.dtype)))",
        "jnp.linalg.slogdet({0})[1] * jnp.ones({1}, {0}.dtype)", "jnp.linalg.qr({0})[1]",
        "jax.scipy.linalg.expm(-0.1 * {0}) @ jnp.ones({1}, {0}.dtype)",
        "jax.scipy.linalg.solve_triangular({0}, jnp.ones({1}, {0}.dtype), lower=True)",
        "jnp.linalg.svd({0} + jnp.diag(2 * jnp.arange({1}, dtype={0}.dtype)), compute_uv=False)",
    ),
    (*CASTS, "float8_e4m3fn", "float8_e5m2", "3, 4", "5, 10", "8, 7"),  # pairs: `jax.lax.reduce_precision`
    (*OPERATIONS, ("randomized", 2), ("pooled", 1)),
)  # fmt: skip
