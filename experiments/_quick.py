"""Programs that take longer to compile than to run: options of XLA:CPU for them, and one context of MLIR for many."""

import functools
import os
from collections.abc import Callable

import jax
from jax._src.interpreters import mlir


# LLVM code in one part, and of fusions by the older way, while there was one: a quarter of the time.
IN_ONE_PART = {"xla_cpu_parallel_codegen_split_count": 1} | (
    {"xla_cpu_use_fusion_emitters": False} if jax.__version_info__ < (0, 11, 1) else {}
)
# Code that is not made fast: half of the time, and less.
OPTIONS = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True} | IN_ONE_PART


def whole_process() -> None:
    """All programs of this process are compiled so: before the first one, when XLA reads its flags."""
    os.environ["XLA_FLAGS"] = " ".join(f"--{name}={str(value).lower()}" for name, value in OPTIONS.items())


def lower_in_one_context() -> Callable[[], None]:
    """Lowers the programs from here on in one context of MLIR, of those that come after a call of what is returned in a new
    one. JAX makes one for each, which takes 5 ms and more, longer than to lower a program of one operation."""
    make = mlir.make_ir_context
    one = functools.cache(make)
    # Within another's lowering a program needs its own: what it adds would be added to the other.
    mlir.make_ir_context = lambda: one() if mlir.ir.Context.current is None else make()
    return one.cache_clear
