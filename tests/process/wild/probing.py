"""Looks whether torch is there before it imports it, as libraries do, and at how it was imported afterwards."""

import importlib.metadata
import importlib.util
import inspect
import sys

spec = importlib.util.find_spec("torch")
print(spec.name, spec.origin, spec.submodule_search_locations, "torch" in sys.modules)
print(importlib.metadata.version("torch"), importlib.util.find_spec("no_such_module"))
print("sitecustomize" in sys.modules, importlib.util.find_spec("sitecustomize") is None)
print(sys.path, [getattr(finder, "__name__", type(finder).__name__) for finder in sys.meta_path][-3:])

import torch
from torch import nn
from torch.nn.parallel import DataParallel, data_parallel, gather, parallel_apply, replicate, scatter

print(torch.__spec__.name, type(torch.__loader__).__name__, type(torch.__spec__.loader).__name__, torch.__file__)
print(inspect.getsourcefile(nn.DataParallel), len(inspect.getsource(nn.Linear)))
print(inspect.signature(nn.DataParallel), inspect.signature(nn.DataParallel.forward), inspect.signature(nn.Module))
for function in (data_parallel, gather, parallel_apply, replicate, scatter):
    print(function.__name__, function.__module__, inspect.signature(function), (function.__doc__ or "")[:40])
print(issubclass(DataParallel, nn.Module), DataParallel is nn.DataParallel, DataParallel.__qualname__)
model = nn.Linear(3, 2)
print(model(torch.ones(1, 3)).shape, sorted(vars(model)), type(model).__mro__)
print(model.forward.__func__ is nn.Linear.forward, [name for name in sys.modules if "sitecustomize" in name])
