# shellcheck shell=bash
# Shared by the .bats files: a copy of the pretended server for each test, a PATH on which
# every program that could change a machine is a trap, and checks that say what they saw.

SETUP_DIR=$(cd "$BATS_TEST_DIRNAME/../../shell_scripts/server_setup" && pwd)
FAKETREE=$BATS_TEST_DIRNAME/faketree.py
TRAPPED="sudo su doas pkexec dkms modprobe insmod rmmod depmod kmod apt apt-get apt-cache aptitude dpkg dnf yum rpm
zypper snap pip curl wget nc ssh scp git mount umount losetup reboot shutdown poweroff systemctl service update-grub
grub-install grub-mkconfig grubby kernelstub update-initramfs dracut mkinitcpio mkfs mkfs.ext4 mkfs.xfs mke2fs parted
fdisk sfdisk wipefs mdadm cryptsetup lvcreate nvme mokutil kmodsign sbsign update-secureboot-policy tune2fs nvidia-smi"

# Once for each file: the traps, and the pretended server that use_tree copies.
setup_file() {
    SHARED=$(mktemp -d "${BATS_TMPDIR:-/tmp}/gds.XXXXXX")
    export SHARED
    mkdir "$SHARED/trap"
    local name
    for name in $TRAPPED; do
        printf '#!/bin/sh\nprintf "%%s %%s\\n" "${0##*/}" "$*" >>"$TRAP_LOG"\nexit 97\n' >"$SHARED/trap/$name"
    done
    chmod +x "$SHARED/trap"/*
    # The program itself, where python3 is a script that looks for it.
    ln -s "$(python3 -c 'import sys; print(sys.executable)')" "$SHARED/trap/python3"
    python3 "$FAKETREE" "$SHARED/tree" both_ways
}

teardown_file() {
    rm -rf "$SHARED"
}

common_setup() {
    BOX=$(mktemp -d "${BATS_TMPDIR:-/tmp}/gds.XXXXXX")
    TREE=$BOX/tree
    export TRAP_LOG=$BOX/trapped
    # A test puts programs of its own before the traps.
    mkdir "$BOX/trap"
    PATH=$BOX/trap:$SHARED/trap:$PATH
    unset KVIKIO_COMPAT_MODE CUFILE_ENV_PATH_JSON CUFILE_FORCE_COMPAT_MODE CUFILE_ALLOW_COMPAT_MODE
    unset CUFILE_USE_PCIP2PDMA LD_LIBRARY_PATH GDS_SYSROOT
}

# Every test ends here, so every test proves that no trap was called.
common_teardown() {
    local called=
    [ ! -e "$TRAP_LOG" ] || called=$(cat "$TRAP_LOG")
    rm -rf "$BOX"
    if [ -n "$called" ]; then
        echo "called what it must not call: $called"
        return 1
    fi
}

# The pretended server on which both ways are open.
use_tree() {
    cp -a "$SHARED/tree" "$TREE"
    export GDS_SYSROOT=$TREE
}

change() {
    "$SHARED/trap/python3" -IS "$FAKETREE" "$TREE" "$@"
}

exits() {
    [ "$status" -eq "$1" ] || {
        echo "exit $status, expected $1; it said:"
        echo "$output"
        return 1
    }
}

says() {
    case $output in
        *"$1"*) ;;
        *)
            echo "did not say: $1"
            echo "$output"
            return 1
            ;;
    esac
}

does_not_say() {
    case $output in
        *"$1"*)
            echo "said: $1"
            echo "$output"
            return 1
            ;;
    esac
}

# Its first line is the verdict.
verdict() {
    [ "${lines[0]}" = "path=$1" ] || {
        echo "expected path=$1, got:"
        echo "$output"
        return 1
    }
}

# One line of text, and exit 2: how every wrong usage ends.
one_clear_line() {
    exits 2 && [ "${#lines[@]}" -eq 1 ] || {
        echo "expected one line and exit 2, got $status: $output"
        return 1
    }
}

# A row of the doctor's table: STATUS WAY PRECONDITION.
row() {
    local line
    for line in "${lines[@]}"; do
        # shellcheck disable=SC2086 # words
        set -- "$1" "$2" "$3" $line
        if [ "$4" = "$1" ] && [ "$5" = "$2" ] && [ "$6" = "$3" ]; then return 0; fi
        set -- "$1" "$2" "$3"
    done
    echo "no row: $1 $2 $3"
    echo "$output"
    return 1
}

# Content, mode and names of everything below a folder.
fingerprint() {
    (cd "$1" && find . -printf '%p %m %y %l\n' | sort && find . -type f -print0 | sort -z | xargs -0 sha256sum)
}
