"""What became of each method of torch's suites: the rows, read from `rows.csv`, and their page.

The page counts them by file; docs/peer-tests.csv beside it has a line per method.

The columns of `rows.csv` are file, method, verdict, by, torch. The last says which torches have the
method, where not all do that fxshard runs on. What `by` says depends on the verdict:

    same            pytest ids of our tests, with spaces between them
    refused         a pytest id, then ": " and the text of the error, which that test asserts
    not applicable  why
    missing         what is not there, and what has to come
"""

import csv
import io
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.peers import upstream

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
PAGE = ROOT / "docs" / "peer-tests.md"
TABLE = ROOT / "docs" / "peer-tests.csv"
COLUMNS = ("file", "method", "verdict", "by", "torch")
VERDICTS = ("same", "refused", "not applicable", "missing")
SUITES = {  # folder -> what its files test
    "fsdp2": "FSDP2, `fully_shard`",
    "fsdp1": "FSDP1, `FullyShardedDataParallel`",
}

HEAD = """# PyTorch's own tests of FSDP, as tests of fxshard

Written by `python -m tests.peers` from `tests/peers/*/rows.csv`; do not edit. Our tests of the
behaviour that PyTorch's test suites assert are written anew, with the same models, oracles and
tolerances, and run on gloo ranks. The table counts methods of PyTorch's files;
[peer-tests.csv](peer-tests.csv) has a row for each, with the tests of ours that stand for it, or
why there is none. FSDP2's files are of `test/distributed/_composable/fsdp/` and
`test_composability/`, FSDP1's of `test/distributed/fsdp/`.

- **same**: the named tests assert what torch's method asserts, of fxshard. Of FSDP2's
  `test_fully_shard_training_memory` one bound holds with other options: backward with offload is
  within torch's 4.6 blocks with `backward_prefetch=0` (4.0), and not by default (5.0).
- **refused**: fxshard says why not and what to do; the named test asserts the text.
- **not applicable**: there is nothing of the kind here, or it needs a GPU.
- **missing**: fxshard does not do it yet.

Where only some of torch's releases have a method, its row says which. The last column counts the
methods that pass as they are (below), of those that could be run.
"""

AS_THEY_ARE = """## FSDP2's files as they are

torch's own files, run with the one name `fully_shard` replaced, and with it
`register_fsdp_forward_method`, on 2026-11-25 and 26 with torch 2.13.0 on the CPU: gloo, 4 ranks at
most (8 for a 2 x 2 x 2 mesh). Each method ran with torch's own `fully_shard` too. The files are not
part of this repository:

    pip install expecttest
    python -m tests.peers.upstream path/to/pytorch --out tests/peers/fsdp2/upstream.csv
    python -m tests.peers

The runner says "cpu" where a file says "cuda", runs ranks that are threads in torch's tests as
processes, and takes fxshard's operators where a file counts collectives by theirs:
`reduce_scatter_tensor_coalesced_` and `allreduce_coalesced_`. What a file asserts inside of a
function that it puts in the place of one of FSDP2's own (`patch_reduce_scatter`) is not reached.

No checkout of the release was at hand: each file is put together from the text of the commit that
is named in the CSV (`commit`), with the import paths of torch 2.13 and without docstrings. Left
out are methods that need CUDA or import FSDP2's inside, the second half of the file about
communication, and the hybrid cases of extensions and of placements beside tensor parallelism: only
their rows speak of these. The columns `as it is` and `why` of the CSV have, of each method:
"""

WITHOUT_ROWS = {  # by suite: the files of torch's folders that have none
    "fsdp2": """## Files of FSDP2 without rows

Looked at on 2026-11-26 in a store of PyTorch's history, which has the branches of pull requests
too. What only those have is in no release of 2.11 to 2.15, by three signs: what it imports is not
in torch 2.13 as installed, the pull request is open, or says that it is an experiment or replaced,
and none of the store's forks, which have other files soon after main has them, holds it (of these
files two hold `_make_fx`).

- **Of pull requests**: `_block_shard` (a placement `BlockShard`), `_chunk_cat` (its operator is
  tested in `test_fully_shard_comm.py`), `_conversion` (with `grad_dtype` of 194434),
  `_copy_engine` (176586; merged was 176613, `set_symm_mem_for_comm`), `_grad` (a class
  `FSDPGrad`), `_make_fx` (176749), `_offload_selector` (188120: offload of some parameters),
  `_prefix_copy` (197204, an operator), `_stream_utils` (streams of CUDA), `_training_compile`,
  `_unsharded_views`; the class `TestFSDPDivergentRanks` of `_training` and two methods of
  `_dtensor` (174862; where ranks use other parameters, `ranks_may_differ=True`:
  tests/runtime/test_ranks_may_differ.py), `TestFullyShardAllReduceBufferWindow` of `_memory`
  (183617), and what 197204 and 197701 add to `_extensions` and `_training` for `Shard(1)` and
  for classes that lay out what is gathered; the methods of `_mixed_precision` about a parameter's
  own `grad_dtype` (172074, 194434, 197203), which is refused here
  (`end_to_end/test_precision_parts.py::test_a_gradients_dtype_of_its_own_is_refused`).
- **Of the first months of 2024**, before the files had the names of today: `_2d`, `_collectives`,
  `_compose`, `_debug`, `_fuse` (a method `fuse_comm_groups` that never came), `_grad_acc`,
  `_shared_params`. Their methods are in `_training`, `_comm`, `_mixed_precision` and `_init`.
- **Of other functions than `fully_shard`**: `test_replicate*.py` (`replicate`),
  `test_checkpoint.py` (composable `checkpoint`), `test_contract.py` (a decorator of torch's).
- **Of FSDP1's former `fully_shard`**, which torch 2.13 does not have:
  `_composable/fully_shard/`, `test_compose.py`, `test_fully_shard.py`, `test_compiler.py`; and of
  `test_composability/` the files that became the two with rows.
""",
    "fsdp1": """## Files of FSDP1 without rows

Looked at as those of FSDP2. Of FSDP1's first year, taken out or named otherwise since:
`test_fsdp.py`, `test_fsdp_no_sync.py`, `test_flatten_params_wrapper.py`, `test_ssd_offload.py`,
`test_reduce_scatter_bucketer.py`, `test_fsdp_summon_full_params.py` (now `_unshard_params`), and
the three of an order of parameters, `test_fsdp_*exec_order_policy.py` and `*_wrap.py`. Of pull
requests: `test_composable_fsdp.py`, `test_flat_param_handle.py`, `test_fsdp_2d.py`,
`test_fsdp_tp.py`, `test_fsdp_checkpoint_dtensor.py`, `test_fsdp_param_mutation.py`,
`test_fsdp_prefix_set.py`, `test_hsdp_sync_module_states.py`, `test_shared_param_utils.py`,
`test_spmd_types.py`; and of `test_fsdp_use_orig_params.py` the class
`TestFSDPUseOrigParamsPrefetchWriteback` (178223: `FlatParamHandle.pre_unshard` beside CUDA streams;
updates by hand under `no_grad`: fsdp1/test_use_orig_params.py::test_updated_by_hand).
""",
}


@dataclass(frozen=True)
class Row:
    """One method of a suite of torch's."""

    suite: str  # "fsdp2"
    file: str  # "test_fully_shard_init.py"
    method: str  # "TestFullyShardMeshArg.test_invalid_mesh_ndim"
    verdict: str
    test_or_reason: str
    torch: str = ""  # "after 2.15"; all, if empty

    @property
    def tests(self) -> list[str]:
        """Pytest ids of the tests that stand for it."""
        if self.verdict == "same":
            return self.test_or_reason.split()
        return [self.test_or_reason.partition(": ")[0]] if self.verdict == "refused" else []

    @property
    def refusal(self) -> str:
        """A part of the error's text, of a refused one."""
        return self.test_or_reason.partition(": ")[2] if self.verdict == "refused" else ""


def read() -> list[Row]:
    """The rows of all suites, in the order of their files."""
    rows = []
    for suite in SUITES:
        path = FOLDER / suite / "rows.csv"
        if path.exists():
            with path.open(newline="") as lines:
                rows += [
                    Row(suite, *(row[key] or "" for key in COLUMNS))
                    for row in csv.DictReader(lines)
                ]
    return rows


def read_as_they_are() -> list[upstream.Row]:
    """What came of torch's own files: `python -m tests.peers.upstream` writes it."""
    with (FOLDER / "fsdp2" / "upstream.csv").open(newline="") as lines:
        return [upstream.Row(**row) for row in csv.DictReader(lines)]


def page(rows: Iterable[Row]) -> str:
    """The text of docs/peer-tests.md."""
    rows, run = list(rows), read_as_they_are()
    return "\n".join([HEAD, _counts(rows, run), _as_they_are(run), *WITHOUT_ROWS.values()])


def csv_rows(rows: Iterable[Row]) -> Iterator[list[str]]:
    """The lines of docs/peer-tests.csv, the names of its columns first."""
    came = {(row.file, row.method): row for row in read_as_they_are()}
    yield ["suite", *COLUMNS, "as it is", "why", "commit"]
    for row in rows:
        own = came.get((row.file, row.method.partition(" (")[0])) if row.suite == "fsdp2" else None
        said = [own.outcome, own.why, own.commit] if own else ["", "", ""]
        own_columns = [row.file, row.method, row.verdict, row.test_or_reason, row.torch]
        yield [row.suite, *own_columns, *said]


def table(rows: Iterable[Row]) -> str:
    """The text of docs/peer-tests.csv."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(csv_rows(rows))
    return text.getvalue()


def _counts(rows: Iterable[Row], run: list[upstream.Row]) -> str:
    """One line per file, and one for all of a suite."""
    lines = []
    for suite in SUITES:
        counts: dict[str, Counter[str]] = {}
        for row in rows:
            if row.suite == suite:
                counts.setdefault(row.file, Counter())[row.verdict] += 1
        ran = run if suite == "fsdp2" else []
        passed = {
            file: [each.outcome == "passes" for each in ran if each.file == file] for file in counts
        }
        counts["all"] = sum(counts.values(), Counter())
        passed["all"] = [each.outcome == "passes" for each in ran]
        for file, count in counts.items():
            name = f"`{file}`" if file != "all" else f"all of {SUITES[suite]}"
            own = f"{sum(passed[file])} of {len(passed[file])}" if passed[file] else ""
            lines.append([name, *(str(count[verdict]) for verdict in VERDICTS), own])
    return _table(["file", *VERDICTS, "as it is"], lines)


def _as_they_are(run: list[upstream.Row]) -> str:
    """The section of torch's own files: how many of their methods came to what."""
    counts = Counter(row.outcome for row in run)
    said = [
        f"- **{kind}**, {counts[kind]}: {upstream.OUTCOMES[kind]}.\n"
        for kind in upstream.OUTCOMES
        if counts[kind]
    ]
    return f"{AS_THEY_ARE}\n{''.join(said)}"


def _table(headers: list[str], rows: list[list[str]]) -> str:
    """Not padded: a changed row is one changed line."""
    lines = [headers, ["---"] * len(headers), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
