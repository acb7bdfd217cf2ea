"""A loss of other outputs than those that the program of its forward starts backward at.

A model may return a loss and logits. A program starts backward at the scalar outputs, if there are
any (docs/adr/0003). Where a gradient arrives at another output, forward runs again, as a program
that starts there too: with the tensors, and the random numbers, that the call had. The calls that
follow run that program from the start (docs/adr/0030).
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from fxshard._torch import trees
from fxshard.capture import rng
from fxshard.errors import StepError
from fxshard.ir import tags
from fxshard.ir.program import Program, Signature
from fxshard.runtime.read_tensors import ReadTensor
from fxshard.runtime.variants import Variant

aten: Any = torch.ops.aten


def trained(program: Program) -> list[str]:
    """FQNs of the parameters that a backward from any output may train."""
    every = (*program.params.values(), *program.ignored.values())
    return [param.fqn for param in every if param.requires_grad]


def next_starts(
    before: Sequence[tuple[int, ...]], arrived: Sequence[int], known: Sequence[int]
) -> tuple[int, ...]:
    """The outputs that calls of a kind start backward at from now on.

    The first time those of this backward; from then on all that ever were, so that losses which
    take turns run no forward twice.

    Args:
        before: what this function returned for this kind of call.
        arrived: outputs that gradients have arrived at.
        known: what the program of this call starts at.
    """
    if not before:
        return tuple(arrived)
    return tuple(sorted({*before[-1], *arrived, *known}))


@dataclasses.dataclass
class Begin:
    """What a forward began with, if it may have to run again.

    Attributes:
        restore: puts the random generator back; None if nothing is drawn.
        read: the tensors of the caller that forward has read.
    """

    restore: Callable[[], None] | None
    read: list[ReadTensor] = dataclasses.field(default_factory=list)


def call_of(signature: Signature, batch: Sequence[Tensor]) -> Any:
    """``(args, kwargs)`` of a call."""
    flat = list(signature.inputs)
    for position, tensor in zip(signature.tensor_inputs, batch, strict=True):
        flat[position] = tensor
    return trees.tree_unflatten(flat, signature.in_spec)


def in_a_thread(
    function: Callable[[], Any], context: Callable[[], contextlib.AbstractContextManager[Any]]
) -> Any:
    """The result of `function`, in a thread that is in no backward: so it may trace one.

    Operators of a trace would be taken for those of the backward that runs now.

    Args:
        function: what to run.
        context: makes the context that it runs in.
    """
    found: list[Any] = []
    failed: list[BaseException] = []
    device = torch.get_default_device()
    accelerator = torch.cuda.current_device() if torch.cuda.is_initialized() else None

    def run() -> None:
        try:
            if accelerator is not None:
                torch.cuda.set_device(accelerator)
            with context(), contextlib.nullcontext() if device.type == "cpu" else device:
                found.append(function())
        except BaseException as error:
            failed.append(error)

    inherited = contextvars.copy_context()
    thread = threading.Thread(target=inherited.run, args=(run,), name="fxshard trace")
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
    return found[0]


def require_repeatable(program: Program, written: frozenset[tuple[str, str | None]]) -> None:
    """Check that forward may run twice: what it has written does not count for what it computes.

    Raises:
        StepError: it reads what it has written.
    """
    for node in program.graph.find_nodes(op="placeholder"):
        role, name = tags.get(node).role, tags.get(node).fqn or ""
        if (role, name) not in written or not _counts(node):
            continue
        what = program.signature.input_names[int(name)] if role == "input" else f"buffer {name!r}"
        raise StepError(
            f"a gradient arrived at an output that the program starts no backward at, and forward "
            f"cannot run again: it has changed {what}, which it reads. Run forward again: from now "
            f"on the model is traced for such a loss."
        )


def _counts(holder: fx.Node) -> bool:
    """True if anything but its new value is computed of what `holder` held."""
    todo, seen = [holder], {holder}
    while todo:
        for user in todo.pop().users:
            if user.op == "output" or tags.get(user).phase == "backward":
                return True
            if user.target is aten.copy_.default and user.args[0] is holder:
                continue
            if user in seen or user.target in _STATISTICS:
                continue
            seen.add(user)
            todo.append(user)
    return False


# Of these only the new statistics are computed from the old ones, in training.
_STATISTICS = (aten._native_batch_norm_legit_functional.default,)


@contextlib.contextmanager
def as_drawn(program: Program, begin: Begin) -> Any:
    """The block draws the random numbers that forward has drawn."""
    if begin.restore is None:
        yield
    else:
        with rng.drawn_again(program.device, begin.restore):
            yield


def run_again(runtime: Any, variant: Variant, batch: Sequence[Tensor], begin: Begin) -> Any:
    """Run forward of `variant` for the sake of what it saves; nothing of the model changes.

    Returns:
        per rank of this process, the saved values.
    """
    program = variant.program
    with torch.no_grad(), as_drawn(program, begin), runtime.as_traced():
        rows = runtime.arguments(variant, batch)
        for i, node in enumerate(variant.executor.forward_inputs):
            if (tags.get(node).role, tags.get(node).fqn) in variant.written:
                rows[0][i] = rows[0][i].clone()
        outputs, saved = variant.executor.forward(rows)
    del outputs
    return saved
