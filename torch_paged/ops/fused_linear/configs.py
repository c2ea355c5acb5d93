"""Launch configurations of `fused_linear`: the checked-in table and the choice from it."""

from __future__ import annotations

# Past this many rows the op composes torch ops: cuBLAS is at least as quick there.
MAX_KERNEL_ROWS = 64

# Length of the caller's `counters`, one for each block of outputs whose sum is split.
NUM_COUNTERS = 1024
