"""Options of XLA:CPU for programs that take longer to compile than to run."""

import jax


# LLVM code in one part, and of fusions by the older way, while there was one: a quarter of the time.
IN_ONE_PART = {"xla_cpu_parallel_codegen_split_count": 1} | (
    {"xla_cpu_use_fusion_emitters": False} if jax.__version_info__ < (0, 11, 1) else {}
)
# Code that is not made fast: half of the time, and less.
OPTIONS = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True} | IN_ONE_PART
