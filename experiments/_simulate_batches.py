"""Batches to simulate: draws from data codes, or lengths from a file."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int

from experiments._program import UserError, checking
from experiments.data import MIXES, DataCode, SyntheticCodes, parse_codes

MOST_DEVICES = 4096
_FEW_DEVICES = 128
_MOST_SEQUENCES = 1 << 20
_MOST_TOKENS = 1 << 30  # of a sequence
_LARGEST_FILE = 1 << 26  # bytes


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """The sequences of a step.

    Attributes:
        lengths: tokens of each, text and image together.
        text_lengths: how many of them are text; zeros where text is not told apart.
        home: device on which each is loaded.
    """

    lengths: Int[np.ndarray, " n"]
    text_lengths: Int[np.ndarray, " n"]
    home: Int[np.ndarray, " n"]

    @property
    def num_tokens(self) -> int:
        """Tokens of all sequences."""
        return int(self.lengths.sum())


@dataclass(frozen=True, slots=True, eq=False)
class Workload:
    """What is simulated.

    Attributes:
        name: of a mix, or "codes" or "lengths".
        source: the codes, or the file's name.
        num_devices: devices of the batches.
        batches: at least one.
    """

    name: str
    source: str
    num_devices: int
    batches: Sequence[Batch]


def drawn_workload(
    mix: str, *, num_devices: int | None, steps: int | None, seed: int, text_apart: bool = False
) -> Workload:
    """Batches of a published mix or of data codes, every rank with draws of its own.

    Args:
        mix: a name of `MIXES`, or data codes.
        num_devices: a multiple of the codes' ranks, which then repeat, or a divisor, so that each device loads what
            several consecutive ranks do; None is one device a rank.
        steps: batches; None is 3, or 1 where there are so many ranks that batches hardly differ.
        seed: of the draws.
        text_apart: keep the text lengths, so that plans balance text and image tokens apart.

    Raises:
        UserError: for an unknown mix, malformed codes, devices that do not fit them, or too much of anything.
    """
    codes = MIXES.get(mix, mix)
    if mix not in MIXES and not (mix[:1] == "g" and any(c.isdigit() for c in mix)):
        raise UserError(
            f"--mix must be one of {', '.join(MIXES)}, all, or data codes such as 'g8b4i256f1s0,g4b1i512f85s1';"
            f" got {mix!r}."
        )
    with checking("--mix"):
        parts = parse_codes(codes)
    ranks = sum(part.num_ranks for part in parts)
    devices = ranks if num_devices is None else num_devices
    _check_devices(devices)
    if devices % ranks and ranks % devices:
        raise UserError(
            f"--devices must be a multiple or a divisor of the {ranks} ranks of --mix {mix}; got {devices}. Choose"
            " another number, or codes with other numbers of ranks (X in gXbYiZfWsV)."
        )
    if steps is None:
        steps = 3 if devices <= _FEW_DEVICES else 1
    _check_amounts(parts, copies=max(devices // ranks, 1), steps=steps)
    source = SyntheticCodes(codes, num_ranks=max(devices, ranks), num_steps=steps, seed=seed)
    ranks_per_device = max(ranks // devices, 1)
    batches = []
    for images, texts, home in zip(
        *(
            np.asarray(values, np.int64).reshape(steps, -1)
            for values in (source.image_lengths, source.text_lengths, source.home_ranks)
        ),
        strict=True,
    ):
        text = texts if text_apart else np.zeros_like(texts)
        batches.append(Batch(images + texts, text, home // ranks_per_device))
    return Workload(mix if mix in MIXES else "codes", codes, devices, batches)


def _check_devices(devices: int) -> None:
    if not 1 <= devices <= MOST_DEVICES:
        raise UserError(f"--devices must be in 1 .. {MOST_DEVICES}; got {devices}.")


def _check_amounts(parts: Sequence[DataCode], *, copies: int, steps: int) -> None:
    sequences = copies * sum(part.num_ranks * part.samples for part in parts)
    if sequences * steps > _MOST_SEQUENCES:
        raise UserError(
            f"--mix: at most {_MOST_SEQUENCES:,} sequences over all steps; got {sequences:,} in each of {steps}. Lower"
            " --steps, or Y, the samples of a rank."
        )
    longest = max(math.prod(part.grid()) for part in parts)
    if longest > _MOST_TOKENS:
        raise UserError(
            f"--mix: at most {_MOST_TOKENS} tokens a sample; got {longest}. Lower Z, pixels, or W, frames."
        )


def read_lengths(path: Path, *, num_devices: int | None) -> Workload:
    """A batch from a file: a line for every device, its lengths separated by spaces; or a JSON list of lists.

    An empty line is a device that loads nothing; empty lines at the end do not count (JSON has `[]` for those).

    Args:
        path: the file.
        num_devices: of the run; None is one a line.

    Raises:
        UserError: for a file that cannot be read, lengths that are not integers of at least 0, no tokens at all, or
            another number of lines than devices.
    """
    name = f"--lengths {path}"
    text = _read(path, name)
    rows = _json_rows(text, name) if text.lstrip().startswith("[") else _text_rows(text, name)
    devices = len(rows) if num_devices is None else num_devices
    if not any(map(sum, rows)):
        raise UserError(
            f"{name}: at least one token; got none in {len(rows)} lines. Write lengths into the file."
        )
    _check_devices(devices)
    if len(rows) != devices:
        few = "leave --devices out or add lines" if len(rows) < devices else "raise --devices or join lines"
        raise UserError(
            f"{name}: one line for each of --devices {devices}; got {len(rows)} lines. Either {few}; a device that"
            " loads nothing is an empty line, or [] in JSON."
        )
    lengths = np.array([length for row in rows for length in row], np.int64)
    if len(lengths) > _MOST_SEQUENCES:
        raise UserError(
            f"{name}: at most {_MOST_SEQUENCES} sequences; got {len(lengths)}. Give a smaller batch."
        )
    home = np.repeat(np.arange(devices), [len(row) for row in rows])
    return Workload("lengths", path.name, devices, [Batch(lengths, np.zeros_like(lengths), home)])


def _read(path: Path, name: str) -> str:
    try:
        if path.is_file() and path.stat().st_size > _LARGEST_FILE:
            raise UserError(
                f"{name}: at most {_LARGEST_FILE >> 20} MiB; got {path.stat().st_size >> 20} MiB."
            )
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise UserError(f"{name}: cannot be read: {error.strerror}. Give a file of lengths.") from error
    except UnicodeDecodeError as error:
        raise UserError(
            f"{name}: a text file in UTF-8; it is not. Write lengths separated by spaces."
        ) from error


def _text_rows(text: str, name: str) -> list[list[int]]:
    lines = text.rstrip().splitlines()
    return [
        [_length(word, f"{name}, line {number}") for word in line.split()]
        for number, line in enumerate(lines, start=1)
    ]


def _json_rows(text: str, name: str) -> list[list[int]]:
    try:
        rows = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{name}: a JSON list of lists of lengths; {error}. Mend the JSON.") from error
    if not isinstance(rows, list) or not all(isinstance(row, list) for row in rows):
        raise UserError(
            f"{name}: JSON holds a list of lists, one for each device; got another shape. Write [[1024, 77], [4096]]."
        )
    return [[_length(value, f"{name}, list {i}") for value in row] for i, row in enumerate(rows, start=1)]


def _length(value: Any, place: str) -> int:
    """A length from a word of a text or a value of JSON."""
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    if isinstance(value, str):
        digits = value.removeprefix("-")
        is_whole = digits.isascii() and digits.isdigit() and len(digits) < 20
    if not is_whole or not 0 <= int(value) <= _MOST_TOKENS:
        raise UserError(
            f"{place}: lengths are integers in 0 .. {_MOST_TOKENS}; got {str(value)[:40]!r}. Write"
            " numbers of tokens, separated by spaces."
        )
    return int(value)
