#!/bin/bash
# A batch script of Slurm for an array of jobs of a study: task N runs the job whose id is on line N + 1 of a list.
#
# emp-llm submit writes STUDY/slurm/NAME.sh: lines of its own, and those after "#@". To submit by hand, write your options and the
# environment of the jobs here, change the next three lines, write a list with one id a line, and run: sbatch --array=0-7 NAME.sh
list="slurm/NAME.jobs"
command=(emp-llm)
requeues=50
#@

# The job of this task.
job=$(sed -n "$((SLURM_ARRAY_TASK_ID + 1))p" "$list")
if [ -z "$job" ]; then
    echo "$list has no job for task $SLURM_ARRAY_TASK_ID." >&2
    exit 2
fi

# While Slurm's controller does not answer, nothing can be started.
answered() {
    for _ in $(seq 60); do
        "$@" && return
        sleep 10
    done
    return 1
}
answered scontrol show job "$SLURM_JOB_ID" > /dev/null

srun --nodes=1 --ntasks=1 --cpus-per-task="$SLURM_CPUS_PER_TASK" --overlap --kill-on-bad-exit=1 --export=ALL \
    "${command[@]}" run . --only "$job"
code=$?

# 143: SIGTERM came, as it does before the time limit; 75: the job was stopped. The task is queued again, and its job resumes.
if { [ "$code" -eq 143 ] || [ "$code" -eq 75 ]; } && [ "${SLURM_RESTART_COUNT:-0}" -lt "$requeues" ]; then
    # The number of the last task, SLURM_JOB_ID, would mean the whole array. Slurm ends this script when it has queued the task.
    answered scontrol requeue "${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID" && sleep 60
fi
exit "$code"
