"""The background process that writes the records of several nodes into one run directory."""
