# The start of every probe.
import importlib
import importlib.util
import json
import os
import sys
import threading
import types
from pathlib import Path


def load(path, name):
    """Load one file of an installed package as a module, without importing the package."""
    root = Path(importlib.util.find_spec(path.split("/")[0]).submodule_search_locations[0]).parent
    spec = importlib.util.spec_from_file_location(name, root / path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def note_stub(name):
    """Record what this probe replaces; the catalogue shows it with the patch."""
    with Path(os.environ["RLHF_STACK_EVENTS"], "stubs").open("a") as file:
        file.write(f"{name}\n")


def replace(owner, **stubs):
    """Replace names of an upstream module or class."""
    for name, stub in stubs.items():
        setattr(owner, name, stub)
        module = f"{owner.__module__}." if isinstance(owner, type) else ""
        note_stub(f"{module}{owner.__name__}.{name}")


def replace_module(name, **content):
    """Replace an upstream module that is imported later."""
    sys.modules[name] = types.ModuleType(name)
    vars(sys.modules[name]).update(content)
    note_stub(name)


def stub(what, **content):
    """Return an object that acts as upstream's ``what``, or a decorator of a class whose objects do."""
    note_stub(what)
    return types.SimpleNamespace(**content) if content else lambda kind: kind


def on_cpu():
    """Keep tensors on the CPU in GPU images too, for probes that do not depend on the device."""
    os.environ["RLHF_STACK_ACCELERATOR"] = "cpu"


def alone(port=0):
    """Make this process a process group of one rank."""
    dist = importlib.import_module("torch.distributed")
    store = dist.TCPStore("127.0.0.1", port, 1, True)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)


def own_ray(**resources):
    """Start a Ray of this probe alone, with these CPUs and GPUs."""
    ray = importlib.import_module("ray")
    quiet = {"include_dashboard": False, "log_to_driver": False}
    patiently(lambda: ray.init(address="local", object_store_memory=100 << 20, **quiet, **resources))


def patiently(start):
    """Return what ``start`` starts, with up to four tries: a busy machine exceeds Ray's limit of 30 s."""
    for _ in range(3):
        try:
            return start()
        except Exception as error:  # Ray's has no class of its own
            if "timed out during startup" not in str(error):
                raise
            importlib.import_module("ray").shutdown()
    return start()


def recorded(event):
    """Return the events of a kind that this probe wrote."""
    lines = [line for path in Path(os.environ["RLHF_STACK_EVENTS"]).glob("*.jsonl") for line in path.open()]
    return [found for found in map(json.loads, lines) if found["event"] == event]


def bound(seconds, otherwise):
    """From now on end a ``ray.get`` without a deadline after ``seconds``, with the error ``otherwise``."""
    ray = importlib.import_module("ray")
    real = ray.get

    def get(what, *, timeout=None):
        try:
            return real(what, timeout=timeout or seconds)
        except ray.exceptions.GetTimeoutError:
            raise TimeoutError(otherwise if timeout is None else "waited to the deadline") from None

    replace(ray, get=get)


def ends(action, reason, otherwise):
    """Exit with 0 if ``action``, which may hang, raises an error that contains ``reason``."""
    outcomes = []

    def act():
        try:
            outcomes.append(f"it ended with {action()}")
        except Exception as error:
            outcomes.append(str(error))

    acting = threading.Thread(target=act, daemon=True)
    acting.start()
    acting.join(30)
    last = outcomes[0] if outcomes else f"after 30 s it still waits for {otherwise}"
    print(" ".join(last.split()), flush=True)
    os._exit(reason not in last)  # the action never ends by itself
