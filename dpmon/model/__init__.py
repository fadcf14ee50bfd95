"""What is concluded from a run's record: pure functions of what the store says."""
