"""Published pipelines from their folders: for `jaxdit.sampling.Engine`, and their encoders to train on."""

from ._flux import FluxPipeline as FluxPipeline
from ._flux_encoders import EncoderParams as EncoderParams
from ._flux_encoders import FluxEncoders as FluxEncoders
from ._flux_folder import FluxConfigs as FluxConfigs
from ._flux_folder import FluxFolder as FluxFolder

__all__ = ["EncoderParams", "FluxConfigs", "FluxEncoders", "FluxFolder", "FluxPipeline"]
