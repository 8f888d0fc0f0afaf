"""Constants that were measured on a machine, by the benchmark that measures them again.

Constants from a paper or a data sheet, and derived ones, stand where they are used.
"""

# python -m benchmarks.cpu_convolutions: 16 shapes on AMD EPYC, jaxlib 0.10.
#
# Bytes of the transformed inputs and outputs of one chunk of images, which should fit into the
# cache. A chunk has at least two images. Images that are too large for that are not worth it.
CHUNK = 2**22
LEAST_IMAGES = 2
LARGEST_CHUNK = 2**24
# Costs in multiplications of a large product: of each transformed number of a tile, of each
# transformed number of a kernel, and of each in a sum over chunks.
TILE_COST = 13
KERNEL_COST = 80
SUM_COST = 10
# Products that contract the rows of both operands take longer.
GRADIENT_COST = 1.3
# Smaller savings are within the error of the estimate.
LEAST_SAVING = 1.15
# Separate products of kernel elements pay if at most this part of the multiplications remains.
MOST_USED = 0.4
# Below this many multiplications, times do not matter.
LEAST_MULTIPLICATIONS = 2**24
# Sums over more kernel elements take long to compile.
MOST_ELEMENTS = 11 * 11
# Channels of groups that are convolved as one: fewer fill no vectors, more multiply mostly zeros.
BLOCK = 32

# python -m benchmarks.cpu_workspaces: jaxlib 0.10, glibc 2.36.
#
# In YNNPACK, a convolution with a kernel from this size on copies its padded input twice and its
# kernel once. Others copy their padded input. Within 6 % for 21 of 22 convolutions with jaxlib
# 0.10. From jaxlib 0.11 on it works in tiles: with 0.12, 29 of 35 convolutions and products are
# estimated within 17 MB. Gradients by kernels of 7 x 7 take up to 39 MB more, one by a kernel of
# 3 x 3 with 3 channels 88 MB less.
YNNPACK_LARGE_KERNEL = 3 * 2**17
# Eigen packs at most about this of the patches of each group of a convolution: 45 convolutions.
EIGEN_PACKED_OF_GROUP = 2**21
# Matrix products with less workspace are not counted: 18 products.
LEAST_PACKED = 2**20
# The CPU client starts an operation before it frees the workspace of the last two. In tiles, a
# chain of operations takes one workspace, and a backward pass two.
IN_SUCCESSION, IN_SUCCESSION_IN_TILES = 3, 2

# python -m benchmarks.checkpoint_memory, python -m benchmarks.budgets: glibc 2.36.
#
# Arrays from this size on are mapped separately, and returned to the system at once. The heap
# returns free memory at its top from this size on.
MAPPED_SEPARATELY = 2**24
TRIMMED = 2**25
# Blocks that occupy gaps of the heap. Smaller gaps do not add up.
LARGEST_GAP, SMALLEST_GAP = 2**23, 2**16
# Threads and late code take 7 to 12 MiB in steps of small networks, and 5 more after an evaluation.
RUNTIME = 2**24
# Gaps after checkpoints, relative to the state, and their largest bytes: with states of 328 and
# 841 MB, whole runs held 11 MB more than state, step, batches and runtime.
ALLOCATOR, LARGEST_GAPS = 1 / 12, 2**24

# python -m benchmarks.planning: plans of public networks, jaxlib 0.10.
#
# A scan that makes more than this share of all bytes is planned iteration by iteration.
LARGE_LOOP = 0.2
# Largest number of pieces. Planning time grows with it, because each is linearized.
MOST_PIECES = 160
# A plan that fits is improved while the next proposal is so much faster.
WORTH_COMPILING = 0.01
# After a peak above the budget, the next tree is smaller by this share, then by twice as much.
STEP = 0.01
# Bytes of windows besides the arguments, relative to the estimate, until one was compiled; and of
# chunks of rows, which are compiled once a plan fits, if they are faster.
OF_WINDOWS, TOO_HIGH = 1.1, 0.85

# python -m benchmarks.fitted_steps: jaxlib 0.10.
#
# XLA schedules the updates of optimizers differently. With Lion, whose update reads the moment that
# it replaces, steps took up to 0.7 of the parameters' bytes more than planned.
SPARE_OF_PARAMETERS = 0.75

# python -m benchmarks.clipped_grad_models: jaxlib 0.10, two cores.
#
# Clipped gradients are computed one example at a time if the results of all operations for one
# example have this many elements for each parameter, and for each operation.
ELEMENTS_PER_PARAMETER = 3.0
ELEMENTS_PER_EQUATION = 1500
# Rows of a table that an example reads are summed apart from a table this many times larger.
FEW_ROWS = 4

# Compiled for an H200, BERT, 64 x 128 tokens: clipped gradients take 1.79 of the time and 0.87 of
# the memory of the plain gradient; with one product for the norm and one for the sum 2.03 and 0.96.
#
# Gradients of a matrix are kept if it meets this many tokens, times the bytes of an element: below,
# to write and read them takes longer than a second product. Microbatches have this many elements
# for each operation, to start it. Sums of so many rows are fused with others, of more copied.
KEPT_TOKEN_BYTES = 400
KEPT_ELEMENTS_PER_EQUATION = 500_000
FUSED_ROWS, MOST_FUSED_ROWS = 16, 64
