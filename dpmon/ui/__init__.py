"""The live screen: reads a run, draws it, asks it to change its mode."""
