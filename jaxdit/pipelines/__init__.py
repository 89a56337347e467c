"""Published pipelines from their folders, for `jaxdit.sampling.Engine`."""

from ._flux import FluxConfigs as FluxConfigs
from ._flux import FluxPipeline as FluxPipeline

__all__ = ["FluxConfigs", "FluxPipeline"]
