"""All ranks inside this process, in lock-step: right numerics without a process group."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from fxshard import meta, ops


class InProcessWorld:
    """Runs each row of an outer schedule for every rank before the next row.

    Collectives are then plain tensor operations over the ranks' values: concatenate, average,
    cut. Every rank sees the same batch, and the same random numbers.
    """

    def __init__(self, size: int) -> None:
        self.size = size

    def run(
        self,
        graph: fx.Graph,
        regions: dict[str, Callable[[list[Any]], tuple[Any, ...]]],
        random: set[str],
        args: Sequence[Sequence[Tensor]],
    ) -> list[Any]:
        """Run an outer graph.

        Args:
            graph: the outer graph of one phase.
            regions: a function per region name; takes (and clears) a list of arguments.
            random: names of the regions that draw random numbers.
            args: per rank, the values of the placeholders.

        Returns:
            per rank, what the graph returns.
        """
        envs: list[dict[fx.Node, Any]] = [{} for _ in range(self.size)]
        names = graph.find_nodes(op="placeholder")
        for env, values in zip(envs, args, strict=True):
            env.update(zip(names, values, strict=True))
        generators = [torch.get_rng_state()] * self.size
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
        if row.target is ops.all_gather:
            shards = [[env[n] for n in meta.operands(row)] for env in envs]
            for env in envs:
                env[row] = [torch.cat(ranks) for ranks in zip(*shards, strict=True)]
        elif row.target is ops.reduce_scatter:
            grads = [[env[n] for n in meta.operands(row)] for env in envs]
            means = [_mean(ranks) for ranks in zip(*grads, strict=True)]
            for rank, env in enumerate(envs):
                env[row] = [mean.chunk(self.size)[rank].clone() for mean in means]
        elif row.target is operator.getitem:
            for env in envs:
                env[row] = env[meta.source(row)][row.args[1]]
        elif row.target not in (ops.wait, ops.free):
            for env in envs:
                args = fx.node.map_arg(row.args, env.__getitem__)
                kwargs = fx.node.map_arg(row.kwargs, env.__getitem__)
                env[row] = row.target(*args, **kwargs)  # type: ignore[operator]


def _mean(ranks: Sequence[Tensor]) -> Tensor:
    """Average over ranks, exact where they are equal: on one batch that is everywhere."""
    first = ranks[0]
    return first + torch.stack([rank - first for rank in ranks]).mean(0)


def _is_last_reader(row: fx.Node, source: fx.Node) -> bool:
    *_, last = source.users
    return last is row and meta.get(row).role != "output"
