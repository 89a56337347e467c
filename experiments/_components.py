"""What a config can name: models, objectives, data, optimisers, and the settings of a run.

Each function here is a gin configurable. It returns a frozen description; nothing touches a device or reads data
before `experiments._run` asks for it. The programs' own modules hold no configurables, because gin would register those
of a file run by `python -m` under `__main__`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import gin
import jax
import jax.numpy as jnp
import optax
from flax import nnx

from experiments._data_components import DataSpec as DataSpec
from experiments._data_components import encoded as encoded
from experiments._data_components import folder as folder
from experiments._data_components import quickstart as quickstart
from experiments._data_components import synthetic as synthetic
from jaxdit import ResolutionShift, SquareRootShift, linear_schedule
from jaxdit.encoders import ByteTextEncoder, PrecomputedText
from jaxdit.models import DiT, DiTConfig, MMDiT, MMDiTConfig, dit_config
from jaxdit.schedulers import DPMSolver, Method, euler, heun
from jaxdit.training import DiffusionLoss, FlowMatching, Objective, SamplerSettings, TextToImage, TimeShift
from jaxdit.weights import DEFAULT_TARGETS, Lora


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A model to make.

    Attributes:
        make: makes the module from a seed; traced, never run on one device alone.
        config: of the backbone, for checkpoints of others.
        num_heads, width: of the backbone, for the planner.
        channels: channels of an image row.
        text_channels, pooled_channels: channels of text features the data must bring; 0 where text is bytes.
        max_text: longest caption in tokens; None where text is features, or where the model takes labels.
        num_classes: classes of the labels that the data must bring, one per sequence; 0 for a model without.
        pixel_channels: channels of a pixel inside an image row; 0 where the model does not care.
        guidance_embed: whether a distilled guidance scale is an input.
        depth: blocks, each of which keeps its input rows for the backward pass.
        dtype: dtype of matrix products.
        backbone_path: where the backbone's parameters are among the module's.
    """

    make: Callable[[int], nnx.Module]
    config: MMDiTConfig | DiTConfig
    num_heads: int
    width: int
    channels: int
    text_channels: int = 0
    pooled_channels: int = 0
    max_text: int | None = None
    num_classes: int = 0
    pixel_channels: int = 0
    guidance_embed: bool = False
    depth: int = 1
    dtype: Any = jnp.float32
    backbone_path: tuple[str, ...] = ()

    @property
    def uses_labels(self) -> bool:
        """Whether a class label stands in the place of text."""
        return self.num_classes > 0


@gin.configurable(module="jaxdit")
def text_to_image(
    width: int = gin.REQUIRED,
    num_heads: int = gin.REQUIRED,
    num_double_blocks: int = gin.REQUIRED,
    num_single_blocks: int = gin.REQUIRED,
    axes_dim: Sequence[int] = gin.REQUIRED,
    channels: int = gin.REQUIRED,
    text_channels: int = gin.REQUIRED,
    pooled_channels: int = gin.REQUIRED,
    max_text: int | None = 512,
    guidance_embed: bool = False,
    mlp_ratio: float = 4.0,
    theta: float = 10_000.0,
    compute_dtype: str = "float32",
) -> ModelSpec:
    """An MMDiT with a byte-level text encoder trained along, or (`max_text=None`) on precomputed text features."""
    config = MMDiTConfig(
        in_channels=channels,
        text_channels=text_channels,
        pooled_channels=pooled_channels,
        width=width,
        num_heads=num_heads,
        num_double_blocks=num_double_blocks,
        num_single_blocks=num_single_blocks,
        axes_dim=tuple(axes_dim),
        guidance_embed=guidance_embed,
        mlp_ratio=mlp_ratio,
        theta=theta,
        compute_dtype=compute_dtype,
    )

    def make(seed: int) -> nnx.Module:
        rngs = nnx.Rngs(seed)
        backbone = MMDiT(config, rngs=rngs)
        sizes = {"text_channels": text_channels, "pooled_channels": pooled_channels}
        if max_text is None:
            return TextToImage(backbone, PrecomputedText(**sizes))
        return TextToImage(backbone, ByteTextEncoder(**sizes, max_length=max_text, rngs=rngs))

    from_data = max_text is None
    return ModelSpec(
        make=make,
        num_heads=num_heads,
        width=width,
        channels=channels,
        text_channels=text_channels if from_data else 0,
        pooled_channels=pooled_channels if from_data else 0,
        max_text=max_text,
        guidance_embed=guidance_embed,
        depth=config.depth,
        dtype=jnp.dtype(compute_dtype),
        config=config,
        backbone_path=("backbone",),
    )


@gin.configurable(module="jaxdit")
def class_to_image(
    name: str = gin.REQUIRED,
    channels: int = 4,
    num_classes: int = 1000,
    as_diffusers: bool = False,
    compute_dtype: str = "float32",
) -> ModelSpec:
    """A class-conditional DiT by its published name, such as DiT-XL/2; `channels` of the latent image.

    With `as_diffusers` it computes what diffusers' DiT does, which differs from the original in the frequencies of its
    embedding of time and in an epsilon; only such a model can be exported to diffusers.
    """
    variant = {"time_frequency_shift": 1, "mlp_norm_epsilon": 1e-5} if as_diffusers else {}
    config = dit_config(
        name, channels=channels, num_classes=num_classes, compute_dtype=compute_dtype, **variant
    )
    return ModelSpec(
        make=lambda seed: DiT(config, rngs=nnx.Rngs(seed)),
        num_heads=config.num_heads,
        width=config.width,
        channels=config.in_channels,
        num_classes=num_classes,
        pixel_channels=channels,
        depth=config.depth,
        dtype=jnp.dtype(compute_dtype),
        config=config,
    )


@gin.configurable(module="jaxdit")
def flow_matching(
    time_mean: float = 0.0,
    time_std: float | None = 1.0,
    shift: TimeShift | None = None,
    guidance: float | None = None,
    prediction: str = "velocity",
) -> Objective:
    """Flow matching; times logit-normal, or uniform with `time_std=None`; see `jaxdit.training.FlowMatching`."""
    return FlowMatching(time_mean, time_std, shift, guidance, prediction)


@gin.configurable(module="jaxdit")
def resolution_shift(
    base_tokens: int = 256, max_tokens: int = 4096, base_mu: float = 0.5, max_mu: float = 1.15
) -> TimeShift:
    """A time shift linear in image tokens, by default FLUX.1's."""
    return ResolutionShift(base_tokens=base_tokens, max_tokens=max_tokens, base_mu=base_mu, max_mu=max_mu)


@gin.configurable(module="jaxdit")
def square_root_shift(base_tokens: int = 256, base_factor: float = 1.0) -> TimeShift:
    """A time shift whose factor grows as the root of the image tokens, as SD3's."""
    return SquareRootShift(base_tokens=base_tokens, base_factor=base_factor)


@gin.configurable(module="jaxdit")
def diffusion(channels: int = 4, num_steps: int = 1000) -> Objective:
    """Noise prediction with learned variance on a linear schedule, for `class_to_image`."""
    return DiffusionLoss(linear_schedule(num_steps), channels)


@dataclass(frozen=True, slots=True)
class OptimizerSpec:
    """An optimiser to make for a run of so many steps.

    Attributes:
        make: from the number of steps to the optax transformation.
        learning_rate: from the number of steps to the schedule, for reports.
    """

    make: Callable[[int], optax.GradientTransformation]
    learning_rate: Callable[[int], optax.Schedule]


# Names of matrices: of a layer, and of an adapter.
_DECAYED = ("kernel", "a", "b")


def _is_matrix(params: Any) -> Any:
    return jax.tree_util.tree_map_with_path(
        lambda path, _: getattr(path[-1], "key", None) in _DECAYED, params
    )


@gin.configurable(module="optimizer")
def adamw(
    learning_rate: float = gin.REQUIRED,
    warmup_steps: int = 0,
    decay: str = "constant",
    end_fraction: float = 0.0,
    b1: float = 0.9,
    b2: float = 0.999,
    weight_decay: float = 0.0,
    clip_norm: float | None = 1.0,
) -> OptimizerSpec:
    """AdamW after clipping by global norm; warm-up, then `decay` "constant", "cosine" or "linear" to the end.

    Weight decay is of kernels and adapters alone: biases, norm scales and embeddings stay out of it.
    """
    shapes = {
        "constant": lambda steps: optax.constant_schedule(learning_rate),
        "cosine": lambda steps: optax.cosine_decay_schedule(learning_rate, steps, end_fraction),
        "linear": lambda steps: optax.linear_schedule(learning_rate, learning_rate * end_fraction, steps),
    }
    if decay not in shapes:
        raise ValueError(f"adamw: decay must be one of {', '.join(shapes)}; got decay={decay!r}.")
    if not learning_rate > 0 or not 0 <= warmup_steps < 1 << 31 or not (clip_norm is None or clip_norm > 0):
        raise ValueError(
            "adamw: learning_rate must be positive, warmup_steps in [0, 2^31), clip_norm positive or None; got "
            f"learning_rate={learning_rate}, warmup_steps={warmup_steps}, clip_norm={clip_norm}."
        )
    if not (0 <= b1 < 1 and 0 <= b2 < 1 and weight_decay >= 0 and end_fraction >= 0):
        raise ValueError(
            "adamw: b1 and b2 must be in [0, 1), weight_decay and end_fraction at least 0; got "
            f"b1={b1}, b2={b2}, weight_decay={weight_decay}, end_fraction={end_fraction}."
        )

    def schedule(num_steps: int) -> optax.Schedule:
        main = shapes[decay](max(num_steps - warmup_steps, 1))
        if not warmup_steps:
            return main
        warmup = optax.linear_schedule(0.0, learning_rate, warmup_steps)
        return optax.join_schedules([warmup, main], [warmup_steps])

    def make(num_steps: int) -> optax.GradientTransformation:
        clip = optax.identity() if clip_norm is None else optax.clip_by_global_norm(clip_norm)
        update = optax.adamw(schedule(num_steps), b1=b1, b2=b2, weight_decay=weight_decay, mask=_is_matrix)
        return optax.chain(clip, update)

    return OptimizerSpec(make, schedule)


@gin.configurable(module="jaxdit")
def sampler(num_steps: int = 28, guidance_scale: float = 1.0, method: str = "euler") -> SamplerSettings:
    """How pictures are sampled; `method` "euler" (of a diffusion model: DDIM), "heun" (flows only) or "dpm++2m"."""
    methods: dict[str, Method] = {"euler": euler, "heun": heun, "dpm++2m": DPMSolver()}
    if method not in methods:
        raise ValueError(f"sampler: method must be one of {', '.join(methods)}; got method={method!r}.")
    return SamplerSettings(num_steps, guidance_scale, methods[method])


@dataclass(frozen=True, slots=True)
class AdapterSpec:
    """Adapters to train in the place of all parameters.

    Attributes:
        lora: which layers have one, and of what size.
        frozen_dtype: dtype in which the parameters that are not trained are kept.
        init_from: file or folder of adapters to start from; None for fresh ones.
    """

    lora: Lora
    frozen_dtype: Any
    init_from: str | None


@gin.configurable(module="jaxdit")
def lora(
    rank: int = 16,
    alpha: float | None = None,
    targets: Sequence[str] = DEFAULT_TARGETS,
    frozen_dtype: str = "float32",
    init_from: str | None = None,
) -> AdapterSpec:
    """Low-rank adapters; `targets` by diffusers' names or patterns of them, see `jaxdit.weights.Lora`.

    With `frozen_dtype` "bfloat16" the frozen parameters take half the memory; published FLUX.1 weights lose nothing.
    """
    if frozen_dtype not in ("float32", "bfloat16"):
        raise ValueError(
            f"lora: frozen_dtype must be float32 or bfloat16; got frozen_dtype={frozen_dtype!r}."
        )
    return AdapterSpec(Lora(rank, alpha, tuple(targets)), jnp.dtype(frozen_dtype), init_from)


@dataclass(frozen=True, slots=True)
class RunSettings:
    """Settings of a training run; see `train` for what they mean."""

    model: ModelSpec
    objective: Objective
    data: DataSpec
    optimizer: OptimizerSpec
    sampler: SamplerSettings
    steps: int
    seed: int
    num_devices: int
    devices_per_machine: int | None
    bags: str | None
    gamma: float | None
    calibration: str | None
    max_rows: float | None
    block: int
    head_groups: int
    shards: int
    remat: str
    micro_batches: int
    ema_decay: float
    on_nonfinite: str
    log_every: int
    save_every: int
    keep: int
    eval_every: int
    sample_every: int
    sample_prompts: tuple[str, ...]
    lookahead: int
    allow_oversized: bool
    init_from: str | None
    adapter: AdapterSpec | None


@gin.configurable(module="experiments")
def train(
    model: ModelSpec = gin.REQUIRED,
    objective: Objective = gin.REQUIRED,
    data: DataSpec = gin.REQUIRED,
    optimizer: OptimizerSpec = gin.REQUIRED,
    sampler: SamplerSettings | None = None,
    steps: int = gin.REQUIRED,
    seed: int = 0,
    num_devices: int = gin.REQUIRED,
    devices_per_machine: int | None = None,
    bags: str | None = "auto",
    gamma: float | None = None,
    calibration: str | None = None,
    max_rows: float | None = None,
    block: int = 128,
    head_groups: int = 1,
    shards: int = 1,
    remat: str = "none",
    micro_batches: int = 1,
    ema_decay: float = 0.999,
    on_nonfinite: str = "skip",
    log_every: int = 50,
    save_every: int = 500,
    keep: int = 2,
    eval_every: int = 0,
    sample_every: int = 0,
    sample_prompts: Sequence[str] = (),
    lookahead: int = 256,
    allow_oversized: bool = False,
    init_from: str | None = None,
    adapter: AdapterSpec | None = None,
) -> RunSettings:
    """Settings of a training run.

    Args:
        model: from `text_to_image` or `class_to_image`.
        objective: from `flow_matching` or `diffusion`.
        data: from `quickstart`, `folder`, `encoded` or `synthetic`.
        optimizer: from `adamw`.
        sampler: from `sampler`; its defaults if left out.
        steps: optimiser steps of the whole run.
        seed: of parameters, data order, times and noise.
        num_devices: devices of the mesh, over all processes.
        devices_per_machine: 'auto' avoids traffic between machines. If None, a machine is a process that has several
            devices; with one process, or a process for each device, all are on one machine.
        bags: 'auto' to place sequences freely, or a bag spec such as g1n2+g2n1+g4n1; None leaves every sequence where
            it was loaded.
        gamma: relative cost of a FLOP of attention, for the planner; None for the calibration's, or 0.4 without one.
        calibration: file written by `python -m experiments.calibrate` on the devices of the run, for the planner; what
            it says is used on other devices too, with a warning.
        max_rows: with bags='auto', the most rows of the attention layout on a device over the mean, at least 1: what
            memory allows. A batch that cannot keep to it stops the run. None sets no limit.
        block: attention block size in rows.
        head_groups: parts in which attention is computed; of two, exchanges of one run under attention of the other on
            GPUs.
        shards: devices that share one copy of parameters, optimiser and EMA; 1 replicates them.
        remat: rematerialisation policy; "full" with shards > 1.
        micro_batches: micro-batches per optimiser step (gradient accumulation).
        ema_decay: of the parameters' moving average, per step.
        on_nonfinite: "skip" a step whose loss or gradient is not finite, or "stop" the run there.
        log_every: steps between log lines where there is no terminal.
        save_every: steps between checkpoints; one is written at the end in any case.
        keep: checkpoints kept.
        eval_every: steps between validation losses; 0 for the end only, if data is held out.
        sample_every: steps between grids of samples; 0 for the end only.
        sample_prompts: "caption | HEIGHTxWIDTH" or "caption | FRAMESxHEIGHTxWIDTH" (a class number as caption for
            class-conditional models); none for no pictures.
        lookahead: steps planned at the start to size the program, so that it is compiled once; and again when a step
            needs a larger one.
        allow_oversized: start even if parameters, optimiser and EMA are larger than a device's memory.
        init_from: safetensors file or folder of a FLUX.1 or DiT checkpoint from which the backbone starts.
        adapter: from `lora`; then its adapters are trained and everything else is frozen.
    """
    settings = locals()
    settings["sampler"] = SamplerSettings() if sampler is None else sampler
    settings["sample_prompts"] = tuple(sample_prompts)
    return RunSettings(**settings)
