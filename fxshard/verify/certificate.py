"""The certificate: what every rank must do alike, as lines that ranks compare before they begin.

A collective in which ranks disagree on the order, the group, the operation or the bytes hangs, or
moves wrong data without a word. So each collective of a program is one line, and ranks whose lines
have one digest cannot disagree (`fxshard.runtime.world.peers.Peers.agree` compares them in the
store of the process group, and issues no collective to do so).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from torch import fx

from fxshard._torch.traced_collectives import is_collective, ranks_of
from fxshard.ir import domain, dump, ops, tags
from fxshard.ir.program import Program
from fxshard.verify import walk


def certificate(program: Program) -> str:
    """SHA-256 of the collective sequence (hex)."""
    return digest(collectives(program))


def digest(lines: Sequence[str]) -> str:
    """SHA-256 of a text."""
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def collectives(program: Program) -> list[str]:
    """One line per collective in launch order.

    It has the number, phase, operator, group and its size, what a reduction does, unit, bytes that
    this rank sends, and each tensor that is sent with the FQNs of the parameters that lie in it::

        3 backward fxshard.reduce_scatter group=shard size=2 op=avg unit=0 bytes=48 [head f32[4,3]]
    """
    launches = [node for node in program.graph.nodes if ops.communicates(node)]
    uneven = any(p.placed is not None and p.placed.uneven for p in program.params.values())
    return [f"{i} {_line(program, node, sized=not uneven)}" for i, node in enumerate(launches)]


def _line(program: Program, launch: fx.Node, *, sized: bool) -> str:
    """Not `sized`: without bytes and shapes.

    Where tensor parallelism cuts parameters unevenly, ranks of the mesh have different ones; those
    of ranks that communicate are equal if parameters and placements are.
    """
    tag = tags.get(launch)
    if is_collective(launch) or ops.of(launch).of_model:
        return f"{tag.phase} {_of_the_model(program, launch)}"
    text = f"{tag.phase} {dump.operation(launch)} group={ops.group(launch)} size={launch.args[1]}"
    op = ops.argument(launch, "op")
    text += f" op={op}" if op else ""
    sent = [tensor for node in tags.operands(launch) for tensor in tags.tensors(node.meta["val"])]
    items = {walk.item_index(item): item for item in launch.users if walk.is_item_of(item, launch)}
    what = ", ".join(
        " ".join(
            filter(
                None,
                (
                    tags.get(items[i]).fqn or "+".join(_inside(node)),
                    dump.types(tensor) if sized else "",
                ),
            )
        )
        for i, (node, tensor) in enumerate(zip(tags.operands(launch), sent, strict=True))
    )
    if not sized:
        return f"{text} unit={tag.unit} [{what}]"
    size = sum(tensor.numel() * tensor.element_size() for tensor in sent)
    return f"{text} unit={tag.unit} bytes={size} [{what}]"


def _of_the_model(program: Program, call: fx.Node) -> str:
    """A collective that forward calls; torch gives its group other names on other ranks.

    So have sizes that are found in the data other values: what depends on them has no bytes.
    """
    text = _who_does_what(program, call)
    found = program.domain.from_data if program.domain else frozenset()
    if any(domain.depends_on(node, found) for node in call.all_input_nodes):
        return f"{text} bytes of its data"
    sent = [tensor for node in call.all_input_nodes for tensor in tags.tensors(node.meta["val"])]
    size = sum(tensor.numel() * tensor.element_size() for tensor in sent)
    what = ", ".join(map(dump.types, sent))
    return f"{text} bytes={size} [{what}]"


def _who_does_what(program: Program, call: fx.Node) -> str:
    """Operator, group and reduction of a collective that forward calls."""
    group, ranks = program.group_of(call), ranks_of(call)
    if ops.of(call).of_model:
        own = group in program.parallel
        which = f" made={ranks.number}" if ranks and ranks.number and not own else ""
        size = f" size={call.args[1]}" if own else ""
        found = [f"{dump.operation(call)} group={group}{size}{which}"]
        given = ops.given(call)
        values = {n: v for n, v in given.items() if n in _SAID}
        if "into" in given:
            values |= {n: from_the_next(given[n], given["rank"]) for n in ("into", "sent")}
        return " ".join([*found, *(f"{n}={v}" for n, v in values.items())])
    plain = [
        from_the_next(value, ranks.rank) if ranks and isinstance(value, (list, tuple)) else value
        for value in call.args[:-1]
        if not isinstance(value, fx.Node)
    ]
    where = []
    if ranks is not None:
        which = f" made={ranks.number}" if ranks.number and group is None else ""
        where = [f"group={group or ranks.name} size={ranks.size}{which}"]
    return " ".join([str(call.target), *map(str, plain), *where])


def from_the_next(splits: Sequence[Any], rank: int) -> list[Any]:
    """A number for each rank of a group, beginning with that of the rank after `rank`.

    So what is sent around a ring is told in the same words by each. Other splits that are not even
    are refused where they are constants: nobody would see that two ranks' do not fit together.
    """
    if not all(isinstance(size, int) for size in splits):
        return list(splits)  # found in the data
    return [*splits[rank + 1 :], *splits[: rank + 1]]


_SAID = ("op", "root")  # arguments of the model's collectives that ranks must have alike


def _inside(packed: fx.Node) -> list[str]:
    """FQNs of what lies in a packed tensor, in order."""
    found: list[str] = []
    todo = [packed]
    while todo:
        node = todo.pop()
        fqn = tags.get(node).fqn
        if fqn:
            found.append(fqn)
        elif node.op == "call_function" and tags.get(node).role != "compute":
            todo += node.all_input_nodes[::-1]
    return found


def agreement(program: Program) -> list[str]:
    """What all ranks must have alike: parameters, structure of the call, collectives.

    Where ranks may differ, their calls need not have one structure.
    """
    signature = program.signature
    lines = [
        f"{p.line} unit={p.unit} requires_grad={p.requires_grad}{program.grid(p.fqn).text}"
        for p in program.params.values()
    ]
    inputs = {
        int(tags.get(n).fqn or -1): n
        for n in program.graph.find_nodes(op="placeholder")
        if tags.get(n).role == "input"
    }
    for i, name in enumerate(signature.input_names if program.needs is None else ()):
        if i in inputs:
            val = inputs[i].meta["val"]
            lines.append(f"input {name}: {val.dim()}-D {val.dtype}")
        else:
            lines.append(f"input {name}: {signature.inputs[i]!r}")
    lines.append(f"mode {'training' if signature.training else 'inference'}")
    return lines + collectives(program)
