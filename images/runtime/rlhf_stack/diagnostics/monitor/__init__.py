"""The data of `rlhf-stack top`, collected from Ray, the metrics of the nodes and the event log of the run."""
