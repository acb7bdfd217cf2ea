import contextlib
import gc
import os
import re
from collections.abc import Callable, Iterator
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # before torch: two workers share two cores

import hypothesis
import pytest
import torch

from fxshard.capture import trace
from tests import browser, captures, sampling
from tests.ranks import Ranks

gc.disable()  # until all is imported: a quarter of the time of collecting tests went into it

# The same examples in every run, however busy the machine is; `make fuzz` is what looks for others.
hypothesis.settings.register_profile("fxshard", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("fxshard")

LEFT_OUT = pytest.StashKey[int]()  # tests of the page, where there is no browser


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """Bytes have no part in names: gzip's hold the time, and xdist's workers must collect alike."""
    return argname if isinstance(val, bytes) else None


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(sampling)
    if not hasattr(config, "workerinput"):  # of pytest-xdist: workers inherit the folder
        traces = contextlib.ExitStack()
        traces.enter_context(captures.folder_of_a_run())
        config.add_cleanup(traces.close)
    if browser.executable() is None and browser.is_required():
        raise pytest.UsageError(f"no Chromium, and {browser.REQUIRED} is set: {_REMEDY}")


@pytest.hookimpl(trylast=True)  # of the tests that are chosen otherwise
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without a browser the tests that open pages in one are left out; the summary says so.

    Workers collect tests each for itself, and must find the same: no name may hold an address.
    """
    for item in items:
        if re.search(r"\bat 0x[0-9a-f]{4}", item.nodeid):
            raise pytest.UsageError(f"{item.nodeid}: give the test ids that no address is in")
    if browser.executable() is not None:
        return
    left_out = [item for item in items if "browse" in getattr(item, "fixturenames", ())]
    items[:] = [item for item in items if item not in left_out]
    config.hook.pytest_deselected(items=left_out)
    config.stash[LEFT_OUT] = len(left_out)
    if hasattr(config, "workeroutput"):  # of pytest-xdist: the summary is the other process's
        config.workeroutput["left_out"] = len(left_out)


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.unfreeze()  # into the oldest generation, as none of it is garbage
    gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """A worker of pytest-xdist ends; each collects all tests."""
    node.config.stash[LEFT_OUT] = getattr(node, "workeroutput", {}).get("left_out", 0)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    count = config.stash.get(LEFT_OUT, 0)
    if count:
        terminalreporter.write_line(f"{count} tests of the page left out: no Chromium; {_REMEDY}")


_REMEDY = "apt-get install chromium"


@pytest.fixture(scope="session")
def _pools() -> Iterator[dict[int, Ranks]]:
    pools: dict[int, Ranks] = {}
    yield pools
    for each in pools.values():
        each.close()


@pytest.fixture(scope="session")
def ranks(_pools: dict[int, Ranks]) -> Callable[[int], Ranks]:
    """`ranks(world_size)`: the session's pool of that many gloo ranks."""

    def pool(world_size: int) -> Ranks:
        return _pools.setdefault(world_size, Ranks(world_size))

    return pool


@pytest.fixture(autouse=True, scope="module")
def _idle_ranks_are_quiet(_pools: dict[int, Ranks]) -> Iterator[None]:
    """Pools that wait for another file's tests take no core for it."""
    yield
    for each in _pools.values():
        each.close_if_it_wakes()


# Tests of what comes after the trace share traces: all but those of these rooms and files, which
# are about how a model is traced, about when, or count what a run does on the way.
TRACING_ROOMS = {"_torch", "capture", "codegen", "dryrun", "dynamo", "fuzz", "integrations"}
TRACING_FILES = {
    *("test_async_save", "test_checkpointing", "test_extensions", "test_object_changes"),
    *("test_other_sizes", "test_runs_go_on"),
}


@pytest.fixture(autouse=True, scope="module")  # around the fixtures of a module too
def _traced_once(request: pytest.FixtureRequest) -> Iterator[None]:
    """In those tests equal calls of equal models are traced once in a run."""
    room = request.path.relative_to(request.config.rootpath).parts[1]
    with captures.sharing(room not in TRACING_ROOMS and request.path.stem not in TRACING_FILES):
        yield


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Kernels run in one thread: what some take for themselves grows with the number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def traces(monkeypatch: pytest.MonkeyPatch) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """The arguments, by place and by name, of each trace that the test makes from here on."""
    made: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    capture = trace.capture

    def noted(*args: Any, **kwargs: Any) -> Any:
        made.append((args, kwargs))
        return capture(*args, **kwargs)

    monkeypatch.setattr(trace, "capture", noted)
    return made


@pytest.fixture
def same_seed() -> None:
    """Weights and batches are the same in every run."""
    torch.manual_seed(0)


@pytest.fixture
def hasty() -> Iterator[Callable[[int], Ranks]]:
    """Pools of their own, which failures end: the session's stay up."""
    pools: list[Ranks] = []

    def pool(world_size: int) -> Ranks:
        pools.append(Ranks(world_size, timeout_s=90))
        return pools[-1]

    yield pool
    for each in pools:
        each.close()
