"""Show where a run would land and whether it fits, before a node is booked.

Reads the command line that you mean to run by the parser of the OpenRLHF that is installed, and says which
role lands on which GPU, what each GPU and host needs, what is left for the engines' cache, which engines
straddle nodes, and what to change if it does not fit. Exit code 0 if it fits and 1 if it does not.

  rlhf-stack plan --nodes 2 --gpus 8 --gpu-memory 80 -- python -m openrlhf.cli.train_ppo_ray ...
  rlhf-stack plan --cluster nodes.yaml -- ...      # nodes: [{count: 2, gpus: 8, gpu_memory: 80, cpus: 96}]
  rlhf-stack plan --ray auto --gpu-memory 80 -- ...          # the Ray cluster that runs here

A model is read from its folder or from the cache of the hub. One that is neither is described by a
config.json or by its sizes:

  --model Qwen/Qwen2.5-7B=config.json
  --model my/model=layers:28,hidden:3584,intermediate:18944,heads:28,kv_heads:4,vocabulary:152064

--json prints rlhf-stack/plan/1, in bytes: `fits`, `openrlhf` (its release) and what its parser `said`,
`problems`, `notes`, `advice` (flags and a reason each), `symmetric` (a layout alike on all nodes, or null),
`gpus_needed`, `nodes` (address, cpus, cpus_needed, memory, memory_running, memory_loading, gpu_memory, and
gpus: index, `holds`, and what they need in `training` and `generating`), `roles` (role, ranks, parameters,
and of one rank weights, gradients, optimizer, activations, buffers, step, asleep, host, loading), `engine`
(count, size, shares, and the cache of each GPU: budget, weights, working, cache, and of the engine tokens and
concurrency; or null) and `straddling` (engines by number: ours, upstream; upstream_waits_for is the group for
which Ray would wait for ever).
"""

import argparse
from pathlib import Path

from rlhf_stack.cli import run_options
from rlhf_stack.cli.json_output import show_json


def arguments(parser: argparse.ArgumentParser) -> None:
    """The cluster, the models, how to show it, and the command line of the run."""
    run_options.cluster_options(parser)
    run_options.run_options(parser)
    parser.add_argument("--json", action="store_true", help="print rlhf-stack/plan/1 (see above)")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="write the screen as an SVG picture")


def run(options: argparse.Namespace) -> int:
    """Plan and show; 1 if it does not fit."""
    from rich.console import Console

    from rlhf_stack.planning import advise, report
    from rlhf_stack.planning.advice import symmetric
    from rlhf_stack.planning.draw import as_json, draw

    asked, notes = run_options.asked_run(options)
    machines = run_options.machines(options)
    shapes = run_options.shapes(asked, options)
    found = report(asked, machines, shapes)
    advice = advise(found, machines, shapes)
    layout = symmetric(asked, machines, shapes)
    if options.json:
        show_json("plan", 1, **as_json(found, advice, layout), said=list(notes))
    else:
        console = Console(record=options.svg is not None, highlight=False)
        draw(console, found, advice, layout)
        if options.svg:
            run_options.write(options.svg, console.export_svg(title="rlhf-stack plan"))
    return 1 if found.problems else 0
