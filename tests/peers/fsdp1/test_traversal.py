"""torch's test_fsdp_traversal.py: which modules are units."""

from typing import Any

from tests.peers.fsdp1.models import Nested
from tests.peers.fsdp1.shared import compiled


def units(rank: int, world_size: int) -> dict[str, list[str]]:
    model = compiled(Nested())
    model(*model.get_input())
    return {unit.fqn: [param.fqn for param in unit.params] for unit in model.plan.units}


def test_units_of_nested_modules(ranks: Any) -> None:
    """In the order of modules; there is one root, the model."""
    for found in ranks(2).run(units):
        assert list(found) == ["", "module.1", "module.1.0", "module.2"]
        assert found["module.1"] == ["module.1.1.weight", "module.1.1.bias"]
        assert found["module.1.0"] == ["module.1.0.weight", "module.1.0.bias"]
