"""Per-example gradients: clipped sums, norms and private training.

Read `clipped` first: it explains the algorithm. Then follow one call of `clipped_grad`. `backward`
is the driver, and calls the others:

- `backward` traces and differentiates the loss of one example.
- `fnet.jaxpr.batch_axis` refuses losses that mix examples or depend on their position.
- `hoist` and `derived` find values that are computed from parameters alone.
- `products` gives each factor of a matrix product, such as a low-rank update, factors of its own.
- `taps` finds the equations that combine parameters with data, and gets cotangents there.
- `batching` executes the program of one example for the batch.
- `parameter_gradients` chooses for each parameter how norms and weighted sums are computed: from
  factors, from materialized gradients, or in chunks.
- `ghost_norm` computes them for linear equations, without materializing gradients.

`gradients` has the functions that do not clip. `modes` and `adaptive` are gradient modes for
`fnet.make_step`.
"""
