"""`make parity`: compares the models here with diffusers, and text encoders and tokenizers with transformers, on every
case, and records what `make test` compares with.

Writes docs/parity.json (largest errors of each case) and tests/data/parity/ (the reference's results of small cases).
Exits with 1 if an error is above its bound.
"""

import json
import logging
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import diffusers
import jax
import numpy as np
import tokenizers
import torch
import transformers
from safetensors.numpy import save_file

from jaxdit.weights import Lora, SaveFormat, load_params, read_config, save_lora, save_params
from tests.parity.autoencoder import (
    AUTOENCODER_BOUND,
    AUTOENCODER_CASES,
    AutoencoderCase,
    autoencoder_errors,
    run_our_autoencoder,
)
from tests.parity.autoencoder_reference import (
    autoencoder_reference_model,
    check_autoencoder_exports,
    run_autoencoder_reference,
)
from tests.parity.cases import CASES, Case
from tests.parity.ours import (
    bounds_of,
    draw_adapters,
    errors,
    has_exact_angles,
    run_ours,
)
from tests.parity.pipeline import PIPELINE_BOUND, PIPELINE_CASES, PipelineCase, write_pipeline
from tests.parity.pipeline_ours import pipeline_errors, run_our_pipeline
from tests.parity.pipeline_reference import run_pipeline_reference
from tests.parity.reference import (
    check_export,
    reference_model,
    run_reference,
    run_reference_with_adapters,
)
from tests.parity.scheduler_cases import SCHEDULER_CASES
from tests.parity.scheduler_ours import SCHEDULER_BOUNDS, scheduler_errors
from tests.parity.scheduler_reference import run_reference_scheduler
from tests.parity.text_cases import TEXT_CASES, TextCase, write_encoder
from tests.parity.text_ours import TEXT_BOUNDS, run_our_text, run_our_tokenizers, text_errors
from tests.parity.text_reference import (
    run_text_reference,
    run_tokenizer_reference,
    text_reference_model,
    train_tokenizers,
)

_ROOT = Path(__file__).parents[2]
_RECORDED = _ROOT / "tests/data/parity"
_LOG = logging.getLogger("parity")
# In bfloat16, over the reference's own error.
_BF16_FACTOR = 2.0


def _record(name: str, results: dict[str, np.ndarray]) -> None:
    _RECORDED.mkdir(parents=True, exist_ok=True)
    save_file(results, _RECORDED / f"{name}.safetensors")


def _compare(case: Case, folder: Path) -> dict[str, dict[str, float]]:
    reference_model(case).save_pretrained(folder / "theirs")
    reference = run_reference(case)
    if case.recorded:
        _record(case.name, reference)
    config = read_config(folder / "theirs", compute_dtype="float32")
    save_params(
        folder / "ours", load_params(folder / "theirs", config), config, SaveFormat(max_file_bytes=1 << 20)
    )
    check_export(case, folder / "ours")
    found = {
        "float32": errors(run_ours(case, folder / "ours"), reference),
        "bfloat16": errors(run_ours(case, folder / "ours", "bfloat16"), reference),
        "reference_bfloat16": errors(run_reference(case, torch.bfloat16), reference),
    }
    if case.kind == "flux" and has_exact_angles(case):
        found["adapters"] = _compare_adapters(case, folder, config)
    return found


def _compare_adapters(case: Case, folder: Path, config: Any) -> dict[str, float]:
    """The largest error of outputs with adapters that were saved here and loaded by diffusers."""
    lora = Lora(rank=4, alpha=6.0)
    adapters = draw_adapters(config, lora)
    save_lora(folder / "lora", adapters, config, lora)
    reference = run_reference_with_adapters(case, folder / "lora" / "pytorch_lora_weights.safetensors")
    ours = run_ours(case, folder / "ours", adapters=adapters, lora=lora)
    worst = [np.abs(ours[name] - value).max() / np.abs(value).max() for name, value in reference.items()]
    return {"output": float(max(worst))}


def _compare_schedulers(failed: list[str]) -> dict[str, dict[str, float]]:
    """The largest errors of every scheduler, after recording what the reference gave."""
    references = {case.name: run_reference_scheduler(case) for case in SCHEDULER_CASES}
    recorded = {f"{name}.{key}": x for name, found in references.items() for key, x in found.items()}
    _record("schedulers", recorded)
    results = {case.name: scheduler_errors(case, references[case.name]) for case in SCHEDULER_CASES}
    _LOG.info("schedulers %s", json.dumps(results))
    failed += [
        f"scheduler {name}"
        for name, found in results.items()
        if any(found[k] > bound for k, bound in SCHEDULER_BOUNDS.items())
    ]
    return results


def _compare_text(case: TextCase, folder: Path) -> dict[str, dict[str, float]]:
    reference = run_text_reference(case)
    if case.recorded:
        _record(case.name, reference)
    # transformers 5 writes other names than 4 did.
    text_reference_model(case).save_pretrained(folder / "theirs")
    write_encoder(case, folder / "ours")
    found = [text_errors(run_our_text(case, folder / name), reference) for name in ("theirs", "ours")]
    return {
        "float32": {group: max(errors[group] for errors in found) for group in TEXT_BOUNDS},
        "bfloat16": text_errors(run_our_text(case, folder / "theirs", "bfloat16"), reference),
        "reference_bfloat16": text_errors(run_text_reference(case, torch.bfloat16), reference),
    }


def _compare_tokenizers() -> bool:
    """Record small tokenizers and what transformers makes of texts with them; whether it is the same here."""
    root = _RECORDED / "tokenizers"
    if not root.is_dir():  # training is not repeatable
        train_tokenizers(root)
    reference = run_tokenizer_reference(root)
    (root / "tokens.json").write_text(json.dumps(reference) + "\n", encoding="utf-8")
    return run_our_tokenizers(root) == reference


def _compare_all_text(failed: list[str]) -> dict[str, Any]:
    results = {}
    for case in TEXT_CASES:
        with tempfile.TemporaryDirectory() as folder:
            found = results[case.name] = _compare_text(case, Path(folder))
        _LOG.info("%s %s", case.name, json.dumps(found))
        if any(found["float32"][group] > bound for group, bound in TEXT_BOUNDS.items()):
            failed.append(f"{case.name} in float32")
        if any(found["bfloat16"][k] > _BF16_FACTOR * v for k, v in found["reference_bfloat16"].items()):
            failed.append(f"{case.name} in bfloat16")
    if not _compare_tokenizers():
        failed.append("tokenizers")
    return results


def compare_autoencoder(case: AutoencoderCase, folder: Path) -> dict[str, dict[str, float]]:
    """Errors of an autoencoder, after exports of it were loaded by diffusers."""
    autoencoder_reference_model(case).save_pretrained(folder / "theirs")
    reference = run_autoencoder_reference(case)
    if case.recorded:
        _record(case.name, reference)
    config = read_config(folder / "theirs", compute_dtype="float32")
    params = load_params(folder / "theirs", config)
    for layout in ("diffusers", "diffusers_old", "original"):
        save_params(folder / layout, params, config, SaveFormat(layout=layout))
    shutil.copy(folder / "diffusers/config.json", folder / "diffusers_old")
    old = folder / "diffusers_old"
    (old / "ae.safetensors").rename(old / "diffusion_pytorch_model.safetensors")
    check_autoencoder_exports(case, folder)
    return {
        "float32": autoencoder_errors(run_our_autoencoder(case, old), reference),
        "bfloat16": autoencoder_errors(
            run_our_autoencoder(case, folder / "diffusers", "bfloat16"), reference
        ),
        "reference_bfloat16": autoencoder_errors(run_autoencoder_reference(case, torch.bfloat16), reference),
    }


def _compare_autoencoders(failed: list[str]) -> dict[str, Any]:
    results = {}
    for case in AUTOENCODER_CASES:
        with tempfile.TemporaryDirectory() as folder:
            found = results[case.name] = compare_autoencoder(case, Path(folder))
        _LOG.info("%s %s", case.name, json.dumps(found))
        if max(found["float32"].values()) > AUTOENCODER_BOUND:
            failed.append(f"{case.name} in float32")
        if any(found["bfloat16"][k] > _BF16_FACTOR * v for k, v in found["reference_bfloat16"].items()):
            failed.append(f"{case.name} in bfloat16")
    return results


def _compare_pipeline(case: PipelineCase, folder: Path) -> dict[str, int]:
    write_pipeline(case, folder)
    reference = run_pipeline_reference(case, folder)
    _record(case.name, reference)
    return pipeline_errors(run_our_pipeline(case, folder), reference)


def _compare_pipelines(failed: list[str]) -> dict[str, dict[str, int]]:
    """The largest difference of a pixel, in levels of 255, of every picture."""
    results = {}
    for case in PIPELINE_CASES:
        with tempfile.TemporaryDirectory() as folder:
            found = results[case.name] = _compare_pipeline(case, Path(folder) / "pipeline")
        _LOG.info("%s %s", case.name, json.dumps(found))
        if max(found.values()) > PIPELINE_BOUND:
            failed.append(case.name)
    return results


def main() -> int:
    """Compare all cases.

    Returns:
        The exit code.
    """
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    jax.config.update("jax_platforms", "cpu")
    results = {}
    failed: list[str] = []
    for case in CASES:
        with tempfile.TemporaryDirectory() as folder:
            found = _compare(case, Path(folder))
        results[case.name], bounds = found, bounds_of(case)
        _LOG.info("%s %s", case.name, json.dumps(found))
        if found.get("adapters", {"output": 0.0})["output"] > bounds["output"]:
            failed.append(f"{case.name} with adapters")
        if any(found["float32"][group] > bound for group, bound in bounds.items()):
            failed.append(f"{case.name} in float32")
        if any(
            found["bfloat16"][k] > _BF16_FACTOR * found["reference_bfloat16"][k] for k in found["bfloat16"]
        ):
            failed.append(f"{case.name} in bfloat16")
    schedulers = _compare_schedulers(failed)
    text_encoders = _compare_all_text(failed)
    autoencoders = _compare_autoencoders(failed)
    pipelines = _compare_pipelines(failed)
    modules = (diffusers, transformers, tokenizers, torch, jax)
    report = {
        "versions": {module.__name__: module.__version__ for module in modules},
        "cases": results,
        "schedulers": schedulers,
        "text_encoders": text_encoders,
        "autoencoders": autoencoders,
        "pipelines": pipelines,
    }
    text = json.dumps(report, indent=1)
    (_ROOT / "docs/parity.json").write_text(text + "\n", encoding="utf-8")
    if failed:
        _LOG.error("above the bound: %s", ", ".join(failed))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
