"""What runs inside the training process: standard library, torch (the user's) and nothing of ours but rings and spans.

- `site/sitecustomize.py`, `inject`: how it gets in.
- `patch`: the one list of places in torch that are touched; each wrapper calls torch's own code whatever happens to us.
- `session`: this process's ring, its definitions, its faults.  `sizes`: shapes of whatever is passed around.
- `recorder`: spans, and the wrapper of fetch, backward and optimizer.  `threads`: what a thread is in.
- `calls`: the wrapper of a call.  `sites`: what is known of the modules that are called.  `roots`: finding bare ones.
- `split`, `verbs`, `replicas`: calls over several devices and their phases.  `byhand`: those that the script composes.
- `modes`: dp or single, asked for and in force.  `virtual`: replicas on devices that are shared.
- `timing`, `events`: what devices take.  `memory`, `storages`: what they hold.
"""
