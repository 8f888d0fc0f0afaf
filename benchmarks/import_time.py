"""Time of `import fnet`, compared with importing its dependencies.

    python -m benchmarks.import_time

Each import runs in a fresh process, interleaved; medians of the whole process are reported.
"""

import functools
import os
import subprocess
import sys
from typing import Any

from benchmarks.claims import Claim, argument_parser, publish
from benchmarks.measure import interleaved

OURS, BASELINE = "import fnet", "import jax, flax, optax"


def main() -> None:
    args = argument_parser(__doc__, rounds=15).parse_args()

    # Allow bytecode files, as an installed package has them.
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}

    def start(statement: str) -> Any:
        subprocess.run([sys.executable, "-c", statement], check=True, env=environment)

    seconds = interleaved({s: functools.partial(start, s) for s in (BASELINE, OURS)}, args.rounds)
    ratio = seconds[OURS] / seconds[BASELINE]
    print(", ".join(f"{statement}: {s:.2f} s" for statement, s in seconds.items()))
    publish([Claim(OURS, BASELINE, ratio, "< 1.2", "time")], args, "jax", "jaxlib", "flax", "optax")


if __name__ == "__main__":
    main()
