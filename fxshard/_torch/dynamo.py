"""Dynamo: its graphs, its backends, and marks of modules for it."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType
from typing import Any, TypeVar
from unittest import mock

import torch
from torch import fx, nn
from torch.overrides import TorchFunctionMode

Function = TypeVar("Function", bound=Callable[..., Any])


def dynamo(model: nn.Module, args: Any, kwargs: Any, backend: Callable[..., Any]) -> Any:
    """Run ``model(*args, **kwargs)`` under ``torch.compile``, as one graph for `backend`.

    The graph may have sizes and numbers that depend on data. Nothing is cached: Dynamo's cache is
    that of the function, which is new each time. (torch/_dynamo/config.py)
    """

    import torch._dynamo as _dynamo  # 2 s, so only for those who need it

    @with_a_cache_of_its_own
    def call(model: nn.Module, args: Any, kwargs: Any) -> Any:
        return model(*args, **kwargs)

    options = {
        "capture_scalar_outputs": True,
        "capture_dynamic_output_shape_ops": True,
        "allow_rnn": True,
    }
    known = {name: value for name, value in options.items() if hasattr(_dynamo.config, name)}
    with _dynamo.config.patch(known):
        return torch.compile(call, backend=backend, fullgraph=True, dynamic=False)(
            model, args, kwargs
        )


@contextlib.contextmanager
def left_where_compiled(*kinds: type[TorchFunctionMode]) -> Iterator[None]:
    """Function modes of these kinds are inactive in frames that Dynamo compiles, in the block.

    Dynamo would trace what they do, fail at it, and run the frame in eager mode without a word. In
    what it leaves out, as FSDP2's hooks and what ``torch.compiler.disable`` marks, they are active.
    (torch/_dynamo/eval_frame.py, ``compile_wrapper`` and ``DisableContext``)
    """
    from torch._dynamo import convert_frame, eval_frame, utils

    names = ("set_eval_frame", "_maybe_set_eval_frame")  # the same, where nothing can forbid it
    frames, plain = convert_frame.CatchErrorsWrapper, getattr(eval_frame, names[0])
    compile_frame = frames.__call__
    stacks: list[list[Any]] = []  # those from before

    def set_eval_frame(callback: Any) -> Any:
        prior = plain(callback)
        if callable(callback) and not callable(prior):  # frames are compiled from here on
            stacks.append(utils.get_torch_function_mode_stack())
            others = [mode for mode in stacks[-1] if not isinstance(mode, kinds)]
            utils.set_torch_function_mode_stack(others)
        elif callable(prior) and not callable(callback):
            utils.set_torch_function_mode_stack(stacks.pop())
        return prior

    def compiled(self: Any, *args: Any) -> Any:
        try:
            return compile_frame(self, *args)
        except BaseException:  # after one, C++ leaves Dynamo off, and nobody says so
            utils.set_torch_function_mode_stack(stacks.pop())
            raise

    with contextlib.ExitStack() as stack:
        for name in names:
            if getattr(eval_frame, name) is plain:
                stack.enter_context(mock.patch.object(eval_frame, name, set_eval_frame))
        stack.enter_context(mock.patch.object(frames, "__call__", compiled))
        yield


def mark_for_dynamo(module: nn.Module) -> None:
    """Mark a module as managed by FSDP, with original parameters in use, as torch's FSDP does.

    (torch/distributed/fsdp/_dynamo_utils.py, ``_annotate_modules_for_dynamo``; read by
    ``wrap_module`` in torch/_dynamo/variables/builder.py)
    """
    module._is_fsdp_managed_module = True  # type: ignore[assignment]
    module._fsdp_use_orig_params = True  # type: ignore[assignment]


def register_backend(name: str, compiler: Callable[..., Any]) -> None:
    """Let ``torch.compile(backend=name)`` find `compiler`, unless something has that name already.

    This is for a checkout that is not installed: of installed packages Dynamo reads the entry
    points (torch/_dynamo/backends/registry.py).
    """
    from torch._dynamo.backends import registry

    if name not in registry.list_backends(exclude_tags=()):
        registry.register_backend(compiler, name)


def with_a_cache_of_its_own(function: Function) -> Function:
    """Let what Dynamo compiles of `function` be counted apart from other functions of one ``def``.

    Dynamo keeps what it has compiled by the code object, and gives up after a number of entries
    (``recompile_limit``): a closure that wraps one class after the other would be given up after so
    many classes. (torch/_dynamo/cache_size.py)
    """
    code: CodeType = function.__code__
    function.__code__ = code.replace()
    return function


def only_inlined(function: Callable[..., Any]) -> None:
    """Let Dynamo trace `function` where it is called from what it traces, and never by itself.

    (``skip_code``, which torch/_dynamo/decorators.py uses for ``torch._dynamo.skip``)
    """
    from torch._dynamo.decorators import skip_code  # type: ignore[attr-defined]

    skip_code(function.__code__)


def dynamo_modules(node: fx.Node) -> list[tuple[str, int]]:
    """The calls of modules that `node` of Dynamo's graph ran in, the outermost first.

    Each is the ``id`` of the module that was called when the graph was made, as text, and a number
    that differs between calls of it. (``record_nn_module_stack`` in
    torch/_dynamo/variables/nn_module.py)
    """
    found = []
    for key in node.meta.get("nn_module_stack") or {}:
        module, _, number = str(key).partition("@")
        found.append((module, int(number or 0)))
    return found


def stack_line(node: fx.Node) -> str:
    """``path:line in function`` of the innermost frame that `node` of Dynamo's graph came from.

    Frames of torch and of fxshard do not count.

    (``stack_trace`` in its metadata is text, as `traceback.format_list` makes it)
    """
    found = ""
    for path, line, function in _FRAME.findall(node.meta.get("stack_trace") or ""):
        if not any(map(Path(path).is_relative_to, _NOT_THE_USERS)):
            found = f"{path}:{line} in {function}"
    return found


_FRAME = re.compile(r'File "([^"]+)", line (\d+), in (\S+)')


_NOT_THE_USERS = Path(torch.__file__).parent, Path(__file__).parent.parent


def dynamo_paths(node: fx.Node) -> list[tuple[str, str]]:
    """As `dynamo_modules`: the module's ``id``, and its path from the ``self`` of the frame.

    "" if it is not in ``self``.
    """
    found = []
    for key, (path, _) in (node.meta.get("nn_module_stack") or {}).items():
        _, _, inside = str(path).partition("L['self'].")
        found.append((str(key).partition("@")[0], inside))
    return found


@contextlib.contextmanager
def splits_for_ddp(compiled: Callable[[fx.GraphModule], Any]) -> Iterator[None]:
    """While the block runs, `compiled` compiles the graphs that Dynamo would split for DDP.

    (torch/_dynamo/backends/distributed.py, ``DDPOptimizer``; ``torch._dynamo.config.optimize_ddp``)
    """
    from torch._dynamo.backends.distributed import DDPOptimizer

    def compile_fn(self: Any, graph_module: fx.GraphModule, *_: Any, **__: Any) -> Any:
        return compiled(graph_module)

    with mock.patch.object(DDPOptimizer, "compile_fn", compile_fn):
        yield
