"""Rows of single sequences as one array in home layout, and back; on the host."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from solver._capacity import StepCapacity
from solver._check import instance, integers
from solver._layout import StepLayout
from solver._routes import Intervals


def pack_home(
    values: Sequence[Any],
    layout: StepLayout,
    capacity: StepCapacity,
    *,
    text: bool = False,
    devices: Sequence[int] | None = None,
) -> NDArray:
    """Lay rows of sequences out in home layout, where `layout.image_route` (or `text_route`) finds them.

    Args:
        values: for each sequence an array of its image tokens (n, ...), all of one dtype and shape of a row. Those of
            sequences at home on other devices are not read and may be None.
        layout: the step's layouts.
        capacity: sizes that the program was compiled for.
        text: whether the values are of text tokens instead.
        devices: devices to lay out, in the order of the mesh (those of this process); all by default.

    Returns:
        (devices, rows, ...): sequences of a device one after another by number, zeros at the end. `rows` is
        `capacity.home_image` (or `home_text`).

    Raises:
        TypeError: a layout or a capacity of another type, or values that are no arrays.
        ValueError: a device given twice; a capacity for other devices, or with too few rows; another number of arrays
            than of sequences, or of rows than of tokens;
            rows of several shapes or dtypes; or no array to take them from.

    Example:
        >>> from solver import balance, capacity_for, step_needs
        >>> plan = balance([2, 1, 3], [0, 1, 0], num_devices=2, bags="g2n1", num_heads=1)
        >>> layout = StepLayout(plan, block=8)
        >>> capacity = capacity_for([step_needs(layout)])
        >>> rows = pack_home([[1, 2], [3], [4, 5, 6]], layout, capacity)
        >>> rows.tolist()
        [[1, 2, 4, 5, 6, 0], [3, 0, 0, 0, 0, 0]]
        >>> [sequence.tolist() for sequence in unpack_home(rows, layout)]
        [[1, 2], [3], [4, 5, 6]]
    """
    instance("pack_home", "layout", layout, StepLayout, advice="Make one with StepLayout(plan, block).")
    instance("pack_home", "capacity", capacity, StepCapacity, advice="Make one with capacity_for.")
    if capacity.num_devices != layout.plan.num_devices:
        raise ValueError(
            f"pack_home: a capacity for the plan's devices; got {capacity.num_devices} and a plan for"
            f" {layout.plan.num_devices}. Make it with capacity_for(step_needs(layout))."
        )
    wanted = _wanted("pack_home", layout, devices)
    held, lengths = _stream(layout, text)
    if not isinstance(values, Sequence | np.ndarray):
        raise TypeError(
            f"pack_home: values are a list of arrays, one for each sequence; got {type(values).__name__}."
        )
    if len(values) != len(lengths):
        raise ValueError(
            f"pack_home: one array for each sequence; got {len(values)} for {len(lengths)} sequences."
            " Give None for those of other processes."
        )
    arrays = {
        i: _array("pack_home", f"sequence {i}", value) for i, value in enumerate(values) if value is not None
    }
    if not arrays:
        raise ValueError(
            "pack_home: one array at least, for the shape and dtype of a row; got none."
            " Give an empty one for any sequence of another process."
        )
    like = next(iter(arrays.values()))
    size = capacity.home_text if text else capacity.home_image
    out = np.zeros((len(wanted), size, *like.shape[1:]), like.dtype)
    local = np.isin(layout.plan.home, wanted)
    for sequence in np.flatnonzero(local).tolist():
        _check_rows(sequence, arrays.get(sequence), int(lengths[sequence]), like)
    for slot, sequence, rows in _places(held, wanted):
        if rows.stop > size:
            raise ValueError(
                f"pack_home: a device's sequences fit the capacity; got {size} rows and sequence {sequence} of"
                f" {lengths[sequence]} tokens ends at row {rows.stop} of device {wanted[slot]}."
                " Use capacity.grown(step_needs(layout))."
            )
        out[slot, rows] = arrays[sequence]
    return out


def unpack_home(
    rows: Any, layout: StepLayout, *, text: bool = False, devices: Sequence[int] | None = None
) -> list[NDArray | None]:
    """The rows of every sequence from an array in home layout; undoes `pack_home`.

    Args:
        rows: (devices, rows, ...) in home layout.
        layout: the step's layouts.
        text: whether the rows are of text tokens instead of image tokens.
        devices: devices that the rows are of; all by default.

    Returns:
        For each sequence a view of its rows (n, ...), None for those at home on other devices.

    Raises:
        TypeError: a layout of another type, or rows that are no array.
        ValueError: a device given twice; rows of another number of devices, or fewer than the layout has.
    """
    instance("unpack_home", "layout", layout, StepLayout, advice="Make one with StepLayout(plan, block).")
    wanted = _wanted("unpack_home", layout, devices)
    held, _ = _stream(layout, text)
    rows = _array("unpack_home", "rows", rows)
    places = _places(held, wanted)
    need = max((place.stop for _, _, place in places), default=0)
    if rows.ndim < 2 or len(rows) != len(wanted) or rows.shape[1] < need:
        raise ValueError(
            f"unpack_home: rows are (devices, rows, ...) of {len(wanted)} devices and at least {need} rows; got shape"
            f" {rows.shape}. Give what came out in home layout."
        )
    empty = rows[:1, :0].reshape(0, *rows.shape[2:])
    found = [empty if home in wanted else None for home in layout.plan.home.tolist()]
    for slot, sequence, place in places:
        found[sequence] = rows[slot, place]
    return found


def _stream(layout: StepLayout, text: bool) -> tuple[Intervals, NDArray[np.int64]]:
    if text:
        return layout.home_text, layout.text_lengths
    return layout.home_image, layout.image_lengths


def _wanted(caller: str, layout: StepLayout, devices: Sequence[int] | None) -> NDArray[np.int64]:
    num_devices = layout.plan.num_devices
    if devices is None:
        return np.arange(num_devices)
    advice = f"The plan has {num_devices}, numbered from 0."
    wanted = integers(caller, "devices", devices, most=num_devices - 1, each="device", advice=advice)
    if len(set(wanted.tolist())) < len(wanted):
        raise ValueError(
            f"{caller}: devices, each once; got {len(wanted)}, {len(set(wanted.tolist()))} of them different."
            f" {advice}"
        )
    return wanted


def _places(held: Intervals, wanted: NDArray[np.int64]) -> list[tuple[int, int, slice]]:
    """(place in `wanted`, sequence, rows) of every sequence with tokens on a wanted device."""
    slot_of = {device: slot for slot, device in enumerate(wanted.tolist())}
    columns = (held.device, held.sequence, held.row, held.row + held.length)
    return [
        (slot_of[device], sequence, slice(start, stop))
        for device, sequence, start, stop in zip(*(column.tolist() for column in columns), strict=True)
        if device in slot_of
    ]


def _array(caller: str, name: str, value: Any) -> NDArray:
    try:
        array = np.asarray(value)
    except ValueError as error:  # lists of several lengths
        raise ValueError(f"{caller}: rows of one shape; got several in {name}. Pad or cast them.") from error
    if not array.ndim or array.dtype == object:
        raise TypeError(f"{caller}: {name} is an array of rows; got {type(value).__name__}.")
    return array


def _check_rows(sequence: int, array: NDArray | None, length: int, like: NDArray) -> None:
    if array is None or len(array) != length:
        found = "None" if array is None else f"{len(array)} rows"
        raise ValueError(
            f"pack_home: a row for each token of a sequence at home here; got {found} for sequence {sequence} of"
            f" {length} tokens. Lengths are those given to balance, less the other stream's."
        )
    if array.shape[1:] != like.shape[1:] or array.dtype != like.dtype:
        raise ValueError(
            f"pack_home: rows of one shape and dtype; got {array.dtype}{list(array.shape[1:])} for sequence"
            f" {sequence} and {like.dtype}{list(like.shape[1:])} for another. Cast them."
        )
