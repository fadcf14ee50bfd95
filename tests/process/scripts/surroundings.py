"""Everything a program can see of how it was started; what may differ under dpmon is left out by name."""

import atexit
import faulthandler
import gc
import os
import random
import resource
import signal
import sys
import threading
import warnings

import torch
from torch import nn

CHANGED = ("PYTEST_", "DPMON_", "PYTHONPATH", "PYTHONUNBUFFERED", "FORCE_COLOR", "CLICOLOR_FORCE")

model = nn.DataParallel(nn.Linear(4, 2))
model(torch.ones(6, 4)).sum().backward()

print({name: value for name, value in sorted(os.environ.items()) if not name.startswith(CHANGED)})
print(sys.argv, sys.flags, sys.warnoptions, sys._xoptions, sys.executable, sys.prefix, sys.dont_write_bytecode)
print(sys.stdout.encoding, sys.stdout.errors, sys.stderr.errors, sys.getfilesystemencoding(), sys.getrecursionlimit())
print({s.name: signal.getsignal(s) for s in signal.Signals if s not in (signal.SIGKILL, signal.SIGSTOP)})
print(signal.pthread_sigmask(signal.SIG_BLOCK, []), signal.getitimer(signal.ITIMER_REAL), faulthandler.is_enabled())
print(list(warnings.filters), sys.excepthook is sys.__excepthook__, sys.unraisablehook is sys.__unraisablehook__)
print(threading.excepthook is threading.__excepthook__, sys.displayhook is sys.__displayhook__, sys.gettrace())
print(sys.getprofile(), threading.active_count(), threading.current_thread() is threading.main_thread())
print(gc.isenabled(), gc.get_threshold(), gc.callbacks, sys.getswitchinterval(), sys.float_info.epsilon)
umask = os.umask(0o22)
print(oct(umask), os.getcwd(), os.getpriority(os.PRIO_PROCESS, 0), sorted(os.sched_getaffinity(0)))
print({n: resource.getrlimit(getattr(resource, n)) for n in dir(resource) if n.startswith("RLIMIT_")})
print(torch.get_num_threads(), torch.is_grad_enabled(), torch.get_default_dtype())
random.seed(1)
torch.manual_seed(1)
print(random.random(), torch.rand(3).tolist(), nn.DataParallel(nn.Linear(2, 2))(torch.ones(2, 2)).tolist())
print(torch.rand(3).tolist(), random.random(), sorted(globals()))
atexit.register(print, "registered first, runs last")
atexit.register(print, "registered last, runs first")
