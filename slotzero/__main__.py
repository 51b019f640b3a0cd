"""`python -m slotzero` is the command `slotzero`."""

import sys

from slotzero.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
