import pytest

# Two ranks gather a large weight together with a small one, whose gather ends first. Each rank refills its
# half before each gather, so that memory of the previous one cannot pass for a weight that has not arrived.
GATHERS = """
import torch
import torch.distributed as dist

ROUNDS, WIDTH, RANKS = 20, 2048, 2


def layer(config):
    import deepspeed

    deepspeed.init_distributed("gloo")
    with deepspeed.zero.Init(config_dict_or_path=config | {"train_micro_batch_size_per_gpu": 1}):
        return torch.nn.Linear(WIDTH, WIDTH)


def gathered(parameters, rank):
    import deepspeed

    for number in range(ROUNDS):
        for parameter in parameters:
            parameter.ds_tensor.fill_(RANKS * number + rank)
        with deepspeed.zero.GatheredParameters(parameters):
            ends = [parameter.detach().flatten()[[0, -1]].tolist() for parameter in parameters]
        yield all(end == [RANKS * number, RANKS * number + 1] for end in ends)


def run(rank, store):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, RANKS), rank=rank, world_size=RANKS)
    both = configs()
    os.environ["LOCAL_RANK"] = str(rank)  # for DeepSpeed; upstream's strategy would select this GPU
    results = [whole for config in both for whole in gathered(list(layer(config).parameters()), rank)]
    dist.barrier()
    missing = results.count(False)
    assert missing == 0, f"{missing} of {len(results)} gathers ended before the weights had arrived"
    print(f"{len(results)} gathers ended with their weights")
    dist.destroy_process_group()  # a thread of gloo that still runs at the exit of Python aborts the process


def made_by(helpers):
    train = helpers.get_train_ds_config(offload=False, adam_offload=False, stage=3, zpg=1)
    return [train, helpers.get_eval_ds_config(offload=False, stage=3)]
"""

SECTIONS = """
def configs():
    return made_by(load("openrlhf/utils/deepspeed/deepspeed_utils.py", "helpers"))
"""

FLAT = """
def configs():
    from openrlhf.utils import deepspeed, deepspeed_utils

    deepspeed.DeepspeedStrategy(zero_stage=3, args=types.SimpleNamespace(local_rank=-1)).setup_distributed()
    return made_by(deepspeed_utils)
"""

TWO_RANKS = """
if __name__ == "__main__":
    torch.multiprocessing.spawn(run, (str(Path("store").absolute()),), nprocs=RANKS)
"""


@pytest.mark.usefixtures("cpu_only")
@pytest.mark.parametrize(
    "release",
    [
        pytest.param(
            SECTIONS, marks=pytest.mark.patch("openrlhf/0.11.2/0041-serialize-zero3-allgather"), id="0.11"
        ),
        pytest.param(
            FLAT, marks=pytest.mark.patch("openrlhf/0.5.1/0012-serialize-zero3-allgather"), id="0.5"
        ),
    ],
)
def test_a_zero_3_gather_ends_when_its_weights_have_arrived(proves, release):
    proves(GATHERS + release + TWO_RANKS, r"[1-9]\d* of 40 gathers ended before the weights had arrived")
