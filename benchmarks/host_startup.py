# SPDX-License-Identifier: Apache-2.0
"""How long ranks take to start, meet and part: ``python benchmarks/host_startup.py [--ranks 4] [--repeat 5]``.

Whole runs as a user sees them, interpreter start and ``import hal`` included; and the connect call alone.
"""

from __future__ import annotations

import argparse
import io
import re
import statistics
import sys
import time

from hal.launch import run

SCRIPT = """
import time, hal
start = time.perf_counter()
with hal.connect() as comm:
    comm.barrier()
    print("connected", time.perf_counter() - start)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--repeat", type=int, default=5)
    options = parser.parse_args()
    whole, connect = [], []
    for _ in range(options.repeat):
        output, start = io.BytesIO(), time.perf_counter()
        status = run(options.ranks, [sys.executable, "-c", SCRIPT], output=output)
        whole.append(time.perf_counter() - start)
        seconds = [float(s) for s in re.findall(r"connected (\S+)", output.getvalue().decode())]
        if status or len(seconds) != options.ranks:
            sys.exit(f"a rank failed: {output.getvalue().decode()}")
        connect.append(max(seconds))
    print(f"# {options.ranks} ranks, {options.repeat} runs; seconds")
    print(f"{'':24} {'min':>8} {'median':>8} {'max':>8}")
    for name, values in (("whole run", whole), ("connect, slowest rank", connect)):
        print(f"{name:24} {min(values):8.3f} {statistics.median(values):8.3f} {max(values):8.3f}")


if __name__ == "__main__":
    main()
