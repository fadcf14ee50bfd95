"""Why a run makes no progress: what each rank does, whether that is plausible, and which rank the others wait for."""
