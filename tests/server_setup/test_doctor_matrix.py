"""If this fails, the doctor's verdict differs from the obvious rule when preconditions lack."""

import json
import os
import random
import subprocess

import pytest

from tests.server_setup.faketree import GPU, FakeTree, both_ways
from tests.server_setup.server_tools import SETUP_DIR
from tests.support.budget import first, matrix

DOCTOR = SETUP_DIR / "gds_doctor.sh"
NVFS, P2P, CUFILE = "nvidia-fs", "p2pdma", "cufile"
BOTH = {NVFS, P2P}

# name: (what happens to the machine, which ways it concerns, closed or unknown)
BREAKS = {
    "proprietary driver": (lambda t: t.driver(kind="proprietary"), BOTH, "closed"),
    "unreadable driver line": (
        lambda t: t.write("proc/driver/nvidia/version", "NVRM version: 595.58.03\n"),
        BOTH,
        "unknown",
    ),
    "old driver": (lambda t: t.driver(version="590.44"), {P2P}, "closed"),
    "old kernel": (lambda t: t.kernel("5.15.0-100-generic"), {P2P}, "closed"),
    "no P2PDMA in the kernel": (lambda t: t.kernel(p2pdma="n"), {P2P}, "closed"),
    "consumer GPU": (lambda t: t.gpu(model="NVIDIA GeForce RTX 4090", p2pmem="0"), {P2P}, "closed"),
    "unlisted GPU with memory": (lambda t: t.gpu(model="NVIDIA RTX PRO 6000 Blackwell"), {P2P}, "unknown"),
    "no model name": (lambda t: t.write(f"proc/driver/nvidia/gpus/{GPU}/information", ""), {P2P}, "unknown"),
    "p2pmem 0": (lambda t: t.gpu(p2pmem="0"), {P2P}, "closed"),
    "no p2pmem": (lambda t: t.remove(f"sys/bus/pci/devices/{GPU}/p2pmem"), {P2P}, "unknown"),
    "p2pmem of no number": (lambda t: t.gpu(p2pmem="much"), {P2P}, "unknown"),
    "no registry words": (lambda t: t.driver(registry=""), {P2P}, "closed"),
    "params not readable": (lambda t: t.remove("proc/driver/nvidia/params"), {P2P}, "unknown"),
    "multipath": (lambda t: t.write("sys/module/nvme_core/parameters/multipath", "Y\n"), {P2P}, "closed"),
    "no cufile.json": (lambda t: t.remove("etc/cufile.json"), {P2P}, "closed"),
    "nested block": (lambda t: t.cufile(block="nested"), {P2P}, "closed"),
    "nvidia-fs not loaded": (lambda t: t.remove("proc/driver/nvidia-fs"), {NVFS}, "closed"),
    "no nvme line": (lambda t: t.nvidia_fs(modules="rpcrdma: 1\n"), {NVFS}, "closed"),
    "modules not readable": (lambda t: t.remove("proc/driver/nvidia-fs/modules"), {NVFS}, "unknown"),
    "ext4 as it comes": (lambda t: t.data(super_options="rw"), BOTH, "closed"),
    "data=journal": (lambda t: t.data(super_options="rw,data=journal"), BOTH, "closed"),
    "tmpfs": (lambda t: t.data(fstype="tmpfs", number="0:99", source="tmpfs"), BOTH, "closed"),
    "SATA": (lambda t: t.data(number="8:1", source="/dev/sda1"), BOTH, "closed"),
    "device unknown": (lambda t: t.data(number="259:200"), BOTH, "unknown"),
    "NVMe over TCP": (lambda t: t.nvme(transport="tcp"), BOTH, "closed"),
    "NVMe over FC": (lambda t: t.nvme(transport="fc"), BOTH, "closed"),
    "IOMMU translates": (lambda t: t.write(f"sys/bus/pci/devices/{GPU}/iommu_group/type", "DMA\n"), BOTH, "unknown"),
    "no GPU visible": (lambda t: (t.remove("proc/driver/nvidia/gpus"), t.remove("sys/bus/pci")), BOTH, "unknown"),
    "no udev": (lambda t: t.remove("run/udev"), {CUFILE}, "closed"),
    "no libcufile": (lambda t: t.remove("usr"), {CUFILE}, "closed"),
}
# Those that would undo each other are not combined.
SAME_PLACE = [
    {"proprietary driver", "unreadable driver line", "old driver", "no registry words", "params not readable"},
    {"old kernel", "no P2PDMA in the kernel", "multipath"},
    {
        "consumer GPU", "unlisted GPU with memory", "no model name", "p2pmem 0", "no p2pmem", "p2pmem of no number",
        "no GPU visible", "IOMMU translates",
    },
    {"no cufile.json", "nested block"},
    {"nvidia-fs not loaded", "no nvme line", "modules not readable"},
    {"ext4 as it comes", "data=journal", "tmpfs", "SATA", "device unknown", "NVMe over TCP", "NVMe over FC"},
]  # fmt: skip


def ask(tree, *arguments, folder="/data", **environment):
    env = {**os.environ, "GDS_SYSROOT": str(tree.root), **environment}
    done = subprocess.run([DOCTOR, "--json", *arguments, folder], capture_output=True, env=env)
    assert not done.stderr, done.stderr
    report = json.loads(done.stdout)
    assert report["exit_code"] == done.returncode
    return report


def rule(names):
    """The verdict, told from scratch: what is left of each way, and then which is taken."""
    left = {}
    for way in (NVFS, P2P):
        kinds = [kind for _, ways, kind in (BREAKS[name] for name in names) if way in ways or CUFILE in ways]
        left[way] = "closed" if "closed" in kinds else "unknown" if kinds else "open"
    if any(CUFILE in BREAKS[name][1] for name in names):
        return left, "kvikio-posix", 11
    if left[P2P] == "open":
        return left, P2P, 0
    if left[NVFS] == "open":
        return left, NVFS, 0
    if "unknown" in left.values():
        return left, "unknown", 1
    return left, "cufile-compat", 10


def check(tmp_path, names):
    tree = both_ways(tmp_path / "tree")
    for name in names:
        BREAKS[name][0](tree)
    report = ask(tree)
    left, path, code = rule(names)
    assert (report["ways"], report["path"], report["exit_code"]) == (left, path, code), json.dumps(report, indent=1)
    assert report["native"] == ([w for w in (NVFS, P2P) if left[w] == "open"] if code == 0 else [])
    assert report["both_native"] == (len(report["native"]) == 2)
    assert report["reasons"]
    for row in report["checks"]:
        # Whatever stands in the way comes with the line that mends it.
        assert row["status"] not in ("fail", "unsure") or row["mend"], row
        assert all(row[key] for key in ("looked_at", "found", "must_be")), row
    return report


def test_nothing_broken(tmp_path, clean_environment):
    assert check(tmp_path, [])["both_native"] is True


@pytest.mark.parametrize("name", BREAKS)
def test_one_precondition(name, tmp_path, clean_environment):
    check(tmp_path, [name])


def combinations(count):
    generator = random.Random(6)
    for _ in range(count):
        names, used = [], []
        for name in generator.sample(list(BREAKS), len(BREAKS)):
            groups = [i for i, group in enumerate(SAME_PLACE) if name in group]
            if len(names) < generator.randint(2, 4) and not any(g in used for g in groups):
                names.append(name)
                used += groups
        yield sorted(names)


@pytest.mark.parametrize("names", first(list(combinations(20)), 8), ids=" + ".join)
def test_several_preconditions(names, tmp_path, clean_environment):
    # What is written last must not mend what was broken before.
    order = sorted(names, key=lambda name: list(BREAKS).index(name))
    check(tmp_path, order)


@pytest.mark.parametrize(
    "name",
    [
        "da ta", "it's", 'say "hi"', "tab\there", "new\nline", "back\\slash", "\\040", "Zürich 脳", "\x01",
        "bad\udcff\udce2\udc82", "*?[x]", "$(id)", "-n", "a;b&c|d",
    ],
)  # fmt: skip
def test_ugly_names_survive_as_json(name, tmp_path, clean_environment):
    tree = both_ways(tmp_path / "a tree 'of' \"mine\"")
    tree.data(point="/" + name)
    report = ask(tree, folder="/" + name)
    assert report["path"] == P2P
    assert report["dir"] == report["storage"]["mount_point"] == "/" + name


@pytest.mark.parametrize(
    ("where", "text"),
    matrix(
        [
            "proc/self/mountinfo",
            "proc/driver/nvidia/version",
            "proc/driver/nvidia-fs/modules",
            "etc/cufile.json",
            "proc/driver/nvidia/params",
        ],
        [b"", b"\n\n", b"\0\0", b"\xff\xfe garbage \\ \" '", b"x" * 70000, None],
    ),
)
def test_ugly_files_break_nothing(where, text, tmp_path, clean_environment):
    tree = both_ways(tmp_path / "tree")
    if text is None:
        tree.remove(where)
        tree.path(where).mkdir()
    else:
        tree.write(where, text)
    report = ask(tree)
    assert report["path"] != "kvikio-posix"
    assert len(report["native"]) < 2


def test_crlf_everywhere(tmp_path, clean_environment):
    tree = both_ways(tmp_path / "tree")
    for file in tree.root.rglob("*"):
        if file.is_file() and not file.is_symlink():
            file.write_bytes(file.read_bytes().replace(b"\n", b"\r\n"))
    assert ask(tree)["both_native"] is True


def test_a_block_stack_that_goes_round_ends(tmp_path, clean_environment):
    tree = both_ways(tmp_path / "tree")
    tree.stacked("dm-5", "252:5", ["dm-6"], dm__uuid="LVM-a", dm__name="a")
    tree.stacked("dm-6", "252:6", ["dm-5"], dm__uuid="LVM-b", dm__name="b")
    tree.data(number="252:5", source="/dev/mapper/a")
    assert ask(tree)["path"] in ("unknown", "cufile-compat")


def test_two_disks_one_of_them_sata(tmp_path, clean_environment):
    tree = both_ways(tmp_path / "tree")
    tree.stacked("md1", "9:1", ["nvme0n1p1", "sda1"], md__level="raid0")
    tree.write("run/udev/data/b9:1", "E:MD_LEVEL=raid0\n")
    tree.data(number="9:1", source="/dev/md1")
    report = ask(tree)
    assert report["path"] == "cufile-compat"
    assert any("sda" in reason for reason in report["reasons"])


def test_sysfs_without_links(tmp_path, clean_environment):
    """A tree copied without its symlinks: the numbers in the dev files lead the way."""
    tree = FakeTree(tmp_path / "flat")
    full = both_ways(tmp_path / "full")
    subprocess.run(["cp", "-r", f"{full.root}/.", tree.root], check=True)
    tree.remove("sys/dev")
    tree.remove("sys/class/block")
    tree.write("sys/class/block/nvme0n1/dev", "259:0\n")
    tree.write("sys/class/block/nvme0n1/device/transport", "pcie\n")
    tree.write("sys/class/block/nvme0n1p1/dev", "259:1\n")
    tree.write("sys/class/block/nvme0n1p1/partition", "1\n")
    assert ask(tree)["both_native"] is True


def test_kvikio_compat_is_never_called_native(tmp_path, clean_environment):
    tree = both_ways(tmp_path / "tree")
    for value in ("ON", "1", "true", "Yes"):
        report = ask(tree, KVIKIO_COMPAT_MODE=value)
        assert report["path"] == "kvikio-posix"
        assert report["native"] == []
