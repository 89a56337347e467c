"""How long FLUX.1 takes to sample: modelled with the planner's constants, beside what xDiT has published.

"Published" are whole pictures, text encoders and decoder included, of xDiT's docs/performance/flux.md, with
torch.compile. "Modelled" are the transformer's layers alone.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from solver import (
    A100_MACHINE,
    H100_MACHINE,
    SequenceHardware,
    SequenceMesh,
    SequenceShape,
    Topology,
    layer_timeline,
    plan_sequence_parallel,
)

_HEADS, _HEAD_DIM, _LAYERS = 24, 128, 19 + 38
_PIXELS_PER_TOKEN = 16
_DEV_TEXT, _SCHNELL_TEXT = 512, 256
_DEV_STEPS, _SCHNELL_STEPS = 28, 4
PIXELS = (1024, 1536, 2048, 3072, 4096)
MACHINES = (1, 2, 4)
_GPUS = 8


@dataclass(frozen=True, slots=True)
class PublishedPicture:
    """A published latency.

    Attributes:
        name: algorithm and degrees, or what is known of them.
        gpu, hardware: on which it was measured, and what the planner knows of it.
        pixels: along an edge.
        ulysses, ring: degrees, inside one machine.
        seconds: of a picture.
        is_dev: 28 steps with 512 tokens of text; else schnell's 4 with 256.
    """

    name: str
    gpu: str
    hardware: SequenceHardware
    pixels: int
    ulysses: int
    ring: int
    seconds: float
    is_dev: bool

    @property
    def modelled_s(self) -> float:
        """Of all layers in all steps."""
        mesh = SequenceMesh(1, self.ulysses, 1, self.ring)
        text, steps = (_DEV_TEXT, _DEV_STEPS) if self.is_dev else (_SCHNELL_TEXT, _SCHNELL_STEPS)
        shape = SequenceShape(_HEADS, _HEAD_DIM, image_tokens(self.pixels) + text, 1)
        topology = Topology(1, self.ulysses * self.ring)
        events = layer_timeline(topology, shape, mesh, self.hardware, head_groups=1)
        return steps * _LAYERS * max(event.stop_s for event in events)


def _h100(name: str, ulysses: int, ring: int, seconds: float) -> PublishedPicture:
    return PublishedPicture(name, "H100", H100_MACHINE, 1024, ulysses, ring, seconds, True)


def _a100(pixels: int, seconds: float) -> PublishedPicture:
    return PublishedPicture("Ulysses 8", "A100", A100_MACHINE, pixels, 8, 1, seconds, False)


PUBLISHED = (
    _h100("1 GPU", 1, 1, 4.30),
    _h100("Ulysses 2", 2, 1, 2.68),
    _h100("ring 2", 1, 2, 2.60),
    _h100("Ulysses 2, ring 2", 2, 2, 1.80),
    _h100("Ulysses 4", 4, 1, 1.63),
    _h100("ring 4", 1, 4, 1.98),
    _a100(1024, 0.82),
    _a100(2048, 2.4),
)


def image_tokens(pixels: int) -> int:
    """Of a square picture."""
    return (pixels // _PIXELS_PER_TOKEN) ** 2


def latency_rows() -> list[dict[str, Any]]:
    """Published pictures beside the model's."""
    return [
        {
            "model": "dev, 28 steps" if one.is_dev else "schnell, 4 steps",
            "gpu": one.gpu,
            "gpus": one.ulysses * one.ring,
            "pixels": one.pixels,
            "algorithm": one.name,
            "published_s": one.seconds,
            "modelled_s": one.modelled_s,
        }
        for one in PUBLISHED
    ]


def planned_rows() -> list[dict[str, Any]]:
    """What the engine's planner takes for a FLUX.1-dev picture on machines of 8 H100, and how long 28 steps are."""
    return [row for machines in MACHINES for row in _planned(machines)]


def _planned(machines: int) -> Iterator[dict[str, Any]]:
    for pixels in PIXELS:
        plan = plan_sequence_parallel(
            Topology(machines, _GPUS),
            _HEADS,
            _HEAD_DIM,
            (image_tokens(pixels), _DEV_TEXT),
            hardware=H100_MACHINE,
        )
        yield {
            "machines": machines,
            "pixels": pixels,
            "algorithm": plan.algorithm,
            "seconds": _DEV_STEPS * _LAYERS * plan.layer_s,
            "usp_seconds": _DEV_STEPS * _LAYERS * plan.usp_layer_s,
        }
