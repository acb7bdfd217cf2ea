"""When each Fact must hold: this depends on what a program has, not on the passes that made it.

A program with a schedule is finished: it runs as it is, and all Facts must hold. Before that, a
Fact must hold once the program has operators, tags or placeholders of the kind that it is about.
"""

from __future__ import annotations

from collections.abc import Callable

from fxshard.ir import ops, tags
from fxshard.ir.ops import OpSpec
from fxshard.ir.program import Fact, Program

Applies = Callable[[Program], bool]


def always(program: Program) -> bool:
    return True


def finished(program: Program) -> bool:
    return program.schedule is not None


def has(kind: Callable[[OpSpec], bool]) -> Applies:
    """Once the program has an operator of a kind."""

    def applies(program: Program) -> bool:
        find = program.graph.find_nodes
        targets = [target for target, spec in ops.OPERATORS.items() if kind(spec)]
        return finished(program) or any(find(op="call_function", target=t) for t in targets)

    return applies


def sharded(program: Program) -> bool:
    """Parameters come in as shards."""
    placeholders = program.graph.find_nodes(op="placeholder")
    return finished(program) or any(tags.get(node).role == "shard" for node in placeholders)


def bucketed(program: Program) -> bool:
    return finished(program) or bool(program.buckets)


def reduced(program: Program) -> bool:
    """Gradients are sent, or added to those of earlier steps."""
    return reductions(program) or any(r.kind in ("accumulated", "partial") for r in program.results)


reductions: Applies = has(lambda spec: spec.role == "reduce")
frees: Applies = has(lambda spec: spec.role == "free")


def stepped(program: Program) -> bool:
    """The program steps parameters, or is to do so."""
    steps = program.graph.find_nodes(op="call_function", target=ops.step)
    asked = program.optimizer_in_backward and program.signature.training
    return bool(steps) or (finished(program) and asked)


def clipped(program: Program) -> bool:
    return finished(program) or any(
        len(node.args) > 3 for node in program.graph.find_nodes(op="call_function", target=ops.step)
    )


def joined(program: Program) -> bool:
    return finished(program) and program.common is not None


def on_streams(program: Program) -> bool:
    found = (tags.get(node) for node in program.graph.nodes)
    return finished(program) or any(t.stream != "compute" or t.waits or t.records for t in found)


APPLIES: dict[Fact, Applies] = {
    Fact.WELL_FORMED: always,
    Fact.TAGGED: always,
    Fact.UNITS_ASSIGNED: sharded,
    Fact.BUCKETED: bucketed,
    Fact.RECOMPUTED: sharded,
    Fact.UNSHARD_PAIRED: has(lambda spec: spec.asynchronous or spec.role == "wait"),
    Fact.PARAMS_UNSHARDED: sharded,
    Fact.NO_PARAM_SAVED: sharded,
    Fact.REDUCED_ONCE: reduced,
    Fact.EQUAL_CHUNKS: has(lambda spec: spec.collective or spec.role == "reshard"),
    Fact.ONE_DTYPE: has(lambda spec: spec.collective),
    Fact.STEPPED_ONCE: stepped,
    Fact.CLIPPED: clipped,
    Fact.OFFLOADED: has(lambda spec: spec.of_activations),
    Fact.FREED: frees,
    Fact.NO_USE_AFTER_FREE: frees,
    Fact.BOUNDED_INFLIGHT: frees,
    Fact.STREAMS_ORDERED: on_streams,
    Fact.JOINED: joined,
    Fact.OUTLINED: finished,
}
