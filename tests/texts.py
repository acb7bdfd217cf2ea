"""Two programs compared in all that passes, checks, analysis and the executor read of them."""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

from torch import Tensor, fx

from fxshard import pipeline
from fxshard._torch import graphs, traced_collectives
from fxshard.errors import TextError
from fxshard.ir import dump, text
from fxshard.ir.domain import LAYOUT, OPEN
from fxshard.ir.program import Program

# Of a Program: those of its fields that are compared as they are.
PLAIN = [
    *("results", "signature", "units", "world_size", "device", "replicas", "sync", "accumulated"),
    *(
        "meshes",
        "partial",
        "kept",
        "comm_hook",
        "offloaded",
        "facts",
        "gradients",
        "given",
        "buckets",
        "forward_prefetch",
    ),
    *("backward_prefetch", "max_inflight", "optimizer_in_backward", "compiled", "calls"),
    *("reload_ahead", "checkpoints", "closed", "reached", "needs", "common"),
    *("whole", "max_norm"),
]


def assert_equal(one: Program, other: Program) -> None:
    """Field by field, node by node, storage by storage."""
    apart = {"graph", "constants", "fake_mode", "domain", "schedule"}
    fields = {
        f.name for f in dataclasses.fields(Program) if f.compare or not f.name.startswith("_")
    }
    assert fields == {*PLAIN, *apart}, "a new field"  # but those that only remember what others say
    for name in PLAIN:
        assert getattr(one, name) == getattr(other, name), name
    assert type(one.fake_mode) is type(other.fake_mode)
    assert [*map(dict.items, [one.given or {}])] == [*map(dict.items, [other.given or {}])]
    assert one.constants.keys() == other.constants.keys()
    for name, value in one.constants.items():
        assert described(value, {}) == described(other.constants[name], {}), name
    assert (one.domain is None) == (other.domain is None)
    if one.domain is not None and other.domain is not None:
        for field in dataclasses.fields(one.domain):
            assert getattr(one.domain, field.name) == getattr(other.domain, field.name), field.name
    assert_equal_graphs(one.graph, other.graph)
    assert dump.text(one) == dump.text(other)
    assert graphs.given_names(one.graph) == graphs.given_names(other.graph)
    assert (one.schedule is None) == (other.schedule is None)
    if one.schedule is not None and other.schedule is not None:
        mine, theirs = one.schedule, other.schedule
        assert dump.rows(one) == dump.rows(other)
        assert mine.regions.keys() == theirs.regions.keys()
        for (_, a), (_, b) in zip(mine.phases(), theirs.phases(), strict=True):
            assert_equal_graphs(a, b)
        for name, region in mine.regions.items():
            assert region.digest == theirs.regions[name].digest
            assert_equal_graphs(region.graph, theirs.regions[name].graph)


def assert_equal_graphs(one: fx.Graph, other: fx.Graph) -> None:
    """Also what they alias: storages get numbers in the order in which they appear."""
    assert len(one.nodes) == len(other.nodes)
    mine, theirs = dict[int, int](), dict[int, int]()
    for a, b in zip(one.nodes, other.nodes, strict=True):
        assert (a.op, a.name, a.target) == (b.op, b.name, b.target)
        assert with_types((a.args, a.kwargs)) == with_types((b.args, b.kwargs)), a.name
        assert [n.name for n in a.users] == [n.name for n in b.users], a.name
        assert a.meta.get("fxshard") == b.meta.get("fxshard"), a.name
        assert traced_collectives.notes(a) == traced_collectives.notes(b), a.name
        assert ("val" in a.meta) == ("val" in b.meta), a.name
        assert described(a.meta.get("val"), mine) == described(b.meta.get("val"), theirs), a.name
        for key in (LAYOUT, OPEN):
            assert a.meta.get(key) == b.meta.get(key), (a.name, key)
            assert (key in a.meta) == (key in b.meta), (a.name, key)
        assert [n.name for n in a.meta.get("run", ())] == [n.name for n in b.meta.get("run", ())]


def with_types(value: Any) -> Any:
    """Arguments with their types."""
    if isinstance(value, (list, tuple)):
        return type(value), [with_types(item) for item in value]
    if isinstance(value, dict):
        return type(value), [(key, with_types(item)) for key, item in value.items()]
    return type(value), repr(value)


def described(value: Any, storages: dict[int, int]) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value), [described(item, storages) for item in value]
    if not isinstance(value, Tensor):
        return type(value), value
    storage = value.untyped_storage()
    layout = tuple(value.shape), value.stride(), value.storage_offset(), value.requires_grad
    number = storages.setdefault(id(storage), len(storages))
    return layout, value.dtype, value.device, number, storage.nbytes()


def again(program: Program, written: str | None = None) -> Program:
    """The program that its text is read as, which is equal to it, and has the same text."""
    written = text.write(program) if written is None else written
    read = text.parse(written)
    assert_equal(program, read)
    assert text.write(read) == written
    return read


@contextlib.contextmanager
def compared() -> Iterator[None]:
    """Each program that is made inside is written and read, and must be equal then.

    Raises:
        AssertionError: one was not.
    """
    before = pipeline.rewritten
    seen = set()  # what is trained is planned and measured too

    def compared(*args: Any, **kwargs: Any) -> Program:
        program = before(*args, **kwargs)
        try:
            written = text.write(program)
        except TextError:
            return program  # told: code of Inductor's, a function of the user's
        if written not in seen:
            seen.add(written)
            again(program, written)
        return program

    pipeline.rewritten = compared
    try:
        yield
    finally:
        pipeline.rewritten = before
