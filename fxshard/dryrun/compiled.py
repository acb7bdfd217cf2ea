"""torch.compile in a dry run: the memory of what Inductor fuses, saves and reuses on a GPU.

Dynamo, AOTAutograd, the min-cut partitioner and Inductor's scheduler for GPUs do their work, as
they would on the GPU. The code that Inductor writes is run without its kernels: what it allocates
becomes fake tensors, which live as long as the code holds them.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import dataclasses
import linecache
import math
import re
import sys
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx

from fxshard._torch import gpu_inductor, inductor
from fxshard._torch.dynamo import splits_for_ddp, stack_line
from fxshard._torch.gpu_inductor import Gpu
from fxshard.capture.provenance import user_line
from fxshard.codegen import kernel_free
from fxshard.errors import CaptureError

CPU = torch.device("cpu")
CUDA = torch.device("cuda")
FRAMES = 12  # between the code and what sees its operators

# Options of Inductor that make what happens on the GPU depend on what is measured there, or that
# this does not follow; and by which mode or setting they are switched on.
REFUSED = {
    "triton.cudagraphs": "mode='reduce-overhead' (and 'max-autotune') records CUDA graphs, which "
    "keep memory of their own",
    "cpp_wrapper": "cpp_wrapper allocates in C++",
}
# Options by which Inductor measures kernels for products and convolutions: with its own, what comes
# after them is fused into them, and takes no memory. Others are measured for time alone.
MEASURING = {
    "max_autotune": "mode='max-autotune' chooses kernels by measuring them on the GPU",
    "max_autotune_gemm": "max_autotune_gemm chooses kernels by measuring them on the GPU",
}


@dataclasses.dataclass(eq=False)
class Code:
    """The code of forward or of backward of one graph.

    Attributes:
        line: of the user's code, where the graph begins.
        is_backward: False: of forward.
        source: as Inductor wrote it.
        lines: of the user's code, by name of the operators of Dynamo's graph.
    """

    line: str
    is_backward: bool
    source: str
    lines: dict[str, str] = dataclasses.field(repr=False)
    _origins: dict[int, str] = dataclasses.field(default_factory=dict, repr=False)

    @property
    def file(self) -> str:
        """The name under which tracebacks show the code."""
        which = "backward" if self.is_backward else "forward"
        return f"<compiled {which} of {self.line}, {id(self):x}>"

    def origin(self, number: int) -> str:
        """The line of the user's code that line `number` of the code was made of."""
        if number not in self._origins:
            self._origins[number] = self._origin(number)
        return self._origins[number]

    def _origin(self, number: int) -> str:
        text = self.source.splitlines()
        # What is allocated stands above the comment on the kernel that fills it.
        below = "= empty_strided" in text[number - 1]
        order = range(number, len(text)) if below else range(number - 2, -1, -1)
        for i in order:
            found = _SOURCES.search(text[i])
            if found:
                names = [name.strip() for name in found.group(1).split(",")]
                return next((self.lines[n] for n in reversed(names) if n in self.lines), self.line)
        return self.line


_CODE = "__fxshard_code__"  # a global of the code: itself
_SOURCES = re.compile(r"# Topologically Sorted Source Nodes: \[(.*?)\]")


class Compilations:
    """What was compiled in a dry run.

    Attributes:
        codes: in the order in which they were compiled.
    """

    def __init__(self) -> None:
        self.codes: list[Code] = []

    def line(self) -> str | None:
        """The line of the user's code that runs compiled now; None: none does."""
        frame: types.FrameType | None = sys._getframe(1) if self.codes else None
        for _ in range(FRAMES):
            if frame is None:
                break
            code = frame.f_globals.get(_CODE)
            if isinstance(code, Code):
                return code.origin(frame.f_lineno)
            frame = frame.f_back
        return None


@contextlib.contextmanager
def compiled_as_on_gpu(gpu: Gpu, device: torch.device = CPU) -> Iterator[Compilations]:
    """While the block runs, what ``torch.compile`` compiles takes the memory of a GPU.

    This is for calls on fake CPU tensors, under dispatch modes that Dynamo ignores
    (`TorchDispatchMode.ignore_compile_internals`).

    Args:
        gpu: what Inductor generates code for.
        device: what compiled code asks for new tensors on; one of those modes puts them elsewhere.

    Raises:
        CaptureError: inside the block, where a compiled function is called whose memory on a GPU
            cannot be known.
    """
    done = Compilations()

    def compiler(graph_module: fx.GraphModule, inputs: list[Any], options: dict[str, Any]) -> Any:
        lines = _lines(graph_module)
        line = _begins(graph_module)

        def run(generated: inductor.Generated, is_backward: bool) -> gpu_inductor.Run:
            if "extern_kernels." in generated.source:
                _refuse(options, MEASURING)
            code = Code(line, is_backward, generated.source, lines)
            done.codes.append(code)
            return _runnable(code, generated, device)

        try:
            _refuse(options, REFUSED)
            _refuse_host(graph_module)
            unmeasured = options | dict.fromkeys(MEASURING, False)
            return gpu_inductor.compiled(graph_module, inputs, gpu, unmeasured, run)
        except Exception as error:
            if gpu_inductor.is_for_dynamo(error):
                raise
            return _failing(_refusal(f"torch.compile of what begins at {line}", error))

    with gpu_inductor.inductor_replaced(compiler), splits_for_ddp(_split):
        yield done


def _lines(graph_module: fx.GraphModule) -> dict[str, str]:
    return {node.name: line for node in graph_module.graph.nodes if (line := stack_line(node))}


def _begins(graph_module: fx.GraphModule) -> str:
    """The line of the user's first operator; where torch has them all, that of the call."""
    return next(iter(_lines(graph_module).values()), user_line())


def _split(graph_module: fx.GraphModule) -> Any:
    return _failing(
        CaptureError(
            f"torch.compile of what begins at {_begins(graph_module)}: Dynamo splits the graph at "
            f"the buckets of DistributedDataParallel, which a dry run does not follow. Set "
            f"torch._dynamo.config.optimize_ddp = False in the dry run, or compile the blocks "
            f"of a model that is not in DistributedDataParallel."
        )
    )


def _refuse(options: dict[str, Any], refused: dict[str, str]) -> None:
    for name, why in refused.items():
        if options.get(name, gpu_inductor.option(name)):
            raise CaptureError(
                f"{why}: memory cannot be known without one. Compile with mode='default' in the "
                f"dry run."
            )


def _refuse_host(graph_module: fx.GraphModule) -> None:
    """On CPU tensors, where a graph's tensors are is told by its text alone."""
    node = gpu_inductor.on_host(graph_module)
    if node is not None:
        raise CaptureError(
            f"{stack_line(node)} asks for the host's memory, and all that is compiled is taken for "
            f"the GPU's. Leave this line out of torch.compile (torch.compiler.disable)."
        )


def _refusal(what: str, error: Exception) -> CaptureError:
    text = str(error) if isinstance(error, CaptureError) else f"{type(error).__name__}: {error}"
    found = CaptureError(f"{what}: {text}")
    found.__cause__ = error
    return found


def _failing(error: Exception) -> Any:
    """Raises where the compiled function is called: Dynamo would wrap what is raised for it."""

    def fail(*args: Any) -> Any:
        raise error

    return fail


# -- running the code ----------------------------------------------------------------------------


def _runnable(code: Code, generated: inductor.Generated, device: torch.device) -> gpu_inductor.Run:
    """The function of the code, without kernels.

    Raises:
        CaptureError: it refers to something that is not known here.
    """
    text = generated.source.splitlines(True)
    linecache.cache[code.file] = (len(generated.source), None, text, code.file)
    module = ast.parse(generated.source)
    names = {**_names(generated.constants, device), _CODE: code}

    def empty(size: Any, stride: Any, dtype: torch.dtype, _: str = "") -> Tensor:
        return torch.empty_strided(size, stride, dtype=dtype, device=device)

    known = kernel_free.namespace(module, code.file, empty, lambda kernel: None, names)
    _check_names(code, module, known)
    constants = dict(generated.constants)

    def call(args: list[Any]) -> Any:
        while constants:  # where they are seen: on a GPU they lie in its memory
            name, value = constants.popitem()
            known[name] = empty(value.shape, value.stride(), value.dtype)
        try:
            return known["call"](args)
        except CaptureError:
            raise
        except Exception as error:
            raise _refusal(_where(code, error), error) from error

    return call


def _where(code: Code, error: BaseException) -> str:
    """The user's line, and that of the code, where `error` was raised."""
    number, at = 1, error.__traceback__
    while at is not None:
        if at.tb_frame.f_code.co_filename == code.file:
            number = at.tb_lineno
        at = at.tb_next
    text = code.source.splitlines()[number - 1].strip()
    return f"compiled code of {code.origin(number)} cannot run without a GPU: {text}"


def _check_names(code: Code, module: ast.Module, known: dict[str, Any]) -> None:
    runners = [each for each in module.body if kernel_free.is_runner(each)]
    nodes = [node for each in runners for node in ast.walk(each)]
    names = [node for node in nodes if isinstance(node, ast.Name)]
    bound = {node.id for node in names if isinstance(node.ctx, ast.Store)}
    bound |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    bound |= {node.name for node in nodes if isinstance(node, ast.ClassDef | ast.FunctionDef)}
    for node in names:
        if node.id not in bound and node.id not in known and not hasattr(builtins, node.id):
            text = code.source.splitlines()[node.lineno - 1].strip()
            raise CaptureError(
                f"Inductor's code for {code.origin(node.lineno)} refers to {node.id}, and fxshard "
                f"does not know what that does with memory: {text}. Leave this line out of "
                f"torch.compile (torch.compiler.disable)."
            )


class _Ignored:
    """A context manager that does nothing."""

    def __init__(self, *args: Any) -> None:
        pass

    def __enter__(self) -> None:
        pass

    def __exit__(self, *args: Any) -> None:
        pass


def _names(constants: dict[str, Tensor], device: torch.device) -> dict[str, Any]:
    """What the statements of a module call. Tensors are on `device`, whatever they name."""

    def anywhere(*args: Any, **kwargs: Any) -> torch.device:
        return device

    cuda = types.SimpleNamespace(_DeviceGuard=_Ignored, set_device=lambda index: None)
    return {
        "torch": kernel_free.Torch(cuda=cuda, device=anywhere),
        "device": anywhere,
        "aten": torch.ops.aten,
        "math": math,  # of open sizes
        "reinterpret_tensor": _reinterpret,
        "assert_size_stride": _check_strides,
        "copy_if_misaligned": lambda tensor: tensor,  # whole allocations are aligned
        "extern_kernels": inductor.extern_kernels(),
        **dict.fromkeys(constants),
    }


def _reinterpret(tensor: Tensor, size: Any, stride: Any, offset: int) -> Tensor:
    """Inductor's own gives no view, which matters where such a result leaves the compiled code."""
    return kernel_free.reinterpret(tensor, size, stride, offset).detach()


def _check_strides(tensor: Tensor, size: Any, stride: Any, what: str = "") -> None:
    """As Inductor's own: results of operators lie as on a GPU."""
    same = [a == b for n, a, b in zip(size, tensor.stride(), stride, strict=True) if n > 1]
    if tuple(tensor.shape) != tuple(size) or not all(same):
        raise ValueError(
            f"{what or 'a tensor'} of sizes {tuple(tensor.shape)} and strides {tensor.stride()}, "
            f"for {tuple(size)} and {tuple(stride)} on a GPU"
        )
