"""Plans a run before it starts: its placement, its memory, and the settings to change.

May import every package except ``cli``, ``hooks``, ``demo``, ``diagnostics`` and ``recovery``.
"""

from rlhf_stack.planning.advice import advise
from rlhf_stack.planning.assessment import assess
from rlhf_stack.planning.cluster_spec import Machine, uniform_machines
