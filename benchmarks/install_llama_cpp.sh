#!/bin/sh
# Builds llama.cpp (through llama-cpp-python) from source for this CPU, in a virtual environment of its
# own: benchmarks/cpu.py measures it there. It takes some minutes, and needs g++ and Python.
#
#     benchmarks/install_llama_cpp.sh [FOLDER]      default: ~/.cache/slotzero/llama-cpp
set -eu
folder=${1:-${XDG_CACHE_HOME:-$HOME/.cache}/slotzero/llama-cpp}
"${PYTHON:-python3}" -m venv "$folder"
CMAKE_ARGS="-DGGML_NATIVE=ON" CMAKE_BUILD_PARALLEL_LEVEL=$(nproc) \
    "$folder/bin/pip" install --no-cache-dir --no-binary llama-cpp-python llama-cpp-python==0.3.36
echo "llama.cpp is in $folder"
