"""A calibration file: what a transformer block's time was on some devices, and what the planner takes from it."""

import json
import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from experiments._calibrate_fit import Quality, TermsFit, TwoColumnFit
from experiments._program import UserError, checking
from solver import CostModel, Links

_LOG = logging.getLogger(__name__)

# What a FLOP of attention costs over one of a linear layer, published for H100, where nothing was measured.
DEFAULT_GAMMA = 0.4
FORMAT = "jaxdit calibration"
VERSION = 1
_LARGEST = 1e6  # seconds, and all else: far beyond any machine's
LONGEST = 1 << 20  # tokens of a sequence that is measured
LARGEST_BLOCK = 4096
_REMEDY = "Write one with `python -m experiments.calibrate`."


@dataclass(frozen=True, slots=True)
class BlockShape:
    """The transformer blocks that were measured.

    Attributes:
        width, num_heads: of the model.
        dtype: of matrix products, "float32" or "bfloat16".
        block: attention block size in rows.
        text: text tokens of a sequence, at most half of it.
        double_blocks, single_blocks: blocks run in one program; times are means over both kinds.
    """

    width: int
    num_heads: int
    dtype: str
    block: int
    text: int
    double_blocks: int = 1
    single_blocks: int = 1

    @property
    def num_blocks(self) -> int:
        """Blocks of one program."""
        return self.double_blocks + self.single_blocks

    @property
    def head_dim(self) -> int:
        """Channels of a head."""
        return self.width // self.num_heads

    @property
    def element_bytes(self) -> int:
        """Bytes of an element of q, k, v and o."""
        return {"float32": 4, "bfloat16": 2}[self.dtype]


@dataclass(frozen=True, slots=True)
class Calibration:
    """Contents of a calibration file.

    Attributes:
        device_kind, num_devices: what it was measured on.
        shape: of the blocks.
        lengths: tokens of the single sequences that were measured.
        seconds: of a block on each, forward and backward.
        two_columns, terms: the fits.
        no_exchange: why `terms` has no exchange; None where it has one.
        record: everything else of the file: measurements, date, versions, load average.
    """

    device_kind: str
    num_devices: int
    shape: BlockShape
    lengths: tuple[int, ...]
    seconds: tuple[float, ...]
    two_columns: TwoColumnFit
    terms: TermsFit
    no_exchange: str | None
    record: Mapping[str, Any]

    def cost_model(self, width: int) -> CostModel:
        """The cost model of a model of this width: gamma and seconds per FLOP of the terms, in which launches do not
        count as work."""
        return CostModel(width, self.terms.gamma, self.terms.linear_s_per_flop)

    def links(self, default: Links) -> Links:
        """Measured speeds; those that were not measured are the default's, and none across machines beats inside."""
        speeds = replace(default, flops_per_s=1 / self.terms.linear_s_per_flop)
        if self.terms.exchange_s_per_byte:
            inside = 1 / self.terms.exchange_s_per_byte
            speeds = replace(
                speeds,
                inside_bytes_per_s=inside,
                across_bytes_per_s=min(inside, default.across_bytes_per_s),
                element_bytes=self.shape.element_bytes,
            )
        return speeds

    def warn_of_differences(self, *, device_kind: str, width: int, num_heads: int, dtype: str) -> None:
        """Log what a run has otherwise than the measurement: its plans may be worse than they could be, never wrong."""
        for name, measured, own in (
            ("devices", self.device_kind, device_kind),
            ("width", self.shape.width, width),
            ("heads", self.shape.num_heads, num_heads),
            ("dtype", self.shape.dtype, dtype),
        ):
            if measured != own:
                _LOG.warning(
                    "train.calibration was measured with other %s: %s, and the run has %s. Plans may balance worse;"
                    " calibrate again for this run",
                    name,
                    measured,
                    own,
                )

    def as_json(self) -> dict[str, Any]:
        """The file's contents."""
        fits = {
            "two_columns": asdict(self.two_columns),
            "terms": {**asdict(self.terms), "gamma": self.terms.gamma, "no_exchange": self.no_exchange},
        }
        return {
            "format": FORMAT,
            "version": VERSION,
            "device_kind": self.device_kind,
            "num_devices": self.num_devices,
            "shape": asdict(self.shape),
            "lengths": list(self.lengths),
            "seconds": list(self.seconds),
            "fits": fits,
            **self.record,
        }


def load_calibration(path: str | Path) -> Calibration:
    """Read and check a calibration file.

    Args:
        path: of the file; relative to the current folder.

    Raises:
        UserError: if it cannot be read, is no calibration, is of another version, or a key is missing or out of range.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise UserError(f"calibration {path} cannot be read: {reason}. {_REMEDY}") from error
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"calibration {path} is not JSON: {error}. {_REMEDY}") from error
    if not isinstance(value, dict) or value.get("format") != FORMAT:
        raise UserError(f"{path} is not a calibration: it has no format {FORMAT!r}. {_REMEDY}")
    if type(value.get("version")) is not int or value["version"] != VERSION:
        raise UserError(
            f"calibration {path} must be of version {VERSION}; got {value.get('version')!r:.40}. {_REMEDY}"
        )
    with checking(f"calibration {path}"):
        return _parsed(value)


def _parsed(value: dict[str, Any]) -> Calibration:
    shape, fits = _part(value, "shape"), _part(value, "fits")
    two, terms = _part(fits, "two_columns", "fits."), _part(fits, "terms", "fits.")
    exchange = _entry(terms, "exchange_s_per_byte", "fits.terms.")
    known = {"format", "version", "device_kind", "num_devices", "shape", "lengths", "seconds", "fits"}
    lengths, seconds = _list(value, "lengths"), _list(value, "seconds")
    if len(lengths) != len(seconds) or not lengths:
        raise ValueError(
            f"there must be one of seconds for each of lengths; got {len(seconds)} and {len(lengths)}. {_REMEDY}"
        )
    found = Calibration(
        device_kind=_text(value, "device_kind"),
        num_devices=_count(value, "num_devices"),
        shape=BlockShape(
            **{
                name: _count(shape, name, "shape.", least=0 if name in _MAY_BE_ZERO else 1)
                for name in BlockShape.__slots__
                if name != "dtype"
            },
            dtype=_text(shape, "dtype", "shape."),
        ),
        lengths=tuple(_count({"entry": x}, "entry", "lengths.") for x in lengths),
        seconds=tuple(_number({"entry": x}, "entry", "seconds.", least=1e-12) for x in seconds),
        two_columns=TwoColumnFit(
            token_s=_number(two, "token_s", "fits.two_columns."),
            pair_s=_number(two, "pair_s", "fits.two_columns."),
            gamma=_number(two, "gamma", "fits.two_columns."),
            seconds_per_flop=_number(two, "seconds_per_flop", "fits.two_columns."),
            quality=_quality(two, "fits.two_columns."),
        ),
        terms=TermsFit(
            launch_s=_number(terms, "launch_s", "fits.terms."),
            linear_s_per_flop=_number(terms, "linear_s_per_flop", "fits.terms.", least=1e-24),
            attention_s_per_flop=_number(terms, "attention_s_per_flop", "fits.terms."),
            exchange_s_per_byte=None
            if exchange is None
            else _number(terms, "exchange_s_per_byte", "fits.terms.", least=1e-24),
            quality=_quality(terms, "fits.terms."),
        ),
        no_exchange=_text(terms, "no_exchange", "fits.terms.") if exchange is None else None,
        record={name: entry for name, entry in value.items() if name not in known},
    )
    if found.shape.block % 8 or not 8 <= found.shape.block <= LARGEST_BLOCK:
        raise ValueError(
            f"shape.block must be a multiple of 8 in 8 .. {LARGEST_BLOCK}; got {found.shape.block}. {_REMEDY}"
        )
    if found.shape.dtype not in ("float32", "bfloat16"):
        raise ValueError(f"shape.dtype must be float32 or bfloat16; got {found.shape.dtype!r:.40}.")
    found.cost_model(found.shape.width)  # refuses a width or gamma that no model has
    return found


_MAY_BE_ZERO = ("text", "double_blocks", "single_blocks")


def _entry(value: Mapping[str, Any], name: str, place: str) -> Any:
    if name not in value:
        raise ValueError(f"{place}{name} must be there; got none. {_REMEDY}")
    return value[name]


def _part(value: Mapping[str, Any], name: str, place: str = "") -> dict[str, Any]:
    part = _entry(value, name, place)
    if not isinstance(part, dict):
        raise ValueError(f"{place}{name} must be an object; got {type(part).__name__}. {_REMEDY}")
    return part


def _list(value: Mapping[str, Any], name: str) -> list[Any]:
    entries = _entry(value, name, "")
    if not isinstance(entries, list):
        raise ValueError(f"{name} must be a list; got {type(entries).__name__}. {_REMEDY}")
    return entries


def _text(value: Mapping[str, Any], name: str, place: str = "") -> str:
    text = _entry(value, name, place)
    if not isinstance(text, str):
        raise ValueError(f"{place}{name} must be a text; got {type(text).__name__}. {_REMEDY}")
    return text


def _count(
    value: Mapping[str, Any], name: str, place: str = "", *, least: int = 1, most: int = LONGEST
) -> int:
    count = _entry(value, name, place)
    if not isinstance(count, int) or isinstance(count, bool) or not least <= count <= most:
        raise ValueError(
            f"{place}{name} must be an integer in {least} .. {most}; got {count!r:.40}. {_REMEDY}"
        )
    return count


def _number(value: Mapping[str, Any], name: str, place: str, *, least: float = 0.0) -> float:
    number = _entry(value, name, place)
    right = isinstance(number, int | float) and not isinstance(number, bool)
    if not right or not least <= number <= _LARGEST:
        raise ValueError(
            f"{place}{name} must be a number in {least:g} .. {_LARGEST:g}; got {number!r:.40}. {_REMEDY}"
        )
    return float(number)


def _quality(fit: Mapping[str, Any], place: str) -> Quality:
    part, place = _part(fit, "quality", place), f"{place}quality."
    r_squared = _entry(part, "r_squared", place)
    is_number = isinstance(r_squared, int | float) and not isinstance(r_squared, bool)
    if not is_number or not -_LARGEST <= r_squared <= 1:
        raise ValueError(f"{place}r_squared must be a number of at most 1; got {r_squared!r:.40}. {_REMEDY}")
    return Quality(
        float(r_squared),
        _number(part, "mean_relative", place),
        _number(part, "largest_relative", place),
    )
