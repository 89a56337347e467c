"""What a run starts from: weights of others at train.init_from, and adapters at lora.init_from."""

import logging
import os
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax

from experiments._components import RunSettings
from experiments._config import UserError, checking
from experiments._platform import put_everywhere
from jaxdit.training import TrainProgram, merged
from jaxdit.weights import check_checkpoint, checkpoint_digest, load_lora, load_params

_LOG = logging.getLogger(__name__)

_TITLES = {
    "scale": "lora.alpha / lora.rank",
    "targets": "lora.targets",
    "base": "the weights at train.init_from",
}


@dataclass(frozen=True)
class Pretrained:
    """The weights and adapters that a run starts from, if it does.

    Attributes:
        settings: of the run.
        program: of the run, for the places of parameters.
    """

    settings: RunSettings
    program: TrainProgram

    def check(self) -> Any:
        """Refuse a checkpoint to start from that is not of this model; of the backbone only names and shapes are read.

        Returns:
            The adapters to start from, which are small, on the host; None without.

        Raises:
            UserError: naming what differs.
        """
        path, model, adapter = self.settings.init_from, self.settings.model, self.settings.adapter
        if path is not None:
            with checking("train.init_from"):
                check_checkpoint(path, model.config)
        if adapter is None or adapter.init_from is None:
            return None
        with checking("lora.init_from"):
            return load_lora(adapter.init_from, model.config, adapter.lora)

    def load(self, adapters: Any = None) -> Any:
        """All that is there, on the mesh, in its place among the module's parameters.

        Args:
            adapters: what `check` gave.
        """
        loaded = self._backbone()
        if adapters is None:
            return loaded
        shardings = self.program.state_shardings().params
        return merged(loaded, jax.tree.map(put_everywhere, self._in_module(adapters), shardings))

    def frozen(self) -> Any:
        """The parameters that are not trained, on the mesh; nothing where all are."""
        return {} if self.settings.adapter is None else self._backbone()

    def _backbone(self) -> Any:
        settings, program = self.settings, self.program
        path, model = settings.init_from, settings.model
        if path is None:
            return {}
        _LOG.info("loading %s", path)
        shardings = program.state_shardings()
        found = shardings.params if settings.adapter is None else shardings.frozen
        if self.key is not None:  # read now, while the files are there
            _LOG.info("digest of what is frozen: %s", self.key["base"])
        for name in model.backbone_path:
            found = found[name]
        with checking("train.init_from"):
            return self._in_module(
                load_params(path, model.config, shardings=found, dtype=program.frozen_dtype)
            )

    def _in_module(self, params: Any) -> Any:
        """The backbone's parameters as parameters of the module."""
        for name in reversed(self.settings.model.backbone_path):
            params = {name: params}
        return params

    @cached_property
    def key(self) -> dict[str, Any] | None:
        """What adapters are of, and how they enter: other values would make another model of them. None without."""
        if self.settings.adapter is None:
            return None
        assert self.settings.init_from is not None
        with checking("train.init_from"):
            return {"base": checkpoint_digest(self.settings.init_from), **self._adapter_settings}

    @property
    def _adapter_settings(self) -> dict[str, Any]:
        assert self.settings.adapter is not None
        lora = self.settings.adapter.lora
        return {"scale": lora.scale, "targets": sorted(lora.targets)}

    def check_same(self, meta: dict[str, Any], folder: os.PathLike[str], *, has_base: bool = True) -> None:
        """Refuse a checkpoint with adapters of another model, or that would enter it differently.

        Args:
            meta: what the checkpoint says of its run.
            folder: where it is, for the message.
            has_base: whether the model itself is used.

        Raises:
            UserError: naming what changed.
        """
        saved = meta.get("adapter")
        if saved is None or self.settings.adapter is None:
            return
        mine = (self.key if has_base else None) or self._adapter_settings
        changed = [_TITLES[name] for name in mine if saved[name] != mine[name]]
        if changed:
            raise UserError(
                f"{folder} holds adapters that were trained with other {' and '.join(changed)}. Restore what it was, or"
                " choose another --workdir."
            )
