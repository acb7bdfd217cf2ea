"""Events between streams: enough of them, none too many, and obeyed where there are streams.

What is enough is said by `tests.streams`, which simulates streams and memory and does not know what
the pass and the verifier think is needed.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import fx
from torch.distributed.device_mesh import init_device_mesh

from fxshard import pipeline, verify
from fxshard._torch import process_groups
from fxshard.codegen.emit import Executor
from fxshard.config.checked import Config
from fxshard.config.precision import Precision
from fxshard.errors import VerifyError
from fxshard.ir import ops, tags
from fxshard.ir.program import Fact, Program
from fxshard.ir.splitting import configured_units
from fxshard.runtime.world.c10d import C10dWorld
from fxshard.verify import orders
from tests import graphs, streams
from tests.graphs import APART, BF16
from tests.verify.settings import SETTINGS, traced
from tests.verify.verify_cases import fresh
from tests.zoo import MODELS
from tests.zoo.more import MATRIX

Build = Callable[[], Program]
SMALL: dict[str, Build] = {
    "full": graphs.layered,
    "of_its_own": graphs.of_its_own,
    "bf16": functools.partial(graphs.chain, 3, precision=BF16),
    "hybrid": functools.partial(graphs.chain, replicas=2),
    "kept": functools.partial(graphs.chain, reshard=False),
    "offload": functools.partial(graphs.chain, offloaded=True),
    "offload_layered": functools.partial(graphs.layered, offloaded=True),
    "fp16": functools.partial(graphs.chain, precision=Precision(torch.float16)),
    "hybrid_offload_bf16": functools.partial(
        graphs.chain, replicas=2, offloaded=True, precision=BF16
    ),
    "reshard_2_of_4": functools.partial(graphs.chain, world_size=4, reshard=2),
    "no_shard": functools.partial(graphs.chain, world_size=1, replicas=2),
    "hook": functools.partial(graphs.layered, comm_hook=True),
    "accumulated": functools.partial(graphs.chain, accumulated=frozenset({"head"})),
    "columns": functools.partial(graphs.layered, columns=True),
    "columns_hook": functools.partial(graphs.layered, columns=True, comm_hook=True),
    "columns_reshard_2_of_4": functools.partial(
        graphs.chain, columns=True, world_size=4, reshard=2
    ),
    "packed_columns": functools.partial(graphs.layered, columns=True, replicas=2),
    "packed": graphs.layered,
    "packed_offload": functools.partial(graphs.layered, offloaded=True),
    "packed_hybrid": functools.partial(graphs.layered, replicas=2),
    "packed_reshard_2_of_4": functools.partial(graphs.layered, world_size=4, reshard=2),
    "activations": functools.partial(graphs.chain, 3),
    "packed_activations_offload": functools.partial(graphs.layered, offloaded=True),
}


def options_of(name: str) -> dict[str, Any]:
    """Of one of `SMALL`: packed, as by default, where its name says so; activations offloaded."""
    found = {} if name.startswith("packed") else dict(APART)
    return found | ({"offload_activations": "1GiB"} if "activations" in name else {})


def small(name: str, prefetch: int = 1) -> Program:
    """One of `SMALL` after the pipeline."""
    return annotated(SMALL[name](), prefetch, **options_of(name))


def annotated(program: Program, prefetch: int = 1, **options: Any) -> Program:
    config = Config(forward_prefetch=prefetch, backward_prefetch=prefetch, **options)
    pipeline.run(program, pipeline.default_passes(config))
    return program


def untouched(name: str, setting: str) -> Program:
    """A model of the zoo with one of the settings of tests/verify/settings.py."""
    options, attributes = SETTINGS[setting]
    config = Config(units=MATRIX[name].units, **options)
    half = config.mixed_precision is not None
    program = fresh(traced(name, half), attributes.get("world_size", 2))
    units = configured_units(MATRIX[name].build(), config)
    offloaded = config.offload is not None
    return dataclasses.replace(program, units=units, offloaded=offloaded, **attributes)


def of_zoo(name: str, setting: str, prefetch: int) -> Program:
    """`untouched`, after the pipeline."""
    program = untouched(name, setting)
    options = SETTINGS[setting][0] | {"forward_prefetch": prefetch, "backward_prefetch": prefetch}
    config = Config(units=MATRIX[name].units, **options)
    pipeline.run(program, pipeline.default_passes(config))
    return program


def without_one(program: Program) -> Iterator[tuple[fx.Node, str]]:
    """`program` without one entry of one `waits`, for each there is; whole again afterwards."""
    for node in program.graph.nodes:
        tag = tags.get(node)
        for i, event in enumerate(tag.waits):
            tags.put(node, dataclasses.replace(tag, waits=tag.waits[:i] + tag.waits[i + 1 :]))
            yield node, event
            tags.put(node, tag)


def assert_none_too_many(program: Program) -> int:
    """Without any of its events the verifier refuses the program; returns their number."""
    assert set(recorded(program)) | set(orders.ENTRY.values()) >= waited(program)
    assert set(recorded(program)) <= waited(program)
    entries = 0
    for node, event in without_one(program):
        entries += 1
        with pytest.raises(VerifyError) as caught:
            verify.CHECKS[Fact.STREAMS_ORDERED](program)
        assert caught.value.fact == "streams_ordered", (node, event)
    verify.CHECKS[Fact.STREAMS_ORDERED](program)
    return entries


def recorded(program: Program) -> list[str]:
    return [event for n in program.graph.nodes if (event := tags.get(n).records) is not None]


def waited(program: Program) -> set[str]:
    return {event for node in program.graph.nodes for event in tags.get(node).waits}


@pytest.mark.parametrize("prefetch", [0, 1, 2])
@pytest.mark.parametrize("name", SMALL)
@pytest.mark.sample(16)  # each program once
def test_enough_and_none_too_many(name: str, prefetch: int) -> None:
    """However slow a stream is, all data is there; and without any event some is not."""
    program = small(name, prefetch)
    assert streams.races(program) is None
    assert assert_none_too_many(program) >= 4
    for node, event in without_one(program):
        # The simulation gives a buffer one of six addresses; there the one that matters is another.
        if (name, prefetch, event) != ("offload_layered", 1, "c2l"):
            assert streams.races(program), f"%{node} needs no {event}"


def test_the_simulation_finds_nothing_wrong_only_where_nothing_is() -> None:
    """Without any event at all it finds a race; nor does it wait for what comes later."""
    program = small("full")
    for node in program.graph.nodes:
        tags.update(node, waits=())
    assert streams.races(program)
    program = small("full")
    first = next(n for n in program.graph.nodes if n.target is ops.all_gather)
    last = [n for n in program.graph.nodes if tags.get(n).records][-1]
    tags.update(first, waits=(str(tags.get(last).records),))
    assert "deadlock" in (streams.races(program) or "")


SOME = [("tied", "everything", 1), ("convnet", "hybrid", 2), ("mlp13", "offload", 0)]
ALL = [
    (name, setting, prefetch) for name in MODELS for setting in SETTINGS for prefetch in (0, 1, 2)
]


@pytest.mark.parametrize(("name", "setting", "prefetch"), SOME)
@pytest.mark.sample(2)
def test_zoo(name: str, setting: str, prefetch: int) -> None:
    program = of_zoo(name, setting, prefetch)
    assert streams.races(program) is None
    assert_none_too_many(program)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "setting", "prefetch"), ALL)
def test_whole_zoo(name: str, setting: str, prefetch: int) -> None:
    test_zoo(name, setting, prefetch)


def test_events_are_few() -> None:
    """By hand, for 2 layers and a root in two gathers per phase: what each launch waits for."""
    program = annotated(graphs.chain())
    said = {n.name: tags.get(n).waits for n in program.graph.nodes if tags.get(n).waits}
    # A loss has used memory; or the first of backward's own operators, if it is launched after it.
    assert said.pop("unshard_3") in (("c_backward",), ("c5",))
    assert said == {
        "unshard_0": ("c_forward",),  # the optimizer wrote the shards
        "wait_0": ("u0",),
        "wait_1": ("u1",),  # unshard_1 is after unshard_0, and no kernel has run since
        "unshard_2": ("c2",),  # may get memory that layer 0 used
        "wait_2": ("u2",),
        "reduce_5": ("c5",),
        "wait_3": ("u3",),
        "wait_4": ("u4",),
        "wait_5": ("r5",),
        "reduce_6": ("c6",),
        "reduce_7": ("c7",),
        "wait_7": ("r7",),  # no kernel runs between wait_6 and here
    }


# -- on streams -----------------------------------------------------------------------------------


class Recorder:
    """Stands for ``torch.cuda``: streams and events that write down what is done with them."""

    def __init__(self) -> None:
        self.log: list[tuple[str, Any, Any]] = []
        self.compute = self.current = self.Stream()

    def Stream(self, priority: int = 0) -> "RecordedStream":
        return RecordedStream(self, priority)

    def Event(self) -> "RecordedEvent":
        return RecordedEvent(self)

    def current_stream(self) -> "RecordedStream":
        return self.current

    @contextlib.contextmanager
    def stream(self, stream: "RecordedStream") -> Iterator[None]:
        self.log.append(("launch", stream, None))
        before, self.current = self.current, stream
        yield
        self.current = before


@dataclasses.dataclass(eq=False)
class RecordedStream:
    cuda: Recorder
    priority: int

    def wait_event(self, event: "RecordedEvent") -> None:
        self.cuda.log.append(("wait", self, event))

    def synchronize(self) -> None:
        pass


@dataclasses.dataclass(eq=False)
class RecordedEvent:
    cuda: Recorder

    def record(self, stream: RecordedStream) -> None:
        self.cuda.log.append(("record", stream, self))


def wanted(program: Program) -> list[tuple[str, str, str | None]]:
    """What the tags of a program say, in the order of its graph."""
    found: list[tuple[str, str, str | None]] = []
    for phase in ("forward", "backward"):
        nodes = program.phase(phase)  # type: ignore[arg-type]
        if any(orders.ENTRY[phase] in tags.get(node).waits for node in nodes):  # type: ignore[index]
            found.append(("record", "compute", orders.ENTRY[phase]))  # type: ignore[index]
        for node in nodes:
            tag = tags.get(node)
            found += [("wait", tag.stream, event) for event in tag.waits]
            found += [("launch", tag.stream, None)] if ops.of(node).asynchronous else []
            found += [("record", tag.stream, tag.records)] if tag.records else []
    return found


@pytest.mark.parametrize("name", [name for name in SMALL if name != "of_its_own"])
def test_a_world_with_streams_does_what_the_tags_say(name: str) -> None:
    program = small(name)
    shape = (program.replicas, program.world_size)
    with process_groups.fake_process_group(0, shape[0] * shape[1]):
        if program.replicas > 1 and program.world_size > 1:
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
        else:
            mesh = init_device_mesh("cpu", (shape[0] * shape[1],))
        world = C10dWorld(mesh, sharded=program.world_size > 1, reshard=[2])
        world.hook = lambda flat, out=None: None
        world.cuda = cuda = Recorder()
        executor = Executor(program, world)
        _, (saved,) = executor.forward([some(executor.forward_inputs)])
        kept = iter(saved)
        executor.backward([some(executor.backward_inputs, kept)])
    names = {id(stream): name for name, stream in world._streams.items()}
    names |= {id(event): name for name, event in world._events.items()}
    names |= {id(cuda.compute): "compute", id(None): None}
    assert [(what, names[id(a)], names[id(b)]) for what, a, b in cuda.log] == wanted(program)
    assert cuda.current is cuda.compute
    assert {stream.priority for stream in world._streams.values()} == {-1}, "before those that wait"


def some(nodes: list[fx.Node], saved: Iterator[torch.Tensor] | None = None) -> list[torch.Tensor]:
    given = ("shard", "ignored", "buffer", "input", "tangent", "accumulated")
    return [
        torch.ones(n.meta["val"].shape, dtype=n.meta["val"].dtype)
        if tags.get(n).role in given
        else next(saved or iter(()))
        for n in nodes
    ]


def test_offload_has_streams_of_its_own() -> None:
    program = small("hybrid_offload_bf16")
    ran = {n.target: tags.get(n).stream for n in program.graph.nodes if n.op == "call_function"}
    assert {target: at for target, at in ran.items() if at != "compute"} == {
        ops.all_gather: "unshard",
        ops.cast: "unshard",
        ops.load: "load",
        ops.reduce_scatter: "reduce",
        ops.all_reduce: "all-reduce",
        ops.store: "store",
    }
