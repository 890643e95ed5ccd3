"""`python -m torchrelay` is the `torchrelay` command."""

import sys

from torchrelay.cli import main

if __name__ == "__main__":
    sys.exit(main())
