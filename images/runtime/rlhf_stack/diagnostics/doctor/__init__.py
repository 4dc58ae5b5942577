"""The checks of `rlhf-stack doctor`: nodes collect their facts, and pure functions check and compare them.

May import what `diagnostics` may, and its `network_adapters`, `host_check` and `installed_patches`.
"""
