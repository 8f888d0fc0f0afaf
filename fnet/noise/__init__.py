"""Gaussian noise, independent or correlated over steps, for gradient modes and accounting."""
