"""Canvases: the few sizes that an encoder of pictures is compiled for, known before the first one is encoded."""

import collections
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int64

# Edges of canvases are multiples of this many latent pixels; of more, where there would be too many sizes to compare.
_STEP = 8
_MOST_COMPARED = 256


@dataclass(frozen=True, slots=True)
class Canvases:
    """A canvas for every size of picture; a function of the sizes alone, so that a picture always has the same.

    Attributes:
        of_size: (height, width) of the canvas of a picture's (height, width), in latent pixels.
        counts: pictures of each canvas.
        group_pixels: latent pixels that are encoded together, if several pictures fit into them.
    """

    of_size: dict[tuple[int, int], tuple[int, int]]
    counts: dict[tuple[int, int], int]
    group_pixels: int

    @classmethod
    def plan(cls, sizes: Int64[np.ndarray, "n 2"], *, most: int, group_pixels: int) -> "Canvases":
        """The canvases that waste least area on given pictures: two are merged until there are few enough.

        Args:
            sizes: height and width of every picture, in latent pixels, at least one.
            most: of canvases.
            group_pixels: see above.
        """
        step = _STEP
        while len(canvases := np.unique(-(-sizes // step) * step, axis=0)) > _MOST_COMPARED:
            step *= 2
        rounded = -(-sizes // step) * step
        counts = np.array([(rounded == canvas).all(1).sum() for canvas in canvases])
        while len(canvases) > most:
            canvases, counts = _merged(canvases, counts)
        areas = canvases.prod(1)
        of_size, of_canvas = dict[tuple[int, int], tuple[int, int]](), collections.Counter[tuple[int, int]]()
        distinct, times = np.unique(sizes, axis=0, return_counts=True)
        for (height, width), count in zip(distinct.tolist(), times.tolist(), strict=True):
            fits = (canvases >= (height, width)).all(1)
            best = int(np.argmin(np.where(fits, areas, np.iinfo(np.int64).max)))
            canvas = int(canvases[best, 0]), int(canvases[best, 1])
            of_size[height, width] = canvas
            of_canvas[canvas] += count
        return cls(of_size, dict(of_canvas), group_pixels)

    def group(self, canvas: tuple[int, int], num_devices: int) -> int:
        """Pictures of a canvas that each of so many devices encodes together; no more than there are."""
        most = max(1, self.group_pixels // (canvas[0] * canvas[1]))
        return min(most, -(-self.counts[canvas] // num_devices))

    def most_pixels(self, num_devices: int) -> int:
        """The most latent pixels that each of so many devices encodes together."""
        return max(self.group(canvas, num_devices) * canvas[0] * canvas[1] for canvas in self.counts)


def _merged(
    canvases: Int64[np.ndarray, "m 2"], counts: Int64[np.ndarray, " m"]
) -> tuple[Int64[np.ndarray, "k 2"], Int64[np.ndarray, " k"]]:
    """One canvas less: of the two whose pictures waste least on one that holds both."""
    areas = canvases.prod(1)
    both = np.maximum(canvases[:, None], canvases[None])
    extra = both.prod(2) * (counts[:, None] + counts[None])
    extra = extra - (areas * counts)[:, None] - (areas * counts)[None]
    extra[np.tril_indices(len(canvases))] = np.iinfo(np.int64).max
    first, second = np.unravel_index(int(np.argmin(extra)), extra.shape)
    canvases, counts = canvases.copy(), counts.copy()
    canvases[first], counts[first] = both[first, second], counts[first] + counts[second]
    keep = np.arange(len(canvases)) != second
    return canvases[keep], counts[keep]
