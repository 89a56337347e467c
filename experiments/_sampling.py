"""Prompts to pictures: requests of any mixture of sizes sampled in one packed batch."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from experiments._config import UserError
from experiments._feed import by_device_placer, home_rows
from experiments._platform import compiled_together
from experiments._run import Run
from experiments.data import StepData, StepIndex, frames_from_rows
from jaxdit import on_host
from jaxdit.encoders import TOKEN_BYTES, byte_tokens
from jaxdit.training import SampleInputs, SamplerSettings, make_sample_step, plan_without_text
from solver import StepCapacity, StepLayout, capacity_for, step_tables

_SIZE = re.compile(r"(?:(\d+)x)?(\d+)x(\d+)")


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """A picture or clip to make.

    Attributes:
        prompt: caption, or class number for a class-conditional model.
        frames, height, width: size in frames and pixels.
        noise_id: names its noise: the same seed, prompt, size and noise_id give the same picture in any batch.
    """

    prompt: str
    frames: int
    height: int
    width: int
    noise_id: int = 0


def parse_size(text: str) -> tuple[int, int, int]:
    """Frames, height and width from "32x48" or "4x32x48".

    Raises:
        UserError: for another form.
    """
    text = text.strip()
    match = _SIZE.fullmatch(text)
    if match is None:
        raise UserError(
            f"a size is HEIGHTxWIDTH or FRAMESxHEIGHTxWIDTH in pixels, such as 32x48; got {text!r}."
        )
    return int(match[1] or 1), int(match[2]), int(match[3])


def parse_request(text: str, noise_id: int) -> SampleRequest:
    """A request from "caption | HEIGHTxWIDTH".

    Raises:
        UserError: for another form.
    """
    prompt, bar, size = text.rpartition("|")
    if not bar:
        raise UserError(f"a sample prompt is 'caption | HEIGHTxWIDTH'; got {text!r}.")
    return SampleRequest(prompt.strip(), *parse_size(size), noise_id)


def check_prompts(run: Run) -> None:
    """Refuse sample prompts of the config that the model cannot make, before the run and not at its first grid.

    Raises:
        UserError: naming the rule.
    """
    check_requests([parse_request(text, i) for i, text in enumerate(run.settings.sample_prompts)], run)


def check_requests(requests: Sequence[SampleRequest], run: Run) -> None:
    """Refuse what the model cannot make.

    Raises:
        UserError: naming the rule.
    """
    for request in requests:
        check_request(request, run)


def check_request(request: SampleRequest, run: Run) -> None:
    """Refuse what the model cannot make.

    Raises:
        UserError: naming the rule.
    """
    patch, model = run.settings.data.patch, run.settings.model
    if not patch:
        raise UserError(
            "this run cannot make pictures: its rows, of encoded or synthetic data, are no pixels. Export its weights"
            " with experiments.export, and sample where the decoder of its latents is."
        )
    for name in ("frames", "height", "width"):
        value = getattr(request, name)
        step = 1 if name == "frames" else patch
        if value < step or value % step:
            nearest = max(round(value / step), 1) * step
            raise UserError(f"{name} must be a multiple of {step}; got {name}={value}. Try {nearest}.")
    if patch**2 * 3 != model.channels:
        raise UserError(
            f"a patch of {patch} x {patch} pixels has {patch**2 * 3} channels, the model {model.channels}. Leave the"
            " data's patch as it was trained."
        )
    tokens = request.frames * (request.height // patch) * (request.width // patch)
    run.check_sample_rows(-(-tokens // run.widest_bag), f"the picture has {tokens:,} tokens")
    if model.uses_labels:
        _check_label(request.prompt, model.num_classes)
        return
    if request.prompt.encode(errors="replace").decode() != request.prompt:
        raise UserError(f"a prompt must be valid Unicode; got {request.prompt!a}.")
    if model.max_text is None:
        raise UserError("this model takes precomputed text features; it cannot be prompted with text yet.")
    num_tokens = len(byte_tokens(request.prompt))
    if num_tokens > model.max_text:
        raise UserError(
            f"a prompt has at most {model.max_text} tokens (words, longer ones {TOKEN_BYTES} bytes a token); got"
            f" {num_tokens}. Shorten it."
        )


def _check_label(prompt: str, num_classes: int) -> None:
    if not (prompt.isascii() and prompt.isdigit() and int(prompt) < num_classes):
        raise UserError(f"the prompt of this model is a class number below {num_classes}; got {prompt!r}.")


class PictureSampler:
    """Samples batches of requests with a run's model; programs are kept per capacity.

    Args:
        run: the run, on the mesh to sample on.
        settings: steps, guidance, method; the run's own by default.
        seed: of the noise.
    """

    def __init__(self, run: Run, settings: SamplerSettings | None = None, *, seed: int = 0) -> None:
        self._run, self._settings = run, settings or run.settings.sampler
        self._key = jax.random.key(seed, impl="threefry2x32")
        self._capacity: StepCapacity | None = None
        self._programs: dict[StepCapacity, Any] = {}

    def __call__(self, params: Any, requests: Sequence[SampleRequest]) -> list[np.ndarray]:
        """Uint8 RGB of shape (frames, height, width, 3) for each request; with several processes, on all of them.

        Raises:
            UserError: for a request the model cannot make.
        """
        check_requests(requests, self._run)
        index = self._index(requests)
        planner = self._run.planner
        layout = planner.layout(index)
        without = StepLayout(plan_without_text(layout.plan), layout.block, layout.head_groups)
        capacity = self._grow(planner.needs(layout), planner.needs(without))
        inputs = self._inputs(index, requests, capacity, self._tables(capacity, layout, without))
        if capacity not in self._programs:
            sample = make_sample_step(
                self._run.program, capacity, guidance_scale=self._settings.guidance_scale
            )
            name = f"pictures-{len(self._programs)}"
            self._programs[capacity] = compiled_together(sample, name, params, inputs, self._key)
        rows = self._programs[capacity](params, inputs, self._key)
        return self._pictures(on_host(rows), index)

    def _grow(self, *needs: StepCapacity) -> StepCapacity:
        """The capacity of the batches so far and of these needs; it has room for text even where there is none."""
        if self._capacity is None:
            self._capacity = capacity_for(needs)
        for need in needs:
            self._capacity = self._capacity.grown(need)
        return self._capacity

    def _index(self, requests: Sequence[SampleRequest]) -> StepIndex:
        patch = self._run.settings.data.patch
        grid = np.array([(r.frames, r.height // patch, r.width // patch) for r in requests], np.int32)
        image = grid.prod(1).astype(np.int32)
        labelled = self._run.settings.model.uses_labels
        text = np.array([0 if labelled else len(byte_tokens(r.prompt)) for r in requests], np.int32)
        zeros = np.zeros(len(requests), np.int32)
        return StepIndex(
            step=0,
            source=zeros,
            index=zeros,
            epoch=zeros,
            grid=grid,
            image_lengths=image,
            text_lengths=text,
            lengths=image + text,
            dropped=zeros.astype(bool),
            loss_weight=np.ones(len(requests), np.float32),
        )

    def _tables(self, capacity: StepCapacity, layout: StepLayout, without: StepLayout) -> tuple[Any, Any]:
        local, place, _ = by_device_placer(self._run.mesh)
        conditional, unconditional = (step_tables(x, capacity, local) for x in (layout, without))
        return jax.tree.map(place, conditional), jax.tree.map(place, unconditional)

    def _inputs(
        self,
        index: StepIndex,
        requests: Sequence[SampleRequest],
        capacity: StepCapacity,
        tables: tuple[Any, Any],
    ) -> SampleInputs:
        run = self._run
        local, place, replicate = by_device_placer(run.mesh)
        mine = np.flatnonzero(np.isin(index.home(run.planner.num_devices), local)).tolist()
        channels, labelled = run.settings.model.channels, run.settings.model.uses_labels
        data = StepData(
            index=index,
            num_devices=run.planner.num_devices,
            local_devices=tuple(local),
            sequences=np.array(mine, np.int32),
            rows=tuple(np.zeros((int(index.image_lengths[i]), channels), np.float32) for i in mine),
            text=tuple(byte_tokens(requests[i].prompt)[: index.text_lengths[i]] for i in mine),
            pooled=(),
            loss_weight=np.ones(len(mine), np.float32),
            channels=channels,
            labels=tuple(int(requests[i].prompt) for i in mine) if labelled else None,
        )
        padded = np.zeros((2, capacity.sequences), np.int32)
        padded[0, : len(requests)] = index.image_lengths
        padded[1, : len(requests)] = [request.noise_id for request in requests]
        scheduler = run.settings.objective.scheduler(self._settings.method)
        return SampleInputs(
            rows=jax.tree.map(place, home_rows(data, capacity)),
            tables=tables[0],
            tables_without_text=tables[1],
            sampling=jax.tree.map(replicate, scheduler.table(self._settings.num_steps, padded[0])),
            num_image_tokens=replicate(padded[0]),
            noise_ids=replicate(padded[1]),
        )

    def _pictures(self, rows: np.ndarray, index: StepIndex) -> list[np.ndarray]:
        """Cut home rows (devices, rows, channels) into pictures."""
        patch = self._run.settings.data.patch
        home = index.home(self._run.planner.num_devices)
        next_row = np.zeros(self._run.planner.num_devices, np.int64)
        pictures = []
        for device, grid, count in zip(home, index.grid.tolist(), index.image_lengths, strict=True):
            start = next_row[device]
            next_row[device] += count
            cut = rows[device, start : start + count]
            pictures.append(frames_from_rows(cut, grid=tuple(grid), patch=patch))
        return pictures
