"""llama.cpp as a process of benchmarks/cpu.py, in the environment that has llama_cpp.

    python llama_cpp_engine.py MODEL.gguf NUM_THREADS EXTRA_BUFFERS

Each line of standard input is a prompt and a number of new tokens as JSON; the answer is a line
with the number of tokens generated. EXTRA_BUFFERS is 0 or 1: whether llama.cpp may repack weights,
for AMX among others.
"""

import json
import sys

import llama_cpp.llama_cpp as native
from llama_cpp import Llama

path, num_threads, has_extra_buffers = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "1"
defaults = native.llama_model_default_params


def params() -> native.llama_model_params:
    chosen = defaults()
    chosen.use_extra_bufts = has_extra_buffers
    return chosen


native.llama_model_default_params = params
llama = Llama(path, n_ctx=2048, n_threads=num_threads, n_threads_batch=num_threads, verbose=False)
for line in sys.stdin:
    prompt, new_tokens = json.loads(line)
    llama.reset()
    made = 0
    for _ in llama.generate(prompt, temp=0.0):  # evaluates the prompt, then token by token
        made += 1
        if made == new_tokens:
            break
    print(made, flush=True)
