"""A run that trained FLUX.1's transformer, sampled with the other parts of the pipeline it is of."""

import dataclasses
import os
from typing import Any

import jax

from experiments._run import Run
from experiments._run_pipeline import backbone_params, run_backbone, sampling_shards
from jaxdit.pipelines import FluxPipeline
from jaxdit.sampling import Request


class RunFluxPipeline(FluxPipeline):
    """Text encoders, autoencoder and scheduler of a pipeline's folder, and a run's transformer.

    Args:
        run: the run.
        folder: the pipeline.
        options: of `FluxPipeline`.

    Attributes:
        trained: the run's parameters, on its mesh.
        step: that they are of, for a file's metadata; None says nothing.

    Raises:
        ValueError: for a run of a model of another shape.
    """

    def __init__(self, run: Run, folder: str | os.PathLike[str], **options: Any) -> None:
        model = run.settings.model
        super().__init__(
            folder,
            run.mesh.devices.ravel().tolist(),
            devices_per_machine=run.planner.devices_per_machine,
            compute_dtype=str(model.dtype),
            **options,
        )
        wanted = dataclasses.replace(self.configs.transformer, compute_dtype=str(model.dtype))
        if model.config != wanted:
            raise ValueError(
                f"--model {folder} must be the pipeline that the run's model is of; its transformer is {wanted}, the"
                f" run's {model.config}."
            )
        self.backbone = run_backbone(run.settings, run.program, sampling_shards(run))
        self.trained: Any = None
        self.step: int | None = None
        self._run = run

    def params(self, shardings: Any) -> Any:
        """The transformer's, of the run."""
        return jax.device_put(backbone_params(self._run.settings, self.trained), shardings)

    def about(self, request: Request) -> dict[str, Any]:
        """See `Pipeline.about`."""
        about = super().about(request)
        return about if self.step is None else {"step": self.step, **about}
