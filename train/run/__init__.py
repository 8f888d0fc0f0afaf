"""One training run: setup, loop, devices, checkpoints, evaluation, privacy accounting."""
