"""What all sources made of a table of samples share: names, sizes and captions known before any decoding."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float32, Int, Int32, UInt8

from experiments.data._hash import digest_of
from jaxdit.encoders import byte_tokens

_logger = logging.getLogger(__name__)


def encode_captions(
    captions: Sequence[str], *, max_text: int, name: str
) -> list[UInt8[np.ndarray, "n_txt 8"]]:
    """The byte tokens of captions, at most `max_text` of each; what is cut is logged."""
    encoded = [byte_tokens(caption) for caption in captions]
    cut = sum(len(tokens) > max_text for tokens in encoded)
    if cut:
        _logger.warning(
            "%s: %d of %d captions are cut to max_text=%d tokens", name, cut, len(encoded), max_text
        )
    return [tokens[:max_text] for tokens in encoded]


@dataclasses.dataclass(frozen=True, slots=True)
class SampleTable:
    """Samples of a source.

    Attributes:
      names: unique, stable names.
      split_names: samples that share one are kept on one side of a split.
      grids: patches (t, h, w).
      captions: byte tokens.
      labels: classes, or None.
    """

    names: Sequence[str]
    split_names: Sequence[str]
    grids: Int32[np.ndarray, "n 3"]
    captions: Sequence[UInt8[np.ndarray, "n_txt 8"]]
    labels: Int[np.ndarray, " n"] | None = None


class TableSource:
    """Base of sources with byte captions: everything in `Source` except `read`.

    Args:
      name: short name.
      patch: pixels per patch side.
      table: its samples.
    """

    text_channels = 0
    pooled_channels = 0
    dropped_text_length = 0

    def __init__(self, name: str, *, patch: int, table: SampleTable):
        self.name = name
        self.patch = patch
        self.channels = patch * patch * 3
        self.grids = np.asarray(table.grids, np.int32).reshape(-1, 3)
        self.image_lengths = self.grids.prod(axis=1, dtype=np.int64).astype(np.int32)
        self.text_lengths = np.asarray([len(c) for c in table.captions], np.int32)
        self.labels = None if table.labels is None else np.asarray(table.labels, np.int32)
        self._table = table
        labels = "" if self.labels is None else self.labels.tobytes()
        sizes = self.grids.tobytes()
        captions = (len(c).to_bytes(4, "little") + c.tobytes() for c in table.captions)
        self.digest = digest_of([name, str(patch), sizes, labels, *table.names, *captions])

    def __len__(self) -> int:
        """Number of samples."""
        return len(self._table.names)

    def sample_name(self, index: int) -> str:
        """The name of a sample."""
        return self._table.names[index]

    def split_name(self, index: int) -> str:
        """What a split keeps together."""
        return self._table.split_names[index]

    def grid(self, index: int) -> tuple[int, int, int]:
        """Patches (t, h, w) of a sample."""
        t, h, w = self.grids[index].tolist()
        return t, h, w

    def text(self, index: int) -> UInt8[np.ndarray, "n_txt 8"]:
        """Caption as byte tokens."""
        return self._table.captions[index]

    def pooled(self, index: int) -> Float32[np.ndarray, " c_pool"]:
        """Byte captions have no precomputed vector: shape (0,)."""
        del index
        return np.zeros(0, np.float32)
