#!/usr/bin/env bats
# check_nvme_mount.sh on pretended servers.
load helpers

setup() {
    common_setup
    use_tree
    CHECK=$SETUP_DIR/check_nvme_mount.sh
}
teardown() { common_teardown; }

UUID=0f0e0d0c-1111-2222-3333-444455556666

@test "ext4 with data=ordered: nothing to change" {
    run "$CHECK" /data
    exits 0
    says "fstab: UUID=$UUID /data ext4 defaults,noatime,data=ordered 0 2"
    says 'transport:   pcie'
    says 'multipath:   N'
    says 'RAID:        none'
    says 'dm-crypt:    none'
    does_not_say change:
}

@test "ext4 without it: the line is recommended, its other options stay" {
    change unmount_all -- mount point=/data number=259:1 fstype=ext4 source=/dev/nvme0n1p1 options=rw,nosuid,nodev,noatime super_options=rw,discard,stripe=4,errors=remount-ro
    run "$CHECK" /data
    exits 3
    says 'change: ext4 is mounted without an explicit data=ordered'
    says "fstab: UUID=$UUID /data ext4 defaults,nosuid,nodev,noatime,discard,data=ordered 0 2"
}

@test "no disk that can be seen is not a disk without faults: exit 1" {
    change data fstype=xfs number=0:50 source=anonymous
    run "$CHECK" /data
    exits 1
    says 'unknown: no disk below /data is known to /sys'
    change md level=weird -- data number=9:0 source=/dev/md0
    rm "$TREE/sys/class/block/md0/md/level"
    run "$CHECK" /data
    exits 1
    says 'unknown: the level of an md array cannot be read'
}

@test "XFS" {
    change data fstype=xfs super_options=rw,inode64,logbufs=8
    run "$CHECK" /data
    exits 0
    says "fstab: UUID=$UUID /data xfs defaults,inode64,noatime 0 0"
}

@test "UUID from udev, and none at all" {
    rm -r "$TREE/dev/disk"
    printf 'S:disk/x\nE:ID_FS_UUID=aaaa-bbbb\n' >"$TREE/run/udev/data/b259:1"
    run "$CHECK" /data
    says 'fstab: UUID=aaaa-bbbb /data'
    rm "$TREE/run/udev/data/b259:1"
    run "$CHECK" /data
    says 'fstab: /dev/nvme0n1p1 /data'
    says 'can change from boot to boot'
}

@test "blanks in the mount point are escaped in the line, and JSON holds the name" {
    for name in '/da ta' $'/ta\tb' '/back\slash' '/ha#sh' "/q'\"uote"; do
        change data "point=$name"
        run "$CHECK" --json "$name"
        exits 0
        python3 -c '
import json, sys
r = json.load(sys.stdin)
assert r["mount_point"] == r["dir"] == sys.argv[1], r
fields = r["fstab"].split()
assert len(fields) == 6, fields
assert fields[1].encode().decode("unicode_escape") == sys.argv[1], fields' "$name" <<<"$output"
    done
}

@test "RAID, dm-crypt, LVM, SATA, NVMe over TCP" {
    change md -- data number=9:0 source=/dev/md0
    run "$CHECK" /data
    exits 0
    says 'RAID:        raid0'
    says 'open to nvidia-fs only'
    change md level=raid6 -- data number=9:0 source=/dev/md0
    run "$CHECK" /data
    exits 3
    change dm uuid=CRYPT-LUKS2-1-x -- data number=252:0 source=/dev/mapper/x
    run "$CHECK" /data
    exits 3
    says 'dm-crypt:    dm-0'
    change dm uuid=LVM-x -- data number=252:0 source=/dev/mapper/x
    run "$CHECK" /data
    exits 0
    says 'device-mapper volume'
    change data number=8:1 source=/dev/sda1
    run "$CHECK" /data
    exits 3
    says 'no NVMe disk: sda'
    change nvme transport=tcp -- data
    run "$CHECK" /data
    exits 3
    says 'transport is tcp'
    change nvme transport=rdma
    run "$CHECK" /data
    exits 0
    says 'not to P2PDMA'
}

@test "overlay, NFS, tmpfs: no line would help" {
    for fs in overlay nfs4 tmpfs; do
        change data fstype=$fs number=0:50 source=$fs
        run "$CHECK" /data
        exits 3
        does_not_say fstab:
    done
}

@test "multipath on is noted" {
    echo Y >"$TREE/sys/module/nvme_core/parameters/multipath"
    run "$CHECK" /data
    exits 0
    says 'NVMe multipath is on'
}

@test "the root file system, a bind mount" {
    change unmount_all
    sed -i 's/8:1 \(.*\)\/dev\/sda1 rw/259:1 \1\/dev\/nvme0n1p1 rw/' "$TREE/proc/self/mountinfo"
    run "$CHECK" /data
    exits 3
    says 'mounted before /etc/fstab is read'
    says ' / ext4 defaults,noatime,data=ordered 0 1'
    change unmount_all -- mount point=/data number=259:1 fstype=ext4 source=/dev/nvme0n1p1 'root=/a b' super_options=rw,data=ordered
    run "$CHECK" /data
    exits 0
    says 'shows only the folder /a b'
}

@test "unknown: mountinfo or the device cannot be told" {
    change data number=259:77
    run "$CHECK" /data
    exits 1
    says 'unknown: block device 259:77'
    rm "$TREE/proc/self/mountinfo"
    run "$CHECK" /data
    exits 1
    run "$CHECK" --json /data
    exits 1
    python3 -c 'import json,sys; assert json.load(sys.stdin)["exit_code"] == 1' <<<"$output"
    change data
    find "$TREE/sys" -name transport -delete
    run "$CHECK" /data
    exits 1
}

@test "it edits nothing, and wrong usage is one line" {
    echo '# mine' >"$TREE/etc/fstab"
    before=$(fingerprint "$TREE")
    run "$CHECK" /data
    [ "$before" = "$(fingerprint "$TREE")" ]
    run "$CHECK"
    one_clear_line
    run "$CHECK" /none
    one_clear_line
    says "'/none'"
    run "$CHECK" /data /data
    one_clear_line
    run "$CHECK" --nonsense
    one_clear_line
    run "$CHECK" --help
    exits 0
    says '3 something to change'
}

@test "what only /etc/fstab knows stays in the line" {
    change data super_options=rw
    printf '# /data ext4\nUUID=old /data/ ext4 nofail,x-systemd.device-timeout=5,data=writeback 1 2\n/dev/x /other ext4 noexec 0 2\n' >"$TREE/etc/fstab"
    run "$CHECK" /data
    exits 3
    says 'fstab: UUID=0f0e0d0c-1111-2222-3333-444455556666 /data ext4 nofail,x-systemd.device-timeout=5,data=ordered 1 2'
    printf 'UUID=old /data ext4 data=journal\n' >"$TREE/etc/fstab"
    run "$CHECK" /data
    says '/data ext4 defaults,data=ordered 0 0'
}
