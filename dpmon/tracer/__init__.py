"""The code inside the training process. It imports the standard library, the user's torch, and dpmon's rings and spans.

- `site/sitecustomize.py`, `inject`: how the tracer gets into the process.
- `patch`: the list of all patched places in torch. Each wrapper calls torch's own code, even if the tracer fails.
- `append`: notes before there is a ring.
- `core`: `session`, this process's ring, its definitions, its faults; `threads`, the state of each thread; `sizes`,
  shapes of tensors; `frames`, which hides our wrappers; `module_tables`, `exceptions`, which read objects without
  running the script's code.
- `devices`: device times.
- `steps`: `recorder`, spans, and the wrapper of fetch and backward; `optimizers`, `loaders`, `copies`, `pause`,
  `startup`, other parts of the training loop.
- `modes`: `decision`, `plans`, whether calls run as dp or single; `virtual`, `workers`, replicas on a shared device.
- `calls`: `call_wrapper`; `sites`, the called modules; `roots`, which finds bare roots; `split`, `primitives`,
  `replicas`, calls over several devices and their phases; `stages`, models with parts on several devices.
- `memory`: device memory.
- `collectives`: communication between ranks.
"""
