# SPDX-License-Identifier: Apache-2.0
"""The plot: tokens per second of every arm, one panel per concurrency."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def draw(summary: Mapping[str, Any], title: str, path: Path) -> str | None:
    """Write an SVG; returns why not, None if it did."""
    try:
        mpl = importlib.import_module("matplotlib")
        mpl.use("svg")
        pyplot = importlib.import_module("matplotlib.pyplot")
    except ImportError as error:
        return f"no plot: {error}"
    panels = [(c, part) for c, part in summary.items() if any(f["tok_s"]["n"] for f in part["arms"].values())]
    if not panels:
        return "no plot: no round was measured"
    mpl.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "sglang-fleet", "font.size": 9})
    most = max(len(part["arms"]) for _, part in panels)
    figure, axes = pyplot.subplots(1, len(panels), figsize=(3.6 * len(panels) + 1.2, 0.36 * most + 1.6), squeeze=False)
    for axis, (concurrency, part) in zip(axes[0], panels, strict=True):
        shown = [(name, f["tok_s"]) for name, f in part["arms"].items() if f["tok_s"]["n"]]
        middle = [tok_s["median"] for _, tok_s in shown]
        low = [tok_s["median"] - tok_s["q1"] for _, tok_s in shown]
        high = [tok_s["q3"] - tok_s["median"] for _, tok_s in shown]
        colors = [
            "#c44e52" if n.startswith("ddtree") else "#4c72b0" if n.startswith("dflash") else "#8c8c8c"
            for n, _ in shown
        ]
        axis.barh(range(len(shown)), middle, xerr=[low, high], color=colors, ecolor="black", capsize=2, height=0.7)
        for at, value in enumerate(middle):
            axis.text(0, at, f" {value:.0f}", va="center", ha="left", color="white", fontsize=8)
        axis.set_yticks(range(len(shown)), [name for name, _ in shown])
        axis.invert_yaxis()
        axis.set_title(f"c{concurrency}")
        axis.set_xlabel("tok/s, median and quartiles")
        axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
    return None
