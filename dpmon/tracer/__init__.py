"""The code inside the training process. It imports the standard library, the user's torch, and dpmon's rings and spans.

- `site/sitecustomize.py`, `inject`: how the tracer gets into the process.
- `patch`: the list of all patched places in torch; each wrapper calls torch's own code, even if the tracer fails.
- `session`: this process's ring, its definitions, its faults.  `sizes`: shapes of inputs and outputs.
- `recorder`: spans, and the wrapper of fetch, backward and optimizer.  `threads`: the state of each thread.
- `calls`: the wrapper of a call.  `sites`: the called modules.  `roots`: finds bare roots.
- `split`, `verbs`, `replicas`: calls over several devices and their phases.  `byhand`: calls composed by the script.
- `modes`: dp or single, requested and in force.  `virtual`: replicas on a shared device.
- `timing`, `events`: device times.  `memory`, `storages`: device memory.
"""
