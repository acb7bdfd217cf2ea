"""A trace of a step that shows all-gathers and compute at the same time.

    python -m benchmarks.gpu.streams                  # one GPU
    python -m benchmarks.gpu.streams --device cpu     # a small model, to try it

One rank runs on the emulated network (benchmarks/gpu/emulated.py) under torch.profiler. On CUDA the
kernels of the compute stream are laid over those of all other streams, by the profiler's own
timestamps; on a CPU the operators over the spans in which the link was busy. The trace is written
for Perfetto beside the figures. Exit status 1 if nothing overlaps.
"""

from __future__ import annotations

import argparse
import collections
import json
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.figures import RESULTS, machine
from benchmarks.gpu.case import pinned
from benchmarks.gpu.emulated import Link, Sent, emulated_world
from benchmarks.gpu.emulated_network import built, forget, link_of, recipe_of
from benchmarks.ranks import alone

Span = tuple[int, int]  # nanoseconds
# On a CPU: slow enough that the link is busy for as long as a layer computes.
SLOW = Link(1e-4, 5e7)
EXPOSED = 20  # spans that are listed: where they begin, and how long they are


def union(spans: Iterable[Span]) -> list[Span]:
    """Disjoint spans that cover the same moments, in order."""
    found: list[Span] = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((begin, end))
    return found


def overlap(first: Iterable[Span], second: Iterable[Span]) -> int:
    """Nanoseconds that lie in a span of both."""
    a, b = union(first), union(second)
    i = j = total = 0
    while i < len(a) and j < len(b):
        total += max(0, min(a[i][1], b[j][1]) - max(a[i][0], b[j][0]))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return total


def alone_of(first: Iterable[Span], second: Iterable[Span]) -> list[Span]:
    """What of the first spans lies in none of the second, in order."""
    found, cut = [], union(second)
    for begin, end in union(first):
        for b, e in cut:
            if e <= begin or b >= end:
                continue
            if b > begin:
                found.append((begin, b))
            begin = max(begin, e)
        if begin < end:
            found.append((begin, end))
    return found


def by_stream(events: Sequence[Any]) -> dict[int, list[Span]]:
    """Spans of what ran on a GPU, by stream."""
    found: dict[int, list[Span]] = collections.defaultdict(list)
    for event in events:
        if event.device_type() == DeviceType.CUDA and event.duration_ns() > 0:
            found[event.device_resource_id()].append((event.start_ns(), event.end_ns()))
    return dict(found)


def computing(events: Sequence[Any]) -> list[Span]:
    """Spans of ATen operators on the CPU."""
    return [
        (event.start_ns(), event.end_ns()) for event in events if event.name().startswith("aten::")
    ]


def on_the_link(sent: Sequence[Sent], offset: int) -> list[Span]:
    """Spans in which a CPU's emulated link was busy, by the profiler's clock."""
    return [
        (int(1e9 * each.began) + offset, int(1e9 * (each.began + each.modelled)) + offset)
        for each in sent
    ]


def measure(name: str, world: int, checkpoint: str | None, device: str, trace: str) -> Any:
    """Overlap in one step of fxshard."""
    recipe = recipe_of(name, checkpoint, device)
    place = torch.device(device)
    link = SLOW if device == "cpu" else link_of(world)
    kinds = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device == "cuda")
    with emulated_world(world, link) as groups, pinned(recipe):
        model, batch = built(recipe, "fxshard", world, place)
        for _ in range(2):
            model(*batch).backward()
            model.zero_grad(set_to_none=True)
        forget(groups)
        with profile(activities=kinds) as seen:
            offset = time.time_ns() - time.monotonic_ns()
            model(*batch).backward()
            if device == "cuda":
                torch.cuda.synchronize()
        seen.export_chrome_trace(trace)
        events = seen.profiler.kineto_results.events()
        if device == "cpu":
            link_spans = on_the_link([e for group in groups for e in group.sent], offset)
            return figures({"compute": computing(events), "link": link_spans}, "compute")
        streams = by_stream(events)
        busiest = max(streams, key=lambda s: len(streams[s]))  # most kernels: those of compute
        return figures({str(key): spans for key, spans in streams.items()}, str(busiest))


def figures(spans: dict[str, list[Span]], compute: str) -> dict[str, Any]:
    """Busy time of each stream, and how much of all others' lies over compute's."""
    others = [span for key, each in spans.items() if key != compute for span in each]
    both, busy = overlap(spans[compute], others), sum(e - b for b, e in union(others))
    began = min(b for each in spans.values() for b, _ in each)
    exposed = sorted(alone_of(others, spans[compute]), key=lambda s: s[0] - s[1])[:EXPOSED]
    return {
        "compute_stream": compute,
        "busy_ms": {key: sum(e - b for b, e in union(each)) / 1e6 for key, each in spans.items()},
        "kernels": {key: len(each) for key, each in spans.items()},
        "others_busy_ms": busy / 1e6,
        "overlapped_ms": both / 1e6,
        "share_overlapped": round(both / busy, 4) if busy else 0.0,
        "longest_exposed_ms": [[(b - began) / 1e6, (e - b) / 1e6] for b, e in sorted(exposed)],
    }


def main(arguments: list[str] | None = None) -> int:
    """Measure, print, and write the JSON and the trace."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=("cuda", "cpu"), default=default)
    parser.add_argument("--out", type=Path, help="folder for the results")
    given = parser.parse_args(arguments)
    cpu = given.device == "cpu"
    out = given.out or (Path(tempfile.mkdtemp(prefix="fxshard-streams-")) if cpu else RESULTS)
    out.mkdir(parents=True, exist_ok=True)
    name = "llama-tiny" if cpu else "llama-1b"
    trace = out / f"streams_{given.device}.trace.json"
    row = alone(measure, name, 8, None, given.device, str(trace))
    gpu = None if cpu else torch.cuda.get_device_name(0)
    result = {**machine(), "gpu": gpu, "label": "emulated network, one rank", "model": name, **row}
    path = out / f"streams_{given.device}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(row, indent=1))
    print(f"wrote {path} and {trace}")
    return int(row["overlapped_ms"] <= 0)


if __name__ == "__main__":
    sys.exit(main())
