"""The stable text form of a Program: the joint graph line by line, and the folded schedule.

The text holds no rank, no address and no order of a set: it is byte-identical on all ranks.
docs/ir.md has its grammar.
"""

from __future__ import annotations

import dataclasses
import hashlib
import operator
from collections.abc import Sequence
from typing import Any

import torch
from tabulate import tabulate
from torch import fx

from fxshard import meta, ops
from fxshard.program import Program

_DTYPES = {
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
    phase = None
    for node in program.graph.nodes:
        tag = node.meta.get("fxshard")  # verify names a node without one, in this text
        if node.op == "call_function" and tag is not None and tag.phase != phase:
            phase = tag.phase
            lines.append(f"{phase}:")
        lines.append("  " + line(node, program))
    return "\n".join(lines)


def line(node: fx.Node, program: Program | None = None) -> str:
    """One node: value, type, operator with arguments, and its tag behind a bar."""
    if node.op == "output":
        if program is None:
            return f"return {_argument(node.args[0])}"
        named = zip(program.values, program.results, strict=True)
        return "return " + ", ".join(f"%{value} ({result.name})" for value, result in named)
    tag = node.meta.get("fxshard")
    type_ = f" : {types(node.meta.get('val'))}" if node.meta.get("val") is not None else ""
    if node.op == "placeholder":
        role = "input" if tag is None else "saved" if tag.role == "compute" else tag.role
        return f"%{node.name}{type_} = {role} {tag.fqn or '' if tag else ''}".rstrip()
    arguments = [_argument(a) for a in node.args]
    arguments += [f"{key}={_argument(value)}" for key, value in node.kwargs.items()]
    call = f"%{node.name}{type_} = {operation(node)}({', '.join(arguments)})"
    return f"{call}  | {_tag(tag)}" if tag and _tag(tag) else call


def operation(node: fx.Node) -> str:
    """``aten.mm``, ``fxshard.wait``, ``getitem``, ``region_0``."""
    if node.target is operator.getitem:
        return "getitem"
    return str(node.target).removesuffix(".default")


def types(value: Any) -> str:
    """``f32[2,16]``; a list in parentheses."""
    if isinstance(value, torch.Tensor):
        dtype = _DTYPES.get(value.dtype, str(value.dtype).removeprefix("torch."))
        return f"{dtype}[{','.join(map(str, value.shape))}]"
    if isinstance(value, (list, tuple)):
        return "(" + ", ".join(types(item) for item in value) + ")"
    return type(value).__name__


def _argument(value: Any) -> str:
    if isinstance(value, fx.Node):
        return f"%{value.name}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_argument(item) for item in value) + "]"
    return str(value)


def _tag(tag: meta.Meta) -> str:
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
    return " ".join(parts)


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
    """

    phase: str
    operation: str
    kind: str
    units: tuple[str, ...]
    what: str
    stream: str
    waits: str
    bytes: int

    @property
    def key(self) -> tuple[Any, ...]:
        """What must be equal for two rows to be the same row for different units."""
        return (self.phase, self.operation, self.kind, self.what, self.stream, self.bytes)


def rows(program: Program) -> list[Row]:
    """The outer schedule: every row but the picks of results."""
    assert program.schedule is not None, "outline-regions has not run"
    found: list[Row] = []
    for phase, graph in program.schedule.phases():
        for node in graph.nodes:
            if node.op not in ("call_function", "call_module"):
                continue
            is_cut = meta.get(node).role == "unshard" and node.target not in ops.WORDS
            if node.target is operator.getitem or is_cut:
                continue
            found.append(_row(program, phase, node))
    return found


def _row(program: Program, phase: str, node: fx.Node) -> Row:
    tag = meta.get(node)
    unit = program.units[tag.unit or 0]
    if node.op == "call_module":
        operation, what, size = "compute", str(node.target), 0
    else:
        operation = OPERATIONS[node.target]
        makes = node.target in MAKERS
        sources = list(node.users) if makes else meta.operands(node)
        values = [t for source in sources for t in meta.tensors(source.meta["val"])]
        size = sum(t.untyped_storage().nbytes() for t in values)
        what = f"{len(values)} tensor{'s' * (len(values) != 1)}"
        if operation in ("wait", "free"):
            unshards = all(meta.get(s).role in ("unshard", "reshard") for s in sources)
            what = "unshard" if unshards else "reduce"
    waits = {"c": "compute", "u": "unshard", "k": "unshard", "l": "load"}
    waits |= {"r": "reduce", "a": "reduce", "h": "reduce", "s": "store"}
    waited = ",".join(waits[event[0]] for event in tag.waits)
    return Row(phase, operation, unit.kind, (unit.name,), what, tag.stream, waited, size)


MAKERS = (ops.all_gather, ops.cast, ops.load, ops.reshard)  # their results are what counts
OPERATIONS: dict[Any, str] = {
    ops.all_gather: "unshard",
    ops.cast: "cast",
    ops.load: "load",
    ops.reshard: "reshard",
    ops.reduce_scatter: "reduce",
    ops.all_reduce: "all-reduce",
    ops.comm_hook: "comm-hook",
    ops.store: "store",
    ops.wait: "wait",
    ops.free: "free",
}


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
            )
            for i in range(period)
        ]
        if count == 1 and folded and folded[-1][0] == 1:
            folded[-1][1].extend(block)
        else:
            folded.append((count, block))
        at += count * period
    return folded


def schedule(program: Program, *, folded: bool = True, phase: str | None = None) -> str:
    """The outer schedule as a table; identical layers are one block, "x N"."""
    table = []
    everything = [row for row in rows(program) if phase in (None, row.phase)]
    blocks = fold(everything) if folded else [(1, everything)]
    for count, block in blocks:
        for i, row in enumerate(block):
            times = "" if count == 1 else (f"x {count}" if i == 0 else '  "')
            table.append(
                (
                    times,
                    row.phase,
                    row.operation,
                    span(row.units),
                    row.what,
                    row.stream,
                    row.waits,
                    mebibytes(row.bytes) if row.bytes else "",
                )
            )
    headers = ("", "phase", "operation", "unit", "what", "stream", "waits for", "MiB")
    aligned = ("left",) * 7 + ("right",)
    return tabulate(table, headers, tablefmt="simple", colalign=aligned, disable_numparse=True)


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


def mebibytes(size: int) -> str:
    """Bytes as MiB with three decimals."""
    return f"{size / 2**20:,.3f}"


def collectives(program: Program) -> list[str]:
    """One line per collective in launch order: what every rank must do alike."""
    lines = []
    for node in program.graph.nodes:
        if node.target in ops.COLLECTIVES:
            tag = meta.get(node)
            sent = [types(t) for t in meta.tensors([s.meta["val"] for s in node.args[0]])]
            fqns = [meta.get(user).fqn or "" for user in node.users]
            what = ", ".join(f"{fqn} {type_}" for fqn, type_ in zip(fqns, sent, strict=True))
            lines.append(f"{tag.phase} {operation(node)} unit={tag.unit} [{what}]")
    return lines


def certificate(program: Program) -> str:
    """SHA-256 of the collective sequence (hex)."""
    return hashlib.sha256("\n".join(collectives(program)).encode()).hexdigest()


def agreement(program: Program) -> list[str]:
    """What all ranks must have alike: parameters, structure of the call, collectives."""
    signature = program.signature
    lines = [
        f"parameter {p.fqn} {list(p.shape)} {p.dtype} unit={p.unit} requires_grad={p.requires_grad}"
        for p in program.params.values()
    ]
    inputs = {
        int(meta.get(n).fqn or -1): n
        for n in program.graph.find_nodes(op="placeholder")
        if meta.get(n).role == "input"
    }
    for i, name in enumerate(signature.input_names):
        if i in inputs:
            val = inputs[i].meta["val"]
            lines.append(f"input {name}: {val.dim()}-D {val.dtype}")
        else:
            lines.append(f"input {name}: {signature.inputs[i]!r}")
    lines.append(f"mode {'training' if signature.training else 'inference'}")
    return lines + collectives(program)
