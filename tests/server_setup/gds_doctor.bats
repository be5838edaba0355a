#!/usr/bin/env bats
# gds_doctor.sh on pretended servers.
load helpers

setup() {
    common_setup
    use_tree
    DOCTOR=$SETUP_DIR/gds_doctor.sh
}
teardown() { common_teardown; }

@test "bare NVMe ext4, both ways open: says both, exit 0" {
    run "$DOCTOR" /data
    exits 0
    verdict p2pdma
    says 'native=nvidia-fs p2pdma'
    says 'both native ways are open'
    says 'partition nvme0n1p1 of nvme0n1; nvme nvme0n1 pcie'
    says 'Ops: Read=7 Write=0 BatchIO=0'
    does_not_say FAIL
    does_not_say unsure
}

# slow
@test "nvidia-fs alone" {
    rm "$TREE/etc/cufile.json"
    run "$DOCTOR" /data
    exits 0
    verdict nvidia-fs
    says 'native=nvidia-fs'
    row FAIL p2pdma use-p2pdma
    row FAIL p2pdma block-p2pdma
}

@test "p2pdma alone: the lack of nvidia-fs does not close it" {
    rm -r "$TREE/proc/driver/nvidia-fs"
    run "$DOCTOR" /data
    exits 0
    verdict p2pdma
    says 'native=p2pdma'
    row FAIL nvidia-fs nvidia-fs
    says 'install_nvidia_fs.sh --plan'
}

# slow
@test "XFS needs no data=ordered" {
    change data fstype=xfs
    run "$DOCTOR" /data
    exits 0
    row ok both file-system
}

# slow
@test "ext4 without an explicit data=ordered: compat, and the mend is named" {
    change data super_options=rw
    run "$DOCTOR" /data
    exits 10
    verdict cufile-compat
    row FAIL both file-system
    says 'check_nvme_mount.sh /data prints the line for /etc/fstab'
}

# slow
@test "ext4 with data=writeback" {
    change data super_options=rw,data=writeback
    run "$DOCTOR" /data
    exits 10
    says 'data=writeback'
}

@test "md0, RAID 0: closed to P2PDMA, open to nvidia-fs" {
    change md -- data number=9:0 source=/dev/md0
    run "$DOCTOR" /data
    exits 0
    verdict nvidia-fs
    row FAIL p2pdma raid
    row ok nvidia-fs raid
    says 'md md0 raid0; partition nvme0n1p1 of nvme0n1; nvme nvme0n1 pcie; partition nvme1n1p1'
}

# slow
@test "md0 that udev does not describe: unknown" {
    change md described=false -- data number=9:0 source=/dev/md0
    run "$DOCTOR" /data
    exits 1
    says '63-md-raid-arrays.rules'
}

# slow
@test "md0, RAID 5: compat" {
    change md level=raid5 -- data number=9:0 source=/dev/md0
    run "$DOCTOR" /data
    exits 10
    row FAIL nvidia-fs raid
}

# slow
@test "dm-crypt: compat" {
    change dm uuid=CRYPT-LUKS2-0011-data -- data number=252:0 source=/dev/mapper/data
    run "$DOCTOR" /data
    exits 10
    row FAIL both dm-crypt
}

# slow
@test "LVM on dm-crypt on NVMe: every layer is seen" {
    change dm uuid=CRYPT-LUKS2-0011-c name=c -- dm uuid=LVM-abc name=vg-lv index=1 slaves=dm-0 -- data number=252:1 source=/dev/mapper/vg-lv
    run "$DOCTOR" /data
    exits 10
    row FAIL both dm-crypt
    says 'lvm dm-1 vg-lv; dm-crypt dm-0 c; partition nvme0n1p1 of nvme0n1; nvme nvme0n1 pcie'
}

# slow
@test "LVM on NVMe: nobody promises nvidia-fs, so unknown" {
    change dm uuid=LVM-abc name=vg-lv -- data number=252:0 source=/dev/mapper/vg-lv
    run "$DOCTOR" /data
    exits 1
    verdict unknown
    row FAIL p2pdma device-mapper
    row unsure nvidia-fs device-mapper
}

@test "overlay in a container: compat" {
    : >"$TREE/.dockerenv"
    change unmount_all -- mount point=/ number=0:60 fstype=overlay source=overlay super_options=rw,lowerdir=/a
    sed -i 1d "$TREE/proc/self/mountinfo"
    run "$DOCTOR" /data
    exits 10
    row FAIL both file-system
    says 'inside of a docker container'
}

# slow
@test "NFS over TCP: compat" {
    change data fstype=nfs4 number=0:55 source=server:/export super_options=rw,vers=4.2,proto=tcp
    run "$DOCTOR" /data
    exits 10
    row FAIL nvidia-fs file-system
    row FAIL p2pdma file-system
}

# slow
@test "NFS over RDMA: nvidia-fs only with the rpcrdma line" {
    change data fstype=nfs4 number=0:55 source=server:/export super_options=rw,vers=4.2,proto=rdma
    run "$DOCTOR" /data
    exits 10
    says "no line 'rpcrdma:'"
    printf 'nvme: 0.5\nrpcrdma: 5.8\n' >"$TREE/proc/driver/nvidia-fs/modules"
    run "$DOCTOR" /data
    exits 0
    verdict nvidia-fs
}

# slow
@test "WSL: POSIX" {
    echo 6.6.87.2-microsoft-standard-WSL2 >"$TREE/proc/sys/kernel/osrelease"
    rm -r "$TREE/proc/driver"
    run "$DOCTOR" /data
    exits 11
    verdict kvikio-posix
    row FAIL cufile wsl
}

@test "no /run/udev: POSIX, and the container's volume is named" {
    rm -r "$TREE/run/udev"
    : >"$TREE/run/.containerenv"
    run "$DOCTOR" /data
    exits 11
    verdict kvikio-posix
    row FAIL cufile udev
    says '--volume /run/udev:/run/udev:ro'
    says 'native=none'
}

# slow
@test "no libcufile: POSIX" {
    rm -r "$TREE/usr"
    run "$DOCTOR" /data
    exits 11
    row FAIL cufile libcufile
}

@test "libcufile on LD_LIBRARY_PATH" {
    mkdir -p "$TREE/opt/my cuda"
    mv "$TREE/usr/local/cuda/lib64/libcufile.so.0" "$TREE/opt/my cuda/"
    LD_LIBRARY_PATH=/nowhere:"/opt/my cuda" run "$DOCTOR" /data
    exits 0
    says '/opt/my cuda/libcufile.so.0'
}

@test "KVIKIO_COMPAT_MODE=on: POSIX; off without cuFile: unknown" {
    KVIKIO_COMPAT_MODE=yes run "$DOCTOR" /data
    exits 11
    says 'unset KVIKIO_COMPAT_MODE'
    rm -r "$TREE/usr"
    KVIKIO_COMPAT_MODE=off run "$DOCTOR" /data
    exits 1
    says 'insists on cuFile'
}

# slow
@test "p2pmem of size 0: closed, and nvidia-fs is not touched" {
    change gpu p2pmem=0
    run "$DOCTOR" /data
    exits 0
    verdict nvidia-fs
    row FAIL p2pdma p2pmem
    rm -r "$TREE/proc/driver/nvidia-fs"
    run "$DOCTOR" /data
    exits 10
}

# slow
@test "no p2pmem at all: unknown until a CUDA program has run" {
    rm -r "$TREE/sys/bus/pci/devices/0000:65:00.0/p2pmem" "$TREE/proc/driver/nvidia-fs"
    run "$DOCTOR" /data
    exits 1
    verdict unknown
    says 'run one CUDA program'
}

# slow
@test "driver 590 and 595 on 6.17, 590 on 6.14" {
    rm -r "$TREE/proc/driver/nvidia-fs"
    change driver version=590.44.01
    run "$DOCTOR" /data
    exits 10
    row FAIL p2pdma driver-version
    says 'install the open driver 595 or later'
    change driver version=595.10
    run "$DOCTOR" /data
    exits 0
    change driver version=590.44.01 -- kernel release=6.14.0-37-generic
    run "$DOCTOR" /data
    exits 0
    verdict p2pdma
    change driver version=550.54.14
    run "$DOCTOR" /data
    exits 10
}

# slow
@test "kernel 6.1, and a kernel without CONFIG_PCI_P2PDMA" {
    rm -r "$TREE/proc/driver/nvidia-fs"
    change kernel release=6.1.0-9-amd64
    run "$DOCTOR" /data
    exits 10
    row FAIL p2pdma kernel
    change kernel p2pdma=n
    run "$DOCTOR" /data
    exits 10
    row FAIL p2pdma kernel-config
}

# slow
@test "kernel configuration from config.gz, then from kallsyms, then from nowhere" {
    rm -r "$TREE/proc/driver/nvidia-fs" "$TREE/boot"
    rm "$TREE/proc/kallsyms"
    run "$DOCTOR" /data
    exits 1
    row unsure p2pdma kernel-config
    echo CONFIG_PCI_P2PDMA=y | gzip >"$TREE/proc/config.gz"
    run "$DOCTOR" /data
    exits 0
    says '| /proc/config.gz'
    rm "$TREE/proc/config.gz"
    change kallsyms hook=false
    run "$DOCTOR" /data
    exits 0
    says '| /proc/kallsyms'
}

# slow
@test "nested block: named as nested" {
    rm -r "$TREE/proc/driver/nvidia-fs"
    change cufile block=nested
    run "$DOCTOR" /data
    exits 10
    says 'only as fs.block.nvme.use_pci_p2pdma, which cuFile ignores'
    says 'move "block" out of "fs"'
}

# slow
@test "block missing, and use_pci_p2pdma false" {
    rm -r "$TREE/proc/driver/nvidia-fs"
    change cufile block=none
    run "$DOCTOR" /data
    exits 10
    row ok p2pdma use-p2pdma
    row FAIL p2pdma block-p2pdma
    change cufile p2pdma=false
    run "$DOCTOR" /data
    exits 10
    row FAIL p2pdma use-p2pdma
}

# slow
@test "a configuration with comments, CRLF and a byte order mark is read" {
    printf '\xef\xbb\xbf{\r\n // a comment { "\r\n "properties": { /* more\r\n } */ "use_pci_p2pdma": true, "x": [1, {"y": "//"}] },\r\n "block": {"nvme": {"use_pci_p2pdma": true}} // end\r\n}\r\n' >"$TREE/etc/cufile.json"
    run "$DOCTOR" /data
    exits 0
    row ok p2pdma use-p2pdma
    row ok p2pdma block-p2pdma
}

@test "broken, empty and unreadable configuration: unknown" {
    for text in '{"properties": ' '' '{"a" 1}' '{} {}' '[1,]' '{"a": tru}' '}'; do
        printf '%s' "$text" >"$TREE/etc/cufile.json"
        run "$DOCTOR" /data
        exits 1
        row unsure both cufile-json
    done
}

@test "CUFILE_ENV_PATH_JSON and --cufile-json" {
    mv "$TREE/etc/cufile.json" "$TREE/etc/my file.json"
    CUFILE_ENV_PATH_JSON='/etc/my file.json' run "$DOCTOR" /data
    verdict p2pdma
    says '/etc/my file.json'
    run "$DOCTOR" --cufile-json "$TREE/etc/my file.json" /data
    verdict p2pdma
    run "$DOCTOR" /data
    verdict nvidia-fs
}

@test "allow_compat_mode false and no native way: kvikio falls back to POSIX" {
    change cufile allow_compat_mode=false -- data super_options=rw
    run "$DOCTOR" /data
    exits 11
    says 'cuFile refuses'
    KVIKIO_COMPAT_MODE=OFF run "$DOCTOR" /data
    exits 1
}

# slow
@test "a value that nobody knows is not taken for the good one: unknown" {
    for setting in CUFILE_FORCE_COMPAT_MODE=maybe KVIKIO_COMPAT_MODE=sometimes; do
        run env "$setting" "$DOCTOR" /data
        verdict unknown
        says "'${setting#*=}', "
    done
    change cufile force_compat_mode=2
    run "$DOCTOR" /data
    verdict unknown
    row unsure both force-compat
}

@test "forced compat mode, by file and by environment" {
    CUFILE_FORCE_COMPAT_MODE=true run "$DOCTOR" /data
    exits 10
    row FAIL both force-compat
    change cufile force_compat_mode=true
    run "$DOCTOR" /data
    exits 10
}

# slow
@test "multipath on: P2PDMA closed, with the line that mends it" {
    echo Y >"$TREE/sys/module/nvme_core/parameters/multipath"
    run "$DOCTOR" /data
    exits 0
    verdict nvidia-fs
    row FAIL p2pdma nvme-multipath
    says 'options nvme_core multipath=N'
    rm -r "$TREE/sys/module/nvme_core/parameters"
    run "$DOCTOR" /data
    verdict p2pdma
    rm -r "$TREE/sys/module/nvme_core"
    run "$DOCTOR" /data
    verdict nvidia-fs
    row unsure p2pdma nvme-multipath
}

# slow
@test "multipath head over two PCIe paths" {
    echo Y >"$TREE/sys/module/nvme_core/parameters/multipath"
    change nvme_multipath_head -- data number=259:90 source=/dev/nvme9n1
    run "$DOCTOR" /data
    verdict nvidia-fs
    says 'nvme nvme9n1 pcie'
    says 'Y, 2 paths'
}

@test "NVMe over TCP: compat; over RDMA: nvidia-fs with its own line" {
    change nvme transport=tcp
    run "$DOCTOR" /data
    exits 10
    row FAIL both transport
    change nvme transport=rdma
    run "$DOCTOR" /data
    exits 10
    says "no line 'nvme_rdma:'"
    printf 'nvme_rdma: 1\n' >"$TREE/proc/driver/nvidia-fs/modules"
    run "$DOCTOR" /data
    exits 0
    verdict nvidia-fs
}

# slow
@test "the transport by the controller's name, also of one path of a multipath disk" {
    rm "$TREE/sys/class/block/nvme0n1/device"
    run "$DOCTOR" /data
    exits 0
    says 'nvme nvme0n1 pcie'
    change nvme index=1 transport=tcp -- block where=virtual/x name=nvme0c1n1 number=259:50 -- data number=259:50
    run "$DOCTOR" /data
    exits 10
    says 'nvme nvme0c1n1 tcp'
}

# slow
@test "transport not readable: unknown" {
    find "$TREE/sys" -name transport -delete
    run "$DOCTOR" /data
    exits 1
    row unsure both transport
}

# slow
@test "proprietary driver: compat" {
    change driver kind=proprietary
    run "$DOCTOR" /data
    exits 10
    row FAIL both driver
    says 'open kernel modules of the same version'
}

# slow
@test "no driver: unknown" {
    rm -r "$TREE/proc/driver/nvidia"
    run "$DOCTOR" /data
    exits 1
    says 'no NVIDIA driver is loaded here'
}

# slow
@test "no nvme: line: nvidia-fs closed, whether the hook is there decides the mend" {
    printf 'nvme_rdma: 1\nscsi_mod: 0\n' >"$TREE/proc/driver/nvidia-fs/modules"
    rm "$TREE/etc/cufile.json"
    run "$DOCTOR" /data
    exits 10
    row FAIL nvidia-fs nvidia-fs-hook
    says 'load nvidia-fs after nvme'
    change kallsyms hook=false
    run "$DOCTOR" /data
    exits 10
    says 'does not know nvidia-fs'
    : >"$TREE/proc/driver/nvidia-fs/modules"
    run "$DOCTOR" /data
    exits 10
    printf 'nvme: 0.5\r\n' >"$TREE/proc/driver/nvidia-fs/modules"
    run "$DOCTOR" /data
    exits 0
}

# slow
@test "RegistryDwords: empty, half, and a value that only begins alike" {
    rm -r "$TREE/proc/driver/nvidia-fs"
    for registry in '' 'RMForceStaticBar1=1;' 'RMForceStaticBar1=10;RmForceDisableIomapWC=1;' 'XRMForceStaticBar1=1;RmForceDisableIomapWC=1'; do
        change driver "registry=$registry"
        run "$DOCTOR" /data
        exits 10
        row FAIL p2pdma registry
        says 'NVreg_RegistryDwords='
    done
    change driver 'registry=RmForceDisableIomapWC=1; RMForceStaticBar1=1'
    run "$DOCTOR" /data
    exits 0
}

# slow
@test "IOMMU: passthrough is fine, translation and silence are not enough" {
    mkdir -p "$TREE/sys/class/iommu/dmar0" "$TREE/sys/bus/pci/devices/0000:65:00.0/iommu_group"
    echo identity >"$TREE/sys/bus/pci/devices/0000:65:00.0/iommu_group/type"
    run "$DOCTOR" /data
    exits 0
    echo DMA-FQ >"$TREE/sys/bus/pci/devices/0000:65:00.0/iommu_group/type"
    run "$DOCTOR" /data
    exits 1
    row unsure both iommu
    says 'iommu=pt'
    rm -r "$TREE/sys/bus/pci/devices/0000:65:00.0/iommu_group"
    run "$DOCTOR" /data
    exits 1
    echo 'ro intel_iommu=on iommu=pt' >"$TREE/proc/cmdline"
    run "$DOCTOR" /data
    exits 0
    rm -r "$TREE/sys/class/iommu"
    run "$DOCTOR" /data
    exits 1
    echo 'ro amd_iommu=off' >"$TREE/proc/cmdline"
    run "$DOCTOR" /data
    exits 0
}

@test "a GPU that is not on the list, a second GPU, and --gpu" {
    change gpu address=0000:17:00.0 'model=NVIDIA L40' p2pmem=none
    run "$DOCTOR" /data
    verdict nvidia-fs
    row FAIL p2pdma gpu-model
    for gpu in 1 0000:65:00.0 65:00.0 00000000:65:00.0; do
        run "$DOCTOR" --gpu "$gpu" /data
        verdict p2pdma
        says 'GPU: 0000:65:00.0'
    done
    run "$DOCTOR" --gpu 0 /data
    verdict nvidia-fs
    for gpu in 2 0000:99:00.0 nonsense 65:00; do
        run "$DOCTOR" --gpu "$gpu" /data
        one_clear_line
        says "$gpu"
    done
}

# slow
@test "aarch64: P2PDMA closed" {
    echo aarch64 >"$TREE/proc/sys/kernel/arch"
    run "$DOCTOR" /data
    verdict nvidia-fs
    row FAIL p2pdma arch
}

# slow
@test "a namespace with protection information: compat" {
    mkdir "$TREE/sys/class/block/nvme0n1/integrity"
    echo T10-DIF-TYPE1-CRC >"$TREE/sys/class/block/nvme0n1/integrity/format"
    run "$DOCTOR" /data
    exits 10
    row FAIL both integrity
    echo none >"$TREE/sys/class/block/nvme0n1/integrity/format"
    run "$DOCTOR" /data
    exits 0
}

# slow
@test "a SATA disk, tmpfs, btrfs on NVMe" {
    change data number=8:1 source=/dev/sda1
    run "$DOCTOR" /data
    exits 10
    row FAIL both disk
    change data fstype=tmpfs number=0:40 source=tmpfs
    run "$DOCTOR" /data
    exits 10
    change data fstype=btrfs number=0:41 source=/dev/nvme0n1p1
    run "$DOCTOR" /data
    exits 10
    says 'nvme nvme0n1 pcie'
}

# slow
@test "Lustre: unknown while its hook is there, compat without" {
    change data fstype=lustre number=0:70 source=10.0.0.1@o2ib:/fs
    run "$DOCTOR" /data
    exits 10
    printf 'lnet: 2.14\n' >"$TREE/proc/driver/nvidia-fs/modules"
    run "$DOCTOR" /data
    exits 1
}

@test "mountinfo missing, empty, garbage; device not in sysfs: unknown" {
    rm "$TREE/proc/self/mountinfo"
    run "$DOCTOR" /data
    exits 1
    row unsure both storage
    : >"$TREE/proc/self/mountinfo"
    run "$DOCTOR" /data
    exits 1
    printf 'a b c\n\n- - -\n' >"$TREE/proc/self/mountinfo"
    run "$DOCTOR" /data
    exits 1
    change data number=259:77
    run "$DOCTOR" /data
    exits 1
    says '259:77 is not in /sys/dev/block'
}

# slow
@test "paths: blanks, quotes, newline, backslash, a bind mount, a hidden mount" {
    for name in '/da ta' "/d'q" '/d"q' '/back\slash' $'/new\nline' '/-dash' '/dollar$HOME'; do
        change data "point=$name"
        run "$DOCTOR" "$name"
        exits 0
        run "$DOCTOR" --json "$name"
        python3 -c 'import json,sys; r=json.load(sys.stdin); assert r["dir"]==sys.argv[1]==r["storage"]["mount_point"], r' "$name" <<<"$output"
    done
    mkdir -p "$TREE/data/sub dir" "$TREE/bind"
    change data -- mount point=/bind number=259:1 fstype=ext4 source=/dev/nvme0n1p1 'root=/sub dir' super_options=rw,data=ordered
    run "$DOCTOR" /bind
    exits 0
    # A later mount over /data hides what is mounted below it.
    change mount point=/data/deep number=259:1 fstype=xfs source=/dev/nvme0n1p1
    printf '90 22 0:44 / /data rw - tmpfs tmpfs rw\n91 90 0:45 / /data/x rw - tmpfs tmpfs rw\n' >>"$TREE/proc/self/mountinfo"
    mkdir -p "$TREE/data/deep"
    run "$DOCTOR" /data/deep
    exits 10
    says 'tmpfs on /data'
}

@test "a folder below the prefix may be given by its full name, and relative" {
    run "$DOCTOR" "$TREE/data"
    exits 0
    says 'folder: /data'
    cd "$TREE"
    run "$DOCTOR" data
    exits 0
    GDS_SYSROOT=../tree/ run "$DOCTOR" ./data/
    exits 0
    says 'folder: /data'
    ln -s data "$TREE/link"
    run "$DOCTOR" /link
    exits 0
    says 'folder: /data'
}

# slow
@test "a tree whose mounts carry their full names" {
    change unmount_all -- mount "point=$TREE/data" number=259:1 fstype=ext4 source=/dev/nvme0n1p1 super_options=rw,data=ordered
    run "$DOCTOR" "$TREE/data"
    exits 0
    says "below it: ext4 on $TREE/data"
}

@test "gdscheck, old grammar" {
    file=$BOX/'gds check.txt'
    printf ' GDS release version: 1.12.0.25\n ============\n ENVIRONMENT:\n ============\n =====================\n DRIVER CONFIGURATION:\n =====================\n NVMe P2PDMA        : Supported\n NVMe               : Unsupported\n NVMeOF             : Unsupported\n =====================\n CUFILE CONFIGURATION:\n =====================\n NVMe : Supported\n properties.use_pci_p2pdma : true\n' >"$file"
    run "$DOCTOR" --gdscheck "$file" /data
    exits 0
    verdict p2pdma
    row ok p2pdma gdscheck
    row FAIL nvidia-fs gdscheck
    sed -i 's/P2PDMA        : S/P2PDMA        : Uns/; s/^ NVMe               : Uns/ NVMe               : S/' "$file"
    run "$DOCTOR" --gdscheck "$file" /data
    verdict nvidia-fs
}

@test "gdscheck, grammar of GDS 1.16 and later, with CRLF" {
    file=$BOX/g
    printf 'GDS release version: 1.16.0.49\r\n=====================\r\nDRIVER CONFIGURATION:\r\n=====================\r\nNVMe : nvfs, compat\r\nNVMeOF : compat\r\nNFS : compat\r\n=====================\r\nCUFILE CONFIGURATION:\r\n=====================\r\nNVMe : p2pdma\r\n' >"$file"
    run "$DOCTOR" --gdscheck "$file" /data
    verdict nvidia-fs
    row FAIL p2pdma gdscheck
    sed -i 's/^NVMe : nvfs, /NVMe : p2pdma, nvfs, /' "$file"
    run "$DOCTOR" --gdscheck "$file" /data
    verdict p2pdma
    says 'both native ways'
    sed -i 's/^NVMe : p2pdma, nvfs, /NVMe : /' "$file"
    run "$DOCTOR" --gdscheck "$file" /data
    exits 10
}

# slow
@test "gdscheck settles what cannot be read, and outweighs no failure" {
    rm -r "$TREE/proc/driver/nvidia-fs" "$TREE/boot" "$TREE/proc/kallsyms"
    printf 'DRIVER CONFIGURATION:\nNVMe : p2pdma, compat\n' >"$BOX/g"
    run "$DOCTOR" /data
    exits 1
    run "$DOCTOR" --gdscheck "$BOX/g" /data
    exits 0
    change data super_options=rw
    run "$DOCTOR" --gdscheck "$BOX/g" /data
    exits 10
}

# slow
@test "gdscheck: an empty file, one without the part, a missing one" {
    : >"$BOX/empty"
    printf 'CUFILE CONFIGURATION:\nNVMe : nvfs\n' >"$BOX/other"
    for file in "$BOX/empty" "$BOX/other" "$BOX/missing" "$BOX"; do
        run "$DOCTOR" --gdscheck "$file" /data
        one_clear_line
        says "$file"
    done
}

@test "what kvikio says: True is POSIX, False is no proof, a broken one is not asked" {
    cat >"$BOX/py" <<'SH'
#!/bin/sh
echo "kvikio=$ANSWER"
SH
    chmod +x "$BOX/py"
    ANSWER=yes run "$DOCTOR" --python "$BOX/py" /data
    exits 11
    row FAIL cufile kvikio
    change data super_options=rw
    ANSWER=no run "$DOCTOR" --python "$BOX/py" /data
    exits 10
    says 'may still be in a compat mode of its own'
    rm -r "$TREE/usr"
    ANSWER=no run "$DOCTOR" --python "$BOX/py" /data
    exits 10
    says 'kvikio has loaded it'
    ANSWER=maybe run "$DOCTOR" --python "$BOX/py" /data
    exits 11
    says 'kvikio cannot be asked'
}

@test "kvikio is asked through the real question" {
    mkdir -p "$BOX/site/kvikio"
    : >"$BOX/site/kvikio/__init__.py"
    printf 'import os\ndef is_compat_mode_preferred():\n    return os.environ["PREFER"] == "1"\n' >"$BOX/site/kvikio/defaults.py"
    PREFER=1 PYTHONPATH=$BOX/site run "$DOCTOR" --python python3 /data
    exits 11
    PREFER=0 PYTHONPATH=$BOX/site run "$DOCTOR" --python python3 /data
    exits 0
    PREFER=1 PYTHONPATH=$BOX/site run "$DOCTOR" --no-python --python python3 /data
    exits 0
}

@test "--probe writes, reads and removes one O_DIRECT file" {
    cat >"$BOX/trap/dd" <<SH
#!/bin/sh
printf '%s\n' "\$*" >>"$BOX/dd.log"
[ -z "\${DD_SAYS:-}" ] || { echo "dd: failed to open 'x': \$DD_SAYS" >&2; exit 1; }
SH
    chmod +x "$BOX/trap/dd"
    run "$DOCTOR" --probe /data
    exits 0
    row ok both probe
    grep -q "of=$TREE/data/.gds_probe.*oflag=direct" "$BOX/dd.log"
    grep -q "if=$TREE/data/.gds_probe.*iflag=direct" "$BOX/dd.log"
    [ "$(wc -l <"$BOX/dd.log")" -eq 2 ]
    [ -z "$(ls -A "$TREE/data")" ]
    DD_SAYS='Invalid argument' run "$DOCTOR" --probe /data
    exits 10
    row FAIL both probe
    [ -z "$(ls -A "$TREE/data")" ]
    # A quota or a broken disk is no lack of O_DIRECT.
    DD_SAYS='Disk quota exceeded' run "$DOCTOR" --probe /data
    exits 1
    row unsure both probe
    says 'could not be tried: Disk quota exceeded'
    [ -z "$(ls -A "$TREE/data")" ]
    rm "$BOX/dd.log"
    run "$DOCTOR" /data
    exits 0
    run "$DOCTOR" --probe --dry-run /data
    exits 0
    says 'dry run: one file of 4 MiB would be written'
    [ ! -e "$BOX/dd.log" ]
}

# slow
@test "--probe with the real dd leaves nothing behind" {
    run "$DOCTOR" --probe /data
    case $status in 0 | 10) ;; *) echo "$output"; false ;; esac
    [ -z "$(ls -A "$TREE/data")" ]
}

@test "--probe removes its file when it is interrupted" {
    printf '#!/bin/sh\n: >"%s/started"\nsleep 30\n' "$BOX" >"$BOX/trap/dd"
    chmod +x "$BOX/trap/dd"
    for signal in TERM INT HUP; do
        rm -f "$BOX/started"
        # A child of a background job ignores INT; a shell of its own does not.
        python3 - "$DOCTOR" "$signal" "$BOX/started" <<'PY'
import os, signal, subprocess, sys, time
script, name, started = sys.argv[1:]
p = subprocess.Popen([script, "--probe", "/data"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                     preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
end = time.time() + 20
while not os.path.exists(started):
    assert time.time() < end, "dd never started"
    time.sleep(0.02)
os.kill(p.pid, getattr(signal, "SIG" + name))
code = p.wait(timeout=20)
assert code == 128 + getattr(signal, "SIG" + name), code
PY
        [ -z "$(ls -A "$TREE/data")" ]
    done
}

@test "--probe in a folder that cannot be written changes no verdict" {
    printf '#!/bin/sh\nexit 1\n' >"$BOX/trap/mktemp"
    chmod +x "$BOX/trap/mktemp"
    run "$DOCTOR" --probe /data
    exits 0
    says 'no file can be made here'
}

@test "it changes nothing" {
    before=$(fingerprint "$TREE")
    run "$DOCTOR" /data
    run "$DOCTOR" --json --probe /data
    [ "$before" = "$(fingerprint "$TREE")" ]
}

@test "wrong usage: one line, exit 2, the value is named" {
    run "$DOCTOR"
    one_clear_line
    run "$DOCTOR" /no/such/folder
    one_clear_line
    says "'/no/such/folder'"
    run "$DOCTOR" ''
    one_clear_line
    run "$DOCTOR" "$TREE/etc/cufile.json"
    one_clear_line
    says 'is not a folder'
    run "$DOCTOR" /data /data
    one_clear_line
    run "$DOCTOR" --nonsense /data
    one_clear_line
    says "'--nonsense'"
    run "$DOCTOR" --gpu
    one_clear_line
    run "$DOCTOR" --cufile-json "$BOX/none" /data
    one_clear_line
    run "$DOCTOR" --python "$BOX/none" /data
    one_clear_line
    GDS_SYSROOT=$BOX/none run "$DOCTOR" /
    one_clear_line
    says "$BOX/none"
}

@test "--help names every verdict and exit code" {
    run "$DOCTOR" --help
    exits 0
    for word in nvidia-fs p2pdma cufile-compat kvikio-posix unknown '0 native' '10 cuFile' '11 POSIX' '1 unknown' '2 wrong'; do says "$word"; done
}

@test "libcufile from a Python package is found through that Python" {
    rm -r "$TREE/usr"
    mkdir -p "$BOX/site/nvidia/cu13/lib" "$BOX/site/nvidia_cufile-1.20.dist-info"
    : >"$BOX/site/nvidia/cu13/lib/libcufile.so.0"
    printf 'Metadata-Version: 2.1\nName: nvidia-cufile\nVersion: 1.20\n' >"$BOX/site/nvidia_cufile-1.20.dist-info/METADATA"
    printf 'nvidia/cu13/lib/libcufile.so.0,,\n' >"$BOX/site/nvidia_cufile-1.20.dist-info/RECORD"
    run "$DOCTOR" /data
    exits 11
    PYTHONPATH=$BOX/site run "$DOCTOR" --python python3 /data
    exits 0
    says "$BOX/site/nvidia/cu13/lib/libcufile.so.0"
}

@test "a mount point with a blank before a digit is found" {
    change data 'point=/my 1disk' fstype=xfs
    run "$DOCTOR" '/my 1disk'
    exits 0
    says 'xfs on /my 1disk'
    # Its neighbour is another file system.
    mkdir "$TREE/my 2disk"
    run "$DOCTOR" '/my 2disk'
    exits 10
}

# slow
@test "neither osrelease nor version can be read: whether this is WSL is unknown" {
    rm "$TREE/proc/sys/kernel/osrelease" "$TREE/proc/version"
    run "$DOCTOR" /data
    exits 1
    row unsure cufile wsl
}

# slow
@test "an unknown architecture does not open P2PDMA" {
    rm -r "$TREE/proc/driver/nvidia-fs" "$TREE/proc/sys/kernel/arch"
    sed -i 's/ for x86_64//' "$TREE/proc/driver/nvidia/version"
    run "$DOCTOR" /data
    exits 1
    row unsure p2pdma arch
}

@test "what the configuration denies is not native" {
    for deny in '"devices": ["/dev/nvme0n1"]' '"devices": ["/dev/nvme0n1p1"]' '"mounts": ["/data/"]' '"filesystems": ["lustre", "ext4"]'; do
        for word in denylist blacklist; do
            printf '{"properties": {"use_pci_p2pdma": true}, "block": {"nvme": {"use_pci_p2pdma": true}}, "%s": {%s}}\n' \
                "$word" "$deny" >"$TREE/etc/cufile.json"
            run "$DOCTOR" /data
            exits 10
            row FAIL both denylist
        done
    done
    printf '{"denylist": {"drivers": ["nvme"], "devices": ["/dev/nvme0n10"], "mounts": ["/dat"], "filesystems": []}}\n' >"$TREE/etc/cufile.json"
    run "$DOCTOR" /data
    exits 10
    row FAIL nvidia-fs denylist
    does_not_say 'both       denylist'
    printf '{"denylist": {"drivers": ["nvme_rdma"], "devices": ["/dev/nvme0n10"], "mounts": ["/dat", "/"], "filesystems": []}}\n' >"$TREE/etc/cufile.json"
    run "$DOCTOR" /data
    exits 0
    mkdir "$TREE/data/sub"
    printf '{"denylist": {"mounts": ["/data/sub"]}}\n' >"$TREE/etc/cufile.json"
    run "$DOCTOR" /data/sub
    exits 1
    row unsure both denylist
}

# slow
@test "true as a string, and a dot in a key, are not what cuFile wants" {
    rm -r "$TREE/proc/driver/nvidia-fs"
    printf '{"properties": {"use_pci_p2pdma": "true"}, "block": {"nvme": {"use_pci_p2pdma": true}}}\n' >"$TREE/etc/cufile.json"
    run "$DOCTOR" /data
    exits 10
    row FAIL p2pdma use-p2pdma
    printf '{"properties": {"use_pci_p2pdma": true}, "block": {"nvme": {"use_pci_p2pdma": "true"}}}\n' >"$TREE/etc/cufile.json"
    run "$DOCTOR" /data
    exits 10
    row FAIL p2pdma block-p2pdma
    printf '{"properties": {"use_pci_p2pdma": true}, "block.nvme": {"use_pci_p2pdma": true}}\n' >"$TREE/etc/cufile.json"
    run "$DOCTOR" /data
    exits 10
    # Written twice, the last one counts.
    printf '{"properties": {"use_pci_p2pdma": "x", "use_pci_p2pdma": true}, "block": {"nvme": {"use_pci_p2pdma": true}}}\n' >"$TREE/etc/cufile.json"
    run "$DOCTOR" /data
    exits 0
}

# slow
@test "kallsyms without data symbols still shows P2PDMA" {
    rm "$TREE"/boot/config-*
    printf '0000000000000000 T pci_p2pdma_add_resource\n' >"$TREE/proc/kallsyms"
    run "$DOCTOR" /data
    row ok p2pdma kernel-config
    printf '0000000000000000 T pci_p2pdma_add_resource_not\n' >"$TREE/proc/kallsyms"
    run "$DOCTOR" /data
    row FAIL p2pdma kernel-config
}

# slow
@test "nvidia-fs without its devices, as in a container: closed" {
    rm "$TREE/dev/nvidia-fs0" "$TREE/etc/cufile.json"
    : >"$TREE/.dockerenv"
    run "$DOCTOR" /data
    exits 10
    row FAIL nvidia-fs nvidia-fs-device
    says -- '--device'
    rm -r "$TREE/dev"
    run "$DOCTOR" /data
    exits 1
}

@test "--probe never takes the last of a disk, and a full one is no missing O_DIRECT" {
    printf '#!/bin/sh\n: >"%s/asked"\n' "$BOX" >"$BOX/trap/dd"
    printf '#!/bin/sh\necho "4000 4096"\n' >"$BOX/trap/stat"
    chmod +x "$BOX/trap/dd" "$BOX/trap/stat"
    run "$DOCTOR" --probe /data
    exits 0
    row note info probe
    says 'so nothing was written'
    [ ! -e "$BOX/asked" ]
    [ -z "$(ls -A "$TREE/data")" ]
}

@test "the Python that is asked imports nothing from the working folder" {
    mkdir "$BOX/cwd"
    printf 'open("%s/imported", "w")\n' "$BOX" | tee "$BOX/cwd/kvikio.py" >"$BOX/cwd/importlib.py"
    cd "$BOX/cwd"
    run "$DOCTOR" --python python3 /data
    exits 0
    [ ! -e "$BOX/imported" ]
}

@test "a bare shell: no HOME, noclobber, failglob, CDPATH, and a link to the script" {
    ln -s "$DOCTOR" "$BOX/doctor"
    cd "$BOX"
    run env -i PATH="$PATH" GDS_SYSROOT="$TREE" TRAP_LOG="$TRAP_LOG" SHELLOPTS=noclobber:noglob BASHOPTS=failglob CDPATH="$SETUP_DIR/..:/" ./doctor --no-python /data
    exits 0
    verdict p2pdma
    cd "$SETUP_DIR/../.."
    CDPATH=$PWD run bash shell_scripts/server_setup/gds_doctor.sh --no-python /data
    verdict p2pdma
}
