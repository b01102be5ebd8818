# SPDX-License-Identifier: Apache-2.0
"""Small rounds on two GPUs for compute-sanitizer, which cannot follow pytest's many processes:

CUDA_MODULE_LOADING=LAZY compute-sanitizer --tool memcheck --target-processes all --show-backtrace device \\
    --report-api-errors no --error-exitcode 9 python tests/cuda/sanitize.py

Without --show-backtrace the tool keeps Python's frames alive, and the arrays in them. NCCL asks the driver for kernels of every
GPU that it knows, hence --report-api-errors. Loaded at once, all kernels of torch and NCCL would be instrumented.

With --emulated some of these rounds run on CPUs, without compute-sanitizer: that shows that the script is right.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

SIZES = [[5, 3], [0, 4], [2, 0]]


def main() -> None:
    from ranks import Ranks

    transport = "gin_emulated" if "--emulated" in sys.argv[1:] else None
    began = time.monotonic()

    def rounds(ranks: Ranks, sizes: list[list[int]], **settings: Any) -> None:
        print(f"{settings}, tokens of the ranks {sizes}", flush=True)
        common = {"num_experts": 8, "top_k": 2, "hidden": 64, "num_buffers": 3, "max_tokens": 8}
        ranks.run("rounds", {**common, **settings}, sizes, {}, seconds=200.0)
        print(f"passed; {time.monotonic() - began:.1f} s since the start", flush=True)

    ranks = Ranks(timeout=60.0, transport=transport)
    for layout in ("rank", "expert"):
        for schedule in ("direct", "latency"):
            rounds(ranks, SIZES, layout=layout, schedule=schedule)
    if transport is None:
        rounds(ranks, [[1040, 30]], max_tokens=1100)
    ranks.close()
    ranks = Ranks(timeout=60.0, nodes=2, transport=transport)
    rounds(ranks, SIZES, layout="expert", schedule="hierarchical")
    ranks.close()
    # Few blocks: combine has rows on their way into shared memory.
    os.environ.update(HAL_CUDA_SMS="1", HAL_CUDA_COMBINE="pull")
    ranks = Ranks(timeout=60.0, transport=transport)
    for layout in ("rank", "expert"):
        rounds(ranks, [[40, 30], [0, 40]], layout=layout, max_tokens=40, hidden=1040)
    ranks.close()
    print("rounds passed")


if __name__ == "__main__":
    main()
