"""The code inside the training process. It imports the standard library, the user's torch, and dpmon's rings and spans.

- `site/sitecustomize.py`, `torch_import_hook`: how the tracer gets into the process.
- `patch`: the list of all patched functions of torch. Each wrapper calls torch's own code, even if the tracer fails.
- `note_files`: notes before there is a ring. `responder_thread`: replies while the training thread is stuck.
  `profiling`: torch.profiler on request.
- `core`: `session`, this process's ring, its definitions, its faults; `tensor_sizes`, shapes of tensors;
  `hidden_frames`, which hides our wrappers; `identity_table`, values for the script's objects; `module_tables`,
  `exception_text`, which read objects without running the script's code.
- `devices`: device times.
- `steps`: `span_recorder`, spans, the state of each thread, and the wrapper of fetch and backward; `optimizers`,
  `loaders`, `losses`, `copies`, `pause`, `replay`, `startup`, other parts of the training loop.
- `modes`: `mode_decision`, `call_plans`, whether calls run as dp or single; `virtual_devices`, `replica_threads`,
  replicas on a shared device.
- `calls`: `call_wrapper`; `traced_modules`, the called modules; `roots`, which finds bare roots; `split_calls`,
  `primitives`, `replicas`, calls over several devices and their phases; `stages`, models with parts on several devices.
- `memory`: device memory.
- `collectives`: communication between ranks.
"""
