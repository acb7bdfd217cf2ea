"""Models for torch.compile in a dry run, and a recorder of the storages that live in it."""

from __future__ import annotations

import ast
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

BF16 = torch.bfloat16


class Storages(TorchDispatchMode):
    """Births and deaths of storages: ``(bytes, operator)`` and ``(-bytes, "")``."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[tuple[int, str]] = []
        self._known: dict[int, Any] = {}

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._see(leaf.untyped_storage(), str(func))
        return result

    def _see(self, storage: torch.UntypedStorage, op: str) -> None:
        key, size = id(storage), storage.nbytes()
        if key in self._known:
            return

        def died(_: Any) -> None:
            del self._known[key]
            self.events.append((-size, ""))

        self._known[key] = weakref.ref(storage, died)
        self.events.append((size, op))

    def during(self, call: Callable[[], Any]) -> tuple[Any, list[int]]:
        """What `call` returns, and the bytes of births (+) and deaths (-) meanwhile."""
        begin = len(self.events)
        result = call()
        return result, [size for size, _ in self.events[begin:]]


def peak(events: list[int]) -> int:
    """Most bytes above the beginning."""
    live = most = 0
    for size in events:
        live += size
        most = max(most, live)
    return most


class MLP(nn.Module):
    def __init__(self, wide: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(wide, dtype=BF16)
        self.up = nn.Linear(wide, hidden, bias=False, dtype=BF16)
        self.down = nn.Linear(hidden, wide, bias=False, dtype=BF16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Block(nn.Module):
    """As Llama's, with grouped keys and values."""

    def __init__(self, wide: int = 64, heads: int = 4, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads, self.dim = heads, wide // heads
        self.before, self.between = nn.RMSNorm(wide), nn.RMSNorm(wide)
        self.q, self.o = nn.Linear(wide, wide, bias=False), nn.Linear(wide, wide, bias=False)
        self.kv = nn.Linear(wide, wide, bias=False)
        self.w1, self.w3 = (nn.Linear(wide, 3 * wide, bias=False) for _ in range(2))
        self.w2 = nn.Linear(3 * wide, wide, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, wide = x.shape
        y = self.before(x)
        q = self.q(y).view(batch, length, self.heads, self.dim)
        k, v = self.kv(y).view(batch, length, 2, self.heads // 2, self.dim).unbind(2)
        k, v = k.repeat_interleave(2, 2), v.repeat_interleave(2, 2)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.o(y.transpose(1, 2).reshape(batch, length, wide)))
        y = self.between(x)
        return x + self.w2(F.silu(self.w1(y)) * self.w3(y))


class Model(nn.Module):
    def __init__(self, layers: int = 2, vocabulary: int = 112, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, 64)
        self.layers = nn.ModuleList(Block(dropout=dropout) for _ in range(layers))
        self.head = nn.Linear(64, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def products_are_saved() -> Any:
    """A context function of selective checkpointing."""

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        keep = op is torch.ops.aten.mm.default
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(0, 1))


class Text:
    """What the text of Inductor's wrapper says of storages, read statement by statement.

    Shares nothing with what runs the code: names are counted, nothing is executed.
    """

    def __init__(self, source: str) -> None:
        (runner,) = [
            node
            for node in ast.walk(ast.parse(source))
            if isinstance(node, ast.FunctionDef) and node.name == "call"
        ]
        self.events: list[int] = []
        self._of: dict[str, int] = {}  # storages by the names that hold them
        self._sizes: list[int] = []
        for statement in runner.body:
            self._read(statement)

    def _read(self, statement: ast.stmt) -> None:
        if isinstance(statement, ast.With):
            for each in statement.body:
                self._read(each)
        elif isinstance(statement, ast.Delete):
            for target in statement.targets:
                self._drop(ast.unparse(target))
        elif isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Call):
            name, call = ast.unparse(statement.targets[0]), statement.value
            if ast.unparse(call.func) == "empty_strided_cuda":
                size, stride, dtype = (ast.unparse(each) for each in call.args)
                self._born(name, eval(size), eval(stride), eval(dtype, {"torch": torch}))
            elif ast.unparse(call.func) == "reinterpret_tensor":
                self._hold(name, ast.unparse(call.args[0]))
            elif ast.unparse(call.func) == "copy_if_misaligned":
                return
            elif name.startswith("buf"):
                raise AssertionError(f"the tests do not know of {ast.unparse(statement)}")
        elif isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Name):
            self._hold(ast.unparse(statement.targets[0]), statement.value.id)
        elif isinstance(statement, ast.Return):
            names = {n.id for n in ast.walk(statement) if isinstance(n, ast.Name)}
            for name in [name for name in self._of if name not in names]:
                self._drop(name)
            self.returned = [self._sizes[n] for n in dict.fromkeys(self._of.values())]

    def _born(self, name: str, size: tuple[int], stride: tuple[int], dtype: torch.dtype) -> None:
        elements = 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
        self._of[name] = len(self._sizes)
        self._sizes.append(elements * dtype.itemsize)
        self.events.append(self._sizes[-1])

    def _hold(self, name: str, other: str) -> None:
        if other in self._of:
            self._of[name] = self._of[other]

    def _drop(self, name: str) -> None:
        number = self._of.pop(name, None)
        if number is not None and number not in self._of.values():
            self.events.append(-self._sizes[number])
