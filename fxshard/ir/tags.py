"""Typed access to ``node.meta["fxshard"]``: what a node is for, tagged when it is made.

Passes and analyses read these tags; nothing is ever recognised later by its shape.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterator
from typing import Any, Literal, cast

import torch
from torch import fx

from fxshard._torch.export import OpOverload
from fxshard._torch.operators import schema_of

Phase = Literal["forward", "backward"]
Role = Literal[
    "shard",  # placeholder: this rank's padded shard of a parameter
    "param",  # placeholder: a full parameter of a unit (before insert-unshard)
    "ignored",  # placeholder: an ignored parameter, which is never sharded
    "buffer",  # placeholder: a buffer of the model, or a constant tensor it holds
    "input",  # placeholder: a tensor of the batch
    "tangent",  # placeholder: gradient arriving at an output
    "accumulated",  # placeholder: accumulated gradient of a parameter
    "partial",  # placeholder: partial sum of sharded gradients of a parameter
    "compute",
    "unshard",  # all-gather; load, cast, pack of what it sends; their getitems; cut of the padding
    "unpack",  # copy of small parameters out of the buffer that they were gathered in
    "pre_gather",  # operator of `fsdp_pre_all_gather`: what of a shard is sent
    "post_gather",  # operator of `fsdp_post_all_gather`: the unsharded parameter of what arrived
    "reshard",  # what a smaller group keeps of an unsharded parameter, and its getitems
    "reduce",  # launch of a reduction, or of a copy to the CPU after it; its getitems
    "transfer",  # launch that moves anything else; its getitems
    "pad",  # what brings a gradient into the form in which it is sent
    "post_reduction",  # operator on a sharded gradient after its reduction: division, cast
    "wait",
    "free",
    "join",  # reads a parameter that other ranks read, and does nothing
    "norm",  # this rank's part of the norms of gradients
    "step",  # the optimizer's, of a unit
    "output",
]
# "compute", "unshard", "reduce", "all-reduce", "load", "store"; or the name of a group of ranks
Stream = str

# Roles of placeholders that are the caller's: they live as long as the model or the batch.
HELD: tuple[Role, ...] = ("shard", "ignored", "buffer", "input")
# Roles of placeholders that no pass changes.
GIVEN: tuple[Role, ...] = ("buffer", "input", "tangent")


@dataclasses.dataclass(frozen=True)
class Meta:
    """The tag of one node.

    Attributes:
        phase: the half of the step in which the node runs.
        role: what it is for.
        module: FQN of the module that it belongs to ("" is the root).
        unit: index of the unit that it belongs to, or None before assign-units.
        fqn: for placeholders, what they hold: parameter or buffer FQN, input or output name; for
            getitems and cuts of an unshard or reduce, and for what a reduce sends, the parameter.
        stream: where it runs.
        pair: shared by the launch, wait and free of one collective.
        records: event recorded on `stream` when the node is done.
        waits: events that `stream` waits for before the node starts.
        checkpoint: number of the model's own activation checkpoint that the node runs in (of the
            outermost, if they are nested); a backward node has that of its forward.
        inner: of a placeholder of a parameter, the name of the tensor inside of it.
        save: the policy of that checkpoint keeps the value for backward.
        offload: what saves it, on the CPU (see `fxshard.cost.activations`).
        recomputed: the node recomputes, in backward, a value of a checkpoint.
        call: index into `Program.calls`: the call of the module that it runs in.
        line: the line of user code that it comes from, ``path:line in function``; "" if unknown.
    """

    phase: Phase
    role: Role
    module: str = ""
    unit: int | None = None
    fqn: str | None = None
    stream: Stream = "compute"
    pair: int | None = None
    records: str | None = None
    waits: tuple[str, ...] = ()
    checkpoint: int | None = None
    save: bool = False
    offload: bool = False
    recomputed: bool = False
    call: int | None = None
    line: str = ""
    inner: str = ""


def get(node: fx.Node) -> Meta:
    """The tag of `node`. Raises KeyError when a pass made it without one."""
    tag: Meta = node.meta["fxshard"]
    return tag


def put(node: fx.Node, tag: Meta, val: Any = None) -> fx.Node:
    """Tag `node`, and give it its fake value when one is passed; returns the node."""
    node.meta["fxshard"] = tag
    if val is not None:
        node.meta["val"] = val
    return node


def update(node: fx.Node, **changes: Any) -> None:
    """Replace fields of the tag of `node`."""
    node.meta["fxshard"] = changed(get(node), **changes)


def changed(tag: Meta, **changes: Any) -> Meta:
    """`tag` with some fields replaced; `dataclasses.replace` costs five times as much per node."""
    before = tag.__dict__
    assert changes.keys() <= before.keys(), f"no such fields: {changes.keys() - before.keys()}"
    after = object.__new__(Meta)
    after.__dict__.update(before, **changes)
    return after


def place(node: fx.Node) -> str:
    """Where a value comes from: ``at`` a line of user code, or ``by`` an operator and ``in`` whom.

    What the trace adds after an operator (a view of its result) has no line: its operand's counts.
    """
    sources, seen = [node], {node}
    for each in sources:
        tag = get(each) if "fxshard" in each.meta else None
        if tag is not None and tag.line:
            return f"at {tag.line}"
        if each.op == "call_function":
            sources += [n for n in each.all_input_nodes if n not in seen]
            seen.update(each.all_input_nodes)
    module = get(node).module if "fxshard" in node.meta else None
    return f"by {node.target} in {repr(module) if module else 'the root module'}"


def tensors(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in the value of a node (a tensor, or a list or tuple that holds some)."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors(item)


def storages(node: fx.Node) -> list[torch.UntypedStorage]:
    """The distinct storages that the value of `node` refers to. Aliases share one object."""
    found: dict[int, torch.UntypedStorage] = {}
    for tensor in tensors(node.meta.get("val")):
        storage = tensor.untyped_storage()
        found[id(storage)] = storage
    return list(found.values())


def storage_ids(node: fx.Node) -> frozenset[int]:
    """Identity of each storage of `node`; equal for aliases, stable while the graph lives.

    Passes and checks ask for it a hundred times per node, so that it is kept beside the value.
    """
    held = node.meta
    val = held.get("val")
    known = held.get(_STORAGES)
    if known is None or known[0] is not val:
        known = held[_STORAGES] = (val, frozenset(map(id, storages(node))))
    ids: frozenset[int] = known[1]
    return ids


_STORAGES = "fxshard_storages"  # (value, identities of its storages)
BETWEEN_POINTS = "fxshard_between"  # in the metadata of an operator after which nothing is counted


def read_ids(node: fx.Node) -> frozenset[int]:
    """Identity of each storage that `node` reads; a getitem reads its item, not a whole list."""
    if node.target is operator.getitem:
        return storage_ids(node)
    inputs = node.all_input_nodes
    return storage_ids(inputs[0]) if len(inputs) == 1 else _NONE.union(*map(storage_ids, inputs))


_NONE: frozenset[int] = frozenset()


def aliases_input(node: fx.Node) -> bool:
    """True if `node` is a view or an item of one of its inputs: it allocates nothing."""
    if node.op != "call_function":
        return False
    if node.target is operator.getitem:
        return True
    inputs: set[int] = set().union(*map(storage_ids, node.all_input_nodes))
    own = storage_ids(node)
    return bool(own) and own <= inputs


def shares_by_schema(node: fx.Node) -> bool:
    """True if a result of its operator is of an input's storage: a view, or written in place."""
    returns = getattr(schema_of(node.target), "returns", ())
    return any(getattr(returned, "alias_info", None) for returned in returns)


def writes(node: fx.Node) -> bool:
    """True if the operator of `node` changes what it reads."""
    schema = schema_of(node.target)
    return schema is not None and bool(schema.is_mutable)


def is_random(node: fx.Node) -> bool:
    """True if the operator of `node` draws random numbers."""
    target = node.target
    return isinstance(target, OpOverload) and (torch.Tag.nondeterministic_seeded in target.tags)


def operands(node: fx.Node) -> list[fx.Node]:
    """The list of values that a ``fxshard::`` operator takes (its first argument)."""
    return list(cast("list[fx.Node]", node.args[0]))


def backward_users(node: fx.Node) -> list[fx.Node]:
    """Operators of backward that read `node`."""
    return [u for u in node.users if u.op != "output" and get(u).phase == "backward"]


def source(node: fx.Node) -> fx.Node:
    """The node that `node`, a ``getitem`` or a view, is taken from: its first argument."""
    return cast("fx.Node", node.args[0])
