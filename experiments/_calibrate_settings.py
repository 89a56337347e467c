"""What a calibration measures: from flags, or from the model of a training config, with defaults by platform."""

import argparse
import dataclasses
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from experiments._calibration import LARGEST_BLOCK, LONGEST, BlockShape
from experiments._program import UserError

_FEWEST_LENGTHS = 3

# FLUX.1's blocks, one of each kind, on GPUs; on CPU what ends within minutes.
DEFAULT_SHAPES = {
    "gpu": BlockShape(3072, 24, "bfloat16", block=128, text=512, double_blocks=1, single_blocks=1),
    "cpu": BlockShape(256, 4, "float32", block=64, text=16, double_blocks=0, single_blocks=1),
}
DEFAULT_LENGTHS = {
    # Ten from 448 to 65,536, each so many times the one before.
    "gpu": tuple(int(x) for x in np.rint(np.geomspace(448, 65536, 10))),
    "cpu": (64, 128, 192, 256, 384, 512),
}


@dataclass(frozen=True, slots=True)
class Requested:
    """What was asked for; None stands for the platform's default.

    Attributes:
        shape: fields of `BlockShape` that were given.
        lengths: tokens of a sequence, sorted.
        devices: number of devices.
        repeats: timed rounds.
        batches: random batches to check; None for no check.
    """

    shape: dict[str, Any]
    lengths: tuple[int, ...] | None
    devices: int | None
    repeats: int
    batches: int | None

    def check(self) -> None:
        """Refuse what nothing can measure.

        Raises:
            UserError: naming the rule.
        """
        if self.devices is not None and self.devices < 1:
            raise UserError(f"--devices must be at least 1; got {self.devices}.")
        if self.repeats < 1:
            raise UserError(f"--repeats must be at least 1; got {self.repeats}.")
        if self.batches is not None and self.batches < 1:
            raise UserError(f"--batches must be at least 1; got {self.batches}. Leave --check out for none.")

    def shape_on(self, platform: str) -> BlockShape:
        """The blocks to measure.

        Raises:
            UserError: for sizes that no model has.
        """
        shape = dataclasses.replace(DEFAULT_SHAPES["cpu" if platform == "cpu" else "gpu"], **self.shape)
        if shape.width < 1 or shape.num_heads < 1 or shape.width % (2 * shape.num_heads):
            raise UserError(
                "--width must be an even multiple of --num-heads, both positive; got"
                f" width={shape.width}, num_heads={shape.num_heads}."
            )
        if not 8 <= shape.block <= LARGEST_BLOCK or shape.block % 8:
            raise UserError(f"--block must be a multiple of 8 in [8, {LARGEST_BLOCK}]; got {shape.block}.")
        if shape.text < 0:
            raise UserError(f"--text must not be negative; got {shape.text}.")
        return shape

    def lengths_on(self, platform: str) -> tuple[int, ...]:
        """The lengths to measure."""
        return self.lengths or DEFAULT_LENGTHS["cpu" if platform == "cpu" else "gpu"]


def asked_shape(args: argparse.Namespace) -> dict[str, Any]:
    """Fields of `BlockShape` from flags, before those from the config's model.

    Raises:
        UserError: for a config that cannot be read, or bindings without one.
    """
    asked = {
        name: getattr(args, name)
        for name in ("width", "num_heads", "dtype", "block", "text")
        if getattr(args, name) is not None
    }
    if args.config is None:
        if args.bindings:
            raise UserError("--set changes the config of --config, which is missing.")
        return asked
    from experiments._config import load_config
    from experiments._workdir import checked_settings

    load_config(args.config, args.bindings)
    settings = checked_settings(args.bindings)
    model = {
        "width": settings.model.width,
        "num_heads": settings.model.num_heads,
        "dtype": jnp.dtype(settings.model.dtype).name,
        "block": settings.block,
    }
    return {**model, **asked}


def parse_lengths(text: str) -> tuple[int, ...]:
    """Sorted lengths from "64,128,256".

    Raises:
        UserError: for another form, too few lengths, or one that no sequence has.
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() for part in parts):
        raise UserError(f"--lengths are whole numbers between commas, such as 64,128,256; got {text!r:.100}.")
    lengths = sorted({int(part) for part in parts})
    if len(lengths) < _FEWEST_LENGTHS or not 2 <= lengths[0] <= lengths[-1] <= LONGEST:
        raise UserError(
            f"--lengths are at least {_FEWEST_LENGTHS} different ones in [2, {LONGEST}]; got {text!r:.100}."
        )
    return tuple(lengths)
