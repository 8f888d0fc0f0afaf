"""Rows of tokens: where they begin and end, and documents that share a row."""

import bisect

import numpy as np


def gather(
    tokens: np.ndarray, start: np.ndarray, length: np.ndarray, context: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Gather rows of ``length`` [N] inputs, and the target after the last one, from all tokens.

    Returns:
      Tokens [N, context + 1], 0 after the end of each row; the index of each token; and whether it
      is inside of its row.
    """
    offsets = np.arange(context + 1)
    inside = offsets <= length[:, None]
    index = np.minimum(start[:, None] + offsets, len(tokens) - 1)
    return np.where(inside, tokens[index], 0).astype(tokens.dtype), index, inside


def pack(lengths: np.ndarray, size: int) -> list[list[int]]:
    """Put documents into few rows by best-fit decreasing.

    The longest document comes first, and each goes into the fullest row that has space for it. The
    number of rows is at most 11/9 of the smallest possible one, plus 4. The result depends on
    nothing but the arguments. Lengths [N] are from 1 to ``size``; rows have indices of documents.

    References:
      Johnson 1973, "Near-optimal bin packing algorithms". Ding et al. 2024, "Fewer truncations
      improve language modeling", packs text so.

    Example:
      >>> import numpy as np
      >>> pack(np.array([3, 6, 4, 2, 1]), 8)
      [[1, 3], [2, 0, 4]]
    """
    rows: list[list[int]] = []
    by_space: dict[int, list[int]] = {}  # rows that have exactly this space
    spaces: list[int] = []  # keys of by_space, in ascending order
    for i in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[i])
        found = bisect.bisect_left(spaces, length)
        if found == len(spaces):
            row, space = len(rows), size
            rows.append([])
        else:
            space = spaces[found]
            row = by_space[space].pop()
            if not by_space[space]:
                del by_space[space], spaces[found]
        rows[row].append(i)
        left = space - length
        if left:
            if left not in by_space:
                by_space[left] = []
                bisect.insort(spaces, left)
            by_space[left].append(row)
    return rows
