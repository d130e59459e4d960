#!/usr/bin/env bash
#
# A checkpoint sidecar around any command, for those who keep their own launcher. With torchrun use ckpt-torchrun, which
# does the same and also starts the sidecar again should it die.
#
#   ckpt-launch.sh [options] [options of 'ckpt-sidecar run'] -- COMMAND [ARGUMENT...]
#
#   --job-id ID            the same on every node of the job     [CKPT_SIDECAR_JOB_ID, else slurm-$SLURM_JOB_ID, else random]
#   --shm-root DIR         where the regions lie                 [CKPT_SIDECAR_SHM_ROOT, else /dev/shm]
#   --drain-timeout-s N    whole seconds that the sidecar may go on writing after COMMAND has ended
#                                                                [CKPT_SIDECAR_DRAIN_TIMEOUT_S, else 600]
#
# One call per node. The sidecar gets its own session, so nothing that kills COMMAND's process group reaches it. TERM, INT,
# HUP, QUIT, USR1 and USR2 are passed on to COMMAND alone, once. COMMAND has a process group of its own and cannot read
# from the terminal. After it has ended the sidecar finishes its writes; another TERM or INT ends that at once.
#
# exit code: COMMAND's own, or 2: wrong usage; 3: the sidecar did not come up, COMMAND was not started;
#            76: COMMAND succeeded, but a staged checkpoint did not become durable.
#
# Needs bash 4, setsid (util-linux) and ckpt-sidecar on the PATH.

set -u

readonly READY_TIMEOUT_S=30 STOP_TIMEOUT_S=10 REPORT_EVERY_S=10
readonly EXIT_USAGE=2 EXIT_NO_SIDECAR=3 EXIT_NOT_DRAINED=76

job_id=${CKPT_SIDECAR_JOB_ID:-${SLURM_JOB_ID:+slurm-$SLURM_JOB_ID}}
shm_root=${CKPT_SIDECAR_SHM_ROOT:-/dev/shm}
drain_timeout_s=${CKPT_SIDECAR_DRAIN_TIMEOUT_S:-600}
sidecar_options=()

code=0            # of the child that wait_end has waited for
command_pid=''    # empty until COMMAND runs and after it has ended
sidecar_pid=''
succeeded_by_client=''
got_signal=''     # arrived while no COMMAND was there to take it
interrupted=''    # set by every trap

say() { printf 'ckpt-launch: %s\n' "$*" >&2; }

usage() {
    say "$1"
    say 'usage: ckpt-launch.sh [--job-id ID] [--shm-root DIR] [--drain-timeout-s N] [...] -- COMMAND [ARGUMENT...]'
    exit "$EXIT_USAGE"
}

# shellcheck disable=SC2329  # the traps call it
on_signal() {
    interrupted=yes
    if [[ -n $command_pid ]]; then
        kill -s "$1" "$command_pid" 2>/dev/null
    elif [[ -z $got_signal || $1 != USR? ]]; then
        got_signal=$1
    fi
}

# Wait until child $1 has ended; its exit code is then in $code. A plain `wait` that a trapped signal interrupts in the
# moment in which the child ends loses the child (bash 5.2) and hangs when it is called again.
wait_end() {
    while kill -0 "$1" 2>/dev/null; do pause; done
    while
        interrupted=''
        wait "$1"
        code=$?
        [[ -n $interrupted ]]
    do :; done
}

# A tenth of a second without starting a process; a trapped signal is taken at once.
pause() { read -r -t 0.1 -u "$idle_fd"; }

start_sidecar() {
    local folder ready=''
    folder=$(mktemp -d) || exit "$EXIT_NO_SIDECAR"
    mkfifo "$folder/ready" "$folder/idle" || exit "$EXIT_NO_SIDECAR"
    # Without job control a background process leads no group, so setsid does not fork and $! stays the sidecar.
    CUDA_VISIBLE_DEVICES='' setsid ckpt-sidecar run --job-id "$job_id" --shm-root "$shm_root" \
        ${sidecar_options[@]+"${sidecar_options[@]}"} --ready-fd 3 3>"$folder/ready" </dev/null >&2 &
    sidecar_pid=$!
    read -r -t "$READY_TIMEOUT_S" ready <"$folder/ready"
    exec {idle_fd}<>"$folder/idle"
    rm -rf "$folder"
    if [[ $ready == READY ]]; then return; fi
    stop_sidecar
    wait_end "$sidecar_pid"
    say "the sidecar does not serve (exit code $code), so the command is not started"
    exit "$((code == EXIT_USAGE ? EXIT_USAGE : EXIT_NO_SIDECAR))"
}

run_command() {
    set -m    # its own group: Ctrl-C then comes here only, and is passed on once; and INT and QUIT are not ignored in it
    CKPT_SIDECAR_JOB_ID=$job_id CKPT_SIDECAR_SHM_ROOT=$shm_root "$@" {idle_fd}>&- &
    command_pid=$!
    set +m
    if [[ -n $got_signal ]]; then kill -s "$got_signal" "$command_pid" 2>/dev/null; fi
    wait_end "$command_pid"
    command_code=$code
    command_pid=''
}

# Whether the sidecar ended on SIGTERM with everything durable.
drain_sidecar() {
    local deadline_s=$((SECONDS + drain_timeout_s)) report_s=$((SECONDS + REPORT_EVERY_S)) cut_short=0
    if ! kill -0 "$sidecar_pid" 2>/dev/null; then
        say 'the sidecar had ended before the command did'
        find_successor || return 1
    fi
    kill -TERM "$sidecar_pid" 2>/dev/null
    while kill -0 "$sidecar_pid" 2>/dev/null; do
        if ((SECONDS >= deadline_s)); then
            cut_short=1
            give_up "the sidecar has not finished within $drain_timeout_s s"
        elif [[ $got_signal == TERM || $got_signal == INT || $got_signal == QUIT ]]; then
            cut_short=1
            give_up "got SIG$got_signal while the sidecar was finishing"
        elif ((SECONDS >= report_s)); then
            say "waiting up to $((deadline_s - SECONDS)) s more for the sidecar to finish"
            report_s=$((SECONDS + REPORT_EVERY_S))
        fi
        pause
    done
    # A successor is no child of ours: that it ended on our one SIGTERM is all there is to know.
    if [[ -n $succeeded_by_client ]]; then return "$cut_short"; fi
    wait_end "$sidecar_pid"
    if ((code != 0)); then say "the sidecar could not finish (exit code $code)"; fi
    return "$code"
}

# The sidecar that a client has started in place of a dead one; the job's lock file holds its pid.
find_successor() {
    local lock pid=''
    lock="$shm_root/ckpt-sidecar-$(id -u)/$job_id/sidecar.lock"
    [[ -r $lock ]] && read -r pid <"$lock" && [[ $pid =~ ^[0-9]+$ ]] || return 1
    grep -qs sidecar "/proc/$pid/cmdline" || return 1
    say "a client has started another one (pid $pid)"
    sidecar_pid=$pid
    succeeded_by_client=yes
}

give_up() {
    say "$1: ending it. What is not durable:"
    ckpt-sidecar status --job-id "$job_id" --shm-root "$shm_root" --timeout-s 2 >&2
    stop_sidecar
}

# End it now. While it drains this is its second SIGTERM.
stop_sidecar() {
    local deadline_s=$((SECONDS + STOP_TIMEOUT_S))
    kill -TERM "$sidecar_pid" 2>/dev/null
    while kill -0 "$sidecar_pid" 2>/dev/null; do
        if ((SECONDS >= deadline_s)); then kill -KILL "$sidecar_pid" 2>/dev/null; fi
        pause
    done
}

while (($# > 0)) && [[ $1 != -- ]]; do
    case $1 in
        --job-id | --shm-root | --drain-timeout-s)
            (($# > 1)) || usage "$1 needs a value"
            case $1 in
                --job-id) job_id=$2 ;;
                --shm-root) shm_root=$2 ;;
                --drain-timeout-s) drain_timeout_s=$2 ;;
            esac
            shift 2
            ;;
        *)
            sidecar_options+=("$1")
            shift
            ;;
    esac
done
(($# > 1)) || usage "nothing to launch: the command belongs after '--'"
shift
[[ $drain_timeout_s =~ ^[0-9]+$ ]] || usage "--drain-timeout-s must be whole seconds, not '$drain_timeout_s'"
job_id=${job_id:-job-$(od -An -N6 -tx1 /dev/urandom | tr -d ' \n')}

for name in TERM INT HUP QUIT USR1 USR2; do
    # shellcheck disable=SC2064  # the name must be filled in now
    trap "on_signal $name" "$name"
done
trap : PIPE    # a reader of stderr that has gone away must not keep the sidecar from being drained

start_sidecar
case $got_signal in
    TERM | INT | HUP | QUIT)
        say "got SIG$got_signal before the command was started: not starting it"
        stop_sidecar
        exit "$((128 + $(kill -l "$got_signal")))"
        ;;
esac
command_code=0
run_command "$@"
got_signal=''
if ! drain_sidecar && ((command_code == 0)); then
    exit "$EXIT_NOT_DRAINED"
fi
exit "$command_code"
