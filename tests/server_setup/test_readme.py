"""If this fails, the README's steps do not lead to a working server.

Commands of ours are run. The others (apt-get, modprobe, mount, reboot, ...) are not: what
they would do to the server is done to its tree. A command that is neither fails the test,
so the README cannot drift.
"""

import os
import re
import shutil
import subprocess

import pytest

from tests.server_setup.faketree import REGISTRY, UUID, FakeTree
from tests.server_setup.server_tools import SETUP_DIR

README = (SETUP_DIR / "README.md").read_text()
WALK = README.split("## From a bare Ubuntu server")[1].split("\n## ")[0]


def blocks(text):
    return [
        (kind, body.strip("\n").splitlines()) for kind, body in re.findall(r"^```(\w+)\n(.*?)^```", text, re.M | re.S)
    ]


class Server:
    """A bare Ubuntu server with an NVMe disk, and what the README's commands do to it."""

    def __init__(self, tmp_path):
        self.tree = FakeTree(tmp_path / "tree")
        # The scripts are used from a copy: they need nothing of the checkout.
        self.work = tmp_path / "checkout" / "shell_scripts" / "server_setup"
        shutil.copytree(SETUP_DIR, self.work)
        tree = self.tree
        tree.distribution()
        tree.kernel("6.17.0-1014-nvidia")
        tree.write("sys/module/nvme_core/parameters/multipath", "Y\n")
        tree.udev()
        tree.nvme()
        tree.link(f"dev/disk/by-uuid/{UUID}", "dev/nvme0n1p1")
        tree.data(super_options="rw")
        tree.write("etc/fstab", f"UUID={UUID} /data ext4 defaults 0 2\n")
        self.installed = set()
        self.fstab_line = None
        self.modprobe = ""
        self.repository = self.python = False
        self.asked = tmp_path / "asked"
        bin_folder = tmp_path / "bin"
        bin_folder.mkdir()
        (bin_folder / "apt-get").write_text(f'#!/bin/sh\necho "$*" >>"{self.asked}"\n')
        (bin_folder / "apt-get").chmod(0o755)
        self.env = {**os.environ, "GDS_SYSROOT": str(tree.root), "PATH": f"{bin_folder}:{os.environ['PATH']}"}
        self.env["GDS_SYSROOT_PRETENDED"] = "yes"  # --yes calls the pretended apt-get

    def ours(self, line):
        done = subprocess.run(["bash", "-c", line], cwd=self.work, env=self.env, capture_output=True, text=True)
        assert done.returncode != 2, done.stderr
        assert done.returncode or "running:" in done.stderr or not done.stderr, done.stderr
        self.fstab_line = next(
            (text[7:] for text in done.stdout.splitlines() if text.startswith("fstab: ")), self.fstab_line
        )
        return done.stdout

    def reboot(self):
        tree = self.tree
        if "nvidia-driver-595-server-open" in self.installed:
            registry = REGISTRY if REGISTRY in self.modprobe else ""
            tree.driver(registry=registry)
            tree.gpu(p2pmem=None)
        if "multipath=N" in self.modprobe:
            tree.write("sys/module/nvme_core/parameters/multipath", "N\n")

    def run(self, line):
        """One line of the README; returns what it printed."""
        tree = self.tree
        if line == "cd shell_scripts/server_setup":
            return ""
        if re.match(r"(sudo )?\./\w+\.sh\b", line):
            out = self.ours(line.removeprefix("sudo "))
            if "--yes" in line:
                self.installed |= set(self.asked.read_text().split())
            return out
        if found := re.fullmatch(r"sudo apt-get install -y (\S+)", line):
            self.installed.add(found.group(1))
            if found.group(1).startswith("libcufile-"):
                tree.libcufile()
            assert self.repository or not found.group(1).startswith("libcufile-"), "Ubuntu itself has no libcufile"
        elif re.match(
            r"wget https://developer\.download\.nvidia\.com/compute/cuda/repos/ubuntu2404/x86_64/\S+\.deb$", line
        ):
            self.fetched = line.rpartition("/")[2]
        elif line.startswith("sudo dpkg -i "):
            assert line.split()[-1] == self.fetched
            self.repository = True
        elif line in ("sudo apt-get update", "sudo systemctl daemon-reload", "findmnt --verify"):
            pass
        elif line == "python3 -m venv ~/gds":
            assert "python3-venv" in self.installed
        elif line == ". ~/gds/bin/activate":
            self.python = True
        elif re.fullmatch(r"pip install cupy-cuda13x kvikio-cu13", line):
            assert self.python, "Ubuntu's own Python takes no packages from pip"
        elif line == "sudo reboot":
            self.python = False
            self.reboot()
        elif line == "sudoedit /etc/fstab":
            assert self.fstab_line, "no line was recommended before"
            tree.write("etc/fstab", self.fstab_line + "\n")
        elif line == "sudo umount /data":
            tree.unmount_all()
        elif line == "sudo mount /data":
            device, point, fstype, options, *_ = tree.path("etc/fstab").read_text().split()
            assert (device, point) == (f"UUID={UUID}", "/data")
            extra = ",data=ordered" if "data=ordered" in options.split(",") else ""
            tree.data(fstype=fstype, super_options="rw" + extra)
        elif found := re.fullmatch(r"((?:printf|echo) .*) \| sudo tee (/etc/modprobe\.d/\S+\.conf)", line):
            text = subprocess.run(["bash", "-c", found.group(1)], capture_output=True, text=True, check=True).stdout
            assert text.startswith("options ")
            assert text.count("\n") == 1
            self.modprobe += text
            tree.write(found.group(2), text)
        elif line == "sudo update-initramfs -u":
            assert self.modprobe
        elif found := re.fullmatch(r"sudo install --backup -m 644 (\S+) (/etc/\S+)", line):
            tree.write(found.group(2), (self.work / found.group(1)).read_bytes())
        elif line == "python3 -c 'import cupy; cupy.zeros(1)'":
            assert self.python, "CuPy is in the virtual environment"
            if REGISTRY in tree.path("proc/driver/nvidia/params").read_text():
                tree.gpu()
        elif line == "sudo modprobe nvidia-fs":
            assert "linux-modules-nvidia-fs-6.17.0-1014-nvidia" in self.installed
            tree.nvidia_fs()
        elif re.match(r"(head -c 1G|KVIKIO_COMPAT_MODE=OFF python3 verify_read\.py|rm) ", line):
            pass  # see test_verify_read
        else:
            pytest.fail(f"the README has a command that this test does not know: {line}")
        return ""


def test_every_step(tmp_path, clean_environment):
    server = Server(tmp_path)
    printed = ""
    verdicts = []
    for kind, lines in blocks(WALK):
        if kind == "bash":
            for line in lines:
                out = server.run(line)
                printed = out or printed
                verdicts += re.findall(r"^path=(.*)$", out, re.M)
        elif kind == "text":
            for line in lines:
                assert any(text.startswith(line) for text in printed.splitlines()), (
                    f"promised: {line}\nprinted:\n{printed}"
                )
    assert verdicts == ["unknown", "kvikio-posix", "cufile-compat", "p2pdma", "p2pdma"]
    assert subprocess.run([SETUP_DIR / "gds_doctor.sh", "/data"], env=server.env, capture_output=True).returncode == 0


def test_nvidia_fs_alone(tmp_path, clean_environment):
    """Step 5b in the place of 5a."""
    server = Server(tmp_path)
    for section in WALK.split("\n### "):
        if section.startswith("5a"):
            continue
        for kind, lines in blocks(section):
            if kind == "bash":
                for line in lines:
                    last = server.run(line)
                    if last.startswith("path="):
                        verdict = last.splitlines()[0]
    assert verdict == "path=nvidia-fs"


def test_every_step_is_needed(tmp_path, clean_environment):
    """Without any one of the commands that change the server, P2PDMA stays closed."""
    lines = [
        line
        for section in WALK.split("\n### ")
        if not section.startswith("5b")
        for kind, body in blocks(section)
        if kind == "bash"
        for line in body
    ]
    needed = [
        line
        for line in lines
        if re.match(r"sudo apt-get install -y (nvidia|libcufile)|sudo mount|printf|echo|sudo install", line)
    ]
    assert len(needed) == 6
    for number, left_out in enumerate(needed):
        server = Server(tmp_path / str(number))
        out = ""
        for line in lines:
            if line == left_out:
                continue
            try:
                answer = server.run(line)
            except (AssertionError, FileNotFoundError):
                assert "nvidia-driver" in left_out or "printf" in left_out or "echo" in left_out
                break
            out = answer if answer.startswith("path=") else out
        assert not out.startswith("path=p2pdma"), left_out


def test_verify_read(tmp_path):
    """The reading program of the README, with a pretended CuPy and kvikio."""
    (body,) = [lines for kind, lines in blocks(WALK) if kind == "python"]
    (tmp_path / "verify_read.py").write_text("\n".join(body) + "\n")
    (tmp_path / "cupy.py").write_text("import numpy\nempty = numpy.empty\nasnumpy = numpy.asarray\n")
    (tmp_path / "kvikio.py").write_text(
        "import os\n"
        "class CuFile:\n"
        "    def __init__(self, name, mode): self.name = name\n"
        "    def __enter__(self): return self\n"
        "    def __exit__(self, *a): pass\n"
        "    def pread(self, out):\n"
        "        class Future:\n"
        "            def get(_):\n"
        "                data = open(self.name, 'rb').read()\n"
        "                out[:] = list(data)\n"
        "                if os.environ.get('LOSE'): out[0] ^= 1\n"
        "                return len(data)\n"
        "        return Future()\n"
    )
    (tmp_path / "probe.bin").write_bytes(os.urandom(4096))
    import sys

    command = [sys.executable, "verify_read.py", "probe.bin"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout == "read 4096 bytes\n", done.stderr
    assert subprocess.run(command, cwd=tmp_path, capture_output=True, env={**os.environ, "LOSE": "1"}).returncode == 1


def test_the_patch_section(tmp_path, clean_environment):
    from tests.server_setup import fakesource

    source = fakesource.build(tmp_path / "nvidia-fs-2.28.4")
    (lines,) = [
        body
        for kind, body in blocks(README.split("## nvidia-fs 2.28.4 on Linux 7.0")[1].split("\n## ")[0])
        if kind == "bash"
    ]
    codes = []
    for line in lines:
        if "dkms" in line:
            continue
        line = line.removeprefix("sudo ").replace("/usr/src/nvidia-fs-2.28.4", str(source))
        codes.append(subprocess.run(["bash", "-c", line], cwd=SETUP_DIR, capture_output=True).returncode)
    assert codes == [3, 0]


def test_exit_code_table_agrees_with_the_help_texts():
    rows = re.findall(r"^\| `(\w+\.sh)` \|(.*)\|$", README.split("## Exit codes")[1], re.M)
    assert len(rows) == 6
    for script, cells in rows:
        codes = {code for code, cell in zip((0, 1, 2, 3, 4, 10, 11), cells.split("|"), strict=True) if cell.strip()}
        text = subprocess.run([SETUP_DIR / script, "--help"], capture_output=True, text=True).stdout
        said = text.split("Exit:")[1]
        assert codes == {int(n) for n in re.findall(r"(?:^|[,;\s])(\d+) [a-zA-Z]", said)}, script
