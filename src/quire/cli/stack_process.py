"""A command of quire's as a part of a stack: python -m quire.cli.stack_process PARENT COMMAND …

It ends with the process PARENT that has started it, however that ends.
"""

from __future__ import annotations

import sys

from quire.cli.main import main
from quire.util.platform import end_with_parent

if __name__ == "__main__":
    end_with_parent(int(sys.argv.pop(1)))
    sys.exit(main())
