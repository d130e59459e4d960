"""The decisions of ckpt-torchrun: what the command line means, which signals go on, what the exit code is."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ckpt_proto.identity import check_job_id
from ckpt_proto.process import sidecar_environment
from ckpt_sidecar.launch_options import (
    LaunchOptions,
    UsageError,
    derive_job_id,
    parse_command_line,
    split_at_separator,
    torchrun_options,
)
from ckpt_sidecar.launcher import (
    EXIT_NOT_DRAINED,
    Commands,
    final_exit_code,
    shell_exit_code,
    sidecar_command,
    start_failure,
    torchrun_environ,
)
from ckpt_sidecar.sidecar_process import (
    FIRST_RESTART_DELAY_S,
    HEALTHY_AFTER_S,
    LONGEST_RESTART_DELAY_S,
    RestartBackoff,
    describe_exit,
)
from ckpt_sidecar.signal_queue import must_forward, signal_name

SI_USER = 0
SI_TKILL = -6
SI_KERNEL = 128


def drawn() -> str:
    return "job-drawn"


def parse(line: str, **environ: str) -> LaunchOptions:
    return parse_command_line(line.split(), environ, drawn)


# ---------------------------------------------------------------- command line


@pytest.mark.parametrize("line", ["", "--", "--job-id x", "--job-id x --", "train.py"])
def test_nothing_to_launch_is_a_usage_error(line: str) -> None:
    with pytest.raises(UsageError, match="nothing to launch"):
        parse(line)


def test_only_the_first_separator_counts() -> None:
    assert split_at_separator(["-a", "--", "train.py", "--", "x"]) == (("-a",), ("train.py", "--", "x"))


def test_defaults() -> None:
    assert parse("-- train.py") == LaunchOptions(
        job_id="job-drawn",
        shm_root="/dev/shm",
        drain_timeout_s=600.0,
        ready_timeout_s=30.0,
        log_file=None,
        verbose=False,
        sidecar_args=(),
        torchrun_args=("train.py",),
    )


def test_every_option_by_flag() -> None:
    options = parse("--job-id j --shm-root /x --drain-timeout-s 5 --ready-timeout-s 2.5 --log-file /l --verbose -- t")
    assert options == LaunchOptions("j", "/x", 5.0, 2.5, Path("/l"), True, (), ("t",))


def test_every_option_by_environment() -> None:
    options = parse(
        "-- t",
        CKPT_SIDECAR_JOB_ID="j",
        CKPT_SIDECAR_SHM_ROOT="/x",
        CKPT_SIDECAR_DRAIN_TIMEOUT_S="5",
        CKPT_SIDECAR_READY_TIMEOUT_S="2.5",
        CKPT_SIDECAR_LOG_FILE="/l",
        CKPT_SIDECAR_VERBOSE="1",
    )
    assert options == LaunchOptions("j", "/x", 5.0, 2.5, Path("/l"), True, (), ("t",))


def test_flag_wins_over_environment() -> None:
    assert parse("--job-id flag -- t.py", CKPT_SIDECAR_JOB_ID="env").job_id == "flag"


@pytest.mark.parametrize("text", ["soon", "-1", "nan", "inf"])
def test_a_time_that_is_none_names_flag_and_variable(text: str) -> None:
    with pytest.raises(UsageError, match=r"--drain-timeout-s \(or CKPT_SIDECAR_DRAIN_TIMEOUT_S\)"):
        parse("-- t.py", CKPT_SIDECAR_DRAIN_TIMEOUT_S=text)


def test_an_empty_variable_counts_as_unset() -> None:
    assert parse("-- t.py", CKPT_SIDECAR_DRAIN_TIMEOUT_S="", CKPT_SIDECAR_JOB_ID="") == parse("-- t.py")


def test_a_flag_without_its_value_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="--job-id"):
        parse("--job-id -- t.py")


def test_unknown_options_go_to_the_sidecar_in_order() -> None:
    options = parse("--writers 4 --job-id j --max-write-bytes-per-s=1e9 --log-level debug -- t.py")
    assert options.sidecar_args == ("--writers", "4", "--max-write-bytes-per-s=1e9", "--log-level", "debug")


def test_an_abbreviation_is_not_taken_for_an_own_option() -> None:
    assert parse("--drain 5 -- t.py").sidecar_args == ("--drain", "5")


def test_torchrun_arguments_stay_untouched() -> None:
    line = "--nnodes 2 --rdzv_id=a -- --job-id x --help"
    assert parse(f"-- {line}").torchrun_args == tuple(line.split())


def test_help_needs_nothing_to_launch(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        parse("--help")
    assert stop.value.code == 0
    shown = capsys.readouterr().out
    assert "--drain-timeout-s" in shown
    assert "76" in shown


# ---------------------------------------------------------------- job id


@pytest.mark.parametrize("text", ["a/b c", "..", "-x", "ü" * 99, "a" * 200, " "])
def test_any_given_name_becomes_a_valid_job_id(text: str) -> None:
    options = parse_command_line(
        ["--job-id", text, "--", "t.py"] if text != "-x" else ["--job-id=-x", "--", "t"], {}, drawn
    )
    assert check_job_id(options.job_id) == options.job_id


def test_names_that_clean_to_the_same_stay_apart() -> None:
    assert parse("--job-id a/b -- t.py").job_id != parse("--job-id a:b -- t.py").job_id


@pytest.mark.parametrize(
    "line", ["--rdzv-id run7 t.py", "--rdzv_id=run7 t.py", "--standalone --rdzv-id=run7 -m pkg", "-r3 --rdzv-id run7 t"]
)
def test_rendezvous_id_names_the_job(line: str) -> None:
    assert derive_job_id(line.split(), {}, drawn) == "run7"


def test_rendezvous_id_from_torchruns_own_variable() -> None:
    assert derive_job_id(["t.py"], {"PET_RDZV_ID": "run7"}, drawn) == "run7"


@pytest.mark.parametrize(
    "line", ["t.py --rdzv-id script", "-m pkg.train --rdzv-id script", "--nnodes=1 t.py", "--rdzv-id none t.py"]
)
def test_one_node_without_a_name_draws_one(line: str) -> None:
    assert derive_job_id(line.split(), {}, drawn) == "job-drawn"


def test_nodes_of_one_job_agree_without_a_name() -> None:
    nodes = [
        derive_job_id(f"--nnodes 2 --node-rank {rank} --master-addr h0 --master_port=1234 t.py".split(), {}, drawn)
        for rank in range(2)
    ]
    assert nodes[0] == nodes[1] != "job-drawn"
    assert check_job_id(nodes[0])


def test_jobs_at_other_endpoints_differ() -> None:
    ids = {
        derive_job_id(f"--nnodes {nodes} --rdzv-endpoint={endpoint} t.py".split(), {}, drawn)
        for nodes, endpoint in [("2", "h0:1"), ("1:4", "h0:2"), ("2", "h1:1")]
    }
    assert len(ids) == 3


def test_nnodes_and_endpoint_from_torchruns_own_variables() -> None:
    by_flag = derive_job_id("--nnodes 2 --master-addr h0 t.py".split(), {}, drawn)
    assert derive_job_id(["t.py"], {"PET_NNODES": "2", "PET_MASTER_ADDR": "h0"}, drawn) == by_flag


def test_nonsense_nnodes_is_left_for_torchrun_to_refuse() -> None:
    assert derive_job_id("--nnodes many t.py".split(), {}, drawn) == "job-drawn"


def test_torchruns_options_end_at_the_script() -> None:
    line = "--nproc_per_node 2 --standalone --tee=3 --no_python t.py --nnodes 9"
    assert torchrun_options(line.split()) == {
        "--nproc-per-node": "2",
        "--standalone": "",
        "--tee": "3",
        "--no-python": "",
    }


# ---------------------------------------------------------------- children


def test_sidecar_command_has_the_job_then_the_passed_on_options() -> None:
    options = parse("--job-id j --shm-root /x --writers 4 --verbose -- t.py")
    command = sidecar_command(options, Commands(sidecar=("sidecar",)))
    assert command == ("sidecar", "--verbose", "run", "--job-id", "j", "--shm-root", "/x", "--writers", "4")


def test_both_children_run_on_this_interpreter() -> None:
    assert Commands().sidecar == (sys.executable, "-m", "ckpt_sidecar")
    assert Commands().torchrun == (sys.executable, "-m", "torch.distributed.run")


def test_sidecar_sees_no_gpu_and_torchrun_does() -> None:
    environ = {"CUDA_VISIBLE_DEVICES": "0,1", "HOME": "/h"}
    assert sidecar_environment(environ)["CUDA_VISIBLE_DEVICES"] == ""
    assert torchrun_environ(parse("--job-id j -- t.py"), environ) == {
        **environ,
        "CKPT_SIDECAR_JOB_ID": "j",
        "CKPT_SIDECAR_SHM_ROOT": "/dev/shm",
        "CKPT_SIDECAR_SUPERVISED": "1",
    }


def test_relative_paths_survive_the_sidecars_change_of_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert sidecar_environment({"PYTHONPATH": "src:/abs:"})["PYTHONPATH"] == f"{tmp_path}/src:/abs"
    assert parse("--shm-root shm -- t.py").shm_root == f"{tmp_path}/shm"


def test_the_launcher_imports_no_heavy_module() -> None:
    script = (
        "import sys, ckpt_sidecar.launcher\n"
        "print(sorted({'torch', 'numpy', 'zmq', 'psutil', 'msgpack', 'isal'} & set(sys.modules)))"
    )
    shown = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert shown.stdout.strip() == "[]"


# ---------------------------------------------------------------- signals


@pytest.mark.parametrize("signo", [1, 2, 3, signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM])
@pytest.mark.parametrize("code", [SI_USER, SI_TKILL])
def test_what_a_process_sent_goes_on(signo: int, code: int) -> None:
    assert must_forward(signo, code, session_leader=False)
    assert must_forward(signo, code, session_leader=True)


@pytest.mark.parametrize("signo", [signal.SIGINT, signal.SIGQUIT])
@pytest.mark.parametrize("leader", [False, True])
def test_what_the_terminal_sent_has_reached_torchrun_already(signo: int, leader: bool) -> None:
    assert not must_forward(signo, SI_KERNEL, session_leader=leader)


def test_a_hangup_reaches_only_the_session_leader_so_it_goes_on_from_there() -> None:
    assert must_forward(signal.SIGHUP, SI_KERNEL, session_leader=True)
    assert not must_forward(signal.SIGHUP, SI_KERNEL, session_leader=False)


@pytest.mark.parametrize("signo", [signal.SIGCHLD, signal.SIGIO])
def test_the_launchers_own_signals_stay(signo: int) -> None:
    assert not must_forward(signo, SI_USER, session_leader=True)


def test_names_of_signals() -> None:
    assert signal_name(15) == "SIGTERM"
    assert signal_name(40) == "signal 40"


# ---------------------------------------------------------------- ends


def test_restart_delay_doubles_up_to_its_limit() -> None:
    backoff = RestartBackoff()
    delays = [backoff.delay_after(alive_s=1.0) for _ in range(9)]
    assert delays[:4] == [FIRST_RESTART_DELAY_S * factor for factor in (1, 2, 4, 8)]
    assert delays[-2:] == [LONGEST_RESTART_DELAY_S] * 2


def test_restart_delay_starts_anew_after_a_healthy_life() -> None:
    backoff = RestartBackoff()
    for _ in range(5):
        backoff.delay_after(alive_s=1.0)
    assert backoff.delay_after(alive_s=HEALTHY_AFTER_S) == FIRST_RESTART_DELAY_S
    assert backoff.delay_after(alive_s=1.0) == 2 * FIRST_RESTART_DELAY_S


def test_exits_in_words() -> None:
    assert describe_exit(3) == "exited with code 3"
    assert describe_exit(-9) == "was killed by SIGKILL"


@pytest.mark.parametrize(("returncode", "code"), [(0, 0), (7, 7), (-15, 143), (-9, 137)])
def test_exit_codes_are_those_of_a_shell(returncode: int, code: int) -> None:
    assert shell_exit_code(returncode) == code


@pytest.mark.parametrize(
    ("torchrun_code", "drained", "code"),
    [(0, True, 0), (0, False, EXIT_NOT_DRAINED), (7, True, 7), (7, False, 7), (143, False, 143)],
)
def test_a_failed_drain_shows_only_where_torchrun_succeeded(torchrun_code: int, drained: bool, code: int) -> None:
    assert final_exit_code(torchrun_code, drained=drained) == code


def test_a_refused_option_is_named() -> None:
    assert "--bogus 1" in start_failure(2, "", parse("--bogus 1 -- t.py"))


def test_a_taken_job_is_named_with_the_way_out() -> None:
    text = start_failure(4, "", parse("--job-id j -- t.py"))
    assert "another sidecar serves job j" in text
    assert "--job-id" in text


def test_a_start_failure_shows_the_end_of_the_log() -> None:
    text = start_failure(1, "Traceback: boom", parse("--log-file /l -- t.py"))
    assert "exited with code 1" in text
    assert text.endswith("the end of /l:\nTraceback: boom")
