"""Run the benchmarks; see `benchmarks.runner`."""

import sys

from benchmarks import wheels

if __name__ == "__main__":
    if "--gpu" in sys.argv:
        for line in wheels.install():
            print(f"installed: {line}", flush=True)
    from benchmarks.runner import main

    raise SystemExit(main())
