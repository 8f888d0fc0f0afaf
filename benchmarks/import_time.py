"""How long `import fnet` takes, beside importing what it stands on.

    python -m benchmarks.import_time

Each import is a Python of its own, one after the other; medians of the whole process.
"""

import functools
import os
import subprocess
import sys
from typing import Any

from benchmarks.claims import Claim, argument_parser, publish
from benchmarks.measure import interleaved

OURS, PEER = "import fnet", "import jax, flax, optax"


def main() -> None:
    args = argument_parser(__doc__, rounds=15).parse_args()

    # What is compiled once is kept, as that of an installed package is.
    kept = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}

    def start(statement: str) -> Any:
        subprocess.run([sys.executable, "-c", statement], check=True, env=kept)

    seconds = interleaved({s: functools.partial(start, s) for s in (PEER, OURS)}, args.rounds)
    ratio = seconds[OURS] / seconds[PEER]
    print(", ".join(f"{statement}: {took:.2f} s" for statement, took in seconds.items()))
    publish([Claim(OURS, PEER, ratio, "< 1.2", "time")], args, "jax", "jaxlib", "flax", "optax")


if __name__ == "__main__":
    main()
