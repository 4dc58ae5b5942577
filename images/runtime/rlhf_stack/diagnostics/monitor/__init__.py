"""What `rlhf-stack top` shows: gathered from Ray, from the nodes' metrics and from the events of the run."""
