"""Training on CPUs: faster convolutions, compiler options, workspaces, and the heap's gaps.

The page docs/cpu.md explains each of them.
"""

from fnet.cpu.convolutions import count_cpus as count_cpus
from fnet.cpu.convolutions import for_cpus as for_cpus
