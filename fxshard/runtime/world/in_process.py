"""All ranks inside this process, in lock-step: right numerics without a process group."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, fx

from fxshard.errors import ConfigError
from fxshard.ir import layout, ops, tags

_KNOWN = ("size", "group", "ranks", "rank", "stride")  # arguments that say who takes part
Ranks = list[list[Tensor]]  # per rank of a group, the operands or the results of an operator


class InProcessWorld:
    """Runs each row of an outer schedule for every rank before the next row.

    Each ``fxshard::`` operator is the method of its name, on the values of all ranks: concatenate,
    average, cut. Every rank sees the same batch, and the same random numbers.

    Attributes:
        size: ranks that share a parameter.
        replicas: groups of them. Rank ``replica * size + shard`` is one of ``ranks``.
        grids: the ranks of each mesh, by its name; "" is the model's. All have all ranks.
    """

    def __init__(self, size: int, replicas: int = 1, others: Iterable[layout.Grid] = ()) -> None:
        self.size: int = size
        self.replicas: int = replicas
        self.ranks: int = size * replicas
        grids = (layout.Grid(size, replicas), *others)
        self.grids: dict[str, layout.Grid] = {grid.name: grid for grid in grids}

    @property
    def is_first(self) -> bool:
        """See `C10dWorld.is_first`: the first rank is in this process too."""
        return True

    def phase(self, name: str, communicates: bool) -> AbstractContextManager[None]:
        """Run a phase in the block; nothing is left of it, however it ends."""
        return contextlib.nullcontext()

    def agree(self, *args: Any) -> None:
        """Nothing: in one process all ranks do the same (see `C10dWorld`)."""

    require_joined: Callable[..., None] = agree
    together: Callable[..., None] = agree
    run_call: Callable[..., None] = agree
    await_backward: Callable[..., None] = agree
    begin_backward: Callable[..., None] = agree

    def exchange(self, text: str, what: str) -> dict[str, list[int]]:
        """See `C10dWorld.exchange`."""
        return {text: list(range(self.ranks))}

    def any_rank(self, flags: str) -> Callable[[], str]:
        """See `C10dWorld.any_rank`."""
        return lambda: flags

    def run(
        self,
        graph: fx.Graph,
        regions: dict[str, Callable[..., Any]],
        random: set[str],
        args: Sequence[Sequence[Tensor]],
    ) -> list[Any]:
        """Run an outer graph.

        Args:
            graph: the outer graph of one phase.
            regions: a function per region name; takes (and clears) a list of arguments.
                "step", "grad_norms", "keep" and "kept" are the functions that operators of these
                names call.
            random: names of the regions that draw random numbers.
            args: per rank, the values of the placeholders.

        Returns:
            per rank, what the graph returns.
        """
        envs: list[dict[fx.Node, Any]] = [{} for _ in range(self.ranks)]
        names = graph.find_nodes(op="placeholder")
        for env, values in zip(envs, args, strict=True):
            env.update(zip(names, values, strict=True))
        generators = [torch.get_rng_state()] * self.ranks
        for row in graph.nodes:
            if row.op == "call_module":
                function = regions[str(row.target)]
                for rank, env in enumerate(envs):
                    values = [env[n] for n in row.args]
                    if str(row.target) in random:
                        torch.set_rng_state(generators[rank])
                        env[row] = function(values)
                        generators[rank] = torch.get_rng_state()
                    else:
                        env[row] = function(values)
            elif row.target is ops.step:
                grads = [[env[n] for n in tags.operands(row)] for env in envs]
                scales = [env[row.args[3]] for env in envs] if len(row.args) > 3 else []
                regions["step"](list(row.args[2]), grads, scales)
            elif row.target is ops.grad_norms:
                grads = [[env[n] for n in tags.operands(row)] for env in envs]
                made = regions["grad_norms"](list(row.args[1]), grads, *row.args[2:])
                for env, values in zip(envs, made, strict=True):
                    env[row] = values
            elif row.target is ops.keep:
                regions["keep"](row.args[1], [[env[n] for n in tags.operands(row)] for env in envs])
            elif row.target is ops.kept:
                for env, values in zip(envs, regions["kept"](row.args[1]), strict=True):
                    env[row] = values
            elif row.op == "call_function":
                self._run_row(row, envs)
            elif row.op == "output":
                return [fx.node.map_arg(row.args[0], env.__getitem__) for env in envs]
            for env in envs:
                for source in row.all_input_nodes:
                    if _is_last_reader(row, source):
                        env.pop(source, None)
        raise AssertionError("a graph without output")

    def _run_row(self, row: fx.Node, envs: list[dict[fx.Node, Any]]) -> None:
        if row.target in ops.OPERATORS:
            options = {n: v for n, v in ops.given(row).items() if n not in _KNOWN}
            for members in self._groups(row):
                given = [[envs[rank][n] for n in tags.operands(row)] for rank in members]
                made = getattr(self, ops.of(row).name)(given, **options)
                for rank, results in zip(members, made, strict=True):
                    envs[rank][row] = results
        elif row.target is operator.getitem:
            for env in envs:
                env[row] = env[tags.source(row)][row.args[1]]
        else:
            for env in envs:
                args = fx.node.map_arg(row.args, env.__getitem__)
                kwargs = fx.node.map_arg(row.kwargs, env.__getitem__)
                env[row] = row.target(*args, **kwargs)  # type: ignore[operator]

    def _groups(self, row: fx.Node) -> list[range]:
        """The groups of ranks that run an operator together."""
        group = ops.group(row)
        if ops.of(row).of_model:
            size, stride = int(row.args[1]), ops.argument(row, "stride")  # type: ignore[arg-type]
            if self.ranks % (size * stride):
                raise ConfigError(
                    f"the model calls a collective of {size} ranks, {stride} apart, which are not "
                    f"among the {self.ranks} that run in this process. Give world_size a multiple "
                    f"of {size * stride}, or run a process for each rank."
                )
            firsts = range(0, self.ranks, size * stride)
            every = (first + i for first in firsts for i in range(stride))
            return [range(first, first + size * stride, stride) for first in every]
        grid = self.grids[(group or "").partition("@")[2]]
        if layout.kind_of_group(group) == "replicate":
            return [range(shard, self.ranks, grid.shards) for shard in range(grid.shards)]
        size = 1 if group is None else grid.size(group) or 1
        return [range(start, start + size) for start in range(0, self.ranks, size)]

    # -- the operators: from the operands of each rank of a group to its results -------------------

    def all_gather(self, ranks: Ranks) -> Ranks:
        """The shards of all ranks, in their order."""
        return [[torch.cat(shards) for shards in zip(*ranks, strict=True)] for _ in ranks]

    def reduce_scatter(self, ranks: Ranks, op: str = "avg") -> Ranks:
        """Each rank's part of the reduction over all ranks."""
        totals = [REDUCE[op](values) for values in zip(*ranks, strict=True)]
        return self.reshard([totals] * len(ranks))

    def all_reduce(self, ranks: Ranks, op: str = "avg") -> Ranks:
        """The reduction over all ranks, in place."""
        for values in zip(*ranks, strict=True):
            total = REDUCE[op](values)
            for value in values:
                value.copy_(total)
        return ranks

    def reduce_norms(self, ranks: Ranks, op: str = "sum") -> Ranks:
        """The sum over all ranks, in place."""
        return self.all_reduce(ranks, op)

    def reduce_now(self, ranks: Ranks, op: str = "max") -> Ranks:
        """The reduction over all ranks, a copy for each."""
        totals = [REDUCE[op](values) for values in zip(*ranks, strict=True)]
        return [[total.clone() for total in totals] for _ in ranks]

    def reshard(self, ranks: Ranks, dims: Sequence[int] = (), rows: Sequence[int] = ()) -> Ranks:
        """Each rank's part of its buffers."""
        size = len(ranks)
        if dims:
            return [
                [layout.chunk_of(*each, i) for each in zip(buffers, dims, rows, strict=True)]
                for i, buffers in enumerate(ranks)
            ]
        return [
            [layout.part_of(b, i, size).clone() for b in buffers] for i, buffers in enumerate(ranks)
        ]

    model_all_gather: Callable[..., Ranks] = all_gather
    model_reduce_scatter: Callable[..., Ranks] = reduce_scatter
    model_all_reduce: Callable[..., Ranks] = reduce_now

    def model_all_to_all(self, ranks: Ranks, into: Sequence[int], sent: Sequence[int]) -> Ranks:
        """What each rank has for each.

        Raises:
            ConfigError: parts are not even, so that each rank would have splits of its own.
        """
        if len({*into, *sent}) > 1:
            raise ConfigError(
                f"the model calls an all-to-all that sends {list(sent)} rows and receives "
                f"{list(into)}: other ranks have other splits, and in one process all run the "
                f"program of one of them. Run a process for each rank."
            )
        parts = [[tensor.split(list(sent)) for tensor in tensors] for tensors in ranks]
        return [
            [torch.cat([own[i][rank] for own in parts]) for i in range(len(tensors))]
            for rank, tensors in enumerate(ranks)
        ]

    def model_broadcast(self, ranks: Ranks, root: int) -> Ranks:
        """What rank `root` of the group has."""
        return [[tensor.clone() for tensor in ranks[root]] for _ in ranks]

    def cast(self, ranks: Ranks, dtype: torch.dtype) -> Ranks:
        """Copies in `dtype`."""
        return [[tensor.to(dtype, copy=True) for tensor in tensors] for tensors in ranks]

    def load(self, ranks: Ranks, device: torch.device | str) -> Ranks:
        """Copies on `device`."""
        return [[tensor.to(device, copy=True) for tensor in tensors] for tensors in ranks]

    def store(self, ranks: Ranks) -> Ranks:
        """Copies on the CPU."""
        return self.load(ranks, "cpu")

    reload = load
    offload = store

    def pack(self, ranks: Ranks, dtype: torch.dtype) -> Ranks:
        """The shards of each rank in one flat tensor."""
        return [[torch.cat([s.reshape(-1).to(dtype) for s in shards])] for shards in ranks]

    def unpack(
        self,
        ranks: Ranks,
        chunks: Sequence[Sequence[int]],
        dims: Sequence[int] = (),
        lengths: Sequence[int] = (),
    ) -> Ranks:
        """All ranks' chunks of each parameter, out of what was gathered rank by rank."""
        return [_unpacked(packed, chunks, dims, lengths) for (packed,) in ranks]

    def wait(self, ranks: Ranks) -> list[None]:
        """Nothing: what was launched is over."""
        return [None for _ in ranks]

    def join(self, ranks: Ranks) -> list[None]:
        """Nothing."""
        return [None for _ in ranks]

    def free(self, ranks: Ranks) -> list[None]:
        """Nothing: a value is dropped after its last reader."""
        return [None for _ in ranks]


def _unpacked(
    packed: Tensor,
    chunks: Sequence[Sequence[int]],
    dims: Sequence[int],
    lengths: Sequence[int],
) -> list[Tensor]:
    made, pairs = layout.unpacked_places(packed, chunks, dims, lengths)
    for sent, place in pairs:
        place.copy_(sent)
    return made


def _mean(ranks: Sequence[Tensor]) -> Tensor:
    """Average over ranks; exact if they are equal, as they are on one batch."""
    first = ranks[0]
    return first + torch.stack([rank - first for rank in ranks]).mean(0)


REDUCE: dict[str, Callable[[Sequence[Tensor]], Tensor]] = {
    "avg": _mean,
    "sum": lambda ranks: torch.stack(list(ranks)).sum(0),
    "max": lambda ranks: torch.stack(list(ranks)).amax(0),
    "min": lambda ranks: torch.stack(list(ranks)).amin(0),
}


def _is_last_reader(row: fx.Node, source: fx.Node) -> bool:
    *_, last = source.users
    return last is row and tags.get(row).role != "output"
