"""What a dry run changes around the user's code, besides its tensors and its GPU."""

from __future__ import annotations

import contextlib
import functools
import inspect
import warnings
from collections.abc import Iterator
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

from fxshard._torch.fully_sharded import replaced
from fxshard.capture.provenance import user_line
from fxshard.errors import CaptureError


@contextlib.contextmanager
def addresses_unremarked() -> Iterator[None]:
    """Torch's own code asks for addresses, as copies of modules do: it warns of fake tensors'."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
        yield


@contextlib.contextmanager
def compile_refused() -> Iterator[None]:
    """``torch.compile`` builds kernels for the CPU, which take what they need."""

    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise CaptureError(
            f"{user_line()}: a dry run for the CPU does not follow torch.compile. Leave it out "
            f"while fxshard.is_dry_run(): the run then says what eager takes, which is more."
        )

    changes = [(torch, "compile", refuse), (nn.Module, "compile", refuse)]
    with replaced(changes):
        yield


@contextlib.contextmanager
def group_taken_for_the_users() -> Iterator[None]:
    """``init_process_group`` and ``destroy_process_group`` change nothing."""

    def nothing(*_: Any, **__: Any) -> None:
        return None

    names = ("init_process_group", "destroy_process_group")
    owners = (dist, dist.distributed_c10d)
    with replaced([(owner, name, nothing) for owner in owners for name in names]):
        yield


# Arguments of a DataLoader that are for its workers.
OF_WORKERS = (
    *("num_workers", "prefetch_factor", "persistent_workers", "timeout", "in_order"),
    *("worker_init_fn", "multiprocessing_context"),
)


@contextlib.contextmanager
def loaders_in_this_process() -> Iterator[None]:
    """A ``DataLoader`` starts no workers: they would have to send tensors without data."""
    plain = DataLoader.__init__
    signature = inspect.signature(plain)

    @functools.wraps(plain)
    def init(loader: Any, dataset: Any, *args: Any, **kwargs: Any) -> None:
        given = signature.bind(loader, dataset, *args, **kwargs).arguments
        plain(**{name: value for name, value in given.items() if name not in OF_WORKERS})

    with replaced([(DataLoader, "__init__", init)]):
        yield
