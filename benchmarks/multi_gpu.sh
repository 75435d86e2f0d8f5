#!/usr/bin/env bash
# Training steps on 1, 2, 4, ... GPUs of one host, and tensor parallelism on all of them, within a time limit.
#
#     benchmarks/multi_gpu.sh [SECONDS [RANKS...]]    # by default 480 seconds, and the powers of two up to all GPUs
#
# Scripts write rows as they go, into results/scaling_*.csv. After the limit the running script is stopped, and its rows so far
# stay; the others are left out. TORCH_KINDS, JAX_KINDS and TP_KINDS are the kinds of each script.
set -u
cd "$(dirname "${BASH_SOURCE[0]}")"
PYTHON=${PYTHON:-python3}
limit=${1:-480}
shift || true
ranks=("$@")
gpus=$(nvidia-smi -L | wc -l) || exit 1
if [ ${#ranks[@]} = 0 ]; then
    for ((n = 1; n <= gpus; n *= 2)); do ranks=("$n" "${ranks[@]}"); done # all GPUs first
fi
: "${TORCH_KINDS=bf16 compiled,torchao compiled,fp8 fused,fp8 fused zero,block fused}"
: "${JAX_KINDS=bf16,fp8}"
: "${TP_KINDS=bf16,fp8,fp8 codes,fp8 overlap}"

status=0
run() { # NAME COMMAND...
    local left=$((limit - SECONDS))
    if [ $left -le 0 ]; then
        echo "multi_gpu: no time for $1" >&2
        status=1
    else
        echo "multi_gpu: $1, $left s left"
        timeout "$left" "${@:2}" || { echo "multi_gpu: $1 failed or was stopped" >&2; status=1; }
    fi
}

for n in "${ranks[@]}"; do
    run "torch, $n GPUs" "$PYTHON" bench_step_torch.py --ranks "$n" --kinds "$TORCH_KINDS" --out "scaling_torch_$n"
done
run "tensor parallelism, $gpus GPUs" "$PYTHON" bench_tensor_parallel.py --ranks "$gpus" --kinds "$TP_KINDS" --out "scaling_tensor_parallel_$gpus"
for n in "${ranks[@]}"; do
    devices=$(seq -s, 0 $((n - 1)))
    run "jax, $n GPUs" env CUDA_VISIBLE_DEVICES="$devices" "$PYTHON" bench_step_jax.py --kinds "$JAX_KINDS" --out "scaling_jax_$n"
done
exit $status
