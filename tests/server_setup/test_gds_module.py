"""If this fails, linumpy.gds tells something else than the doctor."""

import ast
import dataclasses
import importlib.util
import os
import shutil
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest

from tests.server_setup.faketree import both_ways
from tests.server_setup.server_tools import HERE, SETUP_DIR

PYTHON = sys.executable
MODULE = HERE.parents[1] / "linumpy" / "gds.py"


def load(file=MODULE, name="linumpy_gds_under_test"):
    spec = importlib.util.spec_from_file_location(name, file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def gds(monkeypatch, clean_environment):
    module = load()
    # This Python's kvikio, if any, knows nothing of a pretended server.
    monkeypatch.setattr(module.sys, "executable", "")
    # Nor does one that another test of this process imported.
    monkeypatch.delitem(sys.modules, "kvikio.defaults", raising=False)
    return module


@pytest.fixture
def server(tmp_path, monkeypatch, gds):
    tree = both_ways(tmp_path / "tree")
    monkeypatch.setenv("GDS_SYSROOT", str(tree.root))
    return tree


def count_runs(gds, monkeypatch):
    runs = []
    real = gds._run
    monkeypatch.setattr(gds, "_run", lambda *a: runs.append(a) or real(*a))
    return runs


def test_both_ways_open(gds, server):
    verdict = gds.gds_verdict(server.path("data"))
    assert verdict.path == "p2pdma"
    assert verdict.is_native
    assert verdict.folder == str(server.path("data"))
    assert verdict.reasons[0].startswith("both native ways are open")
    with pytest.raises(dataclasses.FrozenInstanceError):
        verdict.path = "nvidia-fs"
    assert {verdict: 1}[verdict] == 1


@pytest.mark.parametrize(
    ("change", "path"),
    [
        (lambda t: t.remove("etc/cufile.json"), "nvidia-fs"),
        (lambda t: t.data(super_options="rw"), "cufile-compat"),
        (lambda t: t.remove("run/udev"), "kvikio-posix"),
        (lambda t: t.remove("proc/self/mountinfo"), "unknown"),
    ],
)
def test_every_path(gds, server, change, path):
    change(server)
    verdict = gds.gds_verdict(server.path("data"))
    assert verdict.path == path
    assert verdict.is_native is (path == "nvidia-fs")
    assert verdict.reasons


def test_what_does_not_exist_yet_is_judged_by_its_folder(gds, server):
    verdict = gds.gds_verdict(server.path("data") / "new" / "brain.ome.zarr")
    assert verdict.path == "p2pdma"
    assert verdict.folder == str(server.path("data"))
    file = server.write("data/file name", "x")
    assert gds.gds_verdict(str(file)).folder == str(server.path("data"))
    assert gds.gds_verdict(os.fsencode(file)).folder == str(server.path("data"))
    assert gds.gds_verdict(f"file://{file}".replace(" ", "%20")).folder == str(server.path("data"))


def test_ugly_folder_names(gds, server):
    for name in ('it\'s "mine"', "-x", "new\nline", "bad\udcff"):
        server.data(point="/" + name)
        verdict = gds.gds_verdict(server.path(name))
        assert verdict.path == "p2pdma", verdict


@pytest.mark.parametrize("url", ["s3://bucket/key", "https://host/x.zarr", "memory://x"])
def test_no_local_folder(gds, url):
    verdict = gds.gds_verdict(url)
    assert verdict.path == "unknown"
    assert "no local folder" in verdict.reasons[0]


def test_impossible_names(gds):
    for name in ("a\0b", "x" * 5000):
        assert gds.gds_verdict(name).path == "unknown"


def test_asking_again_costs_nothing(gds, server, monkeypatch):
    runs = count_runs(gds, monkeypatch)
    first = gds.gds_verdict(server.path("data"))
    assert gds.gds_verdict(f"{server.path('data')}/later.zarr") is first
    assert len(runs) == 1
    monkeypatch.setenv("KVIKIO_COMPAT_MODE", "ON")
    assert gds.gds_verdict(server.path("data")).path == "kvikio-posix"
    assert len(runs) == 2


def test_every_gpu_must_qualify(gds, server):
    server.gpu(address="0000:17:00.0", model="NVIDIA L40", p2pmem=None)
    assert gds.gds_verdict(server.path("data")).path == "nvidia-fs"


def test_kvikio_that_was_told_in_this_process_is_believed(gds, server, monkeypatch):
    fake = types.ModuleType("kvikio.defaults")
    fake.get = lambda name: types.SimpleNamespace(name={"compat_mode": "ON"}[name])
    monkeypatch.setitem(sys.modules, "kvikio.defaults", fake)
    assert gds.gds_verdict(server.path("data")).path == "kvikio-posix"


def test_this_python_is_the_one_that_is_asked(server, monkeypatch, tmp_path):
    module = load()
    monkeypatch.setattr(sys, "executable", PYTHON)
    site = tmp_path / "site"
    (site / "kvikio").mkdir(parents=True)
    (site / "kvikio" / "__init__.py").write_text("")
    (site / "kvikio" / "defaults.py").write_text("def is_compat_mode_preferred():\n    return True\n")
    monkeypatch.setenv("PYTHONPATH", str(site))
    assert module.gds_verdict(server.path("data")).path == "kvikio-posix"


def test_no_bash_is_unknown(gds, server, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    verdict = gds.gds_verdict(server.path("data"))
    assert verdict.path == "unknown"
    assert "no bash" in verdict.reasons[0]


def test_another_system_is_unknown(gds, server, monkeypatch):
    monkeypatch.setattr(gds.sys, "platform", "darwin")
    assert "Linux only" in gds.gds_verdict(server.path("data")).reasons[0]


def install(tmp_path, doctor):
    """The package as a wheel lays it out, with a doctor of our own."""
    package = tmp_path / "site" / "linumpy"
    (package / "_server_setup").mkdir(parents=True)
    shutil.copy(MODULE, package / "gds.py")
    if doctor is None:
        for name in ("gds_doctor.sh", "lib.sh"):
            shutil.copyfile(SETUP_DIR / name, package / "_server_setup" / name)
    elif doctor:
        (package / "_server_setup" / "gds_doctor.sh").write_text("#!/bin/bash\n" + doctor)
        (package / "_server_setup" / "lib.sh").write_text("")
    return load(package / "gds.py", f"gds_{abs(hash(tmp_path))}"), package


def test_installed_layout_without_execute_bits(server, tmp_path):
    module, package = install(tmp_path, None)
    assert not os.access(package / "_server_setup" / "gds_doctor.sh", os.X_OK)
    assert module.gds_verdict(server.path("data")).path == "p2pdma"


def test_no_script_is_unknown(server, tmp_path):
    module, _ = install(tmp_path, "")
    assert "not in the package" in module.gds_verdict(server.path("data")).reasons[0]


@pytest.mark.parametrize(
    ("doctor", "reason"),
    [
        ("echo 'no json'", "gave no answer (exit 0)"),
        ("echo first >&2; echo last >&2; exit 7", "(exit 7): last"),
        ('echo \'{"path": "teleport", "reasons": []}\'', "gave no answer"),
        ("echo '[]'", "gave no answer"),
        ("printf '\\377'", "gave no answer"),
    ],
)
def test_nonsense_from_the_script_is_unknown(server, tmp_path, doctor, reason):
    module, _ = install(tmp_path, doctor + "\n")
    verdict = module.gds_verdict(server.path("data"))
    assert verdict.path == "unknown"
    assert reason in verdict.reasons[0]


def time_begins_with(file, monkeypatch):
    """Let the time for an answer begin when the script has made a file: a busy machine may start it late."""

    class Popen(subprocess.Popen):
        def communicate(self, *arguments, **options):
            while not file.exists() and self.poll() is None:
                time.sleep(0.01)
            return super().communicate(*arguments, **options)

    monkeypatch.setattr(subprocess, "Popen", Popen)


def test_a_script_that_hangs_is_ended_with_its_children(server, tmp_path, monkeypatch):
    module, _ = install(tmp_path, f"sleep 60 & echo $! >'{tmp_path}/pid'; wait\n")
    time_begins_with(tmp_path / "pid", monkeypatch)
    start = time.monotonic()
    monkeypatch.setattr(module, "_TIMEOUT", 1)
    verdict = module.gds_verdict(server.path("data"))
    assert verdict.path == "unknown"
    assert "within 1 s" in verdict.reasons[0]
    assert time.monotonic() - start < 50
    pid = int((tmp_path / "pid").read_text())
    for _ in range(1000):
        stat = Path(f"/proc/{pid}/stat")
        if not stat.exists() or stat.read_text().rsplit(")", 1)[1].split()[0] == "Z":
            break
        time.sleep(0.02)
    else:
        pytest.fail("the child is still alive")


def test_no_answer_in_time_is_not_kept(server, tmp_path, monkeypatch):
    time_begins_with(tmp_path / "late", monkeypatch)
    answer = '{"path": "p2pdma", "reasons": []}'
    module, _ = install(
        tmp_path, f"[ -e '{tmp_path}/late' ] || {{ : >'{tmp_path}/late'; sleep 60; }}\necho '{answer}'\n"
    )
    monkeypatch.setattr(module, "_TIMEOUT", 1)
    assert module.gds_verdict(server.path("data")).path == "unknown"
    assert module.gds_verdict(server.path("data")).is_native


def test_the_module_imports_nothing_but_the_standard_library():
    tree = ast.parse(MODULE.read_text())
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module.split(".")[0])
    assert names <= sys.stdlib_module_names


def test_this_machine_gets_an_answer(gds):
    """Whatever this machine is, the doctor answers, and agrees with its own exit code."""
    verdict = gds.gds_verdict(HERE)
    done = subprocess.run([SETUP_DIR / "gds_doctor.sh", "--no-python", HERE], capture_output=True, text=True)
    assert done.stdout.startswith(f"path={verdict.path}\n")
    assert (
        done.returncode
        == {"nvidia-fs": 0, "p2pdma": 0, "cufile-compat": 10, "kvikio-posix": 11, "unknown": 1}[verdict.path]
    )
