"""The history of a run: one writer (the supervisor), any number of readers, and one definition of every figure."""
