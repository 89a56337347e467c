"""Published checkpoints in and out: safetensors in diffusers' layout or under the original names."""

from ._configs import config_json as config_json
from ._configs import read_config as read_config
from ._files import WeightsError as WeightsError
from ._files import checkpoint_digest as checkpoint_digest
from ._load import check_checkpoint as check_checkpoint
from ._load import load_params as load_params
from ._lora import DEFAULT_TARGETS as DEFAULT_TARGETS
from ._lora import Lora as Lora
from ._lora import add_lora as add_lora
from ._lora import load_lora as load_lora
from ._lora import merge_lora as merge_lora
from ._lora import save_lora as save_lora
from ._save import SaveFormat as SaveFormat
from ._save import save_params as save_params
from ._tables import abstract_params as abstract_params
from ._tables import tensor_shapes as tensor_shapes
from ._write import check_target as check_target

__all__ = [
    "DEFAULT_TARGETS",
    "Lora",
    "SaveFormat",
    "WeightsError",
    "abstract_params",
    "add_lora",
    "check_checkpoint",
    "check_target",
    "checkpoint_digest",
    "config_json",
    "load_lora",
    "load_params",
    "merge_lora",
    "read_config",
    "save_lora",
    "save_params",
    "tensor_shapes",
]
