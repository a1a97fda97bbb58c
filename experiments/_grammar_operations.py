"""The operations of the grammar, as text with places for values: what `experiments/_grammar.py` draws from."""

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
CASTS = ("bfloat16", "float16", "float32")

OPERATIONS = (  # with how often each is tried
    ("elementwise", 5), ("binary", 5), ("weighed", 2), ("along", 3), ("reduced", 2), ("reshaped", 2), ("joined", 1),
    ("product", 4), ("solved", 1), ("convolved", 1), ("gathered", 2), ("recurrent", 1), ("wrapped", 3), ("batched", 1),
    ("ruled", 2), ("cast", 2),
)  # fmt: skip
