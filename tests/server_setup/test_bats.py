"""If this fails, a server script gives a wrong verdict, or changes the machine (all .bats files)."""

import os
import re
import subprocess

import pytest

from tests.server_setup.server_tools import HERE, SETUP_DIR, ensure_tools
from tests.support import budget

FILES = sorted(HERE.glob("*.bats"))


def names_of(file, *, slow):
    """Names of a file's tests; those behind a line `# slow` only if they are asked for."""
    found = re.findall(r'^(# slow\n)?@test "(.*)" {$', file.read_text(), re.M)
    return [name for is_slow, name in found if slow or not is_slow]


def run_bats(file, names=None):
    """Run the tests of these names, or all of a file."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("BATS_", "CUFILE_", "KVIKIO_", "GDS_"))}
    command = ["bats", "--tap", str(file)]
    if names:
        texts = [re.sub(r"[][().*+?{}|^$\\]", r"\\\g<0>", name) for name in names]
        command += ["--filter", f"^({'|'.join(texts)})$"]
    return subprocess.run(
        command, capture_output=True, text=True, env=env, stdin=subprocess.DEVNULL, timeout=300, check=False
    )


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_bats_file(file, tools):
    names = names_of(file, slow=budget.SLOW)
    done = run_bats(file, names)
    failed = [line for line in done.stdout.splitlines() if not line.startswith("ok ")]
    assert done.returncode == 0, "\n".join(failed) + done.stderr
    plan = int(re.match(r"1\.\.(\d+)", done.stdout).group(1))
    passed = re.findall(r"^ok \d+ (.*)$", done.stdout, re.M)
    assert len(passed) == plan == len(names)
    assert len(names_of(file, slow=True)) == len(re.findall(r"^@test ", file.read_text(), re.M))
    assert not [name for name in passed if re.search(r"# skip", name)]


def test_every_script_has_its_bats_file():
    scripts = {file.stem for file in SETUP_DIR.glob("*.sh")} - {"lib"}
    assert scripts == {file.stem for file in FILES}
    assert len(scripts) == 6


BODIES = [
    "exits 3", "says nonsense", "verdict p2pdma", "row FAIL both nothing", "does_not_say output", "one_clear_line",
    # A trap that is called fails the test, even where its exit code is ignored.
    "sudo true || true",
]  # fmt: skip


def test_a_failing_check_fails(tmp_path, tools):
    """The helpers' checks are real: each one can fail, and so can the trap."""
    for name in ("helpers.bash", "faketree.py"):
        (tmp_path / "a" / "b").mkdir(parents=True, exist_ok=True)
        (tmp_path / "a" / "b" / name).write_bytes((HERE / name).read_bytes())
    (tmp_path / "shell_scripts" / "server_setup").mkdir(parents=True)
    file = tmp_path / "a" / "b" / "x.bats"
    tests = [f'@test "{body}" {{\n run echo output\n {body}\n true\n}}\n' for body in [*BODIES, "true"]]
    file.write_text("load helpers\nsetup() { common_setup; }\nteardown() { common_teardown; }\n" + "".join(tests))
    done = run_bats(file)
    assert done.returncode == 1
    assert re.findall(r"^not ok \d+ (.*)$", done.stdout, re.M) == BODIES
    assert re.findall(r"^ok \d+ (.*)$", done.stdout, re.M) == ["true"]


def test_without_bats_ci_fails_and_a_laptop_skips(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr("tests.server_setup.server_tools.quiet", lambda *command, **_: asked.append(command) and False)
    monkeypatch.setattr(
        "tests.server_setup.server_tools.shutil.which", lambda name, **_: None if name == "bats" else f"/bin/{name}"
    )
    monkeypatch.setenv("PATH", os.environ["PATH"])
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match="bats"):
        ensure_tools(tmp_path)
    # The package manager was asked first, then npm, into a folder of its own.
    assert any("apt-get" in command and "bats" in command for command in asked)
    assert asked[-1][:2] == ("npm", "install")
    assert str(tmp_path) in asked[-1]
    monkeypatch.delenv("CI")
    with pytest.raises(pytest.skip.Exception, match="bats"):
        ensure_tools(tmp_path)
