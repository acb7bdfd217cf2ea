"""chunk-loss and cut-rows keep the meaning of a program, up to rounding; rows of a chunk."""

import pytest

from fxshard import pipeline
from fxshard.config.checked import Config
from fxshard.ir import dump
from fxshard.passes.chunk_loss import ChunkLoss, chunk_rows
from fxshard.passes.cut_rows import CutRows
from tests import graphs, interpreter
from tests.passes.passes_cases import LOSS, SHIFTED_LOSS, root
from tests.passes.test_meaning import assert_close, assert_keeps, ranks_of


@pytest.mark.parametrize("written", [LOSS, SHIFTED_LOSS])
@pytest.mark.parametrize("rows", [1, 3])
def test_the_meaning_is_kept_up_to_rounding(written: str, rows: int) -> None:
    start = graphs.parse(written, root)
    values = interpreter.values_of(start, ranks_of(start))
    wanted = interpreter.interpreted(start, values)
    first, *others = pipeline.default_passes(Config())
    for step in (first, CutRows(), ChunkLoss(rows)):
        pipeline.run(start, [step])
        assert_close(interpreter.interpreted(start, values), wanted)
    assert "_chunk1" in dump.text(start)
    assert assert_keeps(start, values, others) >= 11  # bit for bit from here on


def test_what_is_not_cut_is_left_as_it_is() -> None:
    programs = [graphs.parse(LOSS, root) for _ in range(2)]
    for program, step in zip(programs, ([], [CutRows()]), strict=True):
        pipeline.run(program, [pipeline.default_passes(Config())[0], *step])
    assert dump.text(programs[0]) == dump.text(programs[1])


@pytest.mark.parametrize(
    ("asked", "count", "width", "vocabulary", "rows"),
    [
        (True, 8192, 4096, 128_256, 1024),  # Llama 3 8B: a quarter of the weight
        (True, 65_535, 4096, 128_256, 2048),  # 32 chunks, as large as the hidden states
        (True, 8192, 256, 128_256, 128),  # no more than 64 chunks
        (True, 8192, 4096, 4096, 8192),  # nothing to save
        (100, 8192, 4096, 128_256, 100),
        (1, 8, 4, 8, 1),  # and not True
    ],
)
def test_rows_of_a_chunk(
    asked: bool | int, count: int, width: int, vocabulary: int, rows: int
) -> None:
    assert chunk_rows(asked, count, width, vocabulary) == rows
