"""The code inside the training process. It imports the standard library, the user's torch, and dpmon's rings and spans.

- `site/sitecustomize.py`, `inject`: how the tracer gets into the process.
- `patch`: the list of all patched places in torch. Each wrapper calls torch's own code, even if the tracer fails.
- `session`: this process's ring, its definitions, its faults. `append`, `startup`: notes before there is a ring.
- `recorder`: spans, and the wrapper of fetch and backward. `threads`: the state of each thread.
- `optimizers`, `loaders`, `copies`, `pause`: other parts of the training loop.
- `calls`: the wrapper of a call. `sites`: the called modules. `roots`: finds bare roots. `sizes`: shapes of tensors.
- `split`, `primitives`, `replicas`: calls over several devices, and their phases. `compositions`: calls that the script
  composes itself.
- `stages`: calls of models with parts on several devices.
- `modes`, `plans`: whether calls run as dp or single. `virtual`, `workers`, `cores`: replicas on a shared device.
- `gradient_sync`, `collectives` and `collective_*`: communication between ranks.
- `timing`, `events`, `captures`: device times. `memory_looks`, `storages`, `gpus`, `oom`: device memory.
- `frames`: hides our wrappers. `names`, `module_tables`, `exceptions`: read objects without running the script's code.
"""
