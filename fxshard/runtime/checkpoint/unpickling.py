"""Reading what anybody may have written: pickles may name tensors and plain values alone."""

from __future__ import annotations

import contextlib
import io
import pickle
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem

_METADATA = {  # what torch.distributed.checkpoint describes a checkpoint with, besides dtypes
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.metadata": {
        "_MEM_FORMAT_ENCODING",
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "pathlib": {"PosixPath"},
    "pathlib._local": {"PosixPath"},  # since Python 3.13
}


class _Unpickler(pickle.Unpickler):
    """Of metadata: knows the classes in it, and no others."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        if name not in _METADATA.get(module, ()):
            raise pickle.UnpicklingError(f"GLOBAL {module}.{name} is no description of tensors")
        return super().find_class(module, name)


class RestrictedReader(FileSystemReader):
    """Torch's reader; metadata can neither call anything nor name files outside the checkpoint."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with restricted("metadata"), open(Path(self.path, ".metadata"), "rb") as file:
            metadata: Metadata = _Unpickler(file).load()
        for info in metadata.storage_data.values():
            if Path(info.relative_path).name != info.relative_path:
                raise ValueError(f"metadata names {info.relative_path!r}, a file elsewhere")
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class RestrictedPlanner(DefaultLoadPlanner):
    """Torch's planner; it refuses values that are neither tensors nor plain."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        with restricted(read_item.dest_index.fqn):
            torch.load(io.BytesIO(value.getvalue()), weights_only=True)
        super().load_bytes(read_item, value)


@contextlib.contextmanager
def restricted(what: str) -> Iterator[None]:
    """Replace torch's UnpicklingError, whose text is about an argument of `torch.load`."""
    try:
        yield
    except pickle.UnpicklingError as error:
        found = re.search(r"GLOBAL (\S+)", str(error))
        raise pickle.UnpicklingError(
            f"{what} has {found[1] if found else 'something'}, and only tensors and plain values "
            f"are loaded from a checkpoint that anybody may have written. If nobody but you can "
            f"have: load_checkpoint(..., trusted=True)"
        ) from error
