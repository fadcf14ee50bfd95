"""Installs the tracer. This table lists every patched function of torch.

| what | why |
|---|---|
| the primitives in torch.nn.parallel and where they are defined | phases of a call, virtual replicas, composed calls |
| apply of _functions.Scatter, Broadcast, Gather | the same, for code that uses these directly |
| the function torch.nn.parallel.data_parallel | calls |
| forward of a subclass of DataParallel that has its own | calls |
| DataParallel.forward, DataParallel.__init__ | calls; the dim, which torch drops without GPUs |
| Module.__call__, temporarily; `__call__` of the classes of bare roots | bare root modules |
| the global hooks on the registration of parameters and modules | creation of models |
| _BaseDataLoaderIter.__next__ | steps, waits for data |
| DataLoader.__iter__ | the start of a loader |
| torch.utils.data._utils.worker._worker_loop | lines of the loader's workers |
| torch.autograd._engine_run_backward | backward, however the script calls it |
| GradScaler.scale and .__init__ | the loss before it was scaled |
| torch.distributed.autograd.backward | backward across RPC, which has its own entry point |
| the global optimizer step hooks | optimizer |
| Optimizer.__init__ | memory of optimizer states |
| torch.distributed.init_process_group | the stage before the first call |
| torch.save, torch.distributed.checkpoint.save, safetensors.torch.serialize_file | checkpoints |
| DistributedDataParallel._post_forward | sync passes |
| Tensor.to, Tensor.cuda, if torch was built for GPUs | copies to GPUs |
| the operators of c10d, during sampled steps | collectives |
| methods of Tensor that wait for a GPU, torch.cuda.synchronize, during sampled steps | lines that wait |
| capture_begin, capture_end of CUDAGraph, accelerator.Graph, before the first timed phase | no events in captures |
"""

from __future__ import annotations

import atexit
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from dpmon.record.span_format import Kind
from dpmon.span_ring import SpanRing
from dpmon.tracer.calls.call_wrapper import CallTracer
from dpmon.tracer.calls.primitives import PrimitiveTracer
from dpmon.tracer.calls.roots import RootFinder
from dpmon.tracer.calls.split_calls import SplitRunner
from dpmon.tracer.calls.traced_modules import TracedModules
from dpmon.tracer.collectives import CollectiveSampler, GradientSync
from dpmon.tracer.core.exception_text import describe_uncaught
from dpmon.tracer.core.hidden_frames import Function, hide_from_dynamo, replace_in_modules, wrap_rare_function
from dpmon.tracer.core.session import Session, TracerConfig, rank_and_world
from dpmon.tracer.memory import allocator
from dpmon.tracer.memory.growth_walk import GrowthWalker
from dpmon.tracer.memory.measurement import MemoryTracer
from dpmon.tracer.modes.mode_decision import ModeDecider
from dpmon.tracer.modes.virtual_devices import PRIMITIVE_NAMES, TorchOriginals
from dpmon.tracer.note_files import append_note
from dpmon.tracer.profiling import StepProfiler
from dpmon.tracer.responder_thread import ResponderThread, start_thread
from dpmon.tracer.steps.checkpoints import CheckpointTracer
from dpmon.tracer.steps.compile_events import CompileReader
from dpmon.tracer.steps.copies import CopyTracer
from dpmon.tracer.steps.flop_counting import FlopCounter
from dpmon.tracer.steps.host_syncs import HostSyncSampler
from dpmon.tracer.steps.loader_stacks import reply_in_worker
from dpmon.tracer.steps.loaders import LoaderTracer
from dpmon.tracer.steps.losses import LossTracer
from dpmon.tracer.steps.optimizers import OptimizerTracer, PreHooks
from dpmon.tracer.steps.pause import Pauser
from dpmon.tracer.steps.span_recorder import SpanRecorder
from dpmon.tracer.training_checks import TrainingChecks

_installed = False
"""Whether the tracer is installed in this process. A second installation would record every call twice."""


def install() -> None:
    """Install the tracer in this process's torch, once. Raises, before it changes anything, if torch is unsupported."""
    global _installed
    if _installed:
        return
    data_parallel: Any = importlib.import_module("torch.nn.parallel.data_parallel")
    scatter_gather: Any = importlib.import_module("torch.nn.parallel.scatter_gather")
    dataloader: Any = importlib.import_module("torch.utils.data.dataloader")
    autograd: Any = importlib.import_module("torch.autograd")
    optimizer: Any = importlib.import_module("torch.optim.optimizer")
    fetch = dataloader._BaseDataLoaderIter.__next__
    iterate = dataloader.DataLoader.__iter__
    backward = autograd._engine_run_backward
    construct = torch.nn.DataParallel.__init__
    forward = torch.nn.DataParallel.forward

    originals = TorchOriginals(data_parallel, scatter_gather)
    session = Session(TracerConfig.from_environment())
    _installed = True
    recorder = SpanRecorder(session)
    if session.config.replay:
        from dpmon.tracer.steps.replay import wrap_next_with_replay

        fetch = wrap_next_with_replay(fetch, session.config.replay)
    optimizers = OptimizerTracer(recorder)
    modes = ModeDecider(session, originals)
    modules = TracedModules(session, modes)
    split_runner = SplitRunner(session, recorder, modes, modules, originals)
    flops = FlopCounter(recorder)
    call_tracer = CallTracer(session, recorder, modes, modules, split_runner, flops)
    primitives = PrimitiveTracer(session, recorder, modes, modules, originals)
    roots = RootFinder(session, recorder, call_tracer)
    memory, walker = MemoryTracer(session, recorder, modules), GrowthWalker(session, recorder)
    loaders, checkpoints = LoaderTracer(session, recorder), CheckpointTracer(recorder)
    losses = LossTracer(session, recorder)
    gradients = GradientSync(session, recorder)
    collectives, profiler = CollectiveSampler(session, recorder), StepProfiler(session, recorder)
    compiles, syncs = CompileReader(session), HostSyncSampler(session, recorder)
    checks = TrainingChecks(session, roots, losses)
    polled = (flops, roots, memory, collectives, walker, profiler, losses, checkpoints, compiles, syncs)

    def expect_model(missed: bool = False) -> None:  # a loop has ended, or an optimizer or a module was made
        if roots.watch_one_step(missed):
            recorder.poll_due = 0

    session.on_give_up = recorder.stop_writing
    recorder.on_idle, optimizers.on_no_call = lambda: roots.watch(missed=True), roots.warn_no_call_seen
    recorder.on_loop_end = memory.on_optimizer = roots.on_new_module = expect_model
    recorder.on_poll = lambda now: min([part.poll(now) for part in polled])

    optimizers.on_check = checks.poll
    optimizers.on_new_optimizer = lambda: expect_model(missed=True)  # an optimizer has stepped for the first time
    recorder.on_pause = Pauser(session, recorder).wait
    modules.on_gpu_call = recorder.start_device_timing

    for index, name in enumerate((*PRIMITIVE_NAMES, "scatter")):
        replace_in_modules("torch.nn.parallel", name, originals.all[index], primitives.wrap_primitive(index))
    for index, name in enumerate(("Scatter", "Broadcast", "Gather"), 5):
        getattr(originals.functions, name).apply = primitives.wrap_primitive(index)
    functional = originals.data_parallel
    traced_functional = call_tracer.wrap_data_parallel(functional)
    replace_in_modules("torch.nn.parallel", "data_parallel", functional, traced_functional)
    torch.nn.DataParallel.__init__ = _wrap_dp_init(construct, modes, call_tracer)  # type: ignore[method-assign]
    torch.nn.DataParallel.forward = call_tracer.wrap_forward(forward)  # type: ignore[method-assign]
    dataloader._BaseDataLoaderIter.__next__ = recorder.wrap_phase(Kind.FETCH, fetch)
    dataloader.DataLoader.__iter__ = loaders.wrap_iter(iterate)
    with (guard := session.guard("samples of the loader", fatal=False)):
        worker, start = dataloader._utils.worker, lambda *_: start_thread(reply_in_worker, session)
        worker._worker_loop = wrap_rare_function(worker._worker_loop, guard, lambda *_: None, before=start)
    autograd._engine_run_backward = recorder.wrap_phase(Kind.BACKWARD, backward)
    rpc_autograd = sys.modules.get("torch.distributed.autograd")  # None in a build without RPC
    if hasattr(rpc_autograd, "backward"):
        rpc_autograd.backward = recorder.wrap_phase(Kind.BACKWARD, rpc_autograd.backward)  # type: ignore[union-attr]
    before_step, after_step = optimizers.hooks()
    optimizer._global_optimizer_pre_hooks = PreHooks(before_step, optimizer._global_optimizer_pre_hooks)
    optimizer.register_optimizer_step_post_hook(after_step)
    optimizer.Optimizer.__init__ = memory.wrap_optimizer_init(optimizer.Optimizer.__init__)
    CopyTracer(session, recorder).install()
    gradients.install()
    losses.install()
    roots.install_registration_hooks()
    with session.guard("startup of the process", fatal=False):
        recorder.startup.install()
    roots.watch()
    responder = ResponderThread(session, recorder)
    parts = (session, recorder, optimizers, modes, modules, primitives, memory, loaders, losses, gradients, collectives)
    resets = [part.reset for part in (flops, *parts, walker, profiler, syncs, checks, responder)]
    _install_exit_hooks(session, recorder, roots, memory, losses, collectives, compiles, loaders, responder, resets)
    atexit.register(profiler.end)  # first, because the interpreter could crash if it ended during a profile
    with session.guard("torch.compile", fatal=False):  # otherwise it tries a model with graph breaks again
        hide_from_dynamo()


def _wrap_dp_init(original: Function, modes: ModeDecider, call_tracer: CallTracer) -> Function:
    """Return the traced form of DataParallel.__init__, which notes `dim`: torch does not store it without GPUs."""
    signature = inspect.signature(original)

    def on_init(_: object, __: int, wrapper: object, *arguments: Any, **keywords: Any) -> None:
        named = {**signature.bind(wrapper, *arguments, **keywords).arguments, **keywords}
        modes.note_dim(wrapper, named.get("dim", 0))
        if type(wrapper) is not torch.nn.DataParallel:
            call_tracer.trace_subclass(type(wrapper))

    return wrap_rare_function(original, modes.session.guard("new DataParallel"), on_init)


def _install_exit_hooks(
    session: Session,
    recorder: SpanRecorder,
    roots: RootFinder,
    memory: MemoryTracer,
    losses: LossTracer,
    collectives: CollectiveSampler,
    compiles: CompileReader,
    loaders: LoaderTracer,
    responder: ResponderThread,
    resets: Sequence[Callable[[], None]],
) -> None:
    """Handle the end and the forks of the process. `resets`: functions that reset the parts in a forked child."""

    def note_uncaught() -> None:  # shows which of several processes ended the run, and why
        rank, _ = rank_and_world()
        exception_note = describe_uncaught(rank, loaders.describe_killed_worker(), roots.synced_names or ())
        if exception_note is not None:
            append_note(exception_note, "endings.log")

    def finish() -> None:
        parts = responder, collectives, compiles, losses, recorder
        for end_part in (*[part.at_exit for part in parts], note_uncaught):
            with session.guard("end of the process"):
                try:
                    end_part()
                except KeyboardInterrupt:  # a launcher may pass on a Ctrl-C that its ranks have already received
                    end_part()

    atexit.register(finish)

    def on_open(ring: SpanRing) -> None:
        recorder.attach_ring(ring)
        responder.start(ring)
        memory.report_optimizers()
        allocator.watch_out_of_memory(session)
        # A child of multiprocessing ends by os._exit, after its own finalizers.
        util = sys.modules.get("multiprocessing.util")
        process = sys.modules.get("multiprocessing.process")
        if util is not None and process is not None and process.parent_process() is not None:
            util.Finalize(None, finish, exitpriority=0)

    session.on_open = on_open

    def reset_all() -> None:
        for reset in resets:
            reset()

    os.register_at_fork(after_in_child=reset_all)
