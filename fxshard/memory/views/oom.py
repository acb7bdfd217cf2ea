"""An explanation of a snapshot as text (`fxshard.memory.oom.explain`)."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

from fxshard.bytesize import size_text
from fxshard.capture.provenance import line_text
from fxshard.memory.category import CATEGORIES
from fxshard.memory.explain import what_if_text
from fxshard.memory.oom.explain import FailedAllocation, OomExplanation
from fxshard.memory.oom.moments import AllocatorMoment
from fxshard.memory.oom.stacks import UNKNOWN, is_source
from fxshard.memory.views.tables import grid

TOP = 10  # rows of a table
WIDTH = 100
_RIGHT = ("right", "right", "right")


def text(explained: OomExplanation, *, top: int = TOP, width: int = WIDTH) -> str:
    """The explanation for a terminal.

    Args:
        explained: what to show.
        top: rows of the tables of modules and lines.
        width: longest line, as far as that goes.
    """
    parts = []
    for number, moment in enumerate(explained.moments):
        parts.append("\n".join(_head(explained, moment)))
        if number == 0:
            parts += _tables(moment, top, width)
        else:
            parts += _tables(moment, 0, width)
    if explained.what_ifs:
        parts.append("\n".join(_what_ifs(explained)))
    if explained.plan is not None:
        parts.append(_beside_plan(explained))
    notes = list(_notes(explained))
    wrapped = "\n".join(line for note in notes for line in textwrap.wrap(note, width))
    return "\n\n".join([*parts, wrapped] if notes else parts)


def _head(explained: OomExplanation, moment: AllocatorMoment) -> Iterator[str]:
    request = explained.request
    if request is not None:
        yield (
            f"Device {explained.device} ran out of memory: {size_text(request.bytes)} "
            f"({request.bytes:,} bytes) asked for on stream {request.stream}"
        )
        if request.origin.module:
            yield f"  by {request.origin.module}{_in(request.origin.phase)}"
        if request.origin.line:
            yield f"  at {_line(request.origin.line)}"
    else:
        at = "" if moment.event is None else f", after event {moment.event + 1:,}"
        yield f"Device {explained.device}, {_NAMES[moment.name]}{at}"
    yield ""
    used = moment.requested_bytes + moment.rounding_bytes
    in_use = used - moment.waiting_bytes
    yield f"  {size_text(moment.reserved):>12}  reserved by the allocator, of which"
    rounding = size_text(moment.rounding_bytes)
    blocks = f"{len(moment.held):,} blocks, {rounding} of it rounding"
    yield f"  {size_text(in_use):>12}    in use, {blocks}"
    if moment.waiting_bytes:
        yield f"  {size_text(moment.waiting_bytes):>12}    freed, and waiting for other streams"
    largest = size_text(moment.free[0].bytes if moment.free else 0)
    pieces = f"in {len(moment.free):,} pieces, the largest {largest}"
    yield f"  {size_text(moment.free_bytes):>12}    free, {pieces}"
    if request is not None:
        yield f"  {size_text(request.device_free):>12}  free on the device"
        yield ""
        yield from textwrap.wrap(_verdict(explained, moment, request), WIDTH)


_NAMES = {"highest point": "where the most is in use", "end": "at the end of the recording"}


def _verdict(explained: OomExplanation, moment: AllocatorMoment, request: FailedAllocation) -> str:
    asked = size_text(request.bytes)
    if request.limited:
        return (
            "The device had enough for it: a limit of the program's own refused it "
            "(torch.cuda.set_per_process_memory_fraction), or it had less at that moment."
        )
    free = moment.free_bytes + request.device_free
    usable = [
        piece.bytes
        for piece in moment.free
        if piece.stream == request.stream and piece.small == request.small and not piece.private
    ]
    if not explained.fragmented:
        short = size_text(request.bytes - free)
        return (
            f"Not fragmentation: all that is free, {size_text(free)}, is {short} less than the "
            f"{asked} asked for."
        )
    elsewhere = moment.free_bytes - sum(usable)
    other = f" {size_text(elsewhere)} is of other streams or pools." if elsewhere else ""
    return (
        f"Fragmentation: {size_text(free)} are free in all, enough for {asked}, but in pieces: the "
        f"device has {size_text(request.device_free)}, and the largest that this request may use "
        f"has {size_text(max(usable, default=0))}.{other}"
    )


def _tables(moment: AllocatorMoment, top: int, width: int) -> list[str]:
    total = max(moment.requested_bytes, 1)
    order = {category.value: at for at, category in enumerate(CATEGORIES)}
    parts = moment.by("category")
    ordered = sorted(parts.items(), key=lambda item: (order.get(item[0][0], 99), item[0]))
    rows = [[name[0], *_figures(sums, total)] for name, sums in ordered]
    rows.append(["total", *_figures((moment.requested_bytes, len(moment.held)), total)])
    tables = [_table(["category"], rows)]
    if top:
        tables.append(_table(["module"], _rows(moment, ("module",), top, width)))
        found = _rows(moment, ("line", "category"), top, width)
        tables.append(_table(["line", "category"], found))
    return tables


def _rows(moment: AllocatorMoment, names: Sequence[str], top: int, width: int) -> list[list[str]]:
    total = max(moment.requested_bytes, 1)
    found = list(moment.by(*names).items())
    rows = []
    for (first, *rest), sums in found[:top]:
        said = (_line(first) or "(no line)") if names[0] == "line" else first
        rows.append([said, *rest, *_figures(sums, total)])
    if found[top:]:
        size, count = (sum(each) for each in zip(*(sums for _, sums in found[top:]), strict=True))
        empty = [""] * (len(names) - 1)
        rows.append([f"{len(found) - top:,} more", *empty, *_figures((size, count), total)])
    others = [max(map(len, column)) for column in zip(*rows, strict=True)][1:]
    room = max(20, width - sum(2 + each for each in others))
    return [[_ended(row[0], room), *row[1:]] for row in rows]


def _ended(name: str, room: int) -> str:
    return name if len(name) <= room else f"{name[: room - 1]}…"


def _figures(sums: tuple[int, int], total: int) -> list[str]:
    size, count = sums
    return [size_text(size), f"{100 * size / total:.1f}%", f"{count:,}"]


def _table(titles: list[str], rows: list[list[str]]) -> str:
    align = (*["left"] * len(titles), *_RIGHT)
    return "\n".join(grid(rows, [*titles, "bytes", "share", "blocks"], align))


def _what_ifs(explained: OomExplanation) -> Iterator[str]:
    if explained.request is None:
        yield "What would make it less (sizes are of all that is held, so at most):"
    else:
        yield "What would have made it fit, by replay (sizes are of all that was held, so at most):"
    for each in explained.what_ifs:
        verdict = {True: "fits", False: "does not fit", None: "not known"}[each.fits]
        less = each.saves_bytes
        size = "" if less is None else f"{_signed(-less)}: "
        reserved = (
            "" if each.reserved is None else f" ({size_text(each.reserved)} reserved at most)"
        )
        left = f"  {verdict:<14}" if explained.request is not None else "  "
        yield f"{left}{size}{each.name}{reserved}"


def _beside_plan(explained: OomExplanation) -> str:
    plan = explained.plan
    assert plan is not None
    sizes = {name: size for (name,), (size, _) in explained.moment.by("category").items()}
    names = [c.value for c in CATEGORIES if sizes.get(c.value) or plan.by_category.get(c.value)]
    names += [name for name in sizes if name not in names]
    rows = [_both(name, sizes.get(name, 0), plan.by_category.get(name, 0)) for name in names]
    rows.append(_both("total", explained.moment.requested_bytes, plan.peak_bytes))
    headers = ["category", "here", "plan's peak", "more here"]
    lines = ["Beside the plan:", *grid(rows, headers, ("left", *_RIGHT))]
    if plan.what_ifs:
        lines += ["", "What would change the plan (each figure is that of a plan made so):"]
        lines += [f"  {what_if_text(each)}" for each in plan.what_ifs]
    return "\n".join(lines)


def _both(name: str, here: int, there: int) -> list[str]:
    return [name, size_text(here), size_text(there), _signed(here - there)]


def _signed(size: int) -> str:
    return f"{'+' if size >= 0 else '-'}{size_text(abs(size))}"


def _notes(explained: OomExplanation) -> Iterator[str]:
    if explained.why_not_replayed:
        yield f"What would have fitted is not known: {explained.why_not_replayed}."
    elif explained.model_reserved is not None and explained.request is not None:
        here, model = explained.moment.reserved, explained.model_reserved
        apart = "to the byte" if here == model else f"{_signed(model - here)} apart"
        yield (
            f"The replay of {explained.events:,} events with the program's own settings runs out "
            f"of memory at the same request, with {size_text(model)} reserved ({apart})."
        )
    if explained.failures > 1:
        yield f"{explained.failures} requests failed in the recording; this is the last."
    unknown = explained.moment.by("category").get((UNKNOWN,))
    if unknown:
        yield f"{UNKNOWN}: what the recorded stacks do not tell."
    if len(explained.devices) > 1:
        others = ", ".join(str(d) for d in explained.devices if d != explained.device)
        yield f"Other devices in the snapshot: {others} (--device)."


def _in(phase: str) -> str:
    return f", in {phase}" if phase else ""


def _line(line: str) -> str:
    """The line of code, if its file is on this machine and is Python."""
    path = line.partition(" in ")[0].rpartition(":")[0]
    if is_source(path):
        return line_text(line)
    place, _, function = line.partition(" in ")
    return f"{'/'.join(place.split('/')[-2:])} in {function}" if function else line
