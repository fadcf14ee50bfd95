"""What a run keeps: one writer (the supervisor), any number of readers, and one definition of every figure."""
