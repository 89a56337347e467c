"""A plan as a page that opens from the file system: sequences and devices light up where the pointer is."""

import html
import json
import re
from pathlib import Path
from typing import Any

import numpy as np

from experiments._disk import write_text, writing
from experiments._pictures import part_path
from experiments._plan_figure import MOST_ARCS, colours_of, layout_blocks, plot_plan
from experiments._plan_traffic import Arcs, arcs_of, traffic
from experiments._program import UserError
from solver import BalancePlan

_TEMPLATE = Path(__file__).parent / "pages" / "plan.html"
# Blocks beyond these take minutes to draw and are too thin to see.
_MOST_BLOCKS = 300_000


def save_plan(path: Path, plan: BalancePlan, *, title: str = "", option: str = "--plot") -> None:
    """Draw a plan with its traffic: as a picture, or as a page if the suffix is .html.

    Args:
        path: file to write.
        plan: the plan.
        title: above it.
        option: what named the file, for messages.

    Raises:
        UserError: for a plan of too many parts, or a file that cannot be written.
    """
    blocks = len(plan.head_slices) + len(plan.token_slices)
    if blocks > _MOST_BLOCKS:
        raise UserError(
            f"{option} draws at most {_MOST_BLOCKS:,} parts of sequences; this plan has {blocks:,}. Draw smaller bags"
            " or fewer devices."
        )
    if path.suffix == ".html":
        write_text(path, plan_page(plan, title=title), option=option)
        return
    with writing(path, f"Make room or choose another {option}."):
        part = part_path(path)
        plot_plan(part, plan, title=title, arcs=True)
        part.replace(path)


def plan_page(plan: BalancePlan, *, title: str = "") -> str:
    """The page: HTML with its style, script and data inside, and nothing from elsewhere."""
    filling = {"title": html.escape(title or "plan"), "data": _embedded(_data(plan))}
    # In one pass, so that nothing in a title is taken for a place to fill.
    return re.sub(r"\{\{(\w+)\}\}", lambda found: filling[found[1]], _TEMPLATE.read_text(encoding="utf-8"))


def _embedded(data: dict[str, Any]) -> str:
    """JSON that cannot end the element it stands in."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _data(plan: BalancePlan) -> dict[str, Any]:
    sent = traffic(plan)
    per_machine = plan.topology.devices_per_machine
    mean_load = float(plan.load.mean()) or 1.0
    mean_attention = float(plan.attention_work.mean()) or 1.0
    return {
        "devices": plan.num_devices,
        "perMachine": per_machine,
        "heads": plan.num_heads,
        "lengths": plan.lengths.tolist(),
        "texts": plan.text_lengths.tolist(),
        "home": np.asarray(plan.home).tolist(),
        "colours": colours_of(plan),
        "panels": [
            {
                "title": blocks.title,
                "unit": blocks.unit,
                "device": blocks.device.tolist(),
                "sequence": blocks.sequence.tolist(),
                "height": blocks.heights.tolist(),
            }
            for blocks in layout_blocks(plan)
        ],
        "headSlices": plan.head_slices.tolist(),
        "arcs": [
            {"unit": "tokens", **_arcs(arcs_of(sent.tokens, per_machine, most=MOST_ARCS))},
            {"unit": "(token, head) rows", **_arcs(arcs_of(sent.rows, per_machine, most=MOST_ARCS))},
        ],
        "figures": {
            "tokens": plan.tokens.tolist(),
            "text": plan.text_tokens.tolist(),
            "load": np.round(plan.load / mean_load, 5).tolist(),
            "attention": np.round(plan.attention_work / mean_attention, 5).tolist(),
            "rows": plan.rows.tolist(),
            "sent": plan.rows_sent.tolist(),
            "across": plan.rows_across_machines.tolist(),
            "received": sent.rows.sum(axis=0).tolist(),
        },
        "staticStepCost": round(plan.padded_step_cost, 5),
        "loadMaxOverMean": round(plan.load_max_over_mean, 5),
    }


def _arcs(arcs: Arcs) -> dict[str, Any]:
    return {
        "pairs": arcs.pairs.tolist(),
        "amounts": arcs.amounts.tolist(),
        "across": arcs.across.tolist(),
        "inside": arcs.total_inside,
        "between": arcs.total_across,
        "numPairs": arcs.num_pairs,
    }
