"""One setting for all tests: default 32-bit JAX, pictures without a screen, examples that are the same in every run."""

import functools
import gc
import os
from typing import Any

import hypothesis
import jax
import pytest
from jax._src import compiler
from jax._src.interpreters import mlir

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


# A context of MLIR takes 5 ms to make, longer than a small program to lower: the programs of a test are lowered in one, but
# for those that are lowered within another's lowering.
make_ir_context = mlir.make_ir_context
of_the_test = functools.cache(make_ir_context)
mlir.make_ir_context = lambda: of_the_test() if mlir.ir.Context.current is None else make_ir_context()


def pytest_runtest_setup(item: pytest.Item) -> None:
    of_the_test.cache_clear()
    of_bits = item.path.stem in OF_BITS or item.get_closest_marker("of_bits") is not None
    jax.config.update("jax_disable_most_optimizations", not of_bits)
