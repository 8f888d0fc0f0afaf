"""Where the memory goes: known from the compiled program, before it runs."""

from fnet.memory.donation import Donation, DonationError, donation
from fnet.memory.peak import Peak, compile_smallest, peak, tree_bytes

__all__ = [
    "Donation",
    "DonationError",
    "Peak",
    "compile_smallest",
    "donation",
    "peak",
    "tree_bytes",
]
