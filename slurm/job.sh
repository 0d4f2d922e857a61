# What a job does: check its nodes, start the ranks, pass signals on, and decide whether it comes back.
# Sourced by the batch scripts. Sites edit env.sh.
# shellcheck shell=bash disable=SC1091

unset run_dir rank_command # sweep.sbatch sets them; a user's variables of these names must not

# --- on the login node -----------------------------------------------------------------------------------------------

# submit SCRIPT [sbatch options] [settings]: submits SCRIPT and says where everything will be.
submit() {
    local script="$1" options=() job
    shift
    source "$TWINKLE_HOME/slurm/env.sh"
    if ! command -v sbatch >/dev/null; then
        echo "there is no sbatch here: submit from a machine of the cluster; without Slurm: python train.py ..." >&2
        exit 2
    fi
    while [ $# -gt 0 ]; do
        case "$1" in
            -h | --help | --usage | -V | --version | --test-only) exec sbatch "${options[@]}" "$@" ;;
            -a | --array | --array=*)
                echo "train.sbatch is one run; an array is sbatch $1 ... slurm/sweep.sbatch ..." >&2
                exit 2
                ;;
            -*) ;;
            *=* | [~+]*) break ;;
        esac
        options+=("$1")
        shift
    done
    check_settings "$@"
    job=$(sbatch --parsable "${options[@]}" "$script" "$@") || exit $?
    job="${job%%;*}"
    find_run_dir "$(squeue -h -j "$job" -o %j)" "$job" "$@"
    echo "job $job is submitted (to end it: scancel $job)"
    tell_places "$job"
}

# check_settings [settings]: ends with train.py's words where a key or a value is wrong; else the job would, after its wait.
check_settings() {
    local code=0 told
    find_run_dir job 0 "$@"
    told=$("${CONTAINER[@]}" "$PYTHON" "$TWINKLE_HOME/train.py" --cfg job "$@" 2>&1) || code=$?
    case "$code" in
        0) ;;
        2)
            echo "$told" >&2
            exit 2
            ;;
        *) echo "the settings are not checked before the job runs: '$PYTHON train.py' does not work here (exit code $code)" >&2 ;;
    esac
}

# find_run_dir NAME ID [settings]: sets run_dir, and run_dir_setting to what train.py must be told.
find_run_dir() {
    run_dir="$RUN_ROOT/$1-$2"
    run_dir_setting=("run_dir=$run_dir")
    local word
    for word in "${@:3}"; do
        if [[ $word == run_dir=* ]]; then
            run_dir=$(unquoted "${word#run_dir=}")
            run_dir_setting=()
        fi
        if [[ $word == [+~]*run_dir=* || $word == run_dir=*'${'* || $word == run_dir=*\\* || $word == run_dir=null ]]; then
            echo "$word: a job must know its folder before it starts; write run_dir=<folder>" >&2
            exit 2
        fi
    done
}

# unquoted VALUE: without the quotes that Hydra would take off.
unquoted() {
    local value="$1"
    if [[ $value == \'*\' || $value == \"*\" ]]; then value="${value:1:-1}"; fi
    echo "$value"
}

# tell_places JOB [prefix]
tell_places() {
    local folder
    folder=$(realpath -m "$run_dir")
    echo "${2:-}  output      $(scontrol show job "$1" | sed -n 's/^ *StdOut=//p')"
    echo "${2:-}  run folder  $folder"
    echo "${2:-}  its ranks   $folder/logs/rank-N.log"
}

# --- in the job ------------------------------------------------------------------------------------------------------

run_job() {
    source "$TWINKLE_HOME/slurm/env.sh"
    export PYTHONPATH="$TWINKLE_HOME${PYTHONPATH:+:$PYTHONPATH}"
    if [ -z "${run_dir:-}" ]; then find_run_dir "$SLURM_JOB_NAME" "$SLURM_JOB_ID" "$@"; fi
    check_site
    attempt="${SLURM_RESTART_COUNT:-0}"
    attempts="$run_dir/slurm-attempts.tsv"
    # Where a rank says that it was refused before there was a run: srun ends the others, and tells how those ended.
    export TWINKLE_REFUSAL="$run_dir/.slurm-refusal-$SLURM_JOB_ID"
    terminated=0
    warned=0
    step_pid=""
    interrupted=0
    trap 'interrupted=1; warned=1; say "time limit or preemption is near: the ranks are asked to save and leave"; pass_on' USR1
    trap 'interrupted=1; terminated=1' TERM # Slurm has sent it to the ranks too; this shell only waits for them

    say "$SLURM_JOB_ID, attempt $attempt, on $SLURM_JOB_NODELIST, $(date '+%F %T')"
    tell_places "$SLURM_JOB_ID" "[job]"
    mkdir -p "$run_dir" || exit 1
    if [ "$(stalled_attempts)" -ge "$MAX_STALLED" ]; then
        give_up_stalled
        exit 1
    fi
    printf '%s\t%s\t%s\t%s\t%s\n' "$SLURM_JOB_ID" "$attempt" "$(newest_checkpoint)" "$SLURM_JOB_NODELIST" "$(date '+%F %T')" >>"$attempts"

    if ! preflight; then
        say "the nodes are not fit: nothing was started (PREFLIGHT=0 starts without the check)"
        exit 1
    fi
    local code=75
    if [ "$warned$terminated" = 00 ]; then
        start_ranks "$@"
        wait_for_ranks
        code=$?
    fi
    finish "$code"
}

say() { echo "[job] $*"; }

# What env.sh, or who submits, may have set to nonsense.
check_site() {
    local name
    for name in MAX_STALLED PREFLIGHT_SECONDS; do
        if ! [[ ${!name} =~ ^[1-9][0-9]*$ ]]; then
            say "$name=${!name} must be a whole number of at least 1"
            exit 2
        fi
    done
    for name in MAX_REQUEUE PREFLIGHT_FREE_GB PREFLIGHT_CLOCK_SECONDS; do
        if ! [[ ${!name} =~ ^[0-9]+(\.[0-9]+)?$ ]] || [[ $name == MAX* && ${!name} == *.* ]]; then
            say "$name=${!name} must be a number of at least 0"
            exit 2
        fi
    done
    if [[ $PREFLIGHT != [01] ]]; then
        say "PREFLIGHT=$PREFLIGHT is not one; valid: 1, 0"
        exit 2
    fi
    if [[ $TWINKLE_LAUNCHER != srun && $TWINKLE_LAUNCHER != torchrun ]]; then
        say "TWINKLE_LAUNCHER=$TWINKLE_LAUNCHER is not one; valid: srun, torchrun"
        exit 2
    fi
}

pass_on() {
    if [ -n "$step_pid" ]; then kill -USR1 "$step_pid" 2>/dev/null; fi
}

# One task for each rank, as training will have them, or one a node under torchrun. All leave at the same time; who has not
# 15 s after the first hangs, and is ended. Each limits itself too, for the case that nobody leaves.
preflight() {
    if [ "$PREFLIGHT" = 0 ]; then return 0; fi
    local tasks=() limit=$((PREFLIGHT_SECONDS * 4 + 60))
    if [ "$TWINKLE_LAUNCHER" = torchrun ]; then agents tasks; fi
    timeout -k 10 $((limit + 60)) srun --kill-on-bad-exit=0 --wait=15 "${tasks[@]}" "${SRUN_OPTIONS[@]}" \
        timeout -k 10 "$limit" "${CONTAINER[@]}" "$PYTHON" -m twinkle_research.distributed.preflight --run-dir "$run_dir" \
        --nodes "$(scontrol show hostnames "$SLURM_JOB_NODELIST" | paste -sd,)" --gpus "${SLURM_GPUS_ON_NODE:-0}" \
        --free-gb "$PREFLIGHT_FREE_GB" --clock-seconds "$PREFLIGHT_CLOCK_SECONDS" --seconds "$PREFLIGHT_SECONDS"
}

# agents NAME: sets the array NAME to srun's options for one task on each node that has all CPUs of the job there.
agents() {
    declare -n options="$1"
    options=(--nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1)
    options+=(--cpus-per-task=$((${SLURM_CPUS_PER_TASK:-1} * ${SLURM_NTASKS_PER_NODE:-1})))
}

start_ranks() {
    local tasks=() command=("${rank_command[@]:-$TWINKLE_HOME/train.py}")
    if [ "$TWINKLE_LAUNCHER" = torchrun ]; then
        agents tasks
        command=(-m twinkle_research.distributed.agent --nproc "${SLURM_GPUS_ON_NODE:-${SLURM_NTASKS_PER_NODE:-1}}" -- "${command[@]}")
    fi
    rm -f "$TWINKLE_REFUSAL"
    srun --kill-on-bad-exit=1 --wait=60 "${tasks[@]}" "${SRUN_OPTIONS[@]}" "${CONTAINER[@]}" \
        "$PYTHON" "${command[@]}" "${run_dir_setting[@]}" "$@" &
    step_pid=$!
}

wait_for_ranks() {
    local code
    interrupted=1
    while [ "$interrupted" = 1 ]; do # a trapped signal ends `wait` early, with the signal's number instead of the ranks' code
        interrupted=0
        wait "$step_pid"
        code=$?
    done
    step_pid=""
    say "the ranks ended with $code"
    return "$code"
}

# --- does it come back? ----------------------------------------------------------------------------------------------

newest_checkpoint() { cat "$run_dir/checkpoints/latest" 2>/dev/null || echo none; }

# How many attempts of this job, in a row and up to now, began with the checkpoint that is still the newest.
stalled_attempts() {
    if [ ! -f "$attempts" ]; then
        echo 0
    else
        awk -F'\t' -v job="$SLURM_JOB_ID" -v now="$(newest_checkpoint)" '$1 == job { n = $3 == now ? n + 1 : 0 } END { print n + 0 }' "$attempts"
    fi
}

give_up_stalled() {
    say "$(stalled_attempts) attempts came no further than checkpoint '$(newest_checkpoint)': not requeued (MAX_STALLED=$MAX_STALLED)." \
        "Save more often (checkpoint.every), give more time, or see the logs for what ends it"
}

# Written since this attempt began?
is_new() { [ -f "$1" ] && [ "$1" -nt "$attempts" ]; }

# outcome CODE: finished, saved, failed (its own fault), or killed (a rank or a node is gone and nobody has an error to tell).
outcome() {
    local error="$run_dir/logs/error.json" status="$run_dir/status.json"
    if [ "$1" = 0 ]; then
        echo finished
    elif [ "$1" = 75 ] || { is_new "$status" && grep -q '"state": "stopped"' "$status"; }; then
        echo saved # torchrun's agent makes a 1 of its workers' 75
    elif is_new "$error"; then
        # Peers of a rank that is gone only see their connection break; a launcher only sees a signal.
        if grep -q -e '"peer": true' -e '"type": ""' "$error"; then echo killed; else echo failed; fi
    elif [ ! -f "$TWINKLE_REFUSAL" ] && [ "$1" -gt 128 ] && [ "$1" != 130 ]; then
        echo killed
    else
        echo failed
    fi
}

finish() {
    local how
    how=$(outcome "$1")
    rm -f "$TWINKLE_REFUSAL"
    case "$how" in
        finished) exit 0 ;;
        failed)
            say "not requeued: the run failed by itself, and would again"
            exit "$1"
            ;;
        killed) say "a rank was killed, or lost with its node" ;;
    esac
    if [ "$terminated" = 1 ]; then
        say "ended from outside. After scancel: submit the same with run_dir=$run_dir to continue"
    elif [ "$attempt" -ge "$MAX_REQUEUE" ]; then
        say "not requeued: this was attempt $attempt (MAX_REQUEUE=$MAX_REQUEUE)"
    elif [ "$(stalled_attempts)" -ge "$MAX_STALLED" ]; then
        give_up_stalled
    else
        say "requeued"
        if scontrol requeue "$SLURM_JOB_ID"; then
            sleep 120 # a script that ended by itself would count as completed
        fi
    fi
    exit "$1"
}
