"""What runs is what was verified: no tag of the graph or of its schedule is changed unseen.

All checks but one read the graph, the executor reads the schedule, which holds copies of its tags.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
from torch import fx

from fxshard import pipeline, verify
from fxshard.config.checked import Config
from fxshard.errors import VerifyError
from fxshard.ir import ops, tags
from fxshard.ir.program import Fact, Program
from tests import graphs

CHANGES: dict[str, Any] = {
    "phase": "forward",
    "role": "store",
    "module": "layers.0.other",
    "unit": 2,
    "fqn": "head.other",
    "stream": "load",
    "pair": 77,
    "records": "c77",
    "waits": ("c77",),
    "checkpoint": 7,
    "save": True,
    "offload": True,
    "recomputed": True,
    "call": 7,
    "line": "other.py:1 in other",
    "inner": "_data",
}
SHARED = {"role", "module"}  # what the nodes of a region say of themselves, whoever calls it


def finished() -> Program:
    program = graphs.chain(replicas=2, offloaded=True)
    pipeline.run(program, pipeline.default_passes(Config()))
    return program


def rows(program: Program) -> Iterator[fx.Node]:
    assert program.schedule is not None
    for _, graph in program.schedule.phases():
        yield from (row for row in graph.nodes if row.op != "output")


def in_regions(program: Program) -> Iterator[fx.Node]:
    assert program.schedule is not None
    for region in program.schedule.regions.values():
        yield from region.body


def changed(node: fx.Node, field: str) -> bool:
    """Change a field of a tag; False if it is that already."""
    tag = tags.get(node)
    value = CHANGES[field]
    if field == "phase" and tag.phase == "forward":
        value = "backward"
    if getattr(tag, field) == value:
        return False
    tags.put(node, dataclasses.replace(tag, **{field: value}))
    return True


def test_every_field_of_a_tag_is_tried() -> None:
    assert set(CHANGES) == {field.name for field in dataclasses.fields(tags.Meta)}


@pytest.mark.parametrize("where", ["graph", "rows", "regions"])
def test_a_changed_tag_is_found(where: str) -> None:
    program = finished()
    graph = [node for node in program.graph.nodes if node.op != "output"]
    nodes = {"graph": graph, "rows": rows(program), "regions": in_regions(program)}[where]
    tried = 0
    for node in list(nodes):
        tag = tags.get(node)
        for field in CHANGES if where != "regions" else SHARED:
            if (
                where == "graph"
                and field not in SHARED | {"unit", "phase"}
                and inner(program, node)
            ):
                continue  # in a region nothing reads it; events are seen by streams_ordered
            if changed(node, field):
                tried += 1
                with pytest.raises(VerifyError):
                    verify.CHECKS[Fact.OUTLINED](program)
                tags.put(node, tag)
    assert tried > 20
    verify.verify(program)


def inner(program: Program, node: fx.Node) -> bool:
    """True for a node of the graph that runs in a region."""
    return any(node in row.meta.get("run", ()) for row in rows(program))


def test_changes_of_what_is_run_are_found() -> None:
    """A row more, a row less, other arguments; a compiled region of other code."""
    for change in ("double", "drop", "swap", "argument"):
        program = finished()
        assert program.schedule is not None and program.schedule.backward is not None
        ours = {row.target: row for row in rows(program) if row.target in ops.OPERATORS}
        for node in ours.values():
            program = finished()
            (row,) = (each for each in rows(program) if each.name == node.name)
            if change == "double":
                with row.graph.inserting_after(row):
                    twin = row.graph.node_copy(row)
                twin.meta = dict(row.meta)
            elif change == "drop":
                if row.users:
                    continue
                row.graph.erase_node(row)
            elif change == "swap":
                if row.next.op != "call_function" or row in row.next.all_input_nodes:
                    continue
                row.next.append(row)
            elif len(row.args) > 1:
                row.args = (row.args[0], 77, *row.args[2:])
            else:
                continue
            with pytest.raises(VerifyError):
                verify.CHECKS[Fact.OUTLINED](program)
