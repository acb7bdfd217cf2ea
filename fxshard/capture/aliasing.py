"""Tensors of a call that share memory: no program may write one of them unknown to the others.

A trace takes each buffer and each input for memory of its own. That is right as long as none is
written that overlaps with another one which the program knows.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, fx, nn

from fxshard._torch.operators import schema_of
from fxshard._torch.storages import storage_id
from fxshard.errors import CaptureError
from fxshard.ir import tags
from fxshard.ir.program import Program

Groups = tuple[tuple[int, ...], ...]


def overlapping(tensors: Sequence[Tensor]) -> Groups:
    """Positions of the tensors that overlap in memory, group by group; none stands alone."""
    by_storage: dict[int, list[int]] = defaultdict(list)
    for i, tensor in enumerate(tensors):
        if tensor.layout is torch.strided:
            by_storage[storage_id(tensor)].append(i)
    if len(by_storage) == len(tensors):
        return ()
    found: list[tuple[int, ...]] = []
    for positions in by_storage.values():
        spans = sorted((*_span(tensors[i]), i) for i in positions if tensors[i].numel())
        group: list[int] = []
        reached = 0
        for start, end, i in spans:
            if start >= reached:
                found.append(tuple(group))
                group = []
            group.append(i)
            reached = max(reached, end)
        found.append(tuple(group))
    return tuple(sorted(tuple(sorted(group)) for group in found if len(group) > 1))


def _span(tensor: Tensor) -> tuple[int, int]:
    """The first byte of a tensor in its storage, and the one after its last."""
    size = tensor.element_size()
    reach = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    start = int(tensor.storage_offset()) * size
    return start, start + (int(reach) + 1) * size


def overlaps_itself(tensor: Tensor) -> bool:
    """True if elements of a tensor may lie in one place, as those of ``x.unfold`` do."""
    reached = 0
    for step, n in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if n > 1 and step <= reached:
            return True
        reached += (n - 1) * step if n else 0
    return False


def with_views(holder: fx.Node) -> list[fx.Node]:
    """`holder` and all that lies in its memory: its views, theirs, and what writes into it."""
    storages = tags.storage_ids(holder)
    found, todo = dict.fromkeys([holder]), [holder]
    while todo:
        for user in todo.pop().users:
            same = user.op == "call_function" and tags.storage_ids(user) & storages
            if same and user not in found:
                found[user] = None
                todo.append(user)
    return list(found)


def keep_old_value(program: Program, holder: fx.Node) -> fx.Node:
    """Copy a placeholder where forward begins; all that reads it, be it by a view, reads the copy.

    Returns:
        the copy. What writes into the placeholder, if anything does by now, still does.
    """
    stale = tags.storage_ids(holder)
    first = program.phase("forward")[0]
    copy = copied(program, holder, first.prev)
    tags.update(copy, unit=tags.get(first).unit)
    holder.replace_all_uses_with(
        copy, delete_user_cb=lambda user: user is not copy and not tags.writes(user)
    )
    program.refresh_views(copy, stale)
    return copy


def copied(program: Program, value: fx.Node, after: fx.Node) -> fx.Node:
    """A copy of `value`, made in forward after another node."""
    with program.graph.inserting_after(after):
        copy = program.graph.call_function(torch.ops.aten.clone.default, (value,))
    tag = tags.Meta("forward", "compute", module=tags.get(after).module)
    return tags.put(copy, tag, program.refake(copy))


def refuse_written(
    program: Program,
    model: nn.Module,
    inputs: Mapping[str, Tensor],
    replaced: Sequence[str],
) -> None:
    """Refuse a program that writes a buffer or an input which overlaps with another one.

    Args:
        program: normalized; forward writes by ``copy_`` at its end.
        inputs: tensors of the call, by the `fqn` of their placeholders.
        replaced: buffers that forward assigns another tensor to, which the program copies instead.

    Raises:
        CaptureError: names both, and says what to do.
    """
    held = [(("buffer", name), buffer) for name, buffer in model.named_buffers()]
    held += [(("buffer", name), constant) for name, constant in program.constants.items()]
    held += [(("ignored", name), model.get_parameter(name)) for name in program.ignored]
    held += [(("input", name), tensor) for name, tensor in inputs.items()]
    groups = overlapping([tensor for _, tensor in held])
    if not groups:
        return
    nodes = {
        (str(tags.get(n).role), tags.get(n).fqn): n
        for n in program.graph.find_nodes(op="placeholder")
    }
    for group in groups:
        names = [held[i][0] for i in group]
        known = [key for key in names if key in nodes and nodes[key].users]
        for role, name in known:
            node = nodes[role, name]
            writes = [
                user
                for user in node.users
                if user.target is torch.ops.aten.copy_.default and user.args[0] is node
            ]
            others = names if name in replaced else known
            other = next((key for key in others if key != (role, name)), None)
            if writes and other is not None:
                place = tags.place(cast(fx.Node, writes[0].args[1]))
                raise CaptureError(
                    f"forward writes {_described(program, role, name)} ({place}), "
                    f"whose memory is also that of "
                    f"{_described(program, *other)}: a traced program would go on with values that "
                    f"are out of date. Let one of them have memory of its own (.clone()), or make "
                    f"it a view of the other inside of forward."
                )


def refuse_unregistered(func: Any, args: tuple[Any, ...], kwargs: Any, line: str) -> None:
    """Refuse an operator that writes a tensor which only Python knows, as an attribute say.

    Raises:
        CaptureError: while tracing, everything else is fake.
    """
    if not schema_of(func).is_mutable:
        return
    written = (*args[:1], *(kwargs or {}).values())  # ``out=`` is a keyword
    if any(type(value) is Tensor for value in written):
        raise CaptureError(
            f"forward writes in place ({func}) into a tensor that is neither a buffer nor an input "
            f"of the model{line and ', at ' + line}: no program writes it back. Make it a buffer "
            f"(register_buffer)."
        )


def _described(program: Program, role: str, name: str | None) -> str:
    if role == "input":
        return program.signature.input_names[int(name or 0)]
    return f"{'parameter' if role == 'ignored' else 'buffer'} {name!r}"
