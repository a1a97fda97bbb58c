"""One setting for all tests: default 32-bit JAX, pictures without a screen, examples that are the same in every run."""

import gc
import os
from typing import Any

import hypothesis
import jax
import pytest
from jax._src import compiler

from experiments import _quick


os.environ.setdefault("MPLBACKEND", "Agg")

# No deadline: the first example of a test compiles. Derandomized, so that a failure is found again by running again.
hypothesis.settings.register_profile("hypergrad", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("hypergrad")


# Tests of bits compile as users do: the compiler is what could break them. For all others it need not try hard, since they
# take their time to compile, not to run.
OF_BITS = [
    f"test_{x}"
    for x in (
        "checkpoint",
        "checkpoint_damage",
        "checkpoint_forged",
        "checkpoint_writers",
        "isolation",
    )
]


# What JAX's caches hold stays, and is much: to look at it for cycles at every 700 new objects took 7% of the time.
gc.set_threshold(100_000, 50, 10)


# Nor need it make LLVM code in many parts. `jax.jit` takes these options for one function, and JAX has no setting for all.
compile_options = compiler.get_compile_options


def quick_options(*args: Any, env_options_overrides: dict[str, Any] | None = None, **options: Any) -> Any:
    quick = _quick.IN_ONE_PART if jax.config.read("jax_disable_most_optimizations") else {}
    return compile_options(*args, env_options_overrides=quick | (env_options_overrides or {}), **options)


compiler.get_compile_options = quick_options


forget_context = _quick.lower_in_one_context()


jax.config.update("jax_disable_most_optimizations", True)  # for what modules compute when they are collected


def pytest_runtest_setup(item: pytest.Item) -> None:
    forget_context()
    of_bits = item.path.stem in OF_BITS or item.get_closest_marker("of_bits") is not None
    jax.config.update("jax_disable_most_optimizations", not of_bits)
