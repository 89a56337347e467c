"""The planner of a run: bags, machines, and what plans are compared by."""

import dataclasses
import logging
from collections import Counter

import numpy as np
from jax.sharding import Mesh

from experiments._calibration import DEFAULT_GAMMA, load_calibration
from experiments._components import RunSettings
from experiments._config import UserError, checking
from experiments._feed import Planner
from experiments._platform import needs_padded_exchange
from parallel import check_machines
from solver import BagSpec, CostModel, Links, Topology, parse_bags

_LOG = logging.getLogger(__name__)

_LARGEST_BLOCK = 4096
# Virtual devices on two cores, by the core: what blocks take that are not full is in the rate of compute.
CPU_LINKS = Links(
    flops_per_s=27e9, inside_bytes_per_s=1.2e9, across_bytes_per_s=1.2e9, element_bytes=4, padded=True
)


def planner_on(settings: RunSettings, mesh: Mesh) -> Planner:
    """The planner of a run on a mesh.

    Raises:
        UserError: as `make_planner`, or for machines that cut a process in two.
    """
    of_a_process = sorted(set(Counter(device.process_index for device in mesh.devices.flat).values()))
    # Processes of several devices each are machines, unless told otherwise.
    machines = len(of_a_process) == 1 and 1 < of_a_process[0] < mesh.devices.size
    planner = make_planner(
        settings,
        mesh.devices.size,
        padded=needs_padded_exchange(mesh),
        of_a_machine=of_a_process[0] if machines else None,
    )
    if planner.topology is not None:
        with checking("train.devices_per_machine"):
            check_machines(mesh, planner.topology.devices_per_machine)
    elif planner.bags == "auto" and of_a_process[-1] < mesh.devices.size:
        _LOG.warning(
            "the %d devices of several processes count as one machine, within which traffic is cheap. Where they are on"
            " several machines, set train.devices_per_machine",
            mesh.devices.size,
        )
    return planner


def make_planner(
    settings: RunSettings, num_devices: int, *, padded: bool, of_a_machine: int | None = None
) -> Planner:
    """The planner of a run; `padded` as in `Planner`.

    Args:
        settings: of the run.
        num_devices: of its mesh.
        padded: as in `Planner`.
        of_a_machine: devices of a machine where the settings leave it open; all, if None or no divisor of them.

    Raises:
        UserError: for a malformed bag spec, or one that does not divide the devices.
    """
    with checking("train.bags"):
        bags: BagSpec | str | None = settings.bags
        if settings.bags is not None and settings.bags != "auto":
            bags = spec = parse_bags(settings.bags)
            spec.layout(num_devices)
    topology = None
    if of_a_machine is not None and num_devices % of_a_machine:
        of_a_machine = None
    if settings.devices_per_machine is not None:
        of_a_machine = settings.devices_per_machine
        if of_a_machine < 1 or num_devices % of_a_machine:
            raise UserError(
                "train.devices_per_machine must be at least 1 and divide the devices; got"
                f" devices_per_machine={of_a_machine} and {num_devices} devices."
            )
    if of_a_machine is not None:
        topology = Topology(num_devices // of_a_machine, of_a_machine)
    cost, links = _costs(settings, padded=padded)
    if not 8 <= settings.block <= _LARGEST_BLOCK or settings.block % 8:
        raise UserError(
            f"train.block must be a multiple of 8 in [8, {_LARGEST_BLOCK}]; got block={settings.block}. Try 128."
        )
    if not 1 <= settings.head_groups <= settings.model.num_heads:
        raise UserError(
            f"train.head_groups must be in [1, {settings.model.num_heads}], the model's heads; got"
            f" head_groups={settings.head_groups}. Take 1 or 2."
        )
    if settings.max_rows is not None and (settings.bags != "auto" or not settings.max_rows >= 1):
        raise UserError(
            "train.max_rows must be at least 1, the mean, and goes with train.bags='auto'; got"
            f" max_rows={settings.max_rows} and bags={settings.bags!r}. 1.5 suits most mixes."
        )
    return Planner(
        num_devices=num_devices,
        num_heads=settings.model.num_heads,
        bags=bags,
        cost=cost,
        topology=topology,
        links=links,
        max_rows=settings.max_rows,
        block=settings.block,
        head_groups=settings.head_groups,
        padded=padded,
    )


def default_links(*, padded: bool) -> Links:
    """Speeds where none were measured; `padded` as in `Planner`."""
    return CPU_LINKS if padded else Links()


def _costs(settings: RunSettings, *, padded: bool) -> tuple[CostModel, Links]:
    """What plans are compared by: measured where there is a calibration, and a gamma that is set wins over it."""
    model, links = settings.model, default_links(padded=padded)
    with checking():
        if settings.calibration is None:
            gamma = DEFAULT_GAMMA if settings.gamma is None else settings.gamma
            return CostModel(model.width, gamma), links
        calibration = load_calibration(settings.calibration)
        cost = calibration.cost_model(model.width)
        if settings.gamma is not None:
            cost = dataclasses.replace(cost, gamma=settings.gamma)
        return cost, calibration.links(links)


def warn_of_differences(settings: RunSettings, mesh: Mesh) -> None:
    """Warn of a calibration that was measured on other devices or another model."""
    if settings.calibration is not None:
        load_calibration(settings.calibration).warn_of_differences(
            device_kind=mesh.devices.flat[0].device_kind,
            width=settings.model.width,
            num_heads=settings.model.num_heads,
            dtype=np.dtype(settings.model.dtype).name,
        )
