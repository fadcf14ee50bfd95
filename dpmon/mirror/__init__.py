"""The background process that brings the records of several machines into one run directory."""
