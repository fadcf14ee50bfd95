"""Hides wrappers: in names and signatures, in tracebacks, and from torch.compile."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress
from time import monotonic_ns
from types import CodeType, FrameType
from typing import Any

_TRACER_DIRECTORY = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
Function = Callable[..., Any]
"""A function of torch or of the script."""
_UNCOUNTED: dict[CodeType, CodeType] = {}
"""Old and new code of the functions that were passed to `uncounted`."""


def iter_callers(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield a frame and its callers, innermost first."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def drop_frames(error: BaseException) -> None:
    """Remove our frames from the start of an exception's traceback. The caller then raises the exception again.

    The remaining frames still refer to ours (`f_back`). `traceback.clear_frames` no longer reaches our frames, so the
    objects in them would live as long as the exception. Therefore this function clears the frames that have ended. The
    caller is still running, so it must set its own variables to None.
    """
    while (entry := error.__traceback__) is not None:
        if not entry.tb_frame.f_code.co_filename.startswith(_TRACER_DIRECTORY):
            break
        with suppress(RuntimeError):  # the frame of the caller, or of its callers, still runs
            entry.tb_frame.clear()
        error.__traceback__ = entry.tb_next


def uncounted(function: Function) -> Function:
    """Hide a function from `warnings.warn`, so that torch's warnings blame the script's lines; return the function.

    CPython does not count frames of files with these two words in their name (Python/_warnings.c).
    """
    code = function.__code__
    function.__code__ = _UNCOUNTED.setdefault(code, code.replace(co_filename=f"{code.co_filename}:importlib_bootstrap"))
    return function


def copy_name_and_signature(wrapper: Function, original: Function) -> Function:
    """Give a wrapper the name, module and signature of the original, hide it from warnings, and return it."""
    for name in ("__module__", "__name__", "__qualname__", "__doc__"):
        setattr(wrapper, name, getattr(original, name, None))
    wrapper.__dict__["__wrapped__"] = original
    return uncounted(wrapper)


def wrap_rare_function(
    original: Function,
    guard: AbstractContextManager[object],
    after: Callable[..., object],
    *,
    before: Callable[..., object] | None = None,
    on_error: Callable[..., object] | None = None,
) -> Function:
    """Return the traced form of a function that is called rarely. `guard` keeps our faults away from the script.

    It calls `before(*args, **kwargs)`, then the function, then `after(result, start_ns, *args, **kwargs)`, or
    `on_error(error, *args, **kwargs)` if the function raises. `start_ns`: when the function began (monotonic ns).
    """
    from torch.compiler import is_dynamo_compiling as is_compiling  # see `hide_from_dynamo`

    def wrapper(*args: object, **kwargs: object) -> object:
        if is_compiling():
            return original(*args, **kwargs)
        if before is not None:
            with guard:
                before(*args, **kwargs)
        start_ns = monotonic_ns()
        try:
            result = original(*args, **kwargs)
        except BaseException as error:
            if on_error is not None:
                with guard:
                    on_error(error, *args, **kwargs)
            drop_frames(error)
            args, kwargs = (), {}
            raise
        with guard:
            after(result, start_ns, *args, **kwargs)
        return result

    return copy_name_and_signature(wrapper, original)


def replace_in_modules(package: str, name: str, original: object, wrapper: object) -> None:
    """Put a wrapper wherever a script may import the original from: in all loaded modules of a package."""
    for module_name, module in list(sys.modules.items()):
        members = getattr(module, "__dict__", {})  # a script may put None there to forbid an import
        if module_name.startswith(package) and members.get(name) is original:
            members[name] = wrapper


def hide_from_dynamo() -> None:
    """Make torch.compile skip our frames, as it skips torch's own frames around a module's forward.

    It skips only a frame that would be the outermost frame of a graph. Inside a graph, it traces through our frames as
    before. Without this function, it would retry from our frame after a graph break, and would compile our code.
    """
    import torch  # imported here, because dpmon.tracer.torch_import_hook uses this module while torch is being imported

    frames: Any = torch._C._dynamo.eval_frame
    skip = getattr(frames, "skip_code", None)
    strategy: object = None
    if skip is None:  # later versions of torch. torch._C is used because importing torch._dynamo takes a second
        strategy = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.DEFAULT)
    for code in (*_iter_own_code(), *_UNCOUNTED.values()):
        if skip is None:
            frames.set_code_exec_strategy(code, strategy)
        else:
            skip(code)


def _iter_own_code() -> Iterator[CodeType]:
    """Yield the code objects of dpmon's functions and classes in this process."""
    pending: list[object] = []
    for name, module in list(sys.modules.items()):
        if not name.startswith("dpmon."):
            continue
        own_values = [value for value in vars(module).values() if getattr(value, "__module__", None) == name]
        for value in own_values:
            pending += vars(value).values() if isinstance(value, type) else [value]
    package = os.path.dirname(os.path.dirname(_TRACER_DIRECTORY))
    while pending:
        value = pending.pop()
        value = getattr(value, "fget", getattr(value, "__func__", value))
        code = value if isinstance(value, CodeType) else getattr(value, "__code__", None)
        # The methods that dataclasses and named tuples generate are in "<string>".
        if isinstance(code, CodeType) and code.co_filename.startswith((package, "<string>")):
            yield code
            pending += [inner for inner in code.co_consts if isinstance(inner, CodeType)]
