"""What would make a program fit that does not: cheaper settings, by arithmetic on the sum made by hand."""

import dataclasses

from jax.sharding import AbstractMesh, AxisType

from experiments._aot_memory import HandSum, hand_sum
from experiments._aot_program import AbstractRun, Requested
from experiments._components import RunSettings
from experiments._disk import size_text
from parallel import DATA_AXES

# Above compiled over predicted bytes at worst, measured: 1.21, of DiT-XL/2 with 65,000 tokens a device, from
# train.remat=none to eight shards (12.75 GB for 10.5); 1.09 to train.remat=full, 1.02 to half the tokens.
_WORST_RATIO = 1.25


@dataclasses.dataclass(frozen=True, slots=True)
class Remedy:
    """A cheaper setting.

    Attributes:
        text: what to set.
        peak_bytes: predicted bytes of a device; None if it is what the run has.
        limit: memory of a device.
    """

    text: str
    peak_bytes: int | None
    limit: int

    @property
    def fits(self) -> bool:
        """Whether they fit with certainty: not where the arithmetic has been too low by as much as is left."""
        return self.peak_bytes is not None and self.peak_bytes * _WORST_RATIO <= self.limit

    def __str__(self) -> str:
        if self.peak_bytes is None:
            return f"{self.text}: set already"
        verdict = "fits" if self.fits else "may fit" if self.peak_bytes <= self.limit else "does not fit"
        return f"{self.text}: {size_text(max(self.peak_bytes, 0))}, {verdict}"


def remedies(run: AbstractRun, hand: HandSum, peak_bytes: int, limit: int) -> list[Remedy]:
    """Cheaper settings with the bytes that they would take: three for training, two for sampling, which keeps nothing.

    Predicted: the compiled peak plus the difference of the sums made by hand.

    Args:
        run: the run that does not fit.
        hand: its sum.
        peak_bytes: its compiled peak.
        limit: memory of a device.
    """
    settings = run.requested.settings
    full = dataclasses.replace(settings, remat="full")
    sharded = dataclasses.replace(full, shards=settings.num_devices)
    sums = {} if run.requested.forward_only else {"train.remat=full": _sum_of(run, hand, full)}
    sums[f"train.shards={settings.num_devices} (with train.remat=full)"] = _sum_of(run, hand, sharded)
    sums["half the tokens on a device (half the token budget, or twice the devices)"] = hand.with_tokens(0.5)
    found = []
    for text, total in sums.items():
        peak = peak_bytes + total.total - hand.total
        found.append(Remedy(text, None if total is hand else peak, limit))
    return found


def _sum_of(run: AbstractRun, hand: HandSum, settings: RunSettings) -> HandSum:
    """The sum of the run with other settings; its own if they are its settings."""
    if (settings.remat, settings.shards) == (run.requested.settings.remat, run.requested.settings.shards):
        return hand
    if run.requested.forward_only and settings.shards == run.requested.settings.shards:
        return hand
    shape = (settings.num_devices // settings.shards, settings.shards)
    mesh = AbstractMesh(shape, DATA_AXES, axis_types=(AxisType.Auto, AxisType.Auto))
    requested: Requested = dataclasses.replace(run.requested, settings=settings)
    return hand_sum(AbstractRun(requested, mesh))


def does_not_fit_text(title: str, peak_bytes: int, limit: int, found: list[Remedy]) -> str:
    """One line: by how much it does not fit, and which cheaper settings would."""
    return (
        f"the program takes {size_text(peak_bytes)} of the {size_text(limit)} of a {title},"
        f" {size_text(peak_bytes - limit)} too much. By arithmetic: {'; '.join(map(str, found))}."
    )
