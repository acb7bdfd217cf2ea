"""Everything that fxshard knows about Hugging Face transformers, in one place."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

import torch
from torch import fx

from fxshard import meta
from fxshard.errors import CaptureError

MARK = "fxshard: position_ids that transformers would look into"


@contextlib.contextmanager
def eager_attention_branch() -> Iterator[None]:
    """While tracing, let transformers take the branch that it takes in eager mode.

    Under a trace it cannot look into ``position_ids`` for packed sequences, assumes the worst and
    builds an explicit mask in place of SDPA's ``is_causal``: other bytes and other rounding
    (transformers/masking_utils.py, ``find_packed_sequence_indices``). The sequences are taken as
    not packed, and the positions get a mark in the graph for `refuse_packed`.
    """
    masking = sys.modules.get("transformers.masking_utils")
    original = getattr(masking, "find_packed_sequence_indices", None)
    if masking is None or original is None:
        yield
        return

    def not_packed(position_ids: torch.Tensor) -> None:
        torch.ops.aten._assert_async.msg(position_ids.any(), MARK)

    masking.find_packed_sequence_indices = not_packed  # type: ignore[attr-defined]
    try:
        yield
    finally:
        masking.find_packed_sequence_indices = original  # type: ignore[attr-defined]


class _Forwards:
    """How many forwards of models that `fxshard.shard` sharded run now, or are traced by Dynamo."""

    def __init__(self) -> None:
        self.inside = 0


FORWARDS = _Forwards()


def keep_eager_branch_in_dynamo() -> None:
    """The same where Dynamo traces, inside of models that `fxshard.shard` sharded (`FORWARDS`).

    Nothing can be patched for the time of a trace there: the patch stays, and asks where it is.
    """
    masking = sys.modules.get("transformers.masking_utils")
    original = getattr(masking, "find_packed_sequence_indices", None)
    if masking is None or original is None or hasattr(original, "fxshard"):
        return

    def find_packed_sequence_indices(position_ids: torch.Tensor) -> torch.Tensor | None:
        if torch.compiler.is_dynamo_compiling() and FORWARDS.inside:
            torch.ops.aten._assert_async.msg(position_ids.any(), MARK)
            return None
        return original(position_ids)

    find_packed_sequence_indices.fxshard = True  # type: ignore[attr-defined]
    masking.find_packed_sequence_indices = find_packed_sequence_indices  # type: ignore[attr-defined]


def refuse_packed(graph: fx.Graph) -> None:
    """Remove the marks of `eager_attention_branch`; refuse positions that come from the batch.

    Positions that the model counts up by itself are not packed. Those computed from an input may
    be, and only their values tell.

    Raises:
        CaptureError: the values of an input decide whether sequences are packed.
    """
    marks = graph.find_nodes(op="call_function", target=torch.ops.aten._assert_async.msg)
    for mark in [node for node in marks if node.args[1] == MARK]:
        read = mark.all_input_nodes[0]
        if any(meta.get(n).role == "input" for n in _ancestors(read) if n.op == "placeholder"):
            raise CaptureError(
                "position_ids without attention_mask: transformers would look into their values "
                "for packed sequences, which a traced program cannot. Drop position_ids if the "
                "sequences are not packed, or pass an attention_mask."
            )
        graph.erase_node(mark)
        graph.erase_node(read)


def _ancestors(node: fx.Node) -> set[fx.Node]:
    seen: set[fx.Node] = set()
    todo = [node]
    while todo:
        new = [n for n in todo.pop().all_input_nodes if n not in seen]
        seen.update(new)
        todo += new
    return seen


def remedy(value: object) -> str:
    """What a user of transformers can do about an object that fxshard cannot look into."""
    if type(value).__module__ == "transformers.cache_utils":
        return " For transformers: use_cache=False, in the call or in model.config."
    return ""
