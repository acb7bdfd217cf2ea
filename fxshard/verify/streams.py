"""Streams: events give every order that a program needs."""

from __future__ import annotations

from fxshard.ir import ops, tags
from fxshard.ir.program import Fact, Program
from fxshard.verify import orders
from fxshard.verify.failure import fail

Clock = dict[str, int]  # per stream: how many of its operators are complete


def streams_ordered(program: Program) -> None:
    """Follow the events with a clock per stream, and compare with what `orders.steps` needs.

    Vector clocks, as in FastTrack (Flanagan and Freund, PLDI 2009): an event carries the clock of
    its stream, a wait joins it into that of another. Linear in operators times streams.
    """
    fact = Fact.STREAMS_ORDERED
    clocks: dict[str, Clock] = {}
    events: dict[str, Clock] = {}
    recorders: dict[str, str] = {}
    for step in orders.steps(program):
        node, tag = step.node, tags.get(step.node)
        clock = clocks.setdefault(step.stream, {})
        if step.kind == "entry":
            clock["compute"] = step.position
            events[orders.ENTRY[tag.phase]] = dict(clock)
            continue
        if step.kind == "run":
            should = ops.stream_of(node)
            if step.stream != should:
                what = f"%{node.name} runs on the {step.stream} stream, not on {should!r}."
                fail(program, fact, node, what)
            for event in tag.waits:
                if event not in events:
                    what = f"%{node.name} waits for {event}; nothing recorded it."
                    fail(program, fact, node, what)
                join(clock, events[event])
            if tag.waits and not (ops.of(node).asynchronous or node.target is ops.wait):
                what = f"%{node.name} waits for {', '.join(tag.waits)}; only a launch or wait may."
                fail(program, fact, node, what)
        for stream, need in step.needs.items():
            if clock.get(stream, 0) < need.position:
                who = f"%{need.node.name}" if need.node else "the caller, before the phase,"
                fail(
                    program,
                    fact,
                    node,
                    f"%{node.name} on stream {step.stream!r} {need.why} {who} on stream "
                    f"{stream!r}; no event orders the two.",
                )
        if step.kind == "run":
            clock[step.stream] = step.position
            if tag.records is not None:
                if tag.records in recorders:
                    what = f"%{node.name} records {tag.records} as %{recorders[tag.records]} does."
                    fail(program, fact, node, what)
                recorders[tag.records] = node.name
                events[tag.records] = dict(clock)


def join(clock: Clock, other: Clock) -> None:
    """Make `clock` know what `other` knows."""
    for stream, position in other.items():
        if clock.get(stream, 0) < position:
            clock[stream] = position
