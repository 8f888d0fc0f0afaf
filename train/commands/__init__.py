"""Commands of the ``fnet`` program, one module each with a ``main(argv)``."""
