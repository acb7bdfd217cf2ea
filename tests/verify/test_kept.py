"""What is kept from call to call: checks of the two operators, and their text."""

from collections.abc import Callable

import pytest
from torch import fx

from fxshard.config.checked import Config
from fxshard.errors import VerifyError
from fxshard.ir import ops, text
from fxshard.ir.program import Program
from fxshard.plans.workload import Workload
from fxshard.verify.parameters import params_unsharded
from fxshard.verify.storages import freed
from tests.memory.test_kept_parameters import planned
from tests.runtime.test_unit_methods import batch, net
from tests.texts import assert_equal


def second() -> Program:
    """Takes what the first micro-batch has kept, and keeps."""
    config = Config(units=["blocks.*"])
    plan = planned(Workload(net(), ((batch(0),), {}), 2, config, 3, no_sync=True))
    return plan.programs[1]


def one(program: Program, target: object) -> fx.Node:
    return next(node for node in program.graph.nodes if node.target is target)


def rename(program: Program, target: object) -> None:
    node = one(program, target)
    node.args = (node.args[0], list(node.args[1])[::-1], *node.args[2:])  # type: ignore[call-overload]


def free_instead(program: Program) -> None:
    node = one(program, ops.keep)
    node.target, node.args = ops.free, node.args[:1]


def forget(program: Program) -> None:
    program.kept = frozenset()


Check = Callable[[Program], None]
FAULTS: dict[str, tuple[Check, Check]] = {
    "kept are": (params_unsharded, lambda program: rename(program, ops.kept)),
    r"kept are \[\]": (params_unsharded, forget),
    "under other names": (freed, lambda program: rename(program, ops.keep)),
    "frees what": (freed, free_instead),
}


@pytest.mark.parametrize("said", FAULTS)
def test_what_is_kept_otherwise_than_it_is_taken_is_noticed(said: str) -> None:
    program, (check, spoil) = second(), FAULTS[said]
    check(program)
    spoil(program)
    with pytest.raises(VerifyError, match=said):
        check(program)


def test_it_has_a_text() -> None:
    program = second()
    written = text.write(program)
    assert "kept=" in written and "stays=True" in written
    assert_equal(text.parse(written), program)
