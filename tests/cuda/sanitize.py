# SPDX-License-Identifier: Apache-2.0
"""Small rounds on two GPUs for compute-sanitizer, which cannot follow pytest's many processes:

compute-sanitizer --tool memcheck --target-processes all --show-backtrace device --report-api-errors no \\
    --error-exitcode 9 python tests/cuda/sanitize.py

Without --show-backtrace the tool keeps Python's frames alive, and the arrays in them. NCCL asks the driver for kernels of every
GPU that it knows, hence --report-api-errors.

With --emulated some of these rounds run on CPUs, without compute-sanitizer: that shows that the script is right.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

SIZES = [[5, 3], [0, 4], [2, 0]]


def main() -> None:
    from pair import Pair

    transport = "gin_emulated" if "--emulated" in sys.argv[1:] else None
    pair = Pair(timeout=60.0, transport=transport)
    common = {"num_experts": 8, "top_k": 2, "hidden": 64, "num_buffers": 3}
    for layout in ("rank", "expert"):
        for schedule in ("direct", "latency"):
            settings = {**common, "layout": layout, "schedule": schedule, "max_tokens": 8}
            print(f"layout {layout}, schedule {schedule}", flush=True)
            pair.run("rounds", settings, SIZES, {}, seconds=200.0)
    if transport is None:
        pair.run("rounds", {**common, "max_tokens": 1100}, [[1040, 30]], {}, seconds=200.0)
    pair.close()
    pair = Pair(timeout=60.0, nodes=2, transport=transport)
    settings = {**common, "layout": "expert", "schedule": "hierarchical", "max_tokens": 8}
    pair.run("rounds", settings, SIZES, {}, seconds=200.0)
    pair.close()
    print("rounds passed")


if __name__ == "__main__":
    main()
