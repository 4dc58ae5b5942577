"""``python -m rlhf_stack`` is the command ``rlhf-stack``."""

import sys

from rlhf_stack.cli.main import main

sys.exit(main())
