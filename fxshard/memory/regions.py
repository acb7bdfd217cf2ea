"""What regions of a program make and drop, called from the rows of its schedule."""

from __future__ import annotations

from torch import fx

from fxshard.ir import tags
from fxshard.ir.compiled import Compiled
from fxshard.ir.schedule import Region, Schedule, last_reads
from fxshard.memory.category import Category
from fxshard.memory.gradients import is_reduce_copy
from fxshard.memory.storages import Storages


class Regions(Storages):
    """Storages, and what a call of a region does with them: operator by operator, or as compiled.

    Attributes:
        schedule: that the regions are of.
    """

    schedule: Schedule
    _dead_in: dict[int, dict[fx.Node, list[fx.Node]]]  # by region
    _categories: dict[int, Category]  # of storages outside of regions, where they are gradients

    def _region(
        self,
        row: fx.Node,
        items: list[fx.Node],
        inputs: list[list[int]],
        owned: set[fx.Node],
        origins: list[fx.Node],
    ) -> list[list[int]]:
        """Walk the region that `row` calls; returns the tokens of its results.

        `owned` are arguments that the caller has dropped: they die inside, at their last reader.
        """
        region = self.schedule.regions[str(row.target)]
        if region.compiled is not None:
            return self._compiled(row, region, region.compiled, items, inputs, owned)
        default = Category.ACTIVATION if tags.get(row).phase == "forward" else Category.TEMP
        env: dict[fx.Node, list[int]] = {}
        tokens_of: dict[int, int] = {}  # storage of the stored body -> token of this call
        for place, argument, tokens in zip(
            region.graph.find_nodes(op="placeholder"), row.all_input_nodes, inputs, strict=True
        ):
            env[place] = tokens
            for storage, token in zip(tags.storages(place), tokens, strict=False):
                tokens_of[id(storage)] = token
            if not tokens:
                for storage_id in tags.storage_ids(place):
                    tokens_of.setdefault(storage_id, -1)
            if argument not in owned:
                self._hold(tokens)
        outputs = tags.operands(region.graph.find_nodes(op="output")[0])
        labels = self._region_categories(region.body, outputs, items)
        dead = self._dead(region)
        for node, origin in zip(region.body, origins, strict=True):
            tokens = []
            for i, storage in enumerate(tags.storages(node)):
                if id(storage) not in tokens_of:
                    category = labels.get(id(storage), default)
                    tokens_of[id(storage)] = self._made(origin, category, storage.nbytes(), i)
                    tokens.append(tokens_of[id(storage)])
                elif tokens_of[id(storage)] >= 0:
                    tokens.append(tokens_of[id(storage)])
                    self._hold([tokens_of[id(storage)]])
                    if tags.get(node).role == "compute" and tags.writes(node):
                        self._rewrite(tokens_of[id(storage)], origin)
            env[node] = tokens
            self.now += 1
            for source in dead[node]:
                self._release(env.pop(source, []))
            self.now += 1
        for place in region.graph.find_nodes(op="placeholder"):
            if not place.users:
                self._release(env.pop(place, []))
        return [env[node] for node in outputs]

    def _compiled(
        self,
        row: fx.Node,
        region: Region,
        compiled: Compiled,
        items: list[fx.Node],
        inputs: list[list[int]],
        owned: set[fx.Node],
    ) -> list[list[int]]:
        """As `_region`, by the steps of the compiled code.

        No operator of it makes a copy that can be told from a gradient: what is sent is one.
        """
        default = Category.ACTIVATION if tags.get(row).phase == "forward" else Category.TEMP
        tokens_of: dict[int, list[int]] = {}  # number of a storage -> what the code holds of it
        numbers: dict[int, int] = {}
        for place, argument, tokens in zip(
            region.graph.find_nodes(op="placeholder"), row.all_input_nodes, inputs, strict=True
        ):
            if argument not in owned:
                self._hold(tokens)
            for storage in tags.storage_ids(place):
                tokens_of.setdefault(numbers.setdefault(storage, len(numbers)), []).extend(tokens)
        outputs = tags.operands(region.graph.find_nodes(op="output")[0])
        labels = self._region_categories(region.body, outputs, items)
        of_number: dict[int, Category] = {}
        origins: dict[int, fx.Node] = {}
        runs = dict(zip(region.body, row.meta["run"], strict=True))
        for node, number in zip(outputs, compiled.outputs, strict=True):
            origins.setdefault(number, runs.get(node, row))
            for storage in tags.storage_ids(node) & labels.keys():
                of_number[number] = labels[storage]
        for step in compiled.steps:
            for number, size in step.made:
                category = of_number.get(number, default)
                if category is Category.REDUCE_SCATTER:
                    category = Category.UNSHARDED_GRAD
                made = self._made(origins.get(number, row), category, size)
                tokens_of[number] = [made]
            if step is compiled.steps[-1]:
                break  # the return: a part of the row
            self.now += 1
            for number in step.dropped:
                self._release(tokens_of.pop(number, []))
            self.now += 1
        found = [tokens_of[number] for number in compiled.outputs]
        for tokens in found:
            self._hold(tokens)
        for tokens in tokens_of.values():
            self._release(tokens)
        return [list(tokens) for tokens in found]

    def _region_categories(
        self, body: list[fx.Node], outputs: list[fx.Node], items: list[fx.Node]
    ) -> dict[int, Category]:
        """Categories of storages of a body that are gradients, seen from this call of it."""
        found: dict[int, Category] = {}
        for node, item in zip(outputs, items, strict=True):
            for inner, outer in zip(tags.storages(node), tags.storages(item), strict=True):
                if id(outer) in self._categories:
                    found[id(inner)] = self._categories[id(outer)]
        makers: dict[int, fx.Node] = {}
        for node in body:
            for storage in tags.storage_ids(node):
                makers.setdefault(storage, node)
        for node in reversed(body):
            sent = any(found.get(s) is Category.REDUCE_SCATTER for s in tags.storage_ids(node))
            if not sent or not is_reduce_copy(node.target, dict(node.kwargs)):
                continue
            sources = [storage for n in node.all_input_nodes for storage in tags.storage_ids(n)]
            for storage in sources:
                maker = makers.get(storage)
                copied = maker is not None and is_reduce_copy(maker.target, dict(maker.kwargs))
                category = Category.REDUCE_SCATTER if copied else Category.UNSHARDED_GRAD
                found.setdefault(storage, category)
        return found

    def _dead(self, region: Region) -> dict[fx.Node, list[fx.Node]]:
        if id(region) not in self._dead_in:
            self._dead_in[id(region)] = last_reads(region.graph)
        return self._dead_in[id(region)]
