"""Reads traces as TensorBoard's profile plugin does, and prints what it finds as JSON.

    pip install torch-tb-profiler
    python read_traces.py TRACE..

Nothing here is a copy of the plugin's rules: its own parser reads the file.
"""

import collections
import json
import logging
import sys
import tempfile

from torch_tb_profiler.profiler.data import RunProfileData
from torch_tb_profiler.profiler.node import is_operator_node
from torch_tb_profiler.profiler.run_generator import RunGenerator


def operators(node, counts):
    for child in node.children:
        if is_operator_node(child):
            counts[child.name] += 1
        operators(child, counts)


def read(path):
    logging.disable(logging.CRITICAL)
    profile = RunProfileData.parse("worker", "span", path, tempfile.mkdtemp())
    counts = collections.Counter()
    for tree in profile.tid2tree.values():
        operators(tree, counts)
    kernels = collections.Counter()
    for event in profile.events:
        if event.type == "Kernel":
            kernels[event.name] += 1
    memory = [event for event in profile.events if event.type == "Memory"]
    views = RunGenerator("worker", "span", profile).generate_run_profile()
    return {
        "steps": profile.steps_names,
        "operators": counts,
        "kernels": kernels,
        # time on the device of operators, which the plugin finds by the arrows
        "device_us": {op.name: op.self_device_duration for op in profile.op_list_groupby_name if op.self_device_duration > 0},
        "has_kernel": profile.has_kernel,
        "has_memcpy": profile.has_memcpy_or_memset,
        "memory_events": len(memory),
        "memory_of": views.get_memory_curve()["metadata"]["devices"],
        "distributed": profile.distributed_info,
        "devices": [device["name"] for device in profile.device_props or []],
    }


print(json.dumps([read(path) for path in sys.argv[1:]]))
