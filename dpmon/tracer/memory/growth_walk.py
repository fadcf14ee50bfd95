"""Finds what keeps more and more memory alive: containers and autograd graphs of the script, by name and line.

A reader requests it. Twice, some steps apart, it looks at the variables of the script's frames on the training thread
and at the globals of its modules, and records what grew. It looks between two steps, for at most SLICE_NS each time.
In between it keeps names, sizes, code and weak references, so that no object of the script lives longer. It runs no
code of the script: types come from `type`, contents from the methods of builtin classes.

A graph is followed from each operation to the oldest one before it, by autograd's sequence numbers. A running sum of
losses thus leads from step to step, without the operations inside the steps.
"""

from __future__ import annotations

import re
import sys
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from dis import get_instructions
from functools import partial
from gc import get_referents
from inspect import CO_OPTIMIZED
from itertools import islice
from time import monotonic_ns, thread_time_ns
from types import CodeType, FrameType, FunctionType, GetSetDescriptorType, MethodType, ModuleType
from typing import Any

import torch

from dpmon.record.shared_names import is_script_file, shorten_name
from dpmon.span_ring import HeaderWord
from dpmon.tracer.core.hidden_frames import iter_callers
from dpmon.tracer.core.identity_table import IdentityTable
from dpmon.tracer.core.module_tables import class_name
from dpmon.tracer.core.session import Session, set_eval_frame
from dpmon.tracer.memory.allocator import end_allocation_history, start_allocation_history
from dpmon.tracer.steps.span_recorder import SpanRecorder

SLICE_NS, CHECK_NS, NEVER = 2_000_000, 1_000_000_000, 1 << 62
"""Longest time between two steps for which this looks; interval between checks for a request."""
MIN_GAP_NS, MIN_GAP_POLLS = 1_000_000_000, 16
"""Least time and number of steps between the two looks."""
MAX_OBJECTS, MAX_DEPTH, ALL_ITEMS, NEWEST_ITEMS, MAX_NAMES = 100_000, 6, 64, 4, 5
"""Of a container with more than ALL_ITEMS, the newest ones are looked at."""
MIN_BYTES = 1 << 16
"""A container is left out if its new items are known to hold less than this."""
_is_subclass, _own_mro = type.__subclasscheck__, type.__dict__["__mro__"].__get__
_own_namespace = type.__dict__["__dict__"].__get__
_Tensor, _Node = torch._C.TensorBase, torch._C._FunctionBase
_grad_fn = _Tensor.grad_fn.__get__
_CONTAINERS: tuple[Any, ...] = (list, dict, tuple, deque, set, frozenset)
_ATOMS = (int, float, complex, bool, str, bytes, type(None), type, ModuleType, CodeType, torch.dtype, torch.device)
_ATOM_BYTES = dict.fromkeys(map(id, _ATOMS), 64)
"""Roughly, by the id of a class."""
_TABLES = ("_parameters", "_buffers", "_modules")
_ACCESS = re.compile("(LOAD|STORE)_(?:FAST|NAME|GLOBAL|DEREF|ATTR|METHOD)")
_ADDING = ("append", "appendleft", "extend", "extendleft", "add", "update", "setdefault", "insert")
_Key = tuple[CodeType | str, str]
"""A scope, which is the code of a frame or the name of a module, and a path that begins with a variable's name."""


class _SliceOver(Exception):
    """The time between these two steps is used up."""


class GrowthWalker:
    """The looks of one process at what its script keeps alive."""

    def __init__(self, session: Session, recorder: SpanRecorder) -> None:
        self._session = session
        self._recorder = recorder
        self.reset()

    def reset(self) -> None:
        """Set the initial state, also in a forked child."""
        self._handled_request = self._next_ns = 0
        self._work: Iterator[None] | None = None

    def poll(self, now: int) -> int:
        """Look for a while if a reader has requested it, between two steps. Return when to call again (ns)."""
        if now < self._next_ns:
            return self._next_ns
        request = self._recorder.words[HeaderWord.WALK]
        self._next_ns = now + CHECK_NS
        if self._work is None and request == self._handled_request:
            return self._next_ns
        self._handled_request = request
        dynamo_callback = set_eval_frame(None)  # else dynamo would try to compile functions that are called below
        try:
            work, self._work = self._work or self._look_twice(), None  # a fault or an interrupt ends it
            with self._session.guard("growth of memory", fatal=False), torch._C.DisableTorchFunction():
                if next(work, work) is not work:
                    self._work, self._next_ns = work, 0
        finally:
            set_eval_frame(dynamo_callback)
        return self._next_ns

    def _look_twice(self) -> Iterator[None]:
        """Look, wait some steps, look again, find the lines, and record. Yields when the next step may begin."""
        no_allocations = start_allocation_history()
        first, end_ns = _Look({}), 0
        while not first.run():
            yield
        end_ns = monotonic_ns() + MIN_GAP_NS
        steps = 0
        while steps < MIN_GAP_POLLS or monotonic_ns() < end_ns:
            steps += 1
            yield
        second = _Look(first.sizes)
        while not second.run():
            yield
        names = second.largest()
        deadline_ns = 0
        for _ in second.iter_code(names):
            if monotonic_ns() > deadline_ns:
                yield
                deadline_ns = monotonic_ns() + SLICE_NS // 2
        allocations: list[dict[str, object]] = []
        if no_allocations is None:
            allocations, no_allocations = end_allocation_history()
        omitted = sorted(first.omitted | second.omitted)
        absent = {} if no_allocations is None else {"allocations": no_allocations}
        self._session.record_event(
            "growth", "last", step=None, steps=steps, names=names, allocations=allocations, omitted=omitted, absent=absent
        )


class _Look:
    """One look, in slices. `before`: the sizes of an earlier look; with them, it describes what has grown."""

    def __init__(self, before: dict[_Key, tuple[int, int]]) -> None:
        self.sizes: dict[_Key, tuple[int, int]] = {}
        """Number of items and 0; of a graph the length (see `_look_at_graph`) and the newest operation's number."""
        self.omitted: set[str] = set()
        self._grown: dict[_Key, dict[str, Any]] = {}
        self._before = before
        self._objects = 0
        self._visited: IdentityTable[bool] = IdentityTable()
        self._codes: dict[CodeType, None] = {}
        """The code of the script, for the search of lines."""
        self._pending: deque[tuple[_Key, weakref.ref[Any] | None, int]] | None = None
        """Key of what is looked at next; the instance, if it is none of a scope's variables; depth."""

    # ---------------------------------------------------------------- where

    def run(self) -> bool:
        """Look for at most SLICE_NS. Return whether the look is complete."""
        self._end_ns, self._end_cpu_ns, self._is_first = monotonic_ns() + SLICE_NS, thread_time_ns() + SLICE_NS, True
        callers = [frame for frame in iter_callers(sys._getframe(1)) if is_script_file(frame.f_code.co_filename)]
        scopes: dict[CodeType | str, Any] = {frame.f_code: self._read_variables(frame) for frame in reversed(callers)}
        if self._pending is None:
            self._codes = dict.fromkeys(code for code in scopes if type(code) is CodeType)
            scopes |= self._find_script_modules([frame.f_globals for frame in callers])
            names = ((scope, name) for scope, variables in scopes.items() for name in variables)
            self._pending = deque((key, None, 0) for key in names if type(key[1]) is str and key[1][:2] != "__")
        while self._pending:
            key, reference, depth = self._pending[0]
            scope, name = key
            self._ids: set[int] = set()
            try:
                if reference is not None:
                    self._look_into(key, reference(), depth)
                elif scope in scopes or scope in sys.modules:
                    variables = scopes[scope] if scope in scopes else sys.modules[scope].__dict__
                    self._look_at(key, variables.get(name), 0)
            except _SliceOver:
                if not self._is_first:
                    return False  # the next slice begins with it
                self.omitted.add(f"parts of {name}: it is too large")
            except RuntimeError:
                self.omitted.add(f"parts of {name}: it changed meanwhile")
            self._pending.popleft()
            self._is_first = False
        return True

    def _read_variables(self, frame: FrameType) -> dict[str, Any]:
        """Return the variables of a frame; empty if that would change a dict that the script has from `locals()`."""
        code = frame.f_code
        if code.co_name.startswith("torch_dynamo_resume_in"):
            self.omitted.add("variables of compiled code")
            return {}
        if code.co_flags & CO_OPTIMIZED and sys.version_info < (3, 13):
            for referent in get_referents(frame):  # the dict comes before the function
                if type(referent) is FunctionType and referent.__code__ is code:
                    break
                if type(referent) is dict and referent:
                    self.omitted.add(f"variables of {code.co_name}: it uses locals()")
                    return {}
            variables = dict(frame.f_locals)
            frame.f_locals.clear()  # else the frame would keep the values
            return variables
        return dict(frame.f_locals)

    def _find_script_modules(self, known: Iterable[dict[str, Any]]) -> dict[str, dict[str, Any]]:
        """Return the globals of the script's modules by name, without those of `known` modules, and note their code."""
        known_ids, found = set(map(id, known)), {}
        for name, module in list(sys.modules.items()):
            if type(module) is ModuleType:
                variables = module.__dict__
                file = variables.get("__file__")
                if type(file) is str and is_script_file(file):
                    for value in list(variables.values()):
                        members = (value, *_own_namespace(value).values()) if type(value) is type else (value,)
                        functions = [member for member in members if type(member) is FunctionType]
                        self._codes |= dict.fromkeys(function.__code__ for function in functions)
                    if id(variables) not in known_ids:
                        found[name] = variables
        return found

    # ---------------------------------------------------------------- what

    def _check_time(self) -> None:
        """Raise _SliceOver if the time is over. Time in which the machine runs other threads does not count."""
        if monotonic_ns() > self._end_ns and thread_time_ns() > self._end_cpu_ns:
            raise _SliceOver

    def _look_at(self, key: _Key, value: Any, depth: int) -> None:
        """Look at a value and, up to MAX_DEPTH, at what it contains."""
        kind = type(value)
        if id(kind) in _ATOM_BYTES or id(value) in self._ids or _is_subclass(type, kind):
            return
        self._check_time()
        self._ids.add(id(value))
        self._objects += 1
        if depth > MAX_DEPTH or self._objects > MAX_OBJECTS:
            self.omitted.add(f"what is nested more than {MAX_DEPTH} deep, or beyond {MAX_OBJECTS:,} objects")
            return
        scope, path = key
        parts: Iterable[tuple[str, Any]] = ()
        base = _container_of(kind)
        if _is_subclass(_Tensor, kind):
            self._look_at_graph(key, value)
        elif base is not None:
            self._look_at_container(key, value, base)
            parts = _items(value, base)
        elif kind is FunctionType:
            cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
            parts = [(f"().{name}", cell.cell_contents) for name, cell in cells if get_referents(cell)]
        elif kind is MethodType:
            parts = [("", value.__self__)]
        elif kind is partial:
            parts = [("", value.func), *((f"(){label}", item) for label, item in _items(value.args, tuple))]
        elif self._visited.get(value) is None and _namespace_of(value) is not None:
            try:
                self._visited.set(value, True)
                self._pending.append((key, weakref.ref(value), depth))
            except TypeError:  # it has no weak references
                self._look_into(key, value, depth)
        elif not self._visited.get(value):
            self.omitted.add("objects of extensions, or with __slots__")
        for label, part in parts:
            self._look_at((scope, f"{path}{label}"), part, depth + 1)

    def _look_into(self, key: _Key, instance: Any, depth: int) -> None:
        """Look at the attributes of an instance."""
        scope, path = key
        for name, value in list(dict.items(_namespace_of(instance) or {})):
            if name == "_modules" and _is_subclass(dict, type(value)):
                for child, module in list(dict.items(value)):
                    self._look_at((scope, f"{path}.{child}"), module, depth)
            elif type(name) is str and name not in _TABLES:
                self._look_at((scope, f"{path}.{name}"), value, depth + 1)

    def _look_at_container(self, key: _Key, container: Any, base: Any) -> None:
        """Note the length of a container, and describe it if it has grown."""
        length = base.__len__(container)
        self.sizes[key] = length, 0
        before, _ = self._before.get(key, (length, 0))
        if length > before:
            items = [item for _, item in _items(container, base)][-NEWEST_ITEMS:]
            facts = [_describe_item(item) for item in items]
            sizes = [facts_of_item[2] for facts_of_item in facts]
            what, device, _, _ = facts[-1]
            new_bytes = None if None in sizes else (length - before) * sum(sizes) // len(sizes)
            has_graph = any(graph for _, _, _, graph in facts)
            if has_graph or new_bytes is None or new_bytes >= MIN_BYTES:
                self._note(key, base.__name__, length, before, items=what, device=device, graphs=has_graph, new_bytes=new_bytes)

    def _look_at_graph(self, key: _Key, tensor: Any) -> None:
        """Note the length of a tensor's graph, and describe it if it also keeps the operations of the earlier look.

        The length is the number of operations on the way to the oldest one. If this way skips many operations, as from
        one step to the one before, another graph joins there.
        """
        node, length, jumps = _grad_fn(tensor), 0, []
        if node is None:
            return
        newest = oldest = _number(node)
        is_cut = False
        while children := _earlier_operations(node):
            number, node = min(children, key=lambda child: child[0])
            if len(children) > 1:
                jumps.append(oldest - number)
            oldest, length = number, length + 1
            try:
                self._check_time()
            except _SliceOver:
                if not self._is_first:
                    raise
                is_cut = True
                break
        self.sizes[key] = length, newest
        before, newest_before = self._before.get(key, (length, newest))
        if newest > newest_before > oldest and (length > before or is_cut):
            count = 1 + sum(jump * 2 >= max(jumps) for jump in jumps)
            self._note(key, "graph", count, before, items="operations", length=length, is_cut=is_cut, graphs=True)

    # ---------------------------------------------------------------- what grew

    def _note(self, key: _Key, kind: str, count: int, before: int, **facts: object) -> None:
        scope, path = key
        function = scope.co_qualname if type(scope) is CodeType and scope.co_flags & CO_OPTIMIZED else None
        name = shorten_name(path.rpartition("().")[2])
        self._grown[key] = {"name": name, "function": function, "type": kind, "count": count, "before": before, **facts}

    def largest(self) -> list[dict[str, Any]]:
        """Return what grew, MAX_NAMES at most: first what keeps graphs, then by the size of the new items."""
        by_name = {(entry["name"], entry["function"]): entry for entry in self._grown.values()}
        entries = sorted(by_name.values(), key=lambda entry: (entry["graphs"], entry.get("new_bytes") or 0))
        return entries[: -MAX_NAMES - 1 : -1]

    def iter_code(self, names: list[dict[str, Any]]) -> Iterator[None]:
        """Set the file and line of each of `names` if only one line makes it grow. Yields after each instruction."""
        places: dict[int, set[tuple[str, int]]] = {}
        codes = [*self._codes]
        for code in codes:
            codes += [constant for constant in code.co_consts if type(constant) is CodeType]
            words = {*code.co_names, *code.co_varnames, *code.co_freevars, *code.co_cellvars}
            for index, entry in enumerate(names):
                name = re.sub(r"\[.*?\]", "", entry["name"]).rpartition(".")[2]
                function = entry["function"]
                is_elsewhere = name == entry["name"] and function is not None and not code.co_qualname.startswith(function)
                if name in words and not is_elsewhere:
                    for line in _growing_lines(code, name):
                        if line is not None:
                            places.setdefault(index, set()).add((code.co_filename, line))
                        yield
            yield
        for index, found in places.items():
            if len(found) == 1:
                ((file, line),) = found
                names[index] |= {"file": shorten_name(file, 1000), "line": line}


def _container_of(kind: type) -> Any:
    """Return the builtin class of containers from which a class derives; None for others."""
    return next((base for base in _CONTAINERS if _is_subclass(base, kind)), None)


def _items(container: Any, base: Any) -> list[tuple[str, Any]]:
    """Return a label and the item, for each item of a container, or for the newest ones of a large one."""
    length = base.__len__(container)
    first = length - NEWEST_ITEMS if length > ALL_ITEMS else 0
    if base is dict:
        pairs = list(islice(reversed(dict.items(container)), length - first))[::-1]
        labels = [key if type(key) is str and key.isidentifier() else index for index, (key, _) in enumerate(pairs, first)]
        return [(f"[{label!r}]", item) for label, (_, item) in zip(labels, pairs, strict=True)]
    if base is set or base is frozenset:
        return [("[]", item) for item in islice(base.__iter__(container), length - first)]
    return [(f"[{index}]", base.__getitem__(container, index)) for index in range(first, length)]


def _namespace_of(value: Any) -> Any:
    """Return the `__dict__` of an instance, unless its class computes it; None if it has none."""
    for base in _own_mro(type(value)):
        descriptor = _own_namespace(base).get("__dict__")
        if descriptor is not None:
            namespace = descriptor.__get__(value) if type(descriptor) is GetSetDescriptorType else None
            return namespace if _is_subclass(dict, type(namespace)) else None
    return None


def _describe_item(item: Any, depth: int = 2) -> tuple[str, str | None, int | None, bool]:
    """Return the class of an item, the device of its tensors, its bytes (None: unknown), and if it keeps a graph."""
    kind = type(item)
    if _is_subclass(_Tensor, kind):
        device, size = str(_Tensor.device.__get__(item)), _Tensor.untyped_storage(item).nbytes()
        return "tensor", device, size, _grad_fn(item) is not None
    base = _container_of(kind)
    if kind is str or kind is bytes:
        return kind.__name__, None, len(item), False
    if base is None or not depth:
        is_array = kind is getattr(sys.modules.get("numpy"), "ndarray", None)
        return class_name(item), None, item.nbytes if is_array else _ATOM_BYTES.get(id(kind)), False
    inner = [_describe_item(part, depth - 1) for _, part in _items(item, base)]
    sizes = [size for _, _, size, _ in inner]
    device = next((device for _, device, _, _ in inner if device is not None), None)
    return base.__name__, device, None if None in sizes else sum(sizes), any(graph for _, _, _, graph in inner)


def _number(node: Any) -> int:
    """Return the sequence number of an operation, which is larger than those of earlier ones on the same thread."""
    return int(_Node._sequence_nr(node) if _is_subclass(_Node, type(node)) else node._sequence_nr())


def _earlier_operations(node: Any) -> list[tuple[int, Any]]:
    """Return the operations whose results an operation used, with their numbers; none for parameters and inputs."""
    is_own = _is_subclass(_Node, type(node))
    children = _Node.next_functions.__get__(node) if is_own else node.next_functions
    numbered = [(_number(child), child) for child, _ in children if child is not None]
    return [(number, child) for number, child in numbered if number < 1 << 63]


def _growing_lines(code: CodeType, name: str) -> Iterator[int | None]:
    """Yield for each instruction the line in which it adds to the variable or attribute `name`; None for others."""
    start: tuple[int | None, int | None] = None, None
    for instruction in get_instructions(code):
        positions, line = instruction.positions, None
        here = (None, None) if positions is None else (positions.lineno, positions.col_offset)
        argval = instruction.argval
        words = argval if type(argval) is tuple else (argval,)
        for access, word in zip(_ACCESS.findall(instruction.opname), words, strict=False):
            if word == name and access == "LOAD":
                start = here
            elif word == name and (start[0] or 0) >= (here[0] or 1):  # its new value comes from the old one
                line, start = here[0], (None, None)
            elif word in _ADDING and start == here:
                line = here[0]
        yield here[0] if instruction.opname == "STORE_SUBSCR" and start == here else line
