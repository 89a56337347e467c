"""LoRA adapters by diffusers' names: added to a model, saved and loaded in the format that diffusers reads."""

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from ..models import AdapterPart, LowRankAdapter, MMDiTConfig
from . import _dit, _flux
from ._configs import BackboneConfig
from ._files import TensorFiles, WeightsError, open_files
from ._names import Rule, leaf_at, leaves_of, nested
from ._save import LayersOnHost, check_finite
from ._tables import abstract_params
from ._write import shared_target, write_files

__all__ = ["DEFAULT_TARGETS", "Lora", "add_lora", "load_lora", "merge_lora", "save_lora"]

DEFAULT_TARGETS = (
    *("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"),
    *("ff.net.0.proj", "ff.net.2", "ff_context.net.0.proj", "ff_context.net.2"),
    *("proj_mlp", "single_transformer_blocks.*.proj_out"),
)
"""Projections of attention and MLPs; those that a model does not have are passed over."""

FILE_NAME = "pytorch_lora_weights.safetensors"
_PREFIX = "transformer."


def _is_positive(value: Any) -> bool:
    """Whether it is a finite positive number; true is none."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    try:
        return math.isfinite(value) and value > 0
    except OverflowError:  # a whole number that no float holds
        return False


@dataclass(frozen=True, slots=True)
class Lora:
    """Which layers have an adapter, and of what size.

    Attributes:
        rank: of every adapter.
        alpha: its product is scaled by alpha / rank; None for the rank.
        targets: diffusers' names of linear layers: the end of a name, as `to_q` or `attn.to_q`, or a pattern of a whole
            one, as `single_transformer_blocks.*.proj_out`. All blocks are treated alike.

    Raises:
        ValueError: for a rank or alpha that is not a positive number, or targets that are no texts.
    """

    rank: int
    alpha: float | None = None
    targets: tuple[str, ...] = DEFAULT_TARGETS

    def __post_init__(self) -> None:
        is_number = self.alpha is None or _is_positive(self.alpha)
        if type(self.rank) is not int or self.rank < 1 or not is_number or not self.scale > 0:
            raise ValueError(
                "Lora: rank and alpha must be positive, the rank a whole number; got "
                f"rank={self.rank!r}, alpha={self.alpha!r}. Try 16 and None."
            )
        if not isinstance(self.targets, (list, tuple)) or not all(
            isinstance(target, str) for target in self.targets
        ):
            raise ValueError(f"Lora: targets must be a list of texts; got targets={self.targets!r:.100}.")

    @property
    def scale(self) -> float:
        """Factor on the adapters' products."""
        return 1.0 if self.alpha is None else self.alpha / self.rank


@dataclass(frozen=True, slots=True)
class _Target:
    """A linear layer here, and the adapters it gets: one for each of the published layers that it is."""

    path: tuple[str, ...]
    parts: tuple[AdapterPart, ...]
    names: tuple[str, ...]


def _rules(config: BackboneConfig) -> list[Rule]:
    rules = _flux.diffusers_rules(config) if isinstance(config, MMDiTConfig) else _dit.diffusers_rules(config)
    return [rule for rule in rules if "{}" in rule.names[0] and not (rule.swapped or rule.copies)]


def _targets(config: BackboneConfig, lora: Lora) -> list[_Target]:
    """Linear layers with adapters.

    Raises:
        WeightsError: for a target that no layer has, unless it is one of the default ones.
    """
    shapes = abstract_params(config)
    found, known = [], []
    unused = set(lora.targets) - set(DEFAULT_TARGETS)
    for rule in _rules(config):
        module = _at(shapes, rule.path)
        if not isinstance(module, Mapping) or "kernel" not in module:
            continue
        widths = rule.widths or (module["kernel"].shape[-1],)
        parts, names, start = [], [], 0
        for name, width in zip(rule.names, widths, strict=True):
            known.append(name.replace("{}.", "*."))
            matching = [target for target in lora.targets if _matches(name, target)]
            if matching:
                unused -= set(matching)
                # Names of parts are attributes: no dots.
                parts.append(AdapterPart(name.split("{}.")[1].replace(".", "_"), start, start + width))
                names.append(name)
            start += width
        if parts:
            found.append(_Target(rule.path, tuple(parts), tuple(names)))
    unused = unused if found else set(lora.targets)
    if unused or not found:
        raise WeightsError(
            f"targets must be names of the model's linear layers; got {', '.join(sorted(unused)) or 'none'}. They are"
            f" {', '.join(known)}."
        )
    return found


def _at(shapes: Any, path: Sequence[str]) -> Any:
    for name in path:
        shapes = shapes.get(name) or {}
    return shapes


def _matches(name: str, target: str) -> bool:
    # No block has this name, so a target that names one block, where all are treated alike, matches nothing.
    name = name.format("any")
    return name.endswith("." + target) or fnmatch(name, target)


def add_lora(module: nnx.Module, config: BackboneConfig, lora: Lora, *, rngs: nnx.Rngs) -> None:
    """Give layers of a `MMDiT` or `DiT` adapters, in place; their parameters are `nnx.LoRAParam`s.

    Args:
        module: of this config; may be traced.
        config: of the model.
        lora: which layers, and how.
        rngs: source of the initial adapters.

    Raises:
        WeightsError: for targets that the model does not have.
    """
    for target in _targets(config, lora):
        linear: Any = module
        for name in target.path:
            linear = getattr(linear, name)
        linear.adapter = LowRankAdapter(
            linear.kernel.shape,
            target.parts,
            rank=lora.rank,
            scale=lora.scale,
            dtype=config.dtype,
            rngs=rngs,
        )


def _tensors(
    config: BackboneConfig, lora: Lora
) -> Iterator[tuple[str, tuple[int, ...], tuple[str, ...], int]]:
    """(name in the file without prefix, shape there, path of the parameter, layer) of all adapters."""
    shapes = abstract_params(config)
    for target in _targets(config, lora):
        num_layers, inputs, _ = leaf_at(shapes, (*target.path, "kernel")).shape
        for part, name in zip(target.parts, target.names, strict=True):
            path = (*target.path, "adapter", "parts", part.name)
            for layer in range(num_layers):
                there = name.format(layer)
                yield f"{there}.lora_A.weight", (lora.rank, inputs), (*path, "a"), layer
                yield f"{there}.lora_B.weight", (part.stop - part.start, lora.rank), (*path, "b"), layer


def _check_adapters(params: Any, config: BackboneConfig, lora: Lora) -> None:
    """Refuse parameters whose adapters are not those of `lora`: some would be left out, or scaled by another rank.

    Raises:
        WeightsError: naming the first that differs.
    """
    wanted = {}
    for _, shape, path, _ in _tensors(config, lora):
        wanted[path] = shape[::-1]
    found = {path: tuple(leaf.shape[1:]) for path, leaf in leaves_of(params) if "adapter" in path}
    for path in sorted(found.keys() | wanted.keys()):
        if found.get(path) != wanted.get(path):
            raise WeightsError(
                f"{'.'.join(path)} of the parameters has shape {found.get(path)} a layer, {lora} makes it"
                f" {wanted.get(path)}."
            )


def save_lora(folder: str | os.PathLike[str], params: Any, config: BackboneConfig, lora: Lora) -> None:
    """Save adapters as `pytorch_lora_weights.safetensors`, which diffusers' `load_lora_weights` reads.

    `b` is saved times alpha / rank, since a reader without an alpha takes the rank for it. Float32; with several
    processes all call it and the first one writes.

    Args:
        folder: new, or empty.
        params: nested dicts with the adapters (and perhaps the rest) of a model with `add_lora`.
        config: of the model.
        lora: of the adapters.

    Raises:
        WeightsError: for a folder that is not empty, targets that the model does not have, adapters of another `lora`,
            or values that are not finite; with several processes, on the others if the first fails.
        OSError: on the process that writes, if the system refuses.
    """
    folder = shared_target(folder)
    _check_adapters(params, config, lora)
    tensors = list(_tensors(config, lora))
    where = {_PREFIX + name: (path, layer) for name, _, path, layer in tensors}
    sizes = {_PREFIX + name: 4 * int(np.prod(shape)) for name, shape, _, _ in tensors}
    layers = LayersOnHost(params)

    def fetch(name: str) -> np.ndarray:
        path, layer = where[name]
        values = layers.get(path, layer).T
        if path[-1] == "b":
            with np.errstate(over="ignore"):  # said below
                values = values * np.float32(lora.scale)
        check_finite(name, values)
        return np.ascontiguousarray(values)

    write_files(
        folder,
        FILE_NAME,
        sizes,
        fetch,
        max_file_bytes=1 << 62,
        others={},
    )


def load_lora(path: str | os.PathLike[str], config: BackboneConfig, lora: Lora) -> dict[str, Any]:
    """Load adapters from a file in diffusers' format, with or without the prefix `transformer.`.

    Args:
        path: the file, or the folder that holds it.
        config: of the model.
        lora: the targets and rank the file must have. Its alphas enter the values, whether the file has them as tensors
            or, as diffusers writes them, in its header.

    Returns:
        Nested dicts of float32 NumPy arrays: the adapters' place among the model's parameters.

    Raises:
        WeightsError: for a file with other targets, another rank, or of another model.
    """
    files = open_files(path)
    prefix = _PREFIX if any(name.startswith(_PREFIX) for name in files.tensors) else ""
    expected = list(_tensors(config, lora))
    shapes = {prefix + name: shape for name, shape, _, _ in expected}
    alphas = {name.replace(".lora_B.weight", ".alpha") for name in shapes if name.endswith(".lora_B.weight")}
    present = {name: files.tensors[name].shape for name in alphas & files.tensors.keys()}
    files.check({**shapes, **present})
    whole_scale = _header_scale(files, lora.rank)
    found: dict[tuple[str, ...], list[np.ndarray]] = {}
    for name, _, leaf_path, _ in expected:
        values = _read(files, prefix + name).T
        if leaf_path[-1] == "b":
            scale = _file_scale(files, prefix + name, lora.rank) or whole_scale
            values = values * np.float32(scale / lora.scale)
        found.setdefault(leaf_path, []).append(values)
    return nested({leaf_path: np.stack(layers) for leaf_path, layers in found.items()})


def _read(files: TensorFiles, name: str) -> np.ndarray:
    chunks = [chunk for _, chunk in files.chunks(name, (0, files.tensors[name].shape[0]))]
    return np.concatenate(chunks).astype(np.float32)


def _file_scale(files: TensorFiles, name: str, rank: int) -> float | None:
    """alpha / rank of an adapter, if the file has a tensor that says so."""
    alpha = name.replace(".lora_B.weight", ".alpha")
    if alpha not in files.tensors:
        return None
    return _checked_alpha(files, alpha, files.scalar(alpha)) / rank


def _checked_alpha(files: TensorFiles, name: str, alpha: Any) -> float:
    if not _is_positive(alpha):
        raise WeightsError(
            f"{files.path}: {name} must be a positive number; got {alpha!r:.100}. Save the adapters again."
        )
    return float(alpha)


# Ways of scaling or placing adapters, by their names in the header, that are not implemented.
_UNKNOWN_TO_US = ("rank_pattern", "alpha_pattern", "use_rslora", "use_dora", "layer_replication")


def _header_scale(files: TensorFiles, rank: int) -> float:
    """alpha / rank of all adapters by the header that diffusers writes; 1 without one."""
    text = files.metadata().get("lora_adapter_metadata")
    if text is None:
        return 1.0
    try:
        found = {name.removeprefix(_PREFIX): value for name, value in json.loads(text).items()}
    except (ValueError, AttributeError, RecursionError) as error:
        raise WeightsError(f"{files.path}: lora_adapter_metadata cannot be read ({error}).") from error
    others = [name for name in _UNKNOWN_TO_US if found.get(name)]
    if others:
        raise WeightsError(
            f"{files.path} has adapters with {', '.join(others)}, which are not known here. Merge them where they were"
            " trained, and load the whole model."
        )
    stated = found.get("r", rank)
    if type(stated) is not int or stated != rank:  # the tensors have it: that was checked
        raise WeightsError(
            f"{files.path}: r in its header must be the rank of its tensors, {rank}; got {stated!r:.100}. Save the"
            " adapters again."
        )
    return _checked_alpha(files, "lora_alpha", found.get("lora_alpha", rank)) / rank


def merge_lora(params: Any, config: BackboneConfig, lora: Lora) -> dict[str, Any]:
    """Parameters of the plain model that computes the same: kernels with their adapters' products added.

    Args:
        params: nested dicts of a model with `add_lora`.
        config: of the model.
        lora: of its adapters.

    Returns:
        Nested dicts without adapters; kernels that had one are float32, other leaves are the same arrays.

    Raises:
        WeightsError: for targets that the model does not have, or adapters of another `lora`.
    """
    _check_adapters(params, config, lora)
    merged = _without_adapters(params)
    for target in _targets(config, lora):
        module = leaf_at(params, target.path)
        kernel = module["kernel"].astype(jnp.float32)
        for part in target.parts:
            pair = module["adapter"]["parts"][part.name]
            kernel = kernel.at[..., part.start : part.stop].add(
                lora.scale * jnp.matmul(pair["a"], pair["b"], precision="highest")
            )
        leaf_at(merged, target.path)["kernel"] = kernel
    return merged


def _without_adapters(tree: Any) -> Any:
    if not isinstance(tree, Mapping):
        return tree
    return {name: _without_adapters(value) for name, value in tree.items() if name != "adapter"}
