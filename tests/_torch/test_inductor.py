"""Contracts of what `fxshard._torch.inductor` uses of torch."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.utils.checkpoint
from torch import fx

from fxshard._torch import fake_tensors, inductor


def test_inductor_source_is_a_module_with_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """No kernel is built; autocast around it changes nothing; the call is boxed and drops."""
    from torch._inductor.async_compile import AsyncCompile

    def build(*args: Any) -> None:
        raise AssertionError("a kernel was built")

    monkeypatch.setattr(AsyncCompile, "cpp_pybinding", build)
    mode = fake_tensors.FakeTensorMode()
    with mode:
        values = [torch.ones(4, 8), torch.ones(8, 8)]
    graph = fx.symbolic_trace(lambda x, y: (torch.sigmoid(x @ y) * 2.0,)).graph
    with torch.autocast("cpu", dtype=torch.bfloat16):
        made = inductor.inductor_source(graph, values, mode)
        assert isinstance(made, inductor.Generated)
    assert "args.clear()" in made.source and "del arg0_1" in made.source
    assert "bfloat16" not in made.source
    assert "async_compile.wait(globals())" in made.source, "loading waits elsewhere"
    assert "def call(" in made.source and "empty_strided_cpu(" in made.source
    assert made.constants == {} and made.aligned == ()
    known = {"assert_size_stride", "assert_size_stride_grouped", "assert_alignment"}
    _, body = made.source.split("def call(", 1)
    assert set(re.findall(r"\bassert_\w+", body)) <= known, "regions.py does not know them all"


def test_nothing_loaded_gives_a_module_that_cannot_be_called() -> None:
    """Its file is known, nobody imported it, and what is loaded afterwards is real again."""
    from torch._inductor.codecache import PyCodeCache

    real = PyCodeCache.load_by_key_path
    with inductor.nothing_loaded():
        module = PyCodeCache.load_by_key_path("key", "/no/such/file.py")
    assert (module.__file__, module.runner) == ("/no/such/file.py", None)
    with pytest.raises(AssertionError, match="never loaded"):
        module.call([])
    assert PyCodeCache.load_by_key_path == real


def test_inductor_cache_dir_is_that_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "mine"))
    assert inductor.inductor_cache_dir() == str(tmp_path / "mine")
    assert (tmp_path / "mine").stat().st_mode & 0o777 == 0o700
    assert Path(default_cache_dir()).is_absolute()


def test_inductor_key_is_of_options_and_threads() -> None:
    import torch._inductor.config as config

    key = inductor.inductor_key()
    assert inductor.inductor_key() == key and torch.__version__ in key
    with config.patch(epilogue_fusion=not config.epilogue_fusion):
        assert inductor.inductor_key() != key


def test_extern_kernels_have_matrix_products() -> None:
    out = torch.empty(2, 2)
    inductor.extern_kernels().mm(torch.ones(2, 3), torch.ones(3, 2), out=out)
    assert torch.equal(out, torch.full((2, 2), 3.0))
