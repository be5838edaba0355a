"""If this fails, install.sh or gpu_extra.sh install the wrong extra, or no native core where it can be built."""

import os
import shutil
import signal
import subprocess
import time

import pytest

from tests.server_setup.server_tools import SETUP_DIR

INSTALL, GPU_EXTRA = SETUP_DIR.parent / "install.sh", SETUP_DIR.parent / "gpu_extra.sh"

#: Takes the calls that install.sh makes; VENV_FAILS is what `-m venv` does once it has begun. The core is there after
#: an installation, unless it is switched off.
PYTHON = """#!/bin/sh
case "$*" in
    "-c "*why_no_core*) ! tail -n 1 "$PIP_LOG" | grep -q "off|" ;;
    "-c "*) exit 0 ;;
    "-m venv "*)
        mkdir -p "$3/bin" && cp "$0" "$3/bin/python" && echo made >"$3/pyvenv.cfg"
        eval "${VENV_FAILS:-}" ;;
    "-m pip --version") exit "${NO_PIP:-0}" ;;
    "-m pip install "*ziglang*) echo "$*" >>"$PIP_LOG"; exit "${NO_ZIG:-0}" ;;
    "-m pip install "*) echo "${CXX:-}|${LINUMPY_NATIVE:-}|$*" >>"$PIP_LOG" ;;
    "-I -m ziglang c++ "*) exit "${ZIG_FAILS:-0}" ;;
    *) echo "unexpected: $*" >&2; exit 99 ;;
esac
"""
#: What install.sh tries, in this order.
COMPILERS = ("c++", "g++", "clang++")


def program(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


@pytest.fixture
def machine(tmp_path):
    """A folder in which scripts run, the stand-in for Python, compilers, and an environment without a GPU."""
    python = program(tmp_path / "programs" / "python3", PYTHON)
    for name in COMPILERS:
        program(tmp_path / "programs" / name, '#!/bin/sh\nexec >>"$CXX_LOG"; echo "$0"; exit "${NO_COMPILER:-0}"\n')
    program(tmp_path / "programs" / "nvidia-smi", "#!/bin/sh\nexit 9\n")
    path = f"{tmp_path / 'programs'}:{os.environ['PATH']}"
    environment = {"PATH": path, "PYTHON": str(python), "PIP_LOG": str(tmp_path / "pip.log")}
    environment["CXX_LOG"] = str(tmp_path / "cxx.log")
    (tmp_path / "here").mkdir()

    def run(part, **more):
        return subprocess.run(
            [INSTALL, part], cwd=tmp_path / "here", env=environment | more, capture_output=True, text=True, timeout=60
        )

    run.environment = environment
    return run


def names(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@pytest.mark.parametrize("venv", ["envs", "deep/er/envs", "a b", "-x"])
def test_it_makes_the_environment_and_installs(machine, tmp_path, venv):
    done = machine("test", VENV=venv)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "here" / venv / ".has-test").is_file()
    assert "--editable" in (tmp_path / "pip.log").read_text()
    assert machine("clean", VENV=venv).returncode == 0
    assert not (tmp_path / "here" / venv).exists()


@pytest.mark.parametrize("uv", ["exit 0", "exit 1"])
def test_several_parts_at_once_by_uv_and_where_that_fails_by_pip(machine, tmp_path, uv):
    venv = tmp_path / "here" / "mine"
    program(venv / "bin" / "python", PYTHON)
    program(venv / "bin" / "uv", f'#!/bin/sh\necho "uv $*" >>"$PIP_LOG"\n{uv}\n')
    done = machine("test,lint", VENV="mine", INSTALLER="uv")
    assert done.returncode == 0, done.stderr
    got_uv, by_uv, *by_pip = (tmp_path / "pip.log").read_text().splitlines()
    assert got_uv.endswith("uv")
    assert by_uv.startswith("uv pip install")
    assert all(line.endswith("[test,lint]") for line in [by_uv, *by_pip])
    assert len(by_pip) == (uv == "exit 1")
    assert {path.name for path in venv.glob(".has-*")} == {".has-base", ".has-test", ".has-lint"}


@pytest.mark.parametrize("fails", ["exit 1", ""])
def test_a_folder_of_the_user_keeps_all_that_is_in_it(machine, tmp_path, fails):
    """Also where making an environment would work: it is no place for one."""
    folder = tmp_path / "here" / "envs"
    (folder / "other").mkdir(parents=True)
    (folder / "other" / "data.txt").write_text("precious")
    before = names(folder)
    done = machine("base", VENV="envs", VENV_FAILS=fails)
    assert done.returncode == 1
    assert "VENV='envs' exists" in done.stderr
    assert names(folder) == before
    done = machine("clean", VENV="envs")
    assert done.returncode == 0
    assert "'envs' was not removed" in done.stderr
    assert names(folder) == before


@pytest.mark.parametrize("kind", ["file", "link that leads nowhere", "link to a folder"])
def test_what_is_no_folder_is_kept_too(machine, tmp_path, kind):
    path, folder = tmp_path / "here" / "envs", tmp_path / "elsewhere"
    folder.mkdir()
    (folder / "data.txt").write_text("precious")
    if kind == "file":
        path.write_text("precious")
    else:
        path.symlink_to(folder if kind == "link to a folder" else tmp_path / "nothing")
    done = machine("base", VENV="envs", VENV_FAILS="exit 1")
    assert done.returncode == 1
    assert "exists, and is not a virtual environment" in done.stderr
    machine("clean", VENV="envs")
    assert os.path.lexists(path)
    assert names(folder) == ["data.txt"]


def test_what_a_failed_run_made_is_removed(machine, tmp_path):
    done = machine("base", VENV="envs", VENV_FAILS="exit 1")
    assert done.returncode == 1
    assert "apt install python3-venv" in done.stderr
    assert names(tmp_path / "here") == []
    assert machine("base", VENV="envs").returncode == 0


def test_what_an_interrupted_run_made_is_removed(machine, tmp_path):
    run = subprocess.Popen(
        [INSTALL, "base"],
        cwd=tmp_path / "here",
        env=machine.environment | {"VENV": "envs", "VENV_FAILS": "touch ../begun; sleep 60"},
        start_new_session=True,
    )
    end = time.monotonic() + 30
    while not (tmp_path / "begun").exists() and time.monotonic() < end:
        time.sleep(0.01)
    assert (tmp_path / "here" / "envs").exists()
    os.killpg(run.pid, signal.SIGINT)  # as Ctrl-C does
    assert run.wait(timeout=90) == 130  # where the signal comes just before it, after the sleep
    assert names(tmp_path / "here") == []


def test_an_environment_of_the_user_is_used_and_kept(machine, tmp_path):
    folder = tmp_path / "here" / "mine"
    program(folder / "bin" / "python", PYTHON)
    assert machine("base", VENV="mine").returncode == 0
    assert machine("clean", VENV="mine").returncode == 0
    assert names(folder) == [".has-base", "bin", "bin/python"]


def test_an_environment_without_pip_says_so(machine, tmp_path):
    program(tmp_path / "here" / "mine" / "bin" / "python", PYTHON)
    done = machine("base", VENV="mine", NO_PIP="1")
    assert done.returncode == 1
    assert "VENV='mine' has no pip" in done.stderr
    assert (tmp_path / "here" / "mine" / "bin" / "python").exists()


def installations(tmp_path):
    """Return what pip was asked for: names, and for linumpy the compiler and LINUMPY_NATIVE."""
    lines = (tmp_path / "pip.log").read_text().splitlines()
    return [tuple(line.split("|")[:2]) if "|" in line else line.split()[-1] for line in lines]


def test_the_compiler_of_the_machine_builds_the_core(machine, tmp_path):
    assert machine("base", VENV="mine").returncode == 0
    assert installations(tmp_path) == [("c++", "")]
    assert not (tmp_path / "here/mine/.no-core").exists()


@pytest.mark.parametrize("native", ["", "require"])
@pytest.mark.parametrize("venv", ["mine", "a b"])
def test_without_a_compiler_zig_builds_the_core(machine, tmp_path, venv, native):
    done = machine("base", VENV=venv, NO_COMPILER="1", LINUMPY_NATIVE=native)
    assert done.returncode == 0, done.stderr
    compiler = tmp_path / "here" / venv / "bin" / "zig-c++"
    assert installations(tmp_path) == ["ziglang>=0.17.1", (str(compiler), native)]
    assert not (compiler.parents[1] / ".no-core").exists()
    for status in (0, 3):
        done = subprocess.run([compiler, "a.cpp"], env=machine.environment | {"ZIG_FAILS": str(status)})
        assert done.returncode == status


@pytest.mark.parametrize("fault", ["NO_ZIG", "ZIG_FAILS"])
def test_without_a_compiler_and_zig_linumpy_is_pure_python_unless_the_core_is_required(machine, tmp_path, fault):
    without = {"VENV": "mine", "NO_COMPILER": "1", fault: "1"}
    done = machine("base", **without, LINUMPY_NATIVE="require")
    assert done.returncode == 1
    assert "LINUMPY_NATIVE=require: the native core needs a compiler for C++20" in done.stderr
    assert installations(tmp_path) == ["ziglang>=0.17.1"]
    assert not (tmp_path / "here/mine/.has-base").exists()
    assert machine("base", **without).returncode == 0
    assert installations(tmp_path)[2:] == [("", "off")]
    assert (tmp_path / "here/mine/.no-core").exists()


def test_switched_off_nothing_is_compiled_or_brought(machine, tmp_path):
    assert machine("base", VENV="mine", LINUMPY_NATIVE="off", NO_COMPILER="1").returncode == 0
    assert installations(tmp_path) == [("", "off")]
    assert not (tmp_path / "cxx.log").exists()


@pytest.mark.parametrize("given", ["nowhere/g++-9", "false -m64"])
def test_a_given_compiler_that_does_not_compile_is_named_and_replaced(machine, tmp_path, given):
    done = machine("base", VENV="mine", CXX=given)
    assert done.returncode == 0
    assert f"CXX='{given}' does not compile C++20" in done.stderr
    assert installations(tmp_path) == [("c++", "")]


@pytest.mark.parametrize("given", ["my compiler/c++", "env c++", "g++"])
def test_a_given_compiler_is_taken(machine, tmp_path, given):
    """A path with spaces; a program with an argument; the second of those that are tried."""
    if "/" in given:
        given = str(program(tmp_path / given, "#!/bin/sh\n"))
    assert machine("base", VENV="mine", CXX=given).returncode == 0
    assert installations(tmp_path) == [(given, "")]


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_make_installs_again_once_a_compiler_has_appeared(machine, tmp_path):
    """And at no other time, so that each `make` need not wait for an installation that changes nothing."""
    venv, without = str(tmp_path / "mine"), {"NO_COMPILER": "1", "NO_ZIG": "1"}

    def installs(**more):
        command = ["make", "--dry-run", "-C", INSTALL.parents[1], f"VENV={venv}", "demo"]
        done = subprocess.run(command, env=machine.environment | more, capture_output=True, text=True, check=True)
        return "install.sh base" in done.stdout

    assert installs()
    assert machine("base", VENV=venv, **without).returncode == 0
    assert not installs(**without)
    assert not installs(LINUMPY_NATIVE="off")
    assert installs()
    assert machine("base", VENV=venv).returncode == 0
    assert not installs()
    # This compiler was tried: the core is missing for another reason.
    (tmp_path / "mine/.no-core").write_text("c++\n")
    assert not installs()


def test_the_probe_is_what_a_compiler_of_c_plus_plus_20_compiles(machine, tmp_path):
    real = shutil.which("c++")
    if real is None or subprocess.run([real, "-std=c++20", "-E", "-xc++", "/dev/null"], capture_output=True).returncode:
        pytest.skip("there is no compiler for C++20")
    assert machine("base", VENV="mine", CXX=real).returncode == 0
    assert installations(tmp_path) == [(real, "")]
    older = program(tmp_path / "older", f'#!/bin/sh\nexec {real} "$@" -std=c++17\n')
    assert "does not compile C++20" in machine("base", VENV="mine", CXX=str(older)).stderr


def gpu_extra(tmp_path, smi):
    program(tmp_path / "programs" / "nvidia-smi", f"#!/bin/sh\n{smi}\n")
    path = f"{tmp_path / 'programs'}:{os.environ['PATH']}"
    return subprocess.run([GPU_EXTRA], env={"PATH": path}, capture_output=True, text=True, timeout=60)


#: More than a pipe holds, so that a reader that ends early leaves the writer with SIGPIPE.
SLICES = "GPU 0: NVIDIA (UUID: GPU-0)\\n" + "  MIG 1g.10gb     Device  0: (UUID: MIG-0123456789)\\n" * 4000
LISTS = f'if [ "$1" = --list-gpus ]; then printf "{SLICES}" || exit 1'


@pytest.mark.parametrize(
    ("table", "extra"),
    [
        ("| NVIDIA-SMI 570.1   Driver Version: 570.1   CUDA Version: 12.8     |", "cuda12"),
        ("| NVIDIA-SMI 580.1   Driver Version: 580.1   CUDA Version: 13.0     |", "cuda13"),
        ("| NVIDIA-SMI 590.1   KMD Version: 590.1   CUDA UMD Version: 13.1     |", "cuda13"),
    ],
)
@pytest.mark.parametrize("status", [0, 15], ids=["all GPUs answer", "one GPU does not"])
def test_many_slices_are_a_gpu(tmp_path, table, extra, status):
    rest = f"| 0 MIG {'x' * 100} |\\n" * 2000
    done = gpu_extra(tmp_path, f'{LISTS}; else printf "{table}\\n{rest}"; fi; exit {status}')
    assert (done.returncode, done.stdout) == (0, f"{extra}\n"), done.stderr


def test_no_gpu_and_an_old_driver(tmp_path):
    assert gpu_extra(tmp_path, "echo 'No devices were found'; exit 6").returncode == 1
    done = gpu_extra(tmp_path, f'{LISTS}; else echo "CUDA Version: 11.4"; fi')
    assert done.returncode == 1
    assert "offers '11'" in done.stderr
