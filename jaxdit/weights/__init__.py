"""Published checkpoints in and out: safetensors in diffusers' layout or under the original names."""

from ._configs import config_json as config_json
from ._configs import read_config as read_config
from ._files import WeightsError as WeightsError
from ._load import check_checkpoint as check_checkpoint
from ._load import load_params as load_params
from ._save import save_params as save_params
from ._tables import abstract_params as abstract_params

__all__ = [
    "WeightsError",
    "abstract_params",
    "check_checkpoint",
    "config_json",
    "load_params",
    "read_config",
    "save_params",
]
