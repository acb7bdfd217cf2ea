"""What several of the tests beside it need (test_bucket)."""

from typing import Any

Options = dict[str, Any]


APART: Options = {"pack_bytes": 0}


SPLIT: Options = {"max_bucket_bytes": 144} | APART


MERGED: Options = {"min_bucket_bytes": 1000} | APART


PACKED: Options = {"pack_bytes": 100}
