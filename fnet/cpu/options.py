"""Options of XLA's CPU compiler that lower the peak, or the time of compiling."""

import importlib.metadata
from typing import Any

IS_JAXLIB_0_10 = importlib.metadata.version("jaxlib").startswith("0.10.")

# YNNPACK takes twice as long as Eigen for gradients of convolutions by their kernels. For matrix
# products it is faster, and fused reductions take less memory. jaxlib 0.10 gives it all three.
# XLA rejects options that it does not know, and other versions were not measured.
_YNNPACK = "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT,LIBRARY_FUSION_TYPE_REDUCE"
_EIGEN_CONVOLUTIONS = {"xla_cpu_experimental_ynn_fusion_type": _YNNPACK} if IS_JAXLIB_0_10 else {}
# jax 0.10's CPU compiler drops the barriers of jax.checkpoint, then merges the rematerialized
# operations with the original ones. Without this pass it cannot. But then XLA's hoisting of small
# loops meets a barrier, and ends the process.
_KEEP_BARRIERS = "cse_barrier_expander,small-while-loop-hoisting"
KEEP_REMAT: dict[str, Any] = _EIGEN_CONVOLUTIONS | {"xla_disable_hlo_passes": _KEEP_BARRIERS}

# The default scheduler of the CPU compiler trades memory for concurrency.
_SCHEDULE_FOR_MEMORY = {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}
MIN_MEMORY: dict[str, Any] = KEEP_REMAT | _SCHEDULE_FOR_MEMORY

# The CPU compiler computes bfloat16 in float32, and casts whole stacks in front of a loop.
KEEP_CASTS_IN_LOOPS: dict[str, Any] = MIN_MEMORY | {
    "xla_disable_hlo_passes": f"{_KEEP_BARRIERS},while-loop-invariant-code-motion,"
    "while-loop-expensive-invariant-code-motion"
}

# XLA assigns buffers before it generates code, so the peak needs no optimized code.
WITHOUT_OPTIMIZED_CODE: dict[str, Any] = {"xla_backend_optimization_level": 0}

# For programs that run once: initial values of a ResNet-18 compile in 0.4 of the time and run as
# fast, with the same bits.
RUNS_ONCE: dict[str, Any] = {"xla_backend_optimization_level": 1}
