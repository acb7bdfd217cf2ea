"""Inductor: the source that it generates, its caches and its kernels."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from fxshard._torch.modes import outside_autocast
from fxshard.host import files


@dataclasses.dataclass(frozen=True)
class Generated:
    """What Inductor makes of a graph.

    Attributes:
        source: a Python module; its ``call(args)`` takes (and clears) a list of tensors.
        constants: tensors that it refers to by name.
        aligned: positions of inputs whose address must be a multiple of 16 bytes.
    """

    source: str
    constants: dict[str, torch.Tensor]
    aligned: tuple[int, ...]


# Random operators keep eager's kernels; nothing is measured or run while code is generated; the
# caller caches the code on disk; results have the traced strides, or an assertion fails.
_GENERATE = {
    "fallback_random": True,
    "fx_graph_cache": False,
    "fx_graph_remote_cache": False,
    "cpp_wrapper": False,
    "size_asserts": True,
    "triton.cudagraphs": False,
}


class _Unloaded:
    """Where a loaded module would be."""

    runner = None

    def __init__(self, key: str, path: str) -> None:
        self.key, self.__file__ = key, path

    # 2.11 reads it: the copies that align inputs are around the call there, and in the source in
    # 2.13 (torch/_inductor/output_code.py, ``maybe_realign_inputs``). `Generated.aligned` lists
    # the inputs.
    @staticmethod
    def call(args: list[Any]) -> Any:
        raise AssertionError("this module was never loaded")


@contextmanager
def nothing_loaded() -> Iterator[None]:
    """Inductor writes its modules, and loads none: no kernel is built.

    (torch/_inductor/graph.py, ``_compile_to_module``)
    """
    from torch._inductor import codecache

    def load(key: str, path: str, *args: Any, **kwargs: Any) -> _Unloaded:
        return _Unloaded(key, path)

    with mock.patch.object(codecache.PyCodeCache, "load_by_key_path", load):
        yield


def inductor_source(graph: fx.Graph, values: list[torch.Tensor], mode: FakeTensorMode) -> Generated:
    """Let Inductor generate code for `graph`; no kernel is built and nothing runs.

    Args:
        graph: functional ATen operators; returns a tuple.
        values: fake tensors of `mode` for its placeholders.

    Raises:
        Exception: whatever Inductor raises for what it cannot do.

    (torch/_inductor/compile_fx.py, ``compile_fx_inner``, and graph.py, ``_compile_to_module``,
    which writes the module and then loads it: the load is left out)
    """
    import torch._inductor.config as config
    from torch._inductor import compile_fx, decomposition, output_code
    from torch.fx.experimental.proxy_tensor import make_fx

    interpreter = fx.Interpreter(fx.GraphModule({}, graph))
    with config.patch(_GENERATE), torch.no_grad(), outside_autocast():
        table = decomposition.select_decomp_table()
        with mode:
            traced = make_fx(interpreter.run, decomposition_table=table)(*values)
        (output,) = traced.graph.find_nodes(op="output")
        output.meta["user_visible_output_idxs"] = list(range(len(output.args[0])))
        with nothing_loaded():
            made = compile_fx.compile_fx_inner(traced, values)
    if not isinstance(made, output_code.CompiledFxGraph):
        raise NotImplementedError("no operator is left of it")
    if made.torchbind_constants or made.frozen_param_names:
        raise NotImplementedError("it refers to objects that cannot be kept on disk")
    constants, aligned = dict(made.constants or {}), tuple(made.inputs_to_check)
    return Generated(made.source_code, constants, aligned)


def inductor_key() -> str:
    """What Inductor's code depends on besides the graph: torch, its options, device, threads.

    (torch/_inductor/codecache.py, ``FxGraphHashDetails``)
    """
    import torch._inductor.config as config
    from torch._inductor import codecache

    parts = (
        torch.__version__,
        codecache.torch_key().hex(),
        config.get_hash().hex(),
        codecache.CacheBase.get_system()["hash"],
        torch.backends.cpu.get_cpu_capability(),
        torch.get_num_threads(),
        torch.are_deterministic_algorithms_enabled(),
    )
    return repr(parts)


def inductor_cache_dir() -> str:
    """Where Inductor keeps the kernels that it builds (TORCHINDUCTOR_CACHE_DIR).

    They are executed too. By default the folder is in the directory of temporary files, where
    others may write: if it is not this user's alone, Inductor is given another (`files.private`).
    """
    from torch._inductor.runtime.cache_dir_utils import cache_dir, default_cache_dir

    variable = "TORCHINDUCTOR_CACHE_DIR"
    wanted = os.path.abspath(os.environ.get(variable) or default_cache_dir())
    os.environ[variable] = str(files.private(Path(wanted)))
    return cache_dir()


def extern_kernels() -> Any:
    """The kernels that Inductor calls by name, as generated code imports them."""
    from torch._inductor.select_algorithm import extern_kernels

    return extern_kernels
