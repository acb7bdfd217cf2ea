"""All ranks inside this process, in lock-step: right numerics without a process group."""

from __future__ import annotations

import contextlib
import math
import operator
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, fx

from fxshard.ir import ops, tags


class InProcessWorld:
    """Runs each row of an outer schedule for every rank before the next row.

    Collectives are then plain tensor operations over the ranks' values: concatenate, average,
    cut. Every rank sees the same batch, and the same random numbers.

    Attributes:
        size: ranks that share a parameter.
        replicas: groups of them. Rank ``replica * size + shard`` is one of ``ranks``.
    """

    def __init__(self, size: int, replicas: int = 1) -> None:
        self.size, self.replicas = size, replicas
        self.ranks = size * replicas

    def phase(self, name: str, communicates: bool) -> AbstractContextManager[None]:
        """A phase runs inside; what it had is gone with it, however it ends."""
        return contextlib.nullcontext()

    def agree(self, *said: Any) -> None:
        """What ranks over a process group do to stay alike (`C10dWorld`): these are, always."""

    require_joined = together = run_call = await_backward = begin_backward = agree

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
                That under "step" is what ``fxshard.runtime.step`` calls.
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
                regions["step"](list(row.args[2]), grads)
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
        if row.target in ops.COLLECTIVES:
            for members in self._groups(row):
                mine = [envs[rank] for rank in members]
                sent = [[env[n] for n in tags.operands(row)] for env in mine]
                done = [_collective(row, values) for values in zip(*sent, strict=True)]
                for i, env in enumerate(mine):
                    env[row] = [per_rank[i] for per_rank in done]
        elif row.target is ops.reshard:
            for members in self._groups(row):
                for i, rank in enumerate(members):
                    buffers = [envs[rank][n] for n in tags.operands(row)]
                    envs[rank][row] = [b.chunk(len(members))[i].clone() for b in buffers]
        elif row.target is ops.pack:
            for env in envs:
                flat = [env[n].reshape(-1).to(row.args[1]) for n in tags.operands(row)]
                env[row] = [torch.cat(flat)]
        elif row.target is ops.unpack:
            for env in envs:
                env[row] = _unpacked(env[tags.operands(row)[0]], *row.args[1:])  # type: ignore[arg-type]
        elif row.target in (ops.cast, ops.load, ops.store):
            to = {ops.cast: row.args[-1], ops.load: row.args[-1], ops.store: "cpu"}[row.target]
            for env in envs:
                env[row] = [env[n].to(to, copy=True) for n in tags.operands(row)]
        elif row.target is operator.getitem:
            for env in envs:
                env[row] = env[tags.source(row)][row.args[1]]
        elif row.target not in (ops.wait, ops.free):
            for env in envs:
                args = fx.node.map_arg(row.args, env.__getitem__)
                kwargs = fx.node.map_arg(row.kwargs, env.__getitem__)
                env[row] = row.target(*args, **kwargs)  # type: ignore[operator]

    def _groups(self, row: fx.Node) -> list[range]:
        """The ranks that take part together in a collective, group by group."""
        named = {argument.name: i for i, argument in enumerate(row.target._schema.arguments)}  # type: ignore[union-attr]
        at = named["group"]
        default = "replicate" if row.target is ops.all_reduce else "shard"
        group = str(row.args[at]) if len(row.args) > at else default
        if group == "replicate":
            return [range(shard, self.ranks, self.size) for shard in range(self.size)]
        size = int(group.removeprefix("reshard")) if group != "shard" else self.size
        return [range(start, start + size) for start in range(0, self.ranks, size)]


def _collective(row: fx.Node, values: Sequence[Tensor]) -> list[Tensor]:
    """What each rank gets for one tensor per rank."""
    if row.target is ops.all_gather:
        return [torch.cat(list(values)) for _ in values]
    op = str(row.args[3]) if len(row.args) > 3 else "avg"
    total = REDUCE[op](values)
    if row.target is ops.all_reduce:
        for value in values:
            value.copy_(total)
        return list(values)
    return [total.chunk(len(values))[i].clone() for i in range(len(values))]


def _unpacked(packed: Tensor, size: int, chunks: Sequence[Sequence[int]]) -> list[Tensor]:
    """All ranks' chunks of each parameter, out of what was gathered rank by rank."""
    parts = packed.view(size, -1).split([math.prod(chunk) for chunk in chunks], 1)
    pairs = zip(parts, chunks, strict=True)
    return [part.reshape(size * rows, *rest).clone() for part, (rows, *rest) in pairs]


def _mean(ranks: Sequence[Tensor]) -> Tensor:
    """Average over ranks, exact where they are equal: on one batch that is everywhere."""
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
