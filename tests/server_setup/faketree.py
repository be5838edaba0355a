"""Builds the tree of a pretended machine: what GDS_SYSROOT points the scripts at.

The start is a server on which both native ways are open. Tests then take one thing away.
Also a program: ``python3 faketree.py ROOT [key=value ...]`` (see ``main``).
"""

import json
import os
import shutil
import sys
from pathlib import Path

GPU = "0000:65:00.0"
KERNEL = "6.17.0-14-generic"
REGISTRY = "RMForceStaticBar1=1;RmForceDisableIomapWC=1;"
UUID = "0f0e0d0c-1111-2222-3333-444455556666"


class FakeTree:
    """One pretended machine below ``root``."""

    def __init__(self, root):
        self.root = Path(root)
        self.root.mkdir(parents=True, exist_ok=True)
        self.mounts = []

    # ------------------------------------------------------------- plain files

    def path(self, name):
        return self.root / name.lstrip("/")

    def write(self, name, text):
        file = self.path(name)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(text if isinstance(text, bytes) else text.encode("utf-8", "surrogateescape"))
        return file

    def remove(self, name):
        target = self.path(name)
        if target.is_dir() and not target.is_symlink():
            shutil.rmtree(target)
        else:
            target.unlink()

    def link(self, name, target):
        """A symlink inside the tree; relative, so that the tree can be moved."""
        file = self.path(name)
        file.parent.mkdir(parents=True, exist_ok=True)
        if file.is_symlink():
            file.unlink()
        file.symlink_to(os.path.relpath(self.path(target), file.parent))

    # ------------------------------------------------------------- parts of a machine

    def kernel(self, release=KERNEL, p2pdma="y"):
        self.write("proc/sys/kernel/osrelease", release + "\n")
        self.write("proc/sys/kernel/arch", "x86_64\n")
        self.write("proc/version", f"Linux version {release} (builder@host) #14 SMP\n")
        self.write("proc/cmdline", f"BOOT_IMAGE=/vmlinuz-{release} root=UUID=1 ro quiet\n")
        text = "CONFIG_PCI=y\n" + ("CONFIG_PCI_P2PDMA=y\n" if p2pdma == "y" else "# CONFIG_PCI_P2PDMA is not set\n")
        self.write(f"boot/config-{release}", text)
        self.path(f"lib/modules/{release}/build").mkdir(parents=True, exist_ok=True)
        self.path("sys/class/iommu").mkdir(parents=True, exist_ok=True)
        self.write("sys/module/nvme_core/parameters/multipath", "N\n")
        self.kallsyms(hook=True)

    def kallsyms(self, hook):
        text = "0000000000000000 d p2pdma_pgmap_ops\n0000000000000000 T nvme_alloc_ns\t[nvme_core]\n"
        if hook:
            text += "0000000000000000 T nvme_v2_register_nvfs_dma_ops\t[nvme]\n"
        self.write("proc/kallsyms", text)

    def driver(self, version="595.58.03", kind="open", registry=REGISTRY):
        words = (
            "NVIDIA UNIX Open Kernel Module for x86_64  " if kind == "open" else "NVIDIA UNIX x86_64 Kernel Module  "
        )
        self.write(
            "proc/driver/nvidia/version",
            f"NVRM version: {words}{version}  Release Build  (dvs-builder@U22)\nGCC version:  gcc version 13.3.0\n",
        )
        self.write(
            "proc/driver/nvidia/params",
            f'ResmanDebugLevel: 4294967295\nRegistryDwords: "{registry}"\nRegistryDwordsPerDevice: ""\n',
        )

    def gpu(self, address=GPU, model="NVIDIA H100 80GB HBM3", p2pmem="85899345920"):
        self.write(
            f"proc/driver/nvidia/gpus/{address}/information",
            f"Model: \t\t {model}\nIRQ:   \t\t 255\nBus Location: \t {address}\n",
        )
        self.write(f"sys/bus/pci/devices/{address}/vendor", "0x10de\n")
        self.write(f"sys/bus/pci/devices/{address}/class", "0x030200\n")
        if p2pmem is not None:
            self.write(f"sys/bus/pci/devices/{address}/p2pmem/size", p2pmem + "\n")

    def nvidia_fs(self, modules="nvme: 0.5\n"):
        base = "proc/driver/nvidia-fs"
        self.write(f"{base}/version", "version: 2.29\n")
        self.write(f"{base}/modules", modules)
        self.write("dev/nvidia-fs0", "")
        self.write(
            f"{base}/stats",
            "GDS Version: 1.18.0.1 \nNVFS statistics(ver: 4.0)\n\nActive Process: 0\n"
            "Reads\t\t\t\t: err=0 io_state_err=0\nOps\t\t\t\t: Read=7 Write=0 BatchIO=0\n",
        )

    def cufile(self, p2pdma=True, block="top", **properties):
        value = {
            "logging": {"level": "ERROR"},
            "properties": {"use_pci_p2pdma": p2pdma, **properties},
            "fs": {"generic": {"posix_unaligned_writes": False}},
        }
        if block == "top":
            value["block"] = {"nvme": {"use_pci_p2pdma": p2pdma}}
        elif block == "nested":
            value["fs"]["block"] = {"nvme": {"use_pci_p2pdma": p2pdma}}
        self.write("etc/cufile.json", json.dumps(value, indent=2) + "\n")

    def libcufile(self):
        self.write("usr/local/cuda/lib64/libcufile.so.0", "")

    def udev(self):
        self.path("run/udev/data").mkdir(parents=True, exist_ok=True)

    # ------------------------------------------------------------- disks

    def block(self, where, name, number, **files):
        """A block device at sys/devices/``where``; files are its attributes."""
        base = f"sys/devices/{where}/{name}"
        self.write(f"{base}/dev", number + "\n")
        for key, text in files.items():
            self.write(f"{base}/{key.replace('__', '/')}", text + "\n")
        self.link(f"sys/class/block/{name}", base)
        self.link(f"sys/dev/block/{number}", base)
        return base

    def nvme(self, index=0, transport="pcie", partitions=1):
        """An NVMe disk: nvme0n1 is 259:0, its partition nvme0n1p1 259:1 (index 1: 259:10, ...)."""
        where = f"pci0000:40/0000:4{index}:00.0/nvme/nvme{index}"
        first = 10 * index
        self.write(f"sys/devices/{where}/transport", transport + "\n")
        self.link(f"sys/class/nvme/nvme{index}", f"sys/devices/{where}")
        disk = self.block(where, f"nvme{index}n1", f"259:{first}")
        self.link(f"{disk}/device", f"sys/devices/{where}")
        for part in range(1, partitions + 1):
            self.block(f"{where}/nvme{index}n1", f"nvme{index}n1p{part}", f"259:{first + part}", partition=str(part))

    def nvme_multipath_head(self, transports=("pcie", "pcie")):
        """nvme9n1: the head of a multipath namespace, below a subsystem with several controllers."""
        where = "virtual/nvme-subsystem/nvme-subsys9"
        disk = self.block(where, "nvme9n1", "259:90")
        self.link(f"{disk}/device", f"sys/devices/{where}")
        for i, transport in enumerate(transports):
            self.write(f"sys/devices/pci0000:40/ctl{i}/nvme/nvme{20 + i}/transport", transport + "\n")
            self.link(f"sys/devices/{where}/nvme{20 + i}", f"sys/devices/pci0000:40/ctl{i}/nvme/nvme{20 + i}")

    def stacked(self, name, number, slaves, **files):
        """A dm or md device over ``slaves``."""
        base = self.block("virtual/block", name, number, **files)
        for slave in slaves:
            self.link(f"{base}/slaves/{slave}", f"sys/class/block/{slave}")

    def md(self, level="raid0", members=2, described=True):
        for index in range(members):
            self.nvme(index)
        self.stacked("md0", "9:0", [f"nvme{i}n1p1" for i in range(members)], md__level=level)
        if described:
            self.write("run/udev/data/b9:0", f"E:MD_LEVEL={level}\nE:MD_DEVICES={members}\n")

    def dm(self, uuid, name="data", slaves=("nvme0n1p1",), index=0):
        self.stacked(f"dm-{index}", f"252:{index}", slaves, dm__uuid=uuid, dm__name=name)

    # ------------------------------------------------------------- mounts

    def mount(self, point, number, fstype, source, options="rw,relatime", super_options="rw", root="/", parent=22):
        def escape(text):
            return text.replace("\\", "\\134").replace(" ", "\\040").replace("\t", "\\011").replace("\n", "\\012")

        ident = 30 + len(self.mounts)
        where = f"{number} {escape(root)} {escape(point)} {options} shared:{ident}"
        self.mounts.append(f"{ident} {parent} {where} - {fstype} {escape(source)} {super_options}")
        self._write_mounts()
        return ident

    def unmount_all(self):
        self.mounts = []
        self._write_mounts()

    def _write_mounts(self):
        base = ["22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw", "23 22 0:5 / /proc rw shared:2 - proc proc rw"]
        self.write("proc/self/mountinfo", "\n".join(base + self.mounts) + "\n")

    def data(self, fstype="ext4", number="259:1", source="/dev/nvme0n1p1", super_options=None, point="/data"):
        """Mounts the folder that the tests ask about."""
        if super_options is None:
            super_options = "rw,data=ordered" if fstype == "ext4" else "rw"
        self.path(point).mkdir(parents=True, exist_ok=True)
        self.unmount_all()
        self.mount(point, number, fstype, source, super_options=super_options)

    def distribution(self, ident="ubuntu", version="24.04", name="Ubuntu 24.04.3 LTS", like="debian"):
        self.write("etc/os-release", f'PRETTY_NAME="{name}"\nID={ident}\nVERSION_ID="{version}"\nID_LIKE={like}\n')


def both_ways(root):
    """A server with one NVMe disk on ext4, on which both native ways are open."""
    tree = FakeTree(root)
    tree.distribution()
    tree.kernel()
    tree.driver()
    tree.gpu()
    tree.nvidia_fs()
    tree.libcufile()
    tree.udev()
    tree.cufile()
    tree.nvme()
    tree.block("pci0000:00/ata1/host0", "sda", "8:0")
    tree.block("pci0000:00/ata1/host0/sda", "sda1", "8:1", partition="1")
    tree.link(f"dev/disk/by-uuid/{UUID}", "dev/nvme0n1p1")
    tree.data()
    return tree


def main():
    """``faketree.py ROOT METHOD [name=value ...] [-- METHOD ...]``.

    METHOD is ``both_ways`` or a method of FakeTree, run on what lies at ROOT.
    """
    root, *words = sys.argv[1:]
    tree = FakeTree(root)
    calls = [[]]
    for word in words:
        if word == "--":
            calls.append([])
        else:
            calls[-1].append(word)
    for name, *arguments in calls:
        if name == "both_ways":
            tree = both_ways(root)
            continue
        keywords = {}
        for argument in arguments:
            key, value = argument.split("=", 1)
            keywords[key] = {"true": True, "false": False, "none": None}.get(value, value)
            if key in ("index", "partitions", "members"):
                keywords[key] = int(value)
            elif key in ("slaves", "transports"):
                keywords[key] = value.split(",")
        getattr(tree, name)(**keywords)


if __name__ == "__main__":
    main()
