"""`python -m dpmon` is `dpmon`."""

import os
import sys

# -m puts the current directory first: a user's json.py would replace the standard library's.
try:
    if sys.path and sys.path[0] in ("", os.getcwd()):
        del sys.path[0]
except OSError:  # the directory was deleted, so it cannot contain modules
    pass

from dpmon.cli.main import entry

if __name__ == "__main__":
    entry()
