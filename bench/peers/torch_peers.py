"""PyTorch's side of the benchmark: a plain loop, the same with fused optimizers, torch.compile, Lightning, and those that divide
states among processes (torch_sharded.py).

Speaks the protocol of `measure/src/lib.rs`: a job as the only argument, a report as the last line of standard output.
Weights and batches are drawn as `voltaic/src/data.rs` draws them, so that both train the same network on the same data.
"""

import functools
import json
import os
import sys
import tempfile
import time

import torch

import torch_models

NUM_BATCHES = 8
SHARDED = ["fully-shard", "fully-shard-kept", "deepspeed-1", "deepspeed-2", "deepspeed-3"]


class StepClock:
    """Takes the time at the start of each step; on CUDA it waits for the device before each block of steps."""

    def __init__(self, job):
        self.job, self.block = job, job.get("block", 1)
        self.is_on_cuda = job.get("accelerator", "cpu") == "cuda"
        self.first_step_at = None
        self.starts, self.cpu_secs = [], []

    def tick(self):
        if self.first_step_at is None:
            self.first_step_at = time.time()
            torch.manual_seed(3)  # the masks of dropout are the same everywhere
        if self.is_on_cuda and len(self.starts) % self.block == 0:
            torch.cuda.synchronize()
        self.starts.append(time.perf_counter())
        self.cpu_secs.append(time.process_time())

    def print_report(self, losses):
        job, block = self.job, self.block
        secs = [end - start for start, end in zip(self.starts, self.starts[1:])]
        timed = secs[job["warmup"]:]
        report = {
            "first_step_at": self.first_step_at,
            "first_step_secs": secs[0],
            "step_secs": [sum(timed[start:start + block]) / block for start in range(0, len(timed), block)],
            "step_cpu_secs": (self.cpu_secs[-1] - self.cpu_secs[job["warmup"]]) / job["steps"],
            "losses": [loss.item() for loss in losses],
            "num_threads": torch.get_num_threads(),
            "peak_rss_bytes": peak_rss_bytes(),
            "peak_device_bytes": torch.cuda.max_memory_allocated() if self.is_on_cuda else None,
        }
        print("\n" + json.dumps(report))


def peak_rss_bytes():
    with open("/proc/self/status") as status:
        line = next(line for line in status if line.startswith("VmHWM:"))
    return 1024 * int(line.split()[1])


def set_weights(net):
    """Draws matrices and kernels in the order of their names; biases become 0, weights of norms stay 1."""
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in sorted(net.named_parameters()):
            if parameter.dim() > 1:
                fan_in = parameter.numel() / parameter.size(0)
                parameter.normal_(0.0, fan_in ** -0.5)
            elif name.endswith("bias"):
                parameter.zero_()


def draw_batches(workload):
    torch.manual_seed(2)
    return [workload.draw_batch() for _ in range(NUM_BATCHES)]


def loss_of(net, batch):
    inputs, targets = batch
    logits = net(inputs)
    return torch.nn.functional.cross_entropy(logits.flatten(0, -2), targets.flatten(0, -1))


def train_plain(job, net, optimizer, batches, loss_of=loss_of):
    clock, losses, device = StepClock(job), [], job.get("accelerator", "cpu")
    for step in range(total_steps(job)):
        clock.tick()
        batch = [part.to(device, non_blocking=True) for part in batches[step % NUM_BATCHES]]
        with torch.autocast(device, torch.bfloat16, enabled=job["precision"] == "bf16-mixed"):
            loss = loss_of(net, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    clock.print_report(losses)


def train_checkpointed(job, net, optimizer, batches):
    from torch.utils.checkpoint import checkpoint

    for block in net.transformer["h"]:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    train_plain(job, net, optimizer, batches)


def train_compiled(job, net, optimizer, batches):
    train_plain(job, net, optimizer, batches, torch.compile(loss_of))


def train_lightning(job, net, optimizer, batches, defaults):
    from torch.utils.data import DataLoader, Dataset, DistributedSampler

    import lightning

    processes = job.get("processes", 1)

    class Ready(Dataset):
        """Batches that are ready: handing one out costs what the loader itself costs."""

        def __len__(self):
            return total_steps(job) * processes

        def __getitem__(self, index):
            return batches[index % NUM_BATCHES]

    class Timed(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net, self.clock, self.losses = net, StepClock(job), []

        def training_step(self, batch):
            self.clock.tick()
            loss = loss_of(self.net, batch)
            if defaults:
                self.log("train_loss", loss, prog_bar=True)
            self.losses.append(loss.detach())
            return loss

        def configure_optimizers(self):
            return optimizer

    names = ["logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"]
    options = {} if defaults else dict.fromkeys(names, False)
    module = Timed()
    with tempfile.TemporaryDirectory() as folder:
        trainer = lightning.Trainer(
            accelerator=job.get("accelerator", "cpu"), devices=processes, strategy="ddp" if processes > 1 else "auto",
            precision=job["precision"], max_steps=total_steps(job), default_root_dir=folder, **options
        )
        # Lightning's own would shuffle
        sampler = DistributedSampler(Ready(), processes, int(os.environ.get("LOCAL_RANK", 0)), shuffle=False)
        loader = DataLoader(Ready(), batch_size=None, sampler=sampler if processes > 1 else None)
        trainer.fit(module, loader)
    if trainer.is_global_zero:
        if processes > 1:
            for process in trainer.strategy.launcher.procs:
                process.wait()  # whoever measures this process counts what its children did
        module.clock.print_report(module.losses)


def train_sharded(job, workload, net, batches):
    import torch_sharded

    torch_sharded.train(job, workload, net, batches, loss_of, StepClock(job), total_steps(job))


def total_steps(job):
    """One more than is timed, since a step ends where the next one starts."""
    return job["warmup"] + job["steps"] + 1


def main():
    job = json.loads(sys.argv[1])
    workload = torch_models.WORKLOADS[job["workload"]]
    net = workload.build()
    set_weights(net)
    if job["variant"] == "plain-channels-last":
        net = net.to(memory_format=torch.channels_last)
    if not job["variant"].startswith("lightning"):  # which moves it itself
        net = net.to(job.get("accelerator", "cpu"))
    fused = True if job["variant"] == "plain-fused" else None
    optimizer = workload.optimizer(net, fused)
    batches = draw_batches(workload)
    trainings = {
        "plain": lambda: train_plain(job, net, optimizer, batches),
        "plain-fused": lambda: train_plain(job, net, optimizer, batches),
        "plain-channels-last": lambda: train_plain(job, net, optimizer, batches),
        "plain-checkpointed": lambda: train_checkpointed(job, net, optimizer, batches),
        "compile": lambda: train_compiled(job, net, optimizer, batches),
        "lightning": lambda: train_lightning(job, net, optimizer, batches, defaults=False),
        "lightning-defaults": lambda: train_lightning(job, net, optimizer, batches, defaults=True),
        **dict.fromkeys(SHARDED, lambda: train_sharded(job, workload, net, batches)),
    }
    if job["precision"] not in ("32-true", "bf16-mixed"):
        sys.exit(f"precision: there is no {job['precision']}; use 32-true or bf16-mixed")
    if job["variant"] not in trainings:
        sys.exit(f"variant: there is no {job['variant']}; use one of {', '.join(trainings)}")
    trainings[job["variant"]]()


main()
