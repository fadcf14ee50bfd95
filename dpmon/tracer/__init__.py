"""The code inside the training process. It imports the standard library, the user's torch, and dpmon's rings and spans.

- `site/sitecustomize.py`, `torch_import_hook`: how the tracer gets into the process.
- `patch`: the list of all patched places in torch. Each wrapper calls torch's own code, even if the tracer fails.
- `note_files`: notes before there is a ring.
- `core`: `session`, this process's ring, its definitions, its faults; `threads`, the state of each thread;
  `tensor_sizes`, shapes of tensors; `hidden_frames`, which hides our wrappers; `module_tables`, `exception_text`, which
  read objects without running the script's code.
- `devices`: device times.
- `steps`: `span_recorder`, spans, and the wrapper of fetch and backward; `optimizers`, `loaders`, `copies`,
  `pause`, `startup`, other parts of the training loop.
- `modes`: `mode_decision`, `call_plans`, whether calls run as dp or single; `virtual_devices`, `replica_threads`,
  replicas on a shared device.
- `calls`: `call_wrapper`; `traced_modules`, the called modules; `roots`, which finds bare roots; `split_calls`,
  `primitives`, `replicas`, calls over several devices and their phases; `stages`, models with parts on several devices.
- `memory`: device memory.
- `collectives`: communication between ranks.
"""
