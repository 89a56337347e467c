"""A step's local sequences as fixed-size arrays, one slice per local device (the home layout)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float32, Int32

from experiments.data._rows import grid_positions
from experiments.data._types import StepData
from jaxdit.encoders import TOKEN_BYTES

# Segment id of a row that holds no token.
PADDING = 0


@dataclasses.dataclass(frozen=True, slots=True)
class HomeBatch:
    """Rows of the local devices in home layout; the leading axis is those devices, in the order asked for.

    Sequences of a device are contiguous and in global order, padding comes last. `segment_ids` are 0 for
    padding and s + 1 for global sequence s; a token's index counts inside its sequence's image or text part.

    Attributes:
      img: image rows, zeros where there is none.
      img_segment_ids, img_positions, img_token_index: sequence, (t, h, w) and index of each image row.
      img_loss_weight: weight of the row in the loss, 0 for padding and for unreadable samples.
      txt: byte tokens as int32 (d, cap, 8), or text features float32 (d, cap, c_txt).
      txt_segment_ids, txt_token_index: sequence and index of each text row.
      pooled: per-sequence text vectors (d, num_sequences, c_pool), row s for global sequence s, zeros unless
        the device is its home: a sum over devices gives the table. None where text is byte tokens.
      labels: per-sequence classes (d, num_sequences): label + 1, or -1 where it is dropped, in row s of the
        home of global sequence s, and 0 elsewhere: a sum over devices gives the table. None without labels.
    """

    img: Float32[np.ndarray, "d cap c_in"]
    img_segment_ids: Int32[np.ndarray, "d cap"]
    img_positions: Int32[np.ndarray, "d cap 3"]
    img_token_index: Int32[np.ndarray, "d cap"]
    img_loss_weight: Float32[np.ndarray, "d cap"]
    txt: np.ndarray
    txt_segment_ids: Int32[np.ndarray, "d txt_cap"]
    txt_token_index: Int32[np.ndarray, "d txt_cap"]
    pooled: Float32[np.ndarray, "d s c_pool"] | None = None
    labels: Int32[np.ndarray, "d s"] | None = None


def collate_home(
    data: StepData,
    *,
    image_capacity: int,
    text_capacity: int,
    devices: Sequence[int] | None = None,
    sequence_capacity: int | None = None,
) -> HomeBatch:
    """Lays the local sequences of a step out on their home devices.

    Args:
      data: a step, as a `StepReader` returns it.
      image_capacity, text_capacity: rows per device; `StepIndex.home_tokens` says how many are needed.
      devices: global ids of the devices to make arrays for; all of this process's by default.
      sequence_capacity: rows of `pooled` and `labels`; the step's number of sequences by default.

    Raises:
      ValueError: a device is not this process's, a capacity is too small, or a label is negative.
    """
    devices = data.local_devices if devices is None else tuple(devices)
    strangers = sorted(set(devices) - set(data.local_devices))
    if strangers:
        raise ValueError(
            f"collate_home: devices must be among those the reader serves; got {strangers}, "
            f"reader has {list(data.local_devices)}. Give the reader this process's devices."
        )
    c_in, text_shape, text_dtype, c_pool = _widths(data)
    num, image, text = len(devices), image_capacity, text_capacity
    table_rows = _table_rows(data, sequence_capacity)
    batch = HomeBatch(
        img=np.zeros((num, image, c_in), np.float32),
        img_segment_ids=np.full((num, image), PADDING, np.int32),
        img_positions=np.zeros((num, image, 3), np.int32),
        img_token_index=np.zeros((num, image), np.int32),
        img_loss_weight=np.zeros((num, image), np.float32),
        txt=np.zeros((num, text, *text_shape), text_dtype),
        txt_segment_ids=np.full((num, text), PADDING, np.int32),
        txt_token_index=np.zeros((num, text), np.int32),
        pooled=np.zeros((num, table_rows, c_pool), np.float32) if c_pool else None,
        labels=None if data.labels is None else np.zeros((num, table_rows), np.int32),
    )
    home = data.index.home(data.num_devices)
    for slot, device in enumerate(devices):
        _fill_device(batch, data, slot, np.flatnonzero(home[data.sequences] == device))
    return batch


def _widths(data: StepData) -> tuple[int, tuple[int, ...], type, int]:
    """Features of an image row, shape and type of a text row, features of a pooled vector."""
    if not data.channels:
        raise ValueError("collate_home: StepData.channels must be set; got 0. Use a StepReader.")
    if data.text_channels:
        return data.channels, (data.text_channels,), np.float32, data.pooled_channels
    return data.channels, (TOKEN_BYTES,), np.int32, data.pooled_channels


def _table_rows(data: StepData, capacity: int | None) -> int:
    rows = data.index.num_sequences if capacity is None else capacity
    if rows < data.index.num_sequences:
        raise ValueError(
            f"collate_home: sequence_capacity must hold the step's {data.index.num_sequences} sequences; got "
            f"sequence_capacity={rows}. Raise it."
        )
    return rows


def _fill_device(batch: HomeBatch, data: StepData, slot: int, mine: np.ndarray) -> None:
    image_end = text_end = 0
    for local in mine.tolist():
        sequence = int(data.sequences[local])
        rows, text = data.rows[local], data.text[local]
        image_stop, text_stop = image_end + len(rows), text_end + len(text)
        _check_fits("image", data, sequence, image_stop, batch.img.shape[1])
        _check_fits("text", data, sequence, text_stop, batch.txt.shape[1])
        img, txt = (slot, slice(image_end, image_stop)), (slot, slice(text_end, text_stop))
        batch.img[img] = rows
        batch.img_segment_ids[img] = sequence + 1
        t, h, w = data.index.grid[sequence].tolist()
        batch.img_positions[img] = grid_positions((t, h, w), len(rows))
        batch.img_token_index[img] = np.arange(len(rows))
        batch.img_loss_weight[img] = data.loss_weight[local]
        batch.txt[txt] = text
        batch.txt_segment_ids[txt] = sequence + 1
        batch.txt_token_index[txt] = np.arange(len(text))
        if batch.pooled is not None:
            batch.pooled[slot, sequence] = data.pooled[local]
        if batch.labels is not None:
            batch.labels[slot, sequence] = _label_code(data, local, sequence)
        image_end, text_end = image_stop, text_stop


def _label_code(data: StepData, local: int, sequence: int) -> int:
    """label + 1, or -1 where it is dropped: 0 is left for "not at home here", whatever the classes are."""
    assert data.labels is not None
    label = data.labels[local]
    if label < 0:
        raise ValueError(
            f"collate_home: labels must be at least 0; got label={label} for sequence {sequence} of step "
            f"{data.index.step}. Number the classes from 0, or give the source no labels."
        )
    return -1 if data.index.dropped[sequence] else label + 1


def _check_fits(kind: str, data: StepData, sequence: int, needed: int, capacity: int) -> None:
    if needed > capacity:
        home = data.index.home(data.num_devices)
        column = 0 if kind == "image" else 1
        total = data.index.home_tokens(data.num_devices)[home[sequence], column]
        raise ValueError(
            f"collate_home: {kind}_capacity must hold a device's tokens; got {kind}_capacity={capacity}, "
            f"sequence {sequence} of step {data.index.step} ends at row {needed}, its device needs {total}. "
            f"Raise {kind}_capacity."
        )
