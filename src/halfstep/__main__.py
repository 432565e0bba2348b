"""`python -m halfstep`, the same as the command `halfstep`."""

import sys

from halfstep.cli import main

if __name__ == "__main__":
    sys.exit(main())
