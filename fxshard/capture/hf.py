"""What capture and the runtime know of the models of Hugging Face transformers, in one place."""

from __future__ import annotations

import contextlib
import inspect
import logging
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx, nn
from torch.distributed.tensor import DTensor

from fxshard._torch import export
from fxshard.errors import CaptureError
from fxshard.ir import tags

log: logging.Logger = logging.getLogger("fxshard")

CHECKS_OFF = "TRANSFORMERS_DISABLE_TORCH_CHECK"
LAYER_DROPS = ("layerdrop", "encoder_layerdrop", "decoder_layerdrop")
MARK = "fxshard: position_ids that transformers would look into"


def methods_on_whole(kind: type) -> tuple[str, ...]:
    """Methods of Hugging Face's libraries that read the whole model again and again.

    Also where a user's class has its own in front of theirs.
    """
    names = ("generate", "save_pretrained", "push_to_hub")
    libraries = ("transformers", "peft", "diffusers", "huggingface_hub")
    theirs = [c for c in kind.__mro__ if c.__module__.partition(".")[0] in libraries]
    return tuple(name for name in names if any(name in vars(each) for each in theirs))


def brings_its_state(method: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether a call of ``save_pretrained`` is given the unsharded state that it is to write.

    It reads no parameter then, and transformers' Trainer calls it on one rank alone.

    Args:
        method: of the user's class, not bound.
        args, kwargs: of the call, the module first.
    """
    if method.__name__ != "save_pretrained":
        return False
    given = dict(zip(inspect.signature(method).parameters, args, strict=False)) | kwargs
    state = given.get("state_dict")
    return state is not None and not any(isinstance(each, DTensor) for each in state.values())


def gathers_its_state(method: Callable[..., Any], model: Any) -> bool:
    """Whether ``save_pretrained`` gathers what transformers itself has spread over ranks.

    It asks torch for the full state of such a model, whatever its DTensors are spread over.
    (transformers/distributed/mixin.py, ``gather_sharded_state_dict_for_save``)
    """
    spread = getattr(model, "_is_distributed_loading_by_transformers", False)
    return method.__name__ == "save_pretrained" and bool(spread)


def does_nothing_twice(hook: Any) -> bool:
    """True for the hook that gives outputs of embeddings a gradient.

    ``gradient_checkpointing_enable`` registers one more each time, and nothing removes it.
    """
    library = str(getattr(hook, "__module__", "")).partition(".")[0]
    name = str(getattr(hook, "__name__", ""))
    names = ("make_inputs_require_grads", "make_inputs_require_grad")
    return library in ("transformers", "peft") and name in names


@contextlib.contextmanager
def while_tracing(model: nn.Module) -> Iterator[None]:
    """Everything that is changed in transformers while a model is traced."""
    with (
        _eager_attention_branch(),
        _without_cache(model),
        _without_checks(),
        _one_way_to_experts(),
    ):
        yield


@contextlib.contextmanager
def _eager_attention_branch() -> Iterator[None]:
    """While tracing, let transformers take the branch that it takes in eager mode.

    Under a trace it cannot look into ``position_ids`` for packed sequences, assumes the worst and
    builds an explicit mask in place of SDPA's ``is_causal``: other bytes and other rounding
    (transformers/masking_utils.py, ``find_packed_sequence_indices``). The sequences are taken as
    not packed, and the positions get a mark in the graph for `refuse_packed`. Nor does it leave the
    mask out where it believes to be exported, as under Dynamo of torch 2.11 (`export.exporting`).
    """
    masking = _masking()
    if masking is None:
        yield
        return

    def not_packed(position_ids: torch.Tensor) -> None:
        torch.ops.aten._assert_async.msg(position_ids.any(), MARK)

    original, exporting = masking.find_packed_sequence_indices, masking.is_torchdynamo_exporting
    masking.find_packed_sequence_indices = not_packed
    masking.is_torchdynamo_exporting = export.exporting
    try:
        yield
    finally:
        masking.find_packed_sequence_indices = original
        masking.is_torchdynamo_exporting = exporting


def _masking() -> Any:
    """The masks of transformers, if it is in use and of a version that has what we know."""
    masking = sys.modules.get("transformers.masking_utils")
    known = ("find_packed_sequence_indices", "is_torchdynamo_exporting")
    return masking if all(hasattr(masking, name) for name in known) else None


@contextlib.contextmanager
def _without_cache(model: nn.Module) -> Iterator[None]:
    """While tracing, let no configuration ask for a cache of keys and values.

    ``config.use_cache`` is True by default and puts a ``Cache``, an object that a traced program
    cannot make, into the outputs of every call, also where a training loop never looks at it.
    transformers does the same under gradient checkpointing. A call that says ``use_cache=True``
    itself is still refused.
    """
    asking = [c for c in _configs(model) if getattr(c, "use_cache", None)]
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


@contextlib.contextmanager
def _without_checks() -> Iterator[None]:
    """While tracing, leave out transformers' checks of values, by its own switch.

    Such as whether there are as many image tokens as image features. No operator of a
    program is a check (`passes/canonicalize.py` drops asserts), and a traced one cannot look.
    (transformers/utils/import_utils.py, ``torch_compilable_check``)
    """
    before = os.environ.get(CHECKS_OFF)
    os.environ[CHECKS_OFF] = "1"
    try:
        yield
    finally:
        del os.environ[CHECKS_OFF]
        if before is not None:
            os.environ[CHECKS_OFF] = before


@contextlib.contextmanager
def _one_way_to_experts() -> Iterator[None]:
    """While tracing, let experts that get no tokens from any rank compute on no rows.

    transformers asks how many rows have arrived, and lets the experts compute on a row of its own
    where there are none, so that backward goes through them: in a graph it does anyway, and their
    gradients are zeros both ways. (transformers/distributed/expert_parallel.py, ``AllToAllEP``)
    """
    library = sys.modules.get("transformers.distributed.expert_parallel")
    kind: Any = getattr(library, "AllToAllEP", None)
    if not all(hasattr(kind, name) for name in ("_dispatch_tokens", "_combine_tokens")):
        yield
        return

    def call(self: Any, *args: torch.Tensor) -> torch.Tensor:
        *rows, state = self._dispatch_tokens(*args)
        combined: torch.Tensor = self._combine_tokens(self.experts_forward(*rows), state)
        return combined

    original = kind.__call__
    kind.__call__ = call
    try:
        yield
    finally:
        kind.__call__ = original


class _ForwardCount:
    """How many forwards of models that `fxshard.shard` sharded run now, or are traced by Dynamo."""

    def __init__(self) -> None:
        self.inside = 0


FORWARDS = _ForwardCount()


def keep_eager_branch_in_dynamo() -> None:
    """The same where Dynamo traces, inside of models that `fxshard.shard` sharded (`FORWARDS`).

    Nothing can be patched for the time of a trace there: the patch stays, and asks where it is.
    """
    masking = _masking()
    if masking is None or hasattr(masking.find_packed_sequence_indices, "fxshard"):
        return
    original, exporting = masking.find_packed_sequence_indices, masking.is_torchdynamo_exporting

    def find_packed_sequence_indices(position_ids: torch.Tensor) -> torch.Tensor | None:
        if torch.compiler.is_dynamo_compiling() and FORWARDS.inside:
            torch.ops.aten._assert_async.msg(position_ids.any(), MARK)
            return None
        return original(position_ids)

    def is_torchdynamo_exporting() -> bool:
        return export.exporting() if FORWARDS.inside else exporting()

    masking.is_torchdynamo_exporting = is_torchdynamo_exporting
    find_packed_sequence_indices.fxshard = True  # type: ignore[attr-defined]
    masking.find_packed_sequence_indices = find_packed_sequence_indices


def refuse_packed(graph: fx.Graph) -> None:
    """Remove the marks of `while_tracing`; refuse positions that come from the batch.

    Positions that the model counts up by itself are not packed. Those computed from an input may
    be, and only their values show it.

    Raises:
        CaptureError: the values of an input decide whether sequences are packed.
    """
    marks = graph.find_nodes(op="call_function", target=torch.ops.aten._assert_async.msg)
    for mark in [node for node in marks if node.args[1] == MARK]:
        read = mark.all_input_nodes[0]
        if any(tags.get(n).role == "input" for n in _ancestors(read) if n.op == "placeholder"):
            raise CaptureError(
                "position_ids without attention_mask: transformers would look into their values "
                "for packed sequences, which a traced program cannot. Drop position_ids if the "
                "sequences are not packed, or pass an attention_mask."
            )
        graph.erase_node(mark)
        graph.erase_node(read)


def _ancestors(node: fx.Node) -> set[fx.Node]:
    """Tensors that the values of `node` come from; one whose size alone was read is none."""
    seen: set[fx.Node] = set()
    todo = [node]
    while todo:
        read = todo.pop().all_input_nodes
        new = [n for n in read if n not in seen and isinstance(n.meta["val"], torch.Tensor)]
        seen.update(new)
        todo += new
    return seen


def _configs(model: nn.Module) -> list[Any]:
    """The configurations that modules of `model` hold, each once."""
    library = sys.modules.get("transformers.configuration_utils")
    known = getattr(library, "PreTrainedConfig", ())
    held = [module.__dict__.get("config") for module in model.modules()]
    return list({id(c): c for c in held if isinstance(c, known)}.values())


def remedy_of_values(model: nn.Module) -> str:
    """What a user of transformers can do about a model that looks at values, if we know."""
    configs = _configs(model)
    if any(map(_routes_by_values, model.modules())):
        return (
            "\nFor transformers: model.set_experts_implementation('grouped_mm') or 'batched_mm', "
            "which route tokens without looking at where they go."
        )
    if any((getattr(c, name, 0) or 0) > 0 for c in configs for name in LAYER_DROPS):
        return (
            "\nFor transformers: LayerDrop decides by random numbers which layers run: set "
            f"{', '.join(LAYER_DROPS)} of the config to 0, as far as it has them."
        )
    return ""


def _routes_by_values(module: nn.Module) -> bool:
    """True for a model of experts whose implementation is transformers' eager one.

    Configurations say "eager" of models without experts too.
    (transformers/modeling_utils.py, ``_can_set_experts_implementation``)
    """
    has_choice = getattr(module, "_can_set_experts_implementation", None)
    chosen = getattr(module.__dict__.get("config"), "_experts_implementation", None)
    return chosen == "eager" and has_choice is not None and bool(has_choice())


def remedy_of_numbers(model: nn.Module) -> str:
    """The same for one that draws random numbers outside of torch."""
    if any(getattr(c, "apply_spec_augment", False) for c in _configs(model)):
        return (
            " For transformers: SpecAugment draws its masks by numpy: set "
            "config.apply_spec_augment=False, or pass mask_time_indices."
        )
    return ""


def remedy(value: object) -> str:
    """What a user of transformers can do about an object that fxshard cannot look into."""
    if type(value).__module__ == "transformers.cache_utils":
        return " For transformers: leave use_cache=True and past_key_values out of the call."
    return ""
