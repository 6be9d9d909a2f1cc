"""llama.cpp's side of the benchmark of generation: the same weights as a GGUF file of the architecture gpt2, by llama-cpp-python's
bindings of its C interface. Its GELU is the tanh approximation, by a table in float16."""

import ctypes
import os
import sys
import tempfile

import gguf
import llama_cpp
import numpy

from generate_protocol import greedy, print_report, read_job, read_weights, run_task

LAYERS, HEADS, CHANNELS, CONTEXT, VOCAB = 6, 6, 384, 256, 256
KINDS = gguf.GGMLQuantizationType
FORMATS = {"f32": KINDS.F32, "f16": KINDS.F16, "q8_0": KINDS.Q8_0}
NAMES = {
    "ln_1": "attn_norm",
    "attn.c_attn": "attn_qkv",
    "attn.c_proj": "attn_output",
    "ln_2": "ffn_norm",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
}


def name_of(name):
    fixed = {"lm_head": "token_embd", "transformer.wpe": "position_embd", "transformer.ln_f": "output_norm"}
    name = name.removesuffix(".weight")
    if name in fixed:
        return fixed[name]
    _, _, layer, part = name.split(".", 3)
    return f"blk.{layer}.{NAMES[part]}"


def write_gguf(weights, kind, path):
    writer = gguf.GGUFWriter(path, "gpt2")
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(CHANNELS)
    writer.add_feed_forward_length(4 * CHANNELS)
    writer.add_block_count(LAYERS)
    writer.add_head_count(HEADS)
    writer.add_layer_norm_eps(1e-5)
    writer.add_vocab_size(VOCAB)
    writer.add_tokenizer_model("none")
    for name, shape, data in read_weights(weights):
        if name == "transformer.wte.weight":  # tied to lm_head
            continue
        values = numpy.frombuffer(data, numpy.float32).reshape(shape)
        is_matrix = len(shape) == 2 and "wpe" not in name  # llama.cpp leaves the table of positions in float32
        own = kind if is_matrix else KINDS.F32
        writer.add_tensor(f"{name_of(name)}.weight", gguf.quants.quantize(values, own), raw_dtype=own)
        if name.startswith("transformer.h") or "ln_f" in name:  # all of gpt2's layers have biases
            writer.add_tensor(f"{name_of(name)}.bias", numpy.zeros(shape[0], numpy.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


class Context:
    """Sequences with their cache."""

    def __init__(self, model, job, num_sequences, num_threads):
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_seq_max = CONTEXT * num_sequences, num_sequences
        params.n_batch = params.n_ubatch = 512
        params.n_threads = params.n_threads_batch = num_threads
        if job["format"] == "f32":
            params.type_k = params.type_v = int(KINDS.F32)
        self.context = llama_cpp.llama_init_from_model(model, params)
        self.batch = llama_cpp.llama_batch_init(512, 0, 1)

    def logits(self, tokens, start):
        """After the last token of each sequence; `tokens` are those from this place on, as many of each."""
        batch, at = self.batch, 0
        ends = []
        for sequence, own in enumerate(tokens):
            for place, token in enumerate(own, start):
                batch.token[at], batch.pos[at] = token, place
                batch.n_seq_id[at], batch.seq_id[at][0] = 1, sequence
                batch.logits[at] = place == start + len(own) - 1
                at += 1
            ends.append(at - 1)
        batch.n_tokens = at
        if llama_cpp.llama_decode(self.context, batch) != 0:
            sys.exit("llama_decode failed")
        rows = (llama_cpp.llama_get_logits_ith(self.context, end) for end in ends)
        return [numpy.ctypeslib.as_array(row, (VOCAB,)) for row in rows]

    def clear(self):
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self.context), True)


def run(context, task):
    logits = context.logits(task["prompts"][:1], 0)[0].tolist()

    def next_tokens(tokens, start):
        return [int(row.argmax()) for row in context.logits(tokens, start)]

    def generate(first_is_there):
        context.clear()
        step = lambda last, place: next_tokens([[token] for token in last], place)
        return greedy(task["prompts"], task["new_tokens"], first_is_there, lambda all: next_tokens(all, 0), step)

    return run_task(task, logits, generate)


def has_amx():
    with open("/proc/cpuinfo") as file:
        return "amx_int8" in file.read()


@llama_cpp.llama_log_callback
def silent(level, text, user_data):
    pass


def main():
    job, num_threads = read_job(), int(os.environ["OMP_NUM_THREADS"])
    if job["format"] not in FORMATS:
        sys.exit(f"format: there is no {job['format']}; use {', '.join(FORMATS)}")
    llama_cpp.llama_log_set(silent, ctypes.c_void_p(0))
    llama_cpp.llama_backend_init()
    with tempfile.NamedTemporaryFile(suffix=".gguf") as file:
        write_gguf(job["weights"], FORMATS[job["format"]], file.name)
        params = llama_cpp.llama_model_default_params()
        params.use_extra_bufts = not has_amx()  # llama.cpp 0.3.36 ends with SIGSEGV when it multiplies several rows by AMX
        model = llama_cpp.llama_model_load_from_file(file.name.encode(), params)
        if not model:
            sys.exit("llama.cpp does not load the file that was written for it")
        contexts = [Context(model, job, len(task["prompts"]), num_threads) for task in job["tasks"]]
        tasks = [run(context, task) for context, task in zip(contexts, job["tasks"])]
    print_report(tasks, llama_cpp.llama_n_threads(contexts[0].context))


main()
