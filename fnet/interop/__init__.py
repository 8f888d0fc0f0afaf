"""Adapters to other libraries, each imported by its own name: `fnet.interop.linen`, `.nnx`."""
