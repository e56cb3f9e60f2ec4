#!/usr/bin/env bash
# Packs vLLM, NIXL, what they import, this project, TileRT and (optionally) a GGUF into folders DIR/part1 … part7 of less
# than 64 MiB each, for a machine with CUDA 13, Python 3.12 and torch 2.11 that reaches no network. `unpack.sh` puts them there.
# Needs Python 3.11 or newer with pip and hatchling, tar, xz and unzip; about 8 minutes on two cores.
set -euo pipefail
dir=$(realpath -m "${1:?usage: bundle.sh DIR [MODEL.gguf]}") gguf=${2:-}
here=$(cd "$(dirname "$0")" && pwd) root=$(cd "$(dirname "$0")/../.." && pwd) python=${PYTHON:-python3}
mkdir -p "$dir"/{unpacked,part1,part2,part3,part4}

# Wheels of the machine's Python, whatever Python runs here.
get() {
  PIP_CONSTRAINT='' "$python" -m pip download -q --no-deps --only-binary=:all: --python-version 3.12 \
    --implementation cp --abi cp312 --abi abi3 --abi none --platform any --platform manylinux1_x86_64 \
    --platform manylinux2014_x86_64 $(printf -- '--platform manylinux_2_%s_x86_64 ' 39 35 34 31 28 27 26 24 17 5) "$@"
}

# vLLM's wheel is 304 MB. Hopper needs neither flash-attention 2 nor the Rust front end, nor DeepGEMM of other Pythons.
get -d "$dir/unpacked" vllm==0.26.0
cd "$dir/unpacked"
unzip -q -o vllm-0.26.0*.whl
rm -rf vllm-0.26.0*.whl vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so vllm/vllm-rs vllm/third_party/fmha_sm100/cutlass
find vllm/third_party/deep_gemm -name '_C.cpython-3*' ! -name '*312*' -delete
core=vllm/_C_stable_libtorch.abi3.so moe=vllm/_moe_C_stable_libtorch.abi3.so
tar cf - --exclude="$core" --exclude="$moe" vllm vllm-0.26.0.dist-info | xz -T0 -6 >"$dir/part1/vllm_python.tar.xz"
tar cf - "$moe" | xz -T0 -6 >"$dir/part1/vllm_moe.tar.xz"
tar cf - "$core" | xz -T0 -6 >"$dir/part2/vllm_core.tar.xz"
cd "$here"
rm -rf "$dir/unpacked"

mkdir -p "$dir/part5"
get -d "$dir/part5" pycountry==26.2.16
get -d "$dir/part3" -r requirements.txt
get -d "$dir/part4" nixl-cu13==1.5.1 nixl==1.5.2 gguf==0.19.0 pytest-asyncio==1.5.0
for project in . engines/vllm engines/transformers plugins/nixl; do
  "$python" -m pip wheel -q --no-deps --no-build-isolation -w "$dir/part4" "$root/$project"
done

# TileRT without its kernels, which are for B200: connector, decode server and stub engine are Python.
mkdir -p "$dir/part7" "$dir/unpacked"
get -d "$dir/unpacked" tilert==0.1.6.post3
cd "$dir/unpacked"
unzip -q -o tilert-*.whl -x '*.so'
tar cf - tilert tilert-*.dist-info | xz -6 >"$dir/part7/tilert.tar.xz"
cd "$here"
rm -rf "$dir/unpacked"
"$python" -m pip wheel -q --no-deps --no-build-isolation -w "$dir/part7" "$root/engines/tilert"

if [ -n "$gguf" ]; then
  split -n 2 -d "$gguf" "$dir/half"
  for n in 0 1; do mkdir -p "$dir/part$((5 + n))" && mv "$dir/half0$n" "$dir/part$((5 + n))/model.gguf.$n"; done
fi
du -sm "$dir"/part*
