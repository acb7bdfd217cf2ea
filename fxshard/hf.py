"""Everything that fxshard knows about Hugging Face transformers, in one place."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator

import torch
from torch import fx, nn

from fxshard import meta
from fxshard.errors import CaptureError

log = logging.getLogger("fxshard")

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


@contextlib.contextmanager
def without_cache(model: nn.Module) -> Iterator[None]:
    """While tracing, let no configuration ask for a cache of keys and values.

    ``config.use_cache`` is True by default and puts a ``Cache``, an object that a traced program
    cannot make, into the outputs of every call, also where a training loop never looks at it.
    transformers does the same under gradient checkpointing. A call that says ``use_cache=True``
    itself is still refused.
    """
    library = sys.modules.get("transformers.configuration_utils")
    known = getattr(library, "PreTrainedConfig", None) or getattr(library, "PretrainedConfig", ())
    held = [module.__dict__.get("config") for module in model.modules()]
    asking = [c for c in held if isinstance(c, known) and getattr(c, "use_cache", None)]
    before = [(config, config.use_cache) for config in asking]
    if before:
        log.info("fxshard: config.use_cache is taken for False: outputs hold no past_key_values.")
    try:
        for config, _ in before:
            config.use_cache = False
        yield
    finally:
        for config, value in before:
            config.use_cache = value


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
        return " For transformers: leave use_cache=True and past_key_values out of the call."
    return ""
