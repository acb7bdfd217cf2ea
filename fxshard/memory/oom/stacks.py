"""What a recorded stack tells of an allocation: its category, its module, its line.

A stack names files, lines and functions, and neither modules nor tensors. So a category is said
where the innermost frame that tells one tells it for sure (`_RULES`), under the names of
`fxshard.memory.category`, and `UNKNOWN` everywhere else. Modules are the chain of ``forward``
frames around the allocation.

Backward runs on a thread of the autograd engine, which has no Python frames: what is allocated
there, in a recording that has frames elsewhere, is `BACKWARD`. Which part of that are gradients
only time tells (`settled`).
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from fxshard.memory.category import Category
from fxshard.memory.oom.snapshot import Frame, Stack

UNKNOWN = "unknown"
BACKWARD = "Grad or Temp"  # backward made it, and whether it stays is not known yet
OUTSIDE = "(outside of modules)"
UNRECORDED = "(not recorded)"
MOST_SOURCE = 1 << 21  # bytes; a longer file is none that people wrote

FORWARD_PHASE, BACKWARD_PHASE, OPTIMIZER_PHASE = "forward", "backward", "optimizer"


class StackOrigin(NamedTuple):
    """What a stack tells.

    Attributes:
        category: the name of a `Category`, `BACKWARD` or `UNKNOWN`.
        module: ``Model > Block > Linear``, or what else there is in place of one, in parentheses.
        line: innermost line of user code, ``path:line in function``, or "".
        phase: "forward", "backward", "optimizer" or "".
        why: the frame or rule that tells the category, for people.
    """

    category: str
    module: str
    line: str
    phase: str
    why: str


class _Rule(NamedTuple):
    """What a frame tells whose path ends so and whose function is one of those."""

    path: re.Pattern[str]
    functions: re.Pattern[str]
    category: str  # "": it tells the phase only
    phase: str = ""


def _rule(path: str, functions: str, category: Category | str, phase: str = "") -> _Rule:
    name = category.value if isinstance(category, Category) else category
    named = re.compile(rf"(?:.*\.)?(?:{'|'.join(functions.split())})")
    return _Rule(re.compile(rf"(?:^|/)(?:{path})$"), named, name, phase)


_ANY = ".*"
_OPTIM = r"optim/(?!lr_scheduler|swa_utils)\w+\.py"
_RULES = (
    # FSDP2
    _rule(
        r"_fsdp_collectives\.py",
        r"foreach_all_gather foreach_all_gather_copy_out _get_param_all_gather_inputs"
        r" all_gather_copy_in\w*",
        Category.ALL_GATHER,
    ),
    _rule(
        r"_fsdp_collectives\.py",
        "foreach_reduce foreach_reduce_scatter_copy_in chunk_cat",
        Category.REDUCE_SCATTER,
    ),
    _rule(
        r"_fsdp_param\.py",
        "alloc_storage alloc_all_gather_outputs init_all_gather_outputs init_unsharded_param",
        Category.UNSHARDED_PARAM,
    ),
    _rule(
        r"_fsdp_param\.py",
        "_init_sharded_param reset_sharded_param to_sharded_post_forward",
        Category.SHARDED_PARAM,
    ),
    _rule(r"_fsdp_param\.py", "all_gather_inputs", Category.ALL_GATHER),
    _rule(
        r"_fsdp_param\.py",
        "to_accumulated_grad_if_needed accumulate_unsharded_grad_if_needed"
        " unsharded_zero_grad_data",
        Category.UNSHARDED_GRAD,
    ),
    # FSDP1
    _rule(r"fsdp/_flat_param\.py", "_alloc_padded_unsharded_flat_param", Category.UNSHARDED_PARAM),
    _rule(
        r"fsdp/_flat_param\.py",
        "_use_low_precision_shard _all_gather_flat_param",
        Category.ALL_GATHER,
    ),
    _rule(
        r"fsdp/_flat_param\.py",
        "_init_flat_param_and_metadata flatten_tensors flatten_tensors_into_flat_param shard"
        " _get_shard",
        Category.SHARDED_PARAM,
    ),
    _rule(
        r"fsdp/_runtime_utils\.py",
        "_reduce_grad _reduce_grad_no_shard _get_reduce_scatter_tensors",
        Category.REDUCE_SCATTER,
    ),
    # DistributedDataParallel: the buckets that gradients are reduced in, or are views of
    _rule(r"torch/nn/parallel/distributed\.py", "_ddp_init_helper", Category.UNSHARDED_GRAD),
    # Optimizers. What `step` itself makes is temporary until it outlives it (`settled`).
    _rule(rf"torch/{_OPTIM}", "_init_group load_state_dict", Category.OPT_STATE, OPTIMIZER_PHASE),
    _rule(
        rf"(?:torch|bitsandbytes)/{_OPTIM}|torchao/(?:\w+/)*optim/\w+\.py"
        r"|apex/optimizers/\w+\.py|transformers/optimization\.py",
        r"(?!zero_grad).*",
        Category.TEMP,
        OPTIMIZER_PHASE,
    ),
    _rule(r"torch/nn/utils/clip_grad\.py", _ANY, Category.TEMP),
    # Inputs
    _rule(r"torch/distributed/utils\.py", r"_recursive_to _to_kwargs\w* to_map", Category.INPUTS),
    _rule(r"accelerate/utils/operations\.py", r"_?send_to_device\w*", Category.INPUTS),
    _rule(r"transformers/trainer\.py", "_prepare_inputs?", Category.INPUTS),
    _rule(r"utilities/(?:core/)?apply_func\.py", "move_data_to_device batch_to", Category.INPUTS),
    # Parameters. `Module.to` moves buffers by the same line of code.
    _rule(
        r"torch/nn/modules/module\.py",
        "_apply to_empty _load_from_state_dict load_state_dict",
        Category.SHARDED_PARAM,
    ),
    _rule(r"torch/nn/modules/\w+\.py", "__init__", Category.SHARDED_PARAM),
    _rule(
        r"transformers/modeling_utils\.py",
        "from_pretrained _load_pretrained_model",
        Category.SHARDED_PARAM,
    ),
    _rule(r"accelerate/utils/modeling\.py", "set_module_tensor_to_device", Category.SHARDED_PARAM),
    # Backward in Python: of a Function, compiled, and where the engine was called from
    _rule(r"torch/autograd/function\.py", "apply", BACKWARD, BACKWARD_PHASE),
    _rule(
        r"_aot_autograd/runtime_wrappers\.py",
        "backward _backward_impl _double_backward impl_fn call_compiled_backward",
        BACKWARD,
        BACKWARD_PHASE,
    ),
    _rule(r"torch/autograd/graph\.py", "_engine_run_backward", BACKWARD, BACKWARD_PHASE),
    _rule(r"torch/utils/checkpoint\.py", "unpack_hook backward _?recompute_fn", "", BACKWARD_PHASE),
    # Forward
    _rule(_ANY, "forward", Category.ACTIVATION, FORWARD_PHASE),
    _rule(
        r"torch/nn/modules/module\.py",
        "_call_impl _wrapped_call_impl",
        Category.ACTIVATION,
        FORWARD_PHASE,
    ),
    _rule(r"torch/nn/functional\.py", _ANY, Category.ACTIVATION, FORWARD_PHASE),
)
# C++ frames, of a recording with stacks="all"
_IN_ENGINE = re.compile(
    r"torch::autograd::(?:Engine::|python::PythonEngine::|Node::operator\(\)|generated::\w+::apply)"
)
_ACCUMULATES = re.compile(r"torch::autograd::AccumulateGrad::")

_OF_TORCH = re.compile(
    r"(?:site|dist)-packages/(?:torch|triton)/|(?:^|/)torch/(?:_\w+|amp|autograd|cuda|distributed|fx|func"
    r"|library|nn|optim|overrides|utils)(?:/|\.py$)|torchinductor|/inductor_cache/"
)
_OF_PYTHON = re.compile(r"/lib/python3\.\d+/(?!(?:site|dist)-packages/)|^<")
_CPLUSPLUS = re.compile(r"\.(?:cpp|cc|cxx|h|hpp|cu|cuh|c|so[.\d]*)$|^\?*$")
_OF_WRAPPERS = re.compile(r"torch/(?!nn/modules/)|torchinductor")


def origin(stack: Stack, *, label: str = "", recorded: bool = True) -> StackOrigin:
    """What the stack of an allocation tells.

    Args:
        stack: innermost frame first.
        label: what who wrote the file calls it; taken if it is the name of a category.
        recorded: whether the recording of this allocation was there to have Python frames.
    """
    if not stack:
        if not recorded:
            return StackOrigin(UNKNOWN, UNRECORDED, "", "", "allocated before the recording began")
        why = "no Python frame: the thread of the autograd engine"
        return StackOrigin(BACKWARD, "(backward)", "", BACKWARD_PHASE, why)
    return _labelled(stack, label) or _told(stack)


def settled(
    found: StackOrigin, *, then_forward: bool, then_optimizer: bool, then_other: bool
) -> StackOrigin:
    """The same, of what is alive although its phase of the step is over.

    Args:
        found: by the stack alone.
        then_forward: a forward has allocated since.
        then_optimizer: an optimizer has allocated since.
        then_other: a forward or a backward has allocated since.
    """
    later: Category | None = None
    if then_forward or then_optimizer:
        if found.category == BACKWARD:
            later = Category.UNSHARDED_GRAD
        elif found.category == Category.REDUCE_SCATTER.value:
            later = Category.SHARDED_GRAD
    if found.phase == OPTIMIZER_PHASE and found.category == Category.TEMP.value and then_other:
        later = Category.OPT_STATE
    if later is None:
        return found
    return found._replace(category=later.value, why=f"{found.why}; alive although that is over")


def _labelled(stack: Stack, label: str) -> StackOrigin | None:
    """Of a file that fxshard wrote (`fxshard.memory.views.memory_viz`): it says all."""
    names = {category.value for category in Category}
    first, last = stack[0], stack[-1]
    if last.path == "module" and set(first.path.split(" -> ")) <= names:
        line = stack[1] if len(stack) > 2 else None
        said = "" if line is None else _place(line)
        return StackOrigin(first.path, last.function, said, "", f"{first.function}")
    return _told(stack)._replace(category=label, why="the file says so") if label in names else None


def _told(stack: Stack) -> StackOrigin:
    python = [frame for frame in stack if not _CPLUSPLUS.search(frame.path)]
    phase, category, why = "", "", ""
    for frame, said in _rules(stack):
        if said.phase == BACKWARD_PHASE or not phase:
            phase = said.phase or phase
        if said.category and not category:
            category, why = said.category, f"{_short(frame.path)}, {frame.function}"
    if not category:
        category, why = UNKNOWN, "no frame tells" if python else "only frames of C++"
    if phase == BACKWARD_PHASE and category == Category.ACTIVATION.value:
        why += ", recomputed in backward"
    line = next((frame for frame in python if _is_users(frame.path)), python[0] if python else None)
    module = " > ".join(_classes(python)) or ("(backward)" if phase == BACKWARD_PHASE else OUTSIDE)
    if phase == OPTIMIZER_PHASE:
        module = "(optimizer)"
    return StackOrigin(category, module, "" if line is None else _place(line), phase, why)


def _rules(stack: Stack) -> Iterator[tuple[Frame, _Rule]]:
    """Frames that tell something, innermost first, and what."""
    for at, frame in enumerate(stack):
        if _ACCUMULATES.search(frame.function):
            yield frame, _rule(_ANY, _ANY, Category.UNSHARDED_GRAD, BACKWARD_PHASE)
        elif _IN_ENGINE.search(frame.function):
            yield frame, _rule(_ANY, _ANY, BACKWARD, BACKWARD_PHASE)
        for rule in _RULES:
            if rule.path.search(frame.path) and rule.functions.fullmatch(frame.function):
                if rule.category == BACKWARD and not _calls_backward(stack, at):
                    continue  # Function.apply of a forward
                yield frame, rule
                break


def _calls_backward(stack: Stack, at: int) -> bool:
    """Whether ``Function.apply`` is that of a backward: what it calls is named so."""
    inner = stack[at - 1].function.rpartition(".")[2] if at else ""
    return stack[at].function.rpartition(".")[2] != "apply" or inner in ("backward", "vjp")


def _classes(stack: list[Frame]) -> list[str]:
    """The modules whose ``forward`` is in the stack, outermost first."""
    found: list[str] = []
    for frame in reversed(stack):
        owner, _, name = frame.function.rpartition(".")
        if name != "forward" or _OF_WRAPPERS.search(frame.path):
            continue
        of_torch = _OF_TORCH.search(frame.path)
        stem = re.split(r"[/\\]", frame.path)[-1].removesuffix(".py")
        label = owner.rpartition(".")[2] or (f"nn.{stem}" if of_torch else "")
        label = label or _class_at(frame.path, frame.line) or f"{stem}.py"
        if not found or found[-1] != label:
            found.append(label)
    return found


def _class_at(path: str, line: int) -> str:
    """The class whose ``forward`` has the line, if the file is here; else ""."""
    for first, last, name in _forwards(path):
        if first <= line <= last:
            return name
    return ""


@functools.lru_cache(maxsize=256)
def _forwards(path: str) -> tuple[tuple[int, int, str], ...]:
    """First and last line of each ``forward`` of a class, and the name of the class."""
    if not is_source(path):
        return ()
    try:
        tree = ast.parse(Path(path).read_bytes())
    except (OSError, ValueError, SyntaxError, RecursionError, MemoryError):
        return ()
    return tuple(
        (function.lineno, function.end_lineno or function.lineno, kind.name)
        for kind in ast.walk(tree)
        if isinstance(kind, ast.ClassDef)
        for function in kind.body
        if isinstance(function, ast.FunctionDef) and function.name == "forward"
    )


def is_source(path: str) -> bool:
    """Whether a path, which anybody may have written, names a Python file of this machine."""
    try:
        file = Path(path)
        return file.suffix == ".py" and file.is_file() and file.stat().st_size <= MOST_SOURCE
    except (OSError, ValueError):
        return False


def _is_users(path: str) -> bool:
    return not (_OF_TORCH.search(path) or _OF_PYTHON.search(path))


def _place(frame: Frame) -> str:
    return f"{frame.path}:{frame.line} in {frame.function}"


def _short(path: str) -> str:
    return "/".join(re.split(r"[/\\]", path)[-2:])
