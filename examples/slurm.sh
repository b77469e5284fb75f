#!/bin/bash
# Training and its vLLM server in one Slurm job: the last node generates, all others train. From a clone of the repository:
#
#   sbatch examples/slurm.sh                                        # two nodes, Qwen2.5-7B-Instruct on GSM8K
#   sbatch --nodes=5 examples/slurm.sh --max_steps 2000             # four nodes train; options go to the training
#   MODEL=Qwen/Qwen2.5-1.5B-Instruct sbatch examples/slurm.sh       # settings below can be set in the environment
#
# The clone, its environment and OUTPUT must be on a file system that all nodes see. Activate the environment before sbatch.
# Ten minutes before the time limit, and after a failed node, the job is requeued and resumes from its last
# complete checkpoint (save_steps). Its exit status is that of the training. More: docs/scaling.md. Not run on a cluster yet.
#
#SBATCH --job-name=trl-qurl
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@600
#SBATCH --requeue
#SBATCH --output=slurm-%j.log
#SBATCH --open-mode=append

# shellcheck disable=SC2329  # functions that traps call

set -u -o pipefail

MODEL=${MODEL:-Qwen/Qwen2.5-7B-Instruct}
SCHEME=${SCHEME:-int8}
OUTPUT=${OUTPUT:-$PWD/policy}
GPUS=${GPUS:-${SLURM_GPUS_ON_NODE:-8}}                  # of each node
TENSOR_PARALLEL=${TENSOR_PARALLEL:-1}                   # GPUs that share one copy of the model on the server
DATA_PARALLEL=${DATA_PARALLEL:-$((GPUS / TENSOR_PARALLEL))}  # copies of the model on the server
ACCELERATE_CONFIG=${ACCELERATE_CONFIG:-examples/accelerate_configs/fsdp2.yaml}
TRAINING=${TRAINING:--m trl_qurl grpo}                   # or a script of your own
SERVER_PORT=${SERVER_PORT:-8000}
TRAINER_PORT=${TRAINER_PORT:-29500}

export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:-1}     # srun does not take it from sbatch since Slurm 22.05
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-8}
# One secret for both ends of this job: trl-qurl serve requires one.
export VLLM_API_KEY=${VLLM_API_KEY:-$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')}

: "${SLURM_JOB_NODELIST:?is not set: submit this script to Slurm, as sbatch examples/slurm.sh}"
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
if ((${#nodes[@]} < 2)); then
    echo "This job has ${#nodes[@]} node, and needs one for the server and one or more for training: --nodes=2." >&2
    exit 2
fi
server_node=${nodes[-1]}
trainer_nodes=("${nodes[@]:0:${#nodes[@]}-1}")

# A node's first IPv4 address that other nodes can reach. Where that is not the fast network, set SERVER_ADDRESS and
# TRAINER_ADDRESS.
address_of() {
    srun --nodes=1 --ntasks=1 --nodelist="$1" hostname --all-ip-addresses |
        tr ' ' '\n' | grep -E '^[0-9]+(\.[0-9]+){3}$' | grep -v -m1 '^127\.'
}
SERVER_ADDRESS=${SERVER_ADDRESS:-$(address_of "$server_node")} || exit 2
TRAINER_ADDRESS=${TRAINER_ADDRESS:-$(address_of "${trainer_nodes[0]}")} || exit 2

# The newest checkpoint that is complete: trainer_state.json is written last.
resume=()
while read -r checkpoint; do
    [[ -f $checkpoint/trainer_state.json ]] && resume=(--resume_from_checkpoint "$checkpoint")
done < <(find "$OUTPUT" -maxdepth 1 -name 'checkpoint-*' 2>/dev/null | sort -V)

# End a step and what it started, at most a minute later.
end() {
    kill -TERM "$1" 2>/dev/null || return 0
    for _ in {1..300}; do
        kill -0 "$1" 2>/dev/null || return 0
        sleep 0.2
    done
    kill -KILL "$1" 2>/dev/null
}

server='' trainer=''
clean_up() {
    for step in $trainer $server; do end "$step"; done
}
trap clean_up EXIT

requeue() {
    echo "The time limit is near: the job ends here and goes back into the queue."
    clean_up
    scontrol requeue "$SLURM_JOB_ID" && exit 0
    echo "Slurm did not requeue the job. Submit it again: it resumes from its last checkpoint." >&2
    exit 1
}
trap requeue USR1

rollouts=$OUTPUT.rollouts # weights on their way to the server, where they do not travel over NCCL
mkdir -p "$rollouts"
echo "Run ${SLURM_RESTART_COUNT:-0} of job $SLURM_JOB_ID: server on $server_node ($SERVER_ADDRESS), training on ${trainer_nodes[*]}${resume[*]:+, from ${resume[1]}}"

start_server() {
    srun --nodes=1 --ntasks=1 --nodelist="$server_node" --output="slurm-$SLURM_JOB_ID-server.log" --open-mode=append \
        trl-qurl serve "$MODEL" --scheme "$SCHEME" --host "$SERVER_ADDRESS" --port "$SERVER_PORT" \
        --tensor-parallel-size "$TENSOR_PARALLEL" --data-parallel-size "$DATA_PARALLEL" &
    server=$!
}
start_server

# One task per node starts one process per GPU; SLURM_PROCID is the task's own.
# shellcheck disable=SC2016,SC2086  # TRAINING is several words
srun --nodes="${#trainer_nodes[@]}" --ntasks="${#trainer_nodes[@]}" --ntasks-per-node=1 --kill-on-bad-exit=1 \
    --nodelist="$(IFS=,; echo "${trainer_nodes[*]}")" \
    bash -c 'exec accelerate launch --machine_rank "$SLURM_PROCID" "$@"' launch \
    --config_file "$ACCELERATE_CONFIG" --num_machines "${#trainer_nodes[@]}" \
    --num_processes $((${#trainer_nodes[@]} * GPUS)) \
    --main_process_ip "$TRAINER_ADDRESS" --main_process_port "$TRAINER_PORT" \
    $TRAINING --model_name_or_path "$MODEL" --output_dir "$OUTPUT" --rollout_quantization "$SCHEME" \
    --vllm_mode server --vllm_server_base_url "http://$SERVER_ADDRESS:$SERVER_PORT" --vllm_server_timeout 1800 --ddp_timeout 3600 \
    --rollout_checkpoint_dir "$rollouts" "${resume[@]}" "$@" &
trainer=$!

# A server that ends is started again, as a new step: Slurm has then removed all processes of the old one. The training
# waits for it. After ten starts the job fails.
starts=1
while kill -0 "$trainer" 2>/dev/null; do
    if ! kill -0 "$server" 2>/dev/null; then
        if ((++starts > 10)); then
            echo "The server ended ten times: see slurm-$SLURM_JOB_ID-server.log." >&2
            exit 1
        fi
        start_server
    fi
    sleep 0.5 & wait $! # in the background, so that signals are answered at once
done
wait "$trainer"
exit # with the status of the training
