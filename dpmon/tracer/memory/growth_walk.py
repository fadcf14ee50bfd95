"""Finds what keeps more and more memory alive: containers and autograd graphs of the script, by name and line.

A reader requests it. Twice, some steps apart, it looks at the variables of the script's frames on the training thread
and at the globals of its modules, and records what grew. It looks between two steps, for about SLICE_NS each time. In
between it keeps names, sizes, code and weak references, so that no object of the script lives longer. It runs no code
of the script: types come from `type`, contents from the methods of builtin classes.

A graph is followed from each operation to the oldest one before it, by autograd's sequence numbers. A running sum of
losses thus leads from step to step, without the operations inside the steps.
"""

from __future__ import annotations

import os
import re
import sys
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dis import get_instructions
from inspect import CO_OPTIMIZED
from itertools import islice
from sys import getrefcount
from time import monotonic_ns
from types import CodeType, FrameType, FunctionType, GetSetDescriptorType, MethodType, ModuleType
from typing import Any

import torch

from dpmon.record.shared_names import is_script_file, shorten_name
from dpmon.span_ring import HeaderWord
from dpmon.tracer.core.hidden_frames import iter_callers
from dpmon.tracer.core.identity_table import IdentityTable
from dpmon.tracer.core.module_tables import class_name
from dpmon.tracer.core.session import Session
from dpmon.tracer.memory.allocator import end_allocation_history, start_allocation_history
from dpmon.tracer.steps.span_recorder import SpanRecorder

SLICE_NS, CHECK_NS = 2_000_000, 1_000_000_000
"""Time for which it looks between two steps, after which it finishes one variable; interval of checks for a request."""
MIN_GAP_NS, MIN_GAP_STEPS = 1_000_000_000, 16
"""Least time and number of steps between the two looks."""
MAX_OBJECTS, MAX_AT_ONCE, MAX_DEPTH, MAX_NAMES = 100_000, 500, 6, 5
"""Most objects in one look; most objects and operations of graphs in one variable or instance with its containers; most
containers inside each other; most names in a record."""
ALL_ITEMS, NEWEST_ITEMS = 64, 4
"""Of a container with more than ALL_ITEMS, the newest ones are looked at."""
MIN_BYTES = 1 << 16
"""A container is not named if its new items are known to hold less than this."""
_is_subclass, _own_mro = type.__subclasscheck__, type.__dict__["__mro__"].__get__
_own_namespace = type.__dict__["__dict__"].__get__
_Tensor: Any = torch._C.TensorBase
_Node: Any = torch._C._FunctionBase
_grad_fn = _Tensor.grad_fn.__get__
_CONTAINERS: tuple[Any, ...] = (list, dict, tuple, deque)
_ATOMS = (
    *(int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device),
    *(ModuleType, CodeType, FunctionType, weakref.ref, set),
)
"""Classes of what is not looked into."""
_ATOM_BYTES = dict.fromkeys(map(id, _ATOMS), 64)
"""By the id of a class, because its metaclass may define a hash."""
_ACCESS = re.compile("(LOAD|STORE)_(?:FAST|NAME|GLOBAL|DEREF|ATTR|METHOD)")
_ADDING = ("append", "appendleft", "extend", "extendleft", "add", "update", "setdefault", "insert")
_LAST_NAME = re.compile(r"(\w+)(?:\['\w+'\]|\[\d+\])*$")
"""The last name in a path."""
_REFERENCES_OF_FRAME = 2
"""To the dict of a frame's variables, while it is an argument."""
_Key = tuple[CodeType | str, str]
"""A scope, which is the code of a frame or the name of a module, and a path that begins with a variable's name."""


class GrowthWalker:
    """Looks at what the script of one process keeps alive."""

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
        if self._work is not None or request != self._handled_request:
            self._handled_request = request
            work, self._work = self._work or self._look_twice(), None  # a fault or an interrupt ends it
            with self._session.hidden("growth of memory"):
                if next(work, work) is None:
                    self._work, self._next_ns = work, 0
        return self._next_ns

    def _look_twice(self) -> Iterator[None]:
        """Look, wait some steps, look again, find the lines, and record. Yields when the next step may begin."""
        no_history, steps = start_allocation_history(), 0
        allocations: list[dict[str, object]] = []
        try:
            first = _Look({})
            while not first.run():
                yield
            end_ns = monotonic_ns() + MIN_GAP_NS
            while steps < MIN_GAP_STEPS or monotonic_ns() < end_ns:
                steps += 1
                yield
            second = _Look(first.sizes)
            while not second.run():
                yield
            names = second.largest()
            for entry in names:
                yield
                entry["place"] = second.find_place(entry)
        except Exception:
            if no_history is None:
                end_allocation_history()
            raise
        if no_history is None:
            allocations, no_history = end_allocation_history()
        reasons = {"allocations": no_history} if no_history is not None else {}
        facts = {"steps": steps, "names": names, "allocations": allocations}
        omitted = sorted(first.omitted | second.omitted)
        self._session.record_event("growth", "last", step=None, **facts, omitted=omitted, absent=reasons)


class _Look:
    """One look, in slices. `before`: the sizes of an earlier look; with them, it describes what has grown."""

    def __init__(self, before: dict[_Key, tuple[int, int]]) -> None:
        self.sizes: dict[_Key, tuple[int, int]] = {}
        """Number of items and 0; of a graph its length and the number of its newest operation."""
        self.omitted: set[str] = set()
        self._grown: dict[tuple[str, str | None], dict[str, Any]] = {}
        """By name and function; several frames may share their variables."""
        self._before = before
        self._objects = 0
        self._visited: IdentityTable[bool] = IdentityTable()
        self._codes: list[CodeType] = []
        """The code of the script's frames."""
        self._modules = [*sys.modules]
        """Names of the modules that may be the script's."""
        self._pending: deque[tuple[_Key, weakref.ref[Any] | None]] = deque()
        """What to look at next: its key; and the instance, unless it is the variable itself."""

    # ---------------------------------------------------------------- where

    def run(self) -> bool:
        """Look for about SLICE_NS. Return whether the look is complete."""
        frames = [frame for frame in iter_callers(sys._getframe(1)) if is_script_file(frame.f_code.co_filename)]
        scopes: dict[Any, dict[str, Any]] = {frame.f_code: self._read_variables(frame) for frame in reversed(frames)}
        if not self._codes:
            self._codes = list(scopes)
            for scope, variables in scopes.items():
                self._add(scope, variables)
        end_ns = monotonic_ns() + SLICE_NS  # from here on, so that each slice gets further
        while self._modules and monotonic_ns() < end_ns:
            self._add_module(self._modules.pop(), {id(frame.f_globals) for frame in frames})
        while self._pending and monotonic_ns() < end_ns:
            (scope, path), reference = self._pending.popleft()
            self._ids: set[int] = set()
            self._room = MAX_AT_ONCE
            try:
                if reference is not None:
                    self._look_into((scope, path), reference())
                else:
                    variables = scopes.get(scope) or getattr(sys.modules.get(str(scope)), "__dict__", {})
                    self._look_at((scope, path), variables.get(path), 0)
            except RuntimeError:
                self.omitted.add(f"parts of {path}, which changed meanwhile")
        return not self._modules and not self._pending

    def _read_variables(self, frame: FrameType) -> dict[str, Any]:
        """Return the variables of a frame; none if that would change a dict that the script has from `locals()`."""
        code = frame.f_code
        if not code.co_flags & CO_OPTIMIZED or sys.version_info >= (3, 13):
            return dict(frame.f_locals)
        if "locals" in code.co_names:
            self.omitted.add(f"variables of {code.co_name}, which uses locals()")
            return {}
        variables = dict(frame.f_locals)
        if getrefcount(frame.f_locals) == _REFERENCES_OF_FRAME:
            held = frame.f_locals  # the frame would keep the values
            for name in (*code.co_varnames, *code.co_cellvars, *code.co_freevars):
                held.pop(name, None)
        return variables

    def _add(self, scope: CodeType | str, variables: dict[str, Any]) -> None:
        """Look at these variables later."""
        names = [name for name in variables if type(name) is str and name[:2] != "__"]
        self._pending.extend(((scope, name), None) for name in names)

    def _add_module(self, name: str, known_ids: set[int]) -> None:
        """Look later at the globals of a module of the script, unless their id is known."""
        module = sys.modules.get(name)
        file = module.__dict__.get("__file__") if type(module) is ModuleType else None
        if type(file) is not str or not is_script_file(file) or name.startswith("dpmon."):
            return
        if id(module.__dict__) not in known_ids:
            self._add(name, module.__dict__)

    # ---------------------------------------------------------------- what

    def _look_at(self, key: _Key, value: Any, depth: int) -> None:
        """Look at a value and at what it contains; at the attributes of instances later."""
        kind = type(value)
        if id(kind) in _ATOM_BYTES or id(value) in self._ids or _is_subclass(type, kind):
            return
        self._ids.add(id(value))
        self._objects += 1
        self._room -= 1
        if depth > MAX_DEPTH or self._room < 0 or self._objects > MAX_OBJECTS:
            self.omitted.add(f"objects nested more than {MAX_DEPTH} deep, or too many")
            return
        (scope, path), base = key, _container_of(kind)
        if _is_subclass(_Tensor, kind):
            self._look_at_graph(key, value)
        elif base is not None:
            self._look_at_container(key, value, base)
            for label, item in _items(value, base):
                self._look_at((scope, f"{path}{label}"), item, depth + 1)
        elif kind is MethodType:
            self._look_at(key, value.__self__, depth + 1)
        elif _namespace_of(value) is None:
            self.omitted.add("objects of extensions, or with __slots__")
        elif not self._visited.get(value):
            with suppress(TypeError):  # it has no weak references
                self._visited.set(value, True)
                self._pending.append((key, weakref.ref(value)))

    def _look_into(self, key: _Key, instance: Any) -> None:
        """Look at the attributes of an instance."""
        (scope, path), namespace = key, _namespace_of(instance)
        for name, value in [] if namespace is None else list(dict.items(namespace)):
            if type(name) is str:
                self._look_at((scope, f"{path}.{name}"), value, 0)

    def _look_at_container(self, key: _Key, container: Any, base: Any) -> None:
        """Note the length of a container. Describe the container if it has grown and its newest item may be large."""
        length = base.__len__(container)
        self.sizes[key] = length, 0
        before, _ = self._before.get(key, (length, 0))
        if length <= before:
            return
        _, newest = _items(container, base)[-1]
        items, device, graphs, item_bytes = class_name(newest), None, False, _ATOM_BYTES.get(id(type(newest)))
        if _is_subclass(_Tensor, type(newest)):
            items, device, graphs = "tensor", str(_Tensor.device.__get__(newest)), _grad_fn(newest) is not None
            item_bytes = _Tensor.untyped_storage(newest).nbytes()
        new_bytes = None if item_bytes is None else (length - before) * item_bytes
        if graphs or new_bytes is None or new_bytes >= MIN_BYTES:
            described = {"items": items, "device": device, "graphs": graphs, "new_bytes": new_bytes}
            self._note(key, type=base.__name__, count=length, before=before, **described)

    def _look_at_graph(self, key: _Key, tensor: Any) -> None:
        """Note the length of a tensor's graph. Describe the graph if it also holds operations of the earlier look.

        The length is the number of operations on the way to the oldest one. Where the way skips many operations, as
        from one step to the step before, another graph has been added.
        """
        node, length = _grad_fn(tensor), 0
        newest = oldest = _number(node) if node is not None else 0
        jumps = [0]
        while self._room > 0 and (children := _earlier_operations(node)):
            self._room -= 1
            number, node = min(children, key=lambda child: child[0])
            if len(children) > 1:
                jumps.append(oldest - number)
            oldest, length = number, length + 1
        is_cut = self._room == 0
        self.sizes[key] = length, newest
        before, newest_before = self._before.get(key, (length, newest))
        if newest > newest_before > oldest and (length > before or is_cut):
            count = sum(jump * 2 >= max(jumps) for jump in jumps) + 1
            self._note(key, type="graph", count=count, before=before, graphs=True, length=length, is_cut=is_cut)

    # ---------------------------------------------------------------- what grew

    def _note(self, key: _Key, **facts: object) -> None:
        scope, path = key
        function = scope.co_qualname if type(scope) is CodeType and scope.co_flags & CO_OPTIMIZED else None
        name = shorten_name(path)
        self._grown[name, function] = {"name": name, "function": function, "place": None, **facts}

    def largest(self) -> list[dict[str, Any]]:
        """Return what grew, MAX_NAMES at most: first what keeps graphs, then by the size of the new items."""
        entries = sorted(self._grown.values(), key=lambda entry: (entry["graphs"], entry.get("new_bytes") or 0))
        return entries[: -MAX_NAMES - 1 : -1]

    def find_place(self, entry: dict[str, Any]) -> str | None:
        """Return the file and line that make one of the names grow; None unless there is just one."""
        match, function = _LAST_NAME.search(entry["name"]), entry["function"] or ""
        places = {
            f"{os.path.basename(code.co_filename)}:{line}"
            for code in dict.fromkeys(code for frame_code in self._codes for code in _iter_code(frame_code))
            # Another function may have a variable of the same name.
            if match is not None and ("." in entry["name"] or code.co_qualname.startswith(function))
            for line in _growing_lines(code, match[1])
        }
        return shorten_name(places.pop()) if len(places) == 1 else None


def _container_of(kind: type) -> Any:
    """Return the builtin class of containers from which a class derives; None for others."""
    return next((base for base in _CONTAINERS if _is_subclass(base, kind)), None)


def _items(container: Any, base: Any) -> list[tuple[str, Any]]:
    """Return a label and the item, for each item of a container, or for the newest ones of a large one."""
    length = base.__len__(container)
    first = length - NEWEST_ITEMS if length > ALL_ITEMS else 0
    if base is dict:
        pairs = list(islice(reversed(dict.items(container)), length - first))[::-1]
        keys = [
            key if type(key) is str and key.isidentifier() else first + index for index, (key, _) in enumerate(pairs)
        ]
        return [(f"[{key!r}]", item) for key, (_, item) in zip(keys, pairs, strict=True)]
    return [(f"[{index}]", base.__getitem__(container, index)) for index in range(first, length)]


def _namespace_of(value: Any) -> Any:
    """Return the `__dict__` of an instance; None if it has none, or if its class computes it."""
    for base in _own_mro(type(value)):
        descriptor = _own_namespace(base).get("__dict__")
        if descriptor is not None:
            namespace = descriptor.__get__(value) if type(descriptor) is GetSetDescriptorType else None
            return namespace if _is_subclass(dict, type(namespace)) else None
    return None


def _number(node: Any) -> int:
    """Return the sequence number of an operation, which is larger than those of earlier ones on the same thread."""
    return int(_Node._sequence_nr(node) if _is_subclass(_Node, type(node)) else node._sequence_nr())


def _earlier_operations(node: Any) -> list[tuple[int, Any]]:
    """Return the operations whose results an operation used, with their numbers; none for parameters and inputs."""
    if node is None:
        return []
    children = _Node.next_functions.__get__(node) if _is_subclass(_Node, type(node)) else node.next_functions
    numbered = [(_number(child), child) for child, _ in children if child is not None]
    return [(number, child) for number, child in numbered if number < 1 << 63]


def _iter_code(code: CodeType) -> Iterator[CodeType]:
    """Yield some code, and that of the functions and classes in it."""
    yield code
    for constant in code.co_consts:
        if type(constant) is CodeType:
            yield from _iter_code(constant)


def _growing_lines(code: CodeType, name: str) -> set[int]:
    """Return the lines that add to a variable or attribute."""
    lines: set[int] = set()
    start, start_line = (0, 0), 0
    if name not in (*code.co_names, *code.co_varnames, *code.co_freevars, *code.co_cellvars):
        return lines
    for instruction in get_instructions(code):
        positions, argument = instruction.positions, instruction.argval
        line, column = (positions.lineno, positions.col_offset) if positions is not None else (0, 0)
        line, here = line or 0, (line or 0, column or 0)
        words = argument if type(argument) is tuple else (argument,)
        for access, word in zip(_ACCESS.findall(instruction.opname), words, strict=False):
            if word == name and access == "LOAD":
                start, start_line = here, line
            elif word == name and start_line >= line > 0:  # its new value comes from the old one
                lines.add(line)
        if start == here and (argument in _ADDING or instruction.opname == "STORE_SUBSCR"):
            lines.add(line)
    return lines
