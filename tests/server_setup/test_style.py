"""If this fails, a server script reads past the test's prefix, or calls what it must not."""

import os
import re
import subprocess

import pytest

from tests.server_setup.server_tools import HERE, SETUP_DIR

SCRIPTS = sorted(SETUP_DIR.glob("*.sh"))
RUNNABLE = [script for script in SCRIPTS if script.name != "lib.sh"]


def words_of(script):
    """The lines of a script that run: no comments, no help text, no here-documents."""
    end = None
    for number, line in enumerate(script.read_text().splitlines(), 1):
        if end is not None:
            if line.strip() == end:
                end = None
            continue
        found = re.search(r"<<-?'?(\w+)'?", line)
        if found and "<<<" not in line:
            end = found.group(1)
        if not line.lstrip().startswith("#"):
            yield number, line


@pytest.mark.parametrize("script", RUNNABLE, ids=lambda s: s.name)
def test_shape(script):
    text = script.read_text()
    assert text.startswith("#!/usr/bin/env bash\n")
    assert "set -euo pipefail" in text
    assert os.access(script, os.X_OK)
    done = subprocess.run([script, "--help"], capture_output=True, text=True)
    assert done.returncode == 0
    assert not done.stderr
    for option in ("--json", "--help", "Exit:"):
        assert option in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 88


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda s: s.name)
def test_every_read_goes_through_the_prefix(script):
    """A file test, a redirection or a program that opens a system path names $ROOT before it."""
    system = r"""["']?/(?:proc|sys|etc|run|boot|dev|lib|usr|var)\b"""
    start = r"(?:^|[;&|(!]|\$\(|\bif|\bthen|\bdo)\s*"
    reads = re.compile(
        rf"\[\[?[^\]]*\s-[a-zA-Z]\s+{system}|<\s*{system}|(?:first_line|slurp)\s+{system}|\bfor\s+\w+\s+in\s+{system}"
        rf"|{start}(?:grep|cat|od|tr|ls|find|readlink|realpath|gzip|read_cufile_json)\b[^|]*\s{system}"
    )
    # /dev/null is no look at the machine, and these two lists get their prefix where they are used.
    allowed = re.compile(r"</dev/null|for file in /var/lib|for file in \"/boot")
    seen = 0
    for number, line in words_of(script):
        assert not reads.search(allowed.sub("", line)), f"{script.name}:{number}: {line}"
        seen += line.count("$ROOT")
    assert seen or script.name in (
        "make_cufile_json.sh",
        "nvfs_kernel7_patch.sh",
        "nvfs_symvers.sh",
        "check_nvme_mount.sh",
        "gds_doctor.sh",
    )


def test_the_check_for_the_prefix_finds_what_it_should(tmp_path):
    bad = [
        "first_line /proc/cmdline",
        "[[ -r /etc/x ]]",
        'slurp "/sys/x"',
        'x <"/proc/x"',
        "y=$(cat /proc/x)",
        "if grep -q x /boot/config; then",
        "for d in /sys/block/*; do",
    ]
    for line in bad:
        file = tmp_path / "bad.sh"
        file.write_text(line + "\n")
        with pytest.raises(AssertionError):
            test_every_read_goes_through_the_prefix(file)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda s: s.name)
def test_no_script_calls_what_it_must_not(script):
    """The traps prove it for what the tests run; this reads the rest."""
    forbidden = "sudo su dkms modprobe insmod rmmod curl wget mount umount reboot "
    forbidden += "update-grub update-initramfs dracut mokutil mkfs systemctl"
    start = re.compile(
        rf"(?:^|[;&|({{]|\$\(|then|do|else|!)\s*(?:{'|'.join(map(re.escape, forbidden.split()))})(?:\s|$)"
    )
    for number, line in words_of(script):
        bare = re.sub(r"\"(?:[^\"\\]|\\.)*\"|'[^']*'", '""', line)
        assert not start.search(bare), f"{script.name}:{number}: {line}"


def test_the_prefix_is_complete(tmp_path, clean_environment):
    """With an empty tree for a machine nothing of this machine is seen."""
    (tmp_path / "data").mkdir()
    env = {**os.environ, "GDS_SYSROOT": str(tmp_path)}
    doctor = subprocess.run([SETUP_DIR / "gds_doctor.sh", "/data"], capture_output=True, text=True, env=env)
    assert doctor.returncode == 1, doctor.stdout
    assert doctor.stdout.startswith("path=unknown\n")
    assert "mountinfo cannot be read" in doctor.stdout
    assert os.uname().release not in doctor.stdout
    plan = subprocess.run([SETUP_DIR / "install_nvidia_fs.sh"], capture_output=True, text=True, env=env)
    assert plan.returncode == 3
    assert os.uname().release not in plan.stdout


def test_nothing_of_a_workplace_is_named():
    for file in [*SCRIPTS, SETUP_DIR / "README.md", *HERE.glob("*.py"), *HERE.glob("*.bats"), *HERE.glob("*.bash")]:
        text = file.read_text()
        assert not re.search("/" + "root/|/" + "work/|/" + "home/[a-z]", text), file
