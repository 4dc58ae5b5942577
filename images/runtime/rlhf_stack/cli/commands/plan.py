"""Show where a run would be placed and whether it fits, without using a GPU.

Parses the command line of the run with the installed OpenRLHF. Shows which role is on which GPU, the memory
that each GPU and host needs, the size of the engines' KV cache, which engines straddle nodes, and what to
change if the run does not fit. Exit code 0 if the run fits, 1 if it does not.

  rlhf-stack plan --nodes 2 --gpus 8 --gpu-memory 80 -- python -m openrlhf.cli.train_ppo_ray ...
  rlhf-stack plan --cluster nodes.yaml -- ...      # nodes: [{count: 2, gpus: 8, gpu_memory: 80, cpus: 96}]
  rlhf-stack plan --nodes 1 --gpu-memory 80 -- deepspeed --module openrlhf.cli.train_sft ...   # or DPO, RM
  rlhf-stack plan --ray auto --gpu-memory 80 -- ...          # the running Ray cluster of this machine

Models are read from a local folder or the Hugging Face cache. For any other model, give its config.json or
its sizes:

  --model Qwen/Qwen2.5-7B=config.json
  --model my/model=layers:28,hidden:3584,intermediate:18944,heads:28,kv_heads:4,vocabulary:152064

Further sizes are optional: head_dim, tied, experts, active, parameters, and max_length, the longest sequence.

--json prints rlhf-stack/plan/1, in bytes: `fits`, `openrlhf` (the release), `said` (messages of its parser),
`problems`, `notes`, `advice` (flags and reason), `symmetric` (a layout identical on all nodes, or null),
`gpus_needed`, `nodes` (address, cpus, cpus_needed, memory, memory_running, memory_loading, memory_saving:
added to memory_running while the model is saved, gpu_memory, gpu_type, and gpus: index, `holds`, and the
bytes needed in `training`, `generating` and `syncing`, with the 3 % that a trainer and an engine on one GPU
leave free), `roles` (role, ranks, parameters, and per rank weights, gradients, optimizer, activations,
buffers, step, asleep, host, loading),
`engine` (count, size, shares, and cache, per GPU: budget, weights, working, cache, per engine: tokens,
concurrency; or null), `memory_checked` (false if the memory of the GPUs is unknown: then `fits` is about the
placement alone) and `straddling` (indices of engines that span more nodes than they need: ours, upstream;
upstream_waits_for is the placement group that upstream's placement would leave pending).
"""

import argparse

from rlhf_stack.cli import run_options
from rlhf_stack.cli.json_output import print_json
from rlhf_stack.cli.option_types import path
from rlhf_stack.errors import UserError
from rlhf_stack.inputs.files import require_writable


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options for the cluster, the run and the output."""
    run_options.add_cluster_options(parser)
    run_options.add_run_options(parser)
    parser.add_argument("--json", action="store_true", help="print rlhf-stack/plan/1 (see above)")
    parser.add_argument("--svg", type=path, metavar="FILE", help="write the output as an SVG image")


def run(options: argparse.Namespace) -> int:
    """Plan the run and print the result; return 1 if it does not fit."""
    from rich.console import Console

    from rlhf_stack.planning import advise, assess
    from rlhf_stack.planning.advice import symmetric_layout
    from rlhf_stack.planning.display import as_json, print_assessment

    if options.svg and options.json:
        raise UserError("--svg and --json exclude each other: the image is that of the printed plan")
    if options.svg:
        require_writable(options.svg)
    with run_options.environment_of_run(run_options.command_words(options)):
        machines = run_options.read_machines(options)
        run, notes = run_options.parse_run(options, machines)
        shapes = run_options.read_shapes(run, options)
        found = assess(run, machines, shapes)
        advice = advise(found, machines, shapes)
        layout = symmetric_layout(run, machines, shapes)
    if options.json:
        print_json("plan", 1, **as_json(found, advice, layout), said=list(notes))
    else:
        console = Console(record=options.svg is not None, highlight=False)
        for note in notes:
            console.print(f"OpenRLHF: {note}", markup=False, style="yellow")
        print_assessment(console, found, advice, layout)
        if options.svg:
            run_options.write_file(options.svg, console.export_svg(title="rlhf-stack plan"))
    return 1 if found.problems else 0
