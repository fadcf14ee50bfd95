"""What runs inside the training process: standard library, torch (the user's) and nothing of ours but ring and records.

- `site/sitecustomize.py`, `inject`: how it gets in.
- `patch`: the one list of places in torch that are touched; each wrapper calls torch's own code whatever happens to us.
- `session`: this process's ring, its definitions, its faults.  `sizes`: shapes of whatever is passed around.
- `calls`: a call and its phases.  `replicas`: forward hooks on DataParallel's throw-away copies.
- `roots`: finding bare root modules.  `steps`: turns of the training loop.
- `modes`: dp or single, asked for and in force.  `virtual`: replicas on devices that are shared.
"""
