"""What programs that generate text say to the runner: see `measure/src/generate.rs`."""

import json
import sys
import time


def read_job():
    return json.loads(sys.argv[2])


def run_task(task, logits, generate):
    """`generate` continues the prompts and calls its argument once the first token of each is there."""
    report = {"prefill_secs": [], "decode_secs": [], "logits": logits}
    for turn in range(task["warmup"] + task["times"]):
        first = []
        start = time.perf_counter()
        report["tokens"] = generate(lambda: first.append(time.perf_counter() - start))
        everything = time.perf_counter() - start
        if turn >= task["warmup"]:
            report["prefill_secs"].append(first[0])
            report["decode_secs"].append(everything - first[0])
    return report


def greedy(prompts, new_tokens, first_is_there, prefill, step):
    """The most likely tokens: `prefill` takes the prompts, `step` the last token of each; both give the next one of each."""
    last = prefill(prompts)
    first_is_there()
    tokens = [[token] for token in last]
    for place in range(len(prompts[0]), len(prompts[0]) + new_tokens - 1):
        last = step(last, place)
        for own, token in zip(tokens, last):
            own.append(token)
    return tokens


def print_report(tasks, num_threads):
    with open("/proc/self/status") as status:
        line = next(line for line in status if line.startswith("VmHWM:"))
    report = {"tasks": tasks, "num_threads": num_threads, "peak_rss_bytes": 1024 * int(line.split()[1])}
    print("\n" + json.dumps(report))


def read_weights(path):
    """Name, shape and bytes of each tensor of a safetensors file, all in float32."""
    with open(path, "rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        header.pop("__metadata__", None)
        data = file.read()
    for name, tensor in header.items():
        if tensor["dtype"] != "F32":
            sys.exit(f"{path}: {name} is {tensor['dtype']}, not F32")
        start, end = tensor["data_offsets"]
        yield name, tensor["shape"], bytearray(data[start:end])
