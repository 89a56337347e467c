"""FLUX.1's encoders: captions and pictures to what its transformer is trained on."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Int, UInt8

from ..encoders import AutoencoderKL, ClipTextEncoder, LatentPosterior, PictureRows, T5Encoder
from ..models import LayerScan
from ..sampling import ShardedModule
from ..weights import abstract_params
from ._flux_folder import FluxFolder
from ._text_program import TextProgram, clip_pooled, t5_features

# Temporaries in arrays of the finest layers' size: 3 as compiled for H100, and one for what convolutions ask for.
_PICTURE_ARRAYS = 4
# Bytes of temporaries for a hidden channel of a row of T5's MLP (4 as compiled for H100), beside two blocks of scores
# of at most so many bytes.
_BYTES_PER_HIDDEN = 6
_SCORE_BYTES = 128 << 20


class EncoderParams(NamedTuple):
    """Parameters of the three encoders on a mesh; of the autoencoder those of its encoder alone."""

    t5: Any
    clip: Any
    vae: Any


class FluxEncoders:
    """T5, CLIP and the autoencoder's encoder on some devices, each of which encodes its share of a batch.

    Without collectives where every device holds all parameters; such programs may run beside others that have some,
    launched from another thread, as long as these here are of one device each.

    Args:
        folder: of the pipeline.
        mesh: of the devices of this process that take part, from `parallel.sequence_mesh`.
        t5_shards: devices that share a copy of T5's parameters, see `ShardedModule`; those of CLIP and of the
            autoencoder are small, and every device has them.
        text_dtype: of T5's features.
        params: parameters that are there already; read from the folder by default.

    Raises:
        WeightsError: for values that are not finite, or that the dtype cannot hold.
    """

    def __init__(
        self,
        folder: FluxFolder,
        mesh: Mesh,
        *,
        t5_shards: str = "one",
        text_dtype: str = "bfloat16",
        params: EncoderParams | None = None,
    ) -> None:
        configs = folder.configs
        t5 = folder.module(T5Encoder, configs.t5, t5_shards)
        clip = folder.module(ClipTextEncoder, configs.clip, "one")
        vae = folder.module(AutoencoderKL, configs.vae, "one", jnp.float32)
        self.folder, self.mesh = folder, mesh
        self.params = _load(folder, mesh, t5, clip, vae) if params is None else params

        def features(module: Any, ids: Array, scan: LayerScan) -> Array:
            return t5_features(module, ids, scan).astype(text_dtype)

        self._t5 = TextProgram(t5, self.params.t5, mesh, features, divided=True)
        self._clip = TextProgram(clip, self.params.clip, mesh, clip_pooled, divided=True)
        self._by_device = NamedSharding(mesh, P(mesh.axis_names))
        self._posterior = jax.jit(
            jax.shard_map(
                _picture_encoder(vae),
                mesh=mesh,
                in_specs=(P(), P(mesh.axis_names), P(mesh.axis_names)),
                out_specs=P(mesh.axis_names),
                check_vma=False,
            )
        )

    def text(self, captions: Sequence[str]) -> tuple[Array, Array]:
        """T5's features (b, tokens, c) of all tokens, padding too, as FLUX.1 was trained; CLIP's pooled vectors (b, c).

        Global arrays, divided by device, not waited for. Compiled for each number of captions.

        Args:
            captions: as many for each device.

        Raises:
            TokenizerError: for one that is too long, unless the folder's tokenizers cut it.
        """
        folder = self.folder
        t5_ids, clip_ids = folder.t5_tokenizer(captions).ids, folder.clip_tokenizer(captions).ids
        return self._t5.batch(t5_ids), self._clip.batch(clip_ids)

    def posterior(
        self, pixels: UInt8[np.ndarray, "b h w 3"], sizes: Int[np.ndarray, "b 2"]
    ) -> LatentPosterior:
        """The distribution of pictures' latents, scaled as the transformer takes them.

        Global arrays, divided by device, not waited for. Compiled for each shape of `pixels`, whatever the sizes.

        Args:
            pixels: as many pictures for each device, each in the upper left corner of a canvas.
            sizes: latent rows and columns of each picture; past them the result has no meaning.
        """
        args = jax.device_put((pixels, sizes.astype(np.int32)), self._by_device)
        return self._posterior(self.params.vae, *args)


def encoder_bytes(folder: FluxFolder, *, latent_pixels: int, captions: int, t5_degree: int = 1) -> int:
    """Memory of a device that holds the encoders and runs them, about: parameters, and what a batch needs beside them.

    Args:
        folder: of the pipeline.
        latent_pixels: of the pictures that the device encodes together.
        captions: that it encodes together.
        t5_degree: devices that share a copy of T5's parameters.
    """
    configs, itemsize = folder.configs, folder.dtype.itemsize

    def count(params: Any) -> int:
        return sum(math.prod(x.shape) for x in jax.tree.leaves(params))

    text = count(abstract_params(configs.t5)) // t5_degree + count(abstract_params(configs.clip))
    autoencoder = 4 * count(abstract_params(configs.vae)["encoder"])
    finest = latent_pixels * configs.vae.factor**2 * configs.vae.block_out_channels[0]
    rows = captions * folder.text_tokens
    scores = min(_SCORE_BYTES, 4 * rows * folder.text_tokens * configs.t5.num_heads)
    hidden = rows * configs.t5.mlp_width * _BYTES_PER_HIDDEN
    return text * itemsize + autoencoder + max(_PICTURE_ARRAYS * finest * itemsize, hidden + 2 * scores)


def _load(
    folder: FluxFolder, mesh: Mesh, t5: ShardedModule, clip: ShardedModule, vae: ShardedModule
) -> EncoderParams:
    configs = folder.configs
    autoencoder = folder.load("vae", configs.vae, vae.shardings(mesh), jnp.float32)
    return EncoderParams(
        t5=folder.load("text_encoder_2", configs.t5, t5.shardings(mesh)),
        clip=folder.load("text_encoder", configs.clip, clip.shardings(mesh)),
        vae=autoencoder["encoder"],
    )


def _picture_encoder(vae: ShardedModule) -> Any:
    """From the encoder's parameters, pixels and sizes on a device to the posterior, scaled."""
    graph, abstract = nnx.split(vae.module)
    without_encoder = {"decoder": nnx.to_pure_dict(abstract)["decoder"]}

    def encode(params: Any, pixels: Array, sizes: Array) -> LatentPosterior:
        model = nnx.merge(graph, {**without_encoder, "encoder": params})
        config = model.config
        rows = pixels.shape[1] // config.factor

        def one(picture: Array, size: Array) -> LatentPosterior:
            image = picture.astype(jnp.float32) / 127.5 - 1.0
            found = model.encode(image[None], rows=PictureRows((), rows, size))
            scale = 2 * np.log(abs(config.scaling_factor)).astype(np.float32)
            return LatentPosterior(model.normalized(found.mean)[0], found.logvar[0] + scale)

        return jax.vmap(one)(pixels, sizes)

    return encode
