"""One setting for all tests: default 32-bit JAX, pictures without a screen, examples that are the same in every run."""

import os
from collections.abc import Iterator

import hypothesis
import jax
import pytest


os.environ.setdefault("MPLBACKEND", "Agg")

# No deadline: the first example of a test compiles. Derandomized, so that a failure is found again by running again.
hypothesis.settings.register_profile("hypergrad", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("hypergrad")


@pytest.fixture
def quick_compilation() -> Iterator[None]:
    """For miniatures of scripts, which take their time to compile, not to run."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
