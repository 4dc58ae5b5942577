"""The data of `rlhf-stack top`, collected from Ray, the metrics of the nodes and the event log of the run.

May import what `diagnostics` may, and no other module of it.
"""
