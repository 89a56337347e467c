"""Published pipelines from their folders: for `jaxdit.sampling.Engine`, and their encoders to train on."""

from ._dit import DiTPipeline as DiTPipeline
from ._flux import FluxPipeline as FluxPipeline
from ._flux_encoders import EncoderParams as EncoderParams
from ._flux_encoders import FluxEncoders as FluxEncoders
from ._flux_encoders import encoder_bytes as encoder_bytes
from ._flux_folder import FluxConfigs as FluxConfigs
from ._flux_folder import FluxFolder as FluxFolder
from ._open import default_size as default_size
from ._open import open_pipeline as open_pipeline

__all__ = [
    "DiTPipeline",
    "EncoderParams",
    "FluxConfigs",
    "FluxEncoders",
    "FluxFolder",
    "FluxPipeline",
    "default_size",
    "encoder_bytes",
    "open_pipeline",
]
