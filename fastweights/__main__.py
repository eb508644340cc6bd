"""`python -m fastweights`, and so `torchrun -m fastweights`: the command line as a module."""

import sys

from fastweights.cli import main

if __name__ == "__main__":
    sys.exit(main())
