"""Matrices with orthogonal rows or columns, by products alone."""

import jax
import jax.numpy as jnp
from jax import Array


# (a, b, c) of each of five steps, and by what the norm is enlarged first.
JORDAN = ((3.4445, -4.7750, 2.0315),) * 5, 1.0
_POLAR_EXPRESS = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
)
_SAFETY = 1.01  # the authors': rounding may not carry a singular value out of the interval of the next polynomial
POLAR_EXPRESS = tuple((a / _SAFETY, b / _SAFETY**3, c / _SAFETY**5) for a, b, c in _POLAR_EXPRESS), _SAFETY
METHODS = {"newton_schulz": JORDAN, "polar_express": POLAR_EXPRESS}


def orthogonalized(x: Array, method: str = "newton_schulz", eps: float = 1e-8) -> Array:
    """X <- a X + (b A + c A^2) X with A = X X^T, five times from X / |X|: singular values towards 1. [m, n] -> [m, n]

    method: "newton_schulz", by the coefficients of Jordan et al. (2024), which takes singular values of 0.01 |X| and more to
    between 0.68 and 1.13, or "polar_express" (Amsel et al. 2025), which comes closer to 1. Zeros stay zeros, with a finite
    derivative: eps^2 is added within the root of the norm. The derivative is that of these five steps, not of the polar
    factor.
    """
    coefficients, margin = METHODS[method]
    tall = x.shape[0] > x.shape[1]
    x = x.T if tall else x
    x = x / (margin * jnp.sqrt(jnp.sum(x * x) + eps**2))

    def once(x: Array, abc: Array) -> tuple[Array, None]:
        a, b, c = abc
        square = x @ x.T
        return a * x + (b * square + c * square @ square) @ x, None

    x, _ = jax.lax.scan(once, x, jnp.asarray(coefficients, x.dtype))
    return x.T if tall else x
