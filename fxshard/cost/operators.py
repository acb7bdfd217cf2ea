"""What one operator costs: floating-point operations, bytes, seconds. Read off its fake values.

An operator of compute takes what the slower of its two resources takes (the roofline model:
Williams, Waterman and Patterson, CACM 2009), and the launch of its kernel::

    launch_overhead + max(executed FLOPs / (peak * achievable), bytes / memory_bandwidth)

A collective takes what a ring takes, or an all-reduce by a tree if that takes less (alpha-beta
model: Thakur, Rabenseifner and Gropp, IJHPCA 2005; the bytes are those of nccl-tests'
doc/PERFORMANCE.md, the split of the steps into those within a node and those between nodes, and the
choice of the faster algorithm, those of NCCL's src/graph/tuning.cc)::

    collective_overhead + inner steps * link.alpha + outer steps * network.alpha + bytes / beta

docs/cost.md says more, and what is not modelled.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from typing import Any, cast

import torch
from torch import Tensor, fx
from torch.utils.flop_counter import FlopCounterMode

from fxshard._torch.export import OpOverload
from fxshard._torch.operators import schema_of
from fxshard._torch.traced_collectives import is_collective, ranks_of
from fxshard.hardware import Hardware
from fxshard.ir import ops, tags
from fxshard.ir.layout import kind_of_group

aten: Any = torch.ops.aten

# torch's own formulas, by operator without its overload. Attention's kernels for CPU have none
# there: they take the same arguments as the flash kernels of CUDA.
FORMULAS: dict[Any, Any] = dict(FlopCounterMode(display=False).flop_registry)
FORMULAS[aten._scaled_dot_product_flash_attention_for_cpu] = FORMULAS[
    aten._scaled_dot_product_flash_attention
]
FORMULAS[aten._scaled_dot_product_flash_attention_for_cpu_backward] = FORMULAS[
    aten._scaled_dot_product_flash_attention_backward
]

ATTENTION = {packet for packet in FORMULAS if "_scaled_dot_product_" in str(packet)}
# These take (grad_out, query, key, value, ...) and recompute the scores.
ATTENTION_BACKWARD = {packet for packet in ATTENTION if str(packet).endswith("_backward")}

# Operators that read parts of their first operand, as many bytes as they write.
GATHERS = {aten.embedding, aten.index, aten.index_select, aten.gather}
# Operators that write the first operand without reading it.
OVERWRITES = {aten.copy_, aten.fill_, aten.zero_, aten.copy}
# Operators that write nothing: the memory is taken, or what stands in it is left alone.
ALLOCATIONS = {aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty}


def flops(node: fx.Node) -> int:
    """Floating-point operations of an operator by torch's formulas; 0 if there is none.

    Products of matrices, convolutions and attention have one; a multiplication and the addition
    after it are two operations. Attention counts in full, causal or not. As
    `torch.utils.flop_counter.FlopCounterMode` counts.
    """
    packet = _packet(node)
    if packet is aten._grouped_mm:
        left, right = _shapes(node.args[:2])
        return _grouped_flops(left, right)
    formula = FORMULAS.get(packet)
    if formula is None:
        return 0
    args = fx.node.map_arg(node.args, _value)
    kwargs = fx.node.map_arg(node.kwargs, _value)
    if packet in ATTENTION:
        args = _with_all_heads(args, 1 if packet in ATTENTION_BACKWARD else 0)
    return int(formula(*args, **kwargs, out_val=node.meta["val"]))


def _with_all_heads(args: tuple[Any, ...], at: int) -> tuple[Any, ...]:
    """Arguments of attention whose query is at `at`; keys and values as shapes, of all heads.

    Several heads of the query may share a key and a value, which torch's formulas of 2.11 do not
    take; each meets the scores of its own.
    """
    heads = args[at].shape[1]
    shared = ((*v.shape[:1], heads, *v.shape[2:]) for v in args[at + 1 : at + 3])
    return (*args[: at + 1], *shared, *args[at + 3 :])


def _grouped_flops(a: torch.Size, b: torch.Size) -> int:
    """Of ``aten._grouped_mm``, for which torch has no formula: each row meets one group's matrix.

    ``[m, k] x [groups, k, n]``, ``[groups, m, k] x [k, n]``, ``[m, k] x [k, n]`` with the groups
    along k; with two batches of matrices a product for each.
    """
    groups = a[0] if len(a) == len(b) == 3 else 1
    return groups * 2 * a[-2] * a[-1] * b[-1]


def model_flops(node: fx.Node) -> int:
    """`flops`, without the scores that attention's backward computes a second time.

    What counts for the utilisation of a model, of all nodes not tagged `recomputed`. Source:
    Chowdhery et al., PaLM (2022), appendix B: no rematerialisation.
    """
    counted = flops(node)
    if _packet(node) in ATTENTION_BACKWARD:
        query, key = _shapes(node.args[1:3])
        counted -= 2 * math.prod(query) * key[-2]
    return counted


def executed_flops(node: fx.Node) -> float:
    """`flops`, halved for causal attention: its kernels skip the blocks above the diagonal.

    Source: Dao, FlashAttention-2 (2023), section 3.1.
    """
    counted = flops(node)
    return counted / 2 if counted and ops.argument(node, "is_causal") else counted


def bytes_moved(node: fx.Node) -> int:
    """Bytes that an operator reads and writes: its inputs and its outputs, once each. Views: 0.

    What is expanded counts as it lies in memory. Embeddings and indexing read as many bytes
    as they write, not their whole operand.
    """
    packet = _packet(node)
    if packet in ALLOCATIONS or is_view(node):
        return 0
    written = sum(map(_extent, tags.tensors(node.meta.get("val"))))
    inputs = [n.meta.get("val") for n in node.all_input_nodes]
    if packet in GATHERS or ops.of(node).grows < 0:
        return 2 * written + sum(map(_extent, tags.tensors(inputs[1:])))
    if packet in OVERWRITES:
        inputs = inputs[1:]
    return written + sum(map(_extent, tags.tensors(inputs)))


def is_view(node: fx.Node) -> bool:
    """True if `node` runs no kernel: placeholders, getitems, views."""
    if node.op != "call_function" or node.target is operator.getitem:
        return True
    mutates = isinstance(node.target, OpOverload) and schema_of(node.target).is_mutable
    return not mutates and tags.aliases_input(node)


def node_seconds(node: fx.Node, hardware: Hardware, world_size: int = 1, apart: int = 1) -> float:
    """Seconds from the start of an operator until it is done, on a stream of its own.

    Args:
        node: of a program, or of a region.
        hardware: where it runs.
        world_size: ranks that share a parameter.
        apart: distance between two of them; two of a `replicate` group are `world_size` times as
            far apart.
    """
    spec = ops.of(node)
    if ops.communicates(node):
        return collective_seconds(node, hardware, world_size, apart)
    if spec.over == "host":
        return hardware.host.alpha + _sent(node) / hardware.host.beta
    if spec.over == "nothing" or is_view(node):
        return 0.0
    moved = bytes_moved(node) / hardware.memory_bandwidth
    work = executed_flops(node)
    if work:
        work /= hardware.rate(operand_dtype(node)) * hardware.achievable
    if not (moved or work):
        return 0.0
    return hardware.launch_overhead + max(work, moved)


@dataclasses.dataclass(frozen=True)
class Collective:
    """What is sent, and through whom.

    Attributes:
        total: bytes on all ranks together: the gathered result of an all-gather, the
            operand of a reduction; with padding.
        ranks: of the group.
        stride: distance between two ranks of the group: 1 for neighbours.
        passes: rounds of the ring: 1 for all-gather and reduce-scatter, 2 for all-reduce.
    """

    total: int
    ranks: int
    stride: int = 1
    passes: int = 1


def collective(node: fx.Node, world_size: int, apart: int = 1) -> Collective:
    """A launch as one collective of all its bytes.

    A user's `comm_hook` counts as the reduce-scatter, or with one shard the all-reduce, that stands
    there without it.

    Args:
        node: a collective.
        world_size, apart: as for `node_seconds`.
    """
    if is_collective(node):
        name, made = str(node.target), sum(map(_extent, tags.tensors(node.meta["val"])))
        given = sum(_extent(t) for n in node.all_input_nodes for t in tags.tensors(n.meta["val"]))
        total, passes, members = max(made, given), 2 if "all_reduce" in name else 1, ranks_of(node)
        if members is None:
            return Collective(total, world_size, 1, passes)
        return Collective(total, members.size, members.stride, passes)
    spec, ranks = ops.of(node), int(cast(int, node.args[1]))
    between = apart * (world_size if kind_of_group(ops.group(node)) == "replicate" else 1)
    if spec.of_model:
        between = ops.argument(node, "stride")
    return Collective(
        total=_sent(node) * ranks ** max(0, spec.grows),
        ranks=ranks,
        stride=between,
        passes=spec.passes,
    )


def collective_seconds(node: fx.Node, hardware: Hardware, world_size: int, apart: int = 1) -> float:
    """Seconds of a collective: of a ring, or of a tree if NCCL has one for it and it is faster."""
    sent = collective(node, world_size, apart)
    ring = ring_seconds(sent.total, sent.ranks, hardware, stride=sent.stride, passes=sent.passes)
    if sent.passes == 1 or hardware.tree is None:
        return ring
    return min(ring, tree_seconds(sent.total, sent.ranks, hardware, stride=sent.stride))


def together(ranks: int, stride: int, hardware: Hardware) -> int:
    """How many members of a group share a node."""
    return min(ranks, max(1, hardware.ranks_per_node // stride))


def ring_seconds(
    total: float, ranks: int, hardware: Hardware, *, stride: int = 1, passes: int = 1
) -> float:
    """Seconds of a ring collective; `Collective` says what the arguments are."""
    if ranks <= 1:
        return 0.0
    near = together(ranks, stride, hardware)
    nodes = math.ceil(ranks / near)
    across = hardware.network.alpha
    if near == 1 and hardware.tree is not None:
        across = hardware.tree.network_alpha
    outer = passes * (nodes - 1)
    inner = passes * (ranks - 1) - outer
    latency = inner * hardware.link.alpha + outer * across
    moved = passes * (ranks - 1) / ranks * total
    return hardware.collective_overhead + latency + moved / _slowest(near, nodes, hardware)


def tree_seconds(total: float, ranks: int, hardware: Hardware, *, stride: int = 1) -> float:
    """Seconds of an all-reduce by NCCL's tree: up and down, a chain within each node.

    Source: NCCL, src/graph/tuning.cc: latency ``2 * ((ranks / nodes - 1) * link + log2(nodes) *
    network)``, the logarithm rounded down, and every byte passes a rank twice.

    Args:
        total, ranks, stride: see `Collective`.
        hardware: with a `tree`.
    """
    assert hardware.tree is not None, f"{hardware.name!r} has no tree"
    if ranks <= 1:
        return 0.0
    near = together(ranks, stride, hardware)
    nodes = math.ceil(ranks / near)
    chain, levels = near - 1, nodes.bit_length() - 1
    latency = 2 * (chain * hardware.tree.link_alpha + levels * hardware.tree.network_alpha)
    rate = _slowest(near, nodes, hardware) * hardware.tree.share
    return hardware.collective_overhead + latency + 2 * total / rate


def all_to_all_seconds(held: float, ranks: int, hardware: Hardware) -> float:
    """Seconds of an all-to-all over neighbours: each rank sends every other rank a part at once.

    Args:
        held: bytes of what a rank sends, or receives if that is more, its own part included.
        ranks: of the group.
        hardware: where.
    """
    if ranks <= 1:
        return 0.0
    near = together(ranks, 1, hardware)
    inside, across = all_to_all_bytes(held, ranks, hardware)
    latency = (near - 1) * hardware.link.alpha + (ranks - near) * hardware.network.alpha
    sending = max(inside / hardware.link.beta, across / hardware.network.beta)
    return hardware.collective_overhead + latency + sending


def all_to_all_bytes(held: float, ranks: int, hardware: Hardware) -> tuple[float, float]:
    """Bytes that one rank sends in an all-to-all: within its node, and to other nodes."""
    near = together(ranks, 1, hardware)
    return (near - 1) / ranks * held, (ranks - near) / ranks * held


def _slowest(near: int, nodes: int, hardware: Hardware) -> float:
    """Bytes per second of the slowest part of a ring with `near` members in each of the nodes."""
    rates = [hardware.link.beta] if near > 1 else []
    if nodes > 1:  # each of a node's members has a network card of its own
        rates.append(near * hardware.network.beta)
    return min(rates)


def wire_bytes(sent: Collective, hardware: Hardware) -> tuple[float, float]:
    """Bytes that one rank sends in a collective: within its node, and to other nodes.

    ``passes * (ranks - 1) / ranks`` of the total. Of what the members in one node send to their
    neighbours in a ring, one part in as many as they are leaves the node; the rings of a collective
    begin at different members, so each sends alike. A tree sends as much in the mean over ranks.
    """
    moved = sent.passes * (sent.ranks - 1) / sent.ranks * sent.total
    near = together(sent.ranks, sent.stride, hardware)
    crossing = moved / near if sent.ranks > near else 0.0
    return moved - crossing, crossing


def _sent(node: fx.Node) -> int:
    return sum(_extent(t) for source in tags.operands(node) for t in tags.tensors(_value(source)))


def _extent(tensor: Tensor) -> int:
    """Bytes of a tensor as it lies in memory: a dimension of stride 0 counts once."""
    size = tensor.element_size()
    for length, stride in zip(tensor.shape, tensor.stride(), strict=True):
        size *= length if stride or not length else 1
    return size


def operand_dtype(node: fx.Node) -> torch.dtype:
    """Dtype of what is multiplied: of the first operand (attention's last ones may be others)."""
    found = next(tags.tensors([_value(n) for n in node.all_input_nodes]), None)
    return found.dtype if found is not None else torch.float32


def _shapes(nodes: Any) -> list[torch.Size]:
    return [_value(node).shape for node in nodes]


def _packet(node: fx.Node) -> Any:
    return node.target.overloadpacket if isinstance(node.target, OpOverload) else node.target


def _value(node: fx.Node) -> Any:
    return node.meta.get("val")
