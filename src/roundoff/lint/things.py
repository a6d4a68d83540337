"""What the names of a script are: which is the optimizer, the scaler, the model.

That follows from what a name is assigned, from what a caller passes, from annotations,
and last from how it is called and used.
"""

from __future__ import annotations

import ast
import enum
import re
from collections.abc import Sequence
from dataclasses import dataclass

from roundoff.lint.bindings import is_self
from roundoff.lint.script import Binding, Function, Node, Script


class Kind(enum.Enum):
    """What an object of a training script is."""

    SCALER = "gradient scaler"
    OPTIMIZER = "optimizer"
    SCHEDULER = "learning-rate scheduler"
    MODEL = "model"
    LOSS = "loss function"
    LOADER = "data loader"
    AUTOCAST = "autocast"
    NO_GRAD = "no_grad"
    MANAGER = "manager"  # accelerate, Fabric, DeepSpeed: scales and steps by itself
    OTHER = "other"


@dataclass(frozen=True)
class Thing:
    """An object: ``key`` is the same wherever the script means the same one."""

    kind: Kind
    key: str


_CLASSES = {
    "torch.amp.GradScaler": Kind.SCALER,
    "torch.cuda.amp.GradScaler": Kind.SCALER,
    "torch.cpu.amp.GradScaler": Kind.SCALER,
    "torch.npu.amp.GradScaler": Kind.SCALER,
    "torch_npu.npu.amp.GradScaler": Kind.SCALER,
    "torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler": Kind.SCALER,
    "paddle.amp.GradScaler": Kind.SCALER,
    "paddle.amp.AmpScaler": Kind.SCALER,
    "torch.autocast": Kind.AUTOCAST,
    "torch.cuda.amp.autocast": Kind.AUTOCAST,
    "torch.cpu.amp.autocast": Kind.AUTOCAST,
    "torch.npu.amp.autocast": Kind.AUTOCAST,
    "paddle.amp.auto_cast": Kind.AUTOCAST,
    "paddle.amp.amp_guard": Kind.AUTOCAST,
    "torch.no_grad": Kind.NO_GRAD,
    "torch.inference_mode": Kind.NO_GRAD,
    "torch.set_grad_enabled": Kind.NO_GRAD,
    "torch.autograd.no_grad": Kind.NO_GRAD,
    "paddle.no_grad": Kind.NO_GRAD,
    "torch.utils.data.DataLoader": Kind.LOADER,
    "paddle.io.DataLoader": Kind.LOADER,
    "torch.nn.parallel.DistributedDataParallel": Kind.MODEL,
    "torch.nn.DataParallel": Kind.MODEL,
    "torch.compile": Kind.MODEL,
    "paddle.DataParallel": Kind.MODEL,
    "paddle.Model": Kind.OTHER,
    "accelerate.Accelerator": Kind.MANAGER,
    "lightning.Fabric": Kind.MANAGER,
    "lightning.fabric.Fabric": Kind.MANAGER,
    "lightning_fabric.Fabric": Kind.MANAGER,
    "torch.cuda.amp.custom_fwd": Kind.OTHER,
}
_PREFIXES = (
    ("torch.optim.lr_scheduler.", Kind.SCHEDULER),
    ("torch.optim.swa_utils.SWALR", Kind.SCHEDULER),
    ("torch.optim.swa_utils.", Kind.MODEL),
    ("torch.optim.", Kind.OPTIMIZER),
    ("paddle.optimizer.lr.", Kind.SCHEDULER),
    ("paddle.optimizer.", Kind.OPTIMIZER),
    ("torch_optimizer.", Kind.OPTIMIZER),
    ("bitsandbytes.optim.", Kind.OPTIMIZER),
    ("apex.optimizers.", Kind.OPTIMIZER),
    ("torchvision.models.", Kind.MODEL),
    ("timm.create_model", Kind.MODEL),
    ("paddle.vision.models.", Kind.MODEL),
)
_NN = re.compile(r"(?:torch|paddle)\.nn\.(\w+)$")
_LOSS_CLASS = re.compile(r"\w*Loss$")
_MODULE_BASES = re.compile(
    r"(?:torch|paddle|flax)\.nn\.(?:Module|Layer|Sequential)$|.*\.PreTrainedModel$"
)
_BASES = (
    (re.compile(r".*\bOptimizer$"), Kind.OPTIMIZER),
    (re.compile(r".*\bGradScaler$"), Kind.SCALER),
    (re.compile(r".*\b(?:_LRScheduler|LRScheduler)$"), Kind.SCHEDULER),
)
#: Methods that return the object, or one of its kind.
_SAME_OBJECT = {
    "to",
    "cuda",
    "cpu",
    "half",
    "float",
    "bfloat16",
    "double",
    "train",
    "eval",
    "requires_grad_",
    "compile",
}
_NAMES = (
    (
        Kind.SCHEDULER,
        re.compile(r"(?i)^(?!.*noise).*(?:sched(?:uler)?|lr_?sched|warmup)(?:_?\w)?$"),
    ),
    (
        Kind.OPTIMIZER,
        re.compile(
            r"(?i)^(?:optim(?:i[sz]ers?)?|opt|optimi[sz]er\w*|optim_\w+|opt_?\w{0,6}|\w+_opt(?:im(?:i[sz]er)?)?)$"
        ),
    ),
    (
        Kind.MODEL,
        re.compile(
            r"(?i)^(?:\w*_?(?:model|net|network|backbone)(?:_?[a-z0-9])?|generator|discriminator|student|teacher|encoder|decoder|critic|actor|policy|ddp_model|unet|vae|resnet\w*|vit)$"
        ),
    ),
    (
        Kind.LOSS,
        re.compile(
            r"(?i)^(?:criterion\w*|loss_?(?:fn|func|function)\w*|\w+_criterion)$"
        ),
    ),
    (Kind.LOADER, re.compile(r"(?i)^(?:\w*_?loader|dataloader\w*|\w+_dl)$")),
    (Kind.MANAGER, re.compile(r"(?i)^(?:accelerator|fabric|model_engine)$")),
)
_SCALER_NAME = re.compile(r"(?i)^\w*scaler\w*$")
_DEEPEST = 8


class Things:
    """The objects of one script, by the expressions that name them."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self._kinds: dict[tuple[int, str], Kind | None] = {}
        self._open: set[tuple[int, str]] = set()
        self._functions: dict[ast.Call, Function | None] = {}
        self._callers: dict[ast.AST, list[ast.Call]] | None = None
        self._followed: set[Function] | None = None

    def thing(self, node: ast.AST | None) -> Thing | None:
        """Return what an expression names; None for what is none of the known kinds."""
        kind = self.kind(node)
        key = self.key(node)
        return None if kind is None or key is None else Thing(kind, key)

    def key(self, node: ast.AST | None) -> str | None:
        """Return a text that is the same for expressions that name one object."""
        if isinstance(node, ast.Name):
            alias = self.script.definition(node)
            if isinstance(alias, ast.Name | ast.Attribute):
                return self.key(alias)
            home = self.script.home(node)
            return f"{node.id}@{_line(home)}"
        if isinstance(node, ast.Attribute):
            if is_self(node.value):
                holder = self._oldest(self.script.class_of(node))
                return f"self.{node.attr}@{_line(holder)}"
            above = self.key(node.value)
            return None if above is None else f"{above}.{node.attr}"
        if isinstance(node, ast.Subscript):
            above = self.key(node.value)
            return None if above is None else f"{above}[{ast.unparse(node.slice)}]"
        if isinstance(node, ast.Call):
            return f"call@{node.lineno}:{node.col_offset}"
        return None

    def _oldest(self, holder: ast.ClassDef | None) -> ast.ClassDef | None:
        """Return the first base of a class in this script: one object for all of them."""
        for _ in range(_DEEPEST):
            bases = [] if holder is None else map(self._class_named, holder.bases)
            base = next((each for each in bases if each is not None), None)
            if base is None or base is holder:
                break
            holder = base
        return holder

    def kind(self, node: ast.AST | None, depth: int = 0) -> Kind | None:
        """Return the kind of object that an expression is; None where it is not known."""
        if node is None or depth > _DEEPEST:
            return None
        match node:
            case ast.Call():
                return self._kind_of_call(node, depth)
            case ast.Name():
                return self._kind_of_name(node, depth)
            case ast.Attribute():
                return self._kind_of_attribute(node, depth)
            case ast.Subscript():
                return self._kind_of_element(node.value, depth)
            case ast.IfExp():
                return self._first_kind([node.body, node.orelse], depth)
            case ast.BoolOp():
                return self._first_kind(node.values, depth)
            case _:
                return None

    def _first_kind(self, nodes: Sequence[ast.expr], depth: int) -> Kind | None:
        kinds = (self.kind(node, depth + 1) for node in nodes)
        return next((kind for kind in kinds if kind is not None), None)

    def _kind_of_element(self, container: ast.expr, depth: int) -> Kind | None:
        """Return the kind of what stands in a list or dictionary."""
        container = _gone_through(container)
        value = self.script.definition(container) or container
        elements: list[ast.expr | None] = []
        if isinstance(value, ast.List | ast.Tuple):
            elements = [*value.elts]
        elif isinstance(value, ast.Dict):
            elements = [*value.values]
        elif isinstance(value, ast.ListComp):
            elements = [value.elt]
        for element in elements:
            kind = self.kind(element, depth + 1)
            if kind is not None:
                return kind
        name = _last_name(container)
        return None if name is None else self._kind_by_name(name.removesuffix("s"))

    # -- calls -------------------------------------------------------------------------

    def _kind_of_call(self, call: ast.Call, depth: int) -> Kind | None:
        name = self.script.called(call)
        if name is not None:
            return _kind_of_class(name)
        function = call.func
        if isinstance(function, ast.Attribute):
            if function.attr in _SAME_OBJECT:
                return self.kind(function.value, depth + 1)
            if function.attr in ("prepare", "setup", "setup_dataloaders") and call.args:
                return self.kind(call.args[0], depth + 1)
            if function.attr == "from_pretrained":
                return Kind.MODEL
        definition = self.script_class(call)
        if definition is not None:
            return self._kind_of_own_class(definition, depth)
        helper = self.function_of(call)
        return None if helper is None else self._kind_returned(helper, None, depth)

    def script_class(self, call: ast.Call) -> ast.ClassDef | None:
        """Return the class of this script whose object a call makes."""
        if not isinstance(call.func, ast.Name):
            return None
        home = self.script.home(call.func)
        return self._defined(home, call.func.id, ast.ClassDef)

    def _defined(
        self, home: ast.AST | None, name: str, *kinds: type[Node]
    ) -> Node | None:
        """Return the class or function that a name of a scope is defined as."""
        if home is None:
            return None
        for binding in self.script.bindings(home).get(name, ()):
            if isinstance(binding.statement, kinds):
                return binding.statement
        return None

    def _kind_of_own_class(self, definition: ast.ClassDef, depth: int) -> Kind | None:
        for base in definition.bases:
            name = self.script.qualified(base) or ast.unparse(base)
            if _MODULE_BASES.match(name):
                return Kind.MODEL
            for pattern, kind in _BASES:
                if pattern.match(name):
                    return kind
            parent = self._class_named(base)
            if parent is not None and depth < _DEEPEST and parent is not definition:
                kind_of_parent = self._kind_of_own_class(parent, depth + 1)
                if kind_of_parent is not None:
                    return kind_of_parent
        return None

    def _class_named(self, node: ast.AST) -> ast.ClassDef | None:
        if not isinstance(node, ast.Name):
            return None
        return self._defined(self.script.home(node), node.id, ast.ClassDef)

    def _kind_returned(
        self, function: Function, element: int | None, depth: int
    ) -> Kind | None:
        """Return the kind of what a function of this script returns."""
        for statement in self.script.nodes(ast.Return):
            if self.script.scope(statement) is not function:
                continue
            value: ast.expr | None = statement.value
            if element is not None and isinstance(value, ast.Tuple):
                value = value.elts[element] if element < len(value.elts) else None
            kind = self.kind(value, depth + 1)
            if kind is not None:
                return kind
        return None

    def function_of(self, call: ast.Call) -> Function | None:
        """Return the function of this script that a call calls."""
        if call not in self._functions:
            self._functions[call] = self._function_of(call)
        return self._functions[call]

    def _function_of(self, call: ast.Call) -> Function | None:
        function = call.func
        if isinstance(function, ast.Name):
            home = self.script.home(function)
            defined = self._defined(home, function.id, ast.FunctionDef)
            return defined or self._called_object(function)
        if not isinstance(function, ast.Attribute):
            return None
        if is_self(function.value):
            method = self.method(self.script.class_of(call), function.attr)
        else:
            holder = self.object_class(function.value)
            method = self.method(holder, function.attr)
        return method or self._called_object(function)

    def _called_object(self, node: ast.expr) -> Function | None:
        """Return ``__call__`` of the object that a name holds."""
        if isinstance(node, ast.Name) and is_self(node):
            return None
        return self.method(self.object_class(node), "__call__")

    def object_class(self, node: ast.expr, depth: int = 0) -> ast.ClassDef | None:
        """Return the class of this script that an object is of, also where a caller made it."""
        if isinstance(node, ast.Call):
            return self._made_class(node, depth)
        if depth > _DEEPEST or not isinstance(node, ast.Name | ast.Attribute):
            return None
        definition = self.script.definition(node)
        if definition is not None and definition is not node:
            return self.object_class(definition, depth + 1)
        values = self._values(node)
        classes = {self.object_class(value, depth + 1) for value in values}
        return classes.pop() if len(classes) == 1 else None

    def _made_class(self, call: ast.Call, depth: int) -> ast.ClassDef | None:
        """Return the class of what a call returns: made, moved, or built by a function."""
        definition = self.script_class(call)
        if definition is not None or depth > _DEEPEST:
            return definition
        function = call.func
        if isinstance(function, ast.Attribute) and function.attr in _SAME_OBJECT:
            return self.object_class(function.value, depth + 1)
        if not isinstance(function, ast.Name):
            return None
        builder = self._defined(
            self.script.home(function), function.id, ast.FunctionDef
        )
        values = [] if builder is None else self.returned(builder)
        classes = {self.object_class(value, depth + 1) for value in values}
        return classes.pop() if len(classes) == 1 else None

    def returned(self, function: Function) -> list[ast.expr]:
        """Return the expressions that a function returns."""
        return [
            each.value
            for each in self.script.nodes(ast.Return)
            if each.value is not None and self.script.scope(each) is function
        ]

    def _values(self, node: ast.Name | ast.Attribute) -> list[ast.expr]:
        """Return what a name may hold, ``None`` left out; parameters by their callers."""
        values: list[ast.expr] = []
        for home, binding in self._bindings_of(node):
            if isinstance(binding.statement, ast.arg):
                values += self._passed(home, binding.statement.arg)
            elif binding.element is not None or binding.is_loop:
                return []
            elif binding.value is not None:
                values.append(binding.value)
        return [each for each in values if each is not node and not _is_none(each)]

    def _passed(self, function: ast.AST, parameter: str) -> list[ast.expr]:
        """Return what the callers that are noted so far pass for a parameter."""
        calls = (self._callers or {}).get(function, ())
        passed = [argument_for(function, parameter, call) for call in calls]
        return [each for each in passed if each is not None]

    def _bindings_of(
        self, node: ast.Name | ast.Attribute
    ) -> list[tuple[ast.AST, Binding]]:
        home: ast.AST | None = None
        name = ""
        if isinstance(node, ast.Name):
            home = self.script.home(node)
            name = node.id
        elif is_self(node.value):
            home = self.script.class_of(node)
            name = node.attr
        if home is None:
            return []
        return [(home, each) for each in self.script.bindings(home).get(name, ())]

    def method(self, holder: ast.ClassDef | None, name: str) -> Function | None:
        """Return a method of a class of this script, also one that it inherits."""
        seen = 0
        while holder is not None and seen < _DEEPEST:
            for statement in holder.body:
                if not isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
                    continue
                if statement.name == name:
                    return statement
            bases = [self._class_named(base) for base in holder.bases]
            holder = next((base for base in bases if base is not None), None)
            seen += 1
        return None

    # -- names -------------------------------------------------------------------------

    def _kind_of_name(self, node: ast.Name, depth: int) -> Kind | None:
        home = self.script.home(node)
        if home is None:
            return self._kind_by_name(node.id)
        return self._kind_at(home, node.id, depth)

    def _kind_of_attribute(self, node: ast.Attribute, depth: int) -> Kind | None:
        if is_self(node.value):
            holder = self.script.class_of(node)
            if holder is not None:
                return self._kind_at(holder, node.attr, depth)
        if self.script.qualified(node) is not None:
            return None
        return self._kind_by_name(node.attr)

    def _kind_at(self, home: ast.AST, name: str, depth: int) -> Kind | None:
        key = (id(home), name)
        if key in self._kinds:
            return self._kinds[key]
        if key in self._open:
            return None
        self._open.add(key)
        kind = self._kind_bound(home, name, depth)
        self._open.discard(key)
        self._kinds[key] = kind
        return kind

    def _kind_bound(self, home: ast.AST, name: str, depth: int) -> Kind | None:
        is_plain = False
        for binding in self.script.bindings(home).get(name, ()):
            kind = self._kind_of_binding(home, binding, depth)
            if kind is not None:
                return kind
            is_plain = is_plain or _is_plain(binding)
        return None if is_plain else self._kind_by_name(name)

    def _kind_of_binding(
        self, home: ast.AST, binding: Binding, depth: int
    ) -> Kind | None:
        if isinstance(binding.statement, ast.arg):
            return self._kind_of_parameter(home, binding.statement, depth)
        if binding.value is None:
            return None
        if binding.is_loop:
            return self._kind_in_loop(binding.value, binding.element, depth)
        if binding.element is not None:
            return self._kind_of_part(binding.value, binding.element, depth)
        return self.kind(binding.value, depth + 1)

    def _kind_in_loop(
        self, iterated: ast.expr, element: int | None, depth: int
    ) -> Kind | None:
        """Return the kind of what a loop goes through: ``for name, o in d.items()``."""
        if element is None:
            return self._kind_of_element(iterated, depth)
        if not isinstance(iterated, ast.Call):
            return None
        container = _container_of(iterated, element)
        return None if container is None else self._kind_of_element(container, depth)

    def _kind_of_part(self, value: ast.expr, element: int, depth: int) -> Kind | None:
        """Return the kind of one of several values that a call returns."""
        if not isinstance(value, ast.Call):
            return None
        function = value.func
        if isinstance(function, ast.Attribute) and function.attr in (
            "prepare",
            "setup",
            "setup_dataloaders",
        ):
            arguments = value.args
            return (
                self.kind(arguments[element], depth + 1)
                if element < len(arguments)
                else None
            )
        helper = self.function_of(value)
        return None if helper is None else self._kind_returned(helper, element, depth)

    def _kind_of_parameter(
        self, function: ast.AST, parameter: ast.arg, depth: int
    ) -> Kind | None:
        if parameter.annotation is not None:
            name = self.script.qualified(parameter.annotation)
            kind = None if name is None else _kind_of_class(name)
            if kind is not None:
                return kind
        for call in self.callers().get(function, ()):
            kind = self.kind(argument_for(function, parameter.arg, call), depth + 1)
            if kind is not None:
                return kind
        return None

    def callers(self) -> dict[ast.AST, list[ast.Call]]:
        """Return the calls of each function of this script."""
        if self._callers is None:
            self._callers = {}
            waiting = self._note_callers(self.script.nodes(ast.Call))
            # what a caller passes may be the object of a method that is called
            self._functions = {
                call: function
                for call, function in self._functions.items()
                if function is not None
            }
            self._note_callers(waiting)
        return self._callers

    def _note_callers(self, calls: list[ast.Call]) -> list[ast.Call]:
        """Note the functions of calls, and return the calls whose function is not known."""
        callers = self._callers if self._callers is not None else {}
        unknown = []
        for call in calls:
            function = self._called_function(call)
            if function is None:
                unknown.append(call)
            else:
                callers.setdefault(function, []).append(call)
        return unknown

    def followed(self) -> set[Function]:
        """Return the functions that a walk through the script reaches by a call."""
        if self._followed is None:
            self.callers()
            several = map(self.function_of, self.script.nodes(ast.Call))
            self._followed = {each for each in several if each is not None}
        return self._followed

    def _called_function(self, call: ast.Call) -> Function | None:
        """Return the function that a call runs, also as ``__init__`` or ``forward``."""
        definition = self.script_class(call)
        if definition is not None:
            return self.method(definition, "__init__")
        function = self.function_of(call)
        if function is not None:
            return function
        if isinstance(call.func, ast.Name) and is_self(call.func):
            return self.method(self.script.class_of(call), "forward")
        return self.method(self.object_class(call.func), "forward")

    def _kind_by_name(self, name: str) -> Kind | None:
        if _SCALER_NAME.match(name):
            return Kind.SCALER if self._scales_gradients(name) else None
        for kind, pattern in _NAMES:
            if pattern.match(name):
                return kind
        return Kind.MODEL if self._has_parameters(name) else None

    def _has_parameters(self, name: str) -> bool:
        """Return True where a name is asked for its parameters, as models are."""
        calls = self.script.method_calls("parameters", "named_parameters")
        return any(
            isinstance(call.func, ast.Attribute) and _last_name(call.func.value) == name
            for call in calls
        )

    def _scales_gradients(self, name: str) -> bool:
        """Return True where a name is used as a gradient scaler is, not as one of data."""
        calls = self.script.method_calls("scale", "unscale_", "update")
        return any(
            isinstance(call.func, ast.Attribute) and _last_name(call.func.value) == name
            for call in calls
        )


def argument_for(function: ast.AST, parameter: str, call: ast.Call) -> ast.expr | None:
    """Return the argument that a call passes for a parameter; None where it passes none."""
    if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
        return None
    for keyword in call.keywords:
        if keyword.arg == parameter:
            return keyword.value
    names = _passed_by_place(function.args)
    if parameter not in names:
        return None
    return _at_place(call, names.index(parameter))


def _passed_by_place(arguments: ast.arguments) -> list[str]:
    """Return the parameters that a call may pass without a name, ``self`` left out."""
    names = [each.arg for each in (*arguments.posonlyargs, *arguments.args)]
    return names[1:] if names and names[0] in ("self", "cls") else names


def _at_place(call: ast.Call, place: int) -> ast.expr | None:
    """Return an argument by its place; None behind ``*args``."""
    upto = call.args[: place + 1]
    is_certain = not any(isinstance(each, ast.Starred) for each in upto)
    return upto[place] if is_certain and place < len(upto) else None


def _kind_of_class(name: str) -> Kind | None:
    kind = _CLASSES.get(name)
    if kind is not None:
        return kind
    for prefix, kind_of_prefix in _PREFIXES:
        if name.startswith(prefix):
            return kind_of_prefix
    match = _NN.match(name)
    if match is None:
        return _kind_by_last_part(name)
    return Kind.LOSS if _LOSS_CLASS.match(match[1]) else Kind.MODEL


def _kind_by_last_part(name: str) -> Kind | None:
    """Return the kind of a class of another file by what it is called."""
    last = name.rpartition(".")[2]
    if re.search(r"(?:^|[a-z])Accelerator$|^Fabric$", last):
        return Kind.MANAGER
    if re.search(r"^get_\w*schedule\w*$|Scheduler$|LR$", last):
        return Kind.SCHEDULER
    if re.search(r"Loss$", last):
        return Kind.LOSS
    return None


def _is_plain(binding: Binding) -> bool:
    """Return True for a value that is certainly none of the kinds: a number, parsed options."""
    value = binding.value
    if isinstance(value, ast.Constant):
        return value.value is not None
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute):
        return value.func.attr in ("parse_args", "parse", "parse_known_args")
    return isinstance(value, ast.Dict | ast.JoinedStr | ast.Compare | ast.BinOp)


def _container_of(iterated: ast.Call, element: int) -> ast.expr | None:
    """Return what the ``element``-th name of a loop goes through: ``d.items()``, ``zip``."""
    function = iterated.func
    name = _last_name(function)
    if name == "items" and isinstance(function, ast.Attribute):
        return function.value if element == 1 else None
    if name == "enumerate":
        return iterated.args[0] if iterated.args and element == 1 else None
    is_zip = name == "zip" and element < len(iterated.args)
    return iterated.args[element] if is_zip else None


def _gone_through(node: ast.expr) -> ast.expr:
    """Return the container of ``d.values()``, ``reversed(x)`` and ``list(x)``."""
    if not isinstance(node, ast.Call):
        return node
    function = node.func
    if isinstance(function, ast.Attribute):
        return function.value if function.attr == "values" else node
    is_same = _last_name(function) in ("reversed", "list", "tuple", "sorted")
    return node.args[0] if is_same and node.args else node


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _last_name(node: ast.AST) -> str | None:
    if isinstance(node, ast.Name):
        return node.id
    return node.attr if isinstance(node, ast.Attribute) else None


def _line(home: ast.AST | None) -> int:
    return 0 if home is None else getattr(home, "lineno", 0)
