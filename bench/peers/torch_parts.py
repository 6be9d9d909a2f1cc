"""PyTorch's and DeepSpeed's sides of benchmarks of voltaic's own parts.

    torch_parts.py update        steps of optimizers: one line for each, its name and its milliseconds
    torch_parts.py activations   what checkpointing saves: precision, way, MiB after the forward pass, milliseconds of steps
"""

import functools
import sys
import time

import torch

from torch_models import WORKLOADS

WEIGHTS = 100_000_000
STEPS = 9
WARM_UP = 3


def steps_ms(step):
    times = []
    for _ in range(STEPS):
        start = time.perf_counter()
        step()
        times.append((time.perf_counter() - start) * 1e3)
    return times[WARM_UP:]


def update():
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    fp32, bf16 = torch.float32, torch.bfloat16
    for name, dtype, options in [
        ("DeepSpeedCPUAdam float32", fp32, None),
        ("DeepSpeedCPUAdam bfloat16, states float32", bf16, {"fp32_optimizer_states": True}),
        ("DeepSpeedCPUAdam bfloat16", bf16, {"fp32_optimizer_states": False}),
        ("torch fused float32", fp32, {"fused": True}),
        ("torch fused bfloat16", bf16, {"fused": True}),
    ]:
        weight = torch.nn.Parameter(torch.randn(WEIGHTS, dtype=dtype))
        weight.grad = torch.randn(WEIGHTS, dtype=dtype)
        kind = torch.optim.AdamW if name.startswith("torch") else DeepSpeedCPUAdam
        optimizer = kind([weight], lr=1e-3, weight_decay=0.01, **(options or {}))
        print(name, *steps_ms(optimizer.step), sep="\t", flush=True)
        del weight, optimizer


def activations():
    from torch.profiler import ProfilerActivity, profile
    from torch.utils.checkpoint import checkpoint

    workload = WORKLOADS["gpt-mini"]
    x, y = workload.draw_batch()
    for precision in ("32-true", "bf16-mixed"):
        for way in ("plain", "each block"):
            net = workload.build()
            if way != "plain":
                for block in net.transformer["h"]:
                    block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
            optimizer = workload.optimizer(net, fused=True)

            def forward():
                with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16-mixed"):
                    logits = net(x)
                    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten())

            def step():
                optimizer.zero_grad()
                forward().backward()
                optimizer.step()

            times = steps_ms(step)
            optimizer.zero_grad()
            with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
                loss = forward()
            kept = sum(event.self_cpu_memory_usage for event in recorded.events())
            del loss
            print(precision, way, kept / 2**20, *times, sep="\t", flush=True)


torch.set_num_threads(1)
{"update": update, "activations": activations}[sys.argv[1]]()
