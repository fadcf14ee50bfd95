"""What all parts of the tracer use: the process's record, frames, and objects of the script."""
