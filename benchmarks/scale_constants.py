"""The figures of GPUs that docs/scale.md stands on, each with the source that hardware.py names."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable

import torch

from benchmarks.scale_cells import HARDWARE
from fxshard import hardware as constants
from fxshard.hardware import PRESETS, Hardware


def constant_rows() -> list[dict[str, str]]:
    """Every constant of the presets, with the tag of its source in hardware.py."""
    tags = source_tags()
    rows = []
    for name, get, unit in CONSTANTS:
        row = {"constant": name}
        for gpu in HARDWARE:
            row[gpu] = f"{get(PRESETS[gpu]):,.6g} {unit}".strip()
        row["source"] = ", ".join(f"[{tag}]" for tag in tags[name])
        rows.append(row)
    return rows


Get = Callable[[Hardware], float]


def _tree(hardware: Hardware) -> constants.Tree:
    assert hardware.tree is not None
    return hardware.tree


CONSTANTS: tuple[tuple[str, Get, str], ...] = (
    ("flops, bf16", lambda h: h.rate(torch.bfloat16) / 1e12, "TFLOP/s"),
    ("flops, fp32", lambda h: h.rate(torch.float32) / 1e12, "TFLOP/s"),
    ("achievable", lambda h: h.achievable, ""),
    ("memory_bandwidth", lambda h: h.memory_bandwidth / 1e12, "TB/s"),
    ("memory_bytes", lambda h: h.memory_bytes / 1e9, "GB"),
    ("launch_overhead", lambda h: 1e6 * h.launch_overhead, "µs"),
    ("link.alpha", lambda h: 1e6 * h.link.alpha, "µs"),
    ("link.beta", lambda h: h.link.beta / 1e9, "GB/s"),
    ("network.alpha", lambda h: 1e6 * h.network.alpha, "µs"),
    ("network.beta, a GPU", lambda h: h.network.beta / 1e9, "GB/s"),
    ("collective_overhead", lambda h: 1e6 * h.collective_overhead, "µs"),
    ("ranks_per_node", lambda h: h.ranks_per_node, ""),
    ("tree.link_alpha", lambda h: 1e6 * _tree(h).link_alpha, "µs"),
    ("tree.network_alpha", lambda h: 1e6 * _tree(h).network_alpha, "µs"),
    ("tree.share", lambda h: _tree(h).share, ""),
)
# constant -> the texts in hardware.py after which the tags of its source stand
_LINES = {
    "flops, bf16": ("torch.bfloat16: 989.4e12",),
    "flops, fp32": ("torch.float32: 66.9e12",),
    "achievable": ("achievable=0.75",),
    "memory_bandwidth": ("memory_bandwidth=3.35e12", "memory_bandwidth=4.8e12"),
    "memory_bytes": ("memory_bytes=80 * 10**9", "memory_bytes=141 * 10**9"),
    "launch_overhead": ("launch_overhead=2 * MICRO",),
    "link.alpha": ("alpha=1.9 * MICRO",),
    "link.beta": ("beta=18 * 20.6e9 * _LL128",),
    "network.alpha": ("alpha=4.0 * MICRO",),
    "network.beta, a GPU": ("beta=50e9 * _LL128", "_LL128 = 0.92"),
    "collective_overhead": ("collective_overhead=14 * MICRO",),
    "ranks_per_node": ("ranks_per_node=8",),
    "tree.link_alpha": ("link_alpha=1.25 * MICRO",),
    "tree.network_alpha": ("network_alpha=8.5 * MICRO",),
    "tree.share": ("share=0.92",),
}


def source_tags() -> dict[str, list[str]]:
    """Of each constant, the tags that stand behind it in hardware.py: "H100", "NCCL", "guess".

    Raises:
        ValueError: the line is not there, or has none.
    """
    lines = inspect.getsource(constants).splitlines()
    found: dict[str, list[str]] = {}
    for name, starts in _LINES.items():
        found[name] = []
        for start in starts:
            said = [line for line in lines if line.strip().startswith(start)]
            tags = re.findall(r"# \[(\w+)\]", said[0]) if said else []
            if not tags:
                raise ValueError(f"{name}: no line {start!r} with the tag of a source")
            found[name] += [tag for tag in tags if tag not in found[name]]
    return found


def sources_list() -> str:
    """What the tags mean, as hardware.py says it."""
    said = (constants.__doc__ or "").partition("=\n")[2]
    entries = re.findall(r"\[(\w+)\]\s+(.*?)(?=\n\[|\Z)", said, re.DOTALL)
    used = {tag for tags in source_tags().values() for tag in tags}
    return "\n".join(f"- **[{t}]** {' '.join(x.split())}" for t, x in entries if t in used)
