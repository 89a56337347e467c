"""Data of mixed sizes: sources, the step sampler, readers and the loader.

A `Source` is a random-access set of captioned sequences whose sizes are known up front; a `StepSampler` says
which of them form step t; a `StepReader` reads those at home on this process's devices; `make_loader` reads
ahead; `collate_home` makes fixed-size arrays. The step is the only position there is.
"""

from experiments.data._bad import BadLimit as BadLimit
from experiments.data._bad import BadTally as BadTally
from experiments.data._cache_files import CACHE_DTYPES as CACHE_DTYPES
from experiments.data._cache_files import CACHE_FILE as CACHE_FILE
from experiments.data._cache_files import EMPTY_FILE as EMPTY_FILE
from experiments.data._cache_files import CachedSample as CachedSample
from experiments.data._cache_files import CacheInfo as CacheInfo
from experiments.data._cache_files import CacheLayout as CacheLayout
from experiments.data._cache_files import is_finished as is_finished
from experiments.data._cache_files import read_index as read_index
from experiments.data._cache_files import read_info as read_info
from experiments.data._cache_files import replace_file as replace_file
from experiments.data._cache_files import verified as verified
from experiments.data._cache_files import write_info as write_info
from experiments.data._cache_files import write_shard as write_shard
from experiments.data._captions import any_captions as any_captions
from experiments.data._captions import metadata_captions as metadata_captions
from experiments.data._captions import sidecar_captions as sidecar_captions
from experiments.data._collate import HomeBatch as HomeBatch
from experiments.data._collate import collate_home as collate_home
from experiments.data._encoded import EncodedFolder as EncodedFolder
from experiments.data._encoded import EncodedRules as EncodedRules
from experiments.data._encoded_cache import EncodedCache as EncodedCache
from experiments.data._encoded_cache import is_cache as is_cache
from experiments.data._folder import ImageFolder as ImageFolder
from experiments.data._hash import digest_of as digest_of
from experiments.data._latents import drawn_latents as drawn_latents
from experiments.data._latents import rows_of_latents as rows_of_latents
from experiments.data._loader import StepLoader as StepLoader
from experiments.data._loader import make_loader as make_loader
from experiments.data._media import MediaRules as MediaRules
from experiments.data._media import MediaSource as MediaSource
from experiments.data._quickstart import DIGIT_SIZES as DIGIT_SIZES
from experiments.data._quickstart import DIGIT_WORDS as DIGIT_WORDS
from experiments.data._quickstart import LARGE_DIGIT_SIZES as LARGE_DIGIT_SIZES
from experiments.data._quickstart import SMALL_DIGIT_SIZES as SMALL_DIGIT_SIZES
from experiments.data._quickstart import ClipSource as ClipSource
from experiments.data._quickstart import Digits as Digits
from experiments.data._quickstart import DigitSource as DigitSource
from experiments.data._quickstart import PhotoSource as PhotoSource
from experiments.data._quickstart import draw_digit as draw_digit
from experiments.data._quickstart import handwritten_digits as handwritten_digits
from experiments.data._quickstart import quickstart_sources as quickstart_sources
from experiments.data._reader import Sampler as Sampler
from experiments.data._reader import StepReader as StepReader
from experiments.data._rows import frames_from_rows as frames_from_rows
from experiments.data._rows import grid_positions as grid_positions
from experiments.data._rows import rows_from_frames as rows_from_frames
from experiments.data._rows import snap_grid as snap_grid
from experiments.data._sampler import StepSampler as StepSampler
from experiments.data._shards import WebDatasetShards as WebDatasetShards
from experiments.data._synthetic import MIXES as MIXES
from experiments.data._synthetic import DataCode as DataCode
from experiments.data._synthetic import SyntheticCodes as SyntheticCodes
from experiments.data._synthetic import SyntheticRows as SyntheticRows
from experiments.data._synthetic import parse_codes as parse_codes
from experiments.data._types import BadSampleError as BadSampleError
from experiments.data._types import BatchSource as BatchSource
from experiments.data._types import DataError as DataError
from experiments.data._types import EmptyCaption as EmptyCaption
from experiments.data._types import SampleRows as SampleRows
from experiments.data._types import Source as Source
from experiments.data._types import StepData as StepData
from experiments.data._types import StepIndex as StepIndex
from experiments.data._types import SteppedSource as SteppedSource
from experiments.data._types import Wanted as Wanted
from experiments.data._validation import Subset as Subset
from experiments.data._validation import ValidationSampler as ValidationSampler
from experiments.data._validation import split_source as split_source

__all__ = [
    "CACHE_DTYPES",
    "CACHE_FILE",
    "DIGIT_SIZES",
    "DIGIT_WORDS",
    "EMPTY_FILE",
    "LARGE_DIGIT_SIZES",
    "MIXES",
    "SMALL_DIGIT_SIZES",
    "BadLimit",
    "BadSampleError",
    "BadTally",
    "BatchSource",
    "CacheInfo",
    "CacheLayout",
    "CachedSample",
    "ClipSource",
    "DataCode",
    "DataError",
    "DigitSource",
    "Digits",
    "EmptyCaption",
    "EncodedCache",
    "EncodedFolder",
    "EncodedRules",
    "HomeBatch",
    "ImageFolder",
    "MediaRules",
    "MediaSource",
    "PhotoSource",
    "SampleRows",
    "Sampler",
    "Source",
    "StepData",
    "StepIndex",
    "StepLoader",
    "StepReader",
    "StepSampler",
    "SteppedSource",
    "Subset",
    "SyntheticCodes",
    "SyntheticRows",
    "ValidationSampler",
    "Wanted",
    "WebDatasetShards",
    "any_captions",
    "collate_home",
    "digest_of",
    "draw_digit",
    "drawn_latents",
    "frames_from_rows",
    "grid_positions",
    "handwritten_digits",
    "is_cache",
    "is_finished",
    "make_loader",
    "metadata_captions",
    "parse_codes",
    "quickstart_sources",
    "read_index",
    "read_info",
    "replace_file",
    "rows_from_frames",
    "rows_of_latents",
    "sidecar_captions",
    "snap_grid",
    "split_source",
    "verified",
    "write_info",
    "write_shard",
]
