"""One training run: set-up, loop, devices, checkpoints, evaluation, privacy accounting."""
