"""The stable text form of a Program: the joint graph line by line, and the folded schedule.

The text holds no rank, no address and no order of a set: it is byte-identical on all ranks.
docs/ir.md has its grammar.
"""

from __future__ import annotations

import collections
import dataclasses
import difflib
import operator
from collections.abc import Iterator, Mapping, Sequence
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import fx

from fxshard._torch.traced_collectives import is_collective
from fxshard.ir import domain, ops, tags
from fxshard.ir.domain import Layout
from fxshard.ir.program import Program

DTYPES = {
    torch.float32: "f32",
    torch.float64: "f64",
    torch.bfloat16: "bf16",
    torch.float16: "f16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.bool: "b8",
    torch.uint8: "u8",
    torch.complex64: "c64",
}


def text(program: Program) -> str:
    """The joint graph, one line per node, under a line per phase."""
    lines = [f"program world_size={program.world_size} units={len(program.units)}"]
    lines += _meshes(program)
    lines += _open_sizes(program)
    lines += _buckets(program)
    phase = None
    for node in program.graph.nodes:
        tag = node.meta.get("fxshard")  # verify names a node without one, in this text
        if node.op == "call_function" and tag is not None and tag.phase != phase:
            phase = tag.phase
            lines.append(f"{phase}:")
        lines.append("  " + line(node, program))
    return "\n".join(lines)


def _meshes(program: Program) -> list[str]:
    """A line per mesh that parameters are on besides that of the model: how they lie there."""
    names: dict[str, list[str]] = {}
    for param in program.params.values():
        names.setdefault(param.mesh, []).append(param.fqn)
    return [
        f"  mesh {grid.name}: {grid.replicas} x {grid.shards}: {', '.join(names[grid.name])}"
        for grid in program.meshes
        if grid.name in names
    ]


def _open_sizes(program: Program) -> list[str]:
    """A line per size that is open: its symbol, its name and where a call has it."""
    if program.domain is None:
        return []
    names = program.signature.input_names
    return [
        f"  size {program.domain.symbols[name]}: "
        + ", ".join(f"{names[leaf]}.shape[{dim}]" for leaf, dim in places)
        for name, places in program.domain.places.items()
    ]


def _buckets(program: Program) -> list[str]:
    """A line per bucket, unless each is a unit and packs nothing."""
    units = [{param.fqn for param in unit.params} for unit in program.units if unit.params]
    if all(set(b.fqns) in units and not b.packed for b in program.buckets):
        return []
    packed = {fqn: " packed" for bucket in program.buckets for fqn in bucket.packed}
    return [
        f"  bucket {i}: {', '.join(fqn + packed.get(fqn, '') for fqn in bucket.fqns)}"
        for i, bucket in enumerate(program.buckets)
    ]


def line(node: fx.Node, program: Program | None = None) -> str:
    """One node: value, type, operator with arguments, and its tag after a bar."""
    if node.op == "output":
        if program is None:
            return f"return {_argument(node.args[0])}"
        named = zip(program.values, program.results, strict=True)
        return "return " + ", ".join(f"%{value} ({result.name})" for value, result in named)
    tag = node.meta.get("fxshard")
    type_ = f" : {_type(node)}" if node.meta.get("val") is not None else ""
    if node.op == "placeholder":
        role = "input" if tag is None else "saved" if tag.role == "compute" else tag.role
        return f"%{node.name}{type_} = {role} {tag.fqn or '' if tag else ''}".rstrip()
    arguments = [_argument(a) for a in node.args]
    if ops.of(node).of_model:
        del arguments[ops.PLACE_OF_RANKS]  # torch's name of the group: other ranks have others
    group = program.group_of(node) if program is not None and is_collective(node) else None
    if group is not None:
        arguments[-1] = group
    arguments += [f"{key}={_argument(value)}" for key, value in node.kwargs.items()]
    call = f"%{node.name}{type_} = {operation(node)}({', '.join(arguments)})"
    return f"{call}  | {_tag(tag)}" if tag and _tag(tag) else call


def operation(node: fx.Node) -> str:
    """``aten.mm``, ``fxshard.wait``, ``getitem``, ``region_0``."""
    if node.target is operator.getitem:
        return "getitem"
    if isinstance(node.target, (FunctionType, BuiltinFunctionType)):
        return node.target.__name__  # a size, computed from sizes
    return str(node.target).removesuffix(".default")


def types(value: Any, layouts: Iterator[Layout] | None = None) -> str:
    """``f32[2,16]``; a list in parentheses.

    Args:
        value: of a node.
        layouts: of the tensors in it, where sizes are open: ``f32[s0,16]``.
    """
    if isinstance(value, torch.Tensor):
        dtype = DTYPES.get(value.dtype, str(value.dtype).removeprefix("torch."))
        sizes = next(layouts)[0] if layouts is not None else value.shape
        return f"{dtype}[{','.join(map(str, sizes))}]"
    if isinstance(value, (list, tuple)):
        return "(" + ", ".join(types(item, layouts) for item in value) + ")"
    return type(value).__name__


def _type(node: fx.Node) -> str:
    layouts = node.meta.get(domain.LAYOUT)
    return types(node.meta["val"], None if layouts is None else iter(layouts))


def _argument(value: Any) -> str:
    if isinstance(value, fx.Node):
        return f"%{value.name}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_argument(item) for item in value) + "]"
    return str(value)


def _tag(tag: tags.Meta) -> str:
    parts = [tag.module] if tag.module else []
    if tag.unit is not None:
        parts.append(f"unit={tag.unit}")
    if tag.pair is not None:
        parts.append(f"pair={tag.pair}")
    if tag.stream != "compute":
        parts.append(f"stream={tag.stream}")
    if tag.waits:
        parts.append(f"waits={','.join(tag.waits)}")
    if tag.records:
        parts.append(f"records={tag.records}")
    if tag.checkpoint is not None:
        parts.append(f"checkpoint={tag.checkpoint}")
    if tag.save:
        parts.append("save")
    if tag.offload:
        parts.append("offload")
    return " ".join(parts)


def changes(before: str, after: str) -> str:
    """What is different in two texts: a unified diff, with three lines around each change."""
    lines = difflib.unified_diff(
        before.splitlines(), after.splitlines(), "before", "after", lineterm=""
    )
    return "\n".join(lines)


def excerpt(program: Program, node: fx.Node, around: int = 5) -> str:
    """Ten lines of dump around `node`, with a caret under it."""
    nodes = list(program.graph.nodes)
    at = nodes.index(node)
    shown: list[str] = []
    for other in nodes[max(0, at - around) : at + around + 1]:
        shown.append("    " + line(other, program))
        if other is node:
            shown.append("    " + "^" * min(60, len(line(other, program))))
    return "\n".join(shown)


@dataclasses.dataclass(frozen=True)
class Row:
    """One printed row of the outer schedule; `fold` merges equal ones.

    Attributes:
        phase: of the step.
        operation: compute, unshard, cast, load, reshard, reduce, all-reduce, store, wait or free.
        kind: class name of the unit's module; what must be equal for rows to fold.
        units: names of the units that this row stands for, in order.
        what: region name, or number of tensors.
        stream: where it runs.
        waits: what the stream waits for first.
        bytes: bytes of the buffers that are gathered, reduced or freed, per unit.
        freed: bytes that are freed right after it, if a row of its own is joined to it; of a wait,
            those of what has been offloaded.
        live: bytes alive after it, per unit; empty if not asked for.
        exposed: seconds that its stream is idle before it, per unit; likewise.
    """

    phase: str
    operation: str
    kind: str
    units: tuple[str, ...]
    what: str
    stream: str
    waits: str
    bytes: int
    freed: int = 0
    live: tuple[int, ...] = ()
    exposed: tuple[float, ...] = ()

    @property
    def key(self) -> tuple[Any, ...]:
        """What must be equal for two rows to be the same row for different units."""
        sizes = (self.bytes, self.freed)
        return (self.phase, self.operation, self.kind, self.what, self.stream, self.waits, *sizes)


Where = tuple[str, str]  # a row of the schedule: its phase and its name


def rows(
    program: Program,
    live: Mapping[Where, int] | None = None,
    exposed: Mapping[Where, float] | None = None,
) -> list[Row]:
    """The outer schedule: every row but the getitem nodes of results.

    Args:
        program: with a schedule.
        live: bytes alive after each row (`fxshard.memory.views.live.live_after`).
        exposed: seconds (`fxshard.cost.timeline.Estimate.exposed`).
    """
    assert program.schedule is not None, "outline-regions has not run"
    found: list[Row] = []
    every = (tags.get(node) for node in program.graph.nodes)
    recorders = {tag.records: tag.stream for tag in every if tag.records}
    for phase, graph in program.schedule.phases():
        for node in graph.nodes:
            if node.op not in ("call_function", "call_module"):
                continue
            is_cut = tags.get(node).role == "unshard" and node.target not in ops.OPERATORS
            if node.target is operator.getitem or is_cut:
                continue
            row, where = _row(program, phase, node, recorders), (phase, node.name)
            found.append(
                dataclasses.replace(
                    row,
                    live=(live[where],) if live else (),
                    exposed=(exposed[where],) if exposed else (),
                )
            )
    return found


def joined(rows: Sequence[Row]) -> list[Row]:
    """Fewer rows with the same content: some neighbours of one unit and stream become one row.

    A cast, load or pack joins the unshard that sends its result, a wait the compute or unpack row
    after it, a free the row before it, and compute rows each other.
    """
    found: list[Row] = []
    for row in rows:
        both = _both(found[-1], row) if found else None
        if both is None:
            found.append(row)
        else:
            found[-1] = both
    return found


def _both(first: Row, row: Row) -> Row | None:
    """One row for two that follow each other, or None."""
    if (first.phase, first.units, first.stream) != (row.phase, row.units, row.stream):
        return None
    stood = tuple(map(sum, zip(first.exposed, row.exposed, strict=True)))
    change: dict[str, Any] = {"exposed": stood}
    match first.operation.rpartition(" ")[2], row.operation:
        case "compute" | "unpack" | "post-gather" | "wait" | "step" | "join", "free":
            change |= {"freed": first.freed + row.bytes, "live": row.live}
            return dataclasses.replace(first, **change)
        case "compute", "compute" if not row.waits:
            what = f"{first.what},{row.what.removeprefix('region_')}"
            return dataclasses.replace(first, what=what, live=row.live, **change)
        case "wait", "compute" | "unpack" | "post-gather":
            change |= {"waits": ",".join(filter(None, (first.waits, row.waits)))}
            change |= {"freed": first.freed + row.freed}
            return dataclasses.replace(row, **change)
        case "cast" | "pack", "cast" | "pack" | "unshard":
            waits = dict.fromkeys(filter(None, (*first.waits.split(","), *row.waits.split(","))))
            change |= {"operation": f"{first.operation}, {row.operation}", "what": ""}
            return dataclasses.replace(row, waits=",".join(waits), **change)
    return None


def _row(program: Program, phase: str, node: fx.Node, recorders: Mapping[str, str]) -> Row:
    tag = tags.get(node)
    unit = program.units[tag.unit or 0]
    if node.op == "call_module":
        roles = {tags.get(each).role for each in node.meta["run"]}
        apart = {"pre_gather": "pre-gather", "post_gather": "post-gather"}
        operation = apart.get(min(roles), "compute")  # it has one of these alone
        what, size = str(node.target) + _called(program, node.meta["run"]), 0
    else:
        spec = ops.of(node)
        operation = spec.operation
        makes = spec.role in ("unshard", "unpack", "reshard") or (spec.of_model and spec.grows > 0)
        sources = list(node.users) if makes else tags.operands(node)  # the larger side
        values = [t for source in sources for t in tags.tensors(source.meta["val"])]
        moves = operation != "join"
        size = sum(t.untyped_storage().nbytes() for t in values) if moves else 0
        what = f"{len(values)} tensor{'s' * (len(values) != 1)}"
        if operation in ("wait", "free"):
            roles = {tags.get(source).role for source in sources}
            unshards = roles <= {"unshard", "reshard", "pre_gather"}
            what = "unshard" if unshards else "transfer" if "transfer" in roles else "reduce"
    waited = ",".join(recorders.get(event, "compute") for event in tag.waits)
    left = _left(node) if node.target is ops.wait else 0
    return Row(phase, operation, unit.kind, (unit.name,), what, tag.stream, waited, size, left)


def _left(wait: fx.Node) -> int:
    """Bytes of the activations that a wait is the last to hold: they are on the CPU now."""
    copies = [n for n in tags.operands(wait) if n.target is operator.getitem]
    gone = any(tags.source(n).target is ops.offload for n in copies)
    held = [n for n in tags.operands(wait) if tags.get(n).role != "transfer"] if gone else []
    return sum(t.untyped_storage().nbytes() for n in held for t in tags.tensors(n.meta["val"]))


def _called(program: Program, run: Sequence[fx.Node]) -> str:
    """The collectives that the model calls in a region: `` (tp: 2 all-gather, 1 all-reduce)``."""
    counts: dict[str, collections.Counter[str]] = {}
    for node in filter(is_collective, run):
        name = node.target.overloadpacket.__name__  # type: ignore[union-attr]
        name = name.removesuffix("_into_tensor").removesuffix("_tensor").replace("_", "-")
        group = program.group_of(node) or "of the model"
        counts.setdefault(group, collections.Counter())[name] += 1
    each = (f"{g}: " + ", ".join(f"{n} {c}" for c, n in c.items()) for g, c in counts.items())
    return f" ({'; '.join(each)})" if counts else ""


def fold(rows: Sequence[Row]) -> list[tuple[int, list[Row]]]:
    """Merge repeats: a list of ``(count, rows)``; a block of rows stands for `count` in a row.

    Greedy from the top: at each row, the period that covers most rows wins.
    """
    keys = [row.key for row in rows]
    folded: list[tuple[int, list[Row]]] = []
    at = 0
    while at < len(rows):
        best = (1, 1)
        for period in range(1, (len(rows) - at) // 2 + 1):
            count = 1
            while keys[at : at + period] == keys[at + count * period : at + (count + 1) * period]:
                count += 1
            if count > 1 and count * period > best[0] * best[1]:
                best = (count, period)
        count, period = best
        block = [
            dataclasses.replace(
                rows[at + i],
                units=tuple(rows[at + k * period + i].units[0] for k in range(count)),
                live=tuple(b for k in range(count) for b in rows[at + k * period + i].live),
                exposed=tuple(t for k in range(count) for t in rows[at + k * period + i].exposed),
            )
            for i in range(period)
        ]
        if count == 1 and folded and folded[-1][0] == 1:
            folded[-1][1].extend(block)
        else:
            folded.append((count, block))
        at += count * period
    return folded


def schedule(
    program: Program,
    *,
    folded: bool = True,
    phase: str | None = None,
    live: Mapping[Where, int] | None = None,
    exposed: Mapping[Where, float] | None = None,
) -> str:
    """The outer schedule as a table, in MiB and milliseconds.

    Args:
        program: with a schedule.
        folded: identical layers as one block, "x N", and rows joined as `joined` does;
            else each row as it is.
        phase: "forward" or "backward"; None for both.
        live: adds what is alive after each row; of a block, after its first and its last unit.
        exposed: adds for how long the compute stream stands still; of a block, all units together.
    """
    everything = [row for row in rows(program, live, exposed) if phase in (None, row.phase)]
    blocks = fold(joined(everything)) if folded else [(1, everything)]
    table = []
    for count, block in blocks:
        for i, row in enumerate(block):
            times = "" if count == 1 else (f"x {count}" if i == 0 else '  "')
            is_free = row.operation == "free"
            what = f"{row.operation} {row.what}".rstrip()
            line = [times, row.phase, what, span(row.units), row.stream]
            line += [row.waits, "" if is_free or row.operation == "wait" else _size(row.bytes)]
            line.append(_size(row.bytes if is_free else row.freed))
            if live is not None:
                line.append(" .. ".join(dict.fromkeys(map(_size, (row.live[0], row.live[-1])))))
            if exposed is not None:
                line.append(f"{1e3 * sum(row.exposed):.3f}" if sum(row.exposed) else "")
            table.append(line)
    headers = ["", "phase", "operation", "unit", "stream", "waits for", "moved", "freed"]
    headers += ["live after"] * (live is not None) + ["exposed"] * (exposed is not None)
    units = [
        {"exposed": "ms"}.get(header, "MiB") if i > 5 else "" for i, header in enumerate(headers)
    ]
    return _aligned([headers, units], table, left=6)


def _aligned(heads: list[list[str]], table: list[list[str]], left: int) -> str:
    """Lines of a table; the first `left` columns are aligned to the left."""
    widths = [max(map(len, column)) for column in zip(*heads, *table, strict=True)]
    lines = [
        "  ".join(
            cell.ljust(width) if i < left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in [*heads, ["-" * width for width in widths], *table]
    ]
    return "\n".join(lines)


def span(names: Sequence[str]) -> str:
    """``layers.0`` to ``layers.30`` as ``layers.0 .. 30``."""
    first, last = names[0], names[-1]
    if first == last:
        return first
    shared = 0
    for a, b in zip(first.split("."), last.split("."), strict=False):
        if a != b:
            break
        shared += 1
    return f"{first} .. {'.'.join(last.split('.')[shared:])}"


def _size(size: int) -> str:
    """Bytes as MiB, of small ones with decimals; nothing for none."""
    scaled = size / 2**20
    return f"{scaled:,.0f}" if scaled >= 100 else f"{scaled:.3f}" if size else ""
