"""PyTorch's side of the benchmark of generation: nanoGPT's model with a cache of keys and values that is allocated once.

    plain      views of the cache, as long as the text is
    compiled   torch.compile and frozen weights; the whole cache and a mask, so that shapes stay
    int8       plain, with linear layers quantized dynamically
"""

import sys

import torch
import torch.nn.functional as F

import torch_models
from generate_protocol import greedy, print_report, read_job, read_weights, run_task

LAYERS, HEADS, CHANNELS, CONTEXT = 6, 6, 384, 256
FORMATS = {"f32": torch.float32, "bf16": torch.bfloat16, "int8": torch.float32}


def by_head(x):
    return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)


def logits_of(net, tokens, embedded_places, attend):
    """Of the token after the last one; `attend` keeps keys and values of a layer, and attends."""
    x = net.transformer.wte(tokens) + embedded_places
    for layer, block in enumerate(net.transformer.h):
        query, key, value = map(by_head, block.attn.c_attn(block.ln_1(x)).chunk(3, -1))
        y = attend(layer, query, key, value)
        x = x + block.attn.c_proj(y.transpose(1, 2).flatten(2))
        x = x + block.mlp(block.ln_2(x))
    return net.lm_head(net.transformer.ln_f(x[:, -1]))


def plain_pass(net, cache, tokens, start):
    end = start + tokens.size(1)

    def attend(layer, query, key, value):
        keys, values = cache[layer]
        keys[:, :, start:end], values[:, :, start:end] = key, value
        return F.scaled_dot_product_attention(query, keys[:, :, :end], values[:, :, :end], is_causal=start == 0)

    return logits_of(net, tokens, net.transformer.wpe.weight[start:end], attend)


def static_pass(net, cache, tokens, places):
    mask = torch.arange(CONTEXT) <= places[:, None]

    def attend(layer, query, key, value):
        keys, values = cache[layer]
        keys.index_copy_(2, places, key)
        values.index_copy_(2, places, value)
        return F.scaled_dot_product_attention(query, keys, values, attn_mask=mask)

    return logits_of(net, tokens, net.transformer.wpe(places), attend)


def load(job):
    net = torch_models.Gpt(LAYERS, HEADS, CHANNELS, CONTEXT).eval()
    weights = {
        name: torch.frombuffer(data, dtype=torch.float32).reshape(shape)
        for name, shape, data in read_weights(job["weights"])
    }
    net.load_state_dict(weights, strict="transformer.wte.weight" in weights)
    net = net.to(FORMATS[job["format"]])
    if job["format"] == "int8":
        net = torch.ao.quantization.quantize_dynamic(net, {torch.nn.Linear}, dtype=torch.qint8)
    return net


def run(job, net, task):
    shape = (len(task["prompts"]), HEADS, CONTEXT, CHANNELS // HEADS)
    cache = [[torch.zeros(shape, dtype=FORMATS[job["format"]]) for _ in range(2)] for _ in range(LAYERS)]
    if job["variant"] == "compiled":
        compiled = torch.compile(lambda *arguments: static_pass(net, cache, *arguments), dynamic=False)

        def forward(tokens, start):
            return compiled(tokens, torch.arange(start, start + tokens.size(1)))
    else:

        def forward(tokens, start):
            return plain_pass(net, cache, tokens, start)

    def prefill(prompts):
        return forward(torch.tensor(prompts), 0).argmax(-1).tolist()

    def step(last, place):
        return forward(torch.tensor(last)[:, None], place).argmax(-1).tolist()

    def generate(first_is_there):
        return greedy(task["prompts"], task["new_tokens"], first_is_there, prefill, step)

    logits = forward(torch.tensor(task["prompts"]), 0)[0].float().tolist()
    return run_task(task, logits, generate)


def main():
    job = read_job()
    if job["variant"] not in ("plain", "compiled") or job["format"] not in FORMATS:
        sys.exit(f"there is no {job['variant']} {job['format']}; use plain or compiled, and {', '.join(FORMATS)}")
    if job["variant"] == "compiled":
        from torch._inductor import config

        config.freezing = True
    with torch.no_grad():
        net = load(job)
        tasks = [run(job, net, task) for task in job["tasks"]]
    print_report(tasks, torch.get_num_threads())


main()
