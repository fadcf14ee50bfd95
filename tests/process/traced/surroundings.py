"""Small pieces of code that change their own process; each prints its result."""

import atexit
import builtins
import contextlib
import faulthandler
import gc
import mmap
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import warnings

BEFORE = []
atexit.register(lambda: print("registered before torch", BEFORE))

import torch  # noqa: E402 - the piece tests what was registered before
from torch import nn  # noqa: E402

SPREAD = sys.argv[2] == "dp"
OURS = os.environ["OURS"]


class Net(nn.Linear):
    def __init__(self):
        super().__init__(4, 1)
        self.do = None

    def forward(self, x):
        if self.do is not None:
            self.do()
        return super().forward(x)


def made():
    torch.manual_seed(0)
    net = Net()
    return net, (nn.DataParallel(net) if SPREAD else net)


def train(times=20, do=None):
    net, call = made()
    optimizer = torch.optim.SGD(net.parameters(), 0.01)
    total = 0.0
    for number in range(times):
        if do is not None and number == times // 2:
            net.do = do
        loss = call(torch.randn(6, 4)).mean()
        net.do = None
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += float(loss.detach())
    print(f"trained {total:.4f}")


def in_child(body):
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            body()
            sys.stdout.flush()
            status = 5
        finally:
            os._exit(status)
    print("child", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


def files():
    train()
    kept = tempfile.TemporaryFile()  # noqa: SIM115
    mapped = mmap.mmap(kept.fileno(), 0) if kept.write(b"x" * 4096) and kept.flush() is None else None
    train()
    mapped[:4] = b"abcd"
    print(mapped[:6], os.listdir("/proc/self/fd").__len__() < 40)


def numbers_used_again():
    train()
    os.closerange(3, 1024)
    paths = [f"own{number}" for number in range(40)]
    fds = [os.open(path, os.O_RDWR | os.O_CREAT, 0o600) for path in paths]
    train(200)
    in_child(train)
    train(do=lambda: warnings.warn("during", stacklevel=1))
    print(sum(os.path.getsize(path) for path in paths), fds[:3])


def few_descriptors():
    resource.setrlimit(resource.RLIMIT_NOFILE, (8, 8))
    train()
    with contextlib.ExitStack() as stack:
        try:
            while True:
                stack.enter_context(open("/dev/null"))
        except OSError as error:
            print(error.errno)
        train()


def small_files():
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))
    train()
    with open("own", "wb", buffering=0) as file:
        print(file.write(b"x" * 1000))
    train()


def little_memory():
    train(2)
    size = int(open("/proc/self/statm").read().split()[0]) * 4096  # noqa: SIM115
    resource.setrlimit(resource.RLIMIT_AS, (size + (1 << 20), resource.RLIM_INFINITY))
    train()
    try:
        bytearray(1 << 30)
    except MemoryError:
        print("MemoryError")
    train()


def recursion():
    net, call = made()

    def deep(left):
        return call(torch.ones(2, 4)) if left == 0 else deep(left - 1)

    def failing():
        return failing()

    net.do = failing
    try:
        call(torch.ones(2, 4))
    except RecursionError as error:
        print(error)
    net.do = None
    print([round(float(call(torch.ones(2, 4)).detach().sum()), 4) for _ in range(3)])
    ran = 0
    for left in range(sys.getrecursionlimit()):
        try:
            deep(left)
            ran = left
        except RecursionError:
            break
    print(ran > sys.getrecursionlimit() - 80)
    train()


def children():
    train()
    print(subprocess.run([sys.executable, "-c", "print(1)"], capture_output=True).stdout)
    in_child(train)

    def in_thread():
        in_child(train)

    thread = threading.Thread(target=in_thread)
    thread.start()
    thread.join()
    train()


def daemon():
    train()
    reading, writing = os.pipe()
    sys.stdout.flush()
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.close(reading)
            with open("daemon", "w") as file, contextlib.redirect_stdout(file):
                train()
            os.write(writing, b"done")
        os._exit(0)
    os.close(writing)
    print(os.wait()[1], os.read(reading, 9), open("daemon").read())  # noqa: SIM115


def fork_while_traced():
    net, call = made()
    inside, leave = threading.Event(), threading.Event()

    def wait():
        inside.set()
        leave.wait(60)

    net.do = wait
    thread = threading.Thread(target=lambda: print(call(torch.ones(2, 4)).shape))
    thread.start()
    inside.wait(60)
    in_child(train)
    in_child(lambda: print(net.__class__.__name__))
    leave.set()
    thread.join()
    net.do = None
    train()


def fork_inside():
    train(do=lambda: in_child(train) if not SPREAD else None)
    train()


def handlers():
    atexit.register(lambda: print("registered after torch"))
    atexit.register(lambda: train(3))
    BEFORE.append(1)
    train()


def threads():
    train()
    gone = threading.Event()

    def last():
        threading.main_thread().join()
        train()

    threading.Thread(target=last).start()
    threading.Thread(target=gone.wait, daemon=True).start()
    thread = threading.Thread(target=sys.exit, args=(4,))
    thread.start()
    thread.join()


def traces():
    seen = {"call": 0, "return": 0}

    def trace(frame, event, arg):
        if frame.f_code.co_filename == __file__:
            seen[event] = seen.get(event, 0) + 1
        return trace if frame.f_code.co_filename == __file__ else None

    sys.settrace(trace)
    train()
    print(sys.gettrace() is trace)
    sys.settrace(None)
    sys.setprofile(trace)
    train()
    print(sys.getprofile() is trace)
    sys.setprofile(None)
    print(seen if not SPREAD else None)


def hooks():
    sys.excepthook = lambda *error: print("hook", error[0].__name__, len(error))
    threading.excepthook = lambda args: print("thread's hook", args.exc_type.__name__)
    sys.unraisablehook = lambda args: print("unraisable", args.exc_type.__name__)
    thread = threading.Thread(target=lambda: train(do=lambda: 1 / 0))
    thread.start()
    thread.join()
    train(do=lambda: {}["x"])


def filters():
    warnings.simplefilter("error")
    before = list(warnings.filters)
    if not SPREAD:
        train()
    print(list(warnings.filters) == before)
    warnings.resetwarnings()
    train()


def collector():
    gc.disable()
    seen = []
    gc.callbacks.append(lambda phase, info: seen.append(phase))
    train()
    print(seen, gc.isenabled(), gc.get_threshold())
    gc.enable()
    gc.set_threshold(10, 1, 1)
    train()
    gc.freeze()
    train()
    gc.unfreeze()
    print(len(seen) > 0, gc.callbacks.__len__())


def wakeup():
    left, right = socket.socketpair()
    left.setblocking(False)
    signal.set_wakeup_fd(left.fileno())
    signal.signal(signal.SIGUSR1, lambda *_: None)
    train(do=lambda: os.kill(os.getpid(), signal.SIGUSR1))
    print(set(right.recv(10)), signal.set_wakeup_fd(-1) == left.fileno())


def faults():
    file = open("faults", "w")  # noqa: SIM115
    faulthandler.enable(file)
    faulthandler.dump_traceback_later(60, file=file)
    train()
    faulthandler.cancel_dump_traceback_later()
    print(faulthandler.is_enabled())


def no_directory():
    here = tempfile.mkdtemp(dir=".")
    os.chdir(here)
    os.rmdir(os.path.join("..", os.path.basename(here)))
    train()
    in_child(train)


def replaced_builtins():
    for name in ("open", "print", "isinstance", "len"):
        real = getattr(builtins, name)
        if name in ("isinstance", "len"):

            def strange(*args, real=real, **kwargs):
                caller = sys._getframe(1).f_code.co_filename
                if caller.startswith(OURS):
                    raise RuntimeError("not for you")
                return real(*args, **kwargs)
        else:

            def strange(*args, real=real, **kwargs):
                raise RuntimeError("nobody may")

        setattr(builtins, name, strange)
        try:
            import io

            with contextlib.redirect_stdout(io.StringIO()):
                if name != "print":
                    train()
                else:
                    made()[1](torch.ones(2, 4))
        finally:
            setattr(builtins, name, real)
        print(name)


def replaced_clock():
    time.monotonic_ns = lambda: 1 / 0
    time.monotonic = time.time = lambda: 0.0
    time.sleep = lambda seconds: 1 / 0
    os.write = os.open = os.getpid = lambda *_: 1 / 0
    threading.get_ident = lambda: 1 / 0
    train()
    train(do=lambda: None)


def standard_streams_closed():
    train()
    sys.stdout.flush()
    out = os.dup(1)
    for number in (0, 1, 2):
        os.close(number)
    owned = [os.open(name, os.O_RDWR | os.O_CREAT, 0o600) for name in ("zero", "one", "two")]
    for _ in (0, 1, 2):
        call = made()[1]
        call(torch.ones(2, 4))
    os.write(out, f"{owned} {[os.fstat(number).st_size for number in owned]}\n".encode())
    os.dup2(out, 1)


def finalized_calls():
    """Finalizers call the model while Python ends."""
    _, call = made()
    call(torch.ones(2, 4))

    class Last:
        def __del__(self, call=call, torch=torch, write=os.write):
            write(1, f"last {tuple(call(torch.ones(2, 4)).shape)}\n".encode())

    globals()["last"] = Last()
    train()


def broken_pipe():
    reading, writing = os.pipe()
    os.close(reading)
    train()
    try:
        os.write(writing, b"x")
    except BrokenPipeError:
        print("broken")
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    sys.stdout.flush()
    train()
    sys.stdout.flush()
    os.write(writing, b"x")


if __name__ == "__main__":
    globals()[sys.argv[1]]()
