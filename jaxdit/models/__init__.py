"""Diffusion transformers on packed rows: arrays of tokens with segment ids, no batch dimension."""

from ._adapter import AdapterPart as AdapterPart
from ._adapter import LowRankAdapter as LowRankAdapter
from ._dit import DiT as DiT
from ._dit import position_embedding as position_embedding
from ._dit_config import DiTConfig as DiTConfig
from ._dit_config import dit_config as dit_config
from ._gather import rows_of_sequences as rows_of_sequences
from ._gather import sums_of_sequences as sums_of_sequences
from ._mmdit import MMDiT as MMDiT
from ._mmdit_config import FLUX_DEV as FLUX_DEV
from ._mmdit_config import FLUX_SCHNELL as FLUX_SCHNELL
from ._mmdit_config import MMDiTConfig as MMDiTConfig
from ._rows import Attention as Attention
from ._rows import ImageLabelRows as ImageLabelRows
from ._rows import ImageTextRows as ImageTextRows
from ._rows import LayerScan as LayerScan
from ._scan import ATTENTION_NAME as ATTENTION_NAME
from ._scan import REMAT_POLICIES as REMAT_POLICIES
from ._scan import scan_layers as scan_layers

__all__ = [
    "ATTENTION_NAME",
    "FLUX_DEV",
    "FLUX_SCHNELL",
    "REMAT_POLICIES",
    "AdapterPart",
    "Attention",
    "DiT",
    "DiTConfig",
    "ImageLabelRows",
    "ImageTextRows",
    "LayerScan",
    "LowRankAdapter",
    "MMDiT",
    "MMDiTConfig",
    "dit_config",
    "position_embedding",
    "rows_of_sequences",
    "scan_layers",
    "sums_of_sequences",
]
