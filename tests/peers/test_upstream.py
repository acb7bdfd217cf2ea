"""What the runner of torch's own files makes of what it reads, and its table."""

from tests.peers import rows
from tests.peers.upstream import OUTCOMES, Outcome, error_of, internals, row_of

SOURCE = """
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup as Group
from torch.testing._internal.common_fsdp import FSDPTest, patch_unshard


class TestSome(FSDPTest):
    def test_plain(self):
        fully_shard(self.model())

    def test_state(self):
        self._checked(1)

    def test_patched(self):
        with patch_unshard(Group.unshard):
            self.model()(1)

    def _checked(self, times):
        if times:
            self._checked(times - 1)
        return self.model()._get_fsdp_state()

    def model(self):
        return MLP(8)
"""


def test_the_names_of_fsdp2s_inside_that_a_method_reads() -> None:
    assert internals(SOURCE) == {
        "TestSome.test_plain": set(),
        "TestSome.test_state": {"_get_fsdp_state"},
        "TestSome.test_patched": {"patch_unshard", "Group"},
    }


def test_the_error_of_a_rank() -> None:
    text = """Traceback (most recent call last):
  File "common_distributed.py", line 905, in wrapper
RuntimeError: Process 1 exited with error code 10 and exception:
Traceback (most recent call last):
  File "test_fully_shard_state.py", line 3, in test
TypeError: the cause

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "test_fully_shard_state.py", line 3, in test
fxshard.errors.ConfigError: this MLP is sharded already.

To execute this test, run the following
RuntimeError: Process 2 exited with error code 10 and exception:
ValueError: of another rank
"""
    assert error_of(text) == "fxshard.errors.ConfigError: this MLP is sharded already."
    assert error_of("RuntimeError: Process 0 terminated or timed out after 9 seconds\n") == (
        "RuntimeError: Process 0 terminated or timed out after 9 seconds"
    )
    assert error_of("nothing that we know") == "nothing that we know"


def outcome(theirs: str, ours: str | None, reads: set[str] = frozenset()) -> tuple[str, str]:  # type: ignore[assignment]
    """Of a method that ends with such errors, "" for none."""

    def of(error: str) -> Outcome:
        return Outcome("test_a.py", "TestA.test_a", "failed" if error else "passed", error)

    row = row_of(of(theirs), None if ours is None else of(ours), reads)
    return row.outcome, row.why


def test_what_came_of_a_method() -> None:
    refused = "ConfigError: no mesh. Give one."
    assert outcome("", "") == ("passes", "")
    assert outcome("RuntimeError: no CUDA", None) == ("not on a CPU", "RuntimeError: no CUDA")
    assert outcome("", f"fxshard.errors.{refused}") == ("refused", refused)
    assert outcome("", "AssertionError: ValueError not raised") == (
        "works here",
        "ValueError not raised",
    )
    assert outcome("", f"fxshard.errors.{refused}", {"_b", "_a"}) == ("internals", "_a, _b")
    for error in ("AssertionError: 1 != 2", "fxshard.errors.VerifyError: a race"):
        assert outcome("", error) == ("fails", error)
    late = "RuntimeError: Process 0 terminated or timed out after 9 seconds"
    assert outcome("", late) == outcome(late, None) == ("timed out", late)
    assert outcome("", None) == ("fails", "the process died")


def test_each_method_that_was_run_has_a_row() -> None:
    """And nothing that passes with torch's own `fully_shard` fails with ours unexplained."""
    run = rows.read_as_they_are()
    known = {(row.file, row.method.partition(" (")[0]) for row in rows.read()}
    assert run
    assert {(row.file, row.method) for row in run} - known == set()
    assert [row for row in run if row.outcome not in OUTCOMES or row.outcome == "fails"] == []
