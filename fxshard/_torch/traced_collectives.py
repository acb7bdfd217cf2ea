"""Collectives of torch.distributed that a model calls, while it is traced.

They write into tensors and return works, which a graph cannot hold, and on tensors without data
they would move nothing. For the time of a trace the methods of process groups, to which all of them
come, are functional collectives whose results are copied into the tensors: as Dynamo does with the
functions (torch/distributed/_functional_collectives.py, ``traceable_collective_remaps``).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import threading
import typing
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn.functional
from torch import Tensor, fx
from torch.distributed import _functional_collectives

from fxshard._torch.export import OpOverload
from fxshard._torch.fully_sharded import replaced

_ops = torch.ops._c10d_functional
WAIT: Any = _ops.wait_tensor.default
_NAMES = _functional_collectives.REDUCE_OP_TO_STR


class _Over:
    """A work that is over."""

    def __init__(self, results: Sequence[Tensor]) -> None:
        self._results = list(results)

    def wait(self, timeout: Any = None) -> bool:
        return True

    is_completed = is_success = wait

    def result(self) -> list[Tensor]:
        return self._results

    def get_future(self) -> Any:
        future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
        future.set_result(self._results)
        return future


def _waited(made: Tensor) -> Tensor:
    waited: Tensor = _ops.wait_tensor(made)
    return waited


def _written(tensors: Sequence[Tensor], values: Sequence[Tensor]) -> _Over:
    """Autograd sees nothing of what a collective writes, in eager mode either."""
    for tensor, value in zip(tensors, values, strict=True):
        tensor.detach().copy_(value.detach().view(tensor.shape))
    return _Over(tensors)


def _op(options: Any) -> str:
    found = [name for op, name in _NAMES.items() if options.reduceOp == op]
    if not found:
        raise _Refused(f"a reduction by {options.reduceOp}")
    return found[0]


def _all_reduce(group: Any, tensors: list[Tensor], options: Any = None) -> _Over:
    op = "sum" if options is None else _op(options)
    made = [_waited(_ops.all_reduce(t.detach(), op, group.group_name)) for t in tensors]
    return _written(tensors, made)


def _broadcast(group: Any, tensors: list[Tensor], options: Any) -> _Over:
    root = options.rootRank
    made = [_waited(_ops.broadcast(t.detach(), root, group.group_name)) for t in tensors]
    return _written(tensors, made)


def _gathered(group: Any, tensor: Tensor) -> Tensor:
    return _waited(
        _ops.all_gather_into_tensor(tensor.detach().contiguous(), group.size(), group.group_name)
    )


def _all_gather_single(group: Any, output: Tensor, tensor: Tensor, options: Any = None) -> _Over:
    return _written([output], [_gathered(group, tensor)])


def _all_gather(
    group: Any, outputs: list[list[Tensor]], tensors: list[Tensor], options: Any = None
) -> _Over:
    for each, tensor in zip(outputs, tensors, strict=True):
        if any(output.shape != tensor.shape for output in each):
            raise _Refused("all_gather of tensors of several shapes")
        _written(each, _gathered(group, tensor.reshape(1, -1)).unbind())
    return _Over([output for each in outputs for output in each])


def _scattered(group: Any, tensor: Tensor, options: Any) -> Tensor:
    op, size = _op(options), group.size()
    flat = tensor.detach().contiguous()
    return _waited(_ops.reduce_scatter_tensor(flat, op, size, group.group_name))


def _reduce_scatter_single(group: Any, output: Tensor, tensor: Tensor, options: Any) -> _Over:
    return _written([output], [_scattered(group, tensor.reshape(group.size(), -1), options)])


def _reduce_scatter(
    group: Any, outputs: list[Tensor], inputs: list[list[Tensor]], options: Any
) -> _Over:
    for output, each in zip(outputs, inputs, strict=True):
        if any(tensor.shape != output.shape for tensor in each):
            raise _Refused("reduce_scatter of tensors of several shapes")
        _written([output], [_scattered(group, torch.stack(each).detach(), options)])
    return _Over(outputs)


def _evenly(rows: int, parts: int) -> list[int]:
    """How many rows of a tensor of the user's each part has."""
    each, left = divmod(rows, parts)
    if left:
        raise _Refused("all_to_all of rows that do not divide evenly")
    return [each] * parts


def _all_to_all_single(
    group: Any,
    output: Tensor,
    tensor: Tensor,
    into: list[int],
    sent: list[int],
    options: Any = None,
) -> _Over:
    into = list(into) or _evenly(output.shape[0], group.size())
    sent = list(sent) or _evenly(tensor.shape[0], group.size())
    flat = tensor.detach().contiguous()
    made = _waited(_ops.all_to_all_single(flat, into, sent, group.group_name))
    return _written([output], [made])


def _all_to_all(
    group: Any, outputs: list[Tensor], tensors: list[Tensor], options: Any = None
) -> _Over:
    if len({t.shape for t in (*outputs, *tensors)}) > 1:
        raise _Refused("all_to_all of tensors of several shapes")
    ones = [1] * len(tensors)
    flat = torch.stack([tensor.detach().reshape(-1) for tensor in tensors])
    made = _waited(_ops.all_to_all_single(flat, ones, ones, group.group_name))
    return _written(outputs, made.unbind())


def _reduce(group: Any, tensors: list[Tensor], options: Any) -> _Over:
    """All ranks get the result; one keeps it."""
    made = [_waited(_ops.all_reduce(t.detach(), _op(options), group.group_name)) for t in tensors]
    return _written(tensors, made) if group.rank() == options.rootRank else _Over(tensors)


def _gather(group: Any, outputs: list[list[Tensor]], tensors: list[Tensor], options: Any) -> _Over:
    """All ranks get the rows; one keeps them."""
    made = [_gathered(group, tensor.reshape(1, -1)).unbind() for tensor in tensors]
    for each, rows in zip(outputs, made, strict=False):
        _written(each, rows)
    return _Over(tensors)


def _scatter(group: Any, outputs: list[Tensor], inputs: list[list[Tensor]], options: Any) -> _Over:
    """Each rank sends a row to each; of what it gets, it keeps the row of one rank."""
    size, root = group.size(), options.rootRank
    ones = [1] * size
    for i, output in enumerate(outputs):
        sends = group.rank() == root
        flat = torch.stack([t.detach().reshape(-1) for t in inputs[i]]) if sends else None
        flat = output.new_zeros((size, output.numel())) if flat is None else flat
        made = _waited(_ops.all_to_all_single(flat, ones, ones, group.group_name))
        _written([output], [made[root]])
    return _Over(outputs)


class _Refused(Exception):
    """The name of a collective that no functional one stands for."""


def _refused(name: str, group: Any, *args: Any, **kwargs: Any) -> Any:
    raise _Refused(name)


# Methods of process groups; those of newer torch beside those that they replace.
_METHODS: dict[str, Callable[..., Any]] = {
    "allreduce": _all_reduce,
    "allreduce_coalesced": _all_reduce,
    "broadcast": _broadcast,
    "all_gather_single": _all_gather_single,
    "_allgather_base": _all_gather_single,
    "allgather": _all_gather,
    "reduce_scatter_single": _reduce_scatter_single,
    "_reduce_scatter_base": _reduce_scatter_single,
    "reduce_scatter": _reduce_scatter,
    "all_to_all_single": _all_to_all_single,
    "alltoall_base": _all_to_all_single,
    "alltoall": _all_to_all,
    "reduce": _reduce,
    "gather": _gather,
    "scatter": _scatter,
    "barrier": functools.partial(_refused, "barrier"),
    **dict.fromkeys(
        ("send", "recv", "recv_anysource"), functools.partial(_refused, "send or recv")
    ),
}


@contextlib.contextmanager
def traced(refuse: Callable[[str], Exception]) -> Iterator[None]:
    """Let the collectives that this thread calls be traced as functional ones.

    ``torch.distributed.nn.functional``, whose backward calls them too, is let through: it refuses
    to be compiled, as Dynamo would lose its gradients.

    Args:
        refuse: makes the error to raise for a collective, by its name.
    """
    here = threading.get_ident()

    def method(ours: Callable[..., Any], theirs: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != here:
                return theirs(*args, **kwargs)
            if "opts" in kwargs:
                kwargs["options"] = kwargs.pop("opts")
            try:
                return ours(*args, **kwargs)
            except _Refused as error:
                raise refuse(str(error)) from None

        return run

    group: Any = dist.ProcessGroup
    found = [(name, ours) for name, ours in _METHODS.items() if hasattr(group, name)]
    changes = [(group, name, method(ours, getattr(group, name))) for name, ours in found]
    functional = torch.distributed.nn.functional
    if hasattr(functional, "_not_supported_under_compile"):
        name = "_not_supported_under_compile"
        changes.append((functional, name, lambda *args, **kwargs: None))
    with replaced(changes):
        yield


@dataclasses.dataclass(frozen=True)
class CollectiveRanks:
    """Who takes part in a functional collective.

    Attributes:
        process_group: torch's name for them, on this rank.
        name: of the dimension of a mesh, "world", or what says how many ranks they are.
        size: how many they are.
        rank: which of them this is.
        stride: how far two neighbours in the group are apart, in ranks.
        number: how many groups of this name this process has made before. Ranks of a group have
            made their groups in one order, so that they tell two groups of one name apart by it.
    """

    process_group: str
    name: str
    size: int
    rank: int = 0
    stride: int = 1
    number: int = 0

    @classmethod
    def of(cls, process_group: str) -> CollectiveRanks:
        """Those that torch calls `process_group`, which is there."""
        torchs = typing.cast("Any", dist.distributed_c10d)
        group = torchs._resolve_process_group(process_group)
        called, size, stride = _called(group)
        alike = [each for each in torchs._world.pg_map if _called(each)[0] == called]
        number = next((i for i, each in enumerate(alike) if each is group), 0)
        return cls(process_group, called, size, group.rank(), stride, number)


def _called(group: Any) -> tuple[str, int, int]:
    """Name, size and stride of a group."""
    ranks = dist.get_process_group_ranks(group)
    steps = {abs(after - before) for before, after in itertools.pairwise(ranks)}
    stride = steps.pop() if len(steps) == 1 else 1
    by_ranks = f"group of {len(ranks)}" + (f" stride {stride}" if stride > 1 else "")
    names = {"default_pg": "world", "undefined": by_ranks}
    name = names.get(group.group_desc, group.group_desc).removeprefix("mesh_")
    return name, len(ranks), stride


_RANKS = "fxshard_ranks"  # in the metadata of a functional collective, see `note_ranks`


def note_ranks(node: fx.Node) -> None:
    """Note which ranks take part in a functional collective, while its group is there."""
    name = node.args[-1]
    if isinstance(name, str):
        note(node, CollectiveRanks.of(name))
        note_call(node)


def note(node: fx.Node, ranks: CollectiveRanks) -> None:
    """Note that they take part in a functional collective."""
    node.meta[_RANKS] = ranks


_CALLED = "fxshard_called"  # in the metadata of a functional collective, or of what stands for it
_NAME = "fxshard_repeated_as"  # in that of one that is repeated: what those that repeat it say
_REPEATS = "fxshard_repeats"  # in that of one that repeats another


def note_call(node: fx.Node) -> None:
    """Note what `node`, a functional collective, is called with besides what it sends.

    As text: a copy of the graph has other nodes of the same names.
    """
    node.meta[_CALLED] = str(node.args[1:])


def note_stands_for(node: fx.Node, call: fx.Node) -> None:
    """Note of `node`, which is put in the place of `call`, what is noted of that.

    If `call` is called otherwise than has been noted, so is `node`.
    """
    note_same_ranks(node, call)
    if is_called_otherwise(call):
        node.meta[_CALLED] = call.meta[_CALLED]
    else:
        note_call(node)


def note_repeats(copy: fx.Node, node: fx.Node) -> None:
    """Note that `copy` does once more what `node` does; nothing if that is no collective."""
    if _RANKS not in node.meta:
        return
    note_stands_for(copy, node)
    copy.meta[_REPEATS] = node.meta[_NAME] = node.name


def notes(node: fx.Node) -> dict[str, Any]:
    """All that is noted of `node`, by what it is; `note_all` notes it of another."""
    return {word: node.meta[key] for word, key in _WORDS.items() if key in node.meta}


def note_all(node: fx.Node, found: dict[str, Any]) -> None:
    """Note of `node` what `notes` has said."""
    node.meta |= {_WORDS[word]: value for word, value in found.items()}


_WORDS = {"ranks": _RANKS, "called": _CALLED, "repeated_as": _NAME, "repeats": _REPEATS}


def is_called_otherwise(node: fx.Node) -> bool:
    """True if what has been noted of `node` holds no more."""
    return _CALLED in node.meta and node.meta[_CALLED] != str(node.args[1:])


def note_same_ranks(node: fx.Node, other: fx.Node) -> None:
    """Note of `node`, of the ranks of `other`, who they are, and what it repeats if it does."""
    node.meta |= {key: other.meta[key] for key in (_RANKS, _NAME, _REPEATS) if key in other.meta}


def repeated(nodes: Iterable[fx.Node]) -> list[tuple[fx.Node, fx.Node]]:
    """Pairs of a collective that repeats another one, and that one, if it is there."""
    nodes = list(nodes)
    named = {n.meta[_NAME]: n for n in nodes if _NAME in n.meta and _REPEATS not in n.meta}
    both = ((n, named.get(n.meta[_REPEATS])) for n in nodes if _REPEATS in n.meta)
    return [(node, original) for node, original in both if original is not None]


def ranks_of(node: fx.Node) -> CollectiveRanks | None:
    """Who takes part in a functional collective; None if nobody has noted it."""
    found: CollectiveRanks | None = node.meta.get(_RANKS)
    return found


def is_waited_for(node: fx.Node) -> bool:
    """True if `node` is a functional collective that has a ``wait_tensor`` of its own."""
    return is_collective(node) and node.target.namespace == "_c10d_functional"  # type: ignore[union-attr]


def is_collective(node: fx.Node) -> bool:
    """True if `node` is a functional collective: one that the model itself calls."""
    target = node.target
    return (
        isinstance(target, OpOverload)
        and target.namespace in ("_c10d_functional", "_c10d_functional_autograd", "_dtensor")
        and target is not WAIT
    )
