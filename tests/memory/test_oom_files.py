"""Files that may be no snapshots: nothing in them runs; each gives an error or an answer."""

import gzip
import io
import os
import pickle
import random
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from fxshard.errors import ConfigError
from fxshard.memory.oom import plain
from fxshard.memory.oom.explain import explain_oom
from tests.memory.snapshots import GIB, INIT, LINEAR, MIB, Program, fragmented


def written(path: Path, told: Any) -> Path:
    path.write_bytes(pickle.dumps(told))
    return path


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_plain_values_are_read_as_pickle_reads_them(protocol: int) -> None:
    shared = ["x"] * 300
    value = {
        "numbers": [0, 1, 255, 256, 65536, -1, 2**31, -(2**40), 2**63, 1.5, True, False, None],
        "texts": ["", "ä\ud800", "x" * 300],
        "bytes": [b"", b"ab", b"y" * 300] if protocol > 2 else [],  # 2 has a function for them
        "tuples": [(), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4)],
        "shared": [shared, shared],
        "empty": [{}, []],
        "many": {i: str(i) for i in range(2000)},
        "one": [{"a": 1}, ["b"]],
    }
    read = plain.loads(pickle.dumps(value, protocol=protocol))
    assert read == value
    assert read["shared"][0] is read["shared"][1]


class Runs:
    """What a malicious file would have."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


def test_nothing_in_a_file_runs(tmp_path: Path) -> None:
    file = written(tmp_path / "s.pickle", {"segments": [Runs(tmp_path / "ran")]})
    with pytest.raises(ConfigError, match=r"more than plain values \(STACK_GLOBAL\)"):
        explain_oom(file)
    for protocol in (2, 3):
        file.write_bytes(pickle.dumps([Runs(tmp_path / "ran")], protocol=protocol))
        with pytest.raises(ConfigError, match=r"more than plain values \(GLOBAL\)"):
            explain_oom(file)
    assert not (tmp_path / "ran").exists()


def test_a_few_bytes_cannot_fill_memory() -> None:
    """CPython's unpickler makes a table of 4 GB from the first."""
    tracemalloc.start()
    try:
        assert plain.loads(b"\x80\x04]r\xff\xff\xff\x0f.") == []
        for data in (b"\x8d" + 8 * b"\x7f", b"\x96" + 8 * b"\x3f", b"j\0\0"):
            with pytest.raises(ConfigError):
                plain.loads(b"\x80\x04" + data)
        assert tracemalloc.get_traced_memory()[1] < MIB
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "no pickle"),
        (b"PK\x03\x04", "no pickle"),
        (b'{"segments": []}', "no pickle"),
        (pickle.dumps({"segments": []}, protocol=0), "protocol 2 or later"),
        (gzip.compress(pickle.dumps({"segments": []}), mtime=0), "gunzip"),
        (pickle.dumps({"segments": []})[:-1], "truncated"),
        (pickle.dumps({"a": 1}), "it has no segments"),
        (pickle.dumps("text"), "it has no segments"),
        (pickle.dumps({"segments": {}}), "segments are"),
        (pickle.dumps({"segments": [1]}), "a segment is 1"),
        (pickle.dumps({"segments": [], "device_traces": [[{}]]}), "has no action"),
        (pickle.dumps({"segments": []}), "neither a segment nor an event"),
    ],
)
def test_a_file_that_is_no_snapshot_says_why(content: bytes, why: str, tmp_path: Path) -> None:
    (tmp_path / "s.pickle").write_bytes(content)
    with pytest.raises(ConfigError, match=why):
        explain_oom(tmp_path / "s.pickle")


def test_what_is_no_file_is_not_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "absent", tmp_path / "pipe", "/dev/zero"):
        with pytest.raises(ConfigError, match="no such file"):
            explain_oom(path)


def test_a_file_of_another_version_may_lack_keys(tmp_path: Path) -> None:
    """Of torch 2.1 and before, and of a later one that has more."""
    data = fragmented().snapshot()
    whole = explain_oom(written(tmp_path / "s.pickle", data))
    later = data | {"new": {"key": [1]}}
    for event in later["device_traces"][0]:
        event["new"] = "x"
    later["device_traces"][0].insert(3, {"action": "user_defined", "frames": [], "new": 1})
    assert explain_oom(written(tmp_path / "s.pickle", later)).request == whole.request
    del data["allocator_settings"], data["external_annotations"]
    for segment in data["segments"]:
        for name in ("device", "is_expandable", "segment_pool_id", "frames", "requested_size"):
            del segment[name]
        for block in segment["blocks"]:
            del block["address"]
            if block["state"] == "inactive":
                del block["frames"], block["requested_size"]
            else:  # the frames are those of the newest entry of a history
                size, frames = block.pop("requested_size"), block.pop("frames")
                block["history"] = [{"addr": 0, "real_size": size, "frames": frames}]
    for event in data["device_traces"][0]:
        for name in ("time_us", "compile_context", "user_metadata", "new"):
            event.pop(name, None)
    older = explain_oom(written(tmp_path / "s.pickle", data))
    assert older.request == whole.request and older.moment.free == whole.moment.free
    assert older.moment.by("category", "line") == whole.moment.by("category", "line")
    data["device_traces"][0] = [e for e in data["device_traces"][0] if e["action"] != "alloc"]
    assert explain_oom(written(tmp_path / "s.pickle", data)).request == whole.request


@pytest.mark.parametrize(
    ("where", "name", "value", "why"),
    [
        ("segment", "total_size", -1, "total_size is -1, which is below 0"),
        ("segment", "address", "x", "address is 'x'"),
        ("block", "size", 2**60, "more than any device has"),
        ("block", "state", "strange", "state is 'strange'"),
        ("block", "frames", 7, "frames are 7"),
        ("event", "addr", None, "addr is None"),
        ("event", "size", True, "size is True"),
        ("event", "frames", [5], "a frame is 5"),
        ("event", "frames", [{"filename": 1}], "no file"),
        ("event", "action", 3, "has no action"),
    ],
)
def test_altered_figures_are_named(
    where: str, name: str, value: Any, why: str, tmp_path: Path
) -> None:
    data = fragmented().snapshot()
    segment, event = data["segments"][0], data["device_traces"][0][1]
    place = {"segment": segment, "block": segment["blocks"][0], "event": event}
    place[where][name] = value
    with pytest.raises(ConfigError, match=why):
        explain_oom(written(tmp_path / "s.pickle", data))


def test_truncated_and_altered_files_give_an_error_or_an_answer(tmp_path: Path) -> None:
    program = Program(256 * MIB)
    kept = [program.alloc(size * MIB, LINEAR if size % 2 else INIT) for size in range(1, 16)]
    for address in kept[::2]:
        program.free(address)
    program.alloc(GIB, LINEAR)
    path = tmp_path / "s.pickle"
    whole = program.dump(path).read_bytes()
    answer = explain_oom(path)
    chance, errors, started = random.Random(0), 0, time.monotonic()
    broken = [whole[: chance.randrange(len(whole))] for _ in range(100)]
    for _ in range(400):
        at = chance.randrange(len(whole))
        flipped = bytes([whole[at] ^ (1 << chance.randrange(8))])
        broken.append(whole[:at] + flipped + whole[at + 1 :])
    for number, each in enumerate(broken):
        path.write_bytes(each)
        try:
            found = explain_oom(path)
            str(found)
        except ConfigError as error:
            errors += 1
            assert str(path) in str(error) or "device" in str(error) or "snapshot" in str(error)
        else:
            assert number >= 100, "a truncated file is never a snapshot"
            if pickle.load(io.BytesIO(each)) == pickle.loads(whole):
                assert found == answer
    assert errors > 150
    assert time.monotonic() - started < 120
