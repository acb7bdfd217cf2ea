"""Compiled regions: code that Inductor made of a region, kept on disk, and what it allocates.

A region that is worth it is generated once and kept in a file by the digest of the region and all
that the code depends on; layers, programs, ranks and processes that have an equal region take it
from there. The generated module allocates, launches kernels and drops what it no longer needs in
plain Python statements: `lifetimes` runs those on fake tensors with kernels that do nothing, so
that the analysis knows every storage of a compiled region, as `load` runs the same statements on
real ones.
"""

from __future__ import annotations

import ast
import base64
import contextlib
import fcntl
import hashlib
import io
import json
import linecache
import operator
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from fxshard._torch import inductor
from fxshard._torch.fake_tensors import FakeTensorMode
from fxshard.codegen import kernel_free
from fxshard.host import files
from fxshard.ir import domain, tags
from fxshard.ir.compiled import Compiled, RegionStep, stays_apart

FORMAT = 2  # of the files; another number leaves older ones alone
aten: Any = torch.ops.aten

# Inductor calls eager's kernels for these: alone they gain nothing.
_EXTERN = {
    aten.mm.default,
    aten.addmm.default,
    aten.bmm.default,
    aten.baddbmm.default,
    aten.convolution.default,
    aten.convolution_backward.default,
    aten.embedding_dense_backward.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
}


def worth_compiling(graph: fx.Graph) -> bool:
    """False for views, for one operator alone, and for kernels that stay the same kernels.

    And where sizes are open: code is generated for those of the example call.
    """
    if any(domain.LAYOUT in node.meta for node in graph.nodes):
        return False
    values = [*graph.find_nodes(op="placeholder"), *_outputs(graph)]
    if not all(isinstance(node.meta["val"], Tensor) for node in values):
        return False
    body = [node for node in graph.nodes if node.op == "call_function"]
    work = [n for n in body if n.target is not operator.getitem and not tags.aliases_input(n)]
    fused = [node for node in work if node.target not in _EXTERN]
    return len(work) > 1 and bool(fused) and not any(map(stays_apart, body))


# -- generating, once for all ranks and processes --------------------------------------------------


class Store:
    """Generated code on disk, one file per digest; a lock per file makes one process generate it.

    The lock is the operating system's: it is released when the process that holds it dies, so that
    no other waits for a dead one. What is read is executed: folder and files must be this user's
    alone, and a file begins with the digest of its name and of the rest.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder: Path = files.private(folder or Path(inductor.inductor_cache_dir()) / "fxshard")
        self.key: str = inductor.inductor_key()

    def digest(self, region_digest: str) -> str:
        """Of a region, and of all that its code depends on."""
        return hashlib.sha256(f"{FORMAT} {self.key} {region_digest}".encode()).hexdigest()

    def read(self, digest: str) -> inductor.Generated | None:
        """The code on disk; None if there is none, or the file is not as `write` left it."""
        try:
            seal, _, text = files.read_private(self.folder / f"{digest}.json").partition(b"\n")
        except OSError:
            return None
        if seal != _seal(digest, text):
            return None
        held = json.loads(text)
        raw = io.BytesIO(base64.b64decode(held["constants"]))
        constants = torch.load(raw, weights_only=True)
        return inductor.Generated(held["source"], constants, tuple(held["aligned"]))

    def write(self, digest: str, code: inductor.Generated) -> None:
        """Write the file completely, or not at all."""
        raw = io.BytesIO()
        torch.save(code.constants, raw)
        constants = base64.b64encode(raw.getvalue()).decode()
        held = {"source": code.source, "aligned": list(code.aligned), "constants": constants}
        text = json.dumps(held).encode()
        path = self.folder / f"{digest}.json"
        files.replace(path, _seal(digest, text) + b"\n" + text, mode=0o600)

    @contextlib.contextmanager
    def lock(self, digest: str, *, wait: bool) -> Iterator[bool]:
        """Hold the lock of a digest; gives False if another process has it and `wait` is False."""
        with open(self.folder / f"{digest}.lock", "w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            except BlockingIOError:
                yield False
                return
            yield True


def _seal(digest: str, text: bytes) -> bytes:
    """The digest that a file begins with: it shows whether text or name have changed."""
    return hashlib.sha256(digest.encode() + text).hexdigest().encode()


def generated(
    store: Store, digest: str, make: Callable[[], inductor.Generated], *, wait: bool
) -> tuple[inductor.Generated, bool] | None:
    """Code from disk, or made and put there, with whether it was made; None if another process is
    at it and `wait` is False.

    Raises:
        Exception: whatever `make` raises.
    """
    found = store.read(digest)
    if found is not None:
        return found, False
    with contextlib.ExitStack() as stack:
        try:
            held = stack.enter_context(store.lock(digest, wait=wait))
        except OSError:  # nowhere to keep it
            held = True
        if not held:
            return None
        found = store.read(digest)
        if found is not None:
            return found, False
        code = make()
        with contextlib.suppress(OSError):
            store.write(digest, code)
        return code, True


def generate(graph: fx.Graph, mode: FakeTensorMode) -> inductor.Generated:
    """Inductor's code for the graph of a region.

    Raises:
        Exception: whatever Inductor raises for what it cannot do.
    """
    values = [node.meta["val"] for node in graph.find_nodes(op="placeholder")]
    return inductor.inductor_source(graph, values, mode)


# -- reading what generated code allocates --------------------------------------------------------


def lifetimes(
    graph: fx.Graph, code: inductor.Generated, mode: FakeTensorMode
) -> tuple[tuple[RegionStep, ...], tuple[int, ...]]:
    """Steps and results of `code`, by running its statements on fake tensors without kernels.

    Raises:
        ValueError: results share storages, or lie, otherwise than those of the region do.
        Exception: a statement cannot run on fake tensors.
    """
    recorder = _StorageRecorder()
    module = _points(ast.parse(code.source))
    namespace = _fake_namespace(module, code, recorder)
    outputs = _outputs(graph)
    with mode, torch.no_grad():
        inputs = _fake_inputs(graph, recorder)
        results = list(namespace["call"](inputs))
        recorder.at()
    for node, result in zip(outputs, results, strict=True):
        val = node.meta["val"]
        if (val.shape, val.stride(), val.dtype) != (result.shape, result.stride(), result.dtype):
            raise ValueError(
                f"{node.name} is {tuple(val.shape)} {val.stride()} {val.dtype} in eager, and "
                f"{tuple(result.shape)} {result.stride()} {result.dtype} of Inductor"
            )
    numbers = tuple(recorder.number(result) for result in results)
    _check_aliases(graph, numbers)
    return tuple(recorder.steps), numbers


class _StorageRecorder:
    """Sees storages made and dropped, step by step."""

    def __init__(self) -> None:
        self.steps: list[RegionStep] = []
        self._numbers: dict[int, int] = {}
        self._references: list[Any] = []
        self._made: list[tuple[int, int]] = []
        self._dropped: list[int] = []
        self._ops: list[str] = []

    def see(self, value: Any, *, made: bool = True) -> Any:
        """Number the storages of `value` that are new."""
        for tensor in tags.tensors(value):
            storage = tensor.untyped_storage()
            key = id(storage)
            if key not in self._numbers:
                number = self._numbers[key] = len(self._references)
                self._references.append(weakref.ref(storage, self._died(key, number)))
                if made:
                    self._made.append((number, storage.nbytes()))
        return value

    def _died(self, key: int, number: int) -> Callable[[Any], None]:
        def died(_: Any) -> None:
            self._numbers.pop(key, None)
            self._dropped.append(number)

        return died

    def ran(self, op: str) -> None:
        """A kernel was launched."""
        self._ops.append(op)

    def at(self) -> None:
        """The end of a step."""
        op = " ".join(dict.fromkeys(self._ops))
        self.steps.append(RegionStep(op, tuple(self._made), tuple(self._dropped)))
        self._made, self._dropped, self._ops = [], [], []

    def number(self, tensor: Tensor) -> int:
        """Of the storage of a tensor."""
        return self._numbers[id(tensor.untyped_storage())]


class _RecordedOps:
    """Stands in for ``torch.ops``, ``aten``, ``extern_kernels``: calls are recorded.

    An operator that writes into ``out=`` is not run.
    """

    def __init__(self, target: Any, recorder: _StorageRecorder, name: str = "") -> None:
        self._target, self._recorder, self._name = target, recorder, name

    def __getattr__(self, name: str) -> _RecordedOps:
        return _RecordedOps(getattr(self._target, name), self._recorder, f"{self._name}.{name}")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._recorder.ran(self._name.removeprefix(".").removesuffix(".default"))
        if "out" in kwargs:
            return None
        return self._recorder.see(self._target(*args, **kwargs))


def _fake_namespace(
    module: ast.Module, code: inductor.Generated, recorder: _StorageRecorder
) -> dict[str, Any]:
    """What the statements of the module run in, with ``call`` in it."""

    def empty(size: Any, stride: Any, dtype: torch.dtype, device: str) -> Tensor:
        made: Tensor = recorder.see(torch.empty_strided(size, stride, dtype=dtype, device=device))
        return made

    operators = _RecordedOps(torch.ops, recorder)
    names: dict[str, Any] = {
        "torch": kernel_free.Torch(ops=operators),
        "device": torch.device,
        "aten": operators.aten,
        "at": recorder.at,
        "extern_kernels": _RecordedOps(inductor.extern_kernels(), recorder),
        **{name: torch.empty_like(value) for name, value in code.constants.items()},
    }
    return kernel_free.namespace(module, "<fxshard region>", empty, recorder.ran, names)


def _fake_inputs(graph: fx.Graph, recorder: _StorageRecorder) -> list[Tensor]:
    """Fake tensors that share storages as the placeholders do."""
    bases: dict[int, Tensor] = {}
    made = []
    for node in graph.find_nodes(op="placeholder"):
        val = node.meta["val"]
        storage = val.untyped_storage()
        if id(storage) not in bases:
            size = storage.nbytes()
            bases[id(storage)] = torch.empty(size, dtype=torch.uint8, device=val.device)
        base = bases[id(storage)]
        flat = base[: base.numel() // val.element_size() * val.element_size()].view(val.dtype)
        made.append(flat.as_strided(val.shape, val.stride(), val.storage_offset()))
        recorder.see(made[-1], made=False)
    return made


def _outputs(graph: fx.Graph) -> list[fx.Node]:
    return tags.operands(graph.find_nodes(op="output")[0])


def _check_aliases(graph: fx.Graph, numbers: Sequence[int]) -> None:
    """Raise ValueError if two values share a storage that eager's do not: one may be freed."""
    places = graph.find_nodes(op="placeholder")
    inputs = {s: i for i, s in enumerate(dict.fromkeys(s for n in places for s in _storages(n)))}
    made: dict[int, int] = {}
    for node, number in zip(_outputs(graph), numbers, strict=True):
        (storage,) = _storages(node)
        wanted = inputs.get(storage)
        if number < len(inputs) and number != wanted:
            raise ValueError(f"{node.name} lies in the storage of an argument")
        if wanted is None and made.setdefault(number, storage) != storage:
            raise ValueError(f"{node.name} lies in the storage of another result")


def _storages(node: fx.Node) -> list[int]:
    return [id(storage) for storage in tags.storages(node)]


# -- the statements of generated modules ----------------------------------------------------------


def _is_for_later(statement: ast.stmt) -> bool:
    """Waiting for kernels, which all regions do together, and what serves to run a file alone."""
    text = ast.unparse(statement)
    late = text.startswith(("async_compile.wait(", "del async_compile", "if __name__"))
    unused = isinstance(statement, ast.FunctionDef) and statement.name != "call"
    return late or unused


def _rewritten(
    module: ast.Module, rewrite: Callable[[list[ast.stmt]], list[ast.stmt]]
) -> ast.Module:
    """The module with the statements of ``call`` rewritten, also those inside of ``with``."""

    class Rewriter(ast.NodeTransformer):
        def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
            if node.name == "call":
                self.generic_visit(node)
                node.body = rewrite(node.body)
            return node

        def visit_With(self, node: ast.With) -> ast.With:
            self.generic_visit(node)
            node.body = rewrite(node.body)
            return node

    return ast.fix_missing_locations(Rewriter().visit(module))


def _points(module: ast.Module) -> ast.Module:
    """``at()`` between steps: after what drops storages, before what makes or reads more."""

    def rewrite(statements: list[ast.stmt]) -> list[ast.stmt]:
        found: list[ast.stmt] = []
        dropped = False
        for statement in statements:
            if isinstance(statement, ast.Return) or (
                dropped and not isinstance(statement, ast.Delete)
            ):
                found += ast.parse("at()").body
                dropped = False
            found.append(statement)
            dropped |= isinstance(statement, ast.Delete)
        return found

    return _rewritten(module, rewrite)


def _unchecked(module: ast.Module) -> ast.Module:
    """Without the assertions on sizes, strides and addresses."""

    def rewrite(statements: list[ast.stmt]) -> list[ast.stmt]:
        return [s for s in statements if not ast.unparse(s).startswith("assert_")]

    return _rewritten(module, rewrite)


# -- running it -----------------------------------------------------------------------------------

Function = Callable[[list[Any]], Any]

_LOADED: dict[str, dict[str, Any]] = {}  # by digest: namespaces with kernels, of this process


def load(
    regions: dict[str, Compiled], at: Callable[[], None] | None = None
) -> tuple[dict[str, Function], dict[str, Exception]]:
    """A function per compiled region, which takes (and clears) a list of tensors.

    Kernels that are not on disk yet are built, those of all regions at the same time. The first
    call of a function asserts sizes and strides as Inductor does, later ones do not: they are the
    same by construction.

    Args:
        regions: by name.
        at: called between steps; allocations then pass through the dispatcher, where a tracker
            sees them.

    Returns:
        functions by name; and why there is none, for those whose kernels cannot be built.
    """
    begun: dict[str, Any] = {}
    for each in regions.values():
        if each.digest not in _LOADED and each.digest not in begun:
            begun[each.digest] = _attempt(_begun, each)
    for digest, namespace in begun.items():
        if isinstance(namespace, dict):
            namespace = _attempt(_finished, namespace)
        if isinstance(namespace, dict):
            _LOADED[digest] = namespace
        else:
            begun[digest] = namespace
    functions = {
        name: _function(each, _LOADED[each.digest], at)
        for name, each in regions.items()
        if each.digest in _LOADED
    }
    failed = {name: begun[each.digest] for name, each in regions.items() if name not in functions}
    return functions, failed


def _attempt(function: Callable[[Any], Any], argument: Any) -> Any:
    """What `function` returns, or the exception that it raised."""
    try:
        return function(argument)
    except Exception as error:
        return error


def _finished(namespace: dict[str, Any]) -> dict[str, Any]:
    """Wait for the kernels of a module."""
    namespace.pop("async_compile").wait(namespace)
    return namespace


def _begun(region: Compiled) -> dict[str, Any]:
    """The module's namespace, its kernels being built."""
    module = ast.parse(region.code.source)
    module.body = [s for s in module.body if not _is_for_later(s)]
    namespace: dict[str, Any] = {"__name__": f"fxshard.region_{region.digest[:12]}"}
    namespace |= region.code.constants
    return _executed(module, namespace, region, region.code.source)


def _function(region: Compiled, loaded: dict[str, Any], at: Callable[[], None] | None) -> Function:
    def variant(rewrite: Callable[[ast.Module], ast.Module], **names: Any) -> Function:
        module = ast.parse(region.code.source)
        module.body = [s for s in module.body if kernel_free.is_runner(s)]
        module = rewrite(module)
        function: Function = _executed(module, {**loaded, **names}, region, ast.unparse(module))[
            "call"
        ]
        return function if not region.code.aligned else _aligned(function, region.code.aligned)

    if at is not None:
        return variant(_points, at=at, empty_strided_cpu=_empty_cpu, empty_strided_cuda=_empty_cuda)
    return _checked_once(variant(lambda module: module), variant(_unchecked))


def _executed(
    module: ast.Module, namespace: dict[str, Any], region: Compiled, text: str
) -> dict[str, Any]:
    name = f"<fxshard region {region.digest[:12]} {len(text)}>"
    linecache.cache[name] = (len(text), None, text.splitlines(True), name)
    exec(compile(module, name, "exec"), namespace)
    return namespace


def _checked_once(checked: Function, unchecked: Function) -> Function:
    run = checked

    def call(args: list[Any]) -> Any:
        nonlocal run
        results = run(args)
        run = unchecked
        return results

    return call


def _aligned(function: Function, positions: Sequence[int]) -> Function:
    """Kernels may load 16 bytes at once: what does not lie so is copied, as Inductor does."""

    def call(args: list[Any]) -> Any:
        for i in positions:
            if args[i].data_ptr() % 16:
                args[i] = args[i].clone()
        return function(args)

    return call


def _empty_cpu(size: Any, stride: Any, dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(size, stride, dtype=dtype)


def _empty_cuda(size: Any, stride: Any, dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device="cuda")
