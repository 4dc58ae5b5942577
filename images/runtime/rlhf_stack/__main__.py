"""``python -m rlhf_stack`` is the command ``rlhf-stack``."""

import sys

from rlhf_stack.cli import main

sys.exit(main())
