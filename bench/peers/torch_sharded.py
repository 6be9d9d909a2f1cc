"""Training with states divided among processes, as others do it: PyTorch's fully_shard and DeepSpeed, both over Gloo.

The first process starts the others, as Lightning does, and reports.
"""

import os
import socket
import subprocess
import sys

import torch

import torch_models


def start_processes(num_processes):
    """Starts the other processes and meets them; returns this one's rank and the processes it has started."""
    started = []
    if "RANK" not in os.environ:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), WORLD_SIZE=str(num_processes))
        for rank in range(1, num_processes):
            env = dict(os.environ, RANK=str(rank), LOCAL_RANK=str(rank))
            started.append(subprocess.Popen([sys.executable, *sys.argv], env=env, stdout=subprocess.DEVNULL))
        os.environ.update(RANK="0", LOCAL_RANK="0")
    return int(os.environ["RANK"]), started


def train(job, workload, net, batches, loss_of, clock, num_steps):
    """Trains with the variant of the job; the first process reports."""
    rank, started = start_processes(job["processes"])
    makes = {
        "fully-shard": lambda: fully_shard_step(workload, net, reshards=True),
        "fully-shard-kept": lambda: fully_shard_step(workload, net, reshards=False),
        "deepspeed-1": lambda: deepspeed_step(job, workload, net, 1),
        "deepspeed-2": lambda: deepspeed_step(job, workload, net, 2),
        "deepspeed-3": lambda: deepspeed_step(job, workload, net, 3),
    }
    step, losses = makes[job["variant"]](), []
    for number in range(num_steps):
        clock.tick()
        batch = batches[(number * job["processes"] + rank) % len(batches)]
        losses.append(step(lambda model: loss_of(model, batch)))
    if any([process.wait() for process in started]):  # whoever measures this process counts what its children did
        sys.exit("another process has failed")
    if rank == 0:
        clock.print_report(losses)
    # nothing is left to do, and Gloo's or DeepSpeed's threads that still run would abort the process now and then
    sys.stdout.flush()
    os._exit(0)


def fully_shard_step(workload, net, reshards):
    """Weights are freed after each forward pass, which is PyTorch's default, or stay for the backward pass."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.distributed.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for part in torch_models.shards(net):
        fully_shard(part, mesh=mesh, reshard_after_forward=reshards)
    fully_shard(net, mesh=mesh, reshard_after_forward=reshards)
    optimizer = workload.optimizer(net, True)

    def step(loss_of):
        loss = loss_of(net)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def deepspeed_step(job, workload, net, stage):
    """DeepSpeed with its own optimizer for the CPU."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    os.environ["PATH"] = os.path.dirname(sys.executable) + os.pathsep + os.environ["PATH"]  # ninja
    import deepspeed

    deepspeed.init_distributed("gloo")
    theirs = workload.optimizer(net, False)
    decays = isinstance(theirs, torch.optim.AdamW)
    groups = [
        {"params": group["params"], "weight_decay": group["weight_decay"]} for group in theirs.param_groups
    ]
    options = {key: theirs.defaults[key] for key in ("lr", "betas", "eps")}
    engine, *_ = deepspeed.initialize(model=net, model_parameters=groups, config={
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,  # DeepSpeed's default is 1
        "optimizer": {"type": "AdamW" if decays else "Adam", "params": {**options, "adam_w_mode": decays}},
        "zero_optimization": {"stage": stage},
    })
    if job["precision"] != "32-true":
        sys.exit(f"precision: DeepSpeed is compared in 32-true alone, not in {job['precision']}")

    def step(loss_of):
        loss = loss_of(engine)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step
