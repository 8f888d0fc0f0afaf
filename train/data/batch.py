"""Names and meaning of the arrays of a batch."""

from typing import TYPE_CHECKING, Any, TypedDict

if TYPE_CHECKING:
    from jax import Array
else:  # processes that decode images must not import JAX
    Array = Any


class Batch(TypedDict, total=False):
    """Arrays with one leading axis of examples; each source has some of them.

    With users, the leading axes are users and the examples of each, and ``weight`` has one number
    per user.

    Attributes:
      image: uint8 or floating [N, H, W, C], or [N, crops, H, W, C] in evaluation with several.
      label: int32 [N].
      label_2: int32 [N], second label of images that mixup mixed.
      mix: float32 [N], share of ``label`` in such images.
      mask: uint8 [N, H, W], label of each pixel; 255 counts nowhere.
      tokens: unsigned [N, context + 1]. All but the last are inputs, all but the first targets.
      length: int32 [N], number of inputs of each row; the others are padding.
      segment: int32 [N, context + 1], number of each token's example in a packed row; 0 is padding.
      loss_mask: bool [N, context], whether each target is learned.
      reference: float32 [N, 2], log-likelihoods of the answers before training. With it, rows of
        tokens come in pairs, so that ``tokens``, ``length`` and ``loss_mask`` are [N, 2, ...].
      weight: float32 [N], of each example in losses and metrics; 0 for padding and for files that
        cannot be read. Without it, all examples count alike.
      example_weight: float32 [users, examples], the same of each example of a user.
      row: int32 [N], row of the training examples that each example is.
      id: int32 [N], number of a file, training files first; -1 for padding.
      index: int32 [N], number of a test example, from which a denoiser draws its noise.
    """

    image: Array
    label: Array
    label_2: Array
    mix: Array
    mask: Array
    tokens: Array
    length: Array
    segment: Array
    loss_mask: Array
    reference: Array
    weight: Array
    example_weight: Array
    row: Array
    id: Array
    index: Array
