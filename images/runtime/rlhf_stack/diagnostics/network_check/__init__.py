"""The network check: sends data over the weight-sync group between all nodes before training.

May import what `diagnostics` may, and its `network_adapters`.
"""

from rlhf_stack.diagnostics.network_check.cluster import check_network
from rlhf_stack.diagnostics.network_check.model import Attempt, CheckedNode, Interface, NetworkReport
