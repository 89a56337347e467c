"""The service under load, as a section of docs/benchmarks.md."""

import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from experiments._bench_report import Section, markdown_table, paragraph
from experiments._bench_service_load import draw_requests, statuses
from experiments._bench_service_run import Loaded, under_load
from experiments._tiny_pipeline import write_tiny_pipeline

TITLE = "The service under load"
_MB = 1 << 20
_POINTS = 8


def bench_service(*, requests: int, clients: int, largest: int = 128, devices: int = 2) -> Section:
    """Start the service on a small random pipeline, send requests, report.

    Args:
        requests: to send.
        clients: that send at a time.
        largest: height and width of a picture.
        devices: virtual ones of the service.

    Raises:
        UserError: if the service does not start.
    """
    sent = draw_requests(requests, seed=0, largest=largest)
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "tiny"
        write_tiny_pipeline(model)
        options = ["--devices", str(devices), "--dtype", "float32", "--waiting", "32"]
        loaded = under_load(model, sent, clients=clients, options=options, log=Path(folder) / "service.log")
    parts = [_text(loaded, requests, clients, largest, devices), _statuses(loaded), _memory(loaded)]
    return Section("service", TITLE, "\n\n".join(parts), _figures(loaded))


def _text(loaded: Loaded, requests: int, clients: int, largest: int, devices: int) -> str:
    seconds = [a.seconds for a in loaded.answers if a.status == 200]
    problems = [a.problem for a in loaded.answers if a.problem]
    refused = sum(a.refused for a in loaded.answers)
    lost = f"{len(problems)} wrong: {problems[0]}" if problems else "none lost, all as they should be"
    rate = loaded.pictures / loaded.seconds
    return paragraph(f"""{requests:,} requests of {clients} clients on loopback, each sending its next when the one
    before is answered: pictures of 64 to {largest} pixels along an edge, 1 to 4 steps, 1 to 3 pictures, some with
    classifier-free guidance; of some the client goes before the answer, some cannot be made. The model is a random
    FLUX.1 pipeline with a few channels, on {devices} virtual devices. {len(loaded.answers):,} answered, {lost};
    {refused} times an attempt was refused by a full queue and came again. {loaded.pictures:,} pictures in
    {loaded.batches:,} batches, {loaded.pictures / loaded.batches:.1f} in a batch, {rate:.1f} a second. Pictures that
    were made took {median(seconds):.2f} s (median), {np.quantile(seconds, 0.95):.2f} s (95 %) from the first attempt,
    compiling included. After SIGTERM it ended with {loaded.exit_code} in {loaded.exit_s:.1f} s.""")


def _statuses(loaded: Loaded) -> str:
    rows = [(name, f"{count:,}") for name, count in statuses(loaded.answers).items()]
    return markdown_table(["request, status (- where the client went)", "answers"], rows)


def _memory(loaded: Loaded) -> str:
    wanted = np.linspace(0, len(loaded.answers), _POINTS + 1)
    nearest = [min(loaded.memory, key=lambda one: abs(one.answers - at)) for at in wanted]
    table = markdown_table(
        ["requests answered", *(f"{one.answers:,}" for one in nearest)],
        [["MB resident", *(f"{one.bytes / _MB:,.0f}" for one in nearest)]],
    )
    growth = paragraph(
        f"Over the last half of the requests memory grows by {loaded.mb_per_thousand:.0f} MB in 1,000 (fitted). What it"
        " holds beside parameters are compiled programs: of a packed batch the last that was large enough."
    )
    return f"{table}\n\n{growth}"


def _figures(loaded: Loaded) -> dict[str, Any]:
    every = max(len(loaded.memory) // 200, 1)
    return {
        "answers": len(loaded.answers),
        "statuses": statuses(loaded.answers),
        "problems": [a.problem for a in loaded.answers if a.problem],
        "seconds": loaded.seconds,
        "batches": loaded.batches,
        "pictures": loaded.pictures,
        "memory": [[one.seconds, one.answers, one.bytes] for one in loaded.memory[::every]],
        "mb_per_thousand": loaded.mb_per_thousand,
        "exit_code": loaded.exit_code,
        "exit_s": loaded.exit_s,
    }
