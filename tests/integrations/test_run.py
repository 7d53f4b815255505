"""`safe-rope run` and `python -m safe_rope` as commands: what they hand through, what they refuse."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from running import SAFE_ROPE

from safe_rope.errors import ConfigError
from safe_rope.integrations import process_guard
from safe_rope.integrations.options import Options

RUN = (*SAFE_ROPE, "run")
PYTHON = sys.executable


def call(
    *command: str | Path, env: dict[str, str], cwd: Path | None = None, stdin: str | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(part) for part in command],
        env=env,
        cwd=cwd,
        input=stdin,
        capture_output=True,
        text=True,
        timeout=200,
    )


def script(folder: Path, source: str, name: str = "script.py") -> Path:
    file = folder / name
    file.write_text(source, encoding="utf-8")
    return file


# ---- handed through ------------------------------------------------------------------------------------


def test_stdin_arguments_output_and_exit_status_are_the_commands_own(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    file = script(
        tmp_path,
        "import sys\n"
        "print(sys.argv[1:], sys.stdin.read(), __name__)\n"
        "print('err', file=sys.stderr)\n"
        "sys.exit(7)\n",
    )
    done = call(*RUN, "--", PYTHON, file, "--lr", "1", "--", "-x", env=environment, stdin="input")
    assert done.returncode == 7
    assert done.stdout == "['--lr', '1', '--', '-x'] input __main__\n"
    assert done.stderr == "err\n"


def test_python_m_safe_rope_runs_a_script_and_a_module_as_python_does(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    shown = "sys.argv, sys.path[0], __name__, sys.flags.dev_mode, os.environ['SAFE_ROPE_TABLES']"
    source = f"import os, sys; print({shown})"
    file = script(tmp_path, source)
    arguments = ("--strict", "--tables", "fp32", file, "--strict")
    done = call(PYTHON, "-X", "dev", "-um", "safe_rope", *arguments, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[0] == f"['{file}', '--strict'] {tmp_path} __main__ True fp32"
    done = call(PYTHON, "-m", "safe_rope", "-m", "script", "a", env=environment, cwd=tmp_path)
    assert done.stdout.split("\n")[0] == f"['{file}', 'a'] {tmp_path} __main__ False exact"


def test_python_m_safe_rope_knows_the_commands(tmp_path: Path, environment: dict[str, str]) -> None:
    for option in ("--help", "--version"):
        began = (SAFE_ROPE, (PYTHON, "-m", "safe_rope"))
        told = [call(*command, option, env=environment).stdout for command in began]
        assert told[0] == told[1]
        assert "safe-rope" in told[0]
    done = call(PYTHON, "-m", "safe_rope", "rule", "SR001", env=environment, cwd=tmp_path)
    assert done.stdout.startswith("SR001 ")
    done = call(PYTHON, "-m", "safe_rope", "scann", env=environment, cwd=tmp_path)
    assert done.returncode == 2
    assert "No such command 'scann'. Did you mean 'scan'?" in done.stderr
    (tmp_path / "scan").write_text("print('the script')")
    done = call(PYTHON, "-m", "safe_rope", "./scan", env=environment, cwd=tmp_path)
    assert done.stdout == "the script\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_reaches_the_command_itself(
    number: signal.Signals, tmp_path: Path, environment: dict[str, str]
) -> None:
    file = script(
        tmp_path,
        "import signal, sys\n"
        "for n in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):\n"
        "    signal.signal(n, lambda number, frame: sys.exit(40 + number))\n"
        "print('ready', flush=True)\n"
        "signal.pause()\n",
    )
    with subprocess.Popen(
        [*RUN, "--", PYTHON, str(file)], env=environment, stdout=subprocess.PIPE, text=True
    ) as child:
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == "ready\n"
            child.send_signal(number)
            assert child.wait(timeout=30) == 40 + number
        finally:
            child.kill()


def test_a_command_that_a_signal_ends_ends_so(environment: dict[str, str]) -> None:
    done = call(*RUN, "--", "bash", "-c", "kill -KILL $$", env=environment)
    assert done.returncode == -signal.SIGKILL


def test_the_environment_is_honoured_and_an_option_wins_over_it(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    shown = "import os; print(*(os.environ.get(f'SAFE_ROPE_{n}') for n in ('TABLES', 'STRICT', 'REPORT')))"
    report = str(tmp_path / "report.json")
    asked = {"SAFE_ROPE_TABLES": "fp32", "SAFE_ROPE_STRICT": "1", "SAFE_ROPE_REPORT": report}
    for options, expected in (
        ((), f"fp32 1 {report}"),
        (("--tables", "exact", "--no-strict"), f"exact 0 {report}"),
    ):
        done = call(*RUN, *options, "--", PYTHON, "-c", shown, env=environment | asked, cwd=tmp_path)
        assert done.stdout == expected + "\n", done.stderr
    assert json.loads(Path(report).read_text())["processes"] == []
    assert call(*RUN, "--", PYTHON, "-c", shown, env=environment).stdout == "exact 0 None\n"


def test_the_printed_environment_guards_a_shell_whose_paths_have_spaces(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    folder = tmp_path / "a b $HOME"
    folder.mkdir()
    script(folder, "VALUE = 5", "beside.py")
    environment["PYTHONPATH"] = os.pathsep.join([environment["PYTHONPATH"], str(folder)])
    source = (
        "import beside, os, sys; print(beside.VALUE, os.environ['SAFE_ROPE_STRICT'], "
        "any(type(f).__name__ == '_FirstLook' for f in sys.meta_path))"
    )
    printing = shlex.join([*RUN, "--print-env", "--strict"])
    done = call("bash", "-c", f'eval "$({printing})"; {shlex.join([PYTHON, "-c", source])}', env=environment)
    assert done.stdout == "5 1 True\n", done.stderr


# ---- what it costs others ------------------------------------------------------------------------------


def test_a_process_that_never_imports_torch_imports_nothing_more(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    source = (
        "import sys; print(sorted(set(sys.modules) & {'torch', 'wrapt', 'transformers', 'rich', 'click'}))"
    )
    assert call(*RUN, "--", PYTHON, "-c", source, env=environment).stdout == "[]\n"
    nested = call(*RUN, "--", "bash", "-c", f'"{PYTHON}" -c "{source}"', env=environment)
    assert nested.stdout == "[]\n"


def test_sys_path_and_another_sitecustomize_are_what_they_were(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    theirs = script(tmp_path, "import sys; sys.theirs = __file__; VALUE = 5", "sitecustomize.py")
    environment["PYTHONPATH"] = os.pathsep.join([str(tmp_path), environment["PYTHONPATH"]])
    source = (
        "import json, sys, sitecustomize as s; print(json.dumps([sys.theirs, s.VALUE, s.__file__, sys.path]))"
    )
    plain = json.loads(call(PYTHON, "-c", source, env=environment).stdout)
    guarded = json.loads(call(*RUN, "--", PYTHON, "-c", source, env=environment).stdout)
    assert plain[0] == str(theirs)
    assert guarded == plain


def test_a_failing_sitecustomize_of_others_does_not_keep_the_guard_out(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    script(tmp_path, "raise ValueError('theirs')", "sitecustomize.py")
    environment["PYTHONPATH"] = os.pathsep.join([str(tmp_path), environment["PYTHONPATH"]])
    source = "import sys; print(any(type(f).__name__ == '_FirstLook' for f in sys.meta_path))"
    done = call(*RUN, "--", PYTHON, "-c", source, env=environment)
    assert done.stdout == "True\n"
    assert "theirs" in done.stderr


def test_run_inside_run_names_its_folder_once(environment: dict[str, str]) -> None:
    source = "import os; print(os.environ['PYTHONPATH'].count('integrations/startup'))"
    done = call(*RUN, "--", *RUN, "--", PYTHON, "-c", source, env=environment)
    assert done.stdout == "1\n"


def test_a_python_without_safe_rope_says_so_where_it_has_torch(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    printed = call(*RUN, "--print-env=file", env=environment).stdout
    variables = dict(line.split("=", 1) for line in printed.splitlines())
    startup = variables["PYTHONPATH"].split(os.pathsep)[0]
    foreign = {"PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join([startup, str(tmp_path)])}
    bare = (PYTHON, "-S", "-c", "import sys, runpy; runpy.run_module('sitecustomize'); print('ran')")
    # Without site-packages (-S) there is no safe_rope; sitecustomize then has to be asked for.
    assert call(*bare, env=foreign, cwd=tmp_path).stderr == ""
    script(tmp_path, "", "torch.py")
    done = call(*bare, env=foreign, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "ran\n")
    assert "is not guarded" in done.stderr
    assert done.stderr.count("\n") == 1
    strict = call(*bare, env=foreign | {"SAFE_ROPE_STRICT": "1"}, cwd=tmp_path)
    assert (strict.returncode, strict.stdout) == (2, "")


@pytest.mark.parametrize("how", ["none", "closed", "closed by its number"])
def test_a_closed_stderr_is_nothing_to_fail_at(
    how: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    number = os.open(os.devnull, os.O_WRONLY)
    stderr = os.fdopen(number, "w", closefd=False)
    os.close(number)
    if how == "closed":
        stderr.close()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", None if how == "none" else stderr)
        process_guard._say("nobody reads this")
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(("value", "armed"), [("1", True), ("true", True), ("0", False), ("", False)])
def test_safe_rope_in_the_environment_arms_an_import_of_safe_rope(
    value: str, armed: bool, environment: dict[str, str]
) -> None:
    source = "import sys, safe_rope; print(any(type(f).__name__ == '_FirstLook' for f in sys.meta_path))"
    done = call(PYTHON, "-c", source, env=environment | {"SAFE_ROPE": value})
    assert done.stdout == f"{armed}\n"


# ---- refused -------------------------------------------------------------------------------------------


def refused(
    done: subprocess.CompletedProcess[str], *words: str, folder: Path, files: tuple[str, ...] = ()
) -> None:
    assert done.returncode == 2, done
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.lower().startswith("error: ")
    for word in words:
        assert word in done.stderr
    assert tuple(sorted(path.name for path in folder.iterdir())) == files


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["torchrun", "train.py"], ["safe-rope run -- torchrun"]),
        (["--tables", "fp32", "python", "-c", "pass"], ["-- python"]),
        ([], ["give a command after --"]),
        (["--"], ["give a command after --"]),
        (["--tables", "bf16", "--", "true"], ["bf16"]),
        (["--nonsense", "--", "true"], ["--nonsense"]),
        (["--report", "report.json", "--", "no-such-program"], ["no-such-program", "not found"]),
        (["--report", "no/such/folder/report.json", "--", "true"], ["report", "cannot be written"]),
        (["--report", ".", "--", "true"], ["cannot be written"]),
        (["--report", "/dev/null", "--", "true"], ["cannot be written", "no regular file"]),
        (["--print-env", "--", "true"], ["leave the command out"]),
    ],
    ids=lambda value: " ".join(value)[:40],
)
def test_a_wrong_call_is_one_line_and_leaves_nothing(
    arguments: list[str], words: list[str], tmp_path: Path, environment: dict[str, str]
) -> None:
    refused(call(*RUN, *arguments, env=environment, cwd=tmp_path), *words, folder=tmp_path)


def test_a_file_that_cannot_be_run_leaves_the_report_of_before(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    script(tmp_path, "old", "report.json")
    program = script(tmp_path, "\0not a program", "program")
    done = call(*RUN, "--report", "report.json", "--", "./program", env=environment, cwd=tmp_path)
    refused(done, "not executable", folder=tmp_path, files=("program", "report.json"))
    program.chmod(0o755)
    done = call(*RUN, "--report", "report.json", "--", "./program", env=environment, cwd=tmp_path)
    refused(done, "cannot be run", folder=tmp_path, files=("program", "report.json"))
    assert (tmp_path / "report.json").read_text() == "old"


def test_a_folder_that_pythonpath_cannot_hold_is_refused(
    tmp_path: Path, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("safe_rope.integrations.options.STARTUP", tmp_path / "a:b")
    with pytest.raises(ConfigError, match="PYTHONPATH cannot hold"):
        Options().environment({})


def test_a_python_that_ignores_its_environment_is_refused(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    source = "import sys; sys.argv[1:] = ['x.py']; from safe_rope.cli.run import check_interpreter"
    for option in ("-E", "-I", "-S"):
        code = f"import sys; sys.path[:0] = {sys.path!r}; {source}; check_interpreter(sys.flags)"
        done = call(PYTHON, option, "-c", code, env=environment)
        assert "-E, -I and -S" in done.stderr
        assert done.returncode == 1


@pytest.mark.parametrize(
    ("name", "value"), [("SAFE_ROPE_TABLES", "bf16"), ("SAFE_ROPE_STRICT", "maybe"), ("SAFE_ROPE", "please")]
)
def test_a_variable_that_means_nothing_fails_the_import_of_torch(
    name: str, value: str, tmp_path: Path, environment: dict[str, str]
) -> None:
    variables = environment | {"SAFE_ROPE": "1", name: value}
    done = call(PYTHON, "-c", "import safe_rope; print('ok'); import torch", env=variables)
    assert (done.returncode, done.stdout) == (1, "ok\n")
    assert f"ConfigError: {name} must be" in done.stderr


def test_a_misspelled_variable_is_refused_with_the_nearest_name(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    for name, remedy in (("SAFE_ROPE_TABLE", "mean SAFE_ROPE_TABLES?"), ("SAFE_ROPE_APPLY", "_STRICT, ")):
        variables = environment | {name: "fp32"}
        refused(call(*RUN, "--", "true", env=variables), name, remedy, folder=tmp_path)
    source = "import safe_rope, torch"
    done = call(PYTHON, "-c", source, env=environment | {"SAFE_ROPE": "1", "SAFE_ROPE_TABLE": "fp32"})
    assert "did you mean SAFE_ROPE_TABLES?" in done.stderr
    assert done.returncode == 1


# ---- the guard itself ----------------------------------------------------------------------------------

BUILD = """
import json, os, sys
import torch
from torch import nn

class PlainRotaryEmbedding(nn.Module):
    built = 0

    def __init__(self):
        super().__init__()
        type(self).built += 1
        if self.built > 1:
            raise RuntimeError("nobody can tell what its tables should be")
        self.register_buffer("inv_freq", torch.ones(4))

    def forward(self, x, position_ids):
        return x

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.rotary = PlainRotaryEmbedding()

    def forward(self, x):
        return x

model = Model()
print("built", flush=True)
if "--bar" in sys.argv:
    from tqdm.auto import tqdm
    bar = tqdm(total=2)
model(torch.zeros(1))
model(torch.zeros(1))
print("called", flush=True)
"""


def report_of(file: Path) -> list[dict[str, Any]]:
    processes: list[dict[str, Any]] = json.loads(file.read_text(encoding="utf-8"))["processes"]
    return processes


@pytest.mark.contract
def test_what_cannot_be_protected_is_said_once_on_rank_0_and_reported(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    file, report = script(tmp_path, BUILD), tmp_path / "report.json"
    done = call(*RUN, "--report", report, "--", PYTHON, file, env=environment)
    assert done.stdout == "built\ncalled\n", done.stderr
    assert done.stderr.count("safe-rope: ") == 1
    assert "1 NOT protected" in done.stderr
    assert done.stderr.count("PrecisionWarning") == 1
    (process,) = report_of(report)
    assert [entry["path"] for entry in process["unprotected"]] == ["rotary"]
    other = call(*RUN, "--report", report, "--", PYTHON, file, env=environment | {"RANK": "1"})
    assert other.stderr == ""
    assert report_of(report) == []


@pytest.mark.contract
def test_what_is_protected_is_said_above_a_progress_bar(tmp_path: Path, environment: dict[str, str]) -> None:
    file = script(tmp_path, BUILD.replace("built > 1", "built > 9").replace("ones(4)", "arange(4) / 4"))
    shown = call(*RUN, "--", PYTHON, file, "--bar", env=environment).stderr
    assert "it/s]" in shown
    (line,) = (line for line in shown.split("\n") if "safe-rope: " in line)
    said = "safe-rope: 1 position module protected (pinned: own tables kept, applied as stock)"
    assert line.rpartition("\r")[2] == said, "the line begins where a line begins"


@pytest.mark.contract
def test_strict_fails_at_the_first_call(tmp_path: Path, environment: dict[str, str]) -> None:
    report = tmp_path / "report.json"
    done = call(*RUN, "--strict", "--report", report, "--", PYTHON, script(tmp_path, BUILD), env=environment)
    assert (done.returncode, done.stdout) == (1, "built\n")
    assert "UnsupportedModelError: 1 position module with stock tables: rotary" in done.stderr
    (process,) = report_of(report)
    assert process["error"].startswith("UnsupportedModelError")


@pytest.mark.contract
def test_several_processes_of_a_run_share_its_report(tmp_path: Path, environment: dict[str, str]) -> None:
    file, report = script(tmp_path, BUILD), tmp_path / "report.json"
    shell = f'"{PYTHON}" {file} & "{PYTHON}" {file} & wait'
    done = call(*RUN, "--report", report, "--", "bash", "-c", shell, env=environment)
    assert done.returncode == 0, done.stderr
    assert len({process["pid"] for process in report_of(report)}) == 2
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
