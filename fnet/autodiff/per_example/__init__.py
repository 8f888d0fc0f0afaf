"""Per-example gradients: clipped sums, norms and private training.

Read `clipped` first: it explains the algorithm. Then follow one call of `clipped_grad`:

- `backward` traces the loss and runs one backward pass that keeps examples apart.
- `batch_axis` proves that no layer mixes examples, and finds each value's batch axis.
- `taps` finds the equations that combine parameters with data, and gets cotangents there.
- `parameter_gradients` computes norms and weighted sums for each parameter.
- `ghost_norm` does so for linear equations, without materializing gradients.

`gradients` has the functions that do not clip. `modes` and `adaptive` are gradient modes for
`fnet.make_step`.
"""
