"""What a model is trained for: rows in token layout to summed losses, and rows to a denoiser for sampling."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from .._image_attention import image_attention
from .._losses import (
    LossSums,
    ddpm_loss,
    ddpm_noised,
    flow_matching_loss,
    flow_noised,
    flow_velocity,
)
from .._random import sequence_times, token_noise
from .._schedules import (
    DiffusionSchedule,
    TimeShift,
    diffusion_steps,
    logit_normal_time,
    shift_time,
)
from ..encoders import TextRows
from ..models import Attention, ImageLabelRows, ImageTextRows, LayerScan, rows_of_sequences
from ..schedulers import (
    DiffusionTimes,
    FlowTimes,
    Method,
    Scheduler,
    euler,
)
from ._rows import NO_LABEL, TokenRows

# Where a prediction of the data is turned into a velocity in training, smaller times divide by this one.
_LEAST_TIME = 0.05


class Context(NamedTuple):
    """What a model's call needs beside its rows.

    Attributes:
        attention: attention over [text rows; image rows].
        layer_scan: runs a stack of blocks.
        reduce: adds per-sequence sums over devices.
        key: key of the run.
        step: index that names the draws of this micro-batch.
    """

    attention: Attention
    layer_scan: LayerScan
    reduce: Callable[[Any], Any]
    key: Any
    step: Any


@dataclass(frozen=True, slots=True)
class SamplerSettings:
    """How a model is sampled.

    Attributes:
        num_steps: steps; Heun evaluates the model twice in each but the last.
        guidance_scale: classifier-free guidance; 1 for none.
        method: `euler` (of a diffusion: DDIM), `heun` (flows only) or `DPMSolver()` of `jaxdit.schedulers`.
    """

    num_steps: int = 28
    guidance_scale: float = 1.0
    method: Method = euler

    def __post_init__(self) -> None:
        if self.num_steps < 1:
            raise ValueError(
                f"SamplerSettings: num_steps must be at least 1; got num_steps={self.num_steps}. Try 28."
            )


@runtime_checkable
class Objective(Protocol):
    """A training objective of a module, on one device's rows."""

    def loss(self, module: Any, rows: TokenRows, context: Context) -> LossSums:
        """Summed loss of the rows here; the trainer adds up devices and normalises."""
        ...

    def scheduler(self, method: Method) -> Scheduler:
        """How a model trained so is sampled, by a method."""
        ...


class TextToImage(nnx.Module):
    """A backbone with the text encoder it is trained with.

    Args:
        backbone: an `MMDiT`.
        text_encoder: a `TextEncoder`; its parameters are trained along.

    Raises:
        NotImplementedError: for a frozen encoder with parameters.
    """

    def __init__(self, backbone: nnx.Module, text_encoder: Any) -> None:
        has_params = isinstance(text_encoder, nnx.Module) and jax.tree.leaves(
            nnx.state(text_encoder, nnx.Param)
        )
        if text_encoder.frozen and has_params:
            raise NotImplementedError(
                "TextToImage: parameters of a frozen text encoder would be trained; got text_encoder="
                f"{type(text_encoder).__name__}. Encode captions beforehand and use PrecomputedText."
            )
        self.backbone = backbone
        self.text_encoder = text_encoder

    def denoise(
        self,
        img: Float[Array, "n c"],
        time: Float[Array, " s"],
        rows: TokenRows,
        context: Context,
        *,
        guidance: float | None,
    ) -> Float[Array, "n c"]:
        """The backbone's prediction for image rows at a time per sequence, with the rows' own text."""
        text = self.text_encoder(
            TextRows(rows.txt, rows.txt_segment_ids, rows.txt_token_index, rows.pooled),
            num_sequences=time.shape[0],
            reduce=context.reduce,
        )
        num_local = rows.sequences.shape[0]
        return self.backbone(
            ImageTextRows(
                img=img,
                img_segment_ids=rows.local_ids(rows.img_segment_ids),
                img_positions=rows.img_positions,
                txt=text.features,
                txt_segment_ids=rows.local_ids(rows.txt_segment_ids),
                txt_positions=jnp.zeros((rows.txt_segment_ids.shape[0], 3), jnp.int32),
                time=_of_local(time, rows),
                pooled=rows_of_sequences(text.pooled, rows.sequences),
                guidance=None if guidance is None else jnp.full(num_local, guidance, jnp.float32),
            ),
            attention=context.attention,
            layer_scan=context.layer_scan,
        )


@dataclass(frozen=True, slots=True)
class FlowMatching:
    """Flow matching for a `TextToImage` module.

    Attributes:
        time_mean, time_std: logit-normal distribution of training times; `time_std` None for uniform times.
        shift: moves times towards noise with the number of image tokens; None for none.
        guidance: value of the guidance embedding in training, for models that have one.
        prediction: what the module puts out: "velocity", noise minus data (FLUX.1), or "sample", the data. The loss
            is of the velocity either way (for "sample" at times of at least 0.05). Noise fills every channel of a
            patch and data do not, so rows with more channels than the module can carry want "sample".

    Raises:
        ValueError: for another prediction, or a `time_std` that is not positive.
        TypeError: for a shift that is none.
    """

    time_mean: float = 0.0
    time_std: float | None = 1.0
    shift: TimeShift | None = None
    guidance: float | None = None
    prediction: str = "velocity"

    def __post_init__(self) -> None:
        if self.prediction not in ("velocity", "sample"):
            raise ValueError(
                f"FlowMatching: prediction must be 'velocity' or 'sample'; got prediction={self.prediction!r}. "
                "FLUX.1 predicts the velocity."
            )
        if self.shift is not None and not isinstance(self.shift, TimeShift):
            raise TypeError(
                f"FlowMatching: shift must have a method mu, as ResolutionShift has; got shift={self.shift!r:.80}."
            )
        if self.time_std is not None and not self.time_std > 0:
            raise ValueError(
                f"FlowMatching: time_std must be positive; got time_std={self.time_std}. None makes times uniform."
            )

    def times(self, rows: TokenRows, context: Context) -> Float[Array, " s"]:
        """The training time of every sequence of the step."""
        ids = jnp.arange(rows.num_image_tokens.shape[0])
        time = sequence_times(context.step, ids, key=context.key)
        if self.time_std is not None:
            time = logit_normal_time(time, mean=self.time_mean, std=self.time_std)
        if self.shift is None:
            return time
        return jnp.asarray(shift_time(time, self.shift.mu(rows.num_image_tokens)))

    def loss(self, module: TextToImage, rows: TokenRows, context: Context) -> LossSums:
        """Weighted squared error of the velocity, summed over the rows here."""
        noise = token_noise(
            context.step, rows.img_segment_ids, rows.img_token_index, rows.img.shape[1], key=context.key
        )
        time = self.times(rows, context)
        noised = flow_noised(rows.img, noise, time, rows.img_segment_ids)
        prediction = module.denoise(noised, time, rows, context, guidance=self.guidance)
        velocity = noise - rows.img
        if self.prediction == "sample":
            prediction, velocity = (
                flow_velocity(clean, noised, time, rows.img_segment_ids, least_time=_LEAST_TIME)
                for clean in (prediction, rows.img)
            )
        ones = jnp.ones_like(time)
        return flow_matching_loss(
            prediction, velocity, rows.img_segment_ids, ones, row_weights=rows.img_loss_weight
        )

    def scheduler(self, method: Method) -> Scheduler:
        """Times evenly from noise to data, with the shift of training."""
        return Scheduler(FlowTimes(shift=1.0 if self.shift is None else self.shift), method, self.prediction)


def _of_local(values: Any, rows: TokenRows) -> Any:
    """The entries of a per-sequence array for the sequences with rows here; any entry in padding."""
    return values[jnp.maximum(rows.sequences - 1, 0)]


def _labels(rows: TokenRows) -> Int[Array, " s"]:
    if rows.labels is None:
        raise ValueError(
            "DiffusionLoss: a class-conditional model needs a label per sequence; got none."
            " Use a data source with labels, or FlowMatching with text."
        )
    return rows.labels


@dataclass(frozen=True, slots=True)
class DiffusionLoss:
    """Noise prediction with learned variance, for a class-conditional `DiT`.

    Attributes:
        schedule: the diffusion.
        channels: channels of a pixel (of the latent).
    """

    schedule: DiffusionSchedule
    channels: int

    def loss(self, module: Any, rows: TokenRows, context: Context) -> LossSums:
        """Hybrid loss, summed over the rows here.

        Raises:
            ValueError: if the data has no labels.
        """
        labels = _labels(rows)
        labels = jnp.where(labels == NO_LABEL, module.config.num_classes, labels)
        ids = jnp.arange(rows.num_image_tokens.shape[0])
        step = diffusion_steps(sequence_times(context.step, ids, key=context.key), self.schedule.num_steps)
        noise = token_noise(
            context.step, rows.img_segment_ids, rows.img_token_index, rows.img.shape[1], key=context.key
        )
        noised = ddpm_noised(rows.img, noise, step, rows.img_segment_ids, schedule=self.schedule)
        time = step.astype(jnp.float32) / self.schedule.num_steps
        prediction = self._predict(module, noised.noised, time, labels, rows, context)
        weights = jnp.ones(step.shape, jnp.float32)
        return ddpm_loss(
            prediction,
            noised,
            rows.img_segment_ids,
            weights,
            row_weights=rows.img_loss_weight,
            schedule=self.schedule,
            channels=self.channels,
        )

    def scheduler(self, method: Method) -> Scheduler:
        """Evenly spaced steps, the last and the first among them."""
        return Scheduler(DiffusionTimes(schedule=self.schedule), method, "epsilon")

    def _predict(
        self, module: Any, x: Array, time: Array, labels: Array, rows: TokenRows, context: Context
    ) -> Array:
        model_rows = ImageLabelRows(
            img=x,
            img_segment_ids=rows.local_ids(rows.img_segment_ids),
            img_positions=rows.img_positions,
            time=_of_local(time, rows),
            labels=_of_local(labels, rows),
        )
        attention = image_attention(context.attention, rows.txt_segment_ids.shape[0])
        return module(model_rows, attention=attention, layer_scan=context.layer_scan)
