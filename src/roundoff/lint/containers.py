"""What stands in lists, dictionaries, Sequentials and records, as far as a script says it."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from roundoff.lint.script import Script
from roundoff.lint.tensors import keyword_of

#: The last layers of published networks, which scripts replace by their own.
_HEADS = ("fc", "classifier", "head", "heads", "last_linear", "output")


def part_of(script: Script, node: ast.expr, element: int | str) -> ast.expr | None:
    """Return one value of a dictionary, a record or a list; None where it is not written.

    >>> script = Script("import torch; y = {'p': torch.sigmoid(x)}")
    >>> ast.unparse(part_of(script, script.nodes(ast.Dict)[0], "p"))
    'torch.sigmoid(x)'
    """
    if isinstance(node, ast.Dict):
        return _of_dict(node, element)
    if isinstance(node, ast.Name):
        return _put_in(script, node, element)
    if isinstance(node, ast.Call) and isinstance(element, str):
        return _of_record(script, node, element)
    return None


def _of_dict(node: ast.Dict, element: int | str) -> ast.expr | None:
    for key, value in zip(node.keys, node.values, strict=True):
        if isinstance(key, ast.Constant) and key.value == element:
            return value
    return None


def _put_in(script: Script, name: ast.Name, element: int | str) -> ast.expr | None:
    """Return the value of the last ``name["p"] = value`` above, in the same function."""
    last = None
    for assign in script.nodes(ast.Assign):
        target = assign.targets[0]
        if not isinstance(target, ast.Subscript) or assign.lineno >= name.lineno:
            continue
        holder = target.value
        key = target.slice
        is_same = isinstance(holder, ast.Name) and holder.id == name.id
        is_part = isinstance(key, ast.Constant) and key.value == element
        if is_same and is_part and script.scope(assign) is script.scope(name):
            last = assign.value
    return last


def _of_record(script: Script, call: ast.Call, element: str) -> ast.expr | None:
    """Return a field of ``dict(p=...)``, of a named tuple, of a data class."""
    is_dict = isinstance(call.func, ast.Name) and call.func.id == "dict"
    definition = script.things.script_class(call)
    if definition is not None and script.things.method(definition, "forward"):
        return None
    if not is_dict and definition is None and not _is_named_output(call):
        return None
    value = keyword_of(call, element)
    if value is not None or definition is None:
        return value
    return _by_place(call, _fields(definition), element)


def _by_place(call: ast.Call, fields: list[str], field: str) -> ast.expr | None:
    """Return the argument of a call that stands at the place of a field."""
    place = fields.index(field) if field in fields else len(call.args)
    return call.args[place] if place < len(call.args) else None


def _fields(definition: ast.ClassDef) -> list[str]:
    """Return the fields of a named tuple or data class, in their order."""
    return [
        each.target.id
        for each in definition.body
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
    ]


def _is_named_output(call: ast.Call) -> bool:
    """Return True for a library's class of outputs: ``SequenceClassifierOutput(...)``."""
    return ast.unparse(call.func).endswith(("Output", "SimpleNamespace"))


def last_layer(script: Script, sequential: ast.Call) -> ast.expr | None:
    """Return the last layer of a call of ``nn.Sequential``; None where it is not certain.

    Layers that are added later count.
    """
    added = list(_added(script, sequential))
    if added:
        return added[-1]
    if not sequential.args:
        return None
    last = sequential.args[-1]
    if isinstance(last, ast.Starred):
        return _last_of_list(script, last.value)
    named = last if len(sequential.args) == 1 else None
    return _last_of_mapping(script, named) or last


def _added(script: Script, sequential: ast.Call) -> Iterator[ast.expr]:
    """Yield the layers of ``net.add_module(name, layer)`` and ``net.append(layer)``."""
    statement = script.statement(sequential)
    if not isinstance(statement, ast.Assign):
        return
    key = script.things.key(statement.targets[0])
    for call in script.method_calls("add_module", "append"):
        function = call.func
        if not isinstance(function, ast.Attribute) or not call.args:
            continue
        if script.things.key(function.value) == key:
            yield call.args[-1]


def _last_of_list(script: Script, node: ast.expr) -> ast.expr | None:
    """Return the last element of a list that a script builds in one function."""
    if isinstance(node, ast.List | ast.Tuple):
        return node.elts[-1] if node.elts else None
    if not isinstance(node, ast.Name):
        return None
    home = script.home(node)
    last: tuple[int, ast.expr | None] = (0, None)
    for line, value in _grown(script, node.id, home):
        if last[0] < line < node.lineno:
            last = (line, value)
    return last[1]


def _grown(
    script: Script, name: str, home: ast.AST | None
) -> Iterator[tuple[int, ast.expr | None]]:
    """Yield the line and the last element of each piece that a list gets."""
    for binding in () if home is None else script.bindings(home).get(name, ()):
        statement = binding.statement
        is_more = isinstance(statement, ast.AugAssign)
        value = statement.value if is_more else binding.value  # type: ignore[attr-defined]
        if isinstance(value, ast.List | ast.Tuple) and value.elts:
            last = None if _is_optional(script, statement) else value.elts[-1]
            yield getattr(statement, "lineno", 0), last
    yield from _appended(script, name, home)


def _appended(
    script: Script, name: str, home: ast.AST | None
) -> Iterator[tuple[int, ast.expr | None]]:
    """Yield the line and the value of each ``name.append(value)``."""
    for call in script.method_calls("append"):
        holder = call.func.value if isinstance(call.func, ast.Attribute) else None
        if not isinstance(holder, ast.Name) or not call.args:
            continue
        if holder.id == name and script.home(holder) is home:
            last = None if _is_optional(script, call) else call.args[0]
            yield call.lineno, last


def _is_optional(script: Script, node: ast.AST) -> bool:
    return script.enclosing(node, ast.If) is not None


def _last_of_mapping(script: Script, node: ast.expr | None) -> ast.expr | None:
    """Return the last layer of an ``OrderedDict``."""
    if isinstance(node, ast.Name):
        node = script.definition(node)
    if isinstance(node, ast.Dict):
        return node.values[-1] if node.values else None
    if not isinstance(node, ast.Call) or not ast.unparse(node.func).endswith("Dict"):
        return None
    if node.keywords:
        return node.keywords[-1].value
    return _last_of_pairs(node.args[0] if node.args else None)


def _last_of_pairs(pairs: ast.expr | None) -> ast.expr | None:
    """Return the last value of ``[(name, layer), ...]`` or of a dictionary."""
    if isinstance(pairs, ast.Dict):
        return pairs.values[-1] if pairs.values else None
    last = pairs.elts[-1] if isinstance(pairs, ast.List) and pairs.elts else None
    return last.elts[-1] if isinstance(last, ast.Tuple) and last.elts else None


def replaced_head(script: Script, model: ast.expr) -> ast.expr | None:
    """Return what a script put in the place of a network's last layer:
    ``model.fc = nn.Linear(512, 10)``.
    """
    key = script.things.key(model)
    last = None
    for assign in script.nodes(ast.Assign):
        target = assign.targets[0]
        if isinstance(target, ast.Subscript):
            target = target.value
        is_head = isinstance(target, ast.Attribute) and target.attr in _HEADS
        if is_head and key is not None and script.things.key(target.value) == key:  # type: ignore[attr-defined]
            last = assign.value
    return last
