#!/usr/bin/env bash
# Scaling over the GPUs of one host, within a time limit. Rows are written as they come, into results/scaling_*.csv.
#
#     benchmarks/multi_gpu.sh [SECONDS [PART...]]    # by default 540 seconds, and all parts in this order
#
#     collectives                            rates of all-gather, reduce-scatter and all-to-all
#     torch, jax                             the step of 2.0 B weights on all GPUs
#     tensor-parallel, tensor-parallel-jax   blocks of width 8192, sharded over all GPUs
#     mesh                                   the same blocks, sharded over pairs of GPUs, and by FSDP2 over the pairs
#     experts, experts-jax                   DeepSeek-V3-like experts over all GPUs
#     large, large-jax                       a step of 8 B weights, the shape of Llama 3
#     torch-few, jax-few, tensor-parallel-few, collectives-few   these parts on 1, 2, 4, ... GPUs, fewer than all
#
# A part gets a share of the seconds left, in proportion to the time that it takes on four H100s. At its end the part is
# stopped: its rows stay, and the next part begins. Runs on fewer GPUs go side by side, each on GPUs of its own, and share
# only the host and NVSwitch. That is fair while the host has some cores for each GPU.
#
# Compiled programs are kept in CACHE. A run that finds them there has low times of compilation in its rows.
# In the environment: RESULTS, a folder for the rows; PYTHON; TORCH_KINDS, JAX_KINDS, ... as below, the kinds of scripts.
# LARGE_BATCH=2 doubles the tokens of the large model, by default 1 x 4096 a GPU; it needs more than 80 GB.
# CPU_RANKS=2 tries the script without GPUs: so many ranks on the CPU, and tiny models.
set -u
cd "$(dirname "${BASH_SOURCE[0]}")" || exit 1
PYTHON=${PYTHON:-python3}
RESULTS=${RESULTS:-$PWD/results}
CACHE=${CACHE:-$PWD/../build/multi_gpu}
: "${TORCH_KINDS=bf16 compiled,torchao compiled,fp8 compiled,fp8 fused,fp8 fused ordered,fp8 fused zero,block fused,nvfp4 fused,mxfp8 fused}"
: "${JAX_KINDS=bf16,fp8,block,nvfp4,mxfp8}"
: "${TENSOR_KINDS=bf16,fp8,fp8 codes,fp8 overlap,nvfp4 codes,bf16 compiled,fp8 compiled}"
: "${TENSOR_JAX_KINDS=bf16,fp8,fp8 overlapped}"
: "${LARGE_KINDS=bf16 compiled,torchao compiled,fp8 fused zero,fp8 compiled}"
: "${LARGE_JAX_KINDS=bf16,fp8}"
declare -A weight=([collectives]=30 [torch]=110 [jax]=160 [tensor-parallel]=80 [tensor-parallel-jax]=80 [mesh]=80 [experts]=50
    [experts-jax]=120 [large]=150 [large-jax]=150 [torch-few]=110 [jax-few]=160 [tensor-parallel-few]=80 [collectives-few]=30)
order=(collectives torch jax tensor-parallel tensor-parallel-jax mesh experts experts-jax large large-jax torch-few
    jax-few tensor-parallel-few collectives-few)
experts=deepseek dense=2b large=8b wide=wide mib=0.0625,16,128,512

limit=${1:-540}
parts=("${@:2}")
[ ${#parts[@]} = 0 ] && parts=("${order[@]}")
for part in "${parts[@]}"; do
    [ -n "${weight[$part]:-}" ] || { echo "multi_gpu: no part $part; parts are: ${order[*]}" >&2; exit 2; }
done
if [ -n "${CPU_RANKS:-}" ]; then
    gpus=$CPU_RANKS experts=tiny dense=tiny large=tiny wide=tiny mib=0.0625,1
    export BENCH_DEVICE=cpu JAX_PLATFORMS=cpu OMP_NUM_THREADS=1
else
    gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU') || { echo "multi_gpu: no GPU; CPU_RANKS=2 tries it on CPUs" >&2; exit 1; }
fi
fewer=()
for ((n = 1; n < gpus; n *= 2)); do fewer+=("$n"); done # 1 + 2 + ... never needs more than all GPUs
mkdir -p "$RESULTS" "$CACHE"
# Near the limit of memory, torch's allocator would wait for the GPU to free segments of other sizes.
export PYTORCH_CUDA_ALLOC_CONF=${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}
export TORCHINDUCTOR_CACHE_DIR=$CACHE/inductor TRITON_CACHE_DIR=$CACHE/triton JAX_COMPILATION_CACHE_DIR=$CACHE/jax

job() { # NAME RANKS COMMAND... starts a command on the next GPUs, with the file of its rows
    local devices
    devices=$(seq -s, "$next" $((next + $2 - 1)))
    next=$((next + $2))
    echo "multi_gpu: $1 on GPUs $devices, at most $share s"
    if [ -n "${CPU_RANKS:-}" ]; then local -x XLA_FLAGS="--xla_force_host_platform_device_count=$2"; fi
    CUDA_VISIBLE_DEVICES=$devices timeout -k 10 "$share" "$PYTHON" "${@:3}" --out "$RESULTS/scaling_$1" &
    running[$!]=$1
}

collectives() { job "collectives_$1" "$1" bench_collectives.py --ranks "$1" --mib $mib; }
torch() { job "torch_$1" "$1" bench_step_torch.py --model $dense --ranks "$1" --kinds "$TORCH_KINDS"; }
jax() { job "jax_$1" "$1" bench_step_jax.py --model $dense --kinds "$JAX_KINDS"; }
tensor_parallel() { # RANKS [GROUPS]
    local name=tensor_parallel_$1 groups=${2:-1}
    [ "$groups" = 1 ] || name=mesh_${groups}x$(($1 / groups))
    job "$name" "$1" bench_tensor_parallel.py --model $wide --ranks "$1" --fsdp "$groups" --kinds "$TENSOR_KINDS"
}

jobs_of() { # PART
    local n name
    case $1 in
    torch | jax | collectives) "$1" "$gpus" ;;
    torch-few | jax-few) for n in "${fewer[@]}"; do "${1%-few}" "$n"; done ;;
    tensor-parallel) tensor_parallel "$gpus" ;;
    tensor-parallel-few) for n in "${fewer[@]:1}"; do tensor_parallel "$n"; done ;;
    collectives-few) for n in "${fewer[@]:1}"; do collectives "$n"; done ;;
    tensor-parallel-jax)
        job "tensor_parallel_jax_$gpus" "$gpus" bench_tensor_parallel_jax.py --model $wide --kinds "$TENSOR_JAX_KINDS" ;;
    mesh) [ "$gpus" -lt 4 ] || tensor_parallel "$gpus" $((gpus / 2)) ;;
    experts) job "experts_$gpus" "$gpus" bench_expert_parallel.py --ranks "$gpus" --shapes $experts ;;
    experts-jax) job "experts_jax_$gpus" "$gpus" bench_expert_parallel_jax.py --shapes $experts ;;
    large)
        name=torch_8b_$gpus
        [ "${LARGE_BATCH:-1}" = 1 ] || name=torch_8b_${LARGE_BATCH}x_$gpus
        job "$name" "$gpus" bench_step_torch.py --model $large --ranks "$gpus" --batch "${LARGE_BATCH:-1}" \
            --kinds "$LARGE_KINDS" ;;
    large-jax) job "jax_8b_$gpus" "$gpus" bench_step_jax.py --model $large --batch 1 --kinds "$LARGE_JAX_KINDS" ;;
    esac
}

missing() { # PART: prints a package that the part needs and that is not installed
    local needed=torch
    case $1 in *jax*) needed="jax optax" ;; esac
    "$PYTHON" -c 'import importlib.util as u, sys; print(next((m for m in sys.argv[1:] if not u.find_spec(m)), ""))' \
        $needed
}

status=0
for i in "${!parts[@]}"; do
    part=${parts[i]} left=$((limit - SECONDS)) rest=0 next=0
    for later in "${parts[@]:i}"; do rest=$((rest + weight[$later])); done
    share=$((left * weight[$part] / rest))
    lacks=$(missing "$part")
    if [ -n "$lacks" ]; then
        echo "multi_gpu: skipped $part: $lacks is not installed"
        continue
    elif [ $share -le 0 ]; then
        echo "multi_gpu: no time for $part" >&2
        status=1
        continue
    fi
    declare -A running=()
    jobs_of "$part"
    [ ${#running[@]} != 0 ] || echo "multi_gpu: skipped $part: too few GPUs"
    for process in "${!running[@]}"; do
        wait "$process"
        case $? in
        0) ;;
        124 | 137) echo "multi_gpu: ${running[$process]} was stopped after $share s" >&2; status=1 ;;
        *) echo "multi_gpu: ${running[$process]} failed" >&2; status=1 ;;
        esac
    done
done
exit $status
