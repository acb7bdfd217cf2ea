"""Fails where a file outside of fxshard/_torch/ reaches into what is private to torch.

    python .ci/private_imports.py fxshard passes

A private module has a component that starts with one underscore (``torch._functorch``). It is found
in import statements, in ``importlib.import_module("...")`` and, through whatever name torch was
imported by, in attribute chains (``torch._C``). Operators (``torch.ops.aten._to_copy``) are no
modules, and pass.

Of what type an object is cannot be told here, so private attributes of torch's objects are known by
name (`ATTRIBUTES`): those that code here has a use for. Attributes of modules that subclasses of
nn.Module use too, such as ``_parameters``, are not among them.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ALLOWED = Path("fxshard/_torch")
ATTRIBUTES = {
    *("_cdata", "_local_tensor", "_spec", "_schema", "_overloadpacket"),
    *("_graph_namespace", "_erased", "_flat_weight_refs", "_flat_weights_names"),
    *("_get_fsdp_state", "_fsdp_param_group", "_fsdp_param_groups"),
    *("_HYBRID_SHARD_ZERO2", "_module_classes_to_ignore"),
}


def is_private(dotted: str) -> bool:
    first, *rest = dotted.split(".")
    if first != "torch" or rest[:1] == ["ops"]:
        return False
    for part in rest:
        if part.startswith("_") and not part.startswith("__"):
            return True
        if part[:1].isupper():  # a class: what follows is a member
            return False
    return False


def dotted_name(node: ast.expr, names: dict[str, str]) -> str | None:
    if isinstance(node, ast.Name):
        return names.get(node.id)
    if isinstance(node, ast.Attribute) and (base := dotted_name(node.value, names)):
        return f"{base}.{node.attr}"
    return None


def offences(tree: ast.Module) -> Iterator[tuple[int, str]]:
    names: dict[str, str] = {}  # local name -> what it was imported from
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                local = alias.asname or alias.name.partition(".")[0]
                names[local] = alias.name if alias.asname else local
                if is_private(alias.name):
                    yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                names[alias.asname or alias.name] = full
                if is_private(full):
                    yield node.lineno, full
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            if node.attr in ATTRIBUTES:
                yield node.lineno, ast.unparse(node)
            base = dotted_name(node.value, names)
            # Only the link that turns private is reported, once for the whole chain.
            if base and not is_private(base) and is_private(f"{base}.{node.attr}"):
                yield node.lineno, f"{base}.{node.attr}"
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called, argument = node.func, node.args[0].value
            name = getattr(called, "attr", getattr(called, "id", None))
            if name in ("import_module", "__import__") and is_private(str(argument)):
                yield node.lineno, str(argument)
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("getattr", "setattr"):
            asked = {each.value for each in node.args[1:2] if isinstance(each, ast.Constant)}
            if asked & ATTRIBUTES:
                yield node.lineno, ast.unparse(node)


def main(folders: list[str]) -> int:
    found = 0
    # rglob does not follow the symlink fxshard/passes.
    for path in sorted(path for folder in folders for path in Path(folder).rglob("*.py")):
        if path.is_relative_to(ALLOWED):
            continue
        for line, name in sorted(set(offences(ast.parse(path.read_text("utf-8"), str(path))))):
            print(f"{path}:{line}: {name} is private to torch; only {ALLOWED} may touch it")
            found += 1
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
