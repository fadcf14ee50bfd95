"""The parts that all of the tracer uses: the process's record, frames, and objects of the script."""
